//! The process that does the work of a mount: engine, FUSE server and control socket, on a descriptor that its supervisor
//! holds.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use forebay_backends::decorators::{CallLimits, Deadline, Metrics, Throttle};
use forebay_backends::dir::MAX_BLOCKING_CALLS;
use forebay_backends::{AttachTimes, OpenedPool, Pool, PoolDescription, PoolLocation};
use forebay_engine::{Options, OtherRoot, Overlay};
use forebay_fuse::{self as fuse, Attach, Handshake, MountOptions, Mounted, PassthroughState};
use forebay_jobs::{Collector, Jobs, WatchOptions};
use forebay_policy::Policy;
use forebay_system::descriptors;
use futures::FutureExt;

use super::config::MountConfig;
use super::metrics::{self, MetricsServer, MountParts};
use super::peers::PeersOfMount;
use super::policy_files::AppliedPolicy;
use super::registry::{MountState, Runtime};
use super::server::{self, Facts, Server};
use super::supervisor::{Ready, Signals, StartOutcome, stop};
use super::{Failure, FailureKind, capabilities, doctor, limits, mounts, offline, peers, policy_files};

/// Threads for blocking calls. A pool that hangs can hold [`MAX_BLOCKING_CALLS`] of them; the rest are for the engine.
const BLOCKING_THREADS: usize = MAX_BLOCKING_CALLS + 64;
/// The engine's threads: more than these only wait for each other.
const ENGINE_THREADS: usize = 4;

/// Serves the mount of a runtime directory until it is unmounted. Writes its outcome to standard output. `confined` is
/// called once this thread has given up what it does not need; threads that it starts later have no more than it has.
pub fn run(dir: &Path, confined: fn()) -> Result<(), Failure> {
    let outcome = start(dir, confined);
    if let Err(failure) = &outcome {
        tracing::error!("{failure}");
        StartOutcome::Failed(failure.clone()).tell();
    }
    outcome
}

fn start(dir: &Path, confined: fn()) -> Result<(), Failure> {
    fuse::end_on_panic();
    let failed = |e: io::Error| Failure::io("cannot start the worker", &e);
    let runtime = Runtime::at(dir.to_path_buf());
    let state = runtime.load().map_err(|e| Failure::io(format!("no mount is described in {}", dir.display()), &e))?;
    // A file that is created in the pool has no permissions for group and others until the daemon sets its mode by its
    // descriptor. All other files are the daemon's own.
    rustix::process::umask(rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
    raise_descriptor_limit();
    let device = io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
    // Before there is any other thread.
    let collector = Collector::start().map_err(failed)?;
    capabilities::give_up();
    confined();
    let rt = tokio_runtime()?;
    let outcome = rt.block_on(serve(&runtime, &state, device, collector).boxed_local());
    rt.shutdown_background();
    outcome
}

/// Returns the engine's runtime.
pub(super) fn tokio_runtime() -> Result<tokio::runtime::Runtime, Failure> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(cores.min(ENGINE_THREADS))
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_name("forebay")
        .enable_all()
        .build()
        .map_err(|e| Failure::io("cannot start threads", &e))
}

