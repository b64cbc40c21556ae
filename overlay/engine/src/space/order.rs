//! The order in which content is evicted.

use forebay_prefetch::eviction::Evictor;
use parking_lot::{Mutex, MutexGuard};

/// Uses that are noted before the policy learns of them.
const USES: usize = 256;
/// The most uses that are noted while the policy is busy. Further ones are not counted.
const USES_MAX: usize = 16 * USES;

/// The eviction policy, and the uses that it does not know yet: an open must not wait while a victim is chosen.
pub(crate) struct EvictionOrder {
    policy: Mutex<Box<dyn Evictor>>,
    uses: Mutex<Vec<u64>>,
}

impl EvictionOrder {
    pub fn new(policy: Box<dyn Evictor>) -> Self {
        Self { policy: Mutex::new(policy), uses: Mutex::default() }
    }

    /// Notes a use. Does not wait for the policy.
    pub fn note_use(&self, key: u64) {
        {
            let mut uses = self.uses.lock();
            if uses.len() < USES_MAX {
                uses.push(key);
            }
            if !uses.len().is_multiple_of(USES) {
                return;
            }
        }
        if let Some(mut policy) = self.policy.try_lock() {
            self.apply_uses(policy.as_mut());
        }
    }

    /// Returns the policy, which knows all uses so far.
    pub fn lock(&self) -> MutexGuard<'_, Box<dyn Evictor>> {
        let mut policy = self.policy.lock();
        self.apply_uses(policy.as_mut());
        policy
    }

    fn apply_uses(&self, policy: &mut dyn Evictor) {
        let uses = std::mem::take(&mut *self.uses.lock());
        uses.into_iter().for_each(|key| policy.access(key));
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
            order.lock().insert(key, 1);
        }
        order.note_use(0);
        assert_eq!(order.lock().evict(&mut |_| true), Some(1));
    }

    #[test]
    fn a_use_does_not_wait_while_a_victim_is_chosen() {
        let order = order();
        for key in 0..3 {
            order.lock().insert(key, 1);
        }
        let choosing = order.lock();
        (0..2 * USES_MAX).for_each(|_| order.note_use(0));
        drop(choosing);
        assert!(order.uses.lock().len() <= USES_MAX);
        assert_eq!(order.lock().evict(&mut |_| true), Some(1));
    }
}
