//! Scratch directories of the mount: their records, their share of the fast pool's space, and what they commit.
//!
//! A directory with a limit has its bytes reserved: they count as used from its creation on. One without a limit counts
//! what it occupies. Both are counted again and again while they exist (`count_scratch`).

mod commit;
mod discard;
mod merge;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_api::scratch::{CommitReport, CommitRequest, MergeRequest, ScratchDir, ScratchRequest, check_scratch_id};
use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_cache::scratch::{Removal, Seal, count};
use forebay_cache::{ContentNumbers, Reservation};
use forebay_system::clock::unix_now;
use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use super::{Inner, Ino, Overlay, blocking};
use crate::quotas::{FileOwner, QuotaShortage, SpaceHolder};

/// The key of the records in the catalog.
const KEY: &str = "scratch";
/// The most directories of a mount.
const DIRS_MAX: usize = 10_000;
/// How often a directory is counted: more often the nearer it is to its limit.
const COUNT_MIN: Duration = Duration::from_millis(100);
const COUNT_MAX: Duration = Duration::from_secs(1);
/// How long a commit or a removal waits for the use before it.
const TAKEN_MAX: Duration = Duration::from_secs(60);
/// How long the removal of a tree waits that could not be removed.
const REMOVED_AGAIN: Duration = Duration::from_secs(10);
/// A count takes at most this share of the time.
const COUNT_SHARE: u32 = 20;

/// The record of a scratch directory in the catalog: JSON, so that other versions of this program can read it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ScratchRecord {
    uid: u32,
    gid: u32,
    device: usize,
    limit_bytes: Option<u64>,
    created_unix: u64,
}

#[derive(Debug)]
struct KnownScratch {
    record: ScratchRecord,
    /// What the space budget counts for it.
    charged_bytes: u64,
    used_bytes: u64,
    is_full: bool,
    counted: Instant,
    taken: Option<ScratchUse>,
}

/// The task that excludes others from a scratch directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ScratchUse {
    Count,
    /// A commit or a removal.
    Change,
}

impl KnownScratch {
    fn new(record: ScratchRecord) -> Self {
        let charged_bytes = record.limit_bytes.unwrap_or(0);
        Self::charged(record, charged_bytes)
    }

    fn charged(record: ScratchRecord, charged_bytes: u64) -> Self {
        Self { record, charged_bytes, used_bytes: 0, is_full: false, counted: Instant::now(), taken: None }
    }
}

/// The scratch directories of a mount.
#[derive(Debug, Default)]
pub(crate) struct ScratchDirs {
    known: Mutex<BTreeMap<String, KnownScratch>>,
    /// Names that commits of the last daemon made, and that the kernel may not know of.
    appeared: Mutex<Vec<(Ino, Vec<u8>)>>,
    /// Directories in which commits of the last daemon made names, and of which the kernel may have old entries.
    merged: Mutex<Vec<Ino>>,
    /// The marks of these commits in the catalog. They stay until the kernel was told.
    marks: Mutex<Vec<String>>,
    /// Trees that are being removed, by device and number, and what the space budget counts for each.
    discarded: Mutex<BTreeMap<(usize, u64), u64>>,
    /// Notified when one of them is removed.
    removed: Notify,
    /// Notified when a directory is free for the next use.
    freed: Condvar,
    /// Notified when there is something to count or to remove.
    bell: Notify,
}

/// A scratch directory that one operation has to itself.
struct TakenScratch {
    inner: Arc<Inner>,
    id: String,
    record: ScratchRecord,
}

impl Drop for TakenScratch {
    fn drop(&mut self) {
        if let Some(known) = self.inner.scratch.known.lock().get_mut(&self.id) {
            known.taken = None;
        }
        self.inner.scratch.freed.notify_all();
    }
}

