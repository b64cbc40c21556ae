use std::collections::{BTreeMap, BTreeSet};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;

fn seen(dir: &Path) -> BTreeMap<PathBuf, (u32, u64, Vec<u8>)> {
    let (mut all, mut left) = (BTreeMap::new(), vec![dir.to_owned()]);
    while let Some(at) = left.pop() {
        for path in fs::read_dir(&at).unwrap().map(|entry| entry.unwrap().path()) {
            let meta = fs::symlink_metadata(&path).unwrap();
            let bytes = if meta.is_file() { fs::read(&path).unwrap() } else { Vec::new() };
            if meta.is_dir() {
                left.push(path.clone());
            }
            all.insert(path.strip_prefix(dir).unwrap().to_owned(), (meta.mode(), meta.nlink(), bytes));
        }
    }
    all
}

/// A store with a scratch directory `j` that holds a tree `a`.
fn store() -> (tempfile::TempDir, ContentStore, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let store = ContentStore::open(&[root.path().join("fast")], Some(1 << 30)).unwrap();
    let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let dir = store.make_scratch(0, "j", own).unwrap();
    fs::create_dir_all(dir.join("a/b")).unwrap();
    for name in ["a/f", "a/b/g", "a/b/h"] {
        fs::write(dir.join(name), name).unwrap();
    }
    fs::set_permissions(dir.join("a/b/g"), Permissions::from_mode(0o4751)).unwrap();
    fs::hard_link(dir.join("a/f"), dir.join("a/b/same")).unwrap();
    std::os::unix::fs::symlink("b/g", dir.join("a/link")).unwrap();
    (root, store, dir)
}

fn numbers() -> impl Fn() -> Result<ContentId> {
    let next = AtomicU64::new(100);
    move || Ok(ContentId(next.fetch_add(1, Ordering::Relaxed)))
}

/// Each step of a commit may be the last one of a daemon. `path` is committed; an empty one is all of `j`.
fn undone_after(steps: usize, path: &str) {
    let (_root, store, dir) = store();
    let was = seen(&dir);
    let tree = store.detach(0, "j", path.as_bytes(), 7).unwrap();
    if steps > 0 {
        let mut entries = tree.read(numbers()).unwrap();
        if steps > 1 {
            // A file that has another name outside of `a/b` is refused.
            assert_eq!(tree.move_into_store(&store, &mut entries).is_ok(), path != "a/b");
            tree.check_unchanged(&entries).unwrap();
        }
    }
    drop(tree);
    let [tree] = store.detached().try_into().unwrap();
    tree.undo(&store, |_| Ok(false)).unwrap();
    assert_eq!(seen(&dir), was, "after {steps} steps, {path:?}");
    assert!(store.detached().is_empty());
    store.walk(|id, _| panic!("{id:?} is left")).unwrap();
}

#[test]
fn an_interrupted_commit_is_undone_after_any_step() {
    for steps in 0..3 {
        ["a", "a/b", "a/b/g", "a/link", ""].into_iter().for_each(|path| undone_after(steps, path));
    }
}

#[test]
fn what_has_a_record_is_not_moved_back() {
    let (_root, store, dir) = store();
    let tree = store.detach(0, "j", b"a", 7).unwrap();
    let mut entries = tree.read(numbers()).unwrap();
    tree.move_into_store(&store, &mut entries).unwrap();
    tree.undo(&store, |_| Ok(true)).unwrap();
    let mut kept = 0;
    store
        .walk(|_, _| {
            kept += 1;
            Ok(())
        })
        .unwrap();
    assert_eq!((kept, dir.join("a/b/g").exists()), (3, false));
}

#[test]
fn what_was_made_in_the_same_place_stays() {
    let (_root, store, dir) = store();
    let tree = store.detach(0, "j", b"a", 7).unwrap();
    fs::write(dir.join("a"), "new").unwrap();
    tree.undo(&store, |_| Ok(false)).unwrap();
    assert_eq!(fs::read(dir.join("a")).unwrap(), b"new");
    assert_eq!(fs::read(dir.join("a.uncommitted-7/b/g")).unwrap(), b"a/b/g");
}

