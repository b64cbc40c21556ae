//! The server side of the local API.

pub mod policy;
mod scratch;
mod views;

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use forebay_api::allocations::AllocationVerb;
use forebay_api::jobs::Members;
use forebay_api::operator::{Progress, Status};
use forebay_backends::decorators::Metrics;
use forebay_backends::{Error, ErrorKind, PoolPath};
use forebay_engine::Overlay;
use forebay_jobs::Jobs;
use forebay_peers::Peers;
use forebay_prefetch::signature::Invocation;
use forebay_system::process::Process;
use futures::{FutureExt, Stream, StreamExt};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::UCred;
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, oneshot};
use tokio_util::task::AbortOnDropHandle;

use super::protocol::{Reply, Request};
use super::registry::Runtime;
use super::{Failure, FailureKind, limits};

/// Facts about the mount that the engine does not know.
pub struct Facts {
    pub mountpoint: String,
    /// Why the kernel does not read resident files without the daemon; this may change. `None`: it reads them by
    /// itself.
    pub no_passthrough: Box<dyn Fn() -> Option<String> + Send + Sync>,
    pub runtime: Runtime,
    /// The pool, as the mount was asked for it.
    pub pool: String,
    pub pool_calls: Arc<Metrics>,
    /// The other nodes of its cluster, once they are known.
    pub peers: Arc<OnceLock<Arc<Peers>>>,
}

/// Answers clients until it is dropped.
///
/// The server has a thread of its own, so that clients get heartbeats even if the engine is busy, or stuck in a fast
/// pool that does not answer.
pub struct Server(#[expect(dead_code, reason = "its drop tells the thread to end")] oneshot::Sender<()>);

impl Server {
    /// Binds the socket for this user alone, and replaces a socket that a dead worker left. The engine's work runs on
    /// the tokio runtime of the caller.
    pub fn start(socket: &Path, overlay: Overlay, jobs: Jobs, facts: Arc<Facts>) -> io::Result<Self> {
        match std::fs::remove_file(socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = std::os::unix::net::UnixListener::bind(socket)?;
        std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        let turns = Semaphore::new(limits::CLIENTS);
        let context = Arc::new(ServerContext { overlay, jobs, facts, engine: Handle::current(), turns });
        // Work that reads everything runs on one blocking thread of this runtime, one at a time.
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).enable_all().build()?;
        let listener = {
            let _entered = runtime.enter();
            UnixListener::from_std(listener)?
        };
        let (stop, stopped) = oneshot::channel();
        std::thread::Builder::new().name("forebay-control".into()).spawn(move || {
            let task = async {
                tokio::select! {
                    () = serve(listener, context) => {}
                    _ = stopped => {}
                }
            };
            runtime.block_on(task.boxed_local());
        })?;
        Ok(Self(stop))
    }
}

struct ServerContext {
    overlay: Overlay,
    jobs: Jobs,
    facts: Arc<Facts>,
    engine: Handle,
    turns: Semaphore,
}

async fn serve(listener: UnixListener, context: Arc<ServerContext>) {
    let slots = Arc::new(Semaphore::new(limits::CONNECTIONS));
    loop {
        let Ok(slot) = slots.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let context = context.clone();
                let task = async move {
                    if let Err(error) = answer(stream, &context).await {
                        tracing::debug!("a client left: {error}");
                    }
                    drop(slot);
                };
                tokio::spawn(task.boxed());
            }
            Err(error) => {
                // Probably out of descriptors: by the next attempt, some may have been closed.
                tracing::warn!("cannot accept a client: {error}");
                tokio::time::sleep(limits::HEARTBEAT).await;
            }
        }
    }
}

