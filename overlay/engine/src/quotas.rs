//! Quotas: what a user or a group may hold of the fast pool that eviction cannot free.
//!
//! Content that is not in the pool yet is charged to the owner and the group of its file, and the space of a scratch
//! directory to those of the directory. Each change of a file charges it again, under the lock of its node, in the step
//! that makes the change visible. So the counts follow the catalog. A daemon that starts, or gets its first quota, counts
//! once from the catalog (`Inner::count_quotas`); until that has ended, writers with a limit wait.
//!
//! Before a write takes space, or a file becomes dirty, room for it is promised ([`Quotas::promise`],
//! `space/owner_room.rs`). Leases are counted when a staging begins (`staged.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_catalog::Catalog;
use forebay_policy::{QuotaPolicy, QuotaSubject};
use forebay_system::clock::unix_now;
use parking_lot::Mutex;
use smallvec::{SmallVec, smallvec};

use crate::Ino;

mod ledger;
mod report;
mod staged;

pub(crate) use staged::{StageUnderWay, StagesUnderWay};

use ledger::{Charge, ExceededSince, Limit, QuotaAccount, QuotaAmount, QuotaLedger, key_of, subject_of};
pub(crate) use ledger::{FileOwner, QuotaRefusal, QuotaResource, QuotaRoom, QuotaShortage, SpaceHolder};

/// The key of the catalog under which the begins of exceeded soft limits are kept.
const KEY: &str = "quotas_exceeded_since";
/// How long the answer whether the flush can make room for a user or a group is used again: many writers may need it.
const HOPE_KNOWN_FOR: Duration = Duration::from_millis(500);

/// The counts of one mount.
#[derive(Debug)]
pub(crate) struct Quotas {
    ledger: Mutex<QuotaLedger>,
    /// Something is limited, so everything is charged.
    counts: AtomicBool,
    /// What was there before the charging began is charged, too.
    is_complete: AtomicBool,
    /// How many files may have become ones that the flush can send.
    closes: AtomicU64,
}

