//! A cache node: the engine behind HTTP, without a mount, in one process. It is registered like a mount, under a path that
//! does not exist ([`ROOT`]), so that `status`, `stage`, `evict` and the other commands reach it.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forebay_backends::decorators::Metrics;
use forebay_engine::{OtherRoot, UserGroups};
use forebay_jobs::Jobs;
use forebay_serve::{
    AccessLog, AccessRules, CacheNode, CacheNodeOptions, Certificate, ContentOptions, FreshnessOptions, Listener,
    ListenerLimits, LogFormat, ProxyOptions, ServedContent, check_origin,
};
use forebay_system::identity;
use futures::FutureExt;
use tokio_util::sync::CancellationToken;
use url::Url;

use super::config::MountConfig;
use super::metrics::{self, MetricsServer, MountParts};
use super::peers::PeersOfMount;
use super::registry::{MountState, Phase, Process, Runtime, now_unix};
use super::server::{Facts, Server};
use super::supervisor::Signals;
use super::{Failure, FailureKind, capabilities, confinement, paths, peers, preflight, registry, worker};

/// Where cache nodes are registered: a node named `n` stands for the paths below `/forebay/n`.
pub const ROOT: &str = "/forebay";
/// The beginning of the name of the directory of the names of responses, in the first directory of the fast pool.
const RESPONSES: &str = "responses";
/// How long the end of a node waits for its access log.
const LOG_WAIT: Duration = Duration::from_secs(2);
/// The first descriptor that systemd passes to a service (`sd_listen_fds(3)`).
const PASSED_FROM: i32 = 3;

/// The options of a cache node.
#[derive(Debug, Clone)]
pub struct CacheNodeConfig {
    /// Pool, fast pool, limit and policy. Its mountpoint is the node's path below [`ROOT`].
    pub mount: MountConfig,
    /// Addresses to listen on; none if the sockets were passed by systemd.
    pub listen: Vec<SocketAddr>,
    /// Files of the certificate chain and of its key.
    pub tls: Option<(PathBuf, PathBuf)>,
    pub access: Option<PathBuf>,
    /// The user whose rights clients have.
    pub user: String,
    pub listings: bool,
    pub rate: Option<NonZeroU32>,
    /// How long responses that are not fresh are still used.
    pub freshness: FreshnessOptions,
    /// Requests that change something are forwarded to the origin, too.
    pub forward_changes: bool,
    pub log: Option<(PathBuf, LogFormat)>,
    pub connections: Option<usize>,
}

/// A cache node that serves.
#[derive(Debug, Clone)]
pub struct CacheNodeReady {
    pub path: PathBuf,
    pub addresses: Vec<SocketAddr>,
    /// What an operator should know, such as that everyone on the network may read.
    pub notes: Vec<String>,
}

/// The sockets of a node.
struct NodeSockets {
    content: Vec<TcpListener>,
    certificate: Option<Arc<Certificate>>,
    metrics: Option<TcpListener>,
    peers: Option<TcpListener>,
}

/// What is read again when the node is asked to reload.
struct Reloaded {
    access: Option<PathBuf>,
    tls: Option<(PathBuf, PathBuf, Arc<Certificate>)>,
}

/// Checks a node and completes its configuration. Changes nothing. Returns the fast directories to create.
fn check(config: &mut CacheNodeConfig) -> Result<Vec<PathBuf>, Failure> {
    let path = &config.mount.mountpoint;
    if let Some(entry) = registry::entries().into_iter().find(|e| e.mountpoint() == path && e.worker_alive()) {
        let pid = entry.state.supervisor.pid;
        return Err(Failure::new(
            FailureKind::Busy,
            format!("the cache node {} is running (pid {pid})", path.display()),
        )
        .remedy("choose another --name"));
    }
    config.mount.read_only = true;
    if let Some(origin) = &config.mount.origin {
        let url = check_origin(origin).map_err(Failure::usage)?;
        let Some(fast) = config.mount.fast.first() else {
            return Err(Failure::usage("no fast pool was given").remedy("--fast DIR, a directory on the local NVMe"));
        };
        // Its names are on the fast pool's device, beside the content, and no other client changes them.
        let fast = paths::absolute(fast).map_err(|e| Failure::io("fast directory", &e))?;
        // Another origin has other responses.
        let names = format!("{RESPONSES}-{}", host_of(&url));
        config.mount.pool = format!("hollow://{}", fast.join(names).display());
        (config.mount.read_only, config.mount.immutable) = (false, true);
    }
    preflight::storage(&mut config.mount)
}

