//! Files that another client appends to in the pool while programs read them.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;

use forebay_tests::mount::{Mount, Options};

fn append(mount: &Mount, text: &str) {
    File::options().append(true).open(mount.pool("log")).unwrap().write_all(text.as_bytes()).unwrap();
}

fn rest_of(file: &mut File) -> String {
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    text
}

/// SEMANTICS 60: "If another client changes a file in the pool, also by appending to it, programs that have it open go on
/// reading the version that they opened, and a later open shows the new one"
#[test]
fn what_another_client_appends_is_seen_by_the_next_open() {
    let mount = Mount::new(Options::policy("[default]\nmetadata-ttl = \"0s\"\n"));
    fs::write(mount.pool("log"), "one\n").unwrap();
    let number = |file: &File| file.metadata().unwrap().ino();
    // Open nowhere while it grows: the inode stays.
    let mut closed = File::open(mount.path("log")).unwrap();
    let first = number(&closed);
    assert_eq!(rest_of(&mut closed), "one\n");
    drop(closed);
    append(&mount, "two\n");
    let mut old = File::open(mount.path("log")).unwrap();
    assert_eq!((number(&old), rest_of(&mut old).as_str()), (first, "one\ntwo\n"));
    // Open while it grows: another inode, and the old one is read as it was.
    append(&mount, "three\n");
    let mut new = File::open(mount.path("log")).unwrap();
    assert_eq!(rest_of(&mut new), "one\ntwo\nthree\n");
    assert_ne!(number(&new), first);
    assert_eq!((rest_of(&mut old).as_str(), number(&old), old.metadata().unwrap().len()), ("", first, 8));
    assert_eq!(fs::metadata(mount.path("log")).unwrap().ino(), number(&new));
    // And from there on it is as in the beginning.
    let second = number(&new);
    drop((old, new));
    append(&mount, "four\n");
    let mut last = File::open(mount.path("log")).unwrap();
    assert_eq!((number(&last), rest_of(&mut last).as_str()), (second, "one\ntwo\nthree\nfour\n"));
}