impl Overlay {
    /// Creates a scratch directory for a user. One of this name and user stays as it is.
    ///
    /// # Errors
    /// `InvalidInput` for a bad name; `Exists` if another user has one of this name; `NoSpace` if the fast pool has no
    /// room for the limit; `NotPermitted` if the user cannot reach the directory.
    pub async fn create_scratch(&self, request: ScratchRequest, uid: u32, gid: u32) -> Result<ScratchDir> {
        let inner = self.inner.clone();
        inner.check_writable()?;
        check_scratch_id(&request.id).map_err(invalid)?;
        if let Some(known) = inner.shown_scratch(&request.id, Some(uid))? {
            return if known.is_missing { Err(missing(&known)) } else { Ok(known) };
        }
        let limit = request.limit_bytes;
        let owner = FileOwner { uid, gid };
        // The promise comes last: the other one may be waited for.
        let reserved = inner.reserve_for_scratch(limit.unwrap_or(0)).await?;
        let promised = inner.quota_room(&owner.limited(), limit.unwrap_or(0), 0).await?;
        blocking(move || {
            let record = ScratchRecord {
                uid,
                gid,
                device: inner.store.roomiest_device(),
                limit_bytes: limit,
                created_unix: unix_now(),
            };
            let record_device = record.device;
            let mut known = inner.scratch.known.lock();
            if known.len() >= DIRS_MAX {
                let what = format!("there are {DIRS_MAX} scratch directories: `forebay scratch discard` removes one");
                return Err(Error::new(ErrorKind::Busy, Side::Application, what));
            }
            if !known.contains_key(&request.id) {
                // Before the record: a directory without a record is removed after the next start.
                inner.store.make_scratch(record.device, &request.id, (uid, gid))?;
                known.insert(request.id.clone(), KnownScratch::new(record));
                if let Err(error) = inner.save_scratch(&known) {
                    known.remove(&request.id);
                    return Err(error);
                }
                inner.store.account_on(record_device, 0, limit.unwrap_or(0));
                inner.charge_owner_of_scratch(&request.id, known.get(&request.id));
            }
            drop((known, reserved, promised));
            inner.catalog.sync()?;
            inner.scratch.bell.notify_one();
            inner.shown_scratch(&request.id, Some(uid))?.ok_or_else(|| unknown(&request.id))
        })
        .await
    }

    /// Returns all scratch directories, in the order of their names.
    pub fn scratch_dirs(&self) -> Result<Vec<ScratchDir>> {
        let ids: Vec<String> = self.inner.scratch.known.lock().keys().cloned().collect();
        let shown = ids.iter().map(|id| self.inner.shown_scratch(id, None));
        Ok(shown.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
    }

    /// Takes a tree from a scratch directory into the overlay, in one step as seen through the mount.
    ///
    /// # Errors
    /// Nothing has changed then. `NotFound`, `Exists`, `NotEmpty`; `Busy` if another commit of the directory runs, or if
    /// its programs change it; `NotPermitted` if the pool cannot hold a kind of file that is in it.
    pub async fn commit_scratch(&self, request: CommitRequest) -> Result<CommitReport> {
        self.inner.clone().commit_scratch(request, None).await
    }

    /// As [`Self::commit_scratch`], but a directory is merged into one of its name that exists, and anything else
    /// replaces what has its name. The user of the scratch directory must be allowed to.
    ///
    /// # Errors
    /// As [`Self::commit_scratch`]. `Exists` if a directory meets something else; `PermissionDenied` or `NotPermitted` if
    /// the user may not make or replace a name.
    pub async fn merge_scratch(&self, request: MergeRequest) -> Result<CommitReport> {
        self.inner.clone().commit_scratch(request.commit, Some(request.groups)).await
    }
}

impl Inner {
    fn shown_scratch(&self, id: &str, of: Option<u32>) -> Result<Option<ScratchDir>> {
        let known = self.scratch.known.lock();
        let Some(KnownScratch { record, used_bytes, is_full, .. }) = known.get(id) else { return Ok(None) };
        if of.is_some_and(|uid| uid != record.uid) {
            let what = format!("user {} has a scratch directory of this name: {id}", record.uid);
            return Err(Error::new(ErrorKind::Exists, Side::Application, what));
        }
        Ok(Some(ScratchDir {
            id: id.to_owned(),
            uid: record.uid,
            path: match self.store.scratch_path(record.device, id) {
                Ok(path) => path.display().to_string(),
                Err(_) => String::new(),
            },
            limit_bytes: record.limit_bytes,
            used_bytes: *used_bytes,
            is_full: *is_full,
            is_missing: !self.is_scratch_there(id, record),
            created_unix: record.created_unix,
        }))
    }

    /// Gives a scratch directory to one operation. A change waits for the one before it. Blocks.
    fn take_scratch(self: &Arc<Self>, id: &str, by: ScratchUse) -> Result<TakenScratch> {
        let until = Instant::now() + TAKEN_MAX;
        let mut all = self.scratch.known.lock();
        loop {
            let known = all.get_mut(id).ok_or_else(|| unknown(id))?;
            if known.taken.is_none() {
                known.taken = Some(by);
                return Ok(TakenScratch { inner: self.clone(), id: id.to_owned(), record: known.record.clone() });
            }
            if by == ScratchUse::Count || self.scratch.freed.wait_until(&mut all, until).timed_out() {
                let what = format!("scratch directory {id} is being counted, committed or removed: repeat it later");
                return Err(Error::new(ErrorKind::Busy, Side::Application, what));
            }
        }
    }

