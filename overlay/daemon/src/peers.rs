//! The other nodes of a mount's cluster: the file that names them, and the address where this node answers them.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use forebay_engine::Overlay;
use forebay_peers::{EtcdMembers, PeerClient, PeerDoor, PeerSettings, Peers};
use futures::FutureExt;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::addresses::AddressUse;
use super::config::MountConfig;
use super::{Failure, FailureKind, limits};

/// This node among its peers, until it is dropped.
pub struct PeerServer {
    pub peers: Arc<Peers>,
    ends: DropGuard,
    in_etcd: Option<JoinHandle<()>>,
}

impl PeerServer {
    /// Leaves the cluster.
    pub async fn leave(self) {
        self.peers.announce_all(limits::LEAVE).await;
        drop(self.ends);
        if let Some(in_etcd) = self.in_etcd
            && tokio::time::timeout(limits::LEAVE, in_etcd).await.is_err()
        {
            tracing::warn!("etcd does not answer: the other nodes know this one until its lease ends");
        }
    }
}

/// This node among the peers of a mount. A mount that was taken over may get them later.
#[derive(Default)]
pub struct PeersOfMount {
    pub known: Arc<OnceLock<Arc<Peers>>>,
    server: Arc<Mutex<Option<PeerServer>>>,
    waits: Option<DropGuard>,
}

impl From<Option<PeerServer>> for PeersOfMount {
    fn from(server: Option<PeerServer>) -> Self {
        let this = Self::default();
        this.have(server);
        this
    }
}

impl PeersOfMount {
    fn have(&self, server: Option<PeerServer>) {
        if let Some(server) = &server {
            let _ = self.known.set(server.peers.clone());
        }
        *self.server.lock() = server;
    }

    /// Leaves the cluster.
    pub async fn leave(self) {
        drop(self.waits);
        let server = self.server.lock().take();
        if let Some(server) = server {
            server.leave().await;
        }
    }
}

/// Reads the peers file of a mount; `None` if it has none.
///
/// # Errors
/// What is wrong in the file.
pub fn settings(config: &MountConfig) -> Result<Option<PeerSettings>, Failure> {
    config.peers.as_deref().map(read).transpose()
}

fn read(file: &Path) -> Result<PeerSettings, Failure> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    PeerSettings::read(file, &host)
        .map_err(|why| Failure::usage(why).remedy("docs/CLUSTER.md shows what a peers file has"))
}

/// Where this node answers the others.
pub const ADDRESS: AddressUse = AddressUse {
    name: "peers",
    serves: "peers are answered",
    if_taken: "choose another port for `listen` in the peers file, and in the list of members of all nodes",
    if_foreign: "`listen` in the peers file; `ip address` shows the addresses",
};

/// Lets an engine ask other nodes, and answers them. `socket`: that of [`AddressUse::bind`]; `None`: the mount was taken over, so the
/// address is served as soon as it is free. Must be called on the engine's tokio runtime.
///
/// # Errors
/// The HTTP client cannot be made.
pub fn start(
    config: &MountConfig,
    settings: Option<PeerSettings>,
    socket: Option<TcpListener>,
    overlay: &Overlay,
) -> Result<Option<PeerServer>, Failure> {
    let (Some(file), Some(settings)) = (config.peers.clone(), settings) else { return Ok(None) };
    let (address, etcd, own) = (settings.listen, settings.etcd.clone(), settings.own.clone());
    let peers = Peers::new(config.pool.clone(), settings)
        .map_err(|why| Failure::new(FailureKind::Other, format!("cannot ask peers: {why}")))?;
    overlay.set_peers(Arc::new(PeerClient(peers.clone())));
    let stop = CancellationToken::new();
    let door = Arc::new(PeerDoor::new(peers.clone(), overlay.clone()));
    let ended = stop.clone();
    tokio::spawn(async move { ADDRESS.serve((address, socket), limits::PEER_CONNECTIONS, door, ended).await }.boxed());
    let in_etcd =
        etcd.map(|etcd| tokio::spawn(EtcdMembers::new(etcd, own, peers.clone()).follow(stop.clone()).boxed()));
    tokio::spawn(follow(file, peers.clone(), stop.clone()).boxed());
    Ok(Some(PeerServer { peers, ends: stop.drop_guard(), in_etcd }))
}

/// Does the same for a mount that was taken over. It serves without peers until their file can be read. Must be called on
/// the engine's tokio runtime.
pub fn start_again(config: &MountConfig, overlay: &Overlay) -> PeersOfMount {
    let attempt = |config: &MountConfig, overlay: &Overlay| start(config, settings(config)?, None, overlay);
    let mut told = match attempt(config, overlay) {
        Ok(server) => return server.into(),
        Err(failure) => failure.to_string(),
    };
    tracing::error!("{told}; the mount serves without peers until their file can be read");
    let stop = CancellationToken::new();
    let late = PeersOfMount { waits: Some(stop.clone().drop_guard()), ..PeersOfMount::default() };
    let slot = PeersOfMount { waits: None, known: late.known.clone(), server: late.server.clone() };
    let (config, overlay) = (config.clone(), overlay.clone());
    let waits = async move {
        while stop.run_until_cancelled(tokio::time::sleep(limits::PEERS_FILE)).await.is_some() {
            match attempt(&config, &overlay) {
                Ok(server) => {
                    slot.have(server);
                    tracing::info!("the peers file can be read: the mount has its peers");
                    return;
                }
                Err(failure) if failure.to_string() == told => {}
                Err(failure) => {
                    told = failure.to_string();
                    tracing::error!("{told}");
                }
            }
        }
    };
    tokio::spawn(waits.boxed());
    late
}

/// Reads the file again when it changes.
async fn follow(file: PathBuf, peers: Arc<Peers>, stop: CancellationToken) {
    let changed_at = || fs::metadata(&file).and_then(|meta| meta.modified()).ok();
    let mut known: Option<SystemTime> = changed_at();
    while stop.run_until_cancelled(tokio::time::sleep(limits::PEERS_FILE)).await.is_some() {
        let now = changed_at();
        if now.is_none() || now == known {
            continue;
        }
        known = now;
        match read(&file) {
            Ok(settings) => peers.reload(settings),
            Err(failure) => tracing::error!("the members stay as they are: {failure}"),
        }
    }
}
