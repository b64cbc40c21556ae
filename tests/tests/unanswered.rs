//! Calls that were not answered, or were answered after another client changed the same object.

use bytes::Bytes;
use forebay_api::operator::FlushRequest;
use forebay_backends::decorators::{CallKind, Odds};
use forebay_backends::{Expected, Pool, RenameMode, SetAttrs, Time};
use forebay_engine::{Change, Ino, Lookup, Options, Overlay, Policy, SetTime, summary};
use forebay_tests::engine::*;
use forebay_tests::held::open_held;

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

/// SEMANTICS 24: "If another client wrote a file whose times are to be sent, the file keeps the times of that client."
#[tokio::test(flavor = "multi_thread")]
async fn what_another_client_wrote_gets_no_times_that_hide_it() {
    for is_lost in [true, false] {
        let fixture = Fixture::new();
        fixture.put("a", b"first").await;
        let overlay = fixture.open().await;
        assert_eq!(read(&overlay, "a").await.unwrap(), "first");
        let ino = find(&overlay, "a").await;
        let read_at = |secs| Change { atime: Some(SetTime::At(Time { secs, nanos: 0 })), ..Change::default() };
        overlay.setattr(ino, &read_at(1_000), CALLER).await.unwrap();
        let theirs = fixture.memory.write_at(&pool_path("a"), 0, "their".into()).await.unwrap();
        let odds = Odds { before: 0.0, after: if is_lost { 1.0 } else { 0.0 } };
        fixture.fault.set_odds(CallKind::SetAttrs, odds);
        flush(&overlay).await;
        fixture.fault.heal();
        overlay.setattr(ino, &read_at(2_000), CALLER).await.unwrap();
        flushed(&overlay).await;
        assert_eq!(read(&overlay, "a").await.unwrap(), "their", "the answer is lost: {is_lost}");
        let now = fixture.memory.stat(&pool_path("a")).await.unwrap();
        assert_eq!(now.mtime, theirs.mtime, "the answer is lost: {is_lost}");
    }
}

/// Two names, `a` and `c`, stand for one file, and `d` was renamed over `c`. The rename reaches the pool, and its answer
/// is lost. What the flush then sends of the file under its name `a` must not end the doubt about `c`.
async fn a_name_whose_rename_was_not_answered_stays(change: impl AsyncFn(&Overlay, Ino)) {
    let fixture = Fixture::new();
    fixture.put("a", b"both").await;
    fixture.memory.link(&pool_path("a"), &pool_path("c")).await.unwrap();
    fixture.put("d", b"moved").await;
    let closed =
        "[default]\nflush = \"manual\"\nmetadata-ttl = \"0s\"\n[[rule]]\npaths = \"a\"\nflush = \"on-close\"\n";
    let policy = Policy::parse(closed).unwrap();
    let overlay = Overlay::open(Options { policy, ..fixture.options() }).await.unwrap();
    for name in ["c", "d"] {
        find(&overlay, name).await;
    }
    let both = find(&overlay, "a").await;
    overlay.open_file(both, RDWR).await.unwrap();
    overlay.rename(Ino::ROOT, b"d", Ino::ROOT, b"c", RenameMode::Replace).await.unwrap();
    fixture.fault.set_odds(CallKind::SyncDir, Odds { before: 1.0, after: 0.0 });
    let only_c = FlushRequest { paths: vec!["c".into()], wait: true, ..FlushRequest::default() };
    assert!(summary(overlay.flush(only_c)).await.0.failed > 0, "the answer was lost");
    assert_eq!(fixture.pooled().len(), 2, "the rename reached the pool");
    fixture.fault.heal();
    change(&overlay, both).await;
    overlay.close(both, true).await.unwrap();
    assert_eq!(read(&overlay, "c").await.unwrap(), "moved");
    overlay.release(both, RDWR);
    flushed(&overlay).await;
    assert_eq!(overlay.status().await.conflicts, Vec::<String>::new());
    let pooled = fixture.pooled();
    assert_eq!(pooled.iter().map(|(path, _)| path.as_str()).collect::<Vec<_>>(), ["/a", "/c"]);
    assert_eq!(pooled[1].1, "moved");
}

