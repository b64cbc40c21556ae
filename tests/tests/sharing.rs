//! Several requests for one file or one directory at the same time.

use std::sync::Arc;

use bytes::Bytes;
use forebay_api::operator::ContentState;
use forebay_backends::{ErrorKind, Expected, Pool, PoolPath};
use forebay_engine::{Ino, KernelCache, Lookup, Options, Overlay, Policy};
use forebay_tests::engine::*;
use tokio::sync::oneshot;

#[tokio::test(flavor = "multi_thread")]
async fn a_write_to_a_file_that_became_resident_while_it_was_open_is_kept_as_a_conflict() {
    let fixture = Fixture::new();
    fixture.put("a", b"old").await;
    let policy = "[default]\nflush = \"manual\"\nwhole-file = \"0\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n";
    let policy = Policy::parse(policy).unwrap();
    let overlay = Overlay::open(Options { policy, ..fixture.options() }).await.unwrap();
    let ino = find(&overlay, "a").await;
    overlay.open_file(ino, RDWR).await.unwrap();
    assert_eq!(overlay.read(ino, 0, 100).await.unwrap(), &b"old"[..]);
    fixture.put("a", b"theirs").await;
    find(&overlay, "a").await;
    overlay.write(ino, 0, Bytes::from_static(b"our")).await.unwrap();
    overlay.close(ino, true).await.unwrap();
    overlay.release(ino, RDWR);
    flushed(&overlay).await;
    let pooled = fixture.pooled();
    assert_eq!(pooled.iter().map(|(_, content)| content.as_str()).collect::<Vec<_>>(), ["theirs", "our"]);
    assert_eq!(overlay.status().await.conflicts.len(), 1);
}

/// The kernel leaves `O_TRUNC` out of the flags of a release.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_was_opened_to_truncate_it_and_closed_is_not_open() {
    let fixture = Fixture::new();
    fixture.put("a", b"old").await;
    let overlay = fixture.open().await;
    let ino = find(&overlay, "a").await;
    overlay.open_file(ino, libc::O_RDONLY | libc::O_TRUNC).await.unwrap();
    assert_eq!(overlay.status().await.open_files, 1);
    overlay.release(ino, libc::O_RDONLY);
    let flags = libc::O_RDONLY | libc::O_TRUNC;
    let (made, _) = overlay.create(Ino::ROOT, b"b", 0o644, 0, flags, CALLER).await.unwrap();
    overlay.release(made.attr.ino, libc::O_RDONLY);
    assert_eq!(overlay.status().await.open_files, 0);
    flushed(&overlay).await;
    let listed = overlay.list_residency(&PoolPath::root(), true).await.unwrap();
    let states = listed.iter().map(|file| (file.path.as_str(), file.state)).collect::<Vec<_>>();
    assert_eq!(states, [("/a", ContentState::Resident), ("/b", ContentState::Resident)]);
}

