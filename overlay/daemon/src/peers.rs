//! The other nodes of a mount's cluster: the file that names them, and the address where this node answers them.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use forebay_engine::Overlay;
use forebay_peers::{EtcdMembers, PeerClient, PeerDoor, PeerSettings, Peers};
use futures::FutureExt;
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
