//! Purges of a cache node: what clients get afterwards is what the pool has.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use forebay_tests::cache_node::{Got, Node};
use forebay_tests::http;
use forebay_tests::mount::{COMMAND, Place};
use forebay_tests::process;

/// The header of the token that may purge, and that may read.
const OPERATOR: &str = "Authorization: Bearer staple correct horse";

/// Starts a node that never asks the pool again, and whose operator may purge.
fn immutable(place: &Place, words: &[&str]) -> Node {
    let file = place.at("access.toml");
    fs::write(&file, "[[token]]\nname = \"operator\"\nsecret = \"staple correct horse\"\nadmin = true\n").unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    Node::of(place, &[&["--access", file.to_str().unwrap(), "--immutable"], words].concat())
}

fn get(node: &Node, path: &str) -> Got {
    node.get(path, &["-H", OPERATOR])
}

fn read(node: &Node, path: &str) -> (u16, String) {
    let got = get(node, path);
    (got.status, String::from_utf8(got.body).unwrap())
}

fn purge(node: &Node, path: &str) {
    let purged = node.get(&format!("/.forebay/purge{path}"), &["-X", "POST", "-H", OPERATOR]);
    assert_eq!(purged.status, 200, "{path}: {} {}", purged.head, String::from_utf8_lossy(&purged.body));
}

#[test]
fn a_purge_asks_the_pool_about_immutable_files_each_time() {
    let place = Place::new();
    let (dir, said) = (place.pool().join("public"), |text: &str| (200, text.to_owned()));
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("f"), "one").unwrap();
    let node = immutable(&place, &[]);
    assert_eq!(read(&node, "/public/f"), said("one"));
    fs::write(dir.join("f"), "two, longer").unwrap();
    assert_eq!(read(&node, "/public/f"), said("one"), "without a purge, the pool is not asked");
    purge(&node, "/public/f");
    assert_eq!(read(&node, "/public/f"), said("two, longer"));
    // The second and the third time, the directory is known as a whole.
    for text in ["three", "four, longer", "five"] {
        fs::write(dir.join("f"), text).unwrap();
        fs::write(dir.join(text), text).unwrap();
        purge(&node, "/public");
        assert_eq!(read(&node, "/public/f"), said(text));
        assert_eq!(read(&node, &format!("/public/{}", text.replace(' ', "%20"))), said(text));
    }
    assert_eq!(read(&node, "/public/three"), said("three"));
    fs::remove_file(dir.join("three")).unwrap();
    fs::write(dir.join("new"), "new").unwrap();
    fs::rename(dir.join("new"), dir.join("f")).unwrap();
    assert_eq!(read(&node, "/public/three"), said("three"));
    purge(&node, "/public/");
    assert_eq!((get(&node, "/public/three").status, read(&node, "/public/f")), (404, said("new")));
}

/// The pool has no longer what the catalog knows, and the content is gone from the fast pool.
#[test]
fn an_immutable_file_that_was_evicted_and_has_changed_is_served_in_its_new_version() {
    let place = Place::new();
    fs::write(place.pool().join("f"), "one").unwrap();
    let node = immutable(&place, &[]);
    assert_eq!(read(&node, "/f"), (200, "one".to_owned()));
    fs::write(place.pool().join("f"), "two, longer").unwrap();
    process::wait_until("it is evicted", || {
        let mut evict = Command::new(process::forebay());
        process::run(evict.arg("evict").arg(node.path()), COMMAND).ok();
        node.status().resident_files == 0
    });
    assert_eq!(read(&node, "/f"), (200, "two, longer".to_owned()));
}

#[test]
fn what_is_opened_during_a_purge_is_not_served_afterwards() {
    const FILES: usize = 8;
    let place = Place::new();
    let dir = place.pool().join("public");
    fs::create_dir(&dir).unwrap();
    let write = |text: &str| (0..FILES).for_each(|at| fs::write(dir.join(at.to_string()), text).unwrap());
    write("one");
    let node = immutable(&place, &["--throttle", "100MB/s,50ms"]);
    let paths: Vec<String> = (0..FILES).map(|at| format!("/public/{at}")).collect();
    for path in &paths {
        assert_eq!(read(&node, path), (200, "one".to_owned()));
    }
    for text in ["two, longer", "three"] {
        write(text);
        let is_purging = AtomicBool::new(true);
        let purged = thread::scope(|scope| {
            for path in [&paths[0], &paths[FILES - 1]] {
                scope.spawn(|| {
                    while is_purging.load(Ordering::SeqCst) {
                        // It may be told that the file changes at this moment.
                        let _ = http::get(node.address, path, &format!("{OPERATOR}\r\n"));
                    }
                });
            }
            let purged = node.get("/.forebay/purge/public", &["-X", "POST", "-H", OPERATOR]);
            is_purging.store(false, Ordering::SeqCst);
            purged
        });
        assert_eq!(purged.status, 200, "{}", purged.head);
        for path in &paths {
            assert_eq!(read(&node, path), (200, text.to_owned()), "{path}");
        }
    }
}

#[test]
fn a_purge_ends_what_is_served_by_the_name_of_a_symlink() {
    let place = Place::new();
    for dir in ["public", "links"] {
        fs::create_dir(place.pool().join(dir)).unwrap();
    }
    let file = place.pool().join("public/f");
    fs::write(&file, "one").unwrap();
    symlink("../public/f", place.pool().join("links/f")).unwrap();
    symlink("../public", place.pool().join("links/all")).unwrap();
    let node = immutable(&place, &[]);
    let names = ["/links/f", "/links/all/f", "/public/f"];
    for text in ["one", "two, longer", "three"] {
        fs::write(&file, text).unwrap();
        if text != "one" {
            purge(&node, "/public/f");
        }
        for name in names {
            assert_eq!(read(&node, name), (200, text.to_owned()), "{name}");
        }
    }
}

#[test]
fn a_purge_without_an_answer_of_the_pool_fails_and_evicts_nothing() {
    let place = Place::new();
    fs::create_dir(place.pool().join("public")).unwrap();
    fs::write(place.pool().join("public/f"), "one").unwrap();
    // Longer than a confirmation waits for.
    let node = immutable(&place, &["--throttle", "100MB/s,2500ms"]);
    assert_eq!(read(&node, "/public/f"), (200, "one".to_owned()));
    fs::write(place.pool().join("public/f"), "two, longer").unwrap();
    let refused = node.get("/.forebay/purge/public/f", &["-X", "POST", "-H", OPERATOR]);
    assert_eq!(refused.status, 504, "{} {}", refused.head, String::from_utf8_lossy(&refused.body));
    assert_eq!(read(&node, "/public/f"), (200, "one".to_owned()), "its only copy stays");
}
