//! Scratch directories: plain directories on the fast pool, and their commit into the mount.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use forebay_tests::mount::{COMMAND, Mount, Options, content};
use forebay_tests::process::{forebay, run, wait_until};
use forebay_tests::scratch::{commit, create, job, listed, merge, scratch};
use forebay_tests::servers::Server;
use forebay_tests::servers::s3::Versitygw;
use forebay_tests::settings::{number, seed};
use forebay_tests::users::{U1, U2, User};
use rand::{Rng, SeedableRng};

const USAGE: i32 = 2;
const NO_SPACE: i32 = 5;
const DENIED: i32 = 7;
const EXISTS: i32 = 10;
const POOL_GONE: i32 = 4;
const NOBODY: u32 = 65534;
/// Commits that are killed, every second a merge.
const KILLS: u64 = 12;

/// Nothing is flushed that no request asks for, and all users see the mount.
fn mount() -> Mount {
    shared(Options::policy("[default]\nflush = \"manual\"\n"))
}

fn shared(options: Options) -> Mount {
    let mount = Mount::new(Options { more: vec!["-o".into(), "allow_other".into()], ..options });
    mount.place.let_users_pass();
    mount
}

/// Returns each path below a directory with what a reader sees of it.
#[track_caller]
fn seen(dir: &Path) -> BTreeMap<PathBuf, String> {
    let mut all = BTreeMap::new();
    let mut left = vec![dir.to_owned()];
    while let Some(at) = left.pop() {
        let meta = fs::symlink_metadata(&at).unwrap_or_else(|error| panic!("{}: {error}", at.display()));
        let bytes = match () {
            () if meta.is_symlink() => fs::read_link(&at).unwrap().display().to_string().into_bytes(),
            () if !meta.is_dir() && !meta.is_file() => Vec::new(),
            () if meta.is_dir() => {
                left.extend(fs::read_dir(&at).unwrap().map(|entry| entry.unwrap().path()));
                Vec::new()
            }
            () => fs::read(&at).unwrap(),
        };
        let (mode, uid, gid, links) = (meta.mode(), meta.uid(), meta.gid(), meta.nlink());
        let times = (!meta.is_dir()).then(|| (meta.mtime(), meta.mtime_nsec()));
        let text = format!("{mode:o} {uid} {gid} {links} {times:?} {}", String::from_utf8_lossy(&bytes));
        all.insert(at.strip_prefix(dir).unwrap().to_owned(), text);
    }
    all
}

/// Returns the inode numbers of all files below a directory.
fn inodes(dir: &Path) -> Vec<u64> {
    let dirs = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    dirs.flat_map(|dir| fs::read_dir(dir).unwrap()).map(|file| file.unwrap().metadata().unwrap().ino()).collect()
}

