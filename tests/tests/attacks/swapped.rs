//! Objects that are swapped in the pool between a check and its use.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use forebay_tests::mount::{Mount, Options};
use forebay_tests::servers::Server;
use forebay_tests::servers::nfs::{NfsServer, Squash};
use forebay_tests::users::{U1, U2, User};

/// A mount with manual flushes, and the path in the pool of its directory `shared`: both users may write to the
/// directory, and it is not sticky.
struct Shared {
    mount: Mount,
    pool: PathBuf,
    _server: Option<NfsServer>,
}

impl Shared {
    /// Returns one over a directory, and one over an NFS server whose export the users reach as well.
    fn each() -> [Self; 2] {
        let server = NfsServer::start(Path::new("/var/tmp"), Squash::None);
        let export = server.export();
        fs::set_permissions(export.parent().unwrap(), Permissions::from_mode(0o711)).unwrap();
        let options = || Options::policy("[default]\nflush = \"manual\"\n");
        let local = Mount::new(options());
        let remote = Mount::new(Options { remote: Some(server.remote()), ..options() });
        [(local.pool("shared"), local, None), (export.join("shared"), remote, Some(server))].map(
            |(pool, mount, _server)| {
                fs::create_dir(&pool).unwrap();
                fs::set_permissions(&pool, Permissions::from_mode(0o777)).unwrap();
                Self { mount, pool, _server }
            },
        )
    }
}

fn give(path: &Path, user: User, mode: u32) {
    chown(path, Some(user.0), Some(user.0)).unwrap();
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn mode_and_group(path: &Path) -> (u32, u32) {
    let meta = fs::metadata(path).unwrap();
    (meta.mode() & 0o7777, meta.gid())
}

/// A user changes attributes of her own file and directory, and then moves another user's objects to their names in the
/// pool. The flush does not change those objects.
///
/// SECURITY 7: "never another object that was moved to its name"
#[test]
fn attributes_are_not_flushed_to_what_was_put_in_the_place_of_their_object() {
    Shared::each().iter().for_each(attributes_are_kept);
}

fn attributes_are_kept(shared: &Shared) {
    let Shared { mount, pool, .. } = shared;
    let mnt = mount.path("shared");
    fs::write(pool.join("f"), "mine").unwrap();
    give(&pool.join("f"), U1, 0o600);
    fs::write(pool.join("secret"), "secret").unwrap();
    give(&pool.join("secret"), U2, 0o600);
    fs::create_dir(pool.join("d")).unwrap();
    give(&pool.join("d"), U1, 0o700);
    fs::create_dir(pool.join("private")).unwrap();
    give(&pool.join("private"), U2, 0o700);

    U1.sh(&mnt, "chmod 604 f; touch -d 2001-01-01 f").ok();
    // Not every pool has extended attributes and ACLs.
    let _ = U1.sh(&mnt, "setfattr -n user.a -v b f; setfacl -m u:4001:rw f");
    U1.sh(&mnt, "chmod 757 d").ok();
    let before = fs::metadata(pool.join("secret")).unwrap().mtime();
    U1.sh(pool, "mv f f.old; mv secret f; mv d d.old; mv private d").ok();
    // It may fail for names that moved: only the state of the pool afterwards counts.
    let _ = mount.forebay(["flush", "--wait"], &[&mnt]);

    assert_eq!(mode_and_group(&pool.join("f")), (0o600, U2.0), "the other user's file");
    assert_eq!(mode_and_group(&pool.join("d")), (0o700, U2.0), "the other user's directory");
    assert_eq!(fs::metadata(pool.join("f")).unwrap().mtime(), before, "its times");
    let attributes = forebay_tests::process::sh(pool, "getfattr -d -m - f", std::time::Duration::from_secs(10)).out;
    assert!(!attributes.contains("user.a") && !attributes.contains("posix_acl"), "its attributes: {attributes}");
}

/// A user replaces a directory of mode 0777 in the pool with another user's directory of mode 0700. The cached rights
/// of the first one permit neither reads nor writes in the second one.
///
/// SECURITY 8: "is read and written by its own permissions only"
#[test]
fn a_directory_that_took_the_place_of_an_open_one_is_as_closed_as_it_says() {
    Shared::each().iter().for_each(directories_are_kept);
}

fn directories_are_kept(shared: &Shared) {
    let Shared { mount, pool, .. } = shared;
    let mnt = mount.path("shared");
    fs::create_dir(pool.join("d")).unwrap();
    give(&pool.join("d"), U1, 0o777);
    fs::create_dir(pool.join("private")).unwrap();
    fs::write(pool.join("private/notes"), "secret").unwrap();
    give(&pool.join("private/notes"), U2, 0o644);
    give(&pool.join("private"), U2, 0o700);

    U1.sh(&mnt, "ls -la d; echo mine >d/of-mine").ok();
    U1.sh(pool, "mv d d.old; mv private d").ok();
    let seen = U1.sh(&mnt, "cat d/notes; ls d; echo x >d/.bashrc; true").out;
    assert!(!seen.contains("secret") && !seen.contains("notes"), "{seen}");
    let _ = mount.forebay(["flush", "--wait"], &[&mnt]);

    let inside: Vec<_> = fs::read_dir(pool.join("d")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(inside, ["notes"], "nothing was made in the other user's directory");
    assert_eq!(fs::read_to_string(pool.join("d/notes")).unwrap(), "secret");
}
