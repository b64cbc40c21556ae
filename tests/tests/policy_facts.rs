//! Settings that change with a file: with its size, its jobs, its names, its owner, and the settings of its directories.

use std::fs::{self, File};
use std::io::Write;
use std::process::Command;
use std::thread;
use std::time::Duration;

use forebay_backends::decorators::{CallKind, Odds};
use forebay_backends::{ErrorKind, Expected, Pool};
use forebay_engine::{Caller, Change, Ino, Lookup, Overlay, Policy};
use forebay_tests::engine::*;
use forebay_tests::mount::{COMMAND, Mount, Options};
use forebay_tests::process::{run, wait_until};

const OWNER: Caller = Caller { uid: 4711, gid: 4711, pid: 1 };
/// The flush has looked at everything that was written before, and has found that it waits for a request.
const LOOKED_AT: Duration = Duration::from_secs(3);
/// The flush has looked again at what waits for a request: it does so every 10 seconds at most.
const MANUAL_LOOK: Duration = Duration::from_secs(13);

#[track_caller]
fn until_pool_has(mount: &Mount, name: &str, content: &[u8]) {
    let file = mount.pool(name);
    wait_until(&format!("{name} is in the pool"), || fs::read(&file).is_ok_and(|have| have == content));
}

/// Returns an engine whose policy sets no time for names: each look asks the pool.
async fn engine(fixture: &Fixture, policy: &str) -> Overlay {
    let text = format!("{policy}\n[pool]\nretry = \"0s\"\n");
    opened(|| forebay_engine::Options { policy: Policy::parse(&text).unwrap(), ..fixture.options() }).await
}

