//! Tells other nodes what this one has changed in the pool, so that they need not wait for the end of `metadata-ttl`.
//!
//! An announcement is a hint: it names a path, and the other node asks the pool. If it is lost, or the queue is full, the
//! time to live counts.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use forebay_backends::PoolPath;
use futures::future::join_all;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::peers::Peers;
use crate::wire::{ANNOUNCE_PATH, ANNOUNCED_BYTES, announcement};

/// Paths that wait to be sent. Further ones are lost.
const WAITING: usize = 8192;
/// How long paths are collected for one request.
const COLLECTED_FOR: Duration = Duration::from_millis(20);
/// How long a node may take for its answer. It asks the pool for what it knows of the paths.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);

/// The paths that wait to be sent.
pub struct AnnouncementQueue(mpsc::Receiver<PoolPath>);

impl AnnouncementQueue {
    pub(crate) fn new() -> (mpsc::Sender<PoolPath>, Self) {
        let (sender, receiver) = mpsc::channel(WAITING);
        (sender, Self(receiver))
    }

    /// Sends paths to all other members, until `stop`.
    pub async fn send_all(mut self, peers: Arc<Peers>, stop: CancellationToken) {
        let mut next = None;
        loop {
            let first = match next.take() {
                Some(path) => path,
                None => match stop.run_until_cancelled(self.0.recv()).await.flatten() {
                    Some(path) => path,
                    None => return,
                },
            };
            tokio::time::sleep(COLLECTED_FOR).await;
            let mut body = announcement(&first);
            let mut paths = BTreeSet::from([first]);
            while let Ok(path) = self.0.try_recv() {
                if paths.contains(&path) {
                    continue;
                }
                let line = announcement(&path);
                if body.len() + line.len() > ANNOUNCED_BYTES {
                    next = Some(path);
                    break;
                }
                body.push_str(&line);
                paths.insert(path);
            }
            peers.send_announcement(&body, paths.len() as u64).await;
        }
    }
}

impl Peers {
    /// Queues a path for the other members.
    pub(crate) fn announce(&self, path: &PoolPath) {
        if self.cluster.load().roster.len() < 2 {
            return;
        }
        if self.announcements.try_send(path.clone()).is_err() {
            self.announcements_lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    async fn send_announcement(&self, body: &str, paths: u64) {
        let cluster = self.cluster.load_full();
        let others = cluster.roster.members().iter().filter(|member| member.id != cluster.this);
        let sends = others.map(async |member| {
            let url = format!("http://{}{ANNOUNCE_PATH}", member.address);
            let request = self.http.post(url).bearer_auth(&cluster.settings.token).timeout(ANSWERED_WITHIN);
            match request.body(body.to_owned()).send().await.and_then(reqwest::Response::error_for_status) {
                Ok(_) => self.announced.fetch_add(paths, Ordering::Relaxed),
                Err(error) => {
                    tracing::debug!(peer = %member.id, "an announcement is lost: {error}");
                    self.announcements_lost.fetch_add(paths, Ordering::Relaxed)
                }
            }
        });
        join_all(sends).await;
    }
}