async fn serve(runtime: &Runtime, state: &MountState, device: OwnedFd, collector: Collector) -> Result<(), Failure> {
    let config = &state.config;
    let attach = attach(runtime)?;
    // Before the mount serves: without the address that was asked for, there is no mount.
    let metrics =
        config.metrics.filter(|_| attach == Attach::Fresh).map(|address| metrics::ADDRESS.bind(address)).transpose()?;
    let is_fresh = attach == Attach::Fresh;
    let settings = if is_fresh { peers::settings(config)? } else { None };
    let peer_socket = settings.as_ref().map(|settings| peers::ADDRESS.bind(settings.listen)).transpose()?;
    let engine = open(config, policy_in_force(runtime, config, is_fresh)?, !is_fresh, OtherRoot::Refuse).await?;
    let Engine { overlay, pool, not_attached } = engine;
    let peers = match is_fresh {
        true => PeersOfMount::from(peers::start(config, settings, peer_socket, &overlay)?),
        // The mount was taken over: programs must not wait for its peers file.
        false => peers::start_again(config, &overlay),
    };
    let options = MountOptions { state_dir: Some(runtime.dir().to_path_buf()), ..mount_options(config) };
    let jobs = Jobs::start(overlay.clone());
    let (served, noted) = (overlay.clone(), jobs.clone());
    let serve = move || {
        noted.go_on();
        fuse::serve(served, noted, device, options, attach)
    };
    let mounted = tokio::task::spawn_blocking(serve)
        .await
        .map_err(|e| Failure::new(FailureKind::Other, format!("the FUSE server panicked: {e}")))??;
    let mounted = Arc::new(mounted);
    overlay.tell_kernel_of_last_daemon().await;
    jobs.observe(collector, observe(config)?, config.immutable);
    let kernel = mounted.clone();
    let no_passthrough = move || match kernel.passthrough_state() {
        PassthroughState::On => None,
        PassthroughState::Off(why) => Some(why),
    };
    let facts = Arc::new(Facts {
        mountpoint: config.mountpoint.display().to_string(),
        no_passthrough: Box::new(no_passthrough.clone()),
        runtime: runtime.clone(),
        pool: config.pool.clone(),
        pool_calls: pool,
        peers: peers.known.clone(),
    });
    let socket = runtime.socket();
    let clients = Server::start(&socket, overlay.clone(), jobs.clone(), facts.clone())
        .map_err(|e| Failure::io(format!("cannot listen on {}", socket.display()), &e))?;
    let parts = MountParts {
        overlay: overlay.clone(),
        jobs: jobs.clone(),
        requests: mounted.latencies(),
        responses: None,
        facts,
    };
    let numbers = config.metrics.map(|address| MetricsServer::start(address, metrics, parts)).transpose();
    let numbers = numbers.map_err(|e| Failure::io("cannot serve the metrics address", &e))?;
    let no_passthrough = no_passthrough();
    let ready = Ready {
        mountpoint: config.mountpoint.clone(),
        pid: std::process::id(),
        passthrough: no_passthrough.is_none(),
        no_passthrough,
        dirty_files: overlay.status().await.dirty_files,
        few_descriptors: descriptors::cost(overlay.policy().shares.open_files),
        not_attached,
    };
    if let Some(cost) = &ready.few_descriptors {
        tracing::warn!("{cost}");
    }
    offline::remember(config);
    tracing::info!("{} serves {}", config.mountpoint.display(), config.pool);
    StartOutcome::Ready(ready).tell();
    until_unmounted(config, mounted).await?;
    drop((clients, numbers));
    peers.leave().await;
    finish(runtime, state, &overlay, &jobs).await
}

/// Waits until the mount is gone. A signal meanwhile starts an unmount.
async fn until_unmounted(config: &MountConfig, mounted: Arc<Mounted>) -> Result<(), Failure> {
    let mut signals = Signals::new().map_err(|e| Failure::io("cannot receive signals", &e))?;
    let mut end = tokio::task::spawn_blocking(move || mounted.wait());
    let mut asked = 0;
    loop {
        tokio::select! {
            ended = &mut end => {
                return ended
                    .map_err(|e| Failure::new(FailureKind::Other, format!("the FUSE server panicked: {e}")))?
                    .map_err(Failure::from);
            }
            () = signals.stop() => {
                asked += 1;
                let mountpoint = config.mountpoint.clone();
                tokio::task::spawn_blocking(move || stop(&mountpoint, asked > 1));
            }
        }
    }
}

async fn finish(runtime: &Runtime, state: &MountState, overlay: &Overlay, jobs: &Jobs) -> Result<(), Failure> {
    let status = overlay.status().await;
    if status.dirty_files > 0 {
        tracing::warn!(
            "{} files ({} bytes) are not in the pool yet; they are safe in {}",
            status.dirty_files,
            status.dirty_bytes,
            state.config.fast.iter().map(|f| f.display().to_string()).collect::<Vec<_>>().join(", ")
        );
    }
    let closed = jobs.shutdown().await.map_err(Failure::from);
    runtime.remove_if_over(state);
    closed
}

/// The engine of a mount.
pub(super) struct Engine {
    pub overlay: Overlay,
    /// The counters of its calls to the pool.
    pub pool: Arc<Metrics>,
    /// Why the pool is not attached yet.
    pub not_attached: Option<String>,
}

