//! Jobs and allocations of an earlier daemon, or of an earlier boot of the machine.

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

/// SEMANTICS 85: "It is removed when the last job that used it ends, if one of these jobs made or wrote it, or belongs to its
/// owner."
///
/// A service has the same cgroup in each boot, and the numbers and times of processes may come again.
#[tokio::test(flavor = "multi_thread")]
async fn what_has_the_name_of_a_process_or_cgroup_of_an_earlier_boot_keeps_no_file() {
    let daemon = Daemon::start().await;
    let observed = client();
    let begun = JobRequest { members: Members::Processes(vec![observed.id()]), ..request("j") };
    daemon.jobs.begin_job(begun, myself(), 0).await.unwrap();
    daemon.make("j", "tmp-1").await;
    for running in daemon.jobs.inner.registry.table.lock().running.values_mut() {
        assert!(!running.head.is_of_earlier_boot());
        running.head.boot = "earlier".into();
    }
    let daemon = daemon.ends().await;
    assert!(!daemon.jobs.inner.registry.runs("j"));
    daemon.until_gone("tmp-1").await;
    end(observed);
}

/// The process that observed the job ended while there was no mount.
#[tokio::test(flavor = "multi_thread")]
async fn a_local_file_of_a_job_whose_end_the_next_daemon_cannot_record_stays() {
    let daemon = Daemon::start().await;
    let (observer, observed) = (client(), client());
    let begun = JobRequest { members: Members::Processes(vec![observed.id()]), ..request("j") };
    daemon.jobs.begin_job(begun, Process::of(observer.id()), 0).await.unwrap();
    daemon.make("j", "tmp-1").await;
    daemon.jobs.shutdown().await.unwrap();
    end(observer);
    let daemon = daemon.replaced_by_next().await;
    daemon.faults.fail_write(1);
    assert!(daemon.jobs.inner.take_up_jobs().is_err());
    assert!(daemon.faults.has_failed());
    daemon.jobs.inner.take_up_jobs().unwrap();
    daemon.until_settled().await;
    assert!(daemon.has("tmp-1").await, "a process of the job lives");
    end(observed);
}
