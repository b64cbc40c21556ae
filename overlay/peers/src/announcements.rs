//! Tells other nodes what this one has changed in the pool, so that they need not wait for the end of `metadata-ttl`.
//!
//! An announcement is a hint: it names a path, and the other node asks the pool at the next use. If it is lost, the time to
//! live counts. Each member has a queue of its own, so that a member that hangs delays no other one.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use forebay_backends::PoolPath;
use forebay_cluster::NodeId;
use futures::FutureExt;

use crate::peers::Peers;
use crate::wire::{ANNOUNCE_PATH, ANNOUNCED_BYTES, announcement};

/// Paths that wait for one member. Further ones are lost.
const WAITING_MAX: usize = 8192;
/// Paths that wait for all members.
const WAITING_FOR_ALL_MAX: usize = 64 * WAITING_MAX;
/// How long paths are collected for one request.
const COLLECTED_FOR: Duration = Duration::from_millis(20);
/// How long a member may take for its answer, for which it needs no pool.
const ANSWERED_WITHIN: Duration = Duration::from_secs(2);

/// What is to be announced. A member has an entry as long as something is being sent to it.
#[derive(Debug, Default)]
pub(crate) struct Announcements {
    queues: HashMap<NodeId, Vec<Arc<PoolPath>>>,
    waiting: usize,
}

impl Announcements {
    /// Queues a path. Returns `false` if there is no room, and whether a task must be started for the member.
    fn add(&mut self, member: &NodeId, path: &Arc<PoolPath>) -> (bool, bool) {
        let is_new = !self.queues.contains_key(member);
        let queue = self.queues.entry(member.clone()).or_default();
        if queue.last() == Some(path) {
            return (true, is_new);
        }
        let has_room = queue.len() < WAITING_MAX && self.waiting < WAITING_FOR_ALL_MAX;
        if has_room {
            queue.push(path.clone());
            self.waiting += 1;
        }
        (has_room, is_new)
    }

    /// Takes the paths of one request; `None` if the queue is empty, and its task ends.
    fn take(&mut self, member: &NodeId) -> Option<(String, u64)> {
        let queue = self.queues.get_mut(member)?;
        if queue.is_empty() {
            self.queues.remove(member);
            return None;
        }
        let (mut body, mut taken) = (String::new(), 0);
        for path in queue.iter() {
            let line = announcement(path);
            if body.len() + line.len() > ANNOUNCED_BYTES {
                break;
            }
            body.push_str(&line);
            taken += 1;
        }
        // A path that is too long for a request is left out.
        let taken = taken.max(1);
        queue.drain(..taken);
        self.waiting -= taken;
        Some((body, taken as u64))
    }
}

impl Peers {
    /// Queues a path for the other members.
    pub(crate) fn announce(self: &Arc<Self>, path: &PoolPath) {
        let cluster = self.cluster.load();
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let path = Arc::new(path.clone());
        for member in cluster.roster.members().iter().filter(|member| member.id != cluster.this) {
            let (has_room, is_new) = self.announcements.lock().add(&member.id, &path);
            if !has_room {
                self.announcements_lost.fetch_add(1, Ordering::Relaxed);
            }
            if is_new {
                let (peers, member) = (self.clone(), member.id.clone());
                runtime.spawn(async move { peers.send_announcements(&member).await }.boxed());
            }
        }
    }

    /// Sends what waits for a member, until nothing is left.
    async fn send_announcements(&self, member: &NodeId) {
        loop {
            tokio::time::sleep(COLLECTED_FOR).await;
            let Some((body, paths)) = self.announcements.lock().take(member) else { return };
            let count =
                if self.send_announcement(member, body).await { &self.announced } else { &self.announcements_lost };
            count.fetch_add(paths, Ordering::Relaxed);
        }
    }

    async fn send_announcement(&self, id: &NodeId, body: String) -> bool {
        let cluster = self.cluster.load_full();
        let Some(member) = cluster.roster.get(id) else { return false };
        let url = format!("http://{}{ANNOUNCE_PATH}", member.address);
        let request = self.http.post(url).bearer_auth(&cluster.settings.token).timeout(ANSWERED_WITHIN).body(body);
        match request.send().await.and_then(reqwest::Response::error_for_status) {
            Ok(_) => true,
            Err(error) => {
                tracing::debug!(peer = %id, "an announcement is lost: {error}");
                false
            }
        }
    }

    /// Waits until all that is queued was sent, but no longer than `limit`.
    pub async fn announce_all(&self, limit: Duration) {
        let began = Instant::now();
        while !self.announcements.lock().queues.is_empty() && began.elapsed() < limit {
            tokio::time::sleep(COLLECTED_FOR).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_has_a_bound_and_a_request_has_one_too() {
        let mut queues = Announcements::default();
        let (slow, other) = (NodeId::new("slow").unwrap(), NodeId::new("other").unwrap());
        let path = |at: usize| Arc::new(PoolPath::parse(format!("dir/{at:0200}").into_bytes()).unwrap());
        assert_eq!(queues.add(&slow, &path(0)), (true, true));
        assert_eq!(queues.add(&slow, &path(0)), (true, false));
        let fit = (1..2 * WAITING_MAX).filter(|at| queues.add(&slow, &path(*at)).0).count();
        assert_eq!(fit, WAITING_MAX - 1);
        assert_eq!(queues.add(&other, &path(0)), (true, true), "one member takes no room of another one");
        let mut sent = 0;
        while let Some((body, paths)) = queues.take(&slow) {
            assert!(body.len() <= ANNOUNCED_BYTES && body.lines().count() as u64 == paths);
            sent += paths as usize;
        }
        assert_eq!((sent, queues.waiting), (WAITING_MAX, 1));
    }
}