/// Opens the engine of a mount. `reattached`: it takes over the mount of a worker that died, with its open files.
/// `other_root`: what to do if the pool answers and has another root than before.
pub(super) async fn open(
    config: &MountConfig,
    policy: Policy,
    reattached: bool,
    other_root: OtherRoot,
) -> Result<Engine, Failure> {
    let within = if reattached { limits::POOL_ANSWER_REATTACHED } else { limits::POOL_ANSWER };
    let times = AttachTimes { within, deadline: policy.pool_deadline, retry: policy.pool_retry };
    let OpenedPool { pool, not_attached } = attach_pool(config, times).await?;
    if let (OtherRoot::Accept, Some(why)) = (other_root, &not_attached) {
        let what = format!("the pool's root cannot be accepted, because the pool is not attached: {why}");
        return Err(Failure::new(FailureKind::PoolUnavailable, what));
    }
    let (pool, counted) = watched(pool, config, &policy);
    // If the pool is read-only, the mount is, too.
    let read_only = config.read_only || pool.capabilities().read_only;
    let options = Options {
        pool,
        fast: config.fast.clone(),
        limit_bytes: config.limit_bytes,
        policy,
        memory_bytes: config.memory_bytes.unwrap_or(forebay_engine::DEFAULT_MEMORY_BYTES),
        content_io: Default::default(),
        read_only,
        other_root: if not_attached.is_some() { OtherRoot::CompareLater } else { other_root },
        reattached,
        for_tests: Default::default(),
        node: rustix::system::uname().nodename().to_string_lossy().into_owned(),
    };
    Ok(Engine { overlay: Overlay::open(options).await?, pool: counted, not_attached })
}

/// Returns the policy in force: that of the mount, or the one that was applied since. The tiers are those of the mount.
/// If the applied one cannot be used, programs would wait for ever: that of the mount is in force, and the log says so. If
/// the mount was taken over and its own policy cannot be used, either, nothing is sent without a request.
fn policy_in_force(runtime: &Runtime, config: &MountConfig, is_fresh: bool) -> Result<Policy, Failure> {
    let mounted = match policy(config) {
        Err(e) if is_fresh => return Err(e),
        mounted => mounted,
    };
    let file = runtime.dir().join(server::policy::APPLIED);
    let applied = match std::fs::read(&file) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        read => Some(read.and_then(|text| serde_json::from_slice(&text).map_err(io::Error::other))),
    };
    let applied = applied.map(|read| match read {
        Ok(AppliedPolicy { files, accounts }) => {
            policy_files::compile_stored(&files, &config.pool, &accounts).map_err(|failure| failure.to_string())
        }
        Err(e) => Err(e.to_string()),
    });
    if let Some(Err(why)) = &applied {
        let place = file.display();
        tracing::error!("the policy that was applied, {place}, cannot be used: that of the mount is in force: {why}");
    }
    match (applied, mounted) {
        (Some(Ok(applied)), Ok(mounted)) => Ok(applied.with_tiers_of(&mounted)),
        (Some(Ok(applied)), Err(_)) => Ok(applied),
        (_, Ok(mounted)) => Ok(mounted),
        (_, Err(failure)) => {
            tracing::error!("the policy of the mount cannot be used: nothing is sent without a request: {failure}");
            Ok(Policy::default().that_flushes_by_request())
        }
    }
}

/// Returns what the observer watches for a mount.
fn observe(config: &MountConfig) -> Result<WatchOptions, Failure> {
    let pool = match PoolLocation::parse(&config.pool)? {
        PoolLocation::Directory(dir) | PoolLocation::Striped(_, dir) => Some(dir),
        _ => None,
    };
    Ok(WatchOptions { mountpoint: config.mountpoint.clone(), pool, masked: config.mask_hooks.clone() })
}

/// Returns the policy of a mount, which was checked when the mount was made.
pub fn policy(config: &MountConfig) -> Result<Policy, Failure> {
    match &config.policy {
        Some(files) => policy_files::compile_stored(files, &config.pool, &config.accounts),
        None if config.immutable => Ok(Policy::immutable()),
        None => Ok(Policy::default()),
    }
}