#[test]
fn no_link_leads_out_of_the_directory() {
    let (root, store, dir) = store();
    let outside = root.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), "").unwrap();
    std::os::unix::fs::symlink(&outside, dir.join("out")).unwrap();
    assert!(store.detach(0, "j", b"out/secret", 7).is_err());
    assert!(store.detach(0, "j", b"../j/a", 7).is_err());
    assert!(store.detach(0, "j", b"nothing", 7).is_err());
    assert!(store.detached().is_empty() && outside.join("secret").exists());
    // A directory that becomes a link while it is read.
    let tree = store.detach(0, "j", b"", 8).unwrap();
    let inside = root.path().join("fast/commits/8/tree");
    let mut entries = tree.read(numbers()).unwrap();
    fs::rename(inside.join("a/b"), inside.join("a/c")).unwrap();
    std::os::unix::fs::symlink(&outside, inside.join("a/b")).unwrap();
    fs::write(outside.join("g"), "not ours").unwrap();
    assert!(tree.move_into_store(&store, &mut entries).unwrap_err().is(ErrorKind::Busy));
    tree.undo(&store, |_| Ok(false)).unwrap();
    assert_eq!(fs::read(outside.join("g")).unwrap(), b"not ours");
    assert_eq!(fs::read(dir.join("a/c/g")).unwrap(), b"a/b/g");
    assert_eq!(fs::read(dir.join("a/f")).unwrap(), b"a/f");
}

/// What a user who holds a directory open puts in the place of a file is neither changed nor lost.
#[test]
fn a_file_that_was_replaced_meanwhile_is_moved_back_as_it_is() {
    let (root, store, dir) = store();
    let victim = root.path().join("victim");
    fs::write(&victim, "x").unwrap();
    fs::set_permissions(&victim, Permissions::from_mode(0o600)).unwrap();
    let tree = store.detach(0, "j", b"a", 7).unwrap();
    let inside = root.path().join("fast/commits/7/tree");
    let mut entries = tree.read(numbers()).unwrap();
    fs::remove_file(inside.join("b/g")).unwrap();
    std::os::unix::fs::symlink(&victim, inside.join("b/g")).unwrap();
    assert!(tree.move_into_store(&store, &mut entries).unwrap_err().is(ErrorKind::Busy));
    tree.undo(&store, |_| Ok(false)).unwrap();
    assert_eq!(fs::metadata(&victim).unwrap().mode() & 0o7777, 0o600, "root follows no link");
    assert_eq!(fs::read_link(dir.join("a/b/g")).unwrap(), victim);
    assert_eq!(fs::read(dir.join("a/f")).unwrap(), b"a/f");
}

#[test]
fn files_of_a_directory_that_was_renamed_meanwhile_come_back() {
    let (root, store, dir) = store();
    let tree = store.detach(0, "j", b"a", 7).unwrap();
    let inside = root.path().join("fast/commits/7/tree");
    let mut entries = tree.read(numbers()).unwrap();
    tree.move_into_store(&store, &mut entries).unwrap();
    fs::rename(inside.join("b"), inside.join("final")).unwrap();
    tree.undo(&store, |_| Ok(false)).unwrap();
    let all = seen(&dir);
    for text in ["a/f", "a/b/g", "a/b/h"] {
        assert!(all.values().any(|(_, _, bytes)| bytes == text.as_bytes()), "{text}: {:?}", all.keys());
    }
}

#[test]
fn what_appears_in_the_tree_is_not_removed_with_it() {
    let (root, store, dir) = store();
    let tree = store.detach(0, "j", b"a", 7).unwrap();
    let inside = root.path().join("fast/commits/7/tree");
    let mut entries = tree.read(numbers()).unwrap();
    tree.move_into_store(&store, &mut entries).unwrap();
    tree.check_unchanged(&entries).unwrap();
    fs::write(inside.join("b/late"), "late").unwrap();
    assert!(tree.check_unchanged(&entries).unwrap_err().is(ErrorKind::Busy));
    tree.finish(&store).unwrap();
    assert_eq!(fs::read(dir.join("a.uncommitted-7/b/late")).unwrap(), b"late");
    assert!(store.detached().is_empty() && !dir.join("a.uncommitted-7/link").exists());
}

#[test]
fn a_further_name_of_a_file_holds_no_attributes() {
    let (_root, store, dir) = store();
    let set = |name: &str| {
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::lsetxattr(dir.join("a/f"), name, &[7u8; 100], flags).unwrap();
    };
    set("user.one");
    set("user.two");
    let entries = store.detach(0, "j", b"a", 7).unwrap().read(numbers()).unwrap();
    let attributes = |name: &[u8]| {
        let found = entries.iter().find(|entry| entry.name == name).unwrap();
        (matches!(found.kind, TreeKind::HardLink { .. }), found.xattrs.len())
    };
    let mut both = [attributes(b"f"), attributes(b"same")];
    both.sort_unstable();
    assert_eq!(both, [(false, 2), (true, 0)]);
}

