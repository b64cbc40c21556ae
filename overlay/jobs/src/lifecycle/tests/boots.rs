//! Jobs and allocations of an earlier boot of the machine.

use forebay_api::scratch::ScratchRequest;

use super::*;

/// SEMANTICS 71: "A scratch directory stays until it is discarded, or until the allocation of its name is over."
#[tokio::test(flavor = "multi_thread")]
async fn the_scratch_directory_of_a_job_that_a_restart_ended_stays_without_its_reservation() {
    let daemon = Daemon::start().await;
    let verb = async |verb| daemon.jobs.allocation("a".into(), verb, 0).await;
    verb(AllocationVerb::Begin(AllocationRequest::default())).await.unwrap();
    verb(AllocationVerb::Start { members: Members::Processes(Vec::new()) }).await.unwrap();
    let engine = &daemon.jobs.inner.engine;
    let sized = ScratchRequest { id: "a".into(), uid: None, gid: None, limit_bytes: Some(1 << 20) };
    assert_eq!(engine.create_scratch(sized, 0, 0).await.unwrap().limit_bytes, Some(1 << 20));
    let mut record = engine.catalog().allocation("a").unwrap().unwrap();
    record.boot = "earlier".into();
    engine.catalog().put_allocation(&record).unwrap();
    let daemon = daemon.dies().await;
    daemon.jobs.inner.take_up_allocations().unwrap();
    let kept = daemon.jobs.inner.engine.scratch_dirs().unwrap();
    assert_eq!(kept.iter().map(|dir| (dir.id.as_str(), dir.limit_bytes)).collect::<Vec<_>>(), [("a", None)]);
}
