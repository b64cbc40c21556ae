//! Quotas: what a user or a group may hold of the fast pool that eviction cannot free.
//!
//! Content that is not in the pool yet is charged to the owner and the group of its file, and what is reserved for a
//! scratch directory to those of the directory. Each change of a file charges it again, under the lock of its node, in
//! the step that makes the change visible. So the counts follow the catalog, and a daemon that starts, or gets its first
//! quota, counts once from the catalog (`Inner::count_quotas`); until that has ended, writes wait.
//!
//! Before a write takes space, or a file becomes dirty, it is promised ([`Quotas::promise`]). Leases are counted when a
//! staging begins (`report.rs`).

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_catalog::{Catalog, InodeRecord};
use forebay_policy::{QuotaLimits, QuotaPolicy, QuotaSubject};
use forebay_system::clock::unix_now;
use parking_lot::Mutex;
use smallvec::{SmallVec, smallvec};

use crate::Ino;

mod report;

/// The key of the catalog under which the begins of exceeded soft limits are kept.
const KEY: &str = "quotas_exceeded_since";
/// The interval of log messages about one quota.
const TOLD_EVERY: Duration = Duration::from_secs(10);

/// To whom a file belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileOwner {
    pub uid: u32,
    pub gid: u32,
}

impl FileOwner {
    pub fn of(record: &InodeRecord) -> Self {
        Self { uid: record.uid, gid: record.gid }
    }

    fn subjects(self) -> [QuotaSubject; 2] {
        [QuotaSubject::User(self.uid), QuotaSubject::Group(self.gid)]
    }
}

/// What takes space.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum SpaceHolder {
    /// A file with dirty content.
    File(Ino),
    Scratch(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Charge {
    owner: FileOwner,
    bytes: u64,
    files: u64,
}

/// Something that is limited, softly and hard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QuotaResource {
    Bytes,
    Files,
}

impl fmt::Display for QuotaResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Bytes { "bytes" } else { "files" })
    }
}

/// How much of one resource a subject has.
#[derive(Debug, Default, Clone, Copy)]
struct Amount {
    used: u64,
    promised: u64,
    /// Since when `used` exceeds the soft limit, in seconds since 1970.
    exceeded_unix: Option<u64>,
}

/// The limits of one resource.
#[derive(Debug, Clone, Copy)]
struct Limit {
    soft: Option<u64>,
    hard: Option<u64>,
    grace: Duration,
}

impl Limit {
    fn of(limits: &QuotaLimits, resource: QuotaResource) -> Self {
        let (soft, hard) = match resource {
            QuotaResource::Bytes => (limits.soft_bytes, limits.bytes),
            QuotaResource::Files => (limits.soft_files, limits.files),
        };
        Self { soft, hard, grace: limits.grace }
    }

    fn grace_left_secs(self, exceeded_unix: Option<u64>, now: u64) -> Option<u64> {
        exceeded_unix.map(|since| since.saturating_add(self.grace.as_secs()).saturating_sub(now))
    }
}

impl Amount {
    /// Returns how much more fits.
    fn room(self, limit: Limit, now: u64) -> u64 {
        let is_over = limit.grace_left_secs(self.exceeded_unix, now) == Some(0);
        let soft = limit.soft.filter(|_| is_over);
        let most = soft.into_iter().chain(limit.hard).min().unwrap_or(u64::MAX);
        most.saturating_sub(self.used).saturating_sub(self.promised)
    }

    /// Whether nine tenths are taken. Then files are flushed without waiting until they are old enough.
    fn is_pressed(self, limit: Limit) -> bool {
        let least = limit.soft.into_iter().chain(limit.hard).min();
        least.is_some_and(|least| self.used.saturating_add(self.promised) >= least / 10 * 9)
    }

    /// Takes up a new count. `is_final`: everything has been counted since the start.
    fn settle(&mut self, limit: Limit, now: u64, is_final: bool) {
        let exceeds = limit.soft.is_some_and(|soft| self.used > soft);
        match (exceeds, is_final) {
            (true, _) => _ = self.exceeded_unix.get_or_insert(now),
            (false, true) => self.exceeded_unix = None,
            (false, false) => {}
        }
    }
}

/// What one user or group has.
#[derive(Debug, Default)]
struct Account {
    limits: QuotaLimits,
    bytes: Amount,
    files: Amount,
    /// Writes that wait for a promise.
    waiting: u64,
    told: Option<Instant>,
}

impl Account {
    fn amount(&self, resource: QuotaResource) -> Amount {
        if resource == QuotaResource::Bytes { self.bytes } else { self.files }
    }

