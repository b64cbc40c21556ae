//! Views: staged trees that programs read without the daemon.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use forebay_tests::mount::{COMMAND, Mount, Options, content};
use forebay_tests::process::{Answer, forebay, need, run, spawn, wait_until};
use forebay_tests::scratch::{commit, create, merge, scratch};
use forebay_tests::settings::seed;
use forebay_tests::users::{U1, U2};
use rand::{Rng, SeedableRng};
use serde_json::Value;

const USAGE: i32 = 2;
const BUSY: i32 = 6;
const DENIED: i32 = 7;
const NOBODY: u32 = 65534;
/// Anything else: the other kinds of failures have no code.
const OTHER: i32 = 10;

/// All users see the mount, which asks the pool for each answer.
fn mount() -> Mount {
    shared(Options::policy("[default]\nflush = \"manual\"\nmetadata-ttl = \"1s\"\n"))
}

fn shared(options: Options) -> Mount {
    let mount = Mount::new(Options { more: vec!["-o".into(), "allow_other".into()], ..options });
    mount.place.let_users_pass();
    mount
}

fn stage(mount: &Mount, words: &[&str], path: &str) -> Answer {
    run(Command::new(forebay()).args(["stage", "--view"]).args(words).arg(mount.path(path)), COMMAND)
}

fn view(words: &[&str]) -> Answer {
    run(Command::new(forebay()).arg("view").args(words), COMMAND)
}

fn end(mount: &Mount, path: &str) {
    view(&["end", mount.path(path).to_str().unwrap()]).ok();
}

