//! Calls of the flush that were not answered, or were answered after another client changed the same object.

use forebay_backends::decorators::{CallKind, Odds};
use forebay_backends::{Expected, Pool, SetAttrs, Time};
use forebay_engine::{Change, Ino, SetTime};
use forebay_tests::engine::*;

#[tokio::test(flavor = "multi_thread")]
async fn our_directory_is_no_conflict_though_its_mode_changed_after_the_answer_was_lost() {
    let fixture = Fixture::new();
    let overlay = fixture.open().await;
    let made = overlay.mkdir(Ino::ROOT, b"d", 0o755, 0, CALLER).await.unwrap();
    fixture.fault.set_odds(CallKind::SyncDir, Odds { before: 1.0, after: 0.0 });
    assert!(flush(&overlay).await.failed > 0, "the answer was lost");
    assert_eq!(fixture.pooled(), pairs(&[("/d/", "")]));
    fixture.fault.heal();
    let change = Change { mode: Some(0o775), ..Change::default() };
    overlay.setattr(made.attr.ino, &change, CALLER).await.unwrap();
    flushed(&overlay).await;
    assert_eq!(overlay.status().await.conflicts, Vec::<String>::new());
    assert_eq!(fixture.pooled(), pairs(&[("/d/", "")]));
    assert_eq!(fixture.memory.stat(&pool_path("d")).await.unwrap().mode, 0o775);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_of_what_another_client_removed_ends_and_is_reported() {
    let fixture = Fixture::new();
    fixture.put("a", b"content").await;
    let overlay = fixture.open().await;
    overlay.link(find(&overlay, "a").await, Ino::ROOT, b"b").await.unwrap();
    fixture.memory.remove(&pool_path("a"), &Expected::Anything).await.unwrap();
    flushed(&overlay).await;
    assert_eq!(fixture.pooled(), Vec::new());
    assert!(!overlay.status().await.conflicts.is_empty());
    assert!(overlay.read_dir(Ino::ROOT).await.unwrap().entries.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn rights_that_another_client_changed_are_seen_after_a_flush_of_times() {
    let fixture = Fixture::new();
    fixture.put("a", b"content").await;
    let overlay = fixture.open().await;
    let ino = find(&overlay, "a").await;
    let change = Change { mtime: Some(SetTime::At(Time { secs: 1_000, nanos: 0 })), ..Change::default() };
    overlay.setattr(ino, &change, CALLER).await.unwrap();
    let closed = SetAttrs { mode: Some(0o600), ..SetAttrs::default() };
    fixture.memory.set_attrs(&pool_path("a"), &closed).await.unwrap();
    flushed(&overlay).await;
    assert_eq!(overlay.getattr(ino).await.unwrap().0.mode & 0o7777, 0o600);
}
