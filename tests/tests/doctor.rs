//! `forebay doctor --pool`: what it reports of a pool, and that it leaves nothing behind.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use forebay_tests::mount::Place;
use forebay_tests::process::{Answer, forebay, run, wait};
use forebay_tests::servers::Server;
use forebay_tests::servers::nfs::{NfsServer, Squash};
use forebay_tests::servers::s3::Versitygw;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(600);
const DONE: i32 = 0;
const INCOMPLETE: i32 = 1;
const USAGE: i32 = 2;
const UNAVAILABLE: i32 = 4;
const DENIED: i32 = 7;
const MISSING: i32 = 9;
const UNFIT: i32 = 11;
const NOBODY: u32 = 65_534;
const CASES: usize = 40;

fn doctor(url: &str, environment: &BTreeMap<String, String>, words: &[&str]) -> Answer {
    run(Command::new(forebay()).args(["doctor", "--pool", url]).args(words).envs(environment), LIMIT)
}

fn on_dir(dir: &Path, words: &[&str]) -> Answer {
    doctor(dir.to_str().unwrap(), &BTreeMap::new(), words)
}

/// Returns the cases that do not apply to the pool.
fn not_applicable(answer: &Answer) -> Vec<String> {
    let ended = steps(answer, "ended").into_iter().filter(|end| end["result"] == "not_applicable");
    ended.map(|end| end["case"].as_str().unwrap().to_owned()).collect()
}

/// Returns the lines of `--json` that have this step.
fn steps(answer: &Answer, step: &str) -> Vec<Value> {
    let lines = answer.out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| line["step"] == step).collect()
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name != ".sgwtmp");
    names.sort();
    names
}

/// A pool with files passes. Afterwards it has those files, and nothing else.
fn passes_and_is_left_as_it_was(url: &str, environment: &BTreeMap<String, String>, tree: &Path) -> Answer {
    fs::create_dir(tree.join("theirs")).unwrap();
    fs::write(tree.join("theirs/file"), "kept").unwrap();
    fs::write(tree.join("forebay-doctor-1-0"), "another's").unwrap();
    let dry = doctor(url, environment, &["--dry-run"]).ok();
    assert!(dry.out.contains("would make /forebay-doctor-") && dry.out.contains("conditional changes"), "{dry}");
    assert_eq!(names(tree), ["forebay-doctor-1-0", "theirs"]);
    let answer = doctor(url, environment, &["--json"]).ok();
    let (attached, ended, done) = (steps(&answer, "attached"), steps(&answer, "ended"), steps(&answer, "done"));
    assert_eq!((attached.len(), done.len()), (1, 1), "{answer}");
    assert!(ended.len() > CASES, "{answer}");
    assert!(ended.iter().all(|end| end["result"] != "failed" && end["reason"].is_null()), "{answer}");
    assert_eq!(done[0]["passed"], ended.len() - not_applicable(&answer).len(), "{answer}");
    assert_eq!((&done[0]["not_run"], &done[0]["left_behind"]), (&0.into(), &Value::Null), "{answer}");
    assert_eq!(names(tree), ["forebay-doctor-1-0", "theirs"]);
    assert_eq!(names(&tree.join("theirs")), ["file"]);
    assert_eq!(fs::read(tree.join("theirs/file")).unwrap(), b"kept");
    assert_eq!(fs::read(tree.join("forebay-doctor-1-0")).unwrap(), b"another's");
    answer
}

#[test]
fn a_directory_passes_and_is_left_as_it_was() {
    let place = Place::new();
    let url = place.pool().to_str().unwrap().to_owned();
    let answer = passes_and_is_left_as_it_was(&url, &BTreeMap::new(), &place.pool());
    assert_eq!(steps(&answer, "attached")[0]["capabilities"]["objects"]["hard_links"], true);
    // A directory takes ranges of a file, and so needs no parts.
    let not_applicable = not_applicable(&answer);
    assert!(not_applicable.iter().all(|case| case.starts_with("parts_")), "{answer}");
    let shown = on_dir(&place.pool(), &[]).ok();
    let end = format!(" passed, 0 failed, {} not applicable", not_applicable.len());
    for words in ["hard links", "ok       hard_links_name_one_file", &end] {
        assert!(shown.out.contains(words), "it does not say {words}: {shown}");
    }
}

#[test]
fn s3_passes_and_is_left_as_it_was() {
    let server = Versitygw::start();
    let remote = server.remote();
    let answer = passes_and_is_left_as_it_was(&remote.url, &remote.environment, &server.files());
    let links = steps(&answer, "ended").into_iter().find(|end| end["case"] == "hard_links_name_one_file").unwrap();
    assert_eq!(links["result"], "not_applicable", "{answer}");
    let wrong = [("AWS_ACCESS_KEY_ID", "forebay"), ("AWS_SECRET_ACCESS_KEY", "wrong")];
    let wrong = wrong.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    doctor(&remote.url, &wrong, &[]).refused(DENIED, &["AWS_SECRET_ACCESS_KEY"]);
}

