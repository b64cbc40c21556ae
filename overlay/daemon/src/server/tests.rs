use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream as Client;
use std::path::PathBuf;

use forebay_api::jobs::ObserverKind;
use forebay_backends::memory::MemoryPool;
use forebay_engine::Options;
use forebay_policy::Policy;

use super::*;
use crate::client;
use crate::registry::{MountState, Phase, Process, RegisteredMount, Runtime};

struct Daemon {
    temp: tempfile::TempDir,
    entry: RegisteredMount,
    jobs: Jobs,
    _server: Server,
}

fn entry(dir: PathBuf) -> RegisteredMount {
    let config = serde_json::from_value(serde_json::json!({
        "pool": "/p", "mountpoint": "/m", "fast": ["/f"], "read_only": false, "immutable": false, "allow_other": false
    }));
    let state = MountState {
        version: "1".into(),
        config: config.unwrap(),
        supervisor: Process::current(),
        worker: None,
        phase: Phase::Serving,
        since_unix: 0,
        restarts: 0,
        last_exit: None,
        command: "forebay mount".into(),
    };
    RegisteredMount { runtime: Runtime::at(dir), state }
}

async fn daemon() -> Daemon {
    let temp = tempfile::tempdir().unwrap();
    let options = Options {
        pool: Arc::new(MemoryPool::new()),
        fast: vec![temp.path().join("fast")],
        limit_bytes: Some(64 << 20),
        policy: Policy::default(),
        memory_bytes: 16 << 20,
        content_io: Default::default(),
        read_only: false,
        reattached: false,
        other_root: Default::default(),
        for_tests: Default::default(),
        node: "test".into(),
    };
    let overlay = Overlay::open(options).await.unwrap();
    let jobs = Jobs::start(overlay.clone());
    let entry = entry(temp.path().to_path_buf());
    let runtime = entry.runtime.clone();
    let facts = Facts {
        mountpoint: "/m".into(),
        no_passthrough: Box::new(|| None),
        runtime,
        pool: "/p".into(),
        pool_calls: Arc::new(Metrics::new(Arc::new(MemoryPool::new()))),
        peers: Arc::default(),
    };
    let server = Server::start(&entry.runtime.socket(), overlay, jobs.clone(), Arc::new(facts)).unwrap();
    Daemon { temp, entry, jobs, _server: server }
}