/// Serves until a signal asks to end. `confined` is called once this process has given up what it does not need, and
/// `on_ready` once, when requests are answered.
///
/// # Errors
/// Names what is wrong: the pool, the fast pool, an address, a file, the user.
pub fn run(mut config: CacheNodeConfig, confined: fn(), on_ready: &dyn Fn(&CacheNodeReady)) -> Result<(), Failure> {
    let to_create = check(&mut config)?;
    let user = user(&config.user)?;
    let access = access(config.access.as_deref())?;
    let certificate = match &config.tls {
        Some((chain, key)) => Some(Certificate::read(chain, key).map_err(Failure::usage)?),
        None => None,
    };
    let log = match &config.log {
        Some((file, format)) => Some(
            AccessLog::open(file, *format).map_err(|e| Failure::io(format!("access log {}", file.display()), &e))?,
        ),
        None => None,
    };
    let sockets = sockets(&config.listen)?;
    let metrics = config.mount.metrics.map(|address| metrics::ADDRESS.bind(address)).transpose()?;
    let notes = notes(&config, &sockets);
    preflight::create_storage(&config.mount, &to_create)?;
    let runtime = Runtime::of(&config.mount.mountpoint);
    let _lock = runtime.claim()?;
    runtime.clear();
    rustix::process::umask(rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
    worker::raise_descriptor_limit();
    // The other way round, this process could not narrow what it may ever have.
    confinement::confine();
    capabilities::give_up();
    confined();
    let rt = worker::tokio_runtime()?;
    let options = CacheNodeOptions {
        content: match &config.mount.origin {
            None => ServedContent::Pool(ContentOptions {
                user,
                listings: config.listings,
                stale_while_revalidate: config.freshness.stale_while_revalidate,
            }),
            Some(origin) => ServedContent::Origin(ProxyOptions {
                origin: origin.clone(),
                node: node_name(),
                freshness: config.freshness,
                changes: config.forward_changes,
            }),
        },
        access,
        rate: config.rate,
        log,
        counters: Arc::default(),
    };
    let peers = peers::settings(&config.mount)?.map(|settings| peers::ADDRESS.bind(settings.listen)).transpose()?;
    let sockets = NodeSockets { content: sockets, certificate, metrics, peers };
    let log = options.log.clone();
    let outcome = rt.block_on(serve(&runtime, config, sockets, options, notes, on_ready).boxed_local());
    if let Some(log) = log {
        log.flush(LOG_WAIT);
    }
    runtime.remove();
    rt.shutdown_background();
    outcome
}

async fn serve(
    runtime: &Runtime,
    config: CacheNodeConfig,
    sockets: NodeSockets,
    options: CacheNodeOptions,
    mut notes: Vec<String>,
    on_ready: &dyn Fn(&CacheNodeReady),
) -> Result<(), Failure> {
    let NodeSockets { content, certificate, metrics, peers: peer_socket } = sockets;
    let mount = &config.mount;
    let mut signals = Signals::new().map_err(|e| Failure::io("cannot receive signals", &e))?;
    let worker::Engine { overlay, pool, not_attached } =
        worker::open(mount, worker::policy(mount)?, false, OtherRoot::Refuse).await?;
    notes.extend(
        not_attached.map(|why| format!("only what is resident is served, until the pool can be attached: {why}")),
    );
    let jobs = Jobs::start(overlay.clone());
    register(runtime, mount)?;
    let path = mount.mountpoint.display().to_string();
    overlay.set_mount(&path, false);
    let settings = peers::settings(mount)?;
    let peers = peers::start(mount, settings, peer_socket, &overlay)?;
    let peers = PeersOfMount::from(peers);
    let facts = Facts { peers: peers.known.clone(), ..facts(runtime, mount, pool) };
    let facts = Arc::new(facts);
    let socket = runtime.socket();
    let clients = Server::start(&socket, overlay.clone(), jobs.clone(), facts.clone())
        .map_err(|e| Failure::io(format!("cannot listen on {}", socket.display()), &e))?;
    let parts = MountParts {
        overlay: overlay.clone(),
        jobs: jobs.clone(),
        requests: Arc::default(),
        responses: Some(options.counters.clone()),
        facts,
    };
    let numbers = mount.metrics.zip(metrics).map(|(at, socket)| MetricsServer::start(at, Some(socket), parts));
    let numbers = numbers.transpose().map_err(|e| Failure::io("cannot serve the metrics address", &e))?;
    let ending = CancellationToken::new();
    let node = CacheNode::new(overlay.clone(), options, ending.clone()).map_err(Failure::usage)?;
    let mut limits = ListenerLimits::default();
    limits.connections = config.connections.unwrap_or(limits.connections);
    let tls = certificate.as_ref().map(Certificate::config).transpose().map_err(Failure::usage)?;
    let mut listeners = tokio::task::JoinSet::new();
    let mut addresses = Vec::new();
    for socket in content {
        let listener = Listener::new(socket, tls.clone(), limits.clone())
            .and_then(|listener| Ok((listener.address()?, listener)))
            .map_err(|e| Failure::io("cannot listen", &e))?;
        addresses.push(listener.0);
        listeners.spawn(listener.1.serve(node.clone(), ending.clone()));
    }
    super::offline::remember(mount);
    tracing::info!("{path} serves {}", mount.source());
    on_ready(&CacheNodeReady { path: mount.mountpoint.clone(), addresses, notes });
    let reloaded = Reloaded {
        access: config.access.clone(),
        tls: config.tls.clone().zip(certificate).map(|((chain, key), held)| (chain, key, held)),
    };
    while signals.asks_to_reload().await {
        reload(&node, &reloaded);
    }
    tracing::info!("{path} ends: it accepts no further connections");
    ending.cancel();
    // A second signal ends it at once.
    tokio::select! {
        _ = async { while listeners.join_next().await.is_some() {} } => {}
        () = async { while signals.asks_to_reload().await {} } => {}
    }
    drop((clients, numbers));
    peers.leave().await;
    jobs.shutdown().await.map_err(Failure::from)
}

/// Returns the origin of a URL as a file name.
fn host_of(url: &Url) -> String {
    let port = url.port_or_known_default().unwrap_or_default();
    let host: String = url
        .host_str()
        .unwrap_or_default()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || matches!(c, '-' | '.') { c } else { '_' })
        .collect();
    format!("{}-{host}-{port}", url.scheme())
}