/// Attaches the pool of a mount. If the fast pool is of an earlier mount and the pool's server does not answer in time,
/// the pool is attached later. A pool that is a directory must be there.
async fn attach_pool(config: &MountConfig, times: AttachTimes) -> Result<OpenedPool, Failure> {
    let location = PoolLocation::parse(&config.pool)?;
    let known = offline::recall_pool(config).filter(|_| location.directory().is_none());
    let opened = match known.clone() {
        Some(known) => location.open_now_or_later(known, times).await?,
        None => OpenedPool { pool: location.open(times.deadline).await?, not_attached: None },
    };
    let found = PoolDescription::of(&*opened.pool);
    if location.directory().is_none() && known.as_ref() != Some(&found) {
        offline::remember_pool(config, found);
    }
    Ok(opened)
}

/// Wraps a pool: its calls are counted, and have time limits.
fn watched(mut pool: Arc<dyn Pool>, config: &MountConfig, policy: &Policy) -> (Arc<dyn Pool>, Arc<Metrics>) {
    if let Some(pace) = config.throttle {
        pool = Arc::new(Throttle::new(pool, Some(pace.bytes_per_sec), pace.latency));
    }
    let copies = if pool.capabilities().renames.copy() { limits::POOL_COPY } else { policy.pool_deadline };
    let counted = Arc::new(Metrics::new(pool));
    let deadlines = CallLimits {
        metadata: policy.pool_deadline,
        data: limits::POOL_CALL,
        copies,
        min_bytes_per_second: limits::POOL_BYTES_PER_SECOND,
    };
    (Arc::new(Deadline::new(counted.clone(), deadlines)), counted)
}

/// Returns the FUSE server's options of a mount.
pub fn mount_options(config: &MountConfig) -> MountOptions {
    let options = MountOptions::new(&config.mountpoint);
    MountOptions {
        allow_other: options.allow_other || config.allow_other,
        read_only: config.read_only,
        flags: mounts::flags(&config.kernel_options),
        immutable: config.immutable,
        threads: config.threads.unwrap_or(0),
        fs_name: config.pool.clone(),
        stacked_backing: config.fast.iter().any(|dir| doctor::fs_type(dir) == Some("overlay")),
        ..options
    }
}

/// Returns how to attach to the kernel: from its INIT request on, or where an earlier worker left the connection.
fn attach(runtime: &Runtime) -> Result<Attach, Failure> {
    match Handshake::load(runtime.dir()) {
        Ok(handshake) => Ok(Attach::Again(handshake)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Attach::Fresh),
        Err(e) => Err(Failure::io(format!("files of the last worker in {}", runtime.dir().display()), &e)),
    }
}

/// Raises the limit of open files as far as the administrator allows: every open resident file holds a descriptor.
pub(super) fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!("the limit of open files could not be raised from {:?}: {error}", limit.current);
    }
}

#[cfg(test)]
mod tests {
    use forebay_policy::{FlushPolicy, PolicyFiles};

    use super::*;

    #[test]
    fn a_policy_that_cannot_be_used_any_more_does_not_end_a_mount_that_was_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path().to_path_buf());
        let config = |policy: &str| -> MountConfig {
            serde_json::from_value(serde_json::json!({
                "pool": "/p", "mountpoint": "/m", "fast": ["/f"], "read_only": false, "immutable": false,
                "allow_other": false, "policy": PolicyFiles::from(policy)
            }))
            .unwrap()
        };
        let good = config("[default]\nflush = \"idle:1h\"\n");
        let bad = config("[default]\nno-such-setting = 1\n");
        let apply = |text: &str| {
            let applied = AppliedPolicy { files: text.into(), accounts: Default::default() };
            std::fs::write(dir.path().join(server::policy::APPLIED), serde_json::to_vec(&applied).unwrap()).unwrap();
        };
        let flush = |config| policy_in_force(&runtime, config, false).unwrap().uniform().map(|policy| policy.flush());
        let hour = FlushPolicy::Idle(std::time::Duration::from_secs(3600));
        assert_eq!(flush(&good), Some(hour));
        assert_eq!(flush(&bad), Some(FlushPolicy::Manual));
        assert!(policy_in_force(&runtime, &bad, true).is_err(), "a new mount is refused");
        apply("[default]\nflush = \"on-close\"\n");
        assert_eq!((flush(&good), flush(&bad)), (Some(FlushPolicy::OnClose), Some(FlushPolicy::OnClose)));
        apply("[default]\nflush = \"at some time\"\n");
        assert_eq!((flush(&good), flush(&bad)), (Some(hour), Some(FlushPolicy::Manual)));
    }
}
