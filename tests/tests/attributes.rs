//! Modes, owners, times and extended attributes, and what a flush makes of them in the pool.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::time::Duration;

use forebay_tests::mount::{Mount, Options, Place};
use forebay_tests::process::{sh, wait_until};

const SHELL: Duration = Duration::from_secs(60);

fn times(at: PathBuf) -> (i64, i64) {
    let meta = fs::metadata(&at).unwrap_or_else(|e| panic!("{}: {e}", at.display()));
    (meta.mtime(), meta.mtime_nsec())
}

/// A flush of names after the times of their directory changes those times in the pool, so the flusher sends the times
/// again.
///
/// SEMANTICS 24: "Modes, owners, times to the nanosecond, extended attributes and ACLs reach the pool."
#[test]
fn times_of_directories_reach_the_pool_though_their_names_come_later() {
    let late = "[[rule]]\npaths = [\"**/*.late\"]\nflush = \"manual\"\n";
    let mount = Mount::new(Options::policy(&format!("[default]\nflush = \"idle:1s\"\n{late}")));
    let dirs = ["made", "linked", "from", "to", "emptied"];
    let before = "mkdir made linked from to emptied; for f in from/f emptied/f; do echo 1 >$f.late; done";
    sh(&mount.place.mnt(), before, SHELL).ok();
    mount.flush();
    let names = "echo 2 >made/f.late; ln from/f.late linked/g.late; mv from/f.late to/; rm emptied/f.late";
    let change = format!("{names}; touch -d '2001-02-03 04:05:06.123456789' {}", dirs.join(" "));
    sh(&mount.place.mnt(), &change, SHELL).ok();
    let pooled = || dirs.map(|dir| times(mount.pool(dir)));
    let wanted = dirs.map(|dir| times(mount.path(dir)));
    wait_until("times of directories are in the pool", || pooled() == wanted);
    assert!(!mount.pool("made/f.late").exists(), "what waits for an operator went by itself");
    mount.flush();
    assert!(!mount.pool("emptied/f.late").exists() && mount.pool("to/f.late").exists(), "names stay behind");
    assert_eq!(pooled(), wanted);
}

/// SEMANTICS 24: "A flush leaves the times of a directory as the mount shows them"
#[test]
fn a_file_that_is_written_anew_leaves_the_times_of_its_directory() {
    const FILES: u32 = 40;
    let mount = Mount::manual();
    let made = format!("mkdir d; for i in $(seq {FILES}); do echo old >d/$i; done; touch -d '2001-02-03' d");
    sh(&mount.place.pool(), &made, SHELL).ok();
    let before = times(mount.pool("d"));
    let write = |files: u32, text: &str| {
        (1..=files).for_each(|i| fs::write(mount.path(format!("d/{i}")), text).unwrap());
        mount.flush();
        assert_eq!(fs::read_to_string(mount.pool("d/1")).unwrap(), text);
    };
    for files in [1, FILES, 1] {
        write(files, &format!("new, of {files}"));
        assert_eq!(times(mount.path("d")), before, "in the mount, after {files} files");
        assert_eq!(times(mount.pool("d")), before, "in the pool, after {files} files");
    }
    // The mount shows another client's change of the times, and the flush does not set it back.
    sh(&mount.place.pool(), "touch d/theirs; touch -d '2011-02-03' d", SHELL).ok();
    let theirs = times(mount.pool("d"));
    write(1, "after theirs");
    assert_ne!(times(mount.pool("d")), before);
    assert!(times(mount.pool("d")) >= theirs);
}

/// Without this, each file that a user makes in a group's directory would count as not flushed forever.
///
/// SEMANTICS 24: "If the daemon does not run as root, an object of another user keeps the times that the pool gives it."
#[test]
fn a_user_flushes_into_a_directory_of_another_user() {
    const USER: u32 = 65534;
    let place = Place::new();
    place.let_users_mount();
    place.give_to(USER);
    let made = "mkdir group; echo old >group/old; echo old >group/touched; chmod 666 group/*; chmod 777 group";
    sh(&place.pool(), made, SHELL).ok();
    let allow_other = vec!["-o".into(), "allow_other".into()];
    let policy = Some("[default]\nflush = \"manual\"\nmetadata-ttl = \"0s\"\n".to_owned());
    let mount = Mount::on(place, Options { user: Some(USER), more: allow_other, policy, ..Options::default() });
    let as_user = format!("setpriv --reuid {USER} --regid {USER} --clear-groups bash -c");
    let change = "cd group; echo new >new; mkdir dir; echo new >dir/in; echo new >>old; touch touched . ; rm -f gone";
    sh(&mount.place.mnt(), &format!("{as_user} '{change}'"), SHELL).ok();
    mount.flush();
    assert_eq!(fs::read_to_string(mount.pool("group/new")).unwrap(), "new\n");
    assert_eq!(fs::read_to_string(mount.pool("group/dir/in")).unwrap(), "new\n");
    assert_eq!(fs::read_to_string(mount.pool("group/old")).unwrap(), "old\nnew\n");
    for name in ["group", "group/touched"] {
        assert_eq!(times(mount.path(name)), times(mount.pool(name)), "{name}");
    }
    mount.umount();
}

