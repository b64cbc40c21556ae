//! Directories of an object store that another client replaced.

use std::fs;
use std::io::Write;

use forebay_tests::mount::{Mount, Options};
use forebay_tests::servers::Server;
use forebay_tests::servers::s3::Versitygw;

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