    fn room(&self, resource: QuotaResource, now: u64) -> u64 {
        self.amount(resource).room(Limit::of(&self.limits, resource), now)
    }

    fn is_pressed(&self) -> bool {
        let of = |resource| self.amount(resource).is_pressed(Limit::of(&self.limits, resource));
        self.waiting > 0 || of(QuotaResource::Bytes) || of(QuotaResource::Files)
    }

    fn settle(&mut self, now: u64, is_final: bool) {
        self.bytes.settle(Limit::of(&self.limits, QuotaResource::Bytes), now, is_final);
        self.files.settle(Limit::of(&self.limits, QuotaResource::Files), now, is_final);
    }

    fn is_idle(&self) -> bool {
        let has = |amount: Amount| amount.used > 0 || amount.promised > 0 || amount.exceeded_unix.is_some();
        !has(self.bytes) && !has(self.files) && self.waiting == 0
    }
}

#[derive(Debug, Default)]
struct QuotaLedger {
    policy: QuotaPolicy,
    accounts: HashMap<QuotaSubject, Account>,
    charges: HashMap<SpaceHolder, Charge>,
    /// How many charges each pair of a group and a user has.
    members: HashMap<(u32, u32), u64>,
    /// What [`Quotas::save`] has written.
    saved: ExceededSince,
}

/// Since when which soft limits are exceeded: the subjects that exceed any, with the begins for bytes and for files.
type ExceededSince = BTreeMap<QuotaSubjectKey, (Option<u64>, Option<u64>)>;
/// Whether it is a group, and its number.
type QuotaSubjectKey = (bool, u32);

fn subject_of(key: QuotaSubjectKey) -> QuotaSubject {
    if key.0 { QuotaSubject::Group(key.1) } else { QuotaSubject::User(key.1) }
}

fn key_of(subject: QuotaSubject) -> QuotaSubjectKey {
    match subject {
        QuotaSubject::User(uid) => (false, uid),
        QuotaSubject::Group(gid) => (true, gid),
    }
}

/// The counts of one mount.
#[derive(Debug)]
pub(crate) struct Quotas {
    ledger: Mutex<QuotaLedger>,
    /// There are quotas, so everything is charged.
    counts: AtomicBool,
    /// What was there before the charging began is charged, too.
    is_complete: AtomicBool,
}

/// A quota that does not allow something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QuotaRefusal {
    pub subject: QuotaSubject,
    pub resource: QuotaResource,
}

