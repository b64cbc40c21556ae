//! Files and directories that another client or a program removed while they were in use, and trees that another client
//! moved.

use forebay_backends::decorators::CallKind;
use forebay_backends::{ErrorKind, Expected, Pool, RenameMode, Time};
use forebay_engine::{Change, Ino, Lookup, Options, Overlay, Policy, SetTime};
use forebay_tests::engine::*;
use forebay_tests::held::open_held;

/// More than the stack of a thread has room for, with one call for each.
const LEVELS: usize = 2500;
/// More than one change of the catalog forgets.
const NAMES: usize = 2500;

async fn found(overlay: &Overlay, parent: Ino, name: &[u8]) -> Ino {
    match overlay.lookup(parent, name).await.unwrap() {
        Lookup::Found(entry) => entry.attr.ino,
        Lookup::Negative { .. } => panic!("{} is not there", name.escape_ascii()),
    }
}

async fn is_absent(overlay: &Overlay, parent: Ino, name: &[u8]) -> bool {
    matches!(overlay.lookup(parent, name).await.unwrap(), Lookup::Negative { .. })
}

/// Renames in the pool, as another client does.
async fn moved_in_pool(fixture: &Fixture, from: &str, to: &str) {
    fixture.memory.rename(&pool_path(from), &pool_path(to), RenameMode::NoReplace).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tree_of_any_depth_is_forgotten_when_another_client_moves_it() {
    let fixture = Fixture::new();
    let overlay = fixture.open().await;
    let (mut path, mut dir) = (String::new(), Ino::ROOT);
    for level in 0..LEVELS {
        path = if level == 0 { "d".into() } else { format!("{path}/d") };
        fixture.mkdir(&path).await;
        dir = found(&overlay, dir, b"d").await;
    }
    moved_in_pool(&fixture, "d", "elsewhere").await;
    assert!(is_absent(&overlay, Ino::ROOT, b"d").await);
    overlay.forget(dir, 1);
    assert!(refused(overlay.getattr(dir).await).is(ErrorKind::Stale), "the deepest directory is still known");
}

/// Other requests wait for a change, and all of it is in memory.
#[tokio::test(flavor = "multi_thread")]
async fn the_names_of_a_large_directory_are_forgotten_by_several_changes() {
    for is_listed in [false, true] {
        let fixture = Fixture::new();
        fixture.mkdir("d").await;
        fixture.mkdir("d/big").await;
        for at in 0..NAMES {
            fixture.put(&format!("d/big/{at}"), b"").await;
        }
        let overlay = fixture.open().await;
        let dir = find(&overlay, "d").await;
        let big = found(&overlay, dir, b"big").await;
        overlay.read_dir(big).await.unwrap();
        overlay.read_dir(dir).await.unwrap();
        let first = found(&overlay, big, b"0").await;
        moved_in_pool(&fixture, "d/big", "elsewhere").await;
        // A listing first records the news of its directory. The first change that forgets names is written, and the second
        // one is not.
        fixture.catalog_faults.fail_write(if is_listed { 3 } else { 2 });
        let error = match is_listed {
            true => refused(overlay.read_dir(dir).await),
            false => refused(overlay.lookup(dir, b"big").await),
        };
        assert!(error.is(ErrorKind::NoSpace), "{error}");
        assert!(is_absent(&overlay, dir, b"big").await);
        overlay.forget(first, 1);
        assert!(refused(overlay.getattr(first).await).is(ErrorKind::Stale), "a file is still known");
        assert_eq!(overlay.read_dir(dir).await.unwrap().entries.len(), 0);
    }
}

/// What is forgotten only in part is listed again where it is found again.
#[tokio::test(flavor = "multi_thread")]
async fn a_tree_that_comes_back_while_it_is_forgotten_has_all_its_names() {
    let fixture = Fixture::new();
    for dir in ["d", "d/big"] {
        fixture.mkdir(dir).await;
    }
    for at in 0..NAMES {
        fixture.put(&format!("d/big/{at}"), b"").await;
    }
    let overlay = fixture.open().await;
    let dir = find(&overlay, "d").await;
    let big = found(&overlay, dir, b"big").await;
    overlay.read_dir(big).await.unwrap();
    moved_in_pool(&fixture, "d/big", "elsewhere").await;
    fixture.catalog_faults.fail_write(2);
    refused(overlay.lookup(dir, b"big").await);
    moved_in_pool(&fixture, "elsewhere", "d/big").await;
    let big = found(&overlay, dir, b"big").await;
    assert_eq!(overlay.read_dir(big).await.unwrap().entries.len(), NAMES);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_small_directories_that_another_client_removed_are_forgotten_by_several_changes() {
    const DIRS: usize = 1500;
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    let overlay = fixture.open().await;
    for at in 0..DIRS {
        fixture.mkdir(&format!("d/{at}")).await;
        for name in ["a", "b", "c"] {
            fixture.put(&format!("d/{at}/{name}"), b"").await;
        }
    }
    let dir = find(&overlay, "d").await;
    overlay.read_dir(dir).await.unwrap();
    for at in 0..DIRS {
        overlay.read_dir(found(&overlay, dir, at.to_string().as_bytes()).await).await.unwrap();
    }
    for at in 0..DIRS {
        moved_in_pool(&fixture, &format!("d/{at}"), &format!("elsewhere{at}")).await;
    }
    // These are 6000 names: four changes after the news of the directory are not enough.
    fixture.catalog_faults.fail_write(6);
    _ = overlay.read_dir(dir).await;
    assert!(fixture.catalog_faults.has_failed(), "a change forgot more than a thousand names");
    assert_eq!(overlay.read_dir(dir).await.unwrap().entries.len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_names_that_another_client_removed_are_forgotten_by_several_changes() {
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    for at in 0..NAMES {
        fixture.put(&format!("d/{at}"), b"").await;
    }
    let overlay = fixture.open().await;
    let dir = find(&overlay, "d").await;
    overlay.read_dir(dir).await.unwrap();
    for at in 0..NAMES {
        fixture.memory.remove(&pool_path(&format!("d/{at}")), &Expected::Anything).await.unwrap();
    }
    // After the news of the directory and two changes that forget names.
    fixture.catalog_faults.fail_write(4);
    _ = overlay.read_dir(dir).await;
    assert!(fixture.catalog_faults.has_failed(), "all names were forgotten by one change");
    assert_eq!(overlay.read_dir(dir).await.unwrap().entries.len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_written_in_a_tree_that_another_client_moved_goes_to_its_old_place() {
    let fixture = Fixture::new();
    for dir in ["d", "d/kept", "d/kept/below", "d/gone"] {
        fixture.mkdir(dir).await;
    }
    for at in 0..NAMES {
        fixture.put(&format!("d/kept/{at}"), b"").await;
    }
    let overlay = fixture.open().await;
    for dir in ["d", "d/gone", "d/kept", "d/kept/below"] {
        overlay.read_dir(find(&overlay, dir).await).await.unwrap();
    }
    write(&overlay, "d/kept/below/new", "new").await.unwrap();
    moved_in_pool(&fixture, "d", "elsewhere").await;
    assert_eq!(read(&overlay, "d/kept/below/new").await.unwrap(), "new");
    flushed(&overlay).await;
    let here: Vec<_> = fixture.pooled().into_iter().filter(|(path, _)| !path.starts_with("/elsewhere")).collect();
    let wanted = [("/d/", ""), ("/d/kept/", ""), ("/d/kept/below/", ""), ("/d/kept/below/new", "new")];
    assert_eq!(here, pairs(&wanted));
    assert_eq!(overlay.read_dir(find(&overlay, "d/kept").await).await.unwrap().entries.len(), 1);
}

/// Opens an overlay on a pool with `d/f`, and lets another client move `d` while an answer of this kind is held. Returns
/// what `ask` for `d` returns.
async fn asked_while_it_vanishes<T>(kind: CallKind, ask: impl AsyncFnOnce(&Overlay, Ino) -> T) -> T {
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    fixture.put("d/f", b"x").await;
    let (overlay, held) = open_held(&fixture).await;
    let dir = found(&overlay, Ino::ROOT, b"d").await;
    held.hold_answers(1, move |call| call.kind == kind);
    let moving = async {
        held.until_waiting(1).await;
        moved_in_pool(&fixture, "d", "elsewhere").await;
        assert!(is_absent(&overlay, Ino::ROOT, b"d").await);
        held.release();
    };
    tokio::join!(ask(&overlay, dir), moving).0
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_adds_nothing_to_a_directory_that_vanished_meanwhile() {
    let listed = asked_while_it_vanishes(CallKind::List, async |overlay, dir| overlay.read_dir(dir).await).await;
    assert_eq!(listed.unwrap().entries.len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lookup_adds_nothing_to_a_directory_that_vanished_meanwhile() {
    let found = asked_while_it_vanishes(CallKind::Stat, async |overlay, dir| overlay.lookup(dir, b"f").await).await;
    assert!(matches!(found.unwrap(), Lookup::Negative { .. }));
}

/// SEMANTICS 6: "never zeros in place of bytes that are not resident"
#[tokio::test(flavor = "multi_thread")]
async fn a_file_without_names_is_linked_only_if_its_content_is_here() {
    let fixture = Fixture::new();
    fixture.put("theirs", b"content").await;
    fixture.put("ours", b"content").await;
    let policy = "[default]\nflush = \"manual\"\nwhole-file = \"0\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n";
    let policy = Policy::parse(policy).unwrap();
    let overlay = Overlay::open(Options { policy, ..fixture.options() }).await.unwrap();
    let (theirs, ours) = (find(&overlay, "theirs").await, find(&overlay, "ours").await);
    for ino in [theirs, ours] {
        overlay.open_file(ino, RDONLY).await.unwrap();
    }
    fixture.memory.remove(&pool_path("theirs"), &Expected::Anything).await.unwrap();
    assert!(is_absent(&overlay, Ino::ROOT, b"theirs").await);
    assert!(refused(overlay.link(theirs, Ino::ROOT, b"again").await).is(ErrorKind::Stale));
    overlay.unlink(Ino::ROOT, b"ours").await.unwrap();
    flushed(&overlay).await;
    overlay.link(ours, Ino::ROOT, b"again").await.unwrap();
    for ino in [theirs, ours] {
        overlay.release(ino, RDONLY);
    }
    evict(&overlay, true).await;
    flushed(&overlay).await;
    assert_eq!(fixture.pooled(), pairs(&[("/again", "content")]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_a_removed_directory_leaves_nothing_in_the_catalog() {
    let fixture = Fixture::new();
    let overlay = fixture.open().await;
    let dir = overlay.mkdir(Ino::ROOT, b"d", 0o755, 0, CALLER).await.unwrap().attr.ino;
    overlay.rmdir(Ino::ROOT, b"d").await.unwrap();
    // By a handle that a program has of it.
    let change = Change { mode: Some(0o700), ..Change::default() };
    assert_eq!(overlay.setattr(dir, &change, CALLER).await.unwrap().0.mode & 0o777, 0o700);
    overlay.set_xattr(dir, b"user.k", b"v", 0, CALLER).await.unwrap();
    let dirty = overlay.dirty().await.unwrap();
    // The times of the directory above.
    assert!(dirty.iter().all(|file| file.path == "/"), "{dirty:?}");
    overlay.forget(dir, 1);
    assert!(refused(overlay.getattr(dir).await).is(ErrorKind::Stale), "its record came back");
}

/// SEMANTICS 24: "Modes, owners, times to the nanosecond, extended attributes and ACLs reach the pool.", for files whose
/// copy in the pool was not changed here: the fast pool has the only copy that the flush can send.
#[tokio::test(flavor = "multi_thread")]
async fn a_moved_file_that_is_sent_again_has_the_time_that_was_set() {
    let set = Time { secs: 1_000_000_000, nanos: 123_456_789 };
    for is_in_conflict in [false, true] {
        let fixture = Fixture::new();
        fixture.put("a", b"content").await;
        let overlay = fixture.open().await;
        assert_eq!(read(&overlay, "a").await.unwrap(), "content");
        let ino = find(&overlay, "a").await;
        let change = Change { mtime: Some(SetTime::At(set)), ..Change::default() };
        overlay.setattr(ino, &change, CALLER).await.unwrap();
        rename(&overlay, "a", "b").await.unwrap();
        if is_in_conflict {
            // Another client made a file of the new name.
            fixture.put("b", b"another").await;
        } else {
            fixture.memory.remove(&pool_path("a"), &Expected::Anything).await.unwrap();
        }
        flushed(&overlay).await;
        assert_eq!(overlay.getattr(ino).await.unwrap().0.mtime, set, "in conflict: {is_in_conflict}");
        let pooled = fixture.pooled();
        let ours: Vec<_> = pooled.iter().filter(|(_, content)| content == "content").collect();
        assert_eq!(ours.len(), 1, "{pooled:?}");
        assert_eq!(
            fixture.memory.stat(&pool_path(ours[0].0.trim_start_matches('/'))).await.unwrap().mtime,
            set,
            "{pooled:?}"
        );
        overlay.shutdown().await.unwrap();
    }
}
