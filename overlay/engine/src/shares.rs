//! Bounds what each user of a mount takes from the other users: dirty bytes, open files and waiting requests.
//!
//! A user may take a share of what the other users left. So a single user gets that share of everything, and however
//! many users take as much as they may, something is left for one more. Root and the user who mounted are trusted and
//! have no share. Of their use, only open files are counted.
//!
//! Dirty bytes are charged to the owner of the file, as quotas are; open files and requests to the user that makes the
//! request.

mod open_files;

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_policy::SharePolicy;
use forebay_system::descriptors;
use parking_lot::Mutex;
use tokio::sync::Notify;

use self::open_files::{OpenCounts, OpenFileCounts};
use crate::Ino;

/// Requests of ordinary users that may wait for something at the same time.
const REQUESTS: usize = 1024;
/// Descriptors that files of trusted users cannot take either, so that the control socket always answers.
const DESCRIPTORS_LAST: u64 = 64;
/// The interval of log messages about one user's share.
const TOLD_EVERY: Duration = Duration::from_secs(10);
/// Users that file handles can name.
const SLOTS: usize = 1 << 24;

/// A user, as a file handle names it; 0 is a user without a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct UserSlot(pub u32);

#[derive(Debug, Default)]
struct Account {
    dirty_bytes: u64,
    /// Dirty bytes that are about to be written.
    promised_bytes: u64,
    requests: usize,
    turn: Arc<Notify>,
}

#[derive(Debug, Default)]
struct ShareLedger {
    users: HashMap<u32, Account>,
    /// Dirty files: the owner, and the bytes.
    dirty: HashMap<Ino, (u32, u64)>,
    dirty_bytes: u64,
}

/// The counts of one mount.
#[derive(Debug)]
pub struct Shares {
    policy: SharePolicy,
    dirty_max_bytes: u64,
    descriptors: u64,
    trusted: [u32; 2],
    ledger: Mutex<ShareLedger>,
    /// Counts of the ledger, which are read without its lock.
    waiting: AtomicUsize,
    charged: AtomicU64,
    open_files: OpenFileCounts,
    /// When a message about a user's share was logged last.
    told: Mutex<HashMap<u32, Instant>>,
}

impl Shares {
    /// Creates the shares of a fast pool of `dirty_max_bytes`, and of the descriptors that this process may have.
    pub fn new(policy: SharePolicy, dirty_max_bytes: u64) -> Arc<Self> {
        Self::with(policy, dirty_max_bytes, descriptors::allowed(), rustix::process::geteuid().as_raw())
    }

    fn with(policy: SharePolicy, dirty_max_bytes: u64, descriptors: u64, mounter: u32) -> Arc<Self> {
        Arc::new(Self {
            policy,
            dirty_max_bytes,
            descriptors,
            trusted: [0, mounter],
            ledger: Mutex::default(),
            waiting: AtomicUsize::new(0),
            charged: AtomicU64::new(0),
            open_files: OpenFileCounts::new(),
            told: Mutex::default(),
        })
    }

    /// Whether a user has a bound.
    pub fn has_share(&self, user: u32) -> bool {
        !self.is_trusted(user)
    }

    fn is_trusted(&self, user: u32) -> bool {
        self.trusted.contains(&user)
    }

    /// Charges a dirty file's bytes to a user; `None`: the file is not dirty.
    pub fn charge(&self, ino: Ino, dirty: Option<(u32, u64)>) {
        let dirty = dirty.filter(|(user, _)| !self.is_trusted(*user));
        if dirty.is_none() && self.charged.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut ledger = self.ledger.lock();
        let was = match dirty {
            Some(is) => ledger.dirty.insert(ino, is),
            None => ledger.dirty.remove(&ino),
        };
        if was == dirty {
            return;
        }
        if let Some((user, bytes)) = was {
            ledger.user(user).dirty_bytes -= bytes;
            ledger.dirty_bytes -= bytes;
            ledger.forget_idle(user);
        }
        if let Some((user, bytes)) = dirty {
            ledger.user(user).dirty_bytes += bytes;
            ledger.dirty_bytes += bytes;
        }
        self.charged.store(ledger.dirty.len() as u64, Ordering::Release);
    }