#[tokio::test(flavor = "multi_thread")]
async fn content_sent_under_one_name_ends_no_doubt_about_another() {
    a_name_whose_rename_was_not_answered_stays(async |overlay, both| {
        overlay.write(both, 0, Bytes::from_static(b"newer")).await.unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn attributes_sent_under_one_name_end_no_doubt_about_another() {
    a_name_whose_rename_was_not_answered_stays(async |overlay, both| {
        let change = Change { mode: Some(0o600), ..Change::default() };
        overlay.setattr(both, &change, CALLER).await.unwrap();
    })
    .await;
}

/// The removal of one of a file's names reaches the pool, and its answer is lost. Then the mount gives the name to the
/// same file again.
async fn a_name_given_again_after_an_unanswered_removal_stays(after: impl AsyncFn(&Fixture, Overlay) -> Overlay) {
    let fixture = Fixture::new();
    fixture.put("a", b"both").await;
    fixture.memory.link(&pool_path("a"), &pool_path("b")).await.unwrap();
    let overlay = fixture.open().await;
    find(&overlay, "a").await;
    find(&overlay, "b").await;
    overlay.unlink(Ino::ROOT, b"b").await.unwrap();
    fixture.fault.set_odds(CallKind::SyncDir, Odds { before: 1.0, after: 0.0 });
    assert!(flush(&overlay).await.failed > 0, "the answer was lost");
    assert_eq!(fixture.pooled(), pairs(&[("/a", "both")]), "the removal reached the pool");
    let overlay = after(&fixture, overlay).await;
    overlay.link(find(&overlay, "a").await, Ino::ROOT, b"b").await.unwrap();
    fixture.fault.heal();
    let listed = overlay.read_dir(Ino::ROOT).await.unwrap();
    assert_eq!(listed.entries.len(), 2);
    assert_eq!(read(&overlay, "b").await.unwrap(), "both");
    flushed(&overlay).await;
    assert_eq!(fixture.pooled(), pairs(&[("/a", "both"), ("/b", "both")]));
    assert_eq!(read(&overlay, "b").await.unwrap(), "both");
    assert_eq!(overlay.status().await.conflicts, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_is_made_again_after_its_removal_was_not_answered() {
    a_name_given_again_after_an_unanswered_removal_stays(async |_, overlay| overlay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_is_made_again_after_the_daemon_ended_in_its_removal() {
    a_name_given_again_after_an_unanswered_removal_stays(async |fixture, overlay| {
        overlay.shutdown().await.unwrap();
        drop(overlay);
        fixture.open().await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_under_one_name_ends_no_doubt_about_a_removed_one() {
    a_name_given_again_after_an_unanswered_removal_stays(async |_, overlay| {
        let both = find(&overlay, "a").await;
        let change = Change { mode: Some(0o640), ..Change::default() };
        overlay.setattr(both, &change, CALLER).await.unwrap();
        overlay
    })
    .await;
}

/// An answer that is older than the record must not be kept: what another client revoked would stay.
#[tokio::test(flavor = "multi_thread")]
async fn extended_attributes_that_changed_while_the_pool_answered_are_not_kept() {
    let fixture = Fixture::new();
    fixture.put("f", b"x").await;
    let path = pool_path("f");
    fixture.memory.set_xattr(&path, b"user.k", b"old").await.unwrap();
    let (overlay, held) = open_held(&fixture).await;
    let ino = find(&overlay, "f").await;
    held.hold_answers(1, |call| call.kind == CallKind::Xattrs);
    let changing = async {
        held.until_waiting(1).await;
        fixture.memory.set_xattr(&path, b"user.k", b"new").await.unwrap();
        assert_eq!(find(&overlay, "f").await, ino);
        held.release();
    };
    let (shown, ()) = tokio::join!(overlay.get_xattr(ino, b"user.k"), changing);
    assert_eq!(shown.unwrap(), b"new");
    assert_eq!(overlay.get_xattr(ino, b"user.k").await.unwrap(), b"new");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_changed_while_the_pool_answered_is_not_kept() {
    let fixture = Fixture::new();
    let (path, new) = (pool_path("link"), pool_path("new"));
    fixture.memory.symlink(&path, b"old", &attrs(0o777)).await.unwrap();
    let (overlay, held) = open_held(&fixture).await;
    let ino = find(&overlay, "link").await;
    held.hold_answers(1, |call| call.kind == CallKind::Readlink);
    let changing = async {
        held.until_waiting(1).await;
        // Like `ln -sfn`.
        fixture.memory.symlink(&new, b"new", &attrs(0o777)).await.unwrap();
        fixture.memory.rename(&new, &path, RenameMode::Replace).await.unwrap();
        find(&overlay, "link").await;
        held.release();
    };
    _ = tokio::join!(overlay.readlink(ino), changing);
    assert_eq!(overlay.readlink(find(&overlay, "link").await).await.unwrap(), b"new");
}

async fn looked_up(overlay: &Overlay, name: &[u8]) -> Ino {
    match overlay.lookup(Ino::ROOT, name).await.unwrap() {
        Lookup::Found(entry) => entry.attr.ino,
        Lookup::Negative { .. } => panic!("{} is not there", name.escape_ascii()),
    }
}

/// A user who knows that the pool is back does not wait until the daemon has found out.
#[tokio::test(flavor = "multi_thread")]
async fn a_flush_asks_a_pool_that_did_not_answer_before() {
    let fixture = Fixture::new();
    let policy = || Policy::parse("[default]\nflush = \"manual\"\n[pool]\nretry = \"1h\"\n").unwrap();
    let overlay = opened(|| Options { policy: policy(), ..fixture.options() }).await;
    write(&overlay, "a", "content").await.unwrap();
    fixture.fault.set_down(true);
    assert!(flush(&overlay).await.failed > 0);
    fixture.fault.set_down(false);
    flushed(&overlay).await;
    assert_eq!(fixture.pooled(), pairs(&[("/a", "content")]));
}

/// SEMANTICS 12: "While the pool does not answer, programs can read resident files and write new files"
#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_made_in_a_directory_that_changed_before_the_pool_stopped_answering() {
    // Owner, owning group, other: rwx------.
    let entry = |tag: u8, perm: u8| [tag, 0, perm, 0, 0xff, 0xff, 0xff, 0xff];
    let acl = [&[2, 0, 0, 0][..], &entry(1, 7), &entry(4, 0), &entry(0x20, 0)].concat();
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    fixture.memory.set_xattr(&pool_path("d"), b"system.posix_acl_default", &acl).await.unwrap();
    let overlay = fixture.open().await;
    // What the kernel knows stays in memory.
    let dir = looked_up(&overlay, b"d").await;
    overlay.read_dir(dir).await.unwrap();
    fixture.put("d/theirs", b"x").await;
    assert_eq!(looked_up(&overlay, b"d").await, dir);
    fixture.fault.set_down(true);
    let (made, _) = overlay.create(dir, b"ours", 0o644, 0, RDWR, CALLER).await.unwrap();
    assert_eq!(made.attr.mode & 0o777, 0o600, "it inherits the ACL of the directory");
    overlay.write(made.attr.ino, 0, Bytes::from_static(b"y")).await.unwrap();
    close(&overlay, made.attr.ino).await;
    fixture.fault.set_down(false);
    flushed(&overlay).await;
    assert_eq!(in_pool(&fixture, "d/ours").unwrap(), b"y");
}