async fn until_engine_sent(fixture: &Fixture, path: &str, content: &str) {
    let begun = std::time::Instant::now();
    while in_pool(fixture, path).as_deref() != Some(content.as_bytes()) {
        assert!(begun.elapsed() < Duration::from_secs(60), "{path} is not in the pool");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn is_there(overlay: &Overlay, path: &str) -> bool {
    let path = pool_path(path);
    let parent = find(overlay, path.parent().unwrap().to_string().trim_start_matches('/')).await;
    matches!(overlay.lookup(parent, path.name().unwrap()).await.unwrap(), Lookup::Found(_))
}

async fn mkdir(overlay: &Overlay, name: &str) -> Ino {
    overlay.mkdir(Ino::ROOT, name.as_bytes(), 0o755, 0, CALLER).await.unwrap().attr.ino
}

/// SEMANTICS 2: "Where the policy says `on-close`, changes that `close` acknowledged are in the pool." That is so if only the
/// size, the job or the name that the file has at its close makes the policy say so.
#[test]
fn a_close_waits_by_what_the_file_is_then() {
    let mount = Mount::new(Options::policy(
        "[default]\nflush = \"manual\"\n\
         [[rule]]\npaths = \"results/**\"\nsize = \"1MiB..\"\nflush = \"on-close\"\n\
         [[rule]]\npaths = \"through/**\"\nsize = \"1MiB..\"\nwrite = \"through\"\n\
         [[rule]]\npaths = \"moved/**\"\nflush = \"on-close\"\n\
         [[rule]]\njob = \"train*\"\npaths = \"jobs/**\"\nflush = \"on-close\"\n",
    ));
    let content = vec![7u8; 2 << 20];
    for dir in ["results", "through", "moved", "jobs"] {
        fs::create_dir(mount.path(dir)).unwrap();
    }
    for name in ["results/a", "through/a"] {
        fs::write(mount.path(name), &content).unwrap();
        assert!(fs::read(mount.pool(name)).is_ok_and(|have| have == content), "{name}");
        fs::write(mount.path(format!("{name}-small")), "small").unwrap();
    }
    let mut moved = File::create(mount.path("b")).unwrap();
    moved.write_all(b"moved").unwrap();
    fs::rename(mount.path("b"), mount.path("moved/b")).unwrap();
    drop(moved);
    assert_eq!(fs::read(mount.pool("moved/b")).unwrap(), b"moved");
    let script =
        format!("echo 1 > {}/jobs/r && cat {}/jobs/r", mount.place.mnt().display(), mount.place.pool().display());
    let answer = mount.forebay(["run", "--job", "train-1", "--", "sh", "-c", &script], &[]).ok();
    assert_eq!(answer.out.trim(), "1");
    assert!(!mount.pool("results/a-small").exists() && !mount.pool("through/a-small").exists());
}

const TMP_IS_LOCAL: &str = "[default]\nflush = \"manual\"\nmetadata-ttl = \"0s\"\n\
     [[rule]]\npaths = [\"tmp\", \"tmp/**\"]\nwrite = \"local\"\n";

/// A file that has a name that is not local is a result, whichever name is the first.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_with_a_name_that_is_not_local_outlives_its_job_and_is_flushed() {
    let fixture = Fixture::new();
    let overlay = engine(&fixture, TMP_IS_LOCAL).await;
    let (tmp, out) = (mkdir(&overlay, "tmp").await, mkdir(&overlay, "out").await);
    write(&overlay, "tmp/s", "result").await.unwrap();
    write(&overlay, "tmp/t", "scratch").await.unwrap();
    let (linked, scratch) = (find(&overlay, "tmp/s").await, find(&overlay, "tmp/t").await);
    overlay.link(linked, out, b"r").await.unwrap();
    overlay.link(scratch, tmp, b"u").await.unwrap();
    assert!(!overlay.is_local_file(linked) && overlay.is_local_file(scratch));
    overlay.job_ended(&mut job_that_made(&[linked, scratch])).await.unwrap();
    assert!(is_there(&overlay, "tmp/s").await && is_there(&overlay, "out/r").await);
    assert!(!is_there(&overlay, "tmp/t").await && !is_there(&overlay, "tmp/u").await, "all names of a local file are");
    assert_eq!(read(&overlay, "out/r").await.unwrap(), "result");
    flushed(&overlay).await;
    assert_eq!(fixture.pooled(), pairs(&[("/out/", ""), ("/out/r", "result"), ("/tmp/", ""), ("/tmp/s", "result")]));
    overlay.shutdown().await.unwrap();
}

/// A file that was manual because it was local goes to the pool by policy once it has another name.
#[tokio::test(flavor = "multi_thread")]
async fn a_local_file_that_gets_another_name_is_flushed_without_a_request() {
    let fixture = Fixture::new();
    let overlay = engine(&fixture, &TMP_IS_LOCAL.replace("manual", "idle:0s")).await;
    let out = {
        mkdir(&overlay, "tmp").await;
        mkdir(&overlay, "out").await
    };
    write(&overlay, "tmp/s", "result").await.unwrap();
    tokio::time::sleep(LOOKED_AT).await;
    assert_eq!(in_pool(&fixture, "tmp/s"), None);
    overlay.link(find(&overlay, "tmp/s").await, out, b"r").await.unwrap();
    for name in ["out/r", "tmp/s"] {
        until_engine_sent(&fixture, name, "result").await;
    }
    overlay.shutdown().await.unwrap();
}

/// The name that a local file had may be another file's by the time it is removed, and a file that the pool had is not local.
#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_job_removes_only_what_was_made_here() {
    let fixture = Fixture::new();
    fixture.mkdir("tmp").await;
    fixture.put("tmp/theirs", b"old").await;
    let overlay = engine(&fixture, TMP_IS_LOCAL).await;
    write(&overlay, "tmp/theirs", "new").await.unwrap();
    write(&overlay, "tmp/mine", "scratch").await.unwrap();
    let (theirs, mine) = (find(&overlay, "tmp/theirs").await, find(&overlay, "tmp/mine").await);
    fixture.memory.remove(&pool_path("tmp/theirs"), &Expected::Anything).await.unwrap();
    // A listing finds that it is gone.
    stage(&overlay, "tmp").await;
    assert!(!overlay.is_local_file(theirs) && overlay.is_local_file(mine));
    overlay.job_ended(&mut job_that_made(&[theirs, mine])).await.unwrap();
    assert_eq!(read(&overlay, "tmp/theirs").await.unwrap(), "new");
    assert!(!is_there(&overlay, "tmp/mine").await);
    flushed(&overlay).await;
    assert_eq!(in_pool(&fixture, "tmp/theirs").as_deref(), Some(&b"new"[..]));
    overlay.shutdown().await.unwrap();
}

