//! Deep trees.

use std::time::Duration;

use forebay_backends::RenameMode;
use forebay_engine::{Ino, Overlay};
use forebay_tests::engine::*;

/// Directories above the deepest name.
const DEEPEST: usize = 2048;
/// A chain takes a moment if each directory costs the same, and minutes if each one costs as much as all directories
/// above it.
const PATIENCE: Duration = Duration::from_secs(120);

async fn chain(overlay: &Overlay, length: usize) -> Ino {
    let mut at = Ino::ROOT;
    for _ in 0..length {
        let entry = overlay.mkdir(at, b"d", 0o755, 0, CALLER).await.unwrap();
        at = entry.attr.ino;
    }
    at
}

/// SEMANTICS 52: "Creating a name with more than 2,048 directories above it fails with `ENAMETOOLONG`"
#[tokio::test(flavor = "multi_thread")]
async fn a_tree_that_is_too_deep_is_refused_and_a_deep_one_is_flushed() {
    let fixture = Fixture::new();
    let overlay = fixture.open().await;
    let bottom = tokio::time::timeout(PATIENCE, chain(&overlay, DEEPEST)).await.expect("a chain");
    let refused = |errno: i32| assert_eq!(errno, libc::ENAMETOOLONG);
    refused(overlay.mkdir(bottom, b"d", 0o755, 0, CALLER).await.unwrap_err().errno());
    refused(overlay.create(bottom, b"f", 0o644, 0, RDWR, CALLER).await.unwrap_err().errno());
    refused(overlay.symlink(bottom, b"l", b"target", CALLER).await.unwrap_err().errno());
    let (entry, _) = overlay.create(Ino::ROOT, b"f", 0o644, 0, RDWR, CALLER).await.unwrap();
    overlay.release(entry.attr.ino, RDWR);
    refused(overlay.link(entry.attr.ino, bottom, b"f").await.unwrap_err().errno());
    refused(overlay.rename(Ino::ROOT, b"f", bottom, b"f", RenameMode::Replace).await.unwrap_err().errno());
    tokio::time::timeout(PATIENCE, flushed(&overlay)).await.expect("a flush");
    assert_eq!(fixture.memory.snapshot().len(), DEEPEST + 1);
}

async fn dir(overlay: &Overlay, parent: Ino, name: &[u8]) -> Ino {
    overlay.mkdir(parent, name, 0o755, 0, CALLER).await.unwrap().attr.ino
}

/// Makes a chain of `length` directories, the first of which is `name` in the root. Returns the last one.
async fn tree(overlay: &Overlay, name: &[u8], length: usize) -> Ino {
    let mut at = dir(overlay, Ino::ROOT, name).await;
    for _ in 1..length {
        at = dir(overlay, at, b"d").await;
    }
    at
}

async fn moves(overlay: &Overlay, from: (Ino, &[u8]), to: (Ino, &[u8]), mode: RenameMode) -> i32 {
    overlay.rename(from.0, from.1, to.0, to.1, mode).await.map_or_else(|e| e.errno(), |()| 0)
}

/// SEMANTICS 52: "Moving a directory to where a name below it would be deeper than that fails as well."
#[tokio::test(flavor = "multi_thread")]
async fn a_directory_is_not_moved_to_where_what_is_below_it_would_be_too_deep() {
    let fixture = Fixture::new();
    let overlay = fixture.open().await;
    let (root, replace) = (Ino::ROOT, RenameMode::Replace);
    // `long` has more names than one check of a move looks at, and `short` has fewer.
    let long = tree(&overlay, b"long", 1500).await;
    let short = tree(&overlay, b"short", 600).await;
    assert_eq!(moves(&overlay, (root, b"long"), (short, b"e"), replace).await, libc::ENAMETOOLONG);
    assert_eq!(moves(&overlay, (root, b"short"), (long, b"e"), replace).await, libc::ENAMETOOLONG);
    dir(&overlay, long, b"e").await;
    assert_eq!(moves(&overlay, (root, b"short"), (long, b"e"), RenameMode::Exchange).await, libc::ENAMETOOLONG);
    assert_eq!(moves(&overlay, (long, b"e"), (root, b"short"), RenameMode::Exchange).await, libc::ENAMETOOLONG);
    // A tree that fits is moved. It then makes `long` too deep for the next move.
    tree(&overlay, b"fits", 547).await;
    assert_eq!(moves(&overlay, (root, b"fits"), (long, b"e"), replace).await, 0);
    dir(&overlay, root, b"above").await;
    let above = find(&overlay, "above").await;
    assert_eq!(moves(&overlay, (root, b"long"), (above, b"long"), replace).await, 0);
    let lower = dir(&overlay, above, b"lower").await;
    assert_eq!(moves(&overlay, (above, b"long"), (lower, b"long"), replace).await, libc::ENAMETOOLONG);
    assert_eq!(moves(&overlay, (above, b"long"), (root, b"long"), replace).await, 0);
    // A restart changes nothing.
    overlay.shutdown().await.unwrap();
    drop(overlay);
    let overlay = fixture.open().await;
    let (above, lower) = (find(&overlay, "above").await, find(&overlay, "above/lower").await);
    assert_eq!(moves(&overlay, (root, b"long"), (lower, b"long"), replace).await, libc::ENAMETOOLONG);
    assert_eq!(moves(&overlay, (root, b"long"), (above, b"long"), replace).await, 0);
}

/// SEMANTICS 52, for large directories: not every rename reads all names below the directory.
#[tokio::test(flavor = "multi_thread")]
async fn a_large_directory_is_moved_deeper_and_back_as_often_as_one_likes() {
    let fixture = Fixture::new();
    let overlay = fixture.open().await;
    let large = dir(&overlay, Ino::ROOT, b"large").await;
    for n in 0..1100 {
        dir(&overlay, large, n.to_string().as_bytes()).await;
    }
    let deep = tree(&overlay, b"deep", 900).await;
    for round in 0..8 {
        let replace = RenameMode::Replace;
        assert_eq!(moves(&overlay, (Ino::ROOT, b"large"), (deep, b"large"), replace).await, 0, "{round}");
        assert_eq!(moves(&overlay, (deep, b"large"), (Ino::ROOT, b"large"), replace).await, 0, "{round}");
    }
}
