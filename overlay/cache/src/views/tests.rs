use super::*;
use crate::ContentId;
use crate::scratch::stat_of;
use forebay_backends::{FileKind, Time};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

fn look(kind: FileKind, mode: u32, size: u64) -> EntryLook {
    let time = Time { secs: 1_000_000, nanos: 7 };
    let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    EntryLook {
        kind,
        mode,
        uid: own.0,
        gid: own.1,
        size,
        rdev: 0,
        target: None,
        atime: time,
        mtime: time,
        xattrs: Vec::new(),
    }
}

struct Store {
    store: Arc<ContentStore>,
    view: OwnedFd,
    dir: tempfile::TempDir,
}

/// A store with content file 7, of 5 bytes, which is in a view as `top/f` and `top/g`.
fn store() -> Store {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(ContentStore::open(&[dir.path().to_owned()], Some(1 << 30)).unwrap());
    let content = store.create(ContentId(7)).unwrap();
    std::io::Write::write_all(&mut &*content.file, b"bytes").unwrap();
    store.budget.account(0, content.file.metadata().unwrap().blocks() * 512);
    let view = store.make_view(0, "view-1").unwrap();
    lay_other(&view, TOP.as_bytes(), &look(FileKind::Directory, 0o755, 0)).unwrap();
    let top = open_in_view(&view, TOP.as_bytes()).unwrap();
    for name in [&b"f"[..], b"g"] {
        let laid = store.lay_file(ContentId(7), 0, (&top, name), &look(FileKind::File, 0o640, 5), false).unwrap();
        assert_eq!(laid, LaidFile::Linked);
    }
    finish_directory(&view, TOP.as_bytes(), &look(FileKind::Directory, 0o750, 0)).unwrap();
    Store { store, view, dir }
}

fn blocks(store: &ContentStore) -> u64 {
    store.stat(ContentId(7)).unwrap().blocks() * 512
}

#[test]
fn a_content_file_of_a_view_looks_as_its_record_says() {
    let Store { store, dir, .. } = store();
    let top = dir.path().join("content/views/view-1/top");
    let meta = fs::metadata(top.join("f")).unwrap();
    assert_eq!((meta.mode() & 0o7777, meta.mtime(), meta.mtime_nsec(), meta.nlink()), (0o640, 1_000_000, 7, 3));
    let meta = fs::metadata(&top).unwrap();
    assert_eq!((meta.mode() & 0o7777, meta.mtime()), (0o750, 1_000_000));
    store.discard_view(0, "view-1", 9).unwrap();
    assert!(!top.exists());
    store.remove_discarded_views().unwrap();
    let meta = store.stat(ContentId(7)).unwrap();
    assert_eq!((meta.nlink(), store.outlived_bytes()), (1, 0));
    assert_eq!(store.budget.used(), blocks(&store));
}

#[test]
fn a_file_that_only_a_view_names_is_counted_until_the_view_is_removed() {
    let Store { store, dir, .. } = store();
    let bytes = blocks(&store);
    store.remove_content(ContentId(7), bytes).unwrap();
    assert_eq!((store.budget.used(), store.outlived_bytes()), (bytes, bytes));
    assert_eq!(fs::read(dir.path().join("content/views/view-1/top/g")).unwrap(), b"bytes");
    drop(store);
    // The next daemon counts it again.
    let store = ContentStore::open(&[dir.path().to_owned()], Some(1 << 30)).unwrap();
    assert_eq!(store.views(), [(0, "view-1".to_owned())]);
    store.count_outlived().unwrap();
    assert_eq!((store.budget.used(), store.outlived_bytes()), (bytes, bytes));
    store.discard_view(0, "view-1", 9).unwrap();
    store.remove_discarded_views().unwrap();
    assert_eq!((store.budget.used(), store.outlived_bytes()), (0, 0));
}

#[test]
fn a_file_that_has_a_record_is_not_counted_twice() {
    let Store { store, dir: _dir, .. } = store();
    store.count_outlived().unwrap();
    assert_eq!((store.budget.used(), store.outlived_bytes()), (blocks(&store), 0));
}

#[test]
fn a_content_file_with_a_wrong_size_is_refused() {
    let Store { store, view, dir: _dir } = store();
    let refused = store.lay_file(ContentId(7), 0, (&view, b"h"), &look(FileKind::File, 0o644, 6), false).unwrap_err();
    assert!(refused.to_string().contains("5 bytes instead of 6"), "{refused}");
}

#[test]
fn two_views_of_a_file_end_one_after_the_other() {
    let Store { store, dir, .. } = store();
    let second = store.make_view(0, "view-2").unwrap();
    store.lay_file(ContentId(7), 0, (&second, TOP.as_bytes()), &look(FileKind::File, 0o604, 5), false).unwrap();
    store.discard_view(0, "view-1", 9).unwrap();
    store.remove_discarded_views().unwrap();
    let bytes = blocks(&store);
    store.remove_content(ContentId(7), bytes).unwrap();
    assert_eq!(store.outlived_bytes(), bytes);
    let top = dir.path().join("content/views/view-2/top");
    assert_eq!(fs::metadata(&top).unwrap().permissions().mode() & 0o7777, 0o604);
    store.discard_view(0, "view-2", 10).unwrap();
    store.remove_discarded_views().unwrap();
    assert_eq!((store.budget.used(), store.outlived_bytes()), (0, 0));
}