impl Quotas {
    /// Creates the counts, with what the last daemon knew of exceeded soft limits.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn open(policy: &QuotaPolicy, catalog: &Catalog) -> Result<Arc<Self>> {
        let quotas =
            Self { ledger: Mutex::default(), counts: AtomicBool::new(false), is_complete: AtomicBool::new(true) };
        let saved: ExceededSince = catalog.meta(KEY)?.unwrap_or_default();
        {
            let mut ledger = quotas.ledger.lock();
            for (key, (bytes, files)) in &saved {
                let account = ledger.accounts.entry(subject_of(*key)).or_default();
                (account.bytes.exceeded_unix, account.files.exceeded_unix) = (*bytes, *files);
            }
            ledger.saved = saved;
        }
        quotas.set_policy(policy);
        Ok(Arc::new(quotas))
    }

    /// Puts quotas into force. Returns whether what is there must be counted: `Inner::count_quotas` does.
    pub fn set_policy(&self, policy: &QuotaPolicy) -> bool {
        let mut ledger = self.ledger.lock();
        ledger.policy = policy.clone();
        if policy.is_empty() {
            self.counts.store(false, Ordering::Release);
            self.is_complete.store(true, Ordering::Release);
            *ledger = QuotaLedger { saved: std::mem::take(&mut ledger.saved), ..QuotaLedger::default() };
            return false;
        }
        let (now, is_final) = (unix_now(), self.is_complete());
        let begins = !self.counts.swap(true, Ordering::AcqRel);
        for (subject, account) in &mut ledger.accounts {
            account.limits = policy.limits_of(*subject);
            account.settle(now, is_final && !begins);
        }
        if begins {
            self.is_complete.store(false, Ordering::Release);
        }
        begins
    }

    /// Whether there are quotas.
    pub fn count(&self) -> bool {
        self.counts.load(Ordering::Acquire)
    }

    /// Whether everything is counted, so that promises can be made.
    pub fn is_complete(&self) -> bool {
        self.is_complete.load(Ordering::Acquire)
    }

    /// Everything is counted.
    pub fn complete(&self) {
        let mut ledger = self.ledger.lock();
        let now = unix_now();
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
        let was = match has {
            Some(has) => ledger.charges.insert(holder.clone(), has),
            None => ledger.charges.remove(holder),
        };
        // The policy may have lost its last quota since.
        if was == has || !self.count() {
            return;
        }
        let (now, is_final) = (unix_now(), self.is_complete());
        if let Some(was) = was {
            ledger.change(was, |amount, by| *amount -= by);
            ledger.leave(was.owner);
        }
        if let Some(has) = has {
            ledger.change(has, |amount, by| *amount += by);
            *ledger.members.entry((has.owner.gid, has.owner.uid)).or_default() += 1;
        }
        // Only now: a file that is charged again must not end a soft limit's grace for a moment.
        let subjects = was.into_iter().chain(has).flat_map(|charge| charge.owner.subjects());
        for subject in subjects {
            ledger.account(subject).settle(now, is_final);
            ledger.forget_idle([subject]);
        }
    }

    /// Returns how many more bytes files of an owner may take. Files of root have no quota.
    pub fn room_bytes(&self, owner: FileOwner) -> u64 {
        if !self.count() || owner.uid == 0 {
            return u64::MAX;
        }
        if !self.is_complete() {
            return 0;
        }
        let (ledger, now) = (self.ledger.lock(), unix_now());
        let rooms = owner.subjects().map(|subject| ledger.room(subject, QuotaResource::Bytes, now));
        rooms.into_iter().min().unwrap_or(u64::MAX)
    }

    /// Returns the least room of all that hold something.
    pub fn least_room_bytes(&self) -> u64 {
        if !self.count() {
            return u64::MAX;
        }
        let (ledger, now) = (self.ledger.lock(), unix_now());
        let rooms = ledger.accounts.values().map(|account| account.room(QuotaResource::Bytes, now));
        rooms.min().unwrap_or(u64::MAX)
    }

    /// Whether files of a user are to be flushed without waiting until they are old enough.
    pub fn is_pressed(&self, user: u32) -> bool {
        if !self.count() {
            return false;
        }
        let ledger = self.ledger.lock();
        let pressed = |subject| ledger.accounts.get(&subject).is_some_and(Account::is_pressed);
        pressed(QuotaSubject::User(user))
            || ledger.members.keys().any(|(gid, uid)| *uid == user && pressed(QuotaSubject::Group(*gid)))
    }

    /// Promises room for bytes and files of an owner.
    ///
    /// # Errors
    /// The quota that does not allow it. Also while not everything is counted.
    pub fn promise(
        self: &Arc<Self>,
        owner: FileOwner,
        bytes: u64,
        files: u64,
    ) -> std::result::Result<QuotaPromise, QuotaRefusal> {
        let subjects: &[QuotaSubject] = if owner.uid == 0 { &[] } else { &owner.subjects() };
        self.promise_to(subjects, bytes, files)
    }

    /// As [`Self::promise`], for some of the subjects of an owner.
    pub fn promise_to(
        self: &Arc<Self>,
        subjects: &[QuotaSubject],
        bytes: u64,
        files: u64,
    ) -> std::result::Result<QuotaPromise, QuotaRefusal> {
        let promised = |subjects| QuotaPromise { quotas: self.clone(), subjects, bytes, files };
        if !self.count() || subjects.is_empty() || (bytes, files) == (0, 0) {
            return Ok(promised(smallvec![]));
        }
        let (mut ledger, now) = (self.ledger.lock(), unix_now());
        for subject in subjects {
            for (resource, wanted) in [(QuotaResource::Bytes, bytes), (QuotaResource::Files, files)] {
                let fits = wanted == 0 || (self.is_complete() && ledger.room(*subject, resource, now) >= wanted);
                if !fits {
                    return Err(QuotaRefusal { subject: *subject, resource });
                }
            }
        }
        for subject in subjects {
            let account = ledger.account(*subject);
            account.bytes.promised += bytes;
            account.files.promised += files;
        }
        Ok(promised(subjects.into()))
    }

    /// Returns what a refusing subject has of the resource.
    pub fn used(&self, refusal: QuotaRefusal) -> u64 {
        let ledger = self.ledger.lock();
        ledger.accounts.get(&refusal.subject).map_or(0, |account| account.amount(refusal.resource).used)
    }

    /// Returns some files of a subject whose content is not in the pool yet: at most `most`.
    pub fn dirty_files_of(&self, subject: QuotaSubject, most: usize) -> Vec<Ino> {
        let ledger = self.ledger.lock();
        let of_subject = ledger.charges.iter().filter(|(_, charge)| charge.owner.subjects().contains(&subject));
        let inos = of_subject.filter_map(|(holder, _)| match holder {
            SpaceHolder::File(ino) => Some(*ino),
            SpaceHolder::Scratch(_) => None,
        });
        inos.take(most).collect()
    }

    /// Counts a write that waits, so that the flush hurries, until the returned value is dropped.
    pub fn wait(self: &Arc<Self>, subject: QuotaSubject) -> QuotaWait {
        self.ledger.lock().account(subject).waiting += 1;
        QuotaWait { quotas: self.clone(), subject }
    }

    /// Returns the error of a refusal of bytes and files. Also logs it, at most once in `TOLD_EVERY`.
    pub fn refused(&self, refusal: QuotaRefusal, bytes: u64, files: u64) -> Error {
        let QuotaRefusal { subject, resource } = refusal;
        let wanted = if resource == QuotaResource::Bytes { bytes } else { files };
        let (mut ledger, now) = (self.ledger.lock(), unix_now());
        let account = ledger.account(subject);
        let amount = account.amount(resource);
        let limit = Limit::of(&account.limits, resource);
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
        if account.told.is_none_or(|told| told.elapsed() >= TOLD_EVERY) {
            account.told = Some(Instant::now());
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
        let mut ledger = self.ledger.lock();
        let exceeded = ledger.accounts.iter().filter_map(|(subject, account)| {
            let since = (account.bytes.exceeded_unix, account.files.exceeded_unix);
            (since != (None, None)).then(|| (key_of(*subject), since))
        });
        let exceeded: ExceededSince = exceeded.collect();
        if exceeded != ledger.saved {
            catalog.set_meta(KEY, &exceeded)?;
            ledger.saved = exceeded;
        }
        Ok(())
    }
}