async fn answer(stream: UnixStream, context: &ServerContext) -> io::Result<()> {
    let client = stream.peer_cred()?;
    let (read, write) = stream.into_split();
    let mut out = ReplyWriter(write);
    let mut line = Vec::new();
    let mut limited = BufReader::new(read).take(limits::REQUEST_BYTES);
    tokio::time::timeout(limits::REQUEST, limited.read_until(b'\n', &mut line)).await??;
    let outcome = match Request::from_line(&line) {
        Ok(request) => carry_out(request, &client, context, &mut out).await,
        Err(failure) => Err(Gone::Failed(failure)),
    };
    match outcome {
        Ok(()) => out.send(&Reply::End).await,
        Err(Gone::Failed(failure)) => out.send(&Reply::Error(failure)).await,
        Err(Gone::Client(error)) => Err(error),
    }
}

/// Why an answer ended early.
enum Gone {
    Client(io::Error),
    Failed(Failure),
}

impl From<io::Error> for Gone {
    fn from(error: io::Error) -> Self {
        Self::Client(error)
    }
}

impl From<Failure> for Gone {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

async fn carry_out(
    request: Request,
    client: &UCred,
    context: &ServerContext,
    out: &mut ReplyWriter,
) -> Result<(), Gone> {
    let ServerContext { overlay, jobs, facts, engine, turns } = context;
    let _turn = match request {
        // A verb may wait for a pool, and must be answered before the time of a prolog is up.
        Request::Status | Request::Allocation { .. } => None,
        _ => Some(out.alive_until(pin!(turns.acquire())).await?),
    };
    match request {
        Request::Status => {
            let status = out.alive_while(pin!(overlay.status()), || overlay.scanned()).await?;
            let status = status.ok_or_else(|| stuck(&facts.mountpoint))?;
            out.send(&Reply::Status(Box::new(complete(status, facts)))).await?;
        }
        Request::Overview => {
            let overview = out.alive_while(pin!(overlay.overview()), || overlay.scanned()).await?;
            let mut overview = overview.ok_or_else(|| stuck(&facts.mountpoint))?.map_err(Failure::from)?;
            overview.status = complete(overview.status, facts);
            out.send(&Reply::Overview(Box::new(overview))).await?;
        }
        Request::Stage(mut request) => {
            request.invocation = request.invocation.map(|invocation| by(client, invocation));
            match request.cluster {
                None => out.forward(in_engine(engine, || overlay.stage(request))).await?,
                Some(share) => {
                    let peers = peers_of(facts)?;
                    out.forward(in_engine(engine, || peers.stage(share, request, overlay))?).await?;
                }
            }
        }
        Request::Flush(request) => out.forward(in_engine(engine, || overlay.flush(request))).await?,
        Request::Evict(request) => out.forward(in_engine(engine, || overlay.evict(request))).await?,
        Request::Release(request) => out.forward(in_engine(engine, || overlay.release_leases(request))).await?,
        Request::Dirty => {
            let files = out.alive_until(pin!(overlay.dirty())).await?.map_err(Failure::from)?;
            for part in files.chunks(limits::ENTRIES_PER_REPLY) {
                out.send(&Reply::Dirty(part.to_vec())).await?;
            }
        }
        Request::Resolve { path } => {
            let (asked, path) = (overlay.clone(), parse(&path)?);
            let resolved = out.waiting_for(engine, async move { asked.follow_links(&path).await }).await?;
            out.send(&Reply::Resolved(resolved.map_err(Failure::from)?)).await?;
        }
        Request::Ls { path, recursive } => {
            let (asked, path) = (overlay.clone(), parse(&path)?);
            let listed = async move { asked.list_residency(&path, recursive).await };
            let listed = out.waiting_for(engine, listed).await?.map_err(Failure::from)?;
            for part in listed.chunks(limits::ENTRIES_PER_REPLY) {
                out.send(&Reply::Listed(part.to_vec())).await?;
            }
        }
        Request::Fsck { repair } => {
            let asked = overlay.clone();
            let report = out.waiting_for(engine, async move { asked.fsck(repair).await }).await?;
            out.send(&Reply::Fsck(report.map_err(Failure::from)?)).await?;
        }
        Request::BeginJob(mut request) => {
            request.invocation = request.invocation.map(|invocation| by(client, invocation));
            let (asked, owner, uid) = (jobs.clone(), owner(client)?, client.uid());
            let begun = out.waiting_for(engine, async move { asked.begin_job(request, owner, uid).await }).await?;
            out.send(&Reply::Jobs(vec![begun.map_err(refused)?])).await?;
        }
        Request::EndJob { id, goes_on } => {
            let (asked, owner, wanted) = (jobs.clone(), owner(client)?, id.clone());
            let ended = out.waiting_for(engine, async move { asked.end_job(wanted, owner, goes_on).await }).await?;
            let ended = ended.map_err(Failure::from)?.ok_or_else(|| unknown_job(&id))?;
            out.send(&Reply::Jobs(vec![ended])).await?;
        }
        Request::Jobs => {
            let asked = jobs.clone();
            let all = out.waiting_for(engine, async move { asked.jobs().await }).await?.map_err(Failure::from)?;
            for part in all.chunks(limits::ENTRIES_PER_REPLY) {
                out.send(&Reply::Jobs(part.to_vec())).await?;
            }
        }
        Request::Job { id } => {
            let (asked, wanted) = (jobs.clone(), id.clone());
            let job = out.waiting_for(engine, async move { asked.job(wanted).await }).await?.map_err(Failure::from)?;
            let (summary, files) = job.ok_or_else(|| unknown_job(&id))?;
            out.send(&Reply::Jobs(vec![summary])).await?;
            for part in files.chunks(limits::ENTRIES_PER_REPLY) {
                out.send(&Reply::JobFiles(part.to_vec())).await?;
            }
        }
        Request::Allocation { id, verb } => {
            let (asked, (verb, uid)) = (jobs.clone(), on_behalf_of(client, verb)?);
            let known = out.waiting_for(engine, async move { asked.allocation(id, verb, uid).await }).await?;
            out.send(&Reply::Allocations(known.map_err(refused)?.into_iter().collect())).await?;
        }
        Request::Allocations => {
            let asked = jobs.clone();
            let all = out.waiting_for(engine, async move { asked.allocations().await }).await?;
            for part in all.map_err(Failure::from)?.chunks(limits::ENTRIES_PER_REPLY) {
                out.send(&Reply::Allocations(part.to_vec())).await?;
            }
        }
        Request::Scratch(verb) => {
            let (asked, client) = (overlay.clone(), *client);
            let done = out.waiting_for(engine, async move { scratch::carry_out(&asked, verb, client).await }).await?;
            out.send(&done.map_err(refused)?).await?;
        }
        Request::Policy(verb) => {
            let (asked, pool, runtime) = (overlay.clone(), facts.pool.clone(), facts.runtime.clone());
            let done = async move { policy::carry_out(&asked, verb, &pool, &runtime).await };
            let done = out.waiting_for(engine, done).await?;
            out.send(&done?).await?;
        }
        Request::Quota(verb) => {
            let asked = overlay.clone();
            let report = out.waiting_for(engine, async move { asked.quotas(verb).await }).await?;
            out.send(&Reply::Quotas(Box::new(report.map_err(Failure::from)?))).await?;
        }
        Request::View(verb) => {
            let (asked, client) = (overlay.clone(), owner(client).ok());
            let done = out.waiting_for(engine, async move { views::carry_out(&asked, verb, client).await }).await?;
            out.send(&done.map_err(refused)?).await?;
        }
        Request::Peers => {
            out.send(&Reply::Peers(Box::new(peers_of(facts)?.status()))).await?;
        }
        Request::PoolCalls => out.send(&Reply::PoolCalls(Box::new(facts.pool_calls.snapshot()))).await?,
        Request::Sample { interval_ms } => {
            let (asked, interval) = (jobs.clone(), Duration::from_millis(interval_ms.min(limits::INTERVAL_MS)));
            let sample = out.waiting_for(engine, async move { asked.sample_jobs(interval).await }).await?;
            out.send(&Reply::Sample(sample.map_err(Failure::from)?)).await?;
        }
        Request::Explain { path } => {
            let (asked, path) = (jobs.clone(), parse(&path)?);
            let explained = out.waiting_for(engine, async move { asked.explain(&path).await }).await?;
            out.send(&Reply::Explanation(Box::new(explained.map_err(Failure::from)?))).await?;
        }
        Request::Profiles => {
            let asked = jobs.clone();
            let profiles = out.waiting_for(engine, async move { asked.profiles().await }).await?;
            for part in profiles.map_err(Failure::from)?.chunks(limits::ENTRIES_PER_REPLY) {
                out.send(&Reply::Profiles(part.to_vec())).await?;
            }
        }
        Request::Profile { profile } => {
            let asked = jobs.clone();
            let found = out.waiting_for(engine, async move { asked.profile(profile).await }).await?;
            let (summary, document) = found.map_err(unknown_profile)?;
            out.send(&Reply::Profiles(vec![summary])).await?;
            out.send(&Reply::Profile(Box::new(document))).await?;
        }
        Request::ImportProfile(document) => {
            let asked = jobs.clone();
            let imported = out.waiting_for(engine, async move { asked.import_profile(*document).await }).await?;
            out.send(&Reply::Profiles(vec![imported.map_err(refused)?])).await?;
        }
        Request::ForgetProfiles { profile } => {
            let asked = jobs.clone();
            let forgotten = out.waiting_for(engine, async move { asked.forget_profiles(profile).await }).await?;
            out.send(&Reply::Forgotten(forgotten.map_err(unknown_profile)?)).await?;
        }
    }
    Ok(())
}

/// Returns the client's process, as this process sees it.
fn owner(client: &UCred) -> Result<Process, Failure> {
    let pid = client.pid().and_then(|pid| u32::try_from(pid).ok()).filter(|pid| *pid > 0);
    pid.map(Process::of)
        .ok_or_else(|| Failure::usage("the daemon cannot identify the caller: it is in another container"))
}

fn peers_of(facts: &Facts) -> Result<&Arc<Peers>, Failure> {
    facts.peers.get().ok_or_else(|| {
        Failure::usage(format!("{} has no peers", facts.mountpoint))
            .remedy("mount it with --peers FILE; docs/CLUSTER.md shows what the file has")
    })
}

fn unknown_job(id: &str) -> Failure {
    Failure::usage(format!("there is no job `{id}`")).remedy("`forebay job list` shows those that are known")
}

/// Sets the user of an invocation to the client's. Only root may name another user.
fn by(client: &UCred, invocation: Invocation) -> Invocation {
    let user = if client.uid() == 0 { invocation.user } else { client.uid() };
    Invocation { user, ..invocation }
}

/// Returns a verb with the user of the job that it is about.
fn on_behalf_of(client: &UCred, mut verb: AllocationVerb) -> Result<(AllocationVerb, u32), Failure> {
    let mut uid = client.uid();
    match &mut verb {
        AllocationVerb::Begin(request) => {
            uid = request.uid.filter(|_| uid == 0).unwrap_or(uid);
            request.invocation = request.invocation.take().map(|invocation| Invocation { user: uid, ..invocation });
        }
        AllocationVerb::Start { members: Members::Caller } => {
            return Err(Failure::usage("an allocation outlives its caller: name the processes of the job"));
        }
        AllocationVerb::StageIn { wait_ms }
        | AllocationVerb::Ready { wait_ms }
        | AllocationVerb::StageOut { wait_ms, .. } => *wait_ms = (*wait_ms).min(limits::ALLOCATION_WAIT_MS),
        _ => {}
    }
    Ok((verb, uid))
}

fn unknown_profile(error: Error) -> Failure {
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::InvalidInput => {
            Failure::usage(error.to_string()).remedy("`forebay profile list` shows those that are known")
        }
        _ => error.into(),
    }
}

