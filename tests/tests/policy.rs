//! Policy: rules, their effect on real files, explanations, and the exchange of rules at a mount that is served.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use forebay_api::policy::{PolicyEffect, PolicyExplanation};
use forebay_tests::mount::{COMMAND, Mount, Options, Place};
use forebay_tests::process::{run, wait_until};

#[track_caller]
fn until_pool_has(mount: &Mount, name: &str, content: &[u8]) {
    let file = mount.pool(name);
    wait_until(&format!("{name} is in the pool"), || fs::read(&file).is_ok_and(|have| have == content));
}

fn explain(mount: &Mount, name: &str) -> PolicyExplanation {
    let answer = mount.forebay(["--json", "policy", "explain"], &[&mount.path(name)]).ok();
    serde_json::from_str(&answer.out).expect("an explanation")
}

fn setting<'a>(explanation: &'a PolicyExplanation, name: &str) -> (&'a str, &'a str) {
    let setting = explanation.settings.iter().find(|setting| setting.name == name).expect("the setting");
    (&setting.value, &setting.origin)
}

fn resident(mount: &Mount, name: &str) -> u64 {
    let answer = mount.forebay(["--json", "ls"], &[&mount.path(name)]).ok();
    let listed: serde_json::Value = serde_json::from_str(&answer.out).expect("JSON");
    listed["resident_bytes"].as_u64().expect("bytes")
}

fn apply(mount: &Mount, text: &str) -> PolicyEffect {
    let file = mount.place.at("applied.toml");
    fs::write(&file, text).unwrap();
    let answer = mount.forebay(["--json", "policy", "apply"], &[&file, &mount.place.mnt()]).ok();
    serde_json::from_str(&answer.out).expect("an effect")
}

/// SEMANTICS 85: "A file that is made under `write = "local"` never reaches the pool, not even by request, until it moves
/// to other paths or the rule changes."
#[test]
fn local_files_leave_no_trace_in_the_pool() {
    let mount = Mount::new(Options::policy(
        "[default]\nflush = \"idle:100ms\"\n[[rule]]\nname = \"scratch\"\npaths = [\"scratch\", \"scratch/**\"]\nwrite = \"local\"\n",
    ));
    fs::create_dir_all(mount.path("scratch/deep")).unwrap();
    fs::write(mount.path("scratch/deep/a"), "local").unwrap();
    fs::write(mount.path("scratch/b"), "moved out").unwrap();
    fs::write(mount.path("c"), "result").unwrap();
    until_pool_has(&mount, "c", b"result");
    mount.flush();
    assert!(!mount.pool("scratch").exists(), "not even by request");
    assert_eq!(fs::read(mount.path("scratch/deep/a")).unwrap(), b"local");
    let explained = explain(&mount, "scratch/deep/a");
    assert_eq!(setting(&explained, "write").0, "local");
    assert!(setting(&explained, "write").1.contains("rule scratch"), "{explained:?}");
    assert!(explained.next.iter().any(|line| line.contains("never sent")), "{explained:?}");
    let dirty = mount.forebay(["dirty"], &[&mount.place.mnt()]).ok().out;
    assert!(dirty.contains("write = local (rule scratch"), "{dirty}");
    // A file that is moved out of the rule's paths is like any other file.
    fs::rename(mount.path("scratch/b"), mount.path("b")).unwrap();
    until_pool_has(&mount, "b", b"moved out");
    // It survives a restart.
    mount.umount();
    mount.mount();
    assert_eq!(fs::read(mount.path("scratch/deep/a")).unwrap(), b"local");
    fs::remove_dir_all(mount.path("scratch")).unwrap();
    mount.flush();
    assert_eq!(mount.forebay(["dirty"], &[&mount.place.mnt()]).ok().out.trim(), "");
}

