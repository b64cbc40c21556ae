//! Room for what a user changes: its share of the dirty bytes, and its quotas.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_backends::{Error, Result};
use forebay_policy::QuotaSubject;

use super::super::Inner;
use crate::node::Node;
use crate::quotas::{FileOwner, QuotaPromise, QuotaRefusal, QuotaShortage};
use crate::shares::Promise;

/// Pause between two attempts. The flush looks at a file within a second.
const PAUSE: Duration = Duration::from_millis(20);
/// How long a caller waits although the flush can make no room: the kernel tells of a file that was closed and removed a
/// moment later.
const SETTLING: Duration = Duration::from_millis(100);
/// Pause between two looks whether the flush can make room.
const HOPE_EVERY: Duration = Duration::from_secs(1);

/// How long a caller waits for room.
#[derive(Debug, Clone, Copy)]
struct OwnerPatience {
    /// While the flush makes none.
    stalled: Duration,
    /// In all.
    most: Duration,
    /// Whatever the flush sends counts as progress, because a large file takes its time. Else only room for the owner does.
    any_progress: bool,
}

/// A write waits as long as for room in the fast pool.
const OF_WRITE: OwnerPatience =
    OwnerPatience { stalled: Duration::from_secs(5), most: Duration::from_secs(600), any_progress: true };
/// While a file is created, the kernel holds the lock of its directory, which other users may share.
const OF_CREATE: OwnerPatience =
    OwnerPatience { stalled: Duration::from_secs(5), most: Duration::from_secs(30), any_progress: false };

/// Room for bytes of a file's owner, until they are charged.
#[derive(Debug)]
pub(crate) struct OwnerRoom {
    _share: Promise,
    _quota: QuotaPromise,
}

/// What a user wants to hold in addition.
#[derive(Debug, Clone, Copy)]
struct OwnerDemand {
    owner: FileOwner,
    bytes: u64,
    files: u64,
}

impl OwnerDemand {
    /// One more dirty file, unless the file is dirty already.
    fn of_file(node: &Node) -> Self {
        let record = &node.state.lock().record;
        Self { owner: FileOwner::of(record), bytes: 0, files: u64::from(!record.file.is_dirty()) }
    }
}

/// What does not allow more.
#[derive(Debug, Clone, Copy)]
enum OwnerShortage {
    Share,
    Quota(QuotaRefusal),
}

impl Inner {
    /// Returns how many more bytes of an owner may become dirty, by its share and its quotas. `None`: that is not known
    /// yet.
    pub(super) fn room_of_owner(&self, owner: FileOwner) -> Option<u64> {
        Some(self.quotas.room_bytes(owner)?.min(self.shares.room_bytes(owner.uid)))
    }

    /// Promises room for more bytes of a file. If it is not dirty yet, it is counted as one more file. Waits as long as the
    /// flush makes room.
    ///
    /// # Errors
    /// `Quota` with the numbers.
    pub(crate) async fn room_for_file(self: &Arc<Self>, node: &Node, bytes: u64) -> Result<OwnerRoom> {
        self.owner_room(OF_WRITE, || OwnerDemand { bytes, ..OwnerDemand::of_file(node) }).await
    }

    /// Promises room for clean content that becomes dirty: all of its bytes. Nothing, once another caller has marked it.
    ///
    /// # Errors
    /// As [`Self::room_for_file`].
    pub(crate) async fn room_for_mark(self: &Arc<Self>, node: &Node) -> Result<OwnerRoom> {
        let demand = || {
            let demand = OwnerDemand::of_file(node);
            let bytes = if demand.files == 0 { 0 } else { self.counted_bytes(&mut node.state.lock()) };
            OwnerDemand { bytes, ..demand }
        };
        self.owner_room(OF_WRITE, demand).await
    }

    /// As [`Self::room_for_file`], without a wait.
    ///
    /// # Errors
    /// As [`Self::room_for_file`].
    pub(crate) fn room_for_file_now(&self, node: &Node, bytes: u64) -> Result<OwnerRoom> {
        let demand = OwnerDemand { bytes, ..OwnerDemand::of_file(node) };
        self.owner_room_now(demand).map_err(|short| self.refused(short, demand))
    }

    /// Promises room for a new file. The wait is short.
    ///
    /// # Errors
    /// As [`Self::room_for_file`].
    pub(crate) async fn room_for_new(self: &Arc<Self>, owner: FileOwner) -> Result<OwnerRoom> {
        self.owner_room(OF_CREATE, || OwnerDemand { owner, bytes: 0, files: 1 }).await
    }