/// The settings of a directory are its owner's, whether or not the site allows some now.
#[tokio::test(flavor = "multi_thread")]
async fn only_the_owner_of_a_directory_changes_its_settings() {
    const OTHER: Caller = Caller { uid: 4712, gid: 4711, pid: 1 };
    const NAME: &[u8] = b"user.forebay.policy";
    for allow in ["", "[allow]\nsettings = [\"flush\"]\n"] {
        let fixture = Fixture::new();
        let overlay = engine(&fixture, &format!("[default]\nflush = \"manual\"\n{allow}")).await;
        let dir = overlay.mkdir(Ino::ROOT, b"d", 0o775, 0, OWNER).await.unwrap().attr.ino;
        let set = async |value: &[u8], caller| overlay.set_xattr(dir, NAME, value, 0, caller).await;
        assert!(refused(set(b"flush = \"idle:1s\"", OTHER).await).kind().errno() == libc::EPERM);
        set(b"flush = \"idle:1s\"", OWNER).await.unwrap();
        assert!(refused(overlay.remove_xattr(dir, NAME, OTHER).await).kind().errno() == libc::EPERM);
        let long = format!("flush = \"idle:1s\" # {}", "x".repeat(5000));
        assert_eq!(set(long.as_bytes(), OWNER).await.is_err(), !allow.is_empty());
        overlay.remove_xattr(dir, NAME, OWNER).await.unwrap();
        set(b"flush = \"idle:1s\"", CALLER).await.unwrap();
        overlay.shutdown().await.unwrap();
    }
}

/// SEMANTICS 85: "A file that is made under `write = "local"` never reaches the pool, not even by request, until it moves
/// to other paths or the rule changes." So it does if another client changes the directory, and this node must ask again
/// for its settings.
#[test]
fn the_settings_of_a_directory_hold_while_other_clients_change_it() {
    let mount = Mount::new(Options::policy(
        "[default]\nflush = \"idle:100ms\"\nmetadata-ttl = \"0s\"\n[allow]\nsettings = [\"write\", \"flush\"]\n",
    ));
    let dirs = [("local", "write = \"local\""), ("manual", "flush = \"manual\"")];
    for (dir, value) in dirs {
        fs::create_dir(mount.pool(dir)).unwrap();
        let mut command = Command::new("setfattr");
        run(command.args(["-n", "user.forebay.policy", "-v", value]).arg(mount.pool(dir)), COMMAND).ok();
        fs::write(mount.path(format!("{dir}/x")), "x").unwrap();
    }
    let touched = |name: &str| {
        for (dir, _) in dirs {
            fs::write(mount.pool(format!("{dir}/{name}")), name).unwrap();
            // The daemon finds that the directory has another version.
            fs::metadata(mount.path(dir)).unwrap();
        }
    };
    let kept = |what: &str| {
        for name in ["local/x", "local/z", "manual/x", "manual/z"] {
            assert!(!mount.pool(name).exists(), "{name} {what}");
        }
    };
    touched("y1");
    mount.forebay(["flush", "--wait"], &[&mount.path("local")]).ok();
    // The flush looks at everything again when a name moves.
    for (dir, _) in dirs {
        fs::rename(mount.path(format!("{dir}/x")), mount.path(format!("{dir}/z"))).unwrap();
    }
    touched("y2");
    fs::write(mount.path("other"), "other").unwrap();
    until_pool_has(&mount, "other", b"other");
    thread::sleep(MANUAL_LOOK);
    kept("by policy");
    // The next daemon has nothing in memory.
    touched("y3");
    mount.umount();
    mount.mount();
    thread::sleep(LOOKED_AT);
    kept("after the next mount");
    mount.forebay(["flush", "--wait"], &[&mount.path("local")]).ok();
    kept("by request");
    mount.flush();
    assert!(!mount.pool("local/z").exists() && mount.pool("manual/z").exists());
}