/// SEMANTICS 85: "It is removed when the last job that used it ends, if one of these jobs made or wrote it, or belongs to its
/// owner."
#[test]
fn local_files_of_a_job_are_gone_when_it_ends_and_its_results_are_flushed() {
    let mount = Mount::new(Options::policy(
        "[default]\nflush = \"manual\"\n[[rule]]\npaths = [\"tmp/**\", \"tmp\"]\nwrite = \"local\"\n\
         [[rule]]\njob = \"train*\"\npaths = \"out/**\"\nflush = \"job-end\"\n\
         [[rule]]\npaths = \"out/**\"\nflush = \"job-end\"\n",
    ));
    fs::create_dir(mount.path("out")).unwrap();
    fs::write(mount.path("by-hand"), "stays").unwrap();
    let script = "mkdir -p tmp/d && echo scratch > tmp/d/s && echo result > out/r && cat tmp/d/s && sleep 3";
    let answer = mount.forebay(
        ["run", "--job", "train-1", "--", "sh", "-c", &format!("cd {} && {script}", mount.place.mnt().display())],
        &[],
    );
    assert_eq!(answer.ok().out.trim(), "scratch");
    until_pool_has(&mount, "out/r", b"result\n");
    wait_until("the job's scratch is gone", || !mount.path("tmp").exists());
    assert!(!mount.pool("tmp").exists() && !mount.pool("by-hand").exists());
}

#[test]
fn results_of_a_running_job_wait_for_its_end() {
    let mount = Mount::new(Options::policy(
        "[default]\nflush = \"idle:100ms\"\n[[rule]]\npaths = \"out/**\"\nflush = \"job-end\"\n",
    ));
    fs::create_dir(mount.path("out")).unwrap();
    let script = format!("echo 1 > {0}/out/r; echo 1 > {0}/other; sleep 8", mount.place.mnt().display());
    thread::scope(|scope| {
        let job = scope.spawn(|| mount.forebay(["run", "--job", "j", "--", "sh", "-c", &script], &[]).ok());
        until_pool_has(&mount, "other", b"1\n");
        assert!(!mount.pool("out/r").exists(), "the job runs");
        job.join().unwrap();
    });
    until_pool_has(&mount, "out/r", b"1\n");
}

#[test]
fn reads_that_bypass_the_cache_are_not_kept() {
    let mount = Mount::new(Options::policy("[[rule]]\npaths = \"big/**\"\nread = \"bypass\"\n"));
    fs::create_dir(mount.pool("big")).unwrap();
    let content: Vec<u8> = (0..3_000_000u32).map(|at| (at % 251) as u8).collect();
    fs::write(mount.pool("big/a"), &content).unwrap();
    fs::write(mount.pool("kept"), &content).unwrap();
    assert!(fs::read(mount.path("big/a")).unwrap() == content && fs::read(mount.path("kept")).unwrap() == content);
    assert_eq!((resident(&mount, "big/a"), resident(&mount, "kept")), (0, 3_000_000));
    // A change in the pool is seen at the next open.
    fs::write(mount.pool("big/a"), "new").unwrap();
    assert_eq!(fs::read(mount.path("big/a")).unwrap(), b"new");
    // What is staged by request is used.
    mount.forebay(["stage"], &[&mount.path("big/a")]).ok();
    assert_eq!(resident(&mount, "big/a"), 3);
    // A writer gets the whole file.
    OpenOptions::new().append(true).open(mount.path("big/a")).unwrap().write_all(b"er").unwrap();
    mount.flush();
    assert_eq!(fs::read(mount.pool("big/a")).unwrap(), b"newer");
}

/// SEMANTICS 86: "Content that a rule pins is not evicted to make room."
#[test]
fn pinned_files_are_not_evicted_to_make_room() {
    let options = Options {
        limit: Some("64M".into()),
        ..Options::policy("[[rule]]\npaths = \"ref/**\"\nread = \"pin\"\n[default]\nwhole-file = \"16MiB\"\n")
    };
    let mount = Mount::new(options);
    fs::create_dir(mount.pool("ref")).unwrap();
    fs::write(mount.pool("ref/a"), vec![1u8; 8 << 20]).unwrap();
    for number in 0..20 {
        fs::write(mount.pool(format!("{number}")), vec![2u8; 8 << 20]).unwrap();
    }
    fs::read(mount.path("ref/a")).unwrap();
    for number in 0..20 {
        fs::read(mount.path(format!("{number}"))).unwrap();
    }
    assert_eq!(resident(&mount, "ref/a"), 8 << 20);
    assert!((0..20).any(|number| resident(&mount, &format!("{number}")) == 0), "something was evicted");
    // By request it is.
    mount.forebay(["evict"], &[&mount.path("ref/a")]).ok();
    assert_eq!(resident(&mount, "ref/a"), 0);
}

