//! Files and directories of the pool that another client replaced.

use std::fs;
use std::io::Write;
use std::sync::Arc;

use forebay_backends::{Pool, RenameMode};
use forebay_engine::{Ino, Lookup, Overlay};
use forebay_tests::engine::{Fixture, RDONLY, RDWR, find, opened, pool_path};
use forebay_tests::mount::{Mount, Options};
use forebay_tests::servers::Server;
use forebay_tests::servers::s3::Versitygw;

const ROUNDS: u32 = 3000;

/// Another client replaces the directory of a dirty file with an object. Both are kept, and the conflict is reported.
#[test]
fn a_file_of_a_directory_that_became_an_object_is_flushed_beside_it() {
    let server = Versitygw::start();
    let policy = "[default]\nflush = \"manual\"\nmetadata-ttl = \"0s\"\n";
    let mount = Mount::new(Options { remote: Some(server.remote()), ..Options::policy(policy) });
    fs::create_dir(mount.path("d")).unwrap();
    for name in ["f", "clean"] {
        fs::write(mount.path(format!("d/{name}")), "one ").unwrap();
    }
    mount.flush();
    let mut file = fs::File::options().append(true).open(mount.path("d/f")).unwrap();
    file.write_all(b"two").unwrap();
    fs::remove_dir_all(server.files().join("d")).unwrap();
    server.curl(&["-X", "PUT", "-d", "theirs"], "d");
    drop(file);
    mount.flush();
    let tree = mount.tree();
    let names = tree.names().unwrap();
    assert_eq!(tree.read("d").unwrap(), b"theirs", "{names:?}");
    let ours = names.iter().find(|name| name.starts_with("d.conflict-")).unwrap_or_else(|| panic!("{names:?}"));
    assert_eq!(tree.below(ours).read("f").unwrap(), b"one two");
    let status = mount.status();
    assert!(!status.conflicts.is_empty() && status.dirty_files == 0, "{status:?}");
    assert_eq!(fs::read(mount.path("d")).unwrap(), b"theirs");
    assert_eq!(fs::read(mount.path(ours).join("f")).unwrap(), b"one two");
}

/// Another client renames a file over a name while a program has the old file open. The name is there all the time.
#[tokio::test(flavor = "multi_thread")]
async fn no_lookup_misses_a_name_whose_file_is_replaced() {
    let fixture = Fixture::new();
    fixture.put("a", b"0").await;
    let overlay = Arc::new(fixture.open().await);
    for round in 1..=ROUNDS {
        let open = find(&overlay, "a").await;
        overlay.open_file(open, RDONLY).await.unwrap();
        fixture.put("new", round.to_string().as_bytes()).await;
        fixture.memory.rename(&pool_path("new"), &pool_path("a"), RenameMode::Replace).await.unwrap();
        let look = |overlay: Arc<Overlay>| async move {
            let found = overlay.lookup(Ino::ROOT, b"a").await.unwrap();
            assert!(matches!(found, Lookup::Found(_)), "round {round}: {found:?}");
        };
        let lookups: Vec<_> = (0..4).map(|_| tokio::spawn(look(overlay.clone()))).collect();
        for lookup in lookups {
            lookup.await.unwrap();
        }
        overlay.release(open, RDONLY);
    }
}

/// Opens a file and closes it. Returns whether the open may let the kernel keep its pages. `answered`: the open was the
/// kernel's, and was answered.
async fn keeps_pages(overlay: &Overlay, ino: Ino, answered: bool) -> bool {
    let opened = overlay.open_file(ino, RDONLY).await.unwrap();
    if answered && !opened.pages.valid {
        overlay.pages_dropped(ino, opened.pages);
    }
    overlay.release(ino, RDONLY);
    opened.pages.valid
}

/// SEMANTICS 6: "never a mix of old and new bytes". The kernel may have pages of a version that the daemon before knew.
#[tokio::test(flavor = "multi_thread")]
async fn pages_from_the_time_of_a_daemon_that_died_are_dropped_at_the_next_open() {
    let fixture = Fixture::new();
    fixture.put("a", b"1").await;
    let overlay = fixture.open().await;
    let ino = find(&overlay, "a").await;
    assert!(keeps_pages(&overlay, ino, true).await);
    assert!(overlay.open_dir(Ino::ROOT).await.is_ok());
    overlay.shutdown().await.unwrap();
    drop(overlay);
    let overlay = opened(|| forebay_engine::Options { reattached: true, ..fixture.options() }).await;
    // The kernel knows neither of the opens of these two callers.
    overlay.open_inherited(ino, RDONLY).await.unwrap();
    assert!(!keeps_pages(&overlay, ino, false).await);
    assert!(!keeps_pages(&overlay, ino, true).await);
    assert!(keeps_pages(&overlay, ino, true).await, "they were dropped");
    let listing = overlay.open_dir(Ino::ROOT).await.unwrap();
    assert!(!listing.valid);
    assert!(!overlay.open_dir(Ino::ROOT).await.unwrap().valid, "no answer dropped the listing");
    overlay.pages_dropped(Ino::ROOT, listing);
    assert!(overlay.open_dir(Ino::ROOT).await.unwrap().valid);
    overlay.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_stay_stale_until_an_open_that_drops_them_is_answered() {
    let fixture = Fixture::new();
    fixture.put("a", b"1").await;
    let overlay = fixture.open().await;
    // The kernel knows the inode, so its node stays in memory.
    let Lookup::Found(entry) = overlay.lookup(Ino::ROOT, b"a").await.unwrap() else { panic!("no file") };
    let ino = entry.attr.ino;
    keeps_pages(&overlay, ino, true).await;
    fixture.put("a", b"22").await;
    assert_eq!(find(&overlay, "a").await, ino);
    assert!(!keeps_pages(&overlay, ino, false).await);
    assert!(!keeps_pages(&overlay, ino, false).await, "an open that got no answer dropped the pages");
    let late = overlay.open_file(ino, RDONLY).await.unwrap();
    // What a writer changes without the daemon is not in the kernel's pages, either.
    let writer = overlay.open_file(ino, RDWR).await.unwrap();
    overlay.pages_dropped(ino, writer.pages);
    overlay.release(ino, RDWR);
    overlay.pages_dropped(ino, late.pages);
    overlay.release(ino, RDONLY);
    assert!(!keeps_pages(&overlay, ino, true).await, "the answers are older than the last change");
    overlay.shutdown().await.unwrap();
}
