//! Purges of a cache node: what clients get afterwards is what the pool has.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use forebay_tests::cache_node::{Got, Node};
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