#[test]
fn writes_around_the_cache_are_in_the_pool_after_close_and_not_kept() {
    let mount = Mount::new(Options::policy(
        "[default]\nflush = \"manual\"\n[[rule]]\npaths = \"out/**\"\nwrite = \"around\"\n[[rule]]\npaths = \"t/**\"\nwrite = \"through\"\n",
    ));
    for dir in ["out", "t"] {
        fs::create_dir(mount.path(dir)).unwrap();
        fs::write(mount.path(format!("{dir}/a")), vec![7u8; 1 << 20]).unwrap();
        assert_eq!(fs::metadata(mount.pool(format!("{dir}/a"))).unwrap().size(), 1 << 20);
    }
    wait_until("it is dropped", || resident(&mount, "out/a") == 0);
    assert_eq!(resident(&mount, "t/a"), 1 << 20);
    assert_eq!(fs::read(mount.path("out/a")).unwrap(), vec![7u8; 1 << 20]);
    assert_eq!(resident(&mount, "out/a"), 1 << 20, "what is read is kept");
}

#[test]
fn an_open_file_is_flushed_every_so_often() {
    let mount =
        Mount::new(Options::policy("[[rule]]\npaths = \"log\"\nflush = \"every:1s\"\n[default]\nflush = \"manual\"\n"));
    let mut log = File::create(mount.path("log")).unwrap();
    for line in ["one\n", "two\n"] {
        log.write_all(line.as_bytes()).unwrap();
        let mut so_far = String::new();
        File::open(mount.path("log")).unwrap().read_to_string(&mut so_far).unwrap();
        until_pool_has(&mount, "log", so_far.as_bytes());
    }
    drop(log);
}

/// SEMANTICS 88: "What is sent of a file that a program writes all the time is its content at one moment."
#[test]
fn a_file_that_is_written_without_a_pause_is_sent_from_a_reflink() {
    let place = Place::new();
    place.small_disk("fast", "xfs", 400);
    let text = "[default]\nflush = \"manual\"\n[[rule]]\npaths = \"log\"\nflush = \"every:1s\"\n";
    let mount = Mount::on(place, Options { limit: Some("200M".into()), ..Options::policy(text) });
    const BLOCK: usize = 64;
    const BLOCKS: u64 = 1 << 16;
    let (log, until) = (mount.path("log"), Instant::now() + Duration::from_secs(300));
    let (stop, least) = (&AtomicBool::new(false), Instant::now() + Duration::from_secs(25));
    fs::write(&log, vec![b'0'; BLOCK * BLOCKS as usize]).unwrap();
    let mut seen = Vec::new();
    thread::scope(|scope| {
        let writer = scope.spawn(move || {
            let file = OpenOptions::new().write(true).open(log).unwrap();
            let mut number = 0u64;
            while Instant::now() < until && !stop.load(Ordering::Relaxed) {
                // Each block is written at once. The numbers of the blocks are written in turn, without a pause.
                let digit = b'0' + (number / BLOCKS % 10) as u8;
                file.write_all_at(&[digit; BLOCK], number % BLOCKS * BLOCK as u64).unwrap();
                number += 1;
            }
        });
        while !writer.is_finished() {
            let now = fs::read(mount.pool("log")).unwrap_or_default();
            let is_whole = now.chunks(BLOCK).all(|block| block.iter().all(|byte| *byte == block[0]));
            assert!(is_whole, "a block is half of one write and half of another");
            // At one moment, there is at most one place where a newer round ends and an older one begins.
            let ends = now.chunks(BLOCK).zip(now.chunks(BLOCK).skip(1)).filter(|(a, b)| a[0] != b[0]).count();
            assert!(ends <= 1, "{ends} rounds are mixed");
            if !now.is_empty() && seen.last() != Some(&now) {
                seen.push(now);
            }
            stop.store(seen.len() >= 3 && Instant::now() > least, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(50));
        }
    });
    assert!(seen.len() >= 3, "the pool saw only {} states\n{}", seen.len(), mount.log());
    mount.flush();
    assert_eq!(fs::read(mount.pool("log")).unwrap(), fs::read(mount.path("log")).unwrap());
}