#[test]
fn a_content_file_has_no_attribute_that_its_record_lacks() {
    let Store { store, view, dir } = store();
    let top = open_in_view(&view, TOP.as_bytes()).unwrap();
    let with = |name: &[u8]| EntryLook {
        xattrs: vec![(name.into(), b"value".as_slice().into())],
        ..look(FileKind::File, 0o640, 5)
    };
    store.lay_file(ContentId(7), 0, (&top, b"h"), &with(b"user.old"), false).unwrap();
    store.lay_file(ContentId(7), 0, (&top, b"i"), &with(b"user.new"), false).unwrap();
    let path = dir.path().join("content/views/view-1/top/f");
    let path = std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str());
    assert_eq!(crate::scratch::xattr_names(path).unwrap(), [b"user.new"]);
}

#[test]
fn a_copy_that_cannot_be_shown_is_neither_there_nor_counted() {
    let (root, memory) = (tempfile::tempdir_in("/var/tmp").unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let dirs = [root.path().join("a"), memory.path().join("b")];
    let store = ContentStore::open(&dirs, Some(1 << 30)).unwrap();
    let content = store.create(ContentId(7)).unwrap();
    std::io::Write::write_all(&mut &*content.file, b"bytes").unwrap();
    let view = store.make_view(1, "view-1").unwrap();
    let wrong = look(FileKind::File, 0o640, 6);
    store.lay_file(ContentId(7), 1, (&view, b"f"), &wrong, true).unwrap_err();
    assert!(stat_of(&view, b"f").is_err(), "the copy is there");
    let right = look(FileKind::File, 0o640, 5);
    assert!(matches!(store.lay_file(ContentId(7), 1, (&view, b"f"), &right, true), Ok(LaidFile::Copied(_))));
}

#[test]
fn what_only_a_view_names_is_counted_in_the_tier_of_its_device() {
    let root = tempfile::tempdir().unwrap();
    let layout = |name: &str, dirs| crate::TierLayout {
        name: name.into(),
        dirs,
        limit_bytes: Some(1 << 30),
        high_watermark: 0.9,
    };
    let layouts = [layout("ssd", vec![root.path().join("ssd")]), layout("fast", Vec::new())];
    let mut store = ContentStore::open(&[root.path().join("fast")], Some(1 << 30)).unwrap();
    let number = store.add_tiers(&layouts, "me", |_| None, std::collections::BTreeSet::new()).unwrap()[0].number;
    store.identify("me", &Default::default()).unwrap();
    let id = store.place(ContentId(7), 0);
    let content = store.create(id).unwrap();
    std::io::Write::write_all(&mut &*content.file, b"bytes").unwrap();
    let bytes = content.file.metadata().unwrap().blocks() * 512;
    store.account(id, 0, bytes);
    let view = store.make_view(number, "view-1").unwrap();
    store.lay_file(id, number, (&view, b"f"), &look(FileKind::File, 0o640, 5), false).unwrap();
    let counted = || store.tiers().iter().map(|tier| tier.budget.used()).collect::<Vec<_>>();
    store.remove_content(id, bytes).unwrap();
    assert_eq!((counted(), store.budget.used()), (vec![bytes, 0], bytes));
    store.discard_view(number, "view-1", 9).unwrap();
    store.remove_discarded_views().unwrap();
    assert_eq!((counted(), store.budget.used(), store.outlived_bytes()), (vec![0, 0], 0, 0));
}

/// The mount bounds how many directories are below each other, but not how long their path is.
#[test]
fn a_view_whose_paths_are_longer_than_the_kernel_takes_is_counted_and_removed() {
    let Store { store, dir, .. } = store();
    let bytes = blocks(&store);
    let mut at = OwnedFd::from(File::open(dir.path().join("content/views/view-1/top")).unwrap());
    let name = "d".repeat(250);
    for _ in 0..20 {
        lay_other(&at, name.as_bytes(), &look(FileKind::Directory, 0o755, 0)).unwrap();
        at = open_in_view(&at, name.as_bytes()).unwrap();
    }
    store.lay_file(ContentId(7), 0, (&at, b"h"), &look(FileKind::File, 0o640, 5), false).unwrap();
    drop(at);
    store.remove_content(ContentId(7), bytes).unwrap();
    drop(store);
    let store = ContentStore::open(&[dir.path().to_owned()], Some(1 << 30)).unwrap();
    store.count_outlived().unwrap();
    assert_eq!((store.budget.used(), store.outlived_bytes()), (bytes, bytes));
    store.discard_view(0, "view-1", 9).unwrap();
    store.remove_discarded_views().unwrap();
    assert_eq!((store.budget.used(), store.outlived_bytes()), (0, 0));
    assert_eq!(fs::read_dir(dir.path().join("content/views/removed")).unwrap().count(), 0);
}

#[test]
fn a_view_that_the_last_daemon_was_removing_is_counted() {
    let Store { store, dir, .. } = store();
    let bytes = blocks(&store);
    store.remove_content(ContentId(7), bytes).unwrap();
    store.discard_view(0, "view-1", 9).unwrap();
    drop(store);
    let store = ContentStore::open(&[dir.path().to_owned()], Some(1 << 30)).unwrap();
    assert!(store.views().is_empty() && store.has_views(), "it has names of content files");
    store.count_outlived().unwrap();
    assert_eq!((store.budget.used(), store.outlived_bytes()), (bytes, bytes));
    store.remove_discarded_views().unwrap();
    assert_eq!((store.budget.used(), store.outlived_bytes()), (0, 0));
}

#[test]
fn what_was_not_counted_is_not_given_back() {
    let Store { store, dir, .. } = store();
    store.remove_content(ContentId(7), blocks(&store)).unwrap();
    drop(store);
    let store = ContentStore::open(&[dir.path().to_owned()], Some(1 << 30)).unwrap();
    store.budget.account(0, 1 << 20);
    store.discard_view(0, "view-1", 9).unwrap();
    store.remove_discarded_views().unwrap();
    assert_eq!((store.budget.used(), store.outlived_bytes()), (1 << 20, 0));
}