    fn save_scratch(&self, known: &BTreeMap<String, KnownScratch>) -> Result<()> {
        let records: BTreeMap<&str, &ScratchRecord> = known.iter().map(|(id, k)| (id.as_str(), &k.record)).collect();
        let text = serde_json::to_string(&records).map_err(|e| {
            Error::new(ErrorKind::Corrupt, Side::Cache, format!("the records of scratch directories: {e}"))
        })?;
        self.catalog.set_meta(KEY, &text)
    }

    /// Returns what the space budget counts beside scratch directories and files that only views name: the catalog keeps
    /// this count.
    pub(crate) fn content_bytes(&self) -> u64 {
        let known: u64 = self.scratch.known.lock().values().map(|known| known.charged_bytes).sum();
        let scratch = self.scratch.discarded.lock().values().sum::<u64>().saturating_add(known);
        self.store.budget.used().saturating_sub(scratch).saturating_sub(self.store.outlived_bytes())
    }

    /// Takes up the directories of the last daemon: finishes or undoes its commits, and removes what it was removing.
    /// Runs before content files without records are removed.
    pub(crate) fn take_up_scratch(&self) -> Result<()> {
        self.take_up_commits()?;
        let text: Option<String> = self.catalog.meta(KEY)?;
        let records: BTreeMap<String, ScratchRecord> = match text.map(|text| serde_json::from_str(&text)) {
            Some(Ok(records)) => records,
            Some(Err(error)) => {
                let what = format!("the records of scratch directories: {error}");
                return Err(Error::new(ErrorKind::Corrupt, Side::Cache, what));
            }
            None => self.adopted_scratch(),
        };
        let mut known = self.scratch.known.lock();
        for (id, record) in records {
            // Its file system may be mounted at the next start.
            if !self.is_scratch_there(&id, &record) {
                tracing::error!(
                    "scratch directory {id} is not in the fast pool: if its file system is not mounted, mount it and \
                     start again; `forebay scratch discard {id}` gives it up"
                );
                known.insert(id, KnownScratch::charged(record, 0));
                continue;
            }
            self.store.account_on(record.device, 0, record.limit_bytes.unwrap_or(0));
            // Perhaps the last daemon has made files immutable: the first count makes them writable again.
            known.insert(id, KnownScratch { is_full: true, ..KnownScratch::new(record) });
        }
        self.store.discard_unknown_scratch(
            |device, id| known.get(id).is_some_and(|known| known.record.device == device),
            || Ok(self.catalog.new_content()?.0),
        )?;
        self.save_scratch(&known)?;
        self.scratch.bell.notify_one();
        Ok(())
    }

    /// Makes records of the scratch directories that are there, for a catalog that is new. It takes the place of one that
    /// was damaged, and each start of a daemon writes the records.
    fn adopted_scratch(&self) -> BTreeMap<String, ScratchRecord> {
        let mut records = BTreeMap::new();
        for (device, id, (uid, gid)) in self.store.scratch_dirs() {
            if check_scratch_id(&id).is_ok() {
                tracing::warn!("scratch directory {id} has no record: it is kept, without a limit");
                let record = ScratchRecord { uid, gid, device, limit_bytes: None, created_unix: unix_now() };
                records.entry(id).or_insert(record);
            }
        }
        records
    }

    /// Counts the directories again and again while there are any.
    pub(crate) async fn scratch_loop(self: Arc<Self>) {
        let mut told = String::new();
        loop {
            let again = self.clone();
            let removed = blocking(move || again.remove_discarded_scratch()).await;
            // Each reason once: the loop tries again and again.
            let why = removed.err().map_or_else(String::new, |error| error.to_string());
            if !why.is_empty() && why != told {
                tracing::error!("a scratch directory that was discarded is not removed: {why}");
            }
            told = why;
            if self.scratch.known.lock().is_empty() {
                let is_left = !self.scratch.discarded.lock().is_empty();
                let again = if is_left { REMOVED_AGAIN } else { Duration::MAX };
                let _ = tokio::time::timeout(again, self.scratch.bell.notified()).await;
                continue;
            }
            let (inner, begun) = (self.clone(), Instant::now());
            let next = blocking(move || Ok(inner.count_scratch())).await.unwrap_or(COUNT_MAX);
            tokio::select! {
                () = tokio::time::sleep(next.max(begun.elapsed() * COUNT_SHARE)) => {}
                () = self.scratch.bell.notified() => {}
            }
        }
    }