#[test]
fn a_deadline_ends_the_wait_for_a_writer_that_never_pauses() {
    let mount = Mount::new(Options::policy("[default]\nflush = \"idle:1h\"\nflush-deadline = \"2s\"\n"));
    fs::write(mount.path("a"), "a").unwrap();
    until_pool_has(&mount, "a", b"a");
}

/// SEMANTICS 87: "A conflict ends as the rule of the file says, and is reported."
#[test]
fn conflicts_end_as_the_rule_says() {
    let mount = Mount::new(Options::policy(
        "[default]\nflush = \"manual\"\n\
         [[rule]]\npaths = \"ours*\"\nconflict = \"ours\"\n\
         [[rule]]\npaths = \"theirs*\"\nconflict = \"theirs\"\n\
         [[rule]]\npaths = \"fail*\"\nconflict = \"fail\"\n",
    ));
    for name in ["ours", "theirs", "fail"] {
        fs::write(mount.pool(name), "before").unwrap();
        assert_eq!(fs::read(mount.path(name)).unwrap(), b"before");
        fs::write(mount.path(name), "mount").unwrap();
        fs::write(mount.pool(name), "the pool").unwrap();
        // New in both.
        fs::write(mount.path(format!("{name}-new")), "mount").unwrap();
        fs::write(mount.pool(format!("{name}-new")), "the pool").unwrap();
    }
    let flushed = mount.forebay(["flush", "--wait"], &[&mount.place.mnt()]);
    assert_ne!(flushed.code, Some(0));
    assert!(flushed.err.contains("conflict = fail"), "{}", flushed.err);
    for suffix in ["", "-new"] {
        let read = |file: &Path| fs::read_to_string(file).unwrap();
        let both = |name: &str| {
            let name = format!("{name}{suffix}");
            (read(&mount.path(&name)), read(&mount.pool(&name)))
        };
        assert_eq!(both("ours"), ("mount".into(), "mount".into()));
        assert_eq!(both("theirs"), ("the pool".into(), "the pool".into()));
        assert_eq!(both("fail"), ("mount".into(), "the pool".into()));
    }
    let names: Vec<_> = fs::read_dir(mount.place.pool()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 6, "no copy lies beside another: {names:?}");
    assert!(mount.status().conflicts.iter().any(|line| line.contains("dropped")));
}

#[test]
fn owners_may_set_the_policy_of_their_directories() {
    let mount = Mount::new(Options::policy("[default]\nflush = \"manual\"\n[allow]\nsettings = [\"flush\"]\n"));
    fs::create_dir_all(mount.path("mine/deep")).unwrap();
    let set = |value: &str| {
        let mut command = Command::new("setfattr");
        command.args(["-n", "user.forebay.policy", "-v", value]).arg(mount.path("mine"));
        run(&mut command, COMMAND)
    };
    for wrong in ["write = \"local\"", "flush = \"soon\"", "flush"] {
        assert_ne!(set(wrong).code, Some(0), "{wrong}");
    }
    assert!(mount.log().contains("does not allow `write`"), "{}", mount.log());
    set("flush = \"idle:100ms\"").ok();
    fs::write(mount.path("mine/deep/a"), "a").unwrap();
    fs::write(mount.path("b"), "b").unwrap();
    until_pool_has(&mount, "mine/deep/a", b"a");
    assert!(!mount.pool("b").exists());
    let explained = explain(&mount, "mine/deep/a");
    assert_eq!(setting(&explained, "flush"), ("idle:100ms", "user.forebay.policy of /mine"));
    // The next daemon reads it from the pool.
    mount.umount();
    mount.mount();
    fs::write(mount.path("mine/deep/c"), "c").unwrap();
    until_pool_has(&mount, "mine/deep/c", b"c");
}