/// The second open may run late, and find what the writer has written by then. It must not take that for the pool's
/// content.
#[tokio::test(flavor = "multi_thread")]
async fn two_that_open_a_clean_file_for_writing_at_once_lose_nothing() {
    const FILES: usize = 2000;
    let fixture = Fixture::new();
    let names: Vec<String> = (0..FILES).map(|number| format!("file-{number}")).collect();
    for name in &names {
        fixture.put(name, b"old").await;
    }
    let overlay = Arc::new(fixture.open().await);
    stage(&overlay, "").await;
    for name in &names {
        let ino = find(&overlay, name).await;
        let open = |bytes: Option<&'static [u8]>| {
            let overlay = overlay.clone();
            async move {
                overlay.open_file(ino, RDWR).await.unwrap();
                if let Some(bytes) = bytes {
                    overlay.write(ino, 0, Bytes::from_static(bytes)).await.unwrap();
                }
                overlay.close(ino, true).await.unwrap();
                overlay.release(ino, RDWR);
            }
        };
        let looks: Vec<_> = (0..6).map(|_| tokio::spawn(open(None))).collect();
        tokio::spawn(open(Some(b"new"))).await.unwrap();
        for look in looks {
            look.await.unwrap();
        }
    }
    flushed(&overlay).await;
    let kept: Vec<_> = fixture.pooled().into_iter().filter(|(_, content)| content != "new").collect();
    assert_eq!(kept, pairs(&[]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lookup_that_runs_while_its_directory_is_listed_finds_the_name() {
    const DIRS: usize = 1000;
    const NAMES: usize = 12;
    let fixture = Fixture::new();
    for dir in 0..DIRS {
        fixture.mkdir(&format!("d{dir}")).await;
        for name in 0..NAMES {
            fixture.put(&format!("d{dir}/f{name}"), b"there").await;
        }
    }
    let overlay = Arc::new(fixture.open().await);
    let mut absent = Vec::new();
    for dir in 0..DIRS {
        let parent = find(&overlay, &format!("d{dir}")).await;
        let lookups = (0..NAMES).map(|name| {
            let overlay = overlay.clone();
            tokio::spawn(async move { overlay.lookup(parent, format!("f{name}").as_bytes()).await.unwrap() })
        });
        for (name, lookup) in lookups.collect::<Vec<_>>().into_iter().enumerate() {
            if matches!(lookup.await.unwrap(), Lookup::Negative { .. }) {
                absent.push(format!("d{dir}/f{name}"));
            }
        }
    }
    assert_eq!(absent, [""; 0]);
}

/// A kernel that has not heard yet of what it is told.
struct LateKernel;

impl KernelCache for LateKernel {
    fn invalidate_inode(&self, _: Ino, _: bool) {}
    fn invalidate_from(&self, _: Ino, _: u64) -> oneshot::Receiver<()> {
        oneshot::channel().1
    }
    fn invalidate_name(&self, _: Ino, _: &[u8]) {}
    fn invalidate_name_and_tell(&self, _: Ino, _: &[u8]) -> oneshot::Receiver<()> {
        oneshot::channel().1
    }
    fn expire_name(&self, _: Ino, _: &[u8]) -> oneshot::Receiver<()> {
        oneshot::channel().1
    }
    fn keep_names(&self, _: bool) {}
    fn invalidate_attributes_now(&self, _: Ino) {}
    fn release_content(&self, _: Ino) {}
}

/// After a listing without a name, the kernel may open the file by its cached entry, until it has heard of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_a_listing_found_removed_is_not_opened_by_its_inode() {
    let fixture = Fixture::new();
    for name in ["gone", "held"] {
        fixture.put(name, b"content").await;
    }
    let overlay = fixture.open().await;
    overlay.set_kernel(Arc::new(LateKernel));
    let mut inodes = Vec::new();
    for name in [b"gone", b"held"] {
        let Lookup::Found(entry) = overlay.lookup(Ino::ROOT, name).await.unwrap() else { panic!("not found") };
        inodes.push(entry.attr.ino);
    }
    read(&overlay, "gone").await.unwrap();
    overlay.open_file(inodes[1], RDONLY).await.unwrap();
    for name in ["gone", "held"] {
        fixture.memory.remove(&pool_path(name), &Expected::Anything).await.unwrap();
    }
    overlay.open_dir(Ino::ROOT).await.unwrap();
    for flags in [RDONLY, RDWR, RDWR | libc::O_TRUNC] {
        let error = overlay.open_file(inodes[0], flags).await.map(drop).unwrap_err();
        assert!(error.is(ErrorKind::Stale), "{error}");
    }
    // A program that has it open may open it again, by /proc/self/fd.
    overlay.open_file(inodes[1], RDONLY).await.unwrap();
    assert_eq!(overlay.read(inodes[1], 0, 7).await.unwrap(), "content");
    overlay.shutdown().await.unwrap();
}
