//! Command lines that make no sense. Each is refused with its exit code and a message that names the argument, and
//! nothing changes.

use std::fs;
use std::process::Command;
use std::time::Duration;

use forebay_tests::mount::{Mount, Options, Place};
use forebay_tests::process::{Answer, forebay, run};

const LIMIT: Duration = Duration::from_secs(90);
const INCOMPLETE: i32 = 1;
const USAGE: i32 = 2;
const NO_DAEMON: i32 = 3;

/// Runs a command line in the directory of a place.
#[track_caller]
fn refused(place: &Place, line: &str, code: i32, words: &[&str]) -> Answer {
    let mut command = Command::new(forebay());
    let answer = run(command.args(line.split_whitespace()).current_dir(place.at("")), LIMIT).refused(code, words);
    assert!(!answer.err.contains("panicked"), "{answer}");
    assert!(answer.out.is_empty(), "a refusal is no output: {answer}");
    answer
}

#[test]
fn a_mount_that_makes_no_sense_is_refused_with_what_is_wrong() {
    let place = Place::new();
    fs::write(place.at("file"), "").unwrap();
    fs::write(place.at("unknown.toml"), "[default]\nflsh = \"manual\"\n").unwrap();
    fs::write(place.at("value.toml"), "[default]\nflush = \"sometimes\"\n").unwrap();
    for (line, words) in [
        ("mount", &["<URL>", "<MOUNTPOINT>"][..]),
        ("mount pool", &["<MOUNTPOINT>"]),
        ("mount pool mnt", &["no fast pool", "--fast"]),
        ("mount pool mnt --fast fast --limit much", &["--limit", "much"]),
        ("mount pool mnt --fast fast --limit 500", &["500 B", "--limit", "500G"]),
        ("mount pool mnt --fast fast --limit 0", &["0 B", "--limit"]),
        ("mount pool mnt --fast fast --throttle fast", &["--throttle", "100MB/s"]),
        ("mount pool mnt --fast fast --memory some", &["--memory", "some"]),
        ("mount pool mnt --fast fast --threads 0", &["--threads", "1..=256"]),
        ("mount pool mnt --fast fast -o bogus", &["bogus", "allow_other"]),
        ("mount pool mnt --fast fast --policy none.toml", &["policy none.toml"]),
        ("mount pool mnt --fast fast --policy unknown.toml", &["policy unknown.toml:2:1", "did you mean `flush`?"]),
        ("mount pool mnt --fast fast --policy value.toml", &["policy value.toml:", "sometimes", "on-close"]),
        ("mount pool none --fast fast", &["none does not exist", "mkdir -p"]),
        ("mount pool file --fast fast", &["file is not a directory"]),
        ("mount file mnt --fast fast", &["file is not a directory"]),
        ("mount pool mnt --fast file", &["file is not a directory"]),
        ("mount ftp://host/a mnt --fast fast", &["ftp://", "known", "s3://bucket/prefix"]),
        ("mount s3://bucket?colour=red mnt --fast fast", &["unknown option colour", "endpoint"]),
        ("mount nfs:///a mnt --fast fast", &["names no server"]),
        ("mount pool pool --fast fast", &["the mountpoint", "the same directory as the pool"]),
        ("mount pool mnt --fast pool/fast", &["the fast pool", "lies inside the pool"]),
        ("mount pool mnt --fast mnt", &["the fast pool", "the same directory as the mountpoint"]),
        ("mount pool mnt --fast fast --fast fast", &["fast is given twice"]),
        ("mout pool mnt", &["unrecognized subcommand", "mount"]),
    ] {
        refused(&place, line, USAGE, words);
    }
    assert_eq!(fs::read_dir(place.fast()).unwrap().count(), 0, "something was made all the same");
    assert_eq!(fs::read_dir(place.pool()).unwrap().count(), 0, "something was made all the same");
}

#[test]
fn a_path_that_lies_in_no_mount_is_named() {
    let place = Place::new();
    fs::write(place.at("file"), "").unwrap();
    for command in ["status", "stage", "flush", "evict", "dirty", "ls", "du", "umount"] {
        for path in ["pool", "none"] {
            refused(&place, &format!("{command} {path}"), NO_DAEMON, &[path, "under no forebay mount", "try:"]);
        }
    }
    for command in ["stage", "flush", "evict"] {
        refused(&place, command, USAGE, &["<PATH>"]);
        refused(&place, &format!("{command} @none"), USAGE, &["list none"]);
        refused(&place, &format!("{command} @file"), USAGE, &["the list of paths is empty"]);
        refused(&place, &format!("{command} -"), USAGE, &["the list of paths is empty"]);
    }
    refused(&place, "stage --lease soon pool", USAGE, &["--lease", "soon"]);
    refused(&place, "fsck none", USAGE, &["none"]);
    refused(&place, "fsck file", USAGE, &["file is not a fast directory", "try:"]);
    refused(&place, "fsck fast", USAGE, &["fast is not a fast directory", "try:"]);
}

#[test]
fn a_path_in_a_mount_that_is_not_there_is_named() {
    let mount = Mount::new(Options::default());
    fs::create_dir(mount.path("dir")).unwrap();
    refused(&mount.place, "umount mnt/dir", USAGE, &["is not a mountpoint", "try:"]);
    for command in ["stage", "flush --wait", "evict", "ls", "du"] {
        let line = format!("{command} mnt/none");
        let mut run_it = Command::new(forebay());
        run(run_it.args(line.split_whitespace()).current_dir(mount.place.at("")), LIMIT)
            .refused(INCOMPLETE, &["/none"]);
    }
    refused(&mount.place, "mount pool mnt --fast fast", 6, &["already mounted", "forebay umount"]);
    mount.status();
}