/// A duration that no clock can count is refused. If another client has set it, the flush goes on by the other rules.
#[test]
fn an_endless_duration_ends_no_worker() {
    let text = "[default]\nflush = \"idle:100ms\"\n[allow]\nsettings = [\"flush\", \"flush-deadline\"]\n";
    let set = |dir: &Path, value: &str| {
        let mut command = Command::new("setfattr");
        run(command.args(["-n", "user.forebay.policy", "-v", value]).arg(dir), COMMAND)
    };
    let place = Place::new();
    let theirs = place.pool().join("theirs");
    fs::create_dir(&theirs).unwrap();
    set(&theirs, "flush = \"idle:18446744073709s\"").ok();
    let mount = Mount::on(place, Options::policy(text));
    let worker = mount.worker();
    let mine = mount.path("mine");
    fs::create_dir(&mine).unwrap();
    for seconds in ["18446744073709", "1844674407370955161", "18446744073709551615"] {
        assert_ne!(set(&mine, &format!("flush = \"idle:{seconds}s\"")).code, Some(0), "{seconds}");
        assert_ne!(set(&mine, &format!("flush-deadline = \"{seconds}s\"")).code, Some(0), "{seconds}");
    }
    assert!(mount.log().contains("at most 36500d"), "{}", mount.log());
    set(&mine, "flush = \"idle:36500d\"").ok();
    fs::write(mount.path("mine/closed"), "1").unwrap();
    let mut open = File::create(mount.path("mine/open")).unwrap();
    open.write_all(b"2").unwrap();
    fs::write(mount.path("theirs/a"), "3").unwrap();
    fs::write(mount.path("other"), "4").unwrap();
    until_pool_has(&mount, "other", b"4");
    until_pool_has(&mount, "theirs/a", b"3");
    let dirty = mount.forebay(["dirty"], &[&mount.place.mnt()]).ok().out;
    assert!(dirty.contains("mine/closed") && dirty.contains("mine/open"), "{dirty}");
    assert!(!mount.pool("mine/closed").exists() && !mount.pool("mine/open").exists());
    assert_eq!(mount.worker(), worker);
    drop(open);
    mount.umount();
    mount.mount();
    let worker = mount.worker();
    fs::write(mount.path("later"), "5").unwrap();
    until_pool_has(&mount, "later", b"5");
    assert_eq!(mount.worker(), worker);
}

/// SEMANTICS 89: "A policy with an error is refused as a whole. A policy that was applied holds for a daemon that starts
/// again."
#[test]
fn another_policy_is_put_into_force_and_stays_after_a_restart_of_the_daemon() {
    let mount = Mount::manual();
    fs::write(mount.path("a"), vec![1u8; 1 << 20]).unwrap();
    let new = "[default]\nflush = \"idle:100ms\"\n[space]\nevictor = \"lru\"\n";
    let file = mount.place.at("new.toml");
    fs::write(&file, new).unwrap();
    let rehearsed = mount.forebay(["--json", "policy", "apply", "--dry-run"], &[&file, &mount.place.mnt()]).ok();
    let rehearsed: PolicyEffect = serde_json::from_str(&rehearsed.out).unwrap();
    assert!(rehearsed.differences.contains(&"default flush: manual -> idle:100ms".into()), "{rehearsed:?}");
    assert_eq!(rehearsed.at_next_mount, ["space.evictor: gittins -> lru"]);
    assert_eq!((rehearsed.flushed.files, rehearsed.flushed.bytes >= 1 << 20), (2, true), "{rehearsed:?}");
    assert!(rehearsed.seconds > 0.0 && !mount.pool("a").exists());
    let text = mount.forebay(["policy", "apply", "--dry-run"], &[&file, &mount.place.mnt()]).ok().out;
    assert!(text.contains("would change:") && text.contains("flushed by policy from now on"), "{text}");
    assert_eq!(apply(&mount, new), rehearsed);
    until_pool_has(&mount, "a", &vec![1u8; 1 << 20]);
    let worker = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(worker);
    fs::write(mount.path("b"), "b").unwrap();
    until_pool_has(&mount, "b", b"b");
    assert_eq!(setting(&explain(&mount, "b"), "flush").0, "idle:100ms");
    // A bad file changes nothing.
    fs::write(&file, "[default]\nflush = \"soon\"\n").unwrap();
    let refused = mount.forebay(["policy", "apply"], &[&file, &mount.place.mnt()]);
    assert!(refused.code != Some(0) && refused.err.contains("new.toml:2:9"), "{}", refused.err);
    assert_eq!(setting(&explain(&mount, "b"), "flush").0, "idle:100ms");
    // And back: what was due by policy waits for a request again.
    apply(&mount, "[default]\nflush = \"manual\"\n");
    fs::write(mount.path("c"), "c").unwrap();
    thread::sleep(Duration::from_secs(2));
    assert!(!mount.pool("c").exists());
    // The policy of the mount is that of its file again after it is mounted again.
    apply(&mount, "[default]\nflush = \"idle:1h\"\n");
    mount.umount();
    mount.mount();
    assert_eq!(setting(&explain(&mount, "b"), "flush").0, "manual");
}