/// Converts an error. `NotFound` means that the request named something that does not exist.
fn refused(error: Error) -> Failure {
    if error.is(ErrorKind::NotFound) { Failure::usage(error.to_string()) } else { error.into() }
}

/// Begins work whose tasks run on the engine's runtime.
fn in_engine<T>(engine: &Handle, begin: impl FnOnce() -> T) -> T {
    let _entered = engine.enter();
    begin()
}

fn stuck(mountpoint: &str) -> Failure {
    let seconds = limits::STATUS.as_secs();
    Failure::new(
        FailureKind::NoDaemon,
        format!("the daemon of {mountpoint} is there, and stuck for {seconds} s or more"),
    )
    .remedy("check whether its fast pool answers: `forebay doctor`, `dmesg`; it continues when the fast pool does")
}

pub(super) fn complete(mut status: Status, facts: &Facts) -> Status {
    status.mountpoint = Some(facts.mountpoint.clone());
    status.no_passthrough = (facts.no_passthrough)();
    status.passthrough = status.no_passthrough.is_none();
    status
}

fn parse(path: &str) -> Result<PoolPath, Failure> {
    super::paths::decode(path)
        .and_then(PoolPath::parse)
        .ok_or_else(|| Failure::usage(format!("`{path}` is not a path below the mount")))
}

