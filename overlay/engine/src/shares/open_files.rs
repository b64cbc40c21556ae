//! The files that users have open. There is no lock that every open takes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;

use super::{SLOTS, UserSlot};
use crate::Ino;

/// The open files of all users. A file that a user has open several times counts once: it takes one descriptor.
#[derive(Debug)]
pub(super) struct OpenFileCounts {
    /// How often a user has a file open.
    times: DashMap<(u32, Ino), u32>,
    users: DashMap<u32, Arc<OpenFilesOfUser>>,
    /// The users that file handles name.
    slots: DashMap<UserSlot, u32>,
    next_slot: AtomicU32,
    total: AtomicU64,
}

#[derive(Debug)]
struct OpenFilesOfUser {
    slot: UserSlot,
    files: AtomicU64,
}

/// How many files are open.
#[derive(Debug, Clone, Copy)]
pub(super) struct OpenCounts {
    pub of_user: u64,
    pub of_all: u64,
}

impl OpenFileCounts {
    pub fn new() -> Self {
        Self {
            times: DashMap::new(),
            users: DashMap::new(),
            slots: DashMap::new(),
            next_slot: AtomicU32::new(1),
            total: AtomicU64::new(0),
        }
    }

    /// Counts an open of `ino`, or of a file that is about to be created. `max`: how many files all users may have open
    /// when this user opens one more.
    ///
    /// # Errors
    /// The counts, if that would be too many.
    pub fn open(&self, user: u32, ino: Option<Ino>, max: impl Fn(OpenCounts) -> u64) -> Result<UserSlot, OpenCounts> {
        let account = self.account(user);
        let count = || {
            // The user's count first, so that opens of one user at the same time see each other.
            let of_user = account.files.fetch_add(1, Ordering::AcqRel);
            let one_more = |of_all| (of_all < max(OpenCounts { of_user, of_all })).then_some(of_all + 1);
            let counted = self.total.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more);
            counted.map(drop).map_err(|of_all| {
                account.files.fetch_sub(1, Ordering::AcqRel);
                OpenCounts { of_user, of_all }
            })
        };
        match ino.map(|ino| self.times.entry((user, ino))) {
            Some(Entry::Occupied(mut times)) => *times.get_mut() += 1,
            Some(Entry::Vacant(times)) => {
                count()?;
                times.insert(1);
            }
            None => count()?,
        }
        Ok(account.slot)
    }

    /// The file that a user was about to create is open.
    pub fn made(&self, slot: UserSlot, ino: Ino) {
        let user = self.user_of(slot);
        match self.times.entry((user, ino)) {
            Entry::Occupied(mut times) => {
                // Another open of the file came first, and is counted.
                *times.get_mut() += 1;
                self.uncount(&self.account(user));
            }
            Entry::Vacant(times) => {
                times.insert(1);
            }
        }
    }

    pub fn not_made(&self, slot: UserSlot) {
        self.uncount(&self.account(self.user_of(slot)));
    }

    /// Ends an open. One that is not known belonged to an earlier daemon.
    pub fn close(&self, slot: UserSlot, ino: Ino) {
        let user = self.user_of(slot);
        let Entry::Occupied(mut times) = self.times.entry((user, ino)) else { return };
        *times.get_mut() -= 1;
        if *times.get() == 0 {
            times.remove();
            self.uncount(&self.account(user));
        }
    }

    pub fn of_user(&self, user: u32) -> u64 {
        self.users.get(&user).map_or(0, |user| user.files.load(Ordering::Acquire))
    }

    fn account(&self, user: u32) -> Arc<OpenFilesOfUser> {
        if let Some(account) = self.users.get(&user) {
            return account.clone();
        }
        let new = || {
            let number = self.next_slot.fetch_add(1, Ordering::AcqRel);
            let slot = if (number as usize) < SLOTS { UserSlot(number) } else { UserSlot::default() };
            if slot != UserSlot::default() {
                self.slots.insert(slot, user);
            }
            Arc::new(OpenFilesOfUser { slot, files: AtomicU64::new(0) })
        };
        self.users.entry(user).or_insert_with(new).clone()
    }

    fn user_of(&self, slot: UserSlot) -> u32 {
        self.slots.get(&slot).map_or(0, |user| *user)
    }

    fn uncount(&self, account: &OpenFilesOfUser) {
        let less = |files: u64| files.checked_sub(1);
        let _ = self.total.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        let _ = account.files.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
    }
}