#[test]
fn a_policy_changes_under_load_and_no_operation_fails() {
    let mount = Mount::new(Options::policy("[default]\nflush = \"idle:50ms\"\n"));
    let policies = [
        "[default]\nflush = \"manual\"\n",
        "[default]\nflush = \"on-close\"\n",
        "[default]\nflush = \"idle:20ms\"\n[[rule]]\npaths = \"**/*1\"\nread = \"bypass\"\n",
        "[[rule]]\npaths = \"**/*2\"\nwrite = \"around\"\n[default]\nflush = \"every:1s\"\n",
        "[[rule]]\npaths = \"**/*3\"\nwrite = \"local\"\n[default]\nflush = \"idle:20ms\"\n",
    ];
    let until = Instant::now() + Duration::from_secs(12);
    thread::scope(|scope| {
        for writer in 0..3 {
            let mount = &mount;
            scope.spawn(move || {
                let mut round = 0u32;
                while Instant::now() < until {
                    let name = mount.path(format!("{writer}-{}", round % 7));
                    fs::write(&name, format!("{round}")).unwrap();
                    assert_eq!(fs::read_to_string(&name).unwrap(), format!("{round}"));
                    round += 1;
                }
            });
        }
        for text in policies.iter().cycle() {
            if Instant::now() >= until {
                break;
            }
            apply(&mount, text);
        }
    });
    apply(&mount, "[default]\nflush = \"manual\"\n");
    mount.flush();
    for entry in fs::read_dir(mount.place.mnt()).unwrap() {
        let name = entry.unwrap().file_name();
        let read = |file: &Path| fs::read_to_string(file).unwrap();
        assert_eq!(read(&mount.path(&name)), read(&mount.pool(&name)), "{name:?}");
    }
    let fsck = mount.forebay(["fsck"], &[&mount.place.mnt()]);
    assert_eq!(fsck.code, Some(0), "{}{}", fsck.out, fsck.err);
}

#[test]
fn of_files_that_are_due_those_of_high_priority_go_first() {
    const LOW: usize = 64;
    let text = "[default]\nflush = \"manual\"\npriority = \"low\"\n[[rule]]\npaths = \"high-*\"\npriority = \"high\"\n";
    let mount = Mount::new(Options { throttle: Some("100MB/s,30ms".into()), ..Options::policy(text) });
    let count = |prefix: &str| {
        let names = fs::read_dir(mount.place.pool()).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().starts_with(prefix)).count()
    };
    for number in 0..LOW {
        fs::write(mount.path(format!("low-{number}")), "low").unwrap();
    }
    for number in 0..4 {
        fs::write(mount.path(format!("high-{number}")), "high").unwrap();
    }
    // All of them are due at once.
    apply(&mount, &text.replace("manual", "idle:0s"));
    wait_until("all are in the pool", || count("high-") == 4 && count("low-") == LOW);
    let last = |prefix: &str| {
        let files = fs::read_dir(mount.place.pool()).unwrap().map(Result::unwrap);
        let of_prefix = files.filter(|file| file.file_name().to_string_lossy().starts_with(prefix));
        of_prefix.map(|file| file.metadata().unwrap()).map(|meta| (meta.ctime(), meta.ctime_nsec())).max()
    };
    assert!(last("high-") < last("low-"), "all others were there first");
}

#[test]
fn all_files_that_wait_get_their_time_by_the_new_policy() {
    // More than one round takes.
    const FILES: usize = 5000;
    let mount = Mount::new(Options::policy("[default]\nflush = \"idle:1h\"\n"));
    fs::create_dir(mount.path("d")).unwrap();
    for number in 0..FILES {
        File::create(mount.path(format!("d/{number}"))).unwrap();
    }
    apply(&mount, "[default]\nflush = \"idle:2h\"\n");
    thread::sleep(Duration::from_secs(1));
    assert!(!mount.pool("d").exists());
    apply(&mount, "[default]\nflush = \"idle:0s\"\n");
    let count = || fs::read_dir(mount.pool("d")).map_or(0, Iterator::count);
    wait_until("all are in the pool", || count() == FILES);
}

