//! What users and groups have, and what they may have.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::time::{Duration, Instant};

use forebay_catalog::InodeRecord;
use forebay_policy::{QuotaLimits, QuotaPolicy, QuotaSubject};
use smallvec::SmallVec;

use crate::{Ino, Space};

/// The interval of log messages about one quota.
const TOLD_EVERY: Duration = Duration::from_secs(10);
/// Users and groups that log messages remember. Others may be told of again before the interval is over.
const TOLD_MAX: usize = 256;

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

    /// Returns those whose quotas refuse something to the owner: none for root.
    pub fn limited(self) -> SmallVec<[QuotaSubject; 2]> {
        if self.uid == 0 { SmallVec::new() } else { self.subjects().into() }
    }

    pub fn subjects(self) -> [QuotaSubject; 2] {
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
pub(super) struct Charge {
    pub owner: FileOwner,
    pub bytes: u64,
    pub files: u64,
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
pub(super) struct QuotaAmount {
    pub used: u64,
    pub promised: u64,
    /// Since when `used` exceeds the soft limit, in seconds since 1970.
    pub exceeded_unix: Option<u64>,
}

/// The limits of one resource.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limit {
    pub soft: Option<u64>,
    pub hard: Option<u64>,
    pub grace: Duration,
}

impl Limit {
    pub fn of(limits: &QuotaLimits, resource: QuotaResource) -> Self {
        let (soft, hard) = match resource {
            QuotaResource::Bytes => (limits.soft_bytes, limits.bytes),
            QuotaResource::Files => (limits.soft_files, limits.files),
        };
        Self { soft, hard, grace: limits.grace }
    }

    pub fn grace_left_secs(self, exceeded_unix: Option<u64>, now: u64) -> Option<u64> {
        exceeded_unix.map(|since| since.saturating_add(self.grace.as_secs()).saturating_sub(now))
    }
}

impl QuotaAmount {
    /// Returns how much there may be now.
    pub fn most(self, limit: Limit, now: u64) -> u64 {
        let is_over = limit.grace_left_secs(self.exceeded_unix, now) == Some(0);
        let soft = limit.soft.filter(|_| is_over);
        soft.into_iter().chain(limit.hard).min().unwrap_or(u64::MAX)
    }

    /// Returns how much more fits.
    pub fn room(self, limit: Limit, now: u64) -> u64 {
        self.most(limit, now).saturating_sub(self.used).saturating_sub(self.promised)
    }

    /// Whether nine tenths are taken. Then files are flushed without waiting until they are old enough.
    pub fn is_pressed(self, limit: Limit) -> bool {
        let least = limit.soft.into_iter().chain(limit.hard).min();
        let taken = u128::from(self.used) + u128::from(self.promised);
        taken > 0 && least.is_some_and(|least| taken * 10 >= u128::from(least) * 9)
    }

    /// Takes up a new count. `is_final`: everything has been counted since the start.
    pub fn settle(&mut self, limit: Limit, now: u64, is_final: bool) {
        let exceeds = limit.soft.is_some_and(|soft| self.used > soft);
        match (exceeds, is_final) {
            (true, _) => _ = self.exceeded_unix.get_or_insert(now),
            (false, true) => self.exceeded_unix = None,
            (false, false) => {}
        }
    }
}

/// What a quota allows: how much in all, and how much more. `None`: no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QuotaRoom {
    pub bytes: Option<(u64, u64)>,
    pub files: Option<(u64, u64)>,
}

impl QuotaRoom {
    /// Returns the part of some space that the quota allows. Space without a number of files has that of the quota.
    pub fn bounding(self, mut space: Space) -> Space {
        if let Some((all, left)) = self.bytes {
            space.total_bytes = space.total_bytes.min(all);
            space.free_bytes = space.free_bytes.min(left);
            space.available_bytes = space.available_bytes.min(left);
        }
        if let Some((all, left)) = self.files {
            let known = (space.total_files > 0).then_some((space.total_files, space.free_files));
            (space.total_files, space.free_files) =
                known.map_or((all, left), |(total, free)| (total.min(all), free.min(left)));
        }
        space
    }
}

/// What one user or group has.
#[derive(Debug, Default)]
pub(super) struct QuotaAccount {
    pub limits: QuotaLimits,
    pub bytes: QuotaAmount,
    pub files: QuotaAmount,
    /// Writes that wait for a promise.
    pub waiting: u64,
    /// When it was last looked whether the flush can make room, after how many last closes, and the result.
    pub hope: Option<(Instant, u64, bool)>,
}

impl QuotaAccount {
    pub fn amount(&self, resource: QuotaResource) -> QuotaAmount {
        if resource == QuotaResource::Bytes { self.bytes } else { self.files }
    }

    pub fn room(&self, resource: QuotaResource, now: u64) -> u64 {
        self.amount(resource).room(Limit::of(&self.limits, resource), now)
    }

    pub fn is_pressed(&self) -> bool {
        let of = |resource| self.amount(resource).is_pressed(Limit::of(&self.limits, resource));
        self.waiting > 0 || of(QuotaResource::Bytes) || of(QuotaResource::Files)
    }

    pub fn settle(&mut self, now: u64, is_final: bool) {
        self.bytes.settle(Limit::of(&self.limits, QuotaResource::Bytes), now, is_final);
        self.files.settle(Limit::of(&self.limits, QuotaResource::Files), now, is_final);
    }

