//! Stages and views for a user: what the user may read, and no more.

use std::sync::Arc;

use bytes::Bytes;
use forebay_api::operator::{StageRequest, Summary, UserGroups};
use forebay_api::views::ViewRequest;
use forebay_backends::{Attrs, ErrorKind, Expected, Piece, Pool};
use forebay_engine::{Overlay, summary};
use forebay_prefetch::signature::Invocation;
use forebay_tests::engine::*;
use forebay_tests::expects::Expects;

/// The user of the job, and one whose files are there, too.
const USER: u32 = 5;
const OTHER: u32 = 6;
/// The group of what the two share.
const SHARED: u32 = 7;

fn user(more: &[u32]) -> UserGroups {
    UserGroups { uid: USER, groups: [&[USER], more].concat() }
}

fn owned(uid: u32, gid: u32, mode: u32) -> Attrs {
    Attrs { uid, gid, ..attrs(mode) }
}

async fn mkdir(fixture: &Fixture, path: &str, attrs: Attrs) {
    fixture.memory.mkdir(&pool_path(path), &attrs).await.unwrap();
}

/// Puts a file of one byte into the pool.
async fn file(fixture: &Fixture, path: &str, attrs: Attrs) {
    let pieces = Box::pin(futures::stream::iter([Ok(Piece { offset: 0, data: Bytes::from_static(b"x") })]));
    fixture.memory.put(&pool_path(path), 1, pieces, &attrs, &Expected::Anything).await.unwrap();
}

/// Makes a pool with what all may read, what only `OTHER` may, and what the two users share by a group.
async fn fixture() -> Fixture {
    let fixture = Fixture::new();
    mkdir(&fixture, "open", owned(OTHER, OTHER, 0o755)).await;
    file(&fixture, "open/a", owned(OTHER, OTHER, 0o644)).await;
    file(&fixture, "open/secret", owned(OTHER, OTHER, 0o600)).await;
    mkdir(&fixture, "open/closed", owned(OTHER, OTHER, 0o711)).await;
    file(&fixture, "open/closed/b", owned(OTHER, OTHER, 0o644)).await;
    mkdir(&fixture, "private", owned(OTHER, OTHER, 0o700)).await;
    file(&fixture, "private/c", owned(OTHER, OTHER, 0o644)).await;
    mkdir(&fixture, "shared", owned(OTHER, SHARED, 0o750)).await;
    file(&fixture, "shared/d", owned(OTHER, SHARED, 0o640)).await;
    mkdir(&fixture, "own", owned(USER, USER, 0o700)).await;
    file(&fixture, "own/e", owned(USER, USER, 0o600)).await;
    for (link, target) in [("open-link", "own/e"), ("private-link", "private/c")] {
        fixture.memory.symlink(&pool_path(link), target.as_bytes(), &owned(USER, USER, 0o777)).await.unwrap();
    }
    fixture
}

async fn stage_for(overlay: &Overlay, user: UserGroups, path: &str) -> (Summary, Vec<(String, String)>) {
    let request = StageRequest {
        paths: vec![path.into()],
        lease_owner: "job".into(),
        user: Some(user),
        ..StageRequest::default()
    };
    summary(overlay.stage(request)).await
}

/// SECURITY 21: "What is staged for a job is what its user may read, with its groups."
#[tokio::test(flavor = "multi_thread")]
async fn a_stage_for_a_user_takes_what_the_user_may_read() {
    let fixture = fixture().await;
    let overlay = fixture.open().await;
    // A name that is there, and one that is not, have one answer.
    for path in ["private", "private/c", "private/none", "private/*", "private-link", "open/secret"] {
        let (done, failed) = stage_for(&overlay, user(&[]), path).await;
        assert_eq!((done.files, done.failed), (0, 1), "{path}: {failed:?}");
        assert!(failed[0].1.contains("user 5 may not"), "{path}: {failed:?}");
    }
    assert_eq!((fixture.metrics.snapshot().bytes_read(), overlay.status().await.leased_bytes), (0, 0));
    let (done, failed) = stage_for(&overlay, user(&[]), "open").await;
    let mut names: Vec<&str> = failed.iter().map(|(path, _)| path.as_str()).collect();
    names.sort_unstable();
    assert_eq!((done.files, names), (1, vec!["/open/closed", "/open/secret"]), "{failed:?}");
    assert_eq!(overlay.status().await.leased_bytes, 1);
    // A directory that can be searched needs not be listed, and a glob leaves out what it does not name.
    for path in ["open/closed/b", "open/a*", "open-link", "own"] {
        let (done, failed) = stage_for(&overlay, user(&[]), path).await;
        assert_eq!((done.files, failed), (1, Vec::new()), "{path}");
    }
    assert_eq!(stage_for(&overlay, user(&[]), "shared").await.0.failed, 1);
    assert_eq!(stage_for(&overlay, user(&[SHARED]), "shared").await.1, Vec::new());
    assert_eq!(stage_for(&overlay, UserGroups { uid: 0, groups: vec![0] }, "").await.1, Vec::new());
}

/// A profile knows what the user has read. Meanwhile it may have lost the right.
#[tokio::test(flavor = "multi_thread")]
async fn an_expected_file_that_the_user_may_not_read_is_left_out() {
    let fixture = fixture().await;
    let overlay = fixture.open().await;
    overlay.set_advisor(Arc::new(Expects(&["open/a", "open/secret", "private/c"])));
    let invocation: Invocation = serde_json::from_str(r#"{"user":5,"words":["a"]}"#).unwrap();
    let request = StageRequest { lease_owner: "job".into(), invocation: Some(invocation), ..Default::default() };
    let for_user = StageRequest { user: Some(user(&[])), ..request.clone() };
    let (done, failed) = summary(overlay.stage(for_user)).await;
    assert_eq!((done.files, failed, overlay.status().await.leased_bytes), (1, Vec::new(), 1));
    assert_eq!(summary(overlay.stage(request)).await.0.files, 3);
}

/// SECURITY 22: "A view that a job of Slurm asks for, and that all on the node see, is laid only over a file or a
/// directory that the job's user owns."
#[tokio::test(flavor = "multi_thread")]
async fn only_the_owner_lays_a_view_that_all_see() {
    let fixture = fixture().await;
    let overlay = fixture.open().await;
    let begin = |path: &str, user: UserGroups| {
        let request = ViewRequest { path: path.into(), user: Some(user), ..ViewRequest::default() };
        overlay.begin_view(request, None)
    };
    let refused = begin("open", user(&[])).await.unwrap_err();
    assert!(refused.is(ErrorKind::NotPermitted) && refused.to_string().contains("belongs to user 6"), "{refused}");
    assert!(begin("private", user(&[])).await.unwrap_err().is(ErrorKind::PermissionDenied));
    assert!(begin("private/c", user(&[])).await.unwrap_err().is(ErrorKind::PermissionDenied));
    assert_eq!(overlay.views().unwrap(), Vec::new());
    begin("own", user(&[])).await.unwrap();
    begin("open", UserGroups { uid: 0, groups: vec![0] }).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_is_written_back_for_a_user_that_reaches_and_may_read_it() {
    let fixture = fixture().await;
    let overlay = fixture.open().await;
    for path in ["open", "open/a", "own/e", "shared", "none"] {
        overlay.check_flush_for(path, &user(&[SHARED])).await.unwrap();
    }
    for path in ["open/secret", "private", "private/none", "private-link"] {
        let refused = overlay.check_flush_for(path, &user(&[SHARED])).await.unwrap_err();
        assert!(refused.is(ErrorKind::PermissionDenied), "{path}: {refused}");
    }
}