    /// Reserves the space of a scratch directory. Waits for the removal of others if that makes the room.
    async fn reserve_for_scratch(self: &Arc<Self>, bytes: u64) -> Result<Reservation> {
        let until = Instant::now() + TAKEN_MAX;
        loop {
            let removed = self.scratch.removed.notified();
            let error = match self.reserve(bytes).await {
                Err(error) if error.is(ErrorKind::NoSpace) => error,
                other => return other,
            };
            let leaving: u64 = self.scratch.discarded.lock().values().sum();
            let inner = self.clone();
            let room = blocking(move || Ok(inner.room_after_eviction())).await?;
            if leaving == 0 || bytes > room.saturating_add(leaving) || Instant::now() >= until {
                return Err(error);
            }
            let _ = tokio::time::timeout_at(until.into(), removed).await;
        }
    }

    /// Removes what was discarded. The bytes of each file are free when it is gone. Trees without a count are counted first.
    fn remove_discarded_scratch(&self) -> Result<()> {
        let found = {
            // A tree gets its count before its place, both under this lock.
            let _known = self.scratch.known.lock();
            let found = self.store.discarded();
            let mut counted = self.scratch.discarded.lock();
            counted.retain(|at, bytes| {
                let is_there = found.contains(at);
                if !is_there {
                    self.store.account_on(at.0, *bytes, 0);
                }
                is_there
            });
            found
        };
        for at in found {
            if !self.scratch.discarded.lock().contains_key(&at) {
                let bytes = self.store.count_discarded(at);
                self.count_discarded(at, |_| bytes);
            }
        }
        self.store.remove_discarded(|at, removal| match removal {
            Removal::Freed(bytes) => self.count_discarded(at, |counted| counted.saturating_sub(bytes)),
            Removal::Gone => {
                if let Some(bytes) = self.scratch.discarded.lock().remove(&at) {
                    self.store.account_on(at.0, bytes, 0);
                }
                self.scratch.removed.notify_waiters();
            }
            Removal::Stopped => {
                let left = self.store.count_discarded(at);
                self.count_discarded(at, |_| left);
                self.scratch.removed.notify_waiters();
            }
        })
    }

    /// Sets what the space budget counts for a tree that is being removed.
    fn count_discarded(&self, at: (usize, u64), count: impl FnOnce(u64) -> u64) {
        let mut all = self.scratch.discarded.lock();
        let counted = all.entry(at).or_insert(0);
        let before = std::mem::replace(counted, count(*counted));
        self.store.account_on(at.0, before, *counted);
    }

    /// Counts all directories. Returns when they should be counted again.
    fn count_scratch(self: &Arc<Self>) -> Duration {
        let ids: Vec<String> = self.scratch.known.lock().keys().cloned().collect();
        let mut next = COUNT_MAX;
        for id in ids {
            // One that is being committed is counted afterwards.
            let Ok(taken) = self.take_scratch(&id, ScratchUse::Count) else { continue };
            let begun = Instant::now();
            match self.count_one(&id, &taken.record) {
                Ok(wait) => next = next.min(wait.max(begun.elapsed() * COUNT_SHARE)),
                Err(error) => tracing::warn!(%error, "scratch directory {id} cannot be counted"),
            }
        }
        next
    }

    /// Whether a scratch directory is in the fast pool: the file system of its device may not be mounted.
    fn is_scratch_there(&self, id: &str, record: &ScratchRecord) -> bool {
        self.store.scratch_path(record.device, id).is_ok_and(|path| path.is_dir())
    }

    /// Counts a directory, and refuses or allows writes to its files. Returns when it should be counted again.
    fn count_one(&self, id: &str, record: &ScratchRecord) -> Result<Duration> {
        if !self.is_scratch_there(id, record) {
            return Ok(COUNT_MAX);
        }
        let look = |seal| self.look_at_scratch(id, record, seal);
        let was_full = self.scratch.known.lock().get(id).is_some_and(|known| known.is_full);
        let used = look(Seal::Keep)?;
        let limit = self.charge_scratch(id, used).unwrap_or_else(|| {
            let owner = FileOwner { uid: record.uid, gid: record.gid };
            let of_owner = self.quotas.room_bytes(owner).unwrap_or(u64::MAX);
            used.saturating_add(self.room_after_eviction().min(of_owner))
        });
        let is_full = used >= limit && used > 0;
        if is_full || was_full {
            look(if is_full { Seal::Set } else { Seal::Clear })?;
        }
        let (grown, in_time) = {
            let mut all = self.scratch.known.lock();
            let Some(known) = all.get_mut(id) else { return Ok(COUNT_MAX) };
            let since = (used.saturating_sub(known.used_bytes), known.counted.elapsed());
            (known.used_bytes, known.is_full, known.counted) = (used, is_full, Instant::now());
            since
        };
        if is_full && !was_full {
            tracing::warn!(
                "scratch directory {id} is full ({used} of {limit} bytes): writes to the files that grew last are \
                 refused until other files of it are removed or committed"
            );
        }
        // Half of the time until it is full, if it goes on like this.
        let left = limit.saturating_sub(used) as f64 / 2.0 / grown.max(1) as f64;
        Ok(in_time.mul_f64(left.min(1e6)).clamp(COUNT_MIN, COUNT_MAX))
    }