    /// Refuses a file that is about to be fetched for a change, and that can never be held under the quotas of its owner.
    ///
    /// # Errors
    /// As [`Self::room_for_file`].
    pub(crate) fn check_quota_holds(&self, node: &Node) -> Result<()> {
        let (owner, bytes) = {
            let record = &node.state.lock().record;
            (FileOwner::of(record), if record.file.is_dirty() { 0 } else { record.clean_bytes() })
        };
        let refusal = self.quotas.never_fits(owner, bytes);
        refusal.map_or(Ok(()), |refusal| Err(self.quotas.refused(refusal, bytes, 1)))
    }

    /// Promises room under quotas alone. Waits only until everything is counted.
    ///
    /// # Errors
    /// As [`Self::room_for_file`].
    pub(crate) async fn quota_room(&self, subjects: &[QuotaSubject], bytes: u64, files: u64) -> Result<QuotaPromise> {
        loop {
            match self.quotas.promise_to(subjects, bytes, files) {
                Ok(promise) => return Ok(promise),
                Err(refusal) if refusal.why != QuotaShortage::Uncounted => {
                    return Err(self.quotas.refused(refusal, bytes, files));
                }
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    /// `demand` is asked again for each attempt.
    async fn owner_room(
        self: &Arc<Self>,
        patience: OwnerPatience,
        demand: impl Fn() -> OwnerDemand,
    ) -> Result<OwnerRoom> {
        let (begun, mut progressed, mut hoped) = (Instant::now(), Instant::now(), None::<Instant>);
        let (mut last, mut least_dirty) = (None, u64::MAX);
        let mut waiting = None;
        loop {
            let demand = demand();
            let short = match self.owner_room_now(demand) {
                Ok(room) => return Ok(room),
                Err(short) => short,
            };
            let mark = match short {
                OwnerShortage::Share => {
                    least_dirty = least_dirty.min(self.shares.dirty_bytes(demand.owner.uid));
                    (least_dirty, (0, 0))
                }
                OwnerShortage::Quota(refusal) => {
                    let sent = if patience.any_progress { self.progress() } else { (0, 0) };
                    (self.quotas.used(refusal), sent)
                }
            };
            if last != Some(mark) {
                (last, progressed) = (Some(mark), Instant::now());
            }
            let refused = || Err(self.refused(short, demand));
            match short {
                OwnerShortage::Quota(QuotaRefusal { why: QuotaShortage::Never, .. }) => return refused(),
                // The count comes to its end.
                OwnerShortage::Quota(QuotaRefusal { why: QuotaShortage::Uncounted, .. }) => {
                    tokio::time::sleep(PAUSE).await;
                    progressed = Instant::now();
                    continue;
                }
                OwnerShortage::Quota(refusal @ QuotaRefusal { why: QuotaShortage::Full, subject, .. })
                    if hoped.is_none_or(|at| at.elapsed() >= HOPE_EVERY) =>
                {
                    // What never goes to the pool, or only by request, makes no room.
                    match self.may_be_flushed_of(subject).await? {
                        true => hoped = Some(Instant::now()),
                        false if begun.elapsed() >= SETTLING => return refused(),
                        false => {}
                    }
                    waiting = waiting.or_else(|| Some(self.quotas.wait(refusal.subject)));
                }
                _ => {}
            }
            if progressed.elapsed() >= patience.stalled || begun.elapsed() >= patience.most {
                return refused();
            }
            self.flusher.bell.notify_one();
            tokio::time::sleep(PAUSE).await;
        }
    }

    fn owner_room_now(&self, demand: OwnerDemand) -> std::result::Result<OwnerRoom, OwnerShortage> {
        let OwnerDemand { owner, bytes, files } = demand;
        let share = self.shares.promise(owner.uid, bytes).ok_or(OwnerShortage::Share)?;
        let quota = self.quotas.promise(owner, bytes, files).map_err(OwnerShortage::Quota)?;
        Ok(OwnerRoom { _share: share, _quota: quota })
    }

    fn refused(&self, short: OwnerShortage, demand: OwnerDemand) -> Error {
        match short {
            OwnerShortage::Share => self.shares.refused_bytes(demand.owner.uid, demand.bytes),
            OwnerShortage::Quota(refusal) => self.quotas.refused(refusal, demand.bytes, demand.files),
        }
    }
}
