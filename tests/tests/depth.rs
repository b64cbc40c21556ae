//! Deep trees.

use std::time::Duration;

use forebay_overlay::backends::RenameMode;
use forebay_overlay::{Ino, Overlay};
use forebay_tests::engine::*;

/// Directories above the deepest name.
const DEEPEST: usize = 2048;
/// A chain takes a moment where each directory costs the same, and minutes where it costs what is above it.
const PATIENCE: Duration = Duration::from_secs(120);

async fn chain(overlay: &Overlay, length: usize) -> Ino {
    let mut at = Ino::ROOT;
    for _ in 0..length {
        let entry = overlay.mkdir(at, b"d", 0o755, 0, CALLER).await.unwrap();
        at = entry.attr.ino;
    }
    at
}

/// SEMANTICS 52: "No directory is made and no name is given below 2,048 directories"
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