    /// Returns how many more dirty bytes a user may have.
    pub fn room_bytes(&self, user: u32) -> u64 {
        if self.is_trusted(user) { u64::MAX } else { self.ledger.lock().room_bytes(user, self) }
    }

    /// Whether nine tenths of a user's share are taken. Then its files are flushed without waiting until they are old
    /// enough.
    pub fn is_pressed(&self, user: u32) -> bool {
        if self.is_trusted(user) || self.charged.load(Ordering::Acquire) == 0 {
            return false;
        }
        let ledger = self.ledger.lock();
        ledger.users.get(&user).is_some_and(|u| u.dirty_bytes / 9 > ledger.room_bytes(user, self))
    }

    /// Returns what is left of the last part `below` of a user's share, from 0 to 1; `None`: the user has not come to it.
    pub fn margin_left(&self, user: u32, below: f64) -> Option<f64> {
        if self.is_trusted(user) || self.charged.load(Ordering::Acquire) == 0 {
            return None;
        }
        let ledger = self.ledger.lock();
        let has = ledger.users.get(&user).map_or(0, |user| user.dirty_bytes + user.promised_bytes);
        let room = ledger.room_bytes(user, self);
        let margin = (room + has) as f64 * below;
        ((room as f64) < margin).then(|| room as f64 / margin)
    }

    pub fn dirty_bytes(&self, user: u32) -> u64 {
        self.ledger.lock().users.get(&user).map_or(0, |user| user.dirty_bytes)
    }

    /// Promises a user room for dirty bytes; `None` if the share does not have that much left.
    pub fn promise(self: &Arc<Self>, user: u32, bytes: u64) -> Option<Promise> {
        if self.is_trusted(user) || bytes == 0 {
            return Some(Promise { shares: self.clone(), user, bytes: 0 });
        }
        let mut ledger = self.ledger.lock();
        if ledger.room_bytes(user, self) < bytes {
            return None;
        }
        ledger.user(user).promised_bytes += bytes;
        ledger.dirty_bytes += bytes;
        Some(Promise { shares: self.clone(), user, bytes })
    }

    /// Returns the error of a refused promise. Also logs it, at most once in `TOLD_EVERY`.
    pub fn refused_bytes(&self, user: u32, bytes: u64) -> Error {
        let has = self.dirty_bytes(user);
        let why = format!(
            "{bytes} bytes do not fit: {has} bytes of user {user} are not in the pool yet, and {} more would pass the share \
             of one user (shares.dirty = {} of {} bytes less what other users have)",
            bytes, self.policy.dirty, self.dirty_max_bytes,
        );
        self.tell(user, &why);
        Error::new(ErrorKind::Quota, Side::Cache, why)
    }

    /// Counts a file that a user opens, until [`Self::close`].
    ///
    /// # Errors
    /// `EMFILE` if the user has used up its share of open files, `ENFILE` if there are no more descriptors.
    pub fn open(&self, user: u32, ino: Ino) -> Result<UserSlot> {
        self.open_or_make(user, Some(ino))
    }