    fn look_at_scratch(&self, id: &str, record: &ScratchRecord, seal: Seal) -> Result<u64> {
        let path = self.store.scratch_path(record.device, id)?;
        count(&path, seal).map_err(|e| Error::io(e, Side::Cache, path.display().to_string()))
    }

    /// Allows writes to all files of a directory, and makes them removable.
    fn unseal(&self, id: &str, record: &ScratchRecord) -> Result<()> {
        if !self.scratch.known.lock().get(id).is_some_and(|known| known.is_full) {
            return Ok(());
        }
        self.look_at_scratch(id, record, Seal::Clear)?;
        if let Some(known) = self.scratch.known.lock().get_mut(id) {
            known.is_full = false;
        }
        Ok(())
    }

    /// Makes the space budget and the quotas count what a directory occupies, or its limit if that is more and there is
    /// room for it: what a commit took out of it is counted as content. Returns the limit that it has now.
    fn charge_scratch(&self, id: &str, used: u64) -> Option<u64> {
        let mut all = self.scratch.known.lock();
        let known = all.get_mut(id)?;
        let mut limit = known.record.limit_bytes;
        let least = known.charged_bytes.max(used);
        let mut is = limit.unwrap_or(0).max(used);
        let mut _promised = None;
        if is > least {
            let owner = FileOwner { uid: known.record.uid, gid: known.record.gid };
            let more = is - known.charged_bytes;
            match self.quotas.promise(owner, more, 0) {
                // Other files of its owner have taken it.
                Err(refusal) if matches!(refusal.why, QuotaShortage::Full | QuotaShortage::Never) => {
                    (is, limit) = (least, Some(least));
                }
                Err(_) => is = least,
                Ok(promise) => match self.store.budget.reserve(more) {
                    Some(_) => _promised = Some(promise),
                    None => is = least,
                },
            }
        }
        self.store.account_on(known.record.device, known.charged_bytes, is);
        known.charged_bytes = is;
        self.charge_owner_of_scratch(id, Some(known));
        limit
    }

    /// Charges the quotas of the owner of a directory. Call it under the lock of the known directories.
    fn charge_owner_of_scratch(&self, id: &str, known: Option<&KnownScratch>) {
        let has = known.map(|known| {
            let owner = FileOwner { uid: known.record.uid, gid: known.record.gid };
            (owner, known.charged_bytes)
        });
        self.quotas.charge(&SpaceHolder::Scratch(id.to_owned()), has);
    }

    /// Returns the directories with their owners and their counted bytes.
    pub(crate) fn scratch_charges(&self) -> Vec<(String, FileOwner, u64)> {
        let all = self.scratch.known.lock();
        let charges = all.iter().map(|(id, known)| {
            let owner = FileOwner { uid: known.record.uid, gid: known.record.gid };
            (id.clone(), owner, known.charged_bytes)
        });
        charges.collect()
    }

    /// Charges the quotas of all owners of directories.
    pub(crate) fn charge_all_scratch(&self) {
        let all = self.scratch.known.lock();
        all.iter().for_each(|(id, known)| self.charge_owner_of_scratch(id, Some(known)));
    }
}

fn invalid(why: String) -> Error {
    Error::new(ErrorKind::InvalidInput, Side::Application, why)
}

fn missing(dir: &ScratchDir) -> Error {
    let ScratchDir { id, path, .. } = dir;
    let what = format!(
        "scratch directory {id} is not in the fast pool ({path}): if its file system is not mounted, mount it and start \
         again; `forebay scratch discard {id}` gives it up"
    );
    Error::new(ErrorKind::NotFound, Side::Application, what)
}

fn unknown(id: &str) -> Error {
    let what = format!("there is no scratch directory {id}: `forebay scratch list` shows those that exist");
    Error::new(ErrorKind::NotFound, Side::Application, what)
}