/// Returns the views of a mount as JSON.
fn listed(mount: &Mount) -> Vec<Value> {
    let listed = run(Command::new(forebay()).args(["--json", "view", "list"]).arg(mount.place.mnt()), COMMAND).ok();
    listed.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn shown(mount: &Mount, path: &str) -> Value {
    let shown = run(Command::new(forebay()).args(["--json", "view", "show"]).arg(mount.path(path)), COMMAND).ok();
    serde_json::from_str(shown.out.trim()).unwrap()
}

fn is_mounted(path: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.lines().any(|line| line.split(' ').nth(4) == path.to_str() && line.contains("/content/views/view-"))
}

/// Returns each path below a directory with what a reader sees of it, but for the number of hard links.
fn seen(dir: &Path) -> BTreeMap<PathBuf, String> {
    let mut all = BTreeMap::new();
    let mut left = vec![dir.to_owned()];
    while let Some(at) = left.pop() {
        let meta = fs::symlink_metadata(&at).unwrap();
        let bytes = match () {
            () if meta.is_symlink() => fs::read_link(&at).unwrap().display().to_string().into_bytes(),
            () if meta.is_dir() => {
                left.extend(fs::read_dir(&at).unwrap().map(|entry| entry.unwrap().path()));
                Vec::new()
            }
            () if meta.is_file() => fs::read(&at).unwrap(),
            () => Vec::new(),
        };
        let (mode, uid, gid) = (meta.mode(), meta.uid(), meta.gid());
        let text = format!("{mode:o} {uid} {gid} {} {} {bytes:?}", meta.mtime(), meta.mtime_nsec());
        all.insert(at.strip_prefix(dir).unwrap().to_owned(), text);
    }
    all
}

/// A tree with everything that a pool of files can hold.
fn fill(dir: &Path) {
    fs::create_dir_all(dir.join("a/b")).unwrap();
    for at in 0..20 {
        fs::write(dir.join(format!("f{at}")), content(at, 3000 * at as usize)).unwrap();
    }
    fs::write(dir.join("a/b/exec"), "#!/bin/sh\necho it runs\n").unwrap();
    fs::set_permissions(dir.join("a/b/exec"), PermissionsExt::from_mode(0o4755)).unwrap();
    fs::hard_link(dir.join("f3"), dir.join("a/other name of f3")).unwrap();
    symlink("../f3", dir.join("a/link")).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, dir.join("fifo"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    chown(dir.join("f5"), Some(U1.0), Some(U2.0)).unwrap();
    fs::set_permissions(dir.join("f5"), PermissionsExt::from_mode(0o600)).unwrap();
    rustix::fs::setxattr(dir.join("f6"), "user.kind", b"input", rustix::fs::XattrFlags::empty()).unwrap();
    let times = |path: &str, secs| {
        let file = fs::File::open(dir.join(path)).unwrap();
        file.set_modified(std::time::UNIX_EPOCH + Duration::new(secs, 123_456_789)).unwrap();
    };
    times("f4", 1_000_000_000);
    times("a", 900_000_000);
    fs::set_permissions(dir.join("a/b"), PermissionsExt::from_mode(0o750)).unwrap();
}

/// SEMANTICS 76: "A view shows a tree as it was staged: its names, bytes, modes, owners, times, symbolic links, extended
/// attributes and ACLs. It is read-only for everybody."
#[test]
fn a_view_shows_the_tree_as_it_was_staged() {
    need(&["setfacl", "getfacl"]);
    let mount = mount();
    fill(&mount.pool("data"));
    let acl = format!("setfacl -m u:{}:r {}", U2.0, mount.pool("data/f5").display());
    run(Command::new("sh").args(["-c", &acl]), COMMAND).ok();
    let was = seen(&mount.pool("data"));
    let made = stage(&mount, &[], "data").ok();
    assert!(made.out.contains("22 files and 3 directories") && made.out.contains("mounted"), "{made:?}");
    assert!(is_mounted(&mount.path("data")));
    assert_eq!(seen(&mount.path("data")), was);
    let device = |path: &Path| fs::metadata(path).unwrap().dev();
    assert_eq!(device(&mount.path("data/f1")), device(&mount.place.fast()), "the kernel's own file system");
    let mut value = [0; 64];
    let length = rustix::fs::getxattr(mount.path("data/f6"), "user.kind", &mut value).unwrap();
    assert_eq!(&value[..length], b"input");
    // The rights are those of the files: f5 belongs to one user, and its ACL lets another one read it.
    U1.sh(&mount.path("data"), "cmp f5 f5 && a/b/exec 2>/dev/null; ! ls a/b 2>/dev/null").ok();
    U2.sh(&mount.path("data"), "cat f5 >/dev/null && ! echo x 2>/dev/null >>f5").ok();
    for refused in ["touch new", "echo x >>f1", "rm f2", "chmod 700 f1", "mv f1 g", "ln f1 g", "mkdir d"] {
        let answer = run(Command::new("sh").current_dir(mount.path("data")).args(["-c", refused]), COMMAND);
        assert!(answer.code != Some(0) && answer.err.contains("Read-only"), "{refused}: {answer:?}");
    }
    // Set-id programs do not get the rights of their owner, as in the mount.
    let options = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = options
        .lines()
        .find(|line| line.contains("/content/views/view-") && line.contains(mount.path("data").to_str().unwrap()));
    assert!(line.unwrap().contains("ro,nosuid,nodev"), "{line:?}");
    assert_eq!(shown(&mount, "data/a/b")["changed"], 0);
    end(&mount, "data");
    assert!(!is_mounted(&mount.path("data")) && listed(&mount).is_empty());
    assert_eq!(seen(&mount.path("data")), was);
    mount.flush();
    mount.forebay(["fsck"], &[&mount.place.mnt()]).ok();
    assert_eq!(seen(&mount.pool("data")), was, "the pool did not notice");
}

/// SEMANTICS 77: "What a view shows does not change while it lasts, whatever becomes of the files in the pool or in the
/// mount, and is not evicted."
#[test]
fn a_view_goes_on_showing_what_it_showed() {
    let mount = mount();
    fill(&mount.pool("data"));
    fs::create_dir(mount.pool("beside")).unwrap();
    fs::hard_link(mount.pool("data/f9"), mount.pool("beside/f9")).unwrap();
    fs::hard_link(mount.pool("data/f10"), mount.pool("beside/f10")).unwrap();
    fs::hard_link(mount.pool("data/f11"), mount.pool("beside/f11")).unwrap();
    let was = seen(&mount.pool("data"));
    stage(&mount, &[], "data").ok();
    let id = listed(&mount)[0]["id"].as_str().unwrap().to_owned();
    // Neither eviction nor a release.
    mount.forebay(["evict"], &[&mount.place.mnt()]).ok();
    let kept = mount.forebay(["release", "--owner", &id], &[&mount.place.mnt()]);
    assert!(kept.code == Some(OTHER) && kept.out.contains("view end"), "{kept:?}");
    assert_eq!(seen(&mount.path("data")), was);
    // Other clients of the pool.
    fs::write(mount.pool("data/f1"), "newer").unwrap();
    fs::remove_file(mount.pool("data/f2")).unwrap();
    fs::write(mount.pool("data/added"), "x").unwrap();
    fs::set_permissions(mount.pool("data/f4"), PermissionsExt::from_mode(0o600)).unwrap();
    let newer = shown(&mount, "data");
    // A change of the mode is another version of a pool of files.
    assert_eq!((&newer["changed"], &newer["added"], &newer["removed"]), (&2.into(), &1.into(), &1.into()), "{newer}");
    assert!(newer["named"].to_string().contains(r#"["changed","data/f1"]"#), "{newer}");
    // Programs in the mount, by other names of the same files.
    let mut file = fs::File::options().append(true).open(mount.path("beside/f9")).unwrap();
    file.write_all(b"more").unwrap();
    drop(file);
    fs::write(mount.path("beside/f10"), "replaced").unwrap();
    fs::File::options().write(true).open(mount.path("beside/f11")).unwrap().set_len(5).unwrap();
    assert_eq!(seen(&mount.path("data")), was);
    let mut longer = content(9, 27_000);
    longer.extend(b"more");
    assert_eq!(fs::read(mount.path("beside/f9")).unwrap(), longer);
    mount.flush();
    assert_eq!(fs::read(mount.pool("data/f9")).unwrap(), longer);
    assert_eq!(fs::read(mount.pool("data/f10")).unwrap(), b"replaced");
    assert_eq!(fs::read(mount.pool("data/f11")).unwrap(), &content(11, 33_000)[..5]);
    assert_eq!(seen(&mount.path("data")), was);
    end(&mount, "data");
    assert_eq!(fs::read(mount.path("data/f1")).unwrap(), b"newer");
    assert_eq!(fs::read(mount.path("data/f9")).unwrap(), longer);
    // Names lag behind by the metadata-ttl.
    wait_until("names are those of the pool", || !mount.path("data/f2").exists() && mount.path("data/added").exists());
    mount.forebay(["fsck"], &[&mount.place.mnt()]).ok();
}

/// SEMANTICS 78: "A file that a view shows, and that programs have open through the mount under another name, cannot be
/// opened for writing there (`ETXTBSY`) until they close it or the view ends."
#[test]
fn a_file_in_use_is_not_changed_under_its_readers() {
    let mount = mount();
    fs::create_dir_all(mount.pool("data")).unwrap();
    fs::write(mount.pool("data/f"), content(1, 10_000)).unwrap();
    fs::hard_link(mount.pool("data/f"), mount.pool("other")).unwrap();
    stage(&mount, &[], "data").ok();
    let mut reader = fs::File::open(mount.path("other")).unwrap();
    let open = || fs::File::options().write(true).open(mount.path("other"));
    let truncate = || fs::File::create(mount.path("other"));
    for refused in [open().unwrap_err(), truncate().unwrap_err()] {
        assert_eq!(refused.raw_os_error(), Some(libc::ETXTBSY));
    }
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, content(1, 10_000));
    drop(reader);
    truncate().unwrap().write_all(b"new").unwrap();
    assert_eq!(fs::read(mount.path("data/f")).unwrap(), content(1, 10_000));
    end(&mount, "data");
    assert_eq!(fs::read(mount.path("data/f")).unwrap(), b"new");
}

/// SEMANTICS 79: "What cannot be shown as it is makes the whole view fail, with the reason: a file that is not in the pool
/// yet or is open for writing, content that cannot be linked."
#[test]
fn what_cannot_be_shown_is_refused_with_its_reason() {
    let mount = mount();
    fill(&mount.pool("data"));
    fs::write(mount.path("data/f1"), "local").unwrap();
    stage(&mount, &[], "data").refused(BUSY, &["data/f1", "flush --wait"]);
    assert!(listed(&mount).is_empty() && !is_mounted(&mount.path("data")));
    mount.flush();
    let writer = fs::File::options().write(true).open(mount.path("data/f7")).unwrap();
    stage(&mount, &[], "data").refused(BUSY, &["data/f7", "open for writing"]);
    drop(writer);
    stage(&mount, &[], "").refused(USAGE, &["whole mount"]);
    stage(&mount, &[], "data/a/link").refused(USAGE, &["directory or a file"]);
    stage(&mount, &[], "none").refused(USAGE, &["none"]);
    stage(&mount, &[], "data/a").ok();
    stage(&mount, &[], "data").refused(OTHER, &["view-", "data/a"]);
    stage(&mount, &[], "data/f8").ok();
    assert!(is_mounted(&mount.path("data/f8")));
    assert_eq!(fs::read(mount.path("data/f8")).unwrap(), content(8, 24_000));
    assert_eq!(listed(&mount).len(), 2);
    for path in ["data/a", "data/f8"] {
        end(&mount, path);
    }
    view(&["end", "view-999"]).refused(USAGE, &["view-999", "view list"]);
    // A directory that appears in the pool while a view is begun is staged with the rest.
    fs::create_dir(mount.pool("data/new")).unwrap();
    fs::write(mount.pool("data/new/f"), "x").unwrap();
    stage(&mount, &[], "data").ok();
    assert_eq!(fs::read(mount.path("data/new/f")).unwrap(), b"x");
    assert_eq!(mount.status().dirty_files, 0);
}

#[test]
fn a_mount_of_an_ordinary_user_has_no_views() {
    let place = forebay_tests::mount::Place::new();
    place.let_users_mount();
    place.give_to(NOBODY);
    let mount = Mount::on(place, Options { user: Some(NOBODY), ..Options::default() });
    fs::create_dir(mount.pool("data")).unwrap();
    let refused = mount.forebay(["stage", "--view"], &[&mount.path("data")]);
    assert!(refused.code == Some(DENIED) && refused.err.contains("root"), "{refused:?}");
}

/// SEMANTICS 80: "A view outlives the death of all processes of the mount, and is mounted again with the mount, until its
/// lease is over. Then nothing is left of it."
#[test]
fn a_view_outlives_the_daemon_and_ends_with_its_lease() {
    let mount = mount();
    fill(&mount.pool("x/data"));
    let was = seen(&mount.pool("x/data"));
    stage(&mount, &[], "x/data").ok();
    stage(&mount, &["--lease", "1h"], "x/data/f1").refused(OTHER, &["view-"]);
    U1.sh(&mount.path("x/data"), "cat f5").ok();
    let old = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(old);
    assert_eq!(seen(&mount.path("x/data")), was);
    // The pool has another version by now, which drops the mount's content.
    fs::write(mount.pool("x/data/f1"), "newer").unwrap();
    assert_eq!(shown(&mount, "x/data")["changed"], 1);
    let used = mount.status().used_bytes;
    // Another user has its working directory there. By its whole path it would have to pass the root of the mount, and
    // the kernel asks the daemon for the ACL of that each time.
    let go = mount.place.at("go");
    let script = format!("while [ ! -e {} ]; do sleep 0.05; done; cat f5", go.display());
    let user = U1.command("bash", &mount.path("x/data")).args(["-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    mount.kill_all();
    // Longer than the kernel may keep other names of the mount.
    std::thread::sleep(Duration::from_secs(2));
    assert!(fs::read_dir(mount.place.mnt()).is_err(), "the mount is dead");
    assert_eq!(seen(&mount.path("x/data")), was);
    fs::write(go, "").unwrap();
    assert_eq!(user.wait_with_output().unwrap().stdout, content(5, 15_000));
    mount.mount();
    assert_eq!(seen(&mount.path("x/data")), was);
    assert_eq!(mount.status().used_bytes, used, "what only the view has is counted again");
    // Unmounted and mounted in good order, too.
    mount.umount();
    assert!(!mount.path("x").exists());
    mount.mount();
    assert_eq!(seen(&mount.path("x/data")), was);
    end(&mount, "x/data");
    fs::remove_file(mount.pool("x/data/fifo")).unwrap();
    stage(&mount, &["--lease", "2s"], "x/data").ok();
    assert!(is_mounted(&mount.path("x/data")));
    let mut open = fs::File::open(mount.path("x/data/f9")).unwrap();
    wait_until("the view is over", || !is_mounted(&mount.path("x/data")));
    let mut bytes = Vec::new();
    open.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, content(9, 27_000), "who has a file open keeps it");
    assert_eq!(fs::read(mount.path("x/data/f1")).unwrap(), b"newer");
    wait_until("nothing is left", || {
        let left = fs::read_dir(mount.place.fast().join("content/views")).unwrap();
        let removed = fs::read_dir(mount.place.fast().join("content/views/removed")).unwrap();
        left.count() == 1 && removed.count() == 0
    });
    mount.forebay(["fsck"], &[&mount.place.mnt()]).ok();
}

/// A client that is interrupted must not keep the next one from making the view.
#[test]
fn a_view_whose_client_ends_while_it_stages_is_given_up() {
    let mount = mount();
    fs::create_dir(mount.pool("d")).unwrap();
    fs::write(mount.pool("d/large"), content(1, 8 << 20)).unwrap();
    let mut slow = Command::new(forebay());
    slow.args(["stage", "--view", "--rate", "100KB/s"])
        .arg(mount.path("d"))
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    for is_staged_again in [false, true] {
        let mut client = spawn(&mut slow).unwrap();
        wait_until("the view is begun", || listed(&mount).iter().any(|view| view["phase"] == "staging"));
        stage(&mount, &[], "d").refused(OTHER, &["view-", "shows", "already"]);
        client.kill().unwrap();
        client.wait().unwrap();
        if is_staged_again {
            stage(&mount, &[], "d").ok();
            assert!(is_mounted(&mount.path("d")));
            wait_until("one view is left", || listed(&mount).len() == 1);
            end(&mount, "d");
        }
        wait_until("nothing is left of the view", || listed(&mount).is_empty());
    }
    wait_until("no lease is left", || mount.status().leased_bytes == 0);
}

#[test]
fn an_unmount_names_who_uses_a_view() {
    let mount = mount();
    fill(&mount.pool("data"));
    stage(&mount, &[], "data").ok();
    let open = fs::File::open(mount.path("data/f1")).unwrap();
    mount.forebay(["umount"], &[&mount.place.mnt()]).refused(BUSY, &["view at", "pid", "data/f1"]);
    view(&["end", mount.path("data").to_str().unwrap()]).refused(BUSY, &["data/f1", "--lazy"]);
    assert!(is_mounted(&mount.path("data")));
    drop(open);
    mount.umount();
}

/// What only a view has is counted, and is free after its end.
#[test]
fn the_bytes_of_a_view_are_counted() {
    let mount = mount();
    fs::create_dir(mount.pool("data")).unwrap();
    fs::write(mount.pool("data/f"), content(1, 1 << 20)).unwrap();
    stage(&mount, &[], "data").ok();
    let staged = mount.status().used_bytes;
    fs::write(mount.pool("data/f"), content(2, 1 << 20)).unwrap();
    assert_eq!(shown(&mount, "data")["changed"], 1);
    assert_eq!(mount.status().used_bytes, staged);
    end(&mount, "data");
    wait_until("its bytes are free", || mount.status().used_bytes + (1 << 20) <= staged);
    assert_eq!(fs::read(mount.path("data/f")).unwrap(), content(2, 1 << 20));
}

#[test]
fn a_later_view_shows_no_rights_that_were_taken_away() {
    let mount = mount();
    fs::create_dir(mount.pool("d")).unwrap();
    fs::write(mount.pool("d/f"), "secret").unwrap();
    fs::set_permissions(mount.pool("d/f"), fs::Permissions::from_mode(0o640)).unwrap();
    let acl = |how: &[&str]| run(Command::new("setfacl").args(how).arg(mount.path("d/f")), COMMAND).ok();
    let readable = || U2.sh(&mount.place.mnt(), "cat d/f").code == Some(0);
    acl(&["-m", &format!("u:{}:r", U2.0)]);
    stage(&mount, &[], "d").ok();
    assert!(is_mounted(&mount.path("d")) && readable());
    end(&mount, "d");
    acl(&["-b"]);
    // The rest of the ACL would allow what its mask allows.
    fs::set_permissions(mount.path("d/f"), fs::Permissions::from_mode(0o640)).unwrap();
    mount.flush();
    assert!(!readable());
    stage(&mount, &[], "d").ok();
    assert!(is_mounted(&mount.path("d")) && !readable(), "the view shows an ACL that was removed");
    end(&mount, "d");
}

#[test]
fn a_commit_over_a_file_that_a_view_shows_is_refused() {
    let mount = mount();
    fs::create_dir(mount.pool("d")).unwrap();
    fs::write(mount.pool("d/model"), "old").unwrap();
    stage(&mount, &[], "d/model").ok();
    assert!(is_mounted(&mount.path("d/model")));
    let dir = create(&mount, &["--job", "j"]);
    fs::write(dir.join("model"), "new").unwrap();
    for refused in [commit(&mount, &dir.join("model"), "d/model"), merge(&mount, &dir, "d")] {
        assert!(refused.code != Some(0) && refused.err.contains("view end"), "{refused}");
    }
    assert!(is_mounted(&mount.path("d/model")));
    assert_eq!(fs::read(mount.path("d/model")).unwrap(), b"old", "a view is a snapshot");
    end(&mount, "d/model");
    commit(&mount, &dir.join("model"), "d/model").ok();
    assert_eq!(fs::read(mount.path("d/model")).unwrap(), b"new");
    scratch(&mount, "discard", &[dir.to_str().unwrap()]).ok();
}

#[test]
fn content_on_another_device_is_copied_if_that_is_allowed() {
    let place = forebay_tests::mount::Place::new();
    place.small_disk("fast", "ext4", 64);
    let other = place.small_disk("other", "ext4", 64);
    let more = vec!["--fast".into(), other.join("second").to_str().unwrap().into()];
    let options = Options { more, limit: Some("80M".into()), ..Options::policy("[default]\nflush = \"manual\"\n") };
    let mount = Mount::on(place, options);
    fs::create_dir(mount.pool("data")).unwrap();
    for at in 0..100 {
        fs::write(mount.pool(format!("data/f{at}")), content(at, 300 << 10)).unwrap();
    }
    let was = seen(&mount.pool("data"));
    stage(&mount, &[], "data").refused(OTHER, &["lies on another device", "--allow-copy"]);
    let staged = mount.status().used_bytes;
    let made = stage(&mount, &["--allow-copy"], "data").ok();
    assert!(made.out.contains("of it copied"), "{made:?}");
    assert_eq!(seen(&mount.path("data")), was);
    let copied = listed(&mount)[0]["copied_bytes"].as_u64().unwrap();
    assert!(copied > 0 && copied < 100 * (300 << 10));
    assert_eq!(mount.status().used_bytes, staged + copied);
    end(&mount, "data");
    wait_until("the copies are gone", || mount.status().used_bytes == staged);
}

/// SEMANTICS 81: "A view for a job is seen by the job alone, and a view that was made in a job ends with the job."
#[test]
fn a_view_for_a_job_is_seen_by_the_job_alone() {
    need(&["unshare"]);
    let mount = mount();
    fill(&mount.pool("data"));
    let was = seen(&mount.pool("data"));
    let ready = mount.place.at("ready");
    let script = format!(
        "unshare --mount --propagation slave bash -c 'echo $$ >{0}.pid; mv {0}.pid {0}; \
         while [ ! -e {0}.go ]; do sleep 0.05; done; cat {1}/f1 >{0}.out; ! touch {1}/f1 2>{0}.err'",
        ready.display(),
        mount.path("data").display()
    );
    let job = Command::new(forebay()).args(["run", "--job", "j1", "--", "bash", "-c", &script]).spawn().unwrap();
    let mut job = Killed(job);
    wait_until("the job runs", || ready.exists());
    let pid = fs::read_to_string(&ready).unwrap().trim().to_owned();
    stage(&mount, &["--owner", "j1", "--for-job", &std::process::id().to_string()], "data")
        .refused(USAGE, &["namespace"]);
    // Its owner could make the view writable.
    let users = Command::new("unshare").args(["--user", "--map-root-user", "--mount", "sleep", "60"]).spawn().unwrap();
    let users = Killed(users);
    wait_until("it has its namespaces", || {
        let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
        of(&users.0.id().to_string()).is_some_and(|namespace| Some(namespace) != of("self"))
    });
    stage(&mount, &["--owner", "j1", "--for-job", &users.0.id().to_string()], "data")
        .refused(USAGE, &["belongs to a user"]);
    drop(users);
    stage(&mount, &["--owner", "j1", "--for-job", &pid], "data").ok();
    assert!(!is_mounted(&mount.path("data")), "nobody else sees it");
    let in_job = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
    assert!(in_job.contains("/content/views/view-"), "{in_job}");
    // The mount goes on beside it.
    fs::write(mount.path("data/f1"), "changed by others").unwrap();
    assert_eq!(listed(&mount)[0]["job"], "j1");
    fs::write(format!("{}.go", ready.display()), "").unwrap();
    assert!(job.0.wait().unwrap().success());
    assert_eq!(fs::read(format!("{}.out", ready.display())).unwrap(), content(1, 3000));
    assert!(fs::read_to_string(format!("{}.err", ready.display())).unwrap().contains("Read-only"));
    wait_until("it ended with the job", || listed(&mount).is_empty());
    assert_ne!(seen(&mount.path("data")), was);
}

/// A process that ends with the test.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A view that is killed while it is made, or while it ends, is there as a whole or not at all.
#[test]
fn a_killed_view_is_there_or_not() {
    let mount = mount();
    for at in 0..40 {
        let part = mount.pool(format!("data/{at}"));
        fs::create_dir_all(&part).unwrap();
        (0..50).for_each(|file| fs::write(part.join(file.to_string()), content(file, 700)).unwrap());
    }
    let was = seen(&mount.pool("data"));
    mount.forebay(["stage"], &[&mount.path("data")]).ok();
    mount.forebay(["release"], &[&mount.path("data")]).ok();
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed());
    let (mut made, mut gone) = (0, 0);
    for round in 0..16 {
        let (old, delay) = (mount.worker(), Duration::from_micros(rng.random_range(0..250_000)));
        let ends = round % 4 == 3;
        if ends && listed(&mount).is_empty() {
            stage(&mount, &[], "data").ok();
        }
        let (data, mut command) = (mount.path("data"), Command::new(forebay()));
        match ends {
            true => command.args(["view", "end"]).arg(&data),
            false => command.args(["stage", "--view"]).arg(&data),
        };
        let working = std::thread::spawn(move || run(&mut command, COMMAND));
        std::thread::sleep(if ends { delay / 10 } else { delay });
        mount.kill_worker();
        mount.wait_for_other_worker(old);
        let answer = working.join().unwrap();
        wait_until("the views are settled", || listed(&mount).iter().all(|view| view["phase"] == "laid"));
        match listed(&mount).first() {
            Some(view) => {
                made += 1;
                assert_eq!(view["phase"], "laid");
                // Its client may have died before it was mounted.
                view_restored(&mount);
                assert!(is_mounted(&mount.path("data")), "{answer:?}");
            }
            None => {
                gone += 1;
                assert!(!is_mounted(&mount.path("data")), "{answer:?}");
            }
        }
        assert_eq!(seen(&mount.path("data")), was, "round {round}, {delay:?}");
        if !listed(&mount).is_empty() {
            end(&mount, "data");
        }
        wait_until("no tree is left", || {
            let views = fs::read_dir(mount.place.fast().join("content/views"));
            views.map_or(0, |views| views.filter(|dir| dir.as_ref().unwrap().file_name() != "removed").count()) == 0
        });
    }
    println!("{made} made, {gone} gone");
    assert!(listed(&mount).is_empty());
    assert_eq!(mount.status().leased_bytes, 0);
    mount.forebay(["fsck"], &[&mount.place.mnt()]).ok();
}

fn view_restored(mount: &Mount) {
    view(&["restore", mount.place.mnt().to_str().unwrap()]).ok();
}
