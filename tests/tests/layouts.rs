//! Storage pools of a pool that reports them: in listings, and in the policy.

use std::time::Duration;

use forebay_backends::decorators::{CallKind, Odds};
use forebay_backends::memory::MemoryPool;
use forebay_backends::{Capabilities, ErrorKind, Layout, Pool, PoolPath, Stripe};
use forebay_engine::{Options, Overlay, Policy};
use forebay_tests::engine::*;

/// A pool whose root is in storage pool 1, and whose directory `quick` is in storage pool 2.
async fn fixture() -> Fixture {
    let capabilities = Capabilities { layouts: true, ..MemoryPool::all_capabilities() };
    let fixture = Fixture::over(MemoryPool::with_capabilities(capabilities));
    fixture.mkdir("quick").await;
    for (path, pool) in [(PoolPath::root(), "1"), (pool_path("quick"), "2")] {
        let stripe = Some(Stripe { chunk_bytes: 1 << 20, targets: 4 });
        let layout = Layout { stripe, storage_pool: Some(pool.into()), is_storage_pool_untold: false };
        fixture.memory.set_layout(&path, layout);
    }
    fixture
}

async fn open(fixture: &Fixture, policy: &str) -> Overlay {
    let policy = Policy::parse(policy).unwrap();
    Overlay::open(Options { policy, ..fixture.options() }).await.unwrap()
}

/// Returns how often the pool was asked for a layout.
fn asked(fixture: &Fixture) -> u64 {
    fixture.metrics.snapshot().of(CallKind::Layout).count
}