#[test]
fn a_commit_on_a_device_of_a_tier_is_undone() {
    let root = tempfile::tempdir().unwrap();
    let layout = crate::TierLayout {
        name: "ssd".into(),
        dirs: vec![root.path().join("ssd")],
        limit_bytes: Some(1 << 30),
        high_watermark: 0.9,
    };
    let open = || {
        let mut store = ContentStore::open(&[root.path().join("fast")], Some(1 << 30)).unwrap();
        let known = BTreeSet::from([128]);
        let number = store.add_tiers(std::slice::from_ref(&layout), "me", |_| Some(128), known).unwrap()[0].number;
        (store, number)
    };
    let (store, number) = open();
    assert_eq!(number, 128, "no place in the list of devices");
    let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let dir = store.make_scratch(number, "j", own).unwrap();
    fs::create_dir(dir.join("a")).unwrap();
    fs::write(dir.join("a/f"), "f").unwrap();
    let was = seen(&dir);
    drop(store.detach(number, "j", b"a", 7).unwrap());
    drop(store);
    let (store, _) = open();
    let [tree] = store.detached().try_into().unwrap();
    tree.undo(&store, |_| Ok(false)).unwrap();
    assert_eq!(seen(&dir), was);
}

/// The length of the whole paths is bounded, not only that of the names.
#[test]
fn a_tree_with_too_many_bytes_of_paths_is_refused() {
    let (_root, store, dir) = store();
    let deep = dir.join("a").join("d".repeat(200)).join("e".repeat(200));
    fs::create_dir_all(&deep).unwrap();
    for number in 0..100 {
        fs::write(deep.join(number.to_string()), "").unwrap();
    }
    let was = seen(&dir);
    let tree = store.detach(0, "j", b"a", 7).unwrap();
    // The names alone have less than 1,000 bytes.
    let refused = tree.read_within(20_000, numbers()).unwrap_err();
    assert!(refused.is(ErrorKind::InvalidInput) && refused.to_string().contains("paths"), "{refused}");
    assert!(tree.read_within(100_000, numbers()).is_ok());
    tree.undo(&store, |_| Ok(false)).unwrap();
    assert_eq!(seen(&dir), was);
}

#[test]
fn a_journal_that_is_longer_than_one_read_is_undone_as_a_whole() {
    let (_root, store, dir) = store();
    for number in 0..1_000 {
        fs::write(dir.join("a/b").join(format!("{}-{number}", "n".repeat(200))), number.to_string()).unwrap();
    }
    let was = seen(&dir);
    let tree = store.detach(0, "j", b"a", 7).unwrap();
    let mut entries = tree.read(numbers()).unwrap();
    tree.move_into_store(&store, &mut entries).unwrap();
    drop(tree);
    let [tree] = store.detached().try_into().unwrap();
    tree.undo(&store, |_| Ok(false)).unwrap();
    assert_eq!(seen(&dir), was);
    store.walk(|id, _| panic!("{id:?} is left")).unwrap();
}

/// The daemon would wait for the holder of a lease whenever it opens the file.
#[test]
fn a_file_on_which_a_process_holds_a_lease_is_refused() {
    use std::os::fd::AsRawFd;
    let (_root, store, dir) = store();
    let was = seen(&dir);
    let held = File::open(dir.join("a/b/g")).unwrap();
    // SAFETY: plain calls. The signal, which tells the holder of a lease to give it up, would end this process.
    let leased = unsafe {
        libc::signal(libc::SIGIO, libc::SIG_IGN);
        libc::fcntl(held.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK)
    };
    assert_eq!(leased, 0, "{}", io::Error::last_os_error());
    let tree = store.detach(0, "j", b"a", 7).unwrap();
    let mut entries = tree.read(numbers()).unwrap();
    let refused = tree.move_into_store(&store, &mut entries).unwrap_err();
    assert!(refused.is(ErrorKind::Busy) && refused.to_string().contains("b/g"), "{refused}");
    tree.undo(&store, |_| Ok(false)).unwrap();
    assert_eq!(seen(&dir), was);
    drop(held);
    let tree = store.detach(0, "j", b"a", 8).unwrap();
    let mut entries = tree.read(numbers()).unwrap();
    tree.move_into_store(&store, &mut entries).unwrap();
    tree.undo(&store, |_| Ok(false)).unwrap();
}