    pub fn is_idle(&self) -> bool {
        let has = |amount: QuotaAmount| amount.used > 0 || amount.promised > 0 || amount.exceeded_unix.is_some();
        !has(self.bytes) && !has(self.files) && self.waiting == 0
    }
}

#[derive(Debug, Default)]
pub(super) struct QuotaLedger {
    pub policy: QuotaPolicy,
    pub accounts: HashMap<QuotaSubject, QuotaAccount>,
    pub charges: HashMap<SpaceHolder, Charge>,
    /// The files that are charged to each user and group.
    pub files: BTreeSet<(QuotaSubject, Ino)>,
    /// How many charges each pair of a user and a group has.
    pub members: BTreeMap<(u32, u32), u64>,
    /// What [`Quotas::save`] has written.
    pub saved: ExceededSince,
    /// Of whom a log message was about lately.
    pub told: HashMap<QuotaSubject, Instant>,
    /// How often the counting has begun. Promises of an earlier time are none any more.
    pub generation: u64,
}

/// Since when which soft limits are exceeded: the subjects that exceed any, with the begins for bytes and for files.
pub(super) type ExceededSince = BTreeMap<QuotaSubjectKey, (Option<u64>, Option<u64>)>;
/// Whether it is a group, and its number.
pub(super) type QuotaSubjectKey = (bool, u32);

pub(super) fn subject_of(key: QuotaSubjectKey) -> QuotaSubject {
    if key.0 { QuotaSubject::Group(key.1) } else { QuotaSubject::User(key.1) }
}

pub(super) fn key_of(subject: QuotaSubject) -> QuotaSubjectKey {
    match subject {
        QuotaSubject::User(uid) => (false, uid),
        QuotaSubject::Group(gid) => (true, gid),
    }
}

/// A quota that does not allow something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QuotaRefusal {
    pub subject: QuotaSubject,
    pub resource: QuotaResource,
    pub why: QuotaShortage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QuotaShortage {
    /// Not everything is counted yet.
    Uncounted,
    /// More than the whole quota.
    Never,
    /// It fits when others use less.
    Full,
    /// It fits if others do not take what was promised to them.
    Promised,
}

impl QuotaLedger {
    pub fn account(&mut self, subject: QuotaSubject) -> &mut QuotaAccount {
        let policy = &self.policy;
        self.accounts
            .entry(subject)
            .or_insert_with(|| QuotaAccount { limits: policy.limits_of(subject), ..QuotaAccount::default() })
    }

    pub fn room(&self, subject: QuotaSubject, resource: QuotaResource, now: u64) -> u64 {
        match self.accounts.get(&subject) {
            Some(account) => account.room(resource, now),
            None => QuotaAmount::default().room(Limit::of(&self.policy.limits_of(subject), resource), now),
        }
    }

    /// Returns why something does not fit.
    pub fn shortage(
        &self,
        subject: QuotaSubject,
        resource: QuotaResource,
        wanted: u64,
        now: u64,
        is_complete: bool,
    ) -> Option<QuotaRefusal> {
        let (limit, amount) = match self.accounts.get(&subject) {
            Some(account) => (Limit::of(&account.limits, resource), account.amount(resource)),
            None => (Limit::of(&self.policy.limits_of(subject), resource), QuotaAmount::default()),
        };
        let most = amount.most(limit, now);
        let is_limited = limit.hard.is_some() || limit.soft.is_some();
        let why = match wanted {
            0 => return None,
            _ if limit.hard.is_some_and(|hard| wanted > hard) => QuotaShortage::Never,
            _ if is_limited && !is_complete => QuotaShortage::Uncounted,
            _ if amount.used.saturating_add(wanted) > most => QuotaShortage::Full,
            _ if amount.room(limit, now) < wanted => QuotaShortage::Promised,
            _ => return None,
        };
        Some(QuotaRefusal { subject, resource, why })
    }

    pub fn put_on(&mut self, holder: &SpaceHolder, charge: Charge) {
        let FileOwner { uid, gid } = charge.owner;
        for subject in charge.owner.subjects() {
            let account = self.account(subject);
            account.bytes.used += charge.bytes;
            account.files.used += charge.files;
            if let SpaceHolder::File(ino) = holder {
                self.files.insert((subject, *ino));
            }
        }
        *self.members.entry((uid, gid)).or_default() += 1;
    }

    pub fn take_off(&mut self, holder: &SpaceHolder, charge: Charge) {
        let FileOwner { uid, gid } = charge.owner;
        for subject in charge.owner.subjects() {
            let account = self.account(subject);
            account.bytes.used -= charge.bytes;
            account.files.used -= charge.files;
            if let SpaceHolder::File(ino) = holder {
                self.files.remove(&(subject, *ino));
            }
        }
        if let Some(count) = self.members.get_mut(&(uid, gid)) {
            *count -= 1;
            if *count == 0 {
                self.members.remove(&(uid, gid));
            }
        }
    }

    pub fn forget_idle(&mut self, subject: QuotaSubject) {
        if self.accounts.get(&subject).is_some_and(QuotaAccount::is_idle) {
            self.accounts.remove(&subject);
        }
    }

    pub fn may_tell(&mut self, subject: QuotaSubject) -> bool {
        if self.told.get(&subject).is_some_and(|told| told.elapsed() < TOLD_EVERY) {
            return false;
        }
        if self.told.len() >= TOLD_MAX {
            self.told.retain(|_, told| told.elapsed() < TOLD_EVERY);
        }
        if self.told.len() < TOLD_MAX {
            self.told.insert(subject, Instant::now());
        }
        true
    }
}
