//! POSIX conformance: the mount fails no test that the file system beneath passes.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use forebay_tests::mount::{Mount, Options, alone};
use forebay_tests::process::{run, tool};
use forebay_tests::servers::Server;
use forebay_tests::servers::nfs::{NfsServer, Squash};
use forebay_tests::servers::s3::Versitygw;

/// Every machine has these users. Times of FUSE and ext4 are as fine as a tick of the kernel, hence the short
/// `naptime`.
const CONFIG: &str = r#"
[features]
posix_fallocate = {}
rename_ctime = {}
utimensat = {}
utime_now = {}

[settings]
naptime = 0.02
allow_remount = false
expected_failures = []

[dummy_auth]
entries = [["nobody", "GROUP"], ["daemon", "daemon"]]
"#;

/// The outcome of each test: `ok`, `FAILED` (with the reason) or `skipped`.
type Outcomes = BTreeMap<String, String>;

fn outcomes(dir: &Path, config: &Path, other_fs: &Path) -> Outcomes {
    let mut command = Command::new(tool("pjdfstest"));
    command.arg("-c").arg(config).arg("-p").arg(dir).arg("-s").arg(other_fs).env("NO_COLOR", "1");
    let answer = run(&mut command, Duration::from_secs(300));
    let mut found = Outcomes::new();
    let mut lines = answer.out.lines().peekable();
    while let Some(line) = lines.next() {
        let mut words = line.split_whitespace();
        let (Some(name), Some(outcome), None) = (words.next(), words.next(), words.next()) else { continue };
        if !name.contains("::") || !["ok", "FAILED", "skipped"].contains(&outcome) {
            continue;
        }
        let why = lines.peek().filter(|next| next.starts_with('\t')).map_or("", |next| next.trim());
        found.insert(name.into(), format!("{outcome} {why}").trim_end().into());
    }
    assert!(found.len() > 300, "only {} tests were run: {answer}", found.len());
    found
}

/// Returns the tests that pass on the native file system and not on the mount, each with the reason.
fn worse(mount: &Mount) -> BTreeMap<String, String> {
    let config = mount.place.at("pjdfstest.toml");
    let groups = std::fs::read_to_string("/etc/group").unwrap();
    let group = if groups.lines().any(|l| l.starts_with("nogroup:")) { "nogroup" } else { "nobody" };
    std::fs::write(&config, CONFIG.replace("GROUP", group)).unwrap();
    let other_fs = mount.place.small_disk("other", "tmpfs", 16);

    let native = outcomes(&mount.place.native(), &config, &other_fs);
    let ours = outcomes(&mount.place.mnt(), &config, &other_fs);

    let count = |of: &Outcomes, what: &str| of.values().filter(|o| o.starts_with(what)).count();
    for (name, of) in [("native", &native), ("mount", &ours)] {
        println!("{name}: {} ok, {} failed, {} skipped", count(of, "ok"), count(of, "FAILED"), count(of, "skipped"));
    }
    let passed = native.iter().filter(|(_, outcome)| *outcome == "ok").map(|(name, _)| name);
    let worse = passed.filter(|name| ours.get(*name).is_none_or(|o| o.starts_with("FAILED")));
    worse.map(|name| (name.clone(), ours.get(name).map_or("was not run".into(), String::clone))).collect()
}

/// SEMANTICS 20: "The mount fails no test of pjdfstest that the file system beneath it passes."
#[test]
fn pjdfstest_finds_no_difference_to_the_file_system_beneath() {
    let _alone = alone();
    let worse = worse(&Mount::new(Options::default()));
    assert!(worse.is_empty(), "passed on the native file system only:\n{worse:#?}");
}

/// Compares the tests that fail with the block of docs/POOLS.md that begins with `kind`: the block lists exactly these
/// tests.
fn as_documented(kind: &str, server: &dyn Server) {
    let mount = Mount::new(Options { remote: Some(server.remote()), ..Options::default() });
    let worse = worse(&mount);
    let found: Vec<&str> = worse.keys().map(String::as_str).collect();
    let page = include_str!("../../docs/POOLS.md");
    let start = format!("```pjdfstest {kind}\n");
    let block = page.split_once(&start).and_then(|(_, rest)| rest.split_once("```")).map_or("", |(block, _)| block);
    let documented: Vec<&str> = block.lines().filter(|line| !line.is_empty()).collect();
    assert!(found == documented, "documented: {documented:#?}\nfound: {worse:#?}");
}

#[test]
fn pjdfstest_over_s3_fails_what_is_documented() {
    let _alone = alone();
    as_documented("s3", &Versitygw::start());
}

#[test]
fn pjdfstest_over_nfs_fails_what_is_documented() {
    let _alone = alone();
    as_documented("nfs", &NfsServer::start(Path::new("/var/tmp"), Squash::None));
}