const SETTINGS: &[u8] = b"user.forebay.policy";
const FAILS: Odds = Odds { before: 1.0, after: 0.0 };

/// Another client changes a directory, and the engine finds that it does not know its settings any more.
async fn changed_by_another_client(fixture: &Fixture, overlay: &Overlay, dir: &str) {
    fixture.put(&format!("{dir}/theirs"), b"theirs").await;
    find(overlay, dir).await;
}

/// SEMANTICS 85: "A file that is made under `write = "local"` never reaches the pool, not even by request, until it moves
/// to other paths or the rule changes." Neither `close` nor a request sends it while the pool does not tell what its
/// directory says.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_sent_in_the_foreground_while_the_settings_of_its_directory_are_not_known() {
    let mut fixture = Fixture::new();
    fixture.mkdir("d").await;
    fixture.memory.set_xattr(&pool_path("d"), SETTINGS, b"write = \"local\"").await.unwrap();
    let overlay = engine(&fixture, "[default]\nflush = \"manual\"\nmetadata-ttl = \"0s\"\n").await;
    write(&overlay, "d/f", "first").await.unwrap();
    changed_by_another_client(&fixture, &overlay, "d").await;
    overlay.shutdown().await.unwrap();
    let after = tempfile::tempdir().unwrap();
    image(fixture.fast.path(), after.path());
    fixture.fast = after;
    drop(overlay);
    fixture.fault.set_odds(CallKind::Xattrs, FAILS);
    let allows = "[default]\nflush = \"on-close\"\nmetadata-ttl = \"0s\"\n[allow]\nsettings = [\"write\"]\n";
    let overlay = engine(&fixture, allows).await;
    let ino = find(&overlay, "d/f").await;
    overlay.open_file(ino, RDWR | libc::O_TRUNC).await.unwrap();
    put(&overlay, ino, 0, b"second").await;
    assert!(refused(overlay.close(ino, true).await).is(ErrorKind::Busy), "the pool does not have it");
    overlay.release(ino, RDWR);
    assert_eq!(in_pool(&fixture, "d/f"), None, "at its close");
    assert!(flush(&overlay).await.failed > 0, "a request reports it");
    assert_eq!(in_pool(&fixture, "d/f"), None, "by request");
    fixture.fault.set_odds(CallKind::Xattrs, Odds::default());
    assert_eq!(flush(&overlay).await.failed, 0);
    assert_eq!(in_pool(&fixture, "d/f"), None, "its directory says so");
    overlay.remove_xattr(find(&overlay, "d").await, SETTINGS, CALLER).await.unwrap();
    flushed(&overlay).await;
    assert_eq!(in_pool(&fixture, "d/f").as_deref(), Some(&b"second"[..]));
    overlay.shutdown().await.unwrap();
}