/// Returns a name for this process: other nodes of the same origin have other names.
fn node_name() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let host: String = host.chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.')).collect();
    format!("{host}-{}", std::process::id())
}

fn facts(runtime: &Runtime, mount: &MountConfig, pool_calls: Arc<Metrics>) -> Facts {
    Facts {
        mountpoint: mount.mountpoint.display().to_string(),
        no_passthrough: Box::new(|| Some("there is no mount: files are served over HTTP".to_owned())),
        runtime: runtime.clone(),
        pool: mount.source().to_owned(),
        pool_calls,
        peers: Arc::default(),
    }
}

fn register(runtime: &Runtime, mount: &MountConfig) -> Result<(), Failure> {
    let state = MountState {
        version: env!("CARGO_PKG_VERSION").into(),
        command: format!("forebay serve {} --fast ...", mount.source()),
        config: mount.clone(),
        supervisor: Process::current(),
        worker: Some(Process::current()),
        phase: Phase::Serving,
        since_unix: now_unix(),
        restarts: 0,
        last_exit: None,
    };
    runtime.save(&state).map_err(|e| Failure::io(format!("cannot write the state in {}", runtime.dir().display()), &e))
}

/// Reads files again. What is wrong with one of them is told, and the rest goes on as before.
fn reload(node: &CacheNode, reloaded: &Reloaded) {
    match access(reloaded.access.as_deref()) {
        Ok(access) => node.reload(access),
        Err(failure) => tracing::error!("not reloaded: {failure}"),
    }
    if let Some((chain, key, certificate)) = &reloaded.tls
        && let Err(why) = certificate.reload(chain, key)
    {
        tracing::error!("not reloaded: {why}");
    }
    tracing::info!("reloaded");
}