/// A tree with everything that a pool of files can hold.
fn fill(dir: &Path) {
    fs::create_dir_all(dir.join("a/b")).unwrap();
    for at in 0..20 {
        fs::write(dir.join(format!("a/f{at}")), content(at, 3000 * at as usize)).unwrap();
    }
    fs::write(dir.join("a/b/exec"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(dir.join("a/b/exec"), PermissionsExt::from_mode(0o4750)).unwrap();
    fs::hard_link(dir.join("a/f3"), dir.join("a/b/other name of f3")).unwrap();
    symlink("../f3", dir.join("a/b/link")).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, dir.join("a/fifo"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let old = fs::File::options().write(true).open(dir.join("a/f4")).unwrap();
    old.set_modified(std::time::UNIX_EPOCH + Duration::new(1_000_000_000, 123_456_789)).unwrap();
}

/// SEMANTICS 66: "A commit of a scratch directory takes a tree into the mount in one step: with the bytes, modes, owners
/// and times of its files, with hard links, symbolic links and extended attributes. No byte is copied."
#[test]
fn a_commit_takes_the_whole_tree_without_a_copy() {
    let mount = mount();
    let dir = create(&mount, &["--job", "j"]);
    fill(&dir);
    rustix::fs::setxattr(dir.join("a/f5"), "user.kind", b"result", rustix::fs::XattrFlags::empty()).unwrap();
    chown(dir.join("a/f6"), Some(U1.0), Some(U2.0)).unwrap();
    let was = seen(&dir.join("a"));
    let moved = fs::metadata(dir.join("a/f9")).unwrap().ino();
    commit(&mount, &dir.join("a"), "out").ok();
    assert!(inodes(&mount.place.fast().join("content")).contains(&moved), "it is the same file");
    assert_eq!(seen(&mount.path("out")), was);
    assert!(!dir.join("a").exists() && dir.is_dir());
    assert!(!mount.pool("out").exists(), "nothing is flushed yet");
    let mut value = [0; 64];
    let length = rustix::fs::getxattr(mount.path("out/f5"), "user.kind", &mut value).unwrap();
    assert_eq!(&value[..length], b"result");
    // The scratch directory of one uncommitted file is as good as before.
    fs::write(dir.join("later"), "x").unwrap();
    commit(&mount, &dir.join("later"), "out/later").ok();
    mount.flush();
    let mut flushed = seen(&mount.pool("out"));
    assert!(flushed.remove(Path::new("later")).is_some());
    assert_eq!(flushed, was, "the pool has the same");
    let length = rustix::fs::getxattr(mount.pool("out/f5"), "user.kind", &mut value).unwrap();
    assert_eq!(&value[..length], b"result");
    mount.umount();
    mount.mount();
    assert_eq!(fs::read(mount.path("out/later")).unwrap(), b"x");
    mount.forebay(["fsck"], &[&mount.place.mnt()]).ok();
}

/// SEMANTICS 67: "What a commit refuses stays in the scratch directory, unchanged."
#[test]
fn what_is_refused_stays_where_it_is() {
    let mount = mount();
    let dir = create(&mount, &["--job", "j"]);
    fill(&dir);
    let was = seen(&dir);
    fs::create_dir(mount.path("full")).unwrap();
    fs::write(mount.path("full/file"), "old").unwrap();
    for (from, to) in [
        ("a", "full"),
        ("a", "full/file"),
        ("a/f1", "full"),
        ("a", "no/such/parent"),
        ("nothing", "new"),
        ("a/b/link/x", "new"),
        ("a", ".forebay~new"),
    ] {
        let answer = commit(&mount, &dir.join(from), to);
        assert!(answer.code != Some(0) && answer.err.len() > 20, "{from} to {to}: {answer:?}");
        println!("{}", answer.err);
        assert_eq!(seen(&dir), was, "{from} to {to}");
    }
    commit(&mount, &mount.place.pool(), "new").refused(USAGE, &["no scratch directory"]);
    assert_eq!(fs::read(mount.path("full/file")).unwrap(), b"old");
    // A file replaces a file, and a directory an empty one.
    commit(&mount, &dir.join("a/f2"), "full/file").ok();
    assert_eq!(fs::read(mount.path("full/file")).unwrap(), content(2, 6000));
    fs::create_dir(mount.path("empty")).unwrap();
    commit(&mount, &dir.join("a"), "empty").ok();
    assert!(mount.path("empty/b/exec").exists());
    // All of a directory.
    fs::write(dir.join("last"), "z").unwrap();
    commit(&mount, &dir, "all").ok();
    assert_eq!(fs::read(mount.path("all/last")).unwrap(), b"z");
    assert_eq!(seen(&dir).len(), 1, "it is empty, and can be used again");
}

/// SEMANTICS 68: "A scratch directory is closed to other users, and its commit writes only where its user may write."
#[test]
fn a_commit_has_the_rights_of_the_user_of_the_directory() {
    let mount = mount();
    let uid = U1.0.to_string();
    let dir = create(&mount, &["--job", "j", "--uid", &uid]);
    U1.sh(&dir, "mkdir -p a && echo secret > a/f").ok();
    assert_ne!(U2.sh(Path::new("/"), &format!("cat {}/a/f", dir.display())).code, Some(0));
    assert_ne!(U2.sh(Path::new("/"), &format!("ls {}", dir.parent().unwrap().display())).code, Some(0));
    for (name, owner, mode) in [("of-root", 0, 0o755), ("sticky", 0, 0o1777), ("own", U1.0, 0o755)] {
        fs::create_dir(mount.path(name)).unwrap();
        fs::set_permissions(mount.path(name), PermissionsExt::from_mode(mode)).unwrap();
        chown(mount.path(name), Some(owner), Some(owner)).unwrap();
    }
    fs::write(mount.path("sticky/of-root"), "root's").unwrap();
    commit(&mount, &dir.join("a"), "of-root/x").refused(DENIED, &["cannot write"]);
    commit(&mount, &dir.join("a/f"), "sticky/of-root").refused(DENIED, &["cannot write"]);
    commit(&mount, &dir.join("a/f"), "sticky/own").ok();
    commit(&mount, &dir.join("a"), "own/x").ok();
    assert_eq!(fs::read(mount.path("sticky/of-root")).unwrap(), b"root's");
    assert_eq!(fs::metadata(mount.path("own/x")).unwrap().uid(), U1.0);
    // Another user's directory of the same name is refused.
    scratch(&mount, "create", &["--job", "j", "--uid", &U2.0.to_string()]).refused(EXISTS, &["user 4001"]);
    assert_eq!(create(&mount, &["--job", "j", "--uid", &uid]), dir);
}

/// Files of a directory that a merge meets, and a tree to merge into it.
fn met_and_merged(out: &Path, tree: &Path) {
    fs::create_dir_all(out.join("sub/stays")).unwrap();
    for (name, text) in [("old", "old"), ("keep", "kept"), ("sub/x", "old x"), ("sub/stays/f", "f"), ("outside", "o")] {
        fs::write(out.join(name), text).unwrap();
    }
    fs::hard_link(out.join("old"), out.join("sub/other name of old")).unwrap();
    symlink("outside", out.join("was a link")).unwrap();
    fs::set_permissions(out.join("sub"), PermissionsExt::from_mode(0o2751)).unwrap();
    chown(out.join("sub"), Some(U1.0), Some(U2.0)).unwrap();
    fs::create_dir_all(tree.join("sub/new/deep")).unwrap();
    for (name, text) in [("old", "new"), ("was a link", "a file"), ("sub/x", "new x"), ("sub/new/deep/g", "g")] {
        fs::write(tree.join(name), text).unwrap();
    }
    fs::hard_link(tree.join("sub/x"), tree.join("sub/new/x")).unwrap();
    symlink("x", tree.join("sub/link")).unwrap();
}

/// SEMANTICS 72: "With `--merge`, a commit merges a tree into a directory that exists, in one step. A directory of the
/// same name keeps its attributes and what else is in it. Everything else takes the place of what had its name, as by
/// `rename(2)`: programs that have the old file open keep it, and so do its other names."
#[test]
fn a_merge_replaces_what_has_its_names_and_keeps_the_rest() {
    let mount = mount();
    let dir = create(&mount, &["--job", "j"]);
    // The mount has not seen these names yet.
    met_and_merged(&mount.pool("out"), &dir.join("a"));
    let to = mount.path("out");
    commit(&mount, &dir.join("a"), "out").refused(EXISTS, &["not empty", "--merge"]);
    let mut wanted = seen(&to);
    let sub = wanted[Path::new("sub")].clone();
    // What the kernel has cached of it is told.
    assert!(!to.join("sub/new").exists() && to.join("sub/x").exists());
    let mut old = fs::File::open(to.join("old")).unwrap();
    let tree = seen(&dir.join("a"));
    merge(&mount, &dir.join("a"), "out").ok();
    assert!(!dir.join("a").exists());
    for name in ["", "sub"] {
        let (is, was) = (fs::metadata(to.join(name)).unwrap(), fs::metadata(mount.pool("out").join(name)).unwrap());
        assert_eq!((is.mode(), is.uid(), is.gid()), (was.mode(), was.uid(), was.gid()), "{name:?}");
    }
    assert!(sub.starts_with("42751 4001 4002"), "{sub}");
    // A directory counts those in it, and a name that is gone does not.
    wanted.extend(tree.into_iter().filter(|(path, _)| !["", "sub"].iter().any(|dir| path == Path::new(dir))));
    wanted.insert("sub".into(), sub.replacen(" 3 ", " 4 ", 1));
    let other = wanted.get_mut(Path::new("sub/other name of old")).unwrap();
    *other = other.replacen(" 2 ", " 1 ", 1);
    assert_eq!(seen(&to), wanted);
    assert_eq!(fs::read_to_string(to.join("sub/other name of old")).unwrap(), "old");
    let mut text = String::new();
    std::io::Read::read_to_string(&mut old, &mut text).unwrap();
    assert_eq!((text.as_str(), old.metadata().unwrap().nlink()), ("old", 1));
    drop(old);
    assert_eq!(fs::read_to_string(mount.pool("out/old")).unwrap(), "old", "nothing is flushed yet");
    mount.flush();
    assert_eq!(seen(&mount.pool("out")), wanted, "the pool has the same");
    mount.forebay(["fsck"], &[&mount.place.mnt()]).ok();
    // Where nothing or a file has the name, a merge is a commit.
    fs::write(dir.join("f"), "1").unwrap();
    merge(&mount, &dir, "out/all").ok();
    fs::write(dir.join("f"), "2").unwrap();
    merge(&mount, &dir.join("f"), "out/all/f").ok();
    assert_eq!(fs::read_to_string(to.join("all/f")).unwrap(), "2");
    mount.umount();
    mount.mount();
    assert_eq!(fs::read_to_string(to.join("sub/new/x")).unwrap(), "new x");
}

/// SEMANTICS 73: "If a directory would meet something else, the merge is refused before anything changes, and the error
/// names the path. It is refused as well if the pool does not tell what is in a directory."
#[test]
fn a_merge_makes_no_directory_of_a_file() {
    let mount = mount();
    let dir = create(&mount, &["--job", "j"]);
    met_and_merged(&mount.pool("out"), &dir.join("a"));
    fs::create_dir(mount.pool("out/sub/new")).unwrap();
    fs::write(mount.pool("out/sub/new/deep"), "no directory").unwrap();
    let was = (seen(&dir), seen(&mount.path("out")));
    let unchanged = || assert_eq!((seen(&dir), seen(&mount.path("out"))), was);
    merge(&mount, &dir.join("a"), "out").refused(EXISTS, &["out/sub/new/deep: it is no directory", "move or remove"]);
    unchanged();
    fs::create_dir(dir.join("a/keep")).unwrap();
    fs::remove_dir(dir.join("a/keep")).unwrap();
    merge(&mount, &dir.join("a/old"), "out/sub").refused(EXISTS, &["out/sub: it is a directory"]);
    merge(&mount, &dir.join("a/sub"), "out/was a link").refused(EXISTS, &["was a link: it is no directory"]);
    merge(&mount, &dir.join("a/sub"), "out/keep").refused(EXISTS, &["out/keep: it is no directory"]);
    unchanged();
    fs::remove_dir_all(dir.join("a/sub/new")).unwrap();
    fs::write(dir.join("a/sub/new"), "no directory").unwrap();
    merge(&mount, &dir.join("a"), "out").refused(EXISTS, &["out/sub/new: it is a directory"]);
}

/// SEMANTICS 74: "A merge makes and replaces names only where the user of the scratch directory may. The directory that
/// DEST is in has to be writable only if DEST is new."
#[test]
fn a_merge_has_the_rights_of_the_user_of_the_directory() {
    let mount = mount();
    let dir = create(&mount, &["--job", "j", "--uid", &U1.0.to_string()]);
    U1.sh(&dir, "mkdir -p a/sub && echo new > a/sub/f").ok();
    let made = |name: &str, owner: u32, mode: u32| {
        fs::create_dir_all(mount.path(name)).unwrap();
        fs::set_permissions(mount.path(name), PermissionsExt::from_mode(mode)).unwrap();
        chown(mount.path(name), Some(owner), Some(owner)).unwrap();
    };
    let refused = |why: &str| {
        let was = (seen(&dir), seen(&mount.path("out")));
        merge(&mount, &dir.join("a"), "out/d").refused(DENIED, &["user 4001", why]);
        assert_eq!((seen(&dir), seen(&mount.path("out"))), was);
    };
    made("out", 0, 0o755);
    refused("out: user 4001 may not write to this directory");
    made("out/d", 0, 0o755);
    refused("out/d: user 4001 may not write to this directory");
    made("out/d/sub", U2.0, 0o755);
    refused("out/d/sub: user 4001 may not write to this directory");
    fs::write(mount.path("out/d/sub/f"), "of root").unwrap();
    made("out/d/sub", U2.0, 0o1777);
    refused("its directory is sticky");
    made("out/d", 0, 0o700);
    refused("out/d: user 4001 may not search this directory");
    made("out/d", 0, 0o755);
    // An ACL gives and takes.
    made("out/d/sub", 0, 0o755);
    let acl = |entry: &str| {
        let mut set = std::process::Command::new("setfacl");
        run(set.args(["-m", entry]).arg(mount.path("out/d/sub")), COMMAND).ok();
    };
    acl("u:4001:r-x,o::rwx");
    refused("out/d/sub: user 4001 may not write to this directory");
    acl("u:4001:rwx,o::r-x");
    merge(&mount, &dir.join("a"), "out/d").ok();
    let made = fs::metadata(mount.path("out/d/sub/f")).unwrap();
    assert_eq!((made.uid(), fs::read_to_string(mount.path("out/d/sub/f")).unwrap().as_str()), (U1.0, "new\n"));
    assert_eq!(fs::metadata(mount.path("out/d/sub")).unwrap().uid(), 0);
    mount.flush();
    assert_eq!(fs::metadata(mount.pool("out/d/sub/f")).unwrap().uid(), U1.0);
}

/// The bytes of dirty and of clean files that are replaced are given back.
#[test]
fn what_a_merge_replaces_takes_no_space() {
    let mount = shared(Options { limit: Some("48M".into()), ..Options::policy("[default]\nflush = \"manual\"\n") });
    let dir = create(&mount, &["--job", "j"]);
    for round in 0..12 {
        fs::create_dir(dir.join("a")).unwrap();
        (0..4).for_each(|at| fs::write(dir.join(format!("a/{at}")), content(round * 4 + at, 3 << 20)).unwrap());
        merge(&mount, &dir.join("a"), "out").ok();
        if round % 3 == 2 {
            mount.flush();
        }
        wait_until("the old files are gone", || mount.status().used_bytes < 14 << 20);
    }
    (0..4).for_each(|at| assert!(fs::read(mount.path(format!("out/{at}"))).unwrap() == content(44 + at, 3 << 20)));
    mount.forebay(["fsck"], &[&mount.place.mnt()]).ok();
}

#[test]
fn a_merge_reaches_an_object_store() {
    let mut server = Versitygw::start();
    let policy = "[default]\nflush = \"manual\"\n[pool]\ndeadline = \"2s\"\n";
    let mount = shared(Options { remote: Some(server.remote()), ..Options::policy(policy) });
    let pool = server.files();
    let dir = create(&mount, &["--job", "j"]);
    for at in 0..20 {
        server.curl(&["-T", "/etc/hostname"], &format!("out/f{at}"));
        server.curl(&["-T", "/etc/hostname"], &format!("out/foreign{at}"));
    }
    fs::create_dir_all(dir.join("a/sub")).unwrap();
    (0..20).for_each(|at| fs::write(dir.join(format!("a/f{at}")), content(at, 9_000)).unwrap());
    fs::write(dir.join("a/sub/g"), "g").unwrap();
    server.kill();
    let was = seen(&dir);
    let answer = merge(&mount, &dir.join("a"), "out");
    println!("{answer}");
    assert!(answer.code == Some(POOL_GONE) || answer.code == Some(USAGE), "{answer:?}");
    assert_eq!(seen(&dir), was);
    server.start_again();
    wait_until("the pool answers", || mount.path("out/foreign3").exists());
    // The mount knows one name; what it does not know counts as well.
    merge(&mount, &dir.join("a"), "out").ok();
    assert_eq!(fs::read(mount.path("out/f7")).unwrap(), content(7, 9_000));
    mount.flush();
    (0..20).for_each(|at| assert!(fs::read(pool.join(format!("out/f{at}"))).unwrap() == content(at, 9_000), "{at}"));
    let mut names: Vec<_> = fs::read_dir(pool.join("out")).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.retain(|name| !name.to_str().unwrap().starts_with('f'));
    assert_eq!(names, ["sub"], "no conflicts");
    assert_eq!(fs::read(pool.join("out/foreign7")).unwrap(), fs::read("/etc/hostname").unwrap());
}

/// A file that has a name outside of the tree, or that a program holds open, can change after the commit.
#[test]
fn nobody_changes_a_committed_file_from_outside() {
    let mount = mount();
    let uid = U1.0.to_string();
    let dir = create(&mount, &["--job", "j", "--uid", &uid]);
    chown(mount.path(""), Some(U1.0), None).unwrap();
    U1.sh(&dir, "mkdir a keep && echo first > a/f && ln a/f keep/f && echo first > a/g").ok();
    let was = seen(&dir);
    commit(&mount, &dir.join("a"), "out").refused(USAGE, &["f: it has another name"]);
    assert_eq!(seen(&dir), was);
    U1.sh(&dir, "rm keep/f && echo first > keep/f").ok();
    let held = fs::File::options().append(true).open(dir.join("a/g")).unwrap();
    commit(&mount, &dir.join("a"), "out").ok();
    mount.forebay(["flush"], &[&mount.place.mnt()]).ok();
    // A writer goes on: what it writes is a part of the file, as after a rename, and reaches the pool.
    (&held).write_all(b"second\n").unwrap();
    drop(held);
    assert_eq!(fs::read_to_string(mount.path("out/g")).unwrap(), "first\nsecond\n");
    mount.flush();
    assert_eq!(fs::read_to_string(mount.pool("out/g")).unwrap(), "first\nsecond\n");
    assert_eq!(fs::read_to_string(mount.pool("out/f")).unwrap(), "first\n");
}

/// Flushes, compares the pool with the mount, and removes all trees from both.
fn compare_and_remove(mount: &Mount) {
    mount.flush();
    let names =
        |dir: PathBuf| fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect::<BTreeSet<_>>();
    let trees = names(mount.path(""));
    assert_eq!(names(mount.pool("")), trees);
    for name in trees {
        assert_eq!(seen(&mount.pool(&name)), seen(&mount.path(&name)), "{name:?}");
        fs::remove_dir_all(mount.path(&name)).unwrap();
    }
    mount.flush();
}

/// SEMANTICS 69: "A commit that is interrupted is finished or undone when the daemon starts again: the files are in the
/// mount or in the scratch directory, each once."
/// SEMANTICS 75: "A merge that is interrupted is finished or undone as a whole."
#[test]
fn a_killed_commit_is_finished_or_undone() {
    let mount = mount();
    let dir = create(&mount, &["--job", "j"]);
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed());
    let (mut finished, mut undone) = ([0_u64; 2], [0_u64; 2]);
    let fill = |tree: &Path, salt: u64, parts: u64| {
        for at in 0..parts {
            let part = tree.join(at.to_string());
            fs::create_dir_all(&part).unwrap();
            (0..50).for_each(|file| fs::write(part.join(file.to_string()), content(file + salt, 700)).unwrap());
            fs::hard_link(part.join("7"), part.join("link")).unwrap();
        }
    };
    // They close in on the moment at which it is decided.
    let mut delays = [Duration::ZERO; 2];
    // The first two end.
    let rounds = 2 + number("FOREBAY_KILLS").unwrap_or(KILLS) as usize;
    for round in 0..rounds {
        let is_merge = round % 2;
        let name = format!("t{round}");
        let (from, to) = (dir.join(&name), mount.path(&name));
        fill(&from, 0, 15);
        if is_merge == 1 {
            fill(&to, 1000, 10);
            fs::write(to.join("3/foreign"), "stays").unwrap();
        }
        let was = seen(&from);
        let before = to.exists().then(|| seen(&to));
        let mut command = std::process::Command::new(forebay());
        command.args(["scratch", "commit"]).args((is_merge == 1).then_some("--merge")).arg(&from).arg(&to);
        if round < 2 {
            // How long it takes when it is left alone.
            delays[is_merge] = run(&mut command, COMMAND).ok().took / 2;
            continue;
        }
        let (old, delay) = (mount.worker(), delays[is_merge].mul_f64(rng.random_range(0.7..1.4)));
        let mut client = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(delay);
        let answer = client.try_wait().unwrap();
        // It would ask the next worker again.
        client.kill().unwrap();
        mount.kill_worker();
        client.wait().unwrap();
        mount.wait_for_other_worker(old);
        assert!(listed(&mount).iter().any(|known| known["id"] == "j"));
        let in_scratch = from.exists();
        let message = format!("round {round}, {delay:?}, {answer:?}");
        if in_scratch {
            undone[is_merge] += 1;
            delays[is_merge] = delays[is_merge].mul_f64(1.3);
            assert!(!answer.is_some_and(|status| status.success()), "what was acknowledged is there: {message}");
            assert_eq!(seen(&from), was, "{message}");
            assert_eq!(to.exists().then(|| seen(&to)), before, "{message}");
        } else {
            println!("{message}");
            finished[is_merge] += 1;
            delays[is_merge] = delays[is_merge].mul_f64(0.75);
            let mut wanted = was;
            if let Some(before) = before {
                wanted.insert("3/foreign".into(), before[Path::new("3/foreign")].clone());
            }
            assert_eq!(seen(&to), wanted, "{message}");
        }
        let commits = mount.place.fast().join("commits");
        assert!(!commits.exists() || fs::read_dir(commits).unwrap().next().is_none());
        if round % 12 == 11 || round + 1 == rounds {
            compare_and_remove(&mount);
        }
    }
    println!("commits and merges, {delays:?}: {finished:?} finished, {undone:?} undone");
    assert!(finished.iter().sum::<u64>() > 0, "no kill came after the decision");
    assert!(undone.iter().sum::<u64>() > 0, "no kill came before the decision");
    mount.forebay(["fsck"], &[&mount.place.mnt()]).ok();
}

/// SEMANTICS 70: "The size of a scratch directory is reserved for it: if the fast pool has no room, it is not created.
/// When it is full, writes to the files that grow are refused until it has room again."
#[test]
fn a_directory_has_its_size_and_no_more() {
    let mount = shared(Options { limit: Some("64M".into()), ..Options::policy("[default]\nflush = \"manual\"\n") });
    scratch(&mount, "create", &["--job", "large", "--size", "65MB"]).refused(NO_SPACE, &["65000000", "64000000"]);
    let dir = create(&mount, &["--job", "j", "--size", "16MB"]);
    scratch(&mount, "create", &["--job", "second", "--size", "60MB"]).refused(NO_SPACE, &["60000000"]);
    let kept = fs::File::create(dir.join("kept")).unwrap();
    (&kept).write_all(&content(1, 1 << 20)).unwrap();
    kept.set_modified(std::time::UNIX_EPOCH + Duration::from_secs(1_000_000_000)).unwrap();
    drop(kept);
    let mut grows = fs::File::create(dir.join("grows")).unwrap();
    let mut written = 0;
    let refused = loop {
        match grows.write_all(&content(2, 1 << 20)) {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
        assert!(written < 200, "writes go on beyond the limit");
        // The space is counted less often on a busy machine.
        std::thread::sleep(Duration::from_millis(if written < 12 { 100 } else { 1000 }));
    };
    assert_eq!(refused.raw_os_error(), Some(libc::EPERM));
    assert!((12..40).contains(&written), "{written} MiB");
    assert_eq!(listed(&mount)[0]["is_full"], true);
    assert!(mount.log().contains("scratch directory j is full"));
    drop(grows);
    // What it holds can be committed, also a file that is refused further writes.
    commit(&mount, &dir.join("grows"), "grows").ok();
    assert_eq!(fs::metadata(mount.path("grows")).unwrap().len(), written << 20);
    wait_until("there is room", || listed(&mount)[0]["is_full"] == false);
    fs::write(dir.join("more"), content(3, 1 << 20)).unwrap();
    scratch(&mount, "discard", &[dir.to_str().unwrap()]).ok();
    assert!(!dir.exists() && listed(&mount).is_empty());
    scratch(&mount, "discard", &[dir.to_str().unwrap()]).refused(USAGE, &["no scratch directory"]);
    mount.flush();
    create(&mount, &["--job", "second", "--size", "60MB"]);
}

/// SEMANTICS 71: "A scratch directory stays until it is discarded, or until the allocation of its name is over. Nothing
/// of it reaches the pool that was not committed."
#[test]
fn a_directory_stays_until_it_is_discarded_or_its_allocation_ends() {
    let mount = mount();
    let dir = create(&mount, &["--job", "j"]);
    fs::write(dir.join("f"), "x").unwrap();
    mount.umount();
    mount.mount();
    assert_eq!(fs::read(dir.join("f")).unwrap(), b"x");
    assert_eq!(listed(&mount)[0]["id"], "j");
    mount.kill_all();
    fs::write(dir.join("g"), "written without a daemon").unwrap();
    mount.mount();
    commit(&mount, &dir.join("g"), "g").ok();
    let job = |verb: &str, more: &[&str]| job(&mount, verb, "j", more);
    job("begin", &[]);
    job("start", &[]);
    assert!(dir.exists());
    job("stage-out", &["--wait", "60s"]);
    assert!(!dir.exists() && listed(&mount).is_empty());
    let dir = create(&mount, &["--job", "j"]);
    job("begin", &[]);
    job("teardown", &[]);
    assert!(!dir.exists());
    mount.flush();
    let names: Vec<_> = fs::read_dir(mount.place.pool()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["g"]);
}

#[test]
fn a_user_mounts_and_commits_without_root() {
    let place = forebay_tests::mount::Place::new();
    place.let_users_mount();
    place.give_to(NOBODY);
    let mount = Mount::on(place, Options { user: Some(NOBODY), ..Options::policy("[default]\nflush = \"manual\"\n") });
    let dir: PathBuf = mount.forebay(["scratch", "create", "--mount"], &[&mount.place.mnt()]).ok().out.trim().into();
    let sh = |dir: &Path, script: &str| User(NOBODY).sh(dir, script).ok().out;
    sh(&dir, "mkdir a && echo x > a/f && ln a/f a/g && chmod 4755 a/f");
    mount.forebay(["scratch", "commit"], &[&dir.join("a"), &mount.path("out")]).ok();
    assert_eq!(sh(&mount.place.mnt(), "cat out/f; stat -c '%a %h' out/g"), "x\n4755 2\n");
    mount.forebay(["scratch", "discard"], &[&dir]).ok();
    assert!(!dir.exists());
}