/// SEMANTICS 85: "It is removed when the last job that used it ends, if one of these jobs made or wrote it, or belongs to its
/// owner." So it is while the pool does not answer, by the settings
/// that the directories had, or did not have, when they were last known.
#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_job_removes_local_files_by_the_last_known_settings() {
    let fixture = Fixture::new();
    for dir in ["plain", "plain/d"] {
        fixture.mkdir(dir).await;
    }
    fixture.memory.set_xattr(&pool_path("plain/d"), SETTINGS, b"write = \"local\"").await.unwrap();
    let allows = "[default]\nflush = \"manual\"\nmetadata-ttl = \"0s\"\n[allow]\nsettings = [\"write\"]\n";
    let overlay = engine(&fixture, allows).await;
    write(&overlay, "plain/d/f", "scratch").await.unwrap();
    let ino = find(&overlay, "plain/d/f").await;
    assert!(overlay.is_local_file(ino));
    for dir in ["plain", "plain/d"] {
        changed_by_another_client(&fixture, &overlay, dir).await;
    }
    fixture.fault.set_error(ErrorKind::Unavailable);
    fixture.fault.set_odds(CallKind::Xattrs, FAILS);
    overlay.job_ended(&mut job_that_made(&[ino])).await.unwrap();
    fixture.fault.set_odds(CallKind::Xattrs, Odds::default());
    assert!(!is_there(&overlay, "plain/d/f").await);
    overlay.shutdown().await.unwrap();
}

/// A file that waited for a request because of its job does not wait when the job has ended.
#[test]
fn what_a_rule_for_jobs_held_back_is_flushed_after_the_job() {
    let mount = Mount::new(Options::policy(
        "[default]\nflush = \"idle:100ms\"\n[[rule]]\njob = \"train*\"\nflush = \"manual\"\n",
    ));
    let script = format!("echo 1 > {}/r; sleep 4; ls {}", mount.place.mnt().display(), mount.place.pool().display());
    let answer = mount.forebay(["run", "--job", "train-1", "--", "sh", "-c", &script], &[]).ok();
    assert_eq!(answer.out.trim(), "", "the job runs");
    until_pool_has(&mount, "r", b"1\n");
}

/// A file that waited for a request because of its owner or its size does not wait when these are other ones.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_rule_held_back_is_flushed_when_the_rule_does_not_hold_any_more() {
    let fixture = Fixture::new();
    let overlay = engine(
        &fixture,
        "[default]\nflush = \"idle:0s\"\n[[rule]]\npaths = \"owned\"\nowner = \"4711\"\nflush = \"manual\"\n\
         [[rule]]\npaths = \"cut\"\nsize = \"4B..\"\nflush = \"manual\"\n\
         [[rule]]\npaths = \"grown\"\nsize = \"..4B\"\nflush = \"manual\"\n",
    )
    .await;
    for name in ["owned", "cut", "grown"] {
        let made = overlay.create(Ino::ROOT, name.as_bytes(), 0o644, 0, RDWR, OWNER).await.unwrap();
        let ino = made.0.attr.ino;
        put(&overlay, ino, 0, if name == "cut" { b"large" } else { b"abc" }).await;
        close(&overlay, ino).await;
    }
    tokio::time::sleep(LOOKED_AT).await;
    let ino = |name: &'static str| find(&overlay, name);
    overlay.setattr(ino("owned").await, &Change { uid: Some(0), ..Change::default() }, CALLER).await.unwrap();
    overlay.setattr(ino("cut").await, &Change { size: Some(1), ..Change::default() }, CALLER).await.unwrap();
    write(&overlay, "grown", "large").await.unwrap();
    for (name, content) in [("owned", "abc"), ("cut", "l"), ("grown", "large")] {
        until_engine_sent(&fixture, name, content).await;
    }
    overlay.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_the_policy_waits_for_the_end_of_another_one() {
    let fixture = Fixture::new();
    let overlay = engine(&fixture, "[default]\nflush = \"manual\"\n").await;
    let ttl = || overlay.policy().uniform().unwrap().metadata_ttl.as_secs();
    let policy = |ttl: &str| Policy::parse(&format!("[default]\nmetadata-ttl = \"{ttl}\"\n")).unwrap();
    let first = overlay.begin_policy_change().await;
    let (again, other) = (overlay.clone(), policy("2s"));
    let second = tokio::spawn(async move { again.set_policy(other).await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!second.is_finished() && ttl() != 2);
    first.put_into_force(policy("1s"));
    second.await.unwrap();
    assert_eq!(ttl(), 2);
    overlay.shutdown().await.unwrap();
}