#[test]
fn nfs_passes_and_is_left_as_it_was() {
    let mut server = NfsServer::start(Path::new("/var/tmp"), Squash::None);
    let remote = Server::remote(&server);
    passes_and_is_left_as_it_was(&remote.url, &remote.environment, &server.export());
    server.kill();
    doctor(&remote.url, &remote.environment, &[]).refused(UNAVAILABLE, &["does not answer", "check that"]);
}

#[test]
fn an_unprivileged_user_can_test_a_directory_too() {
    let place = Place::new();
    place.give_to(NOBODY);
    let mut command = Command::new(place.lend(&forebay()));
    command.args(["doctor", "--json", "--pool"]).arg(place.pool()).uid(NOBODY).gid(NOBODY);
    let answer = run(&mut command, LIMIT);
    let done = steps(&answer, "done");
    // `MISSING` reports what the machine denies to users, and not a fault of the pool.
    assert!(matches!(answer.code, Some(DONE | MISSING)), "{answer}");
    assert_eq!(done[0]["failed"], 0, "{answer}");
    assert!(done[0]["not_applicable"].as_u64() > Some(0), "{answer}");
    assert!(names(&place.pool()).is_empty());
}

#[test]
fn a_case_that_fails_has_an_exit_code_and_a_reason() {
    let place = Place::new();
    let dir = place.small_disk("small", "tmpfs", 16);
    fs::write(dir.join("theirs"), "kept").unwrap();
    let answer = on_dir(&dir, &["--json"]);
    assert_eq!(answer.code, Some(UNFIT), "{answer}");
    let ended = steps(&answer, "ended");
    let failed: Vec<_> = ended.iter().filter(|end| end["result"] == "failed").collect();
    let large =
        failed.iter().find(|end| end["case"] == "files_of_64_mib_come_back").unwrap_or_else(|| panic!("{answer}"));
    assert!(large["reason"].as_str().unwrap().contains("No space left"), "{answer}");
    // The other cases run all the same.
    assert!(ended.len() > CASES && failed.len() < ended.len() / 2, "{answer}");
    assert_eq!(names(&dir), ["theirs"]);
    on_dir(&dir, &[]).refused(UNFIT, &["FAILED", "files_of_64_mib_come_back", "No space left"]);
}

#[test]
fn what_cannot_be_written_to_is_described_and_left_alone() {
    let place = Place::new();
    let dir = place.small_disk("fixed", "tmpfs", 16);
    let remount = Command::new("mount").args(["-o", "remount,ro"]).arg(&dir).status().unwrap();
    assert!(remount.success());
    on_dir(&dir, &[]).refused(INCOMPLETE, &["symlinks", "is read-only", "the suite needs to write", "--dry-run"]);
    on_dir(&dir, &["--dry-run"]).ok();
    // A directory that only its owner may write to.
    let mut command = Command::new(place.lend(&forebay()));
    command.args(["doctor", "--pool"]).arg(place.pool()).uid(NOBODY).gid(NOBODY);
    run(&mut command, LIMIT).refused(DENIED, &["symlinks", "forebay-doctor-", "Permission denied"]);
}

#[test]
fn what_is_no_pool_is_refused_with_what_is_wrong() {
    for (url, code, words) in [
        ("ftp://host/a", USAGE, "known"),
        ("s3://bucket?colour=red", USAGE, "unknown option colour"),
        ("nfs:///a", USAGE, "names no server"),
    ] {
        let answer = doctor(url, &BTreeMap::new(), &[]).refused(code, &[words]);
        assert!(answer.out.is_empty(), "a refusal is no output: {answer}");
    }
    doctor("/no/such/place", &BTreeMap::new(), &[]).refused(MISSING, &["/no/such/place", "mount the pool first"]);
    let answer = run(Command::new(forebay()).args(["doctor", "--dry-run"]), LIMIT);
    answer.refused(USAGE, &["--pool"]);
}

/// After a signal, `doctor` removes its scratch directory before it ends.
#[test]
fn a_trial_that_is_interrupted_is_cleared_away() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let server = Versitygw::start();
        let (remote, files) = (server.remote(), server.files());
        fs::write(files.join("theirs"), "kept").unwrap();
        let mut command = Command::new(forebay());
        command.args(["doctor", "--pool", &remote.url]).envs(&remote.environment);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let since = Instant::now();
        // Waits for the middle of the case with the most files.
        let many = || {
            let scratch = names(&files).into_iter().find(|name| name.starts_with("forebay-doctor-"))?;
            fs::read_dir(files.join(scratch).join("three_thousand_entries_are_listed_once_each")).ok()
        };
        while many().is_none_or(|entries| entries.count() < 50) {
            assert!(since.elapsed() < LIMIT && child.try_wait().unwrap().is_none(), "it never came so far");
            std::thread::sleep(Duration::from_millis(5));
        }
        // SAFETY: a plain system call on a child process that was not reaped.
        unsafe { libc::kill(child.id().cast_signed(), signal) };
        let status = wait(&mut child, LIMIT).expect("it ends");
        assert_eq!(status.code(), Some(INCOMPLETE));
        assert_eq!(names(&files), ["theirs"]);
    }
}
