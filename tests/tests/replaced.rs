//! Files and directories of the pool that another client replaced.

use std::fs;
use std::io::Write;
use std::sync::Arc;

use forebay_backends::{Pool, RenameMode};
use forebay_engine::{Ino, Lookup, Overlay};
use forebay_tests::engine::{Fixture, RDONLY, find, pool_path};
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
