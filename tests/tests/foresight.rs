//! The daemon learns what runs of a job read, and fetches it for the next run in advance.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use forebay_tests::mount::{COMMAND, Mount, Options, content};
use forebay_tests::process::{Answer, Running, forebay, run, wait_until};
use serde_json::Value;

const USAGE: i32 = 2;

fn mount(policy: Option<&str>) -> Mount {
    Mount::new(Options { policy: policy.map(str::to_owned), ..Options::default() })
}

fn put(mount: &Mount, path: &str, seed: u64, len: usize) {
    let path = mount.pool(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content(seed, len)).unwrap();
}

/// `forebay run` of a command in the mount.
#[track_caller]
fn job(mount: &Mount, id: &str, options: &[&str], words: &[&str]) -> Value {
    let mut command = Command::new(forebay());
    command.args(["run", "--job", id, "--mount"]).arg(mount.place.mnt()).args(options).arg("--").args(words);
    run(command.current_dir(mount.place.mnt()), COMMAND).ok();
    let answer = mount.forebay(["--json", "job", "show", id, "--mount"], &[&mount.place.mnt()]).ok();
    serde_json::from_str(&answer.out).unwrap_or_else(|e| panic!("{e}: {answer}"))
}

/// `forebay stage -- words`
#[track_caller]
fn stage(mount: &Mount, options: &[&str], words: &[&str]) -> Answer {
    let mut command = Command::new(forebay());
    command.args(["--json", "stage"]).args(options).arg("--mount").arg(mount.place.mnt()).arg("--").args(words);
    run(&mut command, COMMAND)
}

/// Returns the paths that would be staged, in their order.
fn wanted(answer: &Answer) -> Vec<String> {
    let steps = answer.out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    steps.filter_map(|step| step["Wanted"]["path"].as_str().map(str::to_owned)).collect()
}

#[track_caller]
fn evict(mount: &Mount) {
    mount.forebay(["evict", "--release-leases"], &[&mount.place.mnt()]).ok();
}

/// Returns each file below the mount, with its residency.
fn states(mount: &Mount) -> Vec<(String, String)> {
    let answer = mount.forebay(["--json", "ls", "-R"], &[&mount.place.mnt()]).ok();
    let files = answer.out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let files = files.filter(|file| file["kind"] == "file");
    files.map(|f| (f["path"].as_str().unwrap().into(), f["state"].as_str().unwrap().into())).collect()
}

fn lease_owner(mount: &Mount, path: &str) -> Value {
    let answer = mount.forebay(["--json", "ls"], &[&mount.path(path)]).ok();
    serde_json::from_str::<Value>(&answer.out).unwrap()["lease_owner"].clone()
}

fn resident(mount: &Mount) -> Vec<String> {
    states(mount).into_iter().filter(|(_, state)| state == "resident").map(|(path, _)| path).collect()
}

#[track_caller]
fn profiles(mount: &Mount) -> Vec<Value> {
    let answer = mount.forebay(["--json", "profile", "list", "--mount"], &[&mount.place.mnt()]).ok();
    answer.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns a command that reads the files in its arguments, in that order.
fn reader<'a>(arguments: &[&'a str]) -> Vec<&'a str> {
    [&["bash", "-euc", "cat \"$@\" >/dev/null", "reader"], arguments].concat()
}