const BY_POOL: &str = "[default]\nflush = \"manual\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n\
                       [storage-pools]\n2 = \"fast\"\n\
                       [[rule]]\nstorage-pool = \"fast\"\nflush = \"on-close\"\n";

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_by_storage_pool_holds_for_what_is_in_it_and_what_is_made_there() {
    let fixture = fixture().await;
    fixture.put("quick/old", b"old").await;
    fixture.put("old", b"old").await;
    let overlay = open(&fixture, BY_POOL).await;
    for path in ["quick/old", "quick/new", "old", "new"] {
        write(&overlay, path, "ours").await.unwrap();
    }
    let dirty: Vec<String> = overlay.dirty().await.unwrap().into_iter().map(|d| d.path).collect();
    assert_eq!(dirty.iter().filter(|path| path.contains("quick/")).count(), 0, "{dirty:?}");
    assert!(dirty.contains(&"/old".into()) && dirty.contains(&"/new".into()), "{dirty:?}");
    let before = asked(&fixture);
    for _ in 0..5 {
        write(&overlay, "old", "ours again").await.unwrap();
    }
    assert_eq!(asked(&fixture), before, "the same thing was asked for again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_that_is_new_here_is_in_the_storage_pool_of_the_one_above_it() {
    let fixture = fixture().await;
    let overlay = open(&fixture, BY_POOL).await;
    let parent = find(&overlay, "quick").await;
    overlay.mkdir(parent, b"d", 0o755, 0, CALLER).await.unwrap();
    write(&overlay, "quick/d/f", "ours").await.unwrap();
    assert!(fixture.pooled().contains(&("/quick/d/f".into(), "ours".into())), "{:?}", fixture.pooled());
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_flushed_by_the_default_while_its_storage_pool_is_not_known() {
    let mut fixture = fixture().await;
    let policy = |idle: &str| {
        format!(
            "[default]\nflush = \"{idle}\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n\
             [[rule]]\nstorage-pool = \"2\"\nflush = \"manual\"\n"
        )
    };
    let overlay = open(&fixture, &policy("manual")).await;
    write(&overlay, "quick/f", "ours").await.unwrap();
    write(&overlay, "f", "ours").await.unwrap();
    let after = tempfile::tempdir().unwrap();
    overlay.shutdown().await.unwrap();
    image(fixture.fast.path(), after.path());
    fixture.fast = after;
    // A daemon that has just started does not know a storage pool yet.
    let overlay = open(&fixture, &policy("idle:0s")).await;
    for _ in 0..100 {
        if fixture.pooled().contains(&("/f".into(), "ours".into())) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(fixture.pooled(), pairs(&[("/f", "ours"), ("/quick/", "")]));
    drop(overlay);
}

#[tokio::test(flavor = "multi_thread")]
async fn listings_show_the_storage_pool_by_the_name_that_it_was_given() {
    let fixture = fixture().await;
    fixture.put("quick/f", b"x").await;
    fixture.put("g", b"x").await;
    let overlay = open(&fixture, BY_POOL).await;
    let listed = async |path: &str, recursive| {
        let listed = overlay.list_residency(&PoolPath::parse(path).unwrap(), recursive).await.unwrap();
        listed.into_iter().map(|l| (l.path, l.storage_pool)).collect::<Vec<_>>()
    };
    let in_pool = |path: &str, pool: &str| (path.to_owned(), Some(pool.to_owned()));
    let expected = [in_pool("/g", "1"), in_pool("/quick", "fast"), in_pool("/quick/f", "fast")];
    let mut all = listed("", true).await;
    all.sort();
    assert_eq!(all, expected);
    assert_eq!(listed("g", false).await, expected[..1]);
    assert_eq!(asked(&fixture), 3, "once for each");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_fails_to_tell_has_files_like_any_other() {
    let fixture = fixture().await;
    fixture.put("quick/f", b"x").await;
    let overlay = open(&fixture, BY_POOL).await;
    find(&overlay, "quick/f").await;
    fixture.fault.set_error(ErrorKind::PermissionDenied);
    fixture.fault.set_odds(CallKind::Layout, Odds { before: 1.0, after: 0.0 });
    let listed = overlay.list_residency(&pool_path("quick"), false).await.unwrap();
    assert_eq!(listed.iter().map(|l| l.storage_pool.clone()).collect::<Vec<_>>(), [None]);
    assert_eq!(read(&overlay, "quick/f").await.unwrap(), "x");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_tells_no_layouts_is_never_asked() {
    let fixture = Fixture::new();
    fixture.put("f", b"x").await;
    let overlay = open(&fixture, BY_POOL).await;
    write(&overlay, "f", "ours").await.unwrap();
    let listed = overlay.list_residency(&PoolPath::root(), true).await.unwrap();
    assert_eq!(listed[0].storage_pool, None);
    assert_eq!(asked(&fixture), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_striped_file_is_fetched_by_whole_stripes() {
    let fixture = fixture().await;
    let content: Vec<u8> = (0..(7 << 20) + 5).map(|n| (n % 251) as u8).collect();
    fixture.put("striped", &content).await;
    let stripe = Some(Stripe { chunk_bytes: 2 << 20, targets: 4 });
    // The pool tells the stripe, but fails to tell the storage pool.
    let layout = Layout { stripe, storage_pool: None, is_storage_pool_untold: true };
    fixture.memory.set_layout(&pool_path("striped"), layout);
    let overlay = open(&fixture, BY_POOL).await;
    let before = fixture.metrics.snapshot().of(CallKind::Read).count;
    let (staged, failed) = stage(&overlay, "striped").await;
    assert_eq!((staged.bytes, failed), (content.len() as u64, Vec::new()));
    assert_eq!(fixture.metrics.snapshot().of(CallKind::Read).count - before, 4, "requests for four stripes");
    assert_eq!(read(&overlay, "striped").await.unwrap().len(), String::from_utf8_lossy(&content).len());
}

/// Starts another daemon on what the fast pool has. It does not know storage pools yet.
async fn restart(fixture: &mut Fixture, overlay: Overlay, policy: &str) -> Overlay {
    let after = tempfile::tempdir().unwrap();
    overlay.shutdown().await.unwrap();
    image(fixture.fast.path(), after.path());
    fixture.fast = after;
    drop(overlay);
    open(fixture, policy).await
}

const LOCAL_BY_POOL: &str = "[default]\nflush = \"manual\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n\
                             [[rule]]\nstorage-pool = \"2\"\nwrite = \"local\"\n";

/// SEMANTICS 85: "A file that is made under `write = "local"` never reaches the pool, not even by request"
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_local_by_its_storage_pool_stays_so_after_a_restart() {
    let mut fixture = fixture().await;
    let overlay = open(&fixture, LOCAL_BY_POOL).await;
    for path in ["quick/f", "f"] {
        write(&overlay, path, "ours").await.unwrap();
    }
    let overlay = restart(&mut fixture, overlay, LOCAL_BY_POOL).await;
    assert_eq!(flush(&overlay).await.failed, 0);
    assert_eq!(fixture.pooled(), pairs(&[("/f", "ours"), ("/quick/", "")]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_may_be_local_is_not_sent_while_the_pool_fails_to_tell_its_storage_pool() {
    let mut fixture = fixture().await;
    let overlay = open(&fixture, LOCAL_BY_POOL).await;
    write(&overlay, "quick/f", "ours").await.unwrap();
    // Before the daemon starts: it may learn the storage pool at once.
    fixture.fault.set_odds(CallKind::Layout, Odds { before: 1.0, after: 0.0 });
    let overlay = restart(&mut fixture, overlay, LOCAL_BY_POOL).await;
    assert!(flush(&overlay).await.failed > 0, "it is not reported");
    assert_eq!(fixture.pooled(), pairs(&[("/quick/", "")]));
    assert_eq!(read(&overlay, "quick/f").await.unwrap(), "ours");
}

/// SEMANTICS 85: "It is removed when the last job that used it ends, if one of these jobs made or wrote it, or belongs to its
/// owner." A daemon that has just started does not know its storage
/// pool, and must not take it for a file that is not local.
#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_job_asks_for_the_storage_pool_of_what_it_may_remove() {
    let mut fixture = fixture().await;
    let overlay = open(&fixture, LOCAL_BY_POOL).await;
    write(&overlay, "quick/f", "ours").await.unwrap();
    fixture.fault.set_error(ErrorKind::Unavailable);
    fixture.fault.set_odds(CallKind::Layout, Odds { before: 1.0, after: 0.0 });
    let overlay = restart(&mut fixture, overlay, LOCAL_BY_POOL).await;
    let ino = find(&overlay, "quick/f").await;
    let error = refused(overlay.job_ended(&mut job_that_made(&[ino])).await);
    assert!(error.tells_nothing(), "the end of the job has to be tried again: {error}");
    fixture.fault.set_odds(CallKind::Layout, Odds::default());
    overlay.job_ended(&mut job_that_made(&[ino])).await.unwrap();
    assert!(read(&overlay, "quick/f").await.is_err(), "it is removed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_in_a_directory_that_another_client_removed_is_flushed_all_the_same() {
    let mut fixture = fixture().await;
    fixture.mkdir("gone").await;
    let overlay = open(&fixture, LOCAL_BY_POOL).await;
    write(&overlay, "gone/f", "ours").await.unwrap();
    let overlay = restart(&mut fixture, overlay, LOCAL_BY_POOL).await;
    fixture.memory.remove_dir(&pool_path("gone")).await.unwrap();
    flushed(&overlay).await;
    assert_eq!(in_pool(&fixture, "gone/f").as_deref(), Some(&b"ours"[..]));
}

const PINNED_BY_POOL: &str = "[default]\nflush = \"manual\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n\
                              [[rule]]\nstorage-pool = \"2\"\nread = \"pin\"\n";

async fn resident(overlay: &Overlay, path: &str) -> u64 {
    overlay.list_residency(&PoolPath::parse(path).unwrap(), false).await.unwrap()[0].resident_bytes
}

/// SEMANTICS 86: "Content that a rule pins is not evicted to make room."
#[tokio::test(flavor = "multi_thread")]
async fn content_that_is_pinned_by_its_storage_pool_stays_after_a_restart_and_the_other_makes_room() {
    const SIZE: usize = 3 << 20;
    let mut fixture = fixture().await;
    for path in ["quick/pinned", "a", "b", "c"] {
        fixture.put(path, &vec![b'x'; SIZE]).await;
    }
    let limited = async |fixture: &Fixture| {
        let policy = || Policy::parse(PINNED_BY_POOL).unwrap();
        opened(|| Options { limit_bytes: Some(10 << 20), policy: policy(), ..fixture.options() }).await
    };
    let overlay = limited(&fixture).await;
    for path in ["quick/pinned", "a", "b"] {
        read(&overlay, path).await.unwrap();
    }
    overlay.shutdown().await.unwrap();
    let after = tempfile::tempdir().unwrap();
    image(fixture.fast.path(), after.path());
    fixture.fast = after;
    drop(overlay);
    let overlay = limited(&fixture).await;
    // Nothing is known of what is to make room for it.
    read(&overlay, "c").await.unwrap();
    assert_eq!(resident(&overlay, "quick/pinned").await, SIZE as u64);
    assert_eq!(resident(&overlay, "c").await, SIZE as u64);
}