struct ReplyWriter(tokio::net::unix::OwnedWriteHalf);

impl ReplyWriter {
    async fn send(&mut self, reply: &Reply) -> io::Result<()> {
        let line = reply.to_line().map_err(io::Error::other)?;
        tokio::time::timeout(limits::SILENCE, self.0.write_all(&line)).await?
    }

    /// Sends heartbeats while the engine works. If the client leaves, the work is dropped at its next await.
    async fn waiting_for<T: Send + 'static>(
        &mut self,
        engine: &Handle,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, Gone> {
        let mut work = AbortOnDropHandle::new(engine.spawn(work.boxed()));
        let ended_early = |e| Failure::new(FailureKind::Other, format!("the daemon could not answer: {e}"));
        Ok(self.alive_until(&mut work).await?.map_err(ended_early)?)
    }

    /// As `alive_until`, for work that reports its progress. Returns `None` if there was no progress for
    /// [`limits::STATUS`].
    async fn alive_while<T>(
        &mut self,
        mut work: impl Future<Output = T> + Unpin,
        far: impl Fn() -> u64,
    ) -> io::Result<Option<T>> {
        let (mut reached, mut since) = (far(), Instant::now());
        loop {
            if let Ok(done) = tokio::time::timeout(limits::HEARTBEAT, &mut work).await {
                return Ok(Some(done));
            }
            if far() != reached {
                (reached, since) = (far(), Instant::now());
            } else if since.elapsed() >= limits::STATUS {
                return Ok(None);
            }
            self.send(&Reply::Alive).await?;
        }
    }

    async fn alive_until<T>(&mut self, mut work: impl Future<Output = T> + Unpin) -> io::Result<T> {
        loop {
            match tokio::time::timeout(limits::HEARTBEAT, &mut work).await {
                Ok(done) => return Ok(done),
                Err(_) => self.send(&Reply::Alive).await?,
            }
        }
    }

    async fn forward(&mut self, progress: impl Stream<Item = Progress>) -> Result<(), Gone> {
        let mut progress = std::pin::pin!(progress);
        let mut finished = false;
        while let Some(step) = self.alive_until(progress.next()).await? {
            finished |= matches!(step, Progress::Done(_));
            self.send(&Reply::Progress(step)).await?;
        }
        if finished {
            return Ok(());
        }
        Err(Gone::Failed(Failure::new(FailureKind::Other, "the daemon stopped the work without a summary")))
    }
}

#[cfg(test)]
mod tests;