fn access(file: Option<&Path>) -> Result<AccessRules, Failure> {
    file.map_or(Ok(AccessRules::default()), |file| AccessRules::read(file).map_err(Failure::usage))
}

/// Returns a user by name or number, with its groups.
fn user(name: &str) -> Result<UserGroups, Failure> {
    let uid = name.parse().ok().or_else(|| identity::user_named(name));
    let uid = uid.ok_or_else(|| {
        Failure::usage(format!("--user {name}: there is no such user")).remedy("a name, or a number, of a user")
    })?;
    let groups = identity::groups_of(uid).map_err(|e| Failure::io(format!("groups of user {name}"), &e))?;
    Ok(UserGroups { uid, groups })
}

/// Returns the sockets that systemd passed, or binds the addresses.
fn sockets(listen: &[SocketAddr]) -> Result<Vec<TcpListener>, Failure> {
    let passed = passed_sockets()?;
    if !passed.is_empty() {
        return Ok(passed);
    }
    let bind = |address: &SocketAddr| {
        TcpListener::bind(address).map_err(|e| {
            let what = format!("cannot listen on {address}");
            let failure = match e.kind() {
                io::ErrorKind::AddrInUse => Failure::new(FailureKind::Busy, format!("{what}: another program does")),
                io::ErrorKind::AddrNotAvailable => Failure::usage(format!("{what}: it is no address of this machine")),
                _ => Failure::io(what, &e),
            };
            failure.remedy("--listen ADDRESS:PORT; `ip address` and `ss -lnt` show what is there")
        })
    };
    listen.iter().map(bind).collect()
}

/// Takes the sockets of socket activation.
fn passed_sockets() -> Result<Vec<TcpListener>, Failure> {
    use std::os::fd::{FromRawFd, OwnedFd};
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<i32>().ok());
    let (Some(pid), Some(count)) = (number("LISTEN_PID"), number("LISTEN_FDS")) else { return Ok(Vec::new()) };
    if u32::try_from(pid) != Ok(std::process::id()) {
        return Ok(Vec::new());
    }
    let mut sockets = Vec::new();
    for fd in (PASSED_FROM..).take(usize::try_from(count).unwrap_or(0)) {
        // SAFETY: the service manager passed this descriptor to this process, and nothing else uses it.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        let is_tcp =
            rustix::net::sockopt::socket_type(&socket).is_ok_and(|kind| kind == rustix::net::SocketType::STREAM);
        if !is_tcp {
            return Err(Failure::usage(format!("LISTEN_FDS: descriptor {fd} is no TCP socket")));
        }
        sockets.push(TcpListener::from(socket));
    }
    Ok(sockets)
}

fn notes(config: &CacheNodeConfig, sockets: &[TcpListener]) -> Vec<String> {
    let mut notes = Vec::new();
    let beyond = sockets.iter().filter_map(|s| s.local_addr().ok()).find(|address| !address.ip().is_loopback());
    if let Some(address) = beyond {
        match (&config.access, &config.tls) {
            (None, _) if config.mount.origin.is_some() => notes.push(format!(
                "everyone who reaches {address} may read what the origin shows this node: --access FILE restricts it"
            )),
            (None, _) => notes.push(format!(
                "everyone who reaches {address} may read what user {} may read: --access FILE restricts it",
                config.user
            )),
            (Some(_), None) => {
                notes.push(format!("tokens reach {address} in the clear: --tls-cert and --tls-key encrypt them"));
            }
            _ => {}
        }
    }
    notes
}