#[test]
fn what_a_job_read_is_here_before_its_next_run_asks() {
    let mount = mount(None);
    for file in 0..30 {
        put(&mount, &format!("in/file-{file}"), file, 10_000 + file as usize * 1000);
        put(&mount, &format!("other/file-{file}"), file, 10_000);
    }
    put(&mount, "large", 99, 9_000_000);
    let go = mount.place.at("go");
    // The names are not in the arguments: the daemon knows them only from the first run.
    let script = format!(
        "until [ -e {} ]; do sleep 0.02; done; cat in/* >/dev/null; head -c 200000 large >/dev/null; echo x >out",
        go.display()
    );
    let words = ["bash", "-euc", &script];
    fs::write(&go, "").unwrap();
    let first = job(&mount, "first", &[], &words);
    assert_eq!(first["ahead"]["files"], 0, "nothing is known yet: {first}");
    mount.flush();
    evict(&mount);
    assert_eq!(resident(&mount), Vec::<String>::new());
    fs::remove_file(&go).unwrap();
    let second = std::thread::scope(|scope| {
        let second = scope.spawn(|| job(&mount, "second", &[], &words));
        wait_until("what it will read is here", || resident(&mount).len() >= 30);
        fs::write(&go, "").unwrap();
        second.join().unwrap()
    });
    let ahead = &second["ahead"];
    let number = |field: &str| ahead[field].as_u64().unwrap();
    assert_eq!((number("files"), number("used_files")), (31, 31), "{second}");
    assert!(number("used_bytes") as f64 >= 0.9 * number("bytes") as f64, "accuracy: {second}");
    assert!(number("covered_bytes") as f64 >= 0.95 * number("wanted_bytes") as f64, "coverage: {second}");
    let state = |path: &str| states(&mount).into_iter().find(|(p, _)| p.ends_with(path)).unwrap().1;
    assert_eq!(state("large"), "partial", "no more of it than is read");
    assert!(resident(&mount).iter().all(|path| !path.contains("other/")));
    // With `--no-prefetch`, nothing is fetched ahead.
    mount.flush();
    evict(&mount);
    let third = job(&mount, "third", &["--no-prefetch"], &words);
    assert_eq!(third["ahead"], Value::Null);
}

#[test]
fn the_next_of_a_sequence_is_staged_before_any_job_has_read_it() {
    let mount = mount(None);
    for day in 27..=31 {
        put(&mount, &format!("data/2026-01-{day}/part-0.bin"), day, 20_000);
        put(&mount, &format!("data/2026-01-{day}/part-1.bin"), day, 30_000);
    }
    put(&mount, "data/2026-02-01/part-0.bin", 1, 20_000);
    put(&mount, "data/2026-02-01/part-1.bin", 1, 20_000);
    put(&mount, "model", 2, 100_000);
    let script = "cat model data/$1/*.bin >/dev/null";
    let command = |day: &'static str| ["bash", "-euc", script, "reader", day];
    for day in ["2026-01-28", "2026-01-29", "2026-01-30", "2026-01-31"] {
        job(&mount, day, &["--no-prefetch"], &command(day));
    }
    evict(&mount);
    let dry = stage(&mount, &["--dry-run"], &command("2026-02-01")).ok();
    assert_eq!(wanted(&dry), ["model", "data/2026-02-01/part-0.bin", "data/2026-02-01/part-1.bin"], "{dry}");
    assert!(resident(&mount).is_empty(), "a dry run stages nothing");
    stage(&mount, &[], &command("2026-02-01")).ok();
    let staged = resident(&mount);
    assert_eq!(staged.len(), 3, "{staged:?}");
    assert!(staged.iter().all(|path| path.contains("2026-02-01") || path.ends_with("model")), "{staged:?}");
    let evicted = mount.forebay(["--json", "evict"], &[&mount.place.mnt()]).ok();
    assert!(evicted.out.contains(r#""skipped":3"#), "they are leased: {evicted}");
}

#[test]
fn profiles_are_listed_shown_carried_to_other_mounts_and_forgotten() {
    let mount = mount(None);
    put(&mount, "a", 1, 10_000);
    put(&mount, "b", 2, 20_000);
    let words = reader(&["b", "a"]);
    job(&mount, "one", &[], &words);
    let listed = profiles(&mount);
    let [profile] = listed.as_slice() else { panic!("{listed:?}") };
    assert_eq!((&profile["runs"], &profile["files"]), (&1.into(), &2.into()), "{profile}");
    let id = profile["id"].as_str().unwrap();
    let text = mount.forebay(["profile", "show", id, "--mount"], &[&mount.place.mnt()]).ok().out;
    let rows: Vec<&str> = text.lines().skip(1).filter(|line| line.ends_with(" a") || line.ends_with(" b")).collect();
    assert!(rows.len() == 2 && rows[0].ends_with(" b"), "in the order of first uses: {text}");

    let other = Mount::new(Options::default());
    put(&other, "a", 1, 10_000);
    put(&other, "b", 2, 20_000);
    for options in [&["profile", "export"][..], &["profile", "export", "--toml"]] {
        let mut command = Command::new(forebay());
        let exported = run(command.args(options).arg(id).arg("--mount").arg(mount.place.mnt()), COMMAND).ok();
        let file = other.place.at("profile");
        fs::write(&file, exported.out).unwrap();
        let import = |file: &Path| {
            let mut command = Command::new(forebay());
            run(command.args(["profile", "import"]).arg(file).arg("--mount").arg(other.place.mnt()), COMMAND)
        };
        import(&file).ok();
        let dry = stage(&other, &["--dry-run"], &words).ok();
        assert_eq!(wanted(&dry), ["b", "a"], "{dry}");
        fs::write(&file, "{}").unwrap();
        import(&file).refused(USAGE, &["is not a profile"]);
        other.forebay(["profile", "forget", "--all", "--mount"], &[&other.place.mnt()]).ok();
        assert!(profiles(&other).is_empty());
        let dry = stage(&other, &["--dry-run"], &words).ok();
        assert!(wanted(&dry).is_empty() && dry.out.contains("no run like"), "{dry}");
    }
    mount.forebay(["profile", "show", "nothing", "--mount"], &[&mount.place.mnt()]).refused(USAGE, &["nothing"]);
    // The next daemon has the profile, too.
    mount.kill_all();
    mount.mount();
    assert_eq!(profiles(&mount), listed);
}

/// SEMANTICS 41: "an open confirms such a file like any other file"
#[test]
fn what_is_brought_in_ahead_and_changes_in_the_pool_is_read_as_it_is_there() {
    let mount = mount(None);
    put(&mount, "in", 1, 100_000);
    let go = mount.place.at("go");
    let read = mount.place.at("read");
    let script = format!("until [ -e {} ]; do sleep 0.02; done; cat in >{}", go.display(), read.display());
    let words = ["bash", "-euc", &script];
    fs::write(&go, "").unwrap();
    job(&mount, "first", &[], &words);
    evict(&mount);
    fs::remove_file(&go).unwrap();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| job(&mount, "second", &[], &words));
        wait_until("it is here", || !resident(&mount).is_empty());
        put(&mount, "in", 2, 120_000);
        fs::write(&go, "").unwrap();
        second.join().unwrap();
    });
    assert!(fs::read(&read).unwrap() == content(2, 120_000), "what the pool had when it was opened");
}