#[test]
fn the_flush_keeps_to_its_rate() {
    let mount = Mount::new(Options::policy("[default]\nflush = \"manual\"\n[write-back]\nrate = \"1MiB\"\n"));
    fs::write(mount.path("a"), vec![1u8; 4 << 20]).unwrap();
    let begun = Instant::now();
    mount.flush();
    assert!(begun.elapsed() >= Duration::from_secs(3), "4 MiB went in {:?}", begun.elapsed());
    apply(&mount, "[default]\nflush = \"manual\"\n[write-back]\nschedule = \"00:00-24:00 unlimited\"\n");
    fs::write(mount.path("b"), vec![1u8; 64 << 20]).unwrap();
    mount.flush();
    assert_eq!(fs::metadata(mount.pool("b")).unwrap().size(), 64 << 20);
}

#[test]
fn the_flush_keeps_to_its_rate_of_requests() {
    const FILES: usize = 20;
    let mount = Mount::new(Options::policy("[default]\nflush = \"manual\"\n[write-back]\nrequests = \"10/s\"\n"));
    (0..FILES).for_each(|number| fs::write(mount.path(format!("a{number}")), "x").unwrap());
    let begun = Instant::now();
    mount.flush();
    // The first one has its time, too.
    assert!(begun.elapsed() >= Duration::from_secs(2), "{FILES} files went in {:?}", begun.elapsed());
    let schedule =
        "[default]\nflush = \"manual\"\n[write-back]\nrequests = \"1/s\"\nschedule = \"00:00-24:00 unlimited\"\n";
    apply(&mount, schedule);
    // More than could be sent at 1/s before the flush is given up.
    const MORE: usize = 300;
    (0..MORE).for_each(|number| fs::write(mount.path(format!("b{number}")), "x").unwrap());
    mount.flush();
    assert_eq!(fs::read_dir(mount.pool("")).unwrap().count(), FILES + MORE);
}

#[test]
fn files_are_checked_and_compared_without_a_mount() {
    let mount = Mount::manual();
    let file = |name: &str, text: &str| {
        let file = mount.place.at(name);
        fs::write(&file, text).unwrap();
        file
    };
    let good = file("good.toml", "[default]\nflush = \"manual\"\n");
    let bad = file("bad.toml", "[[rule]]\npath = \"a\"\nflush = \"manual\"\n");
    assert_eq!(mount.forebay(["policy", "check"], &[&good]).ok().out, "");
    let refused = mount.forebay(["policy", "check"], &[&bad]);
    assert!(refused.code != Some(0) && refused.err.contains("bad.toml:2:1: "), "{}", refused.err);
    assert!(refused.err.contains("did you mean `paths`?"), "{}", refused.err);
    let differs = mount.forebay(["policy", "diff"], &[&good, &file("other.toml", "")]);
    assert_eq!((differs.code, differs.out.trim()), (Some(1), "default flush: manual -> idle:5s"));
    assert_eq!(mount.forebay(["policy", "diff"], &[&good, &good]).code, Some(0));
}

/// SEMANTICS 11: "If a worker dies, another one replaces it." It depends neither on the machine's users nor on the file of
/// the policy that was applied.
#[test]
fn a_worker_that_starts_again_knows_the_users_of_the_policy_and_outlives_a_damaged_one() {
    let mount = Mount::new(Options::policy("[[rule]]\nowner = [\"root\", \"4711\"]\nflush = \"manual\"\n"));
    let noted = serde_json::to_value(&mount.state().config.accounts).unwrap();
    assert_eq!(noted["users"], serde_json::json!({ "root": 0 }));
    fs::write(mount.path("a"), "a").unwrap();
    apply(&mount, "[[rule]]\nowner = \"root\"\nflush = \"idle:1h\"\n");
    let applied = mount.runtime().dir().join("policy.json");
    let kept: serde_json::Value = serde_json::from_slice(&fs::read(&applied).unwrap()).unwrap();
    assert_eq!(kept["accounts"]["users"], serde_json::json!({ "root": 0 }));
    fs::write(&applied, "{").unwrap();
    let worker = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(worker);
    assert_eq!(setting(&explain(&mount, "a"), "flush").0, "manual");
    assert!(mount.log().contains("that of the mount is in force"), "{}", mount.log());
}