impl QuotaLedger {
    fn account(&mut self, subject: QuotaSubject) -> &mut Account {
        let policy = &self.policy;
        self.accounts
            .entry(subject)
            .or_insert_with(|| Account { limits: policy.limits_of(subject), ..Account::default() })
    }

    fn room(&self, subject: QuotaSubject, resource: QuotaResource, now: u64) -> u64 {
        match self.accounts.get(&subject) {
            Some(account) => account.room(resource, now),
            None => Amount::default().room(Limit::of(&self.policy.limits_of(subject), resource), now),
        }
    }

    fn change(&mut self, charge: Charge, change: impl Fn(&mut u64, u64)) {
        for subject in charge.owner.subjects() {
            let account = self.account(subject);
            change(&mut account.bytes.used, charge.bytes);
            change(&mut account.files.used, charge.files);
        }
    }

    fn leave(&mut self, owner: FileOwner) {
        let key = (owner.gid, owner.uid);
        if let Some(count) = self.members.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                self.members.remove(&key);
            }
        }
    }

    fn forget_idle(&mut self, subjects: impl IntoIterator<Item = QuotaSubject>) {
        for subject in subjects {
            if self.accounts.get(&subject).is_some_and(Account::is_idle) {
                self.accounts.remove(&subject);
            }
        }
    }
}

/// Room for bytes and files. It is given back when dropped: by then they are charged.
#[derive(Debug)]
pub(crate) struct QuotaPromise {
    quotas: Arc<Quotas>,
    subjects: SmallVec<[QuotaSubject; 2]>,
    bytes: u64,
    files: u64,
}

impl Drop for QuotaPromise {
    fn drop(&mut self) {
        if self.subjects.is_empty() {
            return;
        }
        let mut ledger = self.quotas.ledger.lock();
        for subject in &self.subjects {
            // A policy without quotas may have been in force meanwhile.
            if let Some(account) = ledger.accounts.get_mut(subject) {
                account.bytes.promised = account.bytes.promised.saturating_sub(self.bytes);
                account.files.promised = account.files.promised.saturating_sub(self.files);
            }
        }
        ledger.forget_idle(self.subjects.iter().copied());
    }
}

/// A write that waits for a promise.
#[derive(Debug)]
pub(crate) struct QuotaWait {
    quotas: Arc<Quotas>,
    subject: QuotaSubject,
}

impl Drop for QuotaWait {
    fn drop(&mut self) {
        let mut ledger = self.quotas.ledger.lock();
        if let Some(account) = ledger.accounts.get_mut(&self.subject) {
            account.waiting = account.waiting.saturating_sub(1);
        }
        ledger.forget_idle([self.subject]);
    }
}

#[cfg(test)]
mod tests;
