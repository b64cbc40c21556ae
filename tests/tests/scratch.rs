//! Scratch directories: plain directories on the fast pool, and their commit into the mount.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_tests::mount::{COMMAND, Mount, Options, content};
use forebay_tests::process::{Answer, forebay, run, wait_until};
use forebay_tests::truth::seed;
use forebay_tests::users::{U1, U2, User};
use rand::{Rng, SeedableRng};
use serde_json::Value;

const USAGE: i32 = 2;
const NO_SPACE: i32 = 5;
const DENIED: i32 = 7;
const EXISTS: i32 = 10;
const NOBODY: u32 = 65534;

/// Nothing is flushed that no request asks for, and all users see the mount.
fn mount() -> Mount {
    shared(Options::policy("[default]\nflush = \"manual\"\n"))
}

fn shared(options: Options) -> Mount {
    let mount = Mount::new(Options { more: vec!["-o".into(), "allow_other".into()], ..options });
    mount.place.let_users_pass();
    mount
}

fn scratch(mount: &Mount, verb: &str, words: &[&str]) -> Answer {
    let mut command = std::process::Command::new(forebay());
    command.args(["scratch", verb]).args(words);
    if verb == "create" || verb == "list" {
        command.arg("--mount").arg(mount.place.mnt());
    }
    run(&mut command, COMMAND)
}

fn create(mount: &Mount, words: &[&str]) -> PathBuf {
    scratch(mount, "create", words).ok().out.trim().into()
}

fn commit(mount: &Mount, from: &Path, to: &str) -> Answer {
    scratch(mount, "commit", &[from.to_str().unwrap(), mount.path(to).to_str().unwrap()])
}

fn listed(mount: &Mount) -> Vec<Value> {
    let mut command = std::process::Command::new(forebay());
    command.args(["--json", "scratch", "list", "--mount"]).arg(mount.place.mnt());
    run(&mut command, COMMAND).ok().out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns each path below a directory with what a reader sees of it.
fn seen(dir: &Path) -> BTreeMap<PathBuf, String> {
    let mut all = BTreeMap::new();
    let mut left = vec![dir.to_owned()];
    while let Some(at) = left.pop() {
        let meta = fs::symlink_metadata(&at).unwrap();
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

/// SEMANTICS 69: "A commit that is interrupted is finished or undone when the daemon starts again: the files are in the
/// mount or in the scratch directory, each once."
#[test]
fn a_killed_commit_is_finished_or_undone() {
    let mount = mount();
    let dir = create(&mount, &["--job", "j"]);
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed());
    let (mut finished, mut undone) = (0, 0);
    for round in 0..16 {
        let name = format!("t{round}");
        for at in 0..40 {
            let part = dir.join(&name).join(at.to_string());
            fs::create_dir_all(&part).unwrap();
            (0..50).for_each(|file| fs::write(part.join(file.to_string()), content(file, 700)).unwrap());
            fs::hard_link(part.join("7"), part.join("link")).unwrap();
        }
        let was = seen(&dir.join(&name));
        let (old, delay) = (mount.worker(), Duration::from_micros(rng.random_range(0..70_000)));
        let to = mount.path(&name);
        let mut command = std::process::Command::new(forebay());
        command.args(["scratch", "commit"]).arg(dir.join(&name)).arg(&to);
        let committing = std::thread::spawn(move || run(&mut command, COMMAND));
        std::thread::sleep(Duration::from_millis(8) + delay);
        mount.kill_worker();
        mount.wait_for_other_worker(old);
        let answer = committing.join().unwrap();
        assert!(listed(&mount).iter().any(|known| known["id"] == "j"));
        let (in_mount, in_scratch) = (to.exists(), dir.join(&name).exists());
        assert!(in_mount != in_scratch, "{in_mount} {in_scratch} {answer:?}");
        match in_mount {
            true => finished += 1,
            false => {
                undone += 1;
                assert_ne!(answer.code, Some(0), "what was acknowledged is there");
            }
        }
        let place = if in_mount { to } else { dir.join(&name) };
        assert_eq!(seen(&place), was, "round {round}, {delay:?}");
        let commits = mount.place.fast().join("commits");
        assert!(!commits.exists() || fs::read_dir(commits).unwrap().next().is_none());
    }
    println!("{finished} finished, {undone} undone");
    mount.flush();
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
        std::thread::sleep(Duration::from_millis(100));
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
    let job = |verb: &str, more: &[&str]| {
        let mut command = std::process::Command::new(forebay());
        command.args(["job", verb, "j", "--mount"]).arg(mount.place.mnt()).args(more);
        run(&mut command, COMMAND).ok();
    };
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
