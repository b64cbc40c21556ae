use forebay_daemon::FailureKind;
use forebay_daemon::registry::{MountState, Phase, Process, Runtime};
use forebay_slurm::directives::{DirectoryAccess, PersistentDir, PersistentRequest, StagingRequest};
use rustix::fs::FlockOperation;

use super::*;

/// A job whose prolog has begun, and has not ended.
fn begun(id: &str, uid: u32, persistent: PersistentRequest, records: &Path) -> StagedJob {
    let variable = |name: &str| match name {
        "SLURM_JOB_ID" => Some(id.to_owned()),
        "SLURM_JOB_UID" => Some(uid.to_string()),
        _ => None,
    };
    let job = SlurmJob::of(variable).unwrap();
    let staging = StagingRequest { persistent, ..StagingRequest::default() };
    let record = NodeRecord {
        request: ExchangedRequest { attempt: "1".into(), staging, array_index: None },
        scratch_mount: None,
        scratch: None,
        is_staged: false,
        requeues: 0,
        uid,
        committed: Vec::new(),
        is_over: false,
        node: "n1".into(),
        nodes: 1,
        begun: Some(Vec::new()),
        others_staged: false,
        known_fate: None,
        is_interrupted: false,
    };
    let node = JobNode::of(|_| None, "n1");
    let staged = StagedJob { job, node, exchange: None, records: records.to_owned(), record };
    staged.store().unwrap();
    staged
}

/// SEMANTICS 84: "A persistent directory belongs to one user and one node. It is there until a job of its user destroys
/// it, and is not destroyed while another job uses it."
///
/// The prolog of the other job may still copy when the first job ends.
#[test]
fn a_job_whose_prolog_has_not_ended_uses_its_persistent_directories() {
    let records = tempfile::tempdir().unwrap();
    let destroys = PersistentRequest { destroy: vec!["set".into(), "new".into()], ..PersistentRequest::default() };
    let ends = begun("1", 65534, destroys, records.path());
    let uses = PersistentRequest { uses: vec!["set".into()], ..PersistentRequest::default() };
    begun("2", 1, uses.clone(), records.path());
    assert_eq!(ends.other_user_of(&"set".to_owned()).unwrap(), None, "that of another user");
    begun("3", 65534, uses, records.path());
    let new = PersistentDir { name: "new".into(), bytes: 1, access: DirectoryAccess::Private };
    begun("4", 65534, PersistentRequest { create: vec![new], ..PersistentRequest::default() }, records.path());
    assert_eq!(ends.other_user_of(&"set".to_owned()).unwrap().as_deref(), Some("3"));
    assert_eq!(ends.other_user_of(&"new".to_owned()).unwrap().as_deref(), Some("4"));
    assert_eq!(ends.other_user_of(&"old".to_owned()).unwrap(), None);
    let told = ends.destroy_persistent(&[]);
    assert!(told.is_empty(), "a job that was not staged destroys nothing: {told:?}");
}

/// A mount at which nothing is served.
fn unserved() -> RegisteredMount {
    let config = serde_json::json!({
        "pool": "/no/pool", "mountpoint": "/no/mnt", "fast": [], "read_only": false, "immutable": false, "allow_other": false,
    });
    let config = serde_json::from_value(config).unwrap();
    let supervisor = Process::current();
    let state = MountState {
        version: "0".into(),
        config,
        supervisor,
        worker: None,
        phase: Phase::Serving,
        since_unix: 0,
        restarts: 0,
        last_exit: None,
        command: String::new(),
    };
    RegisteredMount { runtime: Runtime::at("/no/runtime".into()), state }
}

#[test]
fn a_job_waits_only_for_jobs_of_its_user_that_use_persistent_directories() {
    let records = tempfile::tempdir().unwrap();
    let uses = || PersistentRequest { uses: vec!["set".into()], ..PersistentRequest::default() };
    let opened = |id: &str, uid, persistent| {
        begun(id, uid, persistent, records.path()).open_persistent(&unserved(), &[]).map_err(|failure| failure.kind)
    };
    let of_another_job = persistent::UserExclusion::wait(records.path(), 65534).unwrap();
    assert_eq!(opened("1", 65534, PersistentRequest::default()), Ok(()), "it uses none");
    assert_eq!(opened("2", 1, uses()), Err(FailureKind::Missing), "it waits for no job of another user");
    let path = records.path().join("persistent-65534.lock");
    let lock = std::fs::File::open(&path).unwrap();
    let taken = || rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive);
    assert_eq!(taken(), Err(rustix::io::Errno::WOULDBLOCK));
    drop(of_another_job);
    assert_eq!(opened("3", 65534, uses()), Err(FailureKind::Missing));
    assert_eq!(taken(), Ok(()));
    assert!(!path.exists(), "nothing is left of it");
}
