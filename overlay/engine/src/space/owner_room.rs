//! Room for what a user changes: its share of the dirty bytes, and its quotas.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_backends::Result;

use super::super::{Inner, Ino};
use crate::node::{Node, NodeState};
use crate::quotas::{FileOwner, QuotaPromise, SpaceHolder};
use crate::shares::Promise;

/// How long a writer waits for its owner's share or quota while the flush makes no room, and the interval of its attempts. The
/// flush looks at a file within a second.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);

impl Inner {
    /// Returns how many more bytes of an owner may become dirty, by its share and its quotas.
    pub(super) fn room_of_owner(&self, owner: FileOwner) -> u64 {
        self.shares.room_bytes(owner.uid).min(self.quotas.room_bytes(owner))
    }

    /// Promises room in the share and the quotas of a file's owner. A file that is not dirty yet is counted, too. Waits as
    /// long as the flush makes room.
    ///
    /// # Errors
    /// `Quota` with the numbers.
    pub(crate) async fn room_for_file(self: &Arc<Self>, node: &Node, bytes: u64) -> Result<OwnerRoom> {
        let (owner, is_dirty) = {
            let record = &node.state.lock().record;
            (FileOwner::of(record), record.file.is_dirty())
        };
        self.owner_room(owner, bytes, u64::from(!is_dirty)).await
    }

    /// The same for bytes and files of an owner.
    ///
    /// # Errors
    /// As [`Self::room_for_file`].
    pub(crate) async fn owner_room(self: &Arc<Self>, owner: FileOwner, bytes: u64, files: u64) -> Result<OwnerRoom> {
        let (mut least, mut since) = (u64::MAX, Instant::now());
        let mut waiting = None;
        loop {
            let share = self.shares.promise(owner.uid, bytes);
            let refusal = match (share, self.quotas.promise(owner, bytes, files)) {
                (Some(share), Ok(quota)) => return Ok(OwnerRoom { _share: share, _quota: quota }),
                (None, _) => None,
                (_, Err(refusal)) => Some(refusal),
            };
            let has = match refusal {
                Some(refusal) => self.quotas.used(refusal),
                None => self.shares.dirty_bytes(owner.uid),
            };
            if has < least || !self.quotas.is_complete() {
                (least, since) = (has, Instant::now());
            }
            let refused = || match refusal {
                Some(refusal) => self.quotas.refused(refusal, bytes, files),
                None => self.shares.refused_bytes(owner.uid, bytes),
            };
            if since.elapsed() >= PATIENCE {
                return Err(refused());
            }
            if let Some(refusal) = refusal
                && self.quotas.is_complete()
                && waiting.is_none()
            {
                // What never goes to the pool, or only at a request, makes no room: then nothing is worth the wait.
                if !self.may_be_flushed_of(refusal.subject).await? {
                    return Err(refused());
                }
                waiting = Some(self.quotas.wait(refusal.subject));
            }
            self.flush_bell.notify_one();
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Charges an inode's dirty bytes to its owner, as they are now.
    pub(crate) fn charge(&self, ino: Ino, state: &mut NodeState) {
        let is_counted = self.quotas.count() || self.shares.has_share(state.record.uid);
        let bytes = if is_counted && state.record.file.is_dirty() { self.counted_bytes(state) } else { 0 };
        self.charge_bytes(ino, state, bytes);
    }

    /// The same for a file whose bytes are known.
    pub(crate) fn charge_bytes(&self, ino: Ino, state: &NodeState, bytes: u64) {
        let is_dirty = state.record.file.is_dirty() && !state.is_deleted();
        let owner = FileOwner::of(&state.record);
        self.shares.charge(ino, is_dirty.then_some((owner.uid, bytes)));
        self.quotas.charge(&SpaceHolder::File(ino), is_dirty.then_some((owner, bytes)));
    }
}

/// Room for bytes of a file's owner, until they are charged.
#[derive(Debug)]
pub(crate) struct OwnerRoom {
    _share: Promise,
    _quota: QuotaPromise,
}