    /// The same for a file that is about to be created: [`Self::made`] or [`Self::not_made`] follows.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_new(&self, user: u32) -> Result<UserSlot> {
        self.open_or_make(user, None)
    }

    /// The file was created and is open.
    pub fn made(&self, slot: UserSlot, ino: Ino) {
        self.open_files.made(slot, ino);
    }

    pub fn not_made(&self, slot: UserSlot) {
        self.open_files.not_made(slot);
    }

    fn open_or_make(&self, user: u32, ino: Option<Ino>) -> Result<UserSlot> {
        let kept = descriptors::kept_of(self.descriptors);
        let max = |open: OpenCounts| {
            if self.is_trusted(user) {
                return self.descriptors.saturating_sub(kept.min(DESCRIPTORS_LAST));
            }
            let of_others = open.of_all.saturating_sub(open.of_user);
            let left = self.descriptors.saturating_sub(kept).saturating_sub(of_others);
            of_others + (left as f64 * self.policy.open_files) as u64
        };
        self.open_files.open(user, ino, max).map_err(|open| {
            let why = format!(
                "user {user} has {} files open, all users {}, of {} descriptors that the daemon may have: no more of one \
                 user (shares.open-files = {})",
                open.of_user, open.of_all, self.descriptors, self.policy.open_files,
            );
            self.tell(user, &why);
            Error::os(if self.is_trusted(user) { libc::ENFILE } else { libc::EMFILE }, Side::Cache, why)
        })
    }

    pub fn open_files(&self, user: u32) -> u64 {
        self.open_files.of_user(user)
    }

    /// Ends what [`Self::open`] began. An open that is not known belonged to an earlier daemon.
    pub fn close(&self, slot: UserSlot, ino: Ino) {
        self.open_files.close(slot, ino);
    }

    /// Logs a message about a user's share, at most once in `TOLD_EVERY`.
    fn tell(&self, user: u32, why: &str) {
        let mut told = self.told.lock();
        told.retain(|_, at| at.elapsed() < TOLD_EVERY);
        if let Slot::Vacant(slot) = told.entry(user) {
            slot.insert(Instant::now());
            tracing::warn!("{why}");
        }
    }

    /// Whether a request of a user has to wait for an earlier one.
    pub fn must_wait(&self, user: u32) -> bool {
        let share = self.policy.requests;
        let waiting = self.waiting.load(Ordering::Acquire);
        // While so few requests wait, no user can have used up its share.
        if self.is_trusted(user) || (waiting as f64) < share * REQUESTS.saturating_sub(waiting) as f64 {
            return false;
        }
        let ledger = self.ledger.lock();
        let has = ledger.users.get(&user).map_or(0, |user| user.requests);
        has > 0 && has as f64 >= share * REQUESTS.saturating_sub(waiting.saturating_sub(has)) as f64
    }

    /// Counts a waiting request, until the returned value is dropped.
    pub fn begin_request(self: &Arc<Self>, user: u32) -> WaitingRequest {
        let counted = !self.is_trusted(user);
        if counted {
            self.ledger.lock().user(user).requests += 1;
            self.waiting.fetch_add(1, Ordering::AcqRel);
        }
        WaitingRequest { shares: self.clone(), user, counted }
    }

    /// The same, after a wait for earlier requests of the user.
    pub async fn request_in_turn(self: Arc<Self>, user: u32) -> WaitingRequest {
        loop {
            let turn = self.ledger.lock().user(user).turn.clone();
            let next = turn.notified();
            if !self.must_wait(user) {
                return self.begin_request(user);
            }
            next.await;
        }
    }
}

impl ShareLedger {
    fn user(&mut self, user: u32) -> &mut Account {
        self.users.entry(user).or_default()
    }

    fn room_bytes(&self, user: u32, shares: &Shares) -> u64 {
        let has = self.users.get(&user).map_or(0, |user| user.dirty_bytes + user.promised_bytes);
        let left = shares.dirty_max_bytes.saturating_sub(self.dirty_bytes - has);
        ((left as f64 * shares.policy.dirty) as u64).saturating_sub(has)
    }

    /// Removes the account of a user that has nothing.
    fn forget_idle(&mut self, user: u32) {
        let idle = |u: &Account| u.dirty_bytes == 0 && u.promised_bytes == 0 && u.requests == 0;
        // A request that waits for its turn also holds `turn`.
        if self.users.get(&user).is_some_and(|u| idle(u) && Arc::strong_count(&u.turn) == 1) {
            self.users.remove(&user);
        }
    }
}

/// Room for dirty bytes. It is given back when dropped: by then the bytes are charged to their file.
#[derive(Debug)]
pub struct Promise {
    shares: Arc<Shares>,
    user: u32,
    bytes: u64,
}

impl Drop for Promise {
    fn drop(&mut self) {
        if self.bytes > 0 {
            let mut ledger = self.shares.ledger.lock();
            ledger.user(self.user).promised_bytes -= self.bytes;
            ledger.dirty_bytes -= self.bytes;
            ledger.forget_idle(self.user);
        }
    }
}

/// A request that waits.
#[derive(Debug)]
pub struct WaitingRequest {
    shares: Arc<Shares>,
    user: u32,
    counted: bool,
}

impl Drop for WaitingRequest {
    fn drop(&mut self) {
        if self.counted {
            self.shares.waiting.fetch_sub(1, Ordering::AcqRel);
            let mut ledger = self.shares.ledger.lock();
            let user = ledger.user(self.user);
            user.requests -= 1;
            user.turn.notify_one();
            ledger.forget_idle(self.user);
        }
    }
}

#[cfg(test)]
mod tests;