/// SEMANTICS 41: "no dirty or leased content is evicted for it"
#[test]
fn what_is_staged_for_a_job_goes_before_nothing_dirty_or_leased_and_ends_with_the_job() {
    let mount = Mount::new(Options { limit: Some("64MiB".into()), ..Options::default() });
    for file in 0..20 {
        put(&mount, &format!("in/{file:02}"), file, 4 << 20);
    }
    put(&mount, "leased", 50, 10 << 20);
    let script = "cat in/* >/dev/null; sleep 0.2";
    let words = ["bash", "-euc", script];
    job(&mount, "first", &[], &words);
    evict(&mount);
    mount.forebay(["stage"], &[&mount.path("leased")]).ok();
    fs::write(mount.path("dirty"), content(60, 10 << 20)).unwrap();
    for again in 0..3 {
        let run = job(&mount, &format!("again-{again}"), &[], &words);
        assert_eq!(run["files"].as_array().unwrap().len(), 20, "{run}");
        let states = states(&mount);
        let state = |path: &str| states.iter().find(|(p, _)| p.ends_with(path)).unwrap().1.clone();
        assert_eq!(
            (state("leased").as_str(), fs::read(mount.path("dirty")).unwrap()),
            ("resident", content(60, 10 << 20))
        );
    }
    let used = mount.status().used_bytes;
    assert!(used <= 64 << 20, "{used}");
    // Jobs that have ended leave no leases.
    let evicted = mount.forebay(["--json", "evict"], &[&mount.path("in")]).ok();
    assert!(evicted.out.contains(r#""skipped":0"#), "{evicted}");
}

#[test]
fn a_policy_may_say_that_nothing_is_staged_ahead() {
    let mount = mount(Some("[prefetch]\njobs = false\n"));
    put(&mount, "a", 1, 10_000);
    for id in ["first", "second"] {
        assert_eq!(job(&mount, id, &[], &reader(&["a"]))["ahead"], Value::Null);
    }
    assert_eq!(profiles(&mount).len(), 1, "it is learned all the same");
}

/// Reads the files of `d` in the order of their names, once.
const IN_ORDER: [&str; 3] = ["bash", "-euc", "for file in d/*; do cat $file; done | sha256sum"];

/// Makes a directory of `files` files in the pool. Returns the output of [`IN_ORDER`].
fn directory(mount: &Mount, files: u64) -> String {
    (0..files).for_each(|file| put(mount, &format!("d/part-{file:03}"), file, 5_000));
    let mut command = Command::new(IN_ORDER[0]);
    run(command.args(&IN_ORDER[1..]).current_dir(mount.pool("")), COMMAND).ok().out
}

fn counter(mount: &Mount, name: &str) -> u64 {
    let answer = mount.forebay(["--json", "status"], &[&mount.place.mnt()]).ok();
    let status: Value = serde_json::from_str(&answer.out).unwrap();
    status["status"]["counters"][name].as_u64().unwrap_or_else(|| panic!("{name}: {status}"))
}

fn read_in_order(mount: &Mount) -> String {
    let mut command = Command::new(IN_ORDER[0]);
    run(command.args(&IN_ORDER[1..]).current_dir(mount.place.mnt()), COMMAND).ok().out
}

#[test]
fn a_reader_finds_what_it_is_about_to_open() {
    let throttle = Some("100MB/s,5ms".into());
    let mount = Mount::new(Options { throttle, ..Options::default() });
    let expected = directory(&mount, 300);
    assert_eq!(read_in_order(&mount), expected);
    wait_until("they are counted", || counter(&mount, "ahead_used_files") >= 100);
    assert!(counter(&mount, "ahead_files") <= 300);
    let answer = mount.forebay(["status"], &[&mount.place.mnt()]).ok();
    assert!(answer.out.contains("read ahead"), "{answer}");
    evict(&mount);
    assert_eq!(read_in_order(&mount), expected);
}

/// Makes forty directories, two levels deep, of two files each. In two files the order of a reader does not show in
/// time.
fn tree(mount: &Mount) {
    for at in 0..80 {
        put(mount, &format!("t/{}/{}/f{}", (b'a' + at / 20) as char, at / 2 % 10, at % 2), at.into(), 5_000);
    }
}

fn read_tree(dir: &Path) -> String {
    run(
        Command::new("bash").args(["-euc", "tar -C t --sort=name -cf - . | tar -xOf - | sha256sum"]).current_dir(dir),
        COMMAND,
    )
    .ok()
    .out
}

#[test]
fn the_next_directories_of_a_reader_of_a_tree_are_staged() {
    let throttle = Some("100MB/s,20ms".into());
    let mount = Mount::new(Options { throttle, ..Options::default() });
    tree(&mount);
    assert_eq!(read_tree(&mount.place.mnt()), read_tree(&mount.pool("")));
    wait_until("they are counted", || counter(&mount, "ahead_used_files") >= 40);
    // If a reader opens one file of each directory, the other files are not fetched ahead.
    let mount = Mount::new(Options::default());
    for at in 0..600 {
        put(&mount, &format!("u/{:02}/f{:02}", at / 10, at % 10), at, 5_000);
    }
    for at in 0..60 {
        fs::read(mount.path(format!("u/{at:02}/f07"))).unwrap();
    }
    let mut ahead = u64::MAX;
    wait_until("nothing more is brought in", || {
        std::thread::sleep(Duration::from_secs(1));
        std::mem::replace(&mut ahead, counter(&mount, "ahead_files")) == ahead
    });
    assert!(ahead < 300, "{ahead} of 600");
}

#[test]
fn a_reader_with_prefetch_disabled_is_not_followed() {
    let mount = mount(Some("[prefetch]\nonline = false\n"));
    let expected = directory(&mount, 100);
    assert_eq!(read_in_order(&mount), expected);
    assert_eq!(counter(&mount, "ahead_files"), 0);
    let mount = self::mount(None);
    directory(&mount, 100);
    job(&mount, "alone", &["--no-prefetch"], &IN_ORDER);
    assert_eq!(counter(&mount, "ahead_files"), 0);
}

/// SEMANTICS 41: "because a reader is about to reach it"
#[test]
fn what_a_reader_is_about_to_come_to_and_changes_in_the_pool_is_read_as_it_is_there() {
    let mount = mount(None);
    directory(&mount, 100);
    // The daemon sees the order of a reader only if it knows the names.
    assert_eq!(fs::read_dir(mount.path("d")).unwrap().count(), 100);
    let read = |file: u64| fs::read(mount.path(format!("d/part-{file:03}"))).unwrap();
    let mut last = 0;
    wait_until("something is brought in ahead", || {
        assert!(read(last) == content(last, 5_000));
        last += 1;
        counter(&mount, "ahead_files") > counter(&mount, "ahead_used_files") && last >= 8
    });
    for file in last..100 {
        put(&mount, &format!("d/part-{file:03}"), 1_000 + file, 6_000);
    }
    for file in last..100 {
        assert!(read(file) == content(1_000 + file, 6_000), "part-{file:03}");
    }
}

#[test]
fn what_does_not_fit_into_the_time_is_not_begun() {
    let mount = mount(None);
    let files: Vec<String> = (0..10).map(|at| format!("f{at}")).collect();
    for file in &files {
        put(&mount, file, 1, 500_000);
    }
    let words = reader(&files.iter().map(String::as_str).collect::<Vec<_>>());
    job(&mount, "one", &[], &words);
    evict(&mount);
    let limits = ["--dry-run", "--rate", "1MB/s", "--within", "2200ms"];
    let dry = stage(&mount, &limits, &words).ok();
    assert_eq!(wanted(&dry), files[..4], "{dry}");
    assert!(dry.out.contains("6 files that may be read are left out: there is no time for them"), "{dry}");
    // Resident files take no time.
    mount.forebay(["stage"], &[&mount.path("f8"), &mount.path("f9")]).ok();
    let dry = stage(&mount, &limits, &words).ok();
    assert_eq!(wanted(&dry), ["f0", "f1", "f2", "f3", "f8", "f9"], "{dry}");
}

/// SEMANTICS 17: "when it is released, when its time is up, when the job that owns it ends"
#[test]
fn what_a_job_stages_is_leased_until_it_ends() {
    let mount = mount(None);
    put(&mount, "a", 1, 10_000);
    put(&mount, "b", 1, 10_000);
    let owner = |path: &str| lease_owner(&mount, path);
    mount.forebay(["stage", "--owner", "somebody"], &[&mount.path("b")]).ok();
    let (forebay, seen) = (forebay(), mount.place.at("seen"));
    let forebay = forebay.display();
    let script = format!("{forebay} stage a b && {forebay} --json ls b >{}", seen.display());
    job(&mount, "leaser", &[], &["bash", "-euc", &script]);
    let during: Value = serde_json::from_slice(&fs::read(seen).unwrap()).unwrap();
    assert_eq!(during["lease_owner"], "somebody, leaser");
    assert_eq!((owner("a"), owner("b")), (Value::Null, "somebody".into()));
    assert_eq!(resident(&mount).len(), 2, "what was leased is here still");
    // Leases are released by hand.
    mount.forebay(["stage", "--owner", "leaser"], &[&mount.path("a"), &mount.path("b")]).ok();
    let dry = mount.forebay(["release", "--owner", "leaser", "--dry-run"], &[&mount.path("a")]).ok();
    assert!(dry.out.contains("1 lease"), "{dry}");
    assert_eq!((owner("a"), owner("b")), ("leaser".into(), "somebody, leaser".into()));
    mount.forebay(["release", "--owner", "leaser"], &[&mount.path("a")]).ok();
    assert_eq!((owner("a"), owner("b")), (Value::Null, "somebody, leaser".into()));
    mount.forebay(["release", "--owner", "leaser"], &[&mount.place.mnt()]).ok();
    assert_eq!((owner("a"), owner("b")), (Value::Null, "somebody".into()));
}

#[test]
fn an_observed_job_is_learned_from_if_its_command_is_given() {
    let mount = mount(None);
    put(&mount, "a", 1, 10_000);
    put(&mount, "b", 1, 10_000);
    let at = |name: &str| mount.place.at(name);
    let words = reader(&["a", "b"]);
    // Reads the first file, waits, and then runs the reader of both files.
    let script = format!(
        "until [ -e {} ]; do sleep 0.02; done; cat $5 >/dev/null; echo >{}; until [ -e {} ]; do sleep 0.02; done; exec \"$@\"",
        at("go").display(),
        at("begun").display(),
        at("on").display()
    );
    let observed = |id: &str, more: &[&str], meanwhile: &dyn Fn(&mut Running)| {
        ["go", "begun", "on"].iter().for_each(|name| drop(fs::remove_file(at(name))));
        let mut job = Command::new("bash");
        job.args(["-euc", &script, "waits"]).args(&words).current_dir(mount.place.mnt());
        let job = Running::new(&mut job);
        let mut observe = Command::new(forebay());
        observe.args(["observe", "--job", id, "--pid", &job.0.id().to_string(), "--mount"]).arg(mount.place.mnt());
        let mut observe = Running::new(observe.args(more));
        wait_until("it is observed", || {
            mount.forebay(["job", "list", "--mount"], &[&mount.place.mnt()]).ok().out.contains(id)
        });
        fs::write(at("go"), "").unwrap();
        wait_until("it has begun", || at("begun").exists());
        meanwhile(&mut observe);
        fs::write(at("on"), "").unwrap();
        assert_eq!((job.end(), observe.end()), (Some(0), Some(0)));
    };
    let told: Vec<&str> = std::iter::once("--").chain(words.iter().copied()).collect();
    observed("untold", &[], &|_| {});
    assert_eq!(profiles(&mount), Vec::<Value>::new());
    observed("left", &told, &|observe| {
        rustix::process::kill_process(rustix::process::Pid::from_child(&observe.0), rustix::process::Signal::INT)
            .unwrap();
        observe.0.wait().unwrap();
    });
    assert_eq!(profiles(&mount), Vec::<Value>::new(), "it was not seen to its end");
    observed("told", &told, &|_| {});
    assert_eq!(wanted(&stage(&mount, &["--dry-run"], &words).ok()), ["a", "b"]);
    evict(&mount);
    observed("next", &told, &|_| wait_until("what it will read is here", || resident(&mount).len() == 2));
    // If no command was given for a job, a process that joins the job may give it. A process that joins later cannot
    // change it.
    evict(&mount);
    observed("joined", &[], &|_| {
        let other = Running::new(Command::new("sleep").arg("60"));
        let mut joins = Command::new(forebay());
        joins.args(["observe", "--job", "joined", "--pid", &other.0.id().to_string(), "--mount"]);
        let joins = Running::new(joins.arg(mount.place.mnt()).args(&told));
        wait_until("what it will read is here", || resident(&mount).len() == 2);
        drop(other);
        assert_eq!(joins.end(), Some(0));
        let mut joins = Command::new(forebay());
        joins.args(["run", "--job", "joined", "--mount"]).arg(mount.place.mnt()).args(["--", "true"]);
        let said = run(&mut joins, COMMAND).ok();
        assert!(said.err.contains("job joined") && said.err.contains("runs already: bash -euc"), "{said}");
    });
}

#[test]
fn leases_of_a_job_end_with_it_though_its_daemon_is_another_one_by_then() {
    let mount = mount(None);
    put(&mount, "a", 1, 10_000);
    put(&mount, "b", 1, 10_000);
    let owner = |path: &str| lease_owner(&mount, path);
    let go = mount.place.at("go");
    let start = |id: &str, file: &str| {
        let begun = mount.place.at(id);
        let script = format!(
            "{} stage {} && touch {}; until [ -e {} ]; do sleep 0.02; done",
            forebay().display(),
            mount.path(file).display(),
            begun.display(),
            go.display()
        );
        let mut command = Command::new(forebay());
        command.args(["run", "--job", id, "--mount"]).arg(mount.place.mnt()).args(["--", "bash", "-euc", &script]);
        let running = Running::new(&mut command);
        wait_until("it is staged", || begun.exists());
        running
    };
    let (killed, ends) = (start("killed", "a"), start("ends", "b"));
    assert_eq!((owner("a"), owner("b")), ("killed".into(), "ends".into()));
    mount.umount();
    drop(killed);
    mount.mount();
    wait_until("the lease of the one that is gone ends", || owner("a") == Value::Null);
    assert_eq!(owner("b"), "ends");
    fs::write(&go, "").unwrap();
    assert_eq!(ends.end(), Some(0));
    assert_eq!(owner("b"), Value::Null);
    assert_eq!(resident(&mount).len(), 2);
}