impl Quotas {
    /// Creates the counts, with what the last daemon knew of exceeded soft limits.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn open(policy: &QuotaPolicy, catalog: &Catalog) -> Result<Arc<Self>> {
        let quotas = Self::new();
        quotas.ledger.lock().saved = catalog.meta(KEY)?.unwrap_or_default();
        quotas.set_policy(policy);
        Ok(Arc::new(quotas))
    }

    fn new() -> Self {
        Self {
            ledger: Mutex::default(),
            counts: AtomicBool::new(false),
            is_complete: AtomicBool::new(true),
            closes: AtomicU64::new(0),
        }
    }

    /// Puts quotas into force. If what is there must be counted, returns the number of the count, for
    /// [`Self::complete`].
    pub fn set_policy(&self, policy: &QuotaPolicy) -> Option<u64> {
        let (mut ledger, now) = (self.ledger.lock(), unix_now());
        let begins = policy.limits_use() && !self.count();
        if begins || !policy.limits_use() {
            let QuotaLedger { saved, told, generation, .. } = std::mem::take(&mut *ledger);
            *ledger = QuotaLedger { saved, told, generation: generation + 1, ..QuotaLedger::default() };
        }
        ledger.policy = policy.clone();
        for (subject, account) in &mut ledger.accounts {
            account.limits = policy.limits_of(*subject);
            account.settle(now, self.is_complete());
        }
        if begins {
            let saved = ledger.saved.clone();
            for (key, (bytes, files)) in saved {
                let account = ledger.account(subject_of(key));
                (account.bytes.exceeded_unix, account.files.exceeded_unix) = (bytes, files);
            }
        }
        self.is_complete.store(!policy.limits_use() || (!begins && self.is_complete()), Ordering::Release);
        self.counts.store(policy.limits_use(), Ordering::Release);
        begins.then_some(ledger.generation)
    }

    /// Whether anything is limited.
    pub fn count(&self) -> bool {
        self.counts.load(Ordering::Acquire)
    }

    /// Whether everything is counted.
    pub fn is_complete(&self) -> bool {
        self.is_complete.load(Ordering::Acquire)
    }

    /// Returns the number of the present count.
    pub fn generation(&self) -> u64 {
        self.ledger.lock().generation
    }

    /// Everything is counted, if no later count has begun.
    pub fn complete(&self, generation: u64) {
        let (mut ledger, now) = (self.ledger.lock(), unix_now());
        if ledger.generation != generation {
            return;
        }
        ledger.accounts.values_mut().for_each(|account| account.settle(now, true));
        ledger.accounts.retain(|_, account| !account.is_idle());
        self.is_complete.store(true, Ordering::Release);
    }

    /// Charges what a holder has; `None`: it has nothing any more. Call it under the lock of what holds the space.
    pub fn charge(&self, holder: &SpaceHolder, has: Option<(FileOwner, u64)>) {
        if !self.count() {
            return;
        }
        let files = u64::from(matches!(holder, SpaceHolder::File(_)));
        let has = has.map(|(owner, bytes)| Charge { owner, bytes, files });
        let mut ledger = self.ledger.lock();
        if !self.count() {
            return;
        }
        let was = match has {
            Some(has) => ledger.charges.insert(holder.clone(), has),
            None => ledger.charges.remove(holder),
        };
        if was == has {
            return;
        }
        let (now, is_final) = (unix_now(), self.is_complete());
        if let Some(was) = was {
            ledger.take_off(holder, was);
        }
        if let Some(has) = has {
            ledger.put_on(holder, has);
        }
        // Only now: a file that is charged again must not end a soft limit's grace for a moment.
        let subjects = was.into_iter().chain(has).flat_map(|charge| charge.owner.subjects());
        for subject in subjects {
            ledger.account(subject).settle(now, is_final);
            ledger.forget_idle(subject);
        }
    }

    /// Returns how many more bytes files of an owner may take; `None`: not everything is counted yet. Files of root have
    /// no quota.
    pub fn room_bytes(&self, owner: FileOwner) -> Option<u64> {
        if !self.count() || owner.uid == 0 {
            return Some(u64::MAX);
        }
        let (ledger, now) = (self.ledger.lock(), unix_now());
        let rooms = owner.subjects().map(|subject| ledger.room(subject, QuotaResource::Bytes, now));
        let room = rooms.into_iter().min().unwrap_or(u64::MAX);
        (room == u64::MAX || self.is_complete()).then_some(room)
    }

    /// Returns what a user or a group may hold in all, and what is left of it.
    pub fn room_of(&self, subject: QuotaSubject) -> QuotaRoom {
        let (ledger, now) = (self.ledger.lock(), unix_now());
        let limits = ledger.policy.limits_of(subject);
        let of = |resource| {
            let Limit { soft, hard, .. } = Limit::of(&limits, resource);
            Some((hard.or(soft)?, ledger.room(subject, resource, now)))
        };
        QuotaRoom { bytes: of(QuotaResource::Bytes), files: of(QuotaResource::Files) }
    }

    /// Returns a refusal of bytes that are more than the whole quota of an owner.
    pub fn never_fits(&self, owner: FileOwner, bytes: u64) -> Option<QuotaRefusal> {
        if !self.count() || owner.uid == 0 {
            return None;
        }
        let (ledger, now) = (self.ledger.lock(), unix_now());
        let refusals = owner.subjects().map(|subject| ledger.shortage(subject, QuotaResource::Bytes, bytes, now, true));
        refusals.into_iter().flatten().find(|refusal| refusal.why == QuotaShortage::Never)
    }

    /// Whether files of a user are to be flushed without waiting until they are old enough.
    pub fn is_pressed(&self, user: u32) -> bool {
        if !self.count() {
            return false;
        }
        let ledger = self.ledger.lock();
        let pressed = |subject| ledger.accounts.get(&subject).is_some_and(QuotaAccount::is_pressed);
        let mut groups = ledger.members.range((user, 0)..=(user, u32::MAX)).map(|((_, gid), _)| *gid);
        pressed(QuotaSubject::User(user)) || groups.any(|gid| pressed(QuotaSubject::Group(gid)))
    }

    /// Promises room for bytes and files of an owner.
    ///
    /// # Errors
    /// The quota that does not allow it.
    pub fn promise(
        self: &Arc<Self>,
        owner: FileOwner,
        bytes: u64,
        files: u64,
    ) -> std::result::Result<QuotaPromise, QuotaRefusal> {
        self.promise_to(&owner.limited(), bytes, files)
    }

    /// As [`Self::promise`], for some of the subjects of an owner.
    pub fn promise_to(
        self: &Arc<Self>,
        subjects: &[QuotaSubject],
        bytes: u64,
        files: u64,
    ) -> std::result::Result<QuotaPromise, QuotaRefusal> {
        let promised = |subjects, generation| QuotaPromise { quotas: self.clone(), subjects, bytes, files, generation };
        if !self.count() || subjects.is_empty() || (bytes, files) == (0, 0) {
            return Ok(promised(smallvec![], 0));
        }
        let (mut ledger, now) = (self.ledger.lock(), unix_now());
        for subject in subjects {
            for (resource, wanted) in [(QuotaResource::Bytes, bytes), (QuotaResource::Files, files)] {
                if let Some(refusal) = ledger.shortage(*subject, resource, wanted, now, self.is_complete()) {
                    return Err(refusal);
                }
            }
        }
        for subject in subjects {
            let account = ledger.account(*subject);
            account.bytes.promised += bytes;
            account.files.promised += files;
        }
        Ok(promised(subjects.into(), ledger.generation))
    }

    /// Returns what a refusing subject has of the resource.
    pub fn used(&self, refusal: QuotaRefusal) -> u64 {
        let ledger = self.ledger.lock();
        ledger.accounts.get(&refusal.subject).map_or(0, |account| account.amount(refusal.resource).used)
    }

    /// Returns some files of a subject whose content is not in the pool yet: at most `most`.
    pub fn dirty_files_of(&self, subject: QuotaSubject, most: usize) -> Vec<Ino> {
        let ledger = self.ledger.lock();
        let files = ledger.files.range((subject, Ino(0))..=(subject, Ino(u64::MAX)));
        files.take(most).map(|(_, ino)| *ino).collect()
    }

    /// Returns the users who have charges of a subject.
    pub fn users_of_subject(&self, subject: QuotaSubject) -> Vec<u32> {
        match subject {
            QuotaSubject::User(uid) => vec![uid],
            QuotaSubject::Group(group) => {
                let ledger = self.ledger.lock();
                ledger.members.keys().filter(|(_, gid)| *gid == group).map(|(uid, _)| *uid).collect()
            }
        }
    }

    /// Called when a file may have become one that the flush can send.
    pub fn room_may_come(&self) {
        self.closes.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns what was found out a moment ago: whether the flush can make room for a subject.
    pub fn known_hope(&self, subject: QuotaSubject) -> Option<bool> {
        let closes = self.closes.load(Ordering::Relaxed);
        let hope = self.ledger.lock().accounts.get(&subject)?.hope;
        let (_, _, is_hoped) =
            hope.filter(|(at, after, is_hoped)| at.elapsed() < HOPE_KNOWN_FOR && (*is_hoped || *after == closes))?;
        Some(is_hoped)
    }

    /// Returns how many files may have become ones that the flush can send, for [`Self::note_hope`].
    pub fn closes(&self) -> u64 {
        self.closes.load(Ordering::Relaxed)
    }

    /// Notes whether the flush can make room for a subject. `closes`: those before it was looked.
    pub fn note_hope(&self, subject: QuotaSubject, closes: u64, is_hoped: bool) {
        if let Some(account) = self.ledger.lock().accounts.get_mut(&subject) {
            account.hope = Some((Instant::now(), closes, is_hoped));
        }
    }

    /// Counts a write that waits, so that the flush hurries, until the returned value is dropped.
    pub fn wait(self: &Arc<Self>, subject: QuotaSubject) -> QuotaWait {
        let mut ledger = self.ledger.lock();
        ledger.account(subject).waiting += 1;
        QuotaWait { quotas: self.clone(), subject, generation: ledger.generation }
    }

    /// Returns the error of a refusal of bytes and files. Also logs it, at most once in `TOLD_EVERY`.
    pub fn refused(&self, refusal: QuotaRefusal, bytes: u64, files: u64) -> Error {
        let QuotaRefusal { subject, resource, .. } = refusal;
        let wanted = if resource == QuotaResource::Bytes { bytes } else { files };
        let (mut ledger, now) = (self.ledger.lock(), unix_now());
        let limit = Limit::of(&ledger.policy.limits_of(subject), resource);
        let amount =
            ledger.accounts.get(&subject).map_or_else(QuotaAmount::default, |account| account.amount(resource));
        let shown = |limit: Option<u64>| limit.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string());
        let bound = match limit.grace_left_secs(amount.exceeded_unix, now) {
            Some(0) => format!(
                "more than its soft limit of {}, for longer than {}",
                shown(limit.soft),
                humantime::format_duration(limit.grace)
            ),
            _ => format!("and its quota is {}", shown(limit.hard)),
        };
        let why = format!(
            "{wanted} {resource} do not fit: {subject} has {} {resource} on this node that are not in the pool yet, {bound} \
             (`forebay quota show`)",
            amount.used.saturating_add(amount.promised),
        );
        if ledger.may_tell(subject) {
            tracing::warn!("{why}");
        }
        Error::new(ErrorKind::Quota, Side::Cache, why)
    }

    /// Writes to the catalog since when soft limits are exceeded, if that has changed.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn save(&self, catalog: &Catalog) -> Result<()> {
        if !self.is_complete() {
            return Ok(());
        }
        let exceeded: ExceededSince = {
            let ledger = self.ledger.lock();
            let since = |account: &QuotaAccount| (account.bytes.exceeded_unix, account.files.exceeded_unix);
            let all = ledger.accounts.iter().map(|(subject, account)| (key_of(*subject), since(account)));
            let exceeded = all.filter(|(_, since)| *since != (None, None)).collect();
            if exceeded == ledger.saved {
                return Ok(());
            }
            exceeded
        };
        catalog.set_meta(KEY, &exceeded)?;
        self.ledger.lock().saved = exceeded;
        Ok(())
    }
}

/// Room for bytes and files. It is given back when dropped: by then they are charged.
#[derive(Debug)]
pub(crate) struct QuotaPromise {
    quotas: Arc<Quotas>,
    subjects: SmallVec<[QuotaSubject; 2]>,
    bytes: u64,
    files: u64,
    generation: u64,
}

impl Drop for QuotaPromise {
    fn drop(&mut self) {
        if self.subjects.is_empty() {
            return;
        }
        let mut ledger = self.quotas.ledger.lock();
        if ledger.generation != self.generation {
            return;
        }
        for subject in &self.subjects {
            let account = ledger.account(*subject);
            account.bytes.promised -= self.bytes;
            account.files.promised -= self.files;
            ledger.forget_idle(*subject);
        }
    }
}

/// A write that waits for a promise.
#[derive(Debug)]
pub(crate) struct QuotaWait {
    quotas: Arc<Quotas>,
    subject: QuotaSubject,
    generation: u64,
}

impl Drop for QuotaWait {
    fn drop(&mut self) {
        let mut ledger = self.quotas.ledger.lock();
        if ledger.generation == self.generation {
            ledger.account(self.subject).waiting -= 1;
            ledger.forget_idle(self.subject);
        }
    }
}

#[cfg(test)]
mod tests;
