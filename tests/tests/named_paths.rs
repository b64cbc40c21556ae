//! What the paths that operators type stand for: symbolic links, patterns, and names that messages escape.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;

use forebay_api::operator::{ContentState, EvictRequest, FlushRequest, Summary};
use forebay_engine::{Ino, Overlay, summary};
use forebay_tests::engine::*;
use forebay_tests::mount::Mount;
use serde_json::Value;

const INCOMPLETE: i32 = 1;
const USAGE: i32 = 2;

async fn link(overlay: &Overlay, dir: Ino, name: &str, target: &str) {
    overlay.symlink(dir, name.as_bytes(), target.as_bytes(), CALLER).await.unwrap();
}

async fn flush_of(overlay: &Overlay, path: &str) -> Summary {
    summary(overlay.flush(FlushRequest { paths: vec![path.into()], wait: true, dry_run: false })).await.0
}

async fn state(overlay: &Overlay, path: &str) -> ContentState {
    overlay.list_residency(&pool_path(path), false).await.unwrap().remove(0).state
}

/// SEMANTICS 3: "Changes that were made before `forebay flush --wait` began are in the pool when it returns 0."
#[tokio::test(flavor = "multi_thread")]
async fn a_link_is_followed_inside_the_mount() {
    let fixture = Fixture::new();
    fixture.mkdir("run").await;
    fixture.mkdir("run/deep").await;
    fixture.put("run/old", b"old").await;
    let overlay = fixture.open().await;
    overlay.set_mount("/mnt/data", false);
    let run = find(&overlay, "run").await;
    link(&overlay, Ino::ROOT, "current", "run").await;
    link(&overlay, Ino::ROOT, "whole", "/mnt/data/./run/").await;
    link(&overlay, run, "up", "../current/./deep").await;
    for name in ["run/new", "run/deep/f", "other"] {
        write(&overlay, name, "1").await.unwrap();
    }
    assert_eq!(flush_of(&overlay, "current").await.refused, None);
    assert_eq!(in_pool(&fixture, "run/new").as_deref(), Some(&b"1"[..]));
    assert!(in_pool(&fixture, "current").is_some(), "the link is new itself");
    assert_eq!(in_pool(&fixture, "other"), None);
    for (at, path) in ["run/up", "current/up/f", "whole/up"].into_iter().enumerate() {
        write(&overlay, "run/deep/f", &format!("by {at}")).await.unwrap();
        assert_eq!(flush_of(&overlay, path).await.refused, None, "{path}");
        assert_eq!(in_pool(&fixture, "run/deep/f"), Some(format!("by {at}").into_bytes()), "{path}");
    }
    let request = EvictRequest { paths: vec!["whole".into()], release_leases: false, dry_run: false };
    assert_eq!(summary(overlay.evict(request)).await.0.files, 2);
    let (staged, failed) = stage(&overlay, "current").await;
    assert_eq!((staged.files, failed), (3, Vec::new()));
    assert_eq!(state(&overlay, "run/old").await, ContentState::Resident);
    let leased = overlay.list_residency(&pool_path("run/deep"), false).await.unwrap();
    assert_eq!(leased[0].lease_owner.as_deref(), Some("job"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_leads_out_of_the_mount_is_flushed_and_reported() {
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    let overlay = fixture.open().await;
    overlay.set_mount("/mnt/data", false);
    find(&overlay, "d").await;
    let cases = [
        ("absolute", "/etc", "/etc, which is not below /mnt/data"),
        ("sibling", "/mnt/database/d", "which is not below /mnt/data"),
        ("back", "/mnt/data/../etc", "/mnt/data/../etc, which is outside of this mount"),
        ("up", "../etc", "../etc, which is outside of this mount"),
        ("down and up", "d/../../etc", "which is outside of this mount"),
        ("through", "absolute", "/etc, which is not below /mnt/data"),
        ("circle", "circle", "40 symbolic links"),
    ];
    for (name, target, why) in cases {
        link(&overlay, Ino::ROOT, name, target).await;
        let file = format!("d/{name}");
        write(&overlay, &file, "1").await.unwrap();
        let request = FlushRequest { paths: vec![name.into(), file.clone()], wait: true, dry_run: false };
        let (flushed, failed) = summary(overlay.flush(request)).await;
        assert_eq!((flushed.refused, flushed.failed, failed.len()), (None, 1, 1), "{name}: {failed:?}");
        assert!(failed[0].0 == name && failed[0].1.contains(why), "{name}: {failed:?}");
        assert!(in_pool(&fixture, name).is_some() && in_pool(&fixture, &file).is_some(), "{name}");
        let (staged, failed) = stage(&overlay, name).await;
        assert!(staged.failed == 1 && failed[0].1.contains(why), "{name}: {failed:?}");
        let below = flush_of(&overlay, &format!("{name}/below")).await;
        assert_eq!((below.refused, below.failed), (None, 1), "{name}");
    }
    // A link that a tree holds is not followed.
    let dir = find(&overlay, "d").await;
    link(&overlay, dir, "out", "/etc").await;
    let flushed = flush_of(&overlay, "d").await;
    assert_eq!((flushed.refused, flushed.failed), (None, 0));
    assert!(in_pool(&fixture, "d/out").is_some());
    assert_eq!(stage(&overlay, "d").await.1, Vec::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_names_nothing_stands_for_itself() {
    let fixture = Fixture::new();
    fixture.mkdir("run").await;
    fixture.put("plain", b"1").await;
    let overlay = fixture.open().await;
    overlay.set_mount("/mnt/data", false);
    link(&overlay, Ino::ROOT, "current", "run").await;
    assert_eq!(flush_of(&overlay, "current/typo").await.refused, Some(libc::ENOENT));
    assert_eq!(stage(&overlay, "current/typo").await.1.len(), 1);
    for (name, target) in [("one", "nowhere"), ("two", "/mnt/data/no/where"), ("three", "plain/f"), ("four", "one")] {
        link(&overlay, Ino::ROOT, name, target).await;
        let flushed = flush_of(&overlay, name).await;
        assert_eq!((flushed.refused, flushed.failed), (None, 0), "{name}: {flushed:?}");
        assert!(in_pool(&fixture, name).is_some(), "{name}");
        assert_eq!(
            overlay.follow_links(&pool_path(name)).await.unwrap().trim_start_matches('/'),
            match name {
                "four" => "one",
                name => name,
            }
        );
        assert_eq!(stage(&overlay, name).await.1.len(), 1, "{name}: there is nothing to stage");
        // A path that goes on after a link is a mistake.
        let below = flush_of(&overlay, &format!("{name}/below")).await;
        assert_eq!(below.refused, Some(libc::ENOENT), "{name}: {below:?}");
        assert!(below.message.is_some_and(|why| why.contains("there is no such path")), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_exists_is_no_pattern_for_what_is_below_it() {
    let fixture = Fixture::new();
    for (dir, file) in [("run[1]", "run[1]/a.dat"), ("run1", "run1/b.dat")] {
        fixture.mkdir(dir).await;
        fixture.put(file, b"1").await;
    }
    let overlay = fixture.open().await;
    let (staged, failed) = stage(&overlay, "run[1]/*.dat").await;
    assert_eq!((staged.files, failed), (1, Vec::new()));
    assert_eq!(state(&overlay, "run[1]/a.dat").await, ContentState::Resident);
    assert_eq!(state(&overlay, "run1/b.dat").await, ContentState::Absent);
    // A pattern in a directory that a link names.
    link(&overlay, Ino::ROOT, "l", "run1").await;
    let (staged, failed) = stage(&overlay, "l/*.dat").await;
    assert_eq!((staged.files, failed), (1, Vec::new()));
    assert_eq!(state(&overlay, "run1/b.dat").await, ContentState::Resident);
    // Where no such name exists, it is a pattern.
    assert_eq!(stage(&overlay, "run[2-9]/*").await.1.len(), 1, "nothing matches");
    assert_eq!(stage(&overlay, "run[0-9]/*").await.0.files, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pattern_needs_no_answer_of_the_pool() {
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    fixture.put("d/a.tmp", b"1").await;
    fixture.put("d/b.dat", b"2").await;
    let overlay = fixture.open().await;
    for name in ["d/a.tmp", "d/b.dat"] {
        assert_eq!(stage(&overlay, name).await.1, Vec::new());
    }
    fixture.fault.set_down(true);
    let evict = |path: &str| EvictRequest { paths: vec![path.into()], release_leases: true, dry_run: false };
    let (evicted, failed) = summary(overlay.evict(evict("d/*.tmp"))).await;
    assert_eq!((evicted.files, failed), (1, Vec::new()));
    assert_eq!(state(&overlay, "d/b.dat").await, ContentState::Resident);
    // A name without a pattern is still to be looked up.
    assert_eq!(summary(overlay.evict(evict("d/unknown"))).await.0.failed, 1);
}

#[test]
fn dirty_finds_what_a_path_names() {
    let mount = Mount::manual();
    let odd = [&b"\xc3\xbc"[..], b"it's", b"a\"b", b"back\\slash", b"tab\there", b"\xff", b"plain"];
    for name in odd.map(OsStr::from_bytes) {
        fs::create_dir(mount.path(name)).unwrap();
        fs::write(mount.path(name).join("f"), "1").unwrap();
    }
    let dirty = |path: &OsStr| mount.forebay(["--json", "dirty"], &[&mount.path(path)]);
    let paths = |path: &OsStr| -> Vec<String> {
        let out = dirty(path).ok().out;
        let value = |line| serde_json::from_str::<Value>(line).unwrap();
        out.lines().map(|line| value(line)["path"].as_str().unwrap().to_owned()).collect()
    };
    for name in odd.map(OsStr::from_bytes) {
        assert_eq!(paths(name).len(), 2, "{}", name.as_bytes().escape_ascii());
        assert_eq!(paths(&[name.as_bytes(), b"/f"].map(OsStr::from_bytes).join(OsStr::new(""))).len(), 1);
    }
    assert_eq!(paths(OsStr::new("\u{fc}/f")), ["/\u{fc}/f"]);
    let sums = mount.forebay(["--json", "du"], &[&mount.place.mnt()]).ok().out;
    let rows: Vec<Value> = sums.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let is_row = |name: &str| rows.iter().any(|row| row["path"] == name && row["sum"]["files"] == 1);
    assert!(is_row("\u{fc}") && is_row("it's") && is_row("a\"b"), "{sums}");
    // What a link names, and the link.
    symlink("plain", mount.path("link")).unwrap();
    assert_eq!(paths(OsStr::new("link")), ["/link", "/plain", "/plain/f"]);
    mount.forebay(["flush", "--wait"], &[&mount.path("link")]).ok();
    assert_eq!(fs::read(mount.pool("plain/f")).unwrap(), b"1");
    // The directory has new times.
    assert!(paths(OsStr::new("link")).iter().all(|path| path == "/plain"));
    symlink("/etc", mount.path("out")).unwrap();
    let out = dirty(OsStr::new("out")).refused(USAGE, &["symbolic link to /etc"]);
    assert!(out.out.contains("/out"), "the link is new itself: {out}");
    dirty(OsStr::new("typo")).refused(INCOMPLETE, &["typo"]);
    // A name that was removed is still to be removed in the pool.
    fs::remove_file(mount.path("plain/f")).unwrap();
    assert_eq!(paths(OsStr::new("plain/f")), ["/plain/f"]);
}
