//! When the flush looks at entries that wait for a request: another rule of the policy may hold for them by now.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use forebay_backends::Result;
use forebay_catalog::{Intent, Lane, Queued};

use super::due::Due;
use super::rounds::ROUND;
use crate::Inner;

/// The shortest time between two looks at the manual entries.
const MANUAL_EVERY: Duration = Duration::from_secs(10);
/// The time between two looks if rules ask how old files are.
const AGED_EVERY: Duration = Duration::from_secs(300);

/// A look at all manual entries, some at a time.
#[derive(Debug)]
pub(super) struct ManualLook {
    /// Where it goes on, for each user; `None`: no look is wanted. Empty: it has not begun.
    at: Option<BTreeMap<u32, u64>>,
    /// Another look was wanted since it began. Entries that it has passed may have another verdict.
    again: bool,
    /// When the last look ended.
    ended: Option<Instant>,
    has_entries: bool,
}

impl ManualLook {
    /// Begins with a look: the policy may be another one than before the start.
    pub fn after_start() -> Self {
        Self { at: Some(BTreeMap::new()), again: false, ended: None, has_entries: false }
    }

    /// Wants a look that begins from now on.
    pub fn want(&mut self) {
        match &self.at {
            None => self.at = Some(BTreeMap::new()),
            Some(at) => self.again |= !at.is_empty(),
        }
    }

    /// Wants a look if the last one is so long ago that files may have become old enough for another rule.
    pub fn want_for_age(&mut self, now: Instant) {
        if self.until_aged(now) == Some(Duration::ZERO) {
            self.want();
        }
    }

    /// Returns the time until [`Self::want_for_age`] wants a look; `None`: there is nothing to look at, or a look is wanted
    /// already.
    pub fn until_aged(&self, now: Instant) -> Option<Duration> {
        let ended = self.ended.filter(|_| self.has_entries && !self.is_wanted())?;
        Some(AGED_EVERY.saturating_sub(now.saturating_duration_since(ended)))
    }

    pub fn is_wanted(&self) -> bool {
        self.at.is_some()
    }

    /// Returns the user whose entries are to be looked at next, and from which place in the queue on; `None`: nothing now.
    /// `users`: those with manual entries. The look ends at the time `end_us` of the queue.
    pub fn next(&mut self, users: &[u32], end_us: u64, now: Instant) -> Option<(u32, u64)> {
        self.has_entries = !users.is_empty();
        let at = self.at.as_ref()?;
        let is_early = self.ended.is_some_and(|ended| now.saturating_duration_since(ended) < MANUAL_EVERY);
        if at.is_empty() && is_early {
            return None;
        }
        let place = |user: &u32| (*user, at.get(user).copied().unwrap_or(0));
        let next = users.iter().map(place).find(|(_, from_us)| *from_us <= end_us);
        if next.is_none() {
            self.at = std::mem::take(&mut self.again).then(BTreeMap::new);
            self.ended = Some(now);
        }
        next
    }

    /// Notes that the entries of a user before `until_us` were looked at.
    pub fn looked(&mut self, user: u32, until_us: u64) {
        self.at.get_or_insert_default().insert(user, until_us);
    }
}

impl Inner {
    /// Gives some manual entries of a user back to the queue, if the policy is no longer manual for them. Returns where
    /// to go on.
    pub(super) fn look_at_manual(&self, user: u32, from_us: u64) -> Result<Option<u64>> {
        let taken = self.catalog.queue_take(user, Lane::Manual, from_us, u64::MAX, ROUND)?;
        let next = taken.last().filter(|_| taken.len() == ROUND).map(|entry| entry.slot.at_us.saturating_add(1));
        self.look_at_manual_entries(taken)?;
        Ok(next)
    }

    /// Does the same for the manual entries that are among these, and for those of these inodes.
    pub(super) fn look_at_doubtful(&self, doubtful: HashSet<Intent>) -> Result<()> {
        let mut entries = Vec::new();
        for intent in doubtful {
            let names = match &intent {
                Intent::Inode(ino) => self.node(*ino).map(|node| node.state.lock().record.links.clone()),
                Intent::Name(..) => Ok(Default::default()),
            };
            let names = names.unwrap_or_default().into_iter().map(|(parent, name)| Intent::Name(parent, name));
            for intent in names.chain([intent]) {
                entries.extend(self.catalog.queued_as(&intent)?.filter(|entry| entry.slot.lane == Lane::Manual));
            }
        }
        self.look_at_manual_entries(entries)
    }

    fn look_at_manual_entries(&self, entries: Vec<Queued>) -> Result<()> {
        let (mut places, facts) = (Vec::new(), self.flusher.facts());
        for entry in entries {
            match self.is_due(&entry, false) {
                Ok(Due::Manual) | Err(_) => {}
                Ok(Due::Now) => places.push((entry, Due::In(Lane::Fresh, Duration::ZERO))),
                Ok(other) => places.push((entry, other)),
            }
        }
        self.give_places(places, facts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: u64 = 100;

    #[test]
    fn a_look_that_is_wanted_while_one_is_under_way_begins_anew() {
        let begun = Instant::now();
        let mut look = ManualLook::after_start();
        look.want();
        assert_eq!(look.next(&[7], END, begun), Some((7, 0)));
        look.looked(7, 50);
        assert_eq!(look.next(&[7], END, begun), Some((7, 50)));
        look.want();
        look.looked(7, u64::MAX);
        assert_eq!(look.next(&[7], END, begun), None);
        assert!(look.is_wanted(), "what it had passed is looked at again");
        assert_eq!(look.next(&[7], END, begun), None, "but not at once");
        assert_eq!(look.next(&[7], END, begun + MANUAL_EVERY), Some((7, 0)));
        look.looked(7, u64::MAX);
        assert_eq!(look.next(&[7], END, begun + MANUAL_EVERY), None);
        assert!(!look.is_wanted());
        look.want();
        assert_eq!(look.next(&[7], END, begun + 2 * MANUAL_EVERY), Some((7, 0)));
    }

    #[test]
    fn files_that_become_old_are_looked_at_now_and_then() {
        let begun = Instant::now();
        let mut look = ManualLook::after_start();
        assert_eq!(look.until_aged(begun), None, "the first look is wanted");
        assert_eq!(look.next(&[], END, begun), None);
        assert_eq!(look.until_aged(begun), None, "there is nothing to look at");
        assert_eq!(look.next(&[7], END, begun), None);
        assert_eq!(look.until_aged(begun + MANUAL_EVERY), Some(AGED_EVERY - MANUAL_EVERY));
        look.want_for_age(begun + MANUAL_EVERY);
        assert!(!look.is_wanted());
        look.want_for_age(begun + AGED_EVERY);
        assert_eq!(look.next(&[7], END, begun + AGED_EVERY), Some((7, 0)));
    }
}