async fn call(daemon: &Daemon, request: Request) -> Vec<Result<Reply, Failure>> {
    let entry = daemon.entry.clone();
    tokio::task::spawn_blocking(move || client::call(&entry, &request).unwrap().collect()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn status_is_completed_by_what_the_front_end_knows() {
    let daemon = daemon().await;
    let replies = call(&daemon, Request::Status).await;
    let [Ok(Reply::Status(status))] = &replies[..] else { panic!("{replies:?}") };
    assert_eq!((status.mountpoint.as_deref(), status.passthrough), (Some("/m"), true));
    daemon.jobs.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_socket_is_for_its_user_alone() {
    let daemon = daemon().await;
    let mode = std::fs::metadata(daemon.entry.runtime.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(daemon.temp.path().exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn nonsense_is_answered_by_an_error_that_says_so() {
    let daemon = daemon().await;
    let socket = daemon.entry.runtime.socket();
    let line = tokio::task::spawn_blocking(move || {
        let mut stream = Client::connect(socket).unwrap();
        stream.write_all(b"{\"op\":\"dance\"}\n").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        line
    });
    let Reply::Error(failure) = serde_json::from_str(&line.await.unwrap()).unwrap() else { panic!("no error") };
    assert_eq!(failure.kind, FailureKind::Usage);
    let newer = replies(daemon.entry.runtime.socket(), b"{\"api\":9,\"program\":\"9.8\",\"op\":\"status\"}\n");
    let newer = newer.await.unwrap();
    let [Reply::Error(failure)] = &newer[..] else { panic!("{newer:?}") };
    assert!(failure.what.contains("forebay 9.8") && failure.what.contains("version 9"), "{failure}");
    let replies = call(&daemon, Request::Ls { path: "a/../b".into(), recursive: false }).await;
    assert!(matches!(&replies[..], [Err(f)] if f.kind == FailureKind::Usage), "{replies:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_disconnects_does_not_stop_other_clients() {
    let daemon = daemon().await;
    for _ in 0..2 * limits::CLIENTS {
        let mut client = Client::connect(daemon.entry.runtime.socket()).unwrap();
        client.write_all(LS).unwrap();
    }
    // This request waits for a turn, as the earlier ones did.
    let told = replies(daemon.entry.runtime.socket(), LS).await.unwrap();
    assert!(matches!(told.as_slice(), [.., Reply::End]), "{told:?}");
}

#[tokio::test]
async fn a_dead_daemon_is_named_with_the_command_that_brings_it_back() {
    let temp = tempfile::tempdir().unwrap();
    let mut entry = entry(temp.path().to_path_buf());
    entry.state.supervisor.start_ticks += 1;
    let failure = client::call(&entry, &Request::Status).unwrap_err();
    assert_eq!(failure.kind, FailureKind::NoDaemon);
    assert!(failure.to_string().contains("forebay mount"), "{failure}");
}

/// After this time a request counts as never answered.
const ANSWERED_WITHIN: Duration = Duration::from_secs(120);
/// A request that waits for a turn.
const LS: &[u8] = b"{\"op\":\"ls\",\"path\":\"\",\"recursive\":false}\n";

/// Returns all replies to a request, heartbeats included.
fn replies(socket: PathBuf, request: &'static [u8]) -> tokio::task::JoinHandle<Vec<Reply>> {
    tokio::task::spawn_blocking(move || {
        let mut client = Client::connect(socket).unwrap();
        client.set_read_timeout(Some(limits::SILENCE)).unwrap();
        client.write_all(request).unwrap();
        let began = Instant::now();
        let lines = BufReader::new(client).lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap());
        // Heartbeats would go on for ever.
        lines.take_while(|_| began.elapsed() < ANSWERED_WITHIN).collect()
    })
}

/// Clients get heartbeats although the engine is busy, or stuck in a fast pool that does not answer. That also holds
/// for more clients than have a turn. `status` waits for none of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_client_gets_signs_of_life_while_the_engine_is_stuck() {
    let daemon = daemon().await;
    let socket = daemon.entry.runtime.socket();
    tokio::spawn(async { std::thread::sleep(2 * limits::HEARTBEAT) });
    let waiting: Vec<_> = (0..=limits::CLIENTS).map(|_| replies(socket.clone(), LS)).collect();
    let status = replies(socket, b"{\"op\":\"status\"}\n").await.unwrap();
    assert!(matches!(status.as_slice(), [Reply::Status(_), Reply::End]), "{status:?}");
    for told in waiting {
        let told = told.await.unwrap();
        assert!(matches!(told.as_slice(), [Reply::Alive, .., Reply::End]), "{told:?}");
    }
}

/// Returns the job in the reply to a request about one.
async fn job(daemon: &Daemon, request: Request) -> Result<forebay_jobs::JobSummary, Failure> {
    match call(daemon, request).await.swap_remove(0)? {
        Reply::Jobs(mut jobs) => Ok(jobs.swap_remove(0)),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_lasts_until_each_begin_has_its_end_and_is_kept() {
    use forebay_jobs::{JobRequest, Members};
    let daemon = daemon().await;
    let request = |id: &str, members| {
        let (id, command) = (id.into(), "sh".into());
        Request::BeginJob(JobRequest { id, command, invocation: None, prefetch: false, ends_leases: true, members })
    };
    let begin = |members| request("train", members);
    let end = || Request::EndJob { id: "train".into(), goes_on: false };
    let begun = job(&daemon, begin(Members::Caller)).await.unwrap();
    // Other tests may have child processes.
    assert_eq!(begun.processes[0], Process::current(), "the caller, as the socket reports it");
    assert_eq!((begun.observer, begun.missing.len()), (ObserverKind::Requests, 1));
    job(&daemon, begin(Members::Caller)).await.unwrap();
    // A thread of this process opens a file.
    let asked = daemon.jobs.clone();
    let noted = std::thread::spawn(move || {
        let thread = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
        let opened = forebay_engine::Opened {
            resident: None,
            pages: Default::default(),
            no_flush: true,
            missed: false,
            fetched_bytes: 0,
        };
        asked.note_open(asked.job_of(thread), forebay_engine::Ino(7), &opened);
        asked.note_read(asked.job_of(thread), forebay_engine::Ino(7), 0..10, true);
    });
    noted.join().unwrap();
    assert_eq!(job(&daemon, end()).await.unwrap().ended_unix, None, "another has begun it too");
    let ended = job(&daemon, end()).await.unwrap();
    assert!(ended.ended_unix.is_some() && ended.id == "train");
    assert_eq!((ended.file_count, ended.traffic.opens, ended.traffic.read_bytes), (1, 1, 10));
    assert_eq!(daemon.jobs.job_of(std::process::id()), None);
    let shown = call(&daemon, Request::Job { id: "train".into() }).await;
    let [Ok(Reply::Jobs(jobs)), Ok(Reply::JobFiles(files))] = &shown[..] else { panic!("{shown:?}") };
    assert_eq!((jobs, files.len(), files[0].first_use_rank), (&vec![ended], 1, 1));
    for request in [end(), Request::Job { id: "no".into() }, begin(Members::Processes(vec![u32::MAX]))] {
        assert_eq!(job(&daemon, request).await.unwrap_err().kind, FailureKind::Usage);
    }
    assert_eq!(call(&daemon, Request::Jobs).await.len(), 1);
    let refused = request("a b", Members::Caller);
    assert_eq!(job(&daemon, refused).await.unwrap_err().kind, FailureKind::Usage);
}