/// SEMANTICS 24: "Modes, owners, times to the nanosecond, extended attributes and ACLs reach the pool."
#[test]
fn attributes_reach_the_pool() {
    let mount = Mount::manual();
    for file in ["old", "grown"] {
        fs::write(mount.pool(file), "1").unwrap();
    }
    sh(&mount.place.pool(), "touch -d '2001-02-03' grown", SHELL).ok();
    fs::write(mount.path("new"), "2").unwrap();
    symlink("new", mount.path("link")).unwrap();
    let change = "for f in old new; do chmod 2640 $f; chown 123:456 $f; chmod 2640 $f; setfattr -n user.k -v v $f
        setfacl -m u:daemon:r $f; touch -d '2001-02-03 04:05:06.123456789' $f; done
        echo more >> grown; mkdir dir; setfacl -d -m u:daemon:rwx dir; touch dir/in; touch -h -d '2002-01-01' link";
    sh(&mount.place.mnt(), change, SHELL).ok();
    let show = "for f in old new grown link dir dir/in; do stat -c '%n %f %u %g %y' $f; done; stat -c '%s' old new grown link dir/in
        getfattr -d old new; getfacl -n old new dir dir/in";
    let here = sh(&mount.place.mnt(), show, SHELL).ok().out;
    mount.flush();
    let there = sh(&mount.place.pool(), show, SHELL).ok().out;
    assert_eq!(here, there);
    assert!(!there.contains("2001-02-03 00:00:00"), "modified since: {there}");
    assert!(
        there.contains("04:05:06.123456789") && there.contains("user.k") && there.contains("default:user:"),
        "{there}"
    );
}

/// The flush of a mode sends no ACL: the one that the daemon knows may be older than another client's.
#[test]
fn a_flush_of_a_mode_does_not_bring_back_what_another_client_revoked() {
    let mount = Mount::manual();
    for kind in ["file", "dir"] {
        let make = if kind == "file" { "touch file" } else { "mkdir dir" };
        sh(&mount.place.pool(), &format!("{make}; setfacl -m u:daemon:rwx,u:bin:rwx {kind}"), SHELL).ok();
        let change = format!("getfacl {kind}; chmod 750 {kind}");
        assert!(sh(&mount.place.mnt(), &change, SHELL).ok().out.contains("user:daemon:rwx"));
        let show = format!("getfacl -n {kind}");
        let here = sh(&mount.place.mnt(), &show, SHELL).ok().out;
        assert!(here.contains("mask::r-x"), "{here}");
        sh(&mount.place.pool(), &format!("setfacl -x u:daemon {kind}"), SHELL).ok();
        mount.flush();
        let there = sh(&mount.place.pool(), &format!("getfacl {kind}"), SHELL).ok().out;
        assert!(!there.contains("user:daemon") && there.contains("user:bin:rwx"), "{there}");
        assert!(there.contains("mask::r-x") && there.contains("other::---"), "{there}");
        let there = sh(&mount.place.pool(), &show, SHELL).ok().out;
        wait_until("the mount shows the ACL of the pool", || sh(&mount.place.mnt(), &show, SHELL).ok().out == there);
    }
}

/// `chmod` arrives before the daemon has seen the close of the writer, as when a program is copied.
#[test]
fn set_id_bits_stay_though_a_writer_was_open_when_they_were_given() {
    let mount = Mount::manual();
    let path = mount.path("program");
    fs::write(&path, "program").unwrap();
    let writer = fs::File::options().write(true).open(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o6755)).unwrap();
    drop(writer);
    mount.flush();
    // The next read fetches the file into another content file.
    mount.forebay(["evict"], &[&path]).ok();
    assert_eq!(fs::read_to_string(&path).unwrap(), "program");
    let mode = |at: PathBuf| fs::metadata(at).unwrap().mode() & 0o7777;
    assert_eq!(format!("{:o}", mode(path)), "6755");
    mount.flush();
    assert_eq!(format!("{:o}", mode(mount.pool("program"))), "6755");
}

/// A change of the owner removes `security.capability`, so it is sent before the attribute.
///
/// SEMANTICS 24: "Modes, owners, times to the nanosecond, extended attributes and ACLs reach the pool."
#[test]
fn file_capabilities_reach_the_pool_together_with_a_new_owner() {
    const OWNER: u32 = 4711;
    // Version 2, effective; CAP_NET_BIND_SERVICE is permitted.
    const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mount = Mount::manual();
    let file = mount.path("program");
    fs::write(&file, "program").unwrap();
    mount.flush();
    std::os::unix::fs::chown(&file, Some(OWNER), Some(OWNER)).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o750)).unwrap();
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(&file, "security.capability", &CAPABILITY, flags).unwrap();
    mount.flush();
    for at in [file, mount.pool("program")] {
        let mut value = [0; 64];
        let length = rustix::fs::getxattr(&at, "security.capability", &mut value[..]).unwrap();
        assert_eq!(value[..length], CAPABILITY, "{}", at.display());
        let meta = fs::metadata(&at).unwrap();
        assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), (OWNER, OWNER, 0o750), "{}", at.display());
    }
}
