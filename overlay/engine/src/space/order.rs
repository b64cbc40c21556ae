//! The order in which content is evicted.

use crossbeam_queue::SegQueue;
use forebay_prefetch::eviction::Evictor;
use parking_lot::{Mutex, MutexGuard};

/// Events after which the policy learns of all that are noted, if it is not busy.
const EVENTS: usize = 256;
/// The most events that are noted while the policy is busy, before uses are not counted any more.
const EVENTS_MAX: usize = 16 * EVENTS;

/// What the policy does not know yet.
enum EvictionEvent {
    Use(u64),
    /// Clean content with this many bytes.
    Insert(u64, u64),
    Remove(u64),
}

/// The eviction policy, and what happened since it was asked last. Only a caller that needs a victim waits for the
/// policy, because the choice of a victim asks foresight and the catalog. To note a use takes no lock: each open does it.
pub(crate) struct EvictionOrder {
    policy: Mutex<Box<dyn Evictor>>,
    events: SegQueue<EvictionEvent>,
    /// As of the last events that the policy learned.
    evictable: Mutex<Evictable>,
}

/// How much could be evicted, except for what is leased, open or being fetched.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Evictable {
    pub files: u64,
    pub bytes: u64,
}

impl EvictionOrder {
    pub fn new(policy: Box<dyn Evictor>) -> Self {
        Self { policy: Mutex::new(policy), events: SegQueue::new(), evictable: Mutex::default() }
    }

    /// Notes that content was used.
    pub fn note_use(&self, key: u64) {
        self.note(EvictionEvent::Use(key));
    }

    /// Notes that content may be evicted, and how many bytes it occupies.
    pub fn insert(&self, key: u64, bytes: u64) {
        self.note(EvictionEvent::Insert(key, bytes));
    }

    /// Notes that there is nothing to evict any more: content is gone, or dirty.
    pub fn remove(&self, key: u64) {
        self.note(EvictionEvent::Remove(key));
    }

    fn note(&self, event: EvictionEvent) {
        if self.events.len() < EVENTS_MAX || !matches!(event, EvictionEvent::Use(_)) {
            self.events.push(event);
        }
        if self.events.len() < EVENTS {
            return;
        }
        if let Some(mut policy) = self.policy.try_lock() {
            self.apply_events(policy.as_mut());
        }
    }

    /// Returns the policy, which knows everything that was noted until now.
    pub fn lock(&self) -> MutexGuard<'_, Box<dyn Evictor>> {
        let mut policy = self.policy.lock();
        self.apply_events(policy.as_mut());
        policy
    }

    /// Returns how much could be evicted. While the policy is busy, that is the value from before.
    pub fn evictable(&self) -> Evictable {
        if let Some(mut policy) = self.policy.try_lock() {
            self.apply_events(policy.as_mut());
        }
        *self.evictable.lock()
    }

    fn apply_events(&self, policy: &mut dyn Evictor) {
        // Not more than there are now: others may note events as fast as this takes them.
        for event in std::iter::from_fn(|| self.events.pop()).take(self.events.len()) {
            match event {
                EvictionEvent::Use(key) => policy.access(key),
                EvictionEvent::Insert(key, bytes) => policy.insert(key, bytes),
                EvictionEvent::Remove(key) => policy.remove(key),
            }
        }
        *self.evictable.lock() = Evictable { files: policy.len() as u64, bytes: policy.bytes() };
    }
}

#[cfg(test)]
mod tests {
    use forebay_prefetch::eviction::by_name;

    use super::*;

    fn order() -> EvictionOrder {
        EvictionOrder::new(by_name("lru", 100).unwrap())
    }

    #[test]
    fn a_victim_is_chosen_with_the_uses_until_then() {
        let order = order();
        for key in 0..3 {
            order.insert(key, 1);
        }
        order.note_use(0);
        assert_eq!(order.lock().evict(&mut |_| true), Some(1));
    }

    #[test]
    fn nothing_that_happens_waits_while_a_victim_is_chosen() {
        let order = order();
        for key in 0..3 {
            order.insert(key, 1);
        }
        let choosing = order.lock();
        (0..2 * EVENTS_MAX).for_each(|_| order.note_use(0));
        order.insert(3, 1);
        order.remove(1);
        drop(choosing);
        assert_eq!(order.events.len(), EVENTS_MAX + 2, "uses are lost, other events are not");
        let mut order = order.lock();
        assert_eq!([(); 4].map(|()| order.evict(&mut |_| true)), [Some(2), Some(0), Some(3), None]);
    }
}
