//! What is fetched ahead, on an engine whose pool is in memory.

use std::time::Instant;

use forebay_api::operator::StageRequest;
use forebay_catalog::JobSerial;
use forebay_engine::{AHEAD_REQUESTS, summary};
use forebay_prefetch::online::Who;
use forebay_prefetch::profile::{FileUse, Reason};
use tokio::sync::Semaphore;

use super::access_predictor::{POOL_SHARE, PredictedFile};
use super::*;
use crate::lifecycle::tests::{Daemon, WAIT};

const MIB: u64 = 1 << 20;

/// No byte of it is zero.
fn content(mib: u64) -> Vec<u8> {
    vec![7; (mib * MIB) as usize]
}

fn missing(daemon: &Daemon, ino: Ino) -> u64 {
    daemon.jobs.inner.engine.missing_of(ino, u64::MAX).unwrap().1
}

fn invocation() -> Invocation {
    Invocation { words: vec!["train".into()], ..Invocation::default() }
}

fn expected(path: &str, bytes: u64) -> ExpectedRead {
    let why = Reason::Replayed { used: 1, seen: 1 };
    ExpectedRead { path: path.into(), bytes, rank: 1, probability: 1.0, parts: None, why }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_predicted_file_is_fetched_to_its_end_if_its_beginning_is_resident() {
    let daemon = Daemon::start().await;
    let ino = daemon.put("a", content(6)).await;
    let inner = &daemon.jobs.inner;
    inner.engine.fetch_ahead(ino, 0..2 * MIB).await.unwrap();
    assert_eq!(missing(&daemon, ino), 4 * MIB);
    let wanted = vec![PredictedFile { ino, probability: 1.0, why: String::new() }];
    let admitted = inner.admit(Who::Job(1), wanted, POOL_SHARE, |_, is_taken| assert!(is_taken));
    inner.bring_in_files(admitted, &Arc::new(Semaphore::new(AHEAD_REQUESTS)));
    let begun = Instant::now();
    while missing(&daemon, ino) > 0 {
        assert!(begun.elapsed() < WAIT, "{} bytes are missing", missing(&daemon, ino));
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_staged_for_a_job_that_has_ended_by_then() {
    let daemon = Daemon::start().await;
    let ended: JobSerial = 7;
    daemon.jobs.stage_ahead(ended, invocation());
    assert!(daemon.jobs.inner.foresight.running.lock().is_empty());
}

/// Otherwise, it would take the place of all other clean content.
#[tokio::test(flavor = "multi_thread")]
async fn of_a_file_that_has_grown_no_more_is_fetched_ahead_than_there_is_room_for() {
    let daemon = Daemon::limited(64 * MIB).await;
    let inner = &daemon.jobs.inner;
    let mut others = Vec::new();
    for at in 0..3 {
        let ino = daemon.put(&format!("other-{at}"), content(10)).await;
        inner.engine.fetch_ahead(ino, 0..10 * MIB).await.unwrap();
        others.push(ino);
    }
    let (grown, fits) = (daemon.put("grown", content(60)).await, daemon.put("fits", content(8)).await);
    let ahead = Arc::new(JobPrefetch::for_plan(inner.engine.stop().child_token(), 2 * MIB));
    for (name, ino, staged) in [("grown", grown, MIB), ("fits", fits, 8 * MIB)] {
        daemon.jobs.bring_in_file(&ahead, &expected(name, MIB), Instant::now()).await.unwrap();
        assert_eq!(ahead.staged.lock()[&ino], staged, "{name}");
    }
    assert!(others.iter().all(|ino| missing(&daemon, *ino) == 0), "what is resident stays");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expected_file_that_has_grown_is_left_out_of_a_stage_that_has_no_room_for_it() {
    let daemon = Daemon::limited(64 * MIB).await;
    let inner = &daemon.jobs.inner;
    for name in ["small", "grown", "next"] {
        daemon.put(name, content(1)).await;
    }
    let mut profile = Profile::new(&invocation());
    let used = |(rank, path): (u32, &str)| FileUse { path: path.into(), size_bytes: MIB, rank, parts: None };
    profile.fold(&invocation(), 1, [(1, "grown"), (2, "next")].map(used).to_vec());
    inner.import_profile(ProfileDocument::from(&profile)).unwrap();
    let request = StageRequest {
        paths: vec!["small".into()],
        lease_owner: "owner".into(),
        invocation: Some(invocation()),
        ..StageRequest::default()
    };
    daemon.put("grown", content(80)).await;
    let (done, failed) = summary(inner.engine.stage(request)).await;
    assert_eq!((done.files, done.failed, failed), (2, 0, Vec::new()));
    let message = done.message.unwrap_or_default();
    assert!(message.contains("1 files that may be read are left out: there is no room for them"), "{message}");
    assert_eq!(inner.engine.status().await.leased_bytes, 2 * MIB);
}
