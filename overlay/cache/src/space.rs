//! The hard limit of the fast pool: space is reserved before it is written.

use parking_lot::Mutex;
use std::sync::Arc;
use tokio::sync::Notify;

/// The bytes of the fast pool: the limit, the used ones, and the reserved ones.
#[derive(Debug)]
pub struct SpaceBudget {
    limit: u64,
    taken: Mutex<TakenSpace>,
    /// Notified when used or reserved bytes grow.
    grown: Notify,
}

#[derive(Debug, Default, Clone, Copy)]
struct TakenSpace {
    /// Briefly negative after a start: space that the last daemon did not count is freed before the recount has found
    /// it.
    used: i64,
    reserved: u64,
}

impl TakenSpace {
    fn used(self) -> u64 {
        self.used.max(0) as u64
    }

    fn total(self) -> u64 {
        self.used().saturating_add(self.reserved)
    }
}

/// Reserved space, given back when dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<SpaceBudget>,
    bytes: u64,
}

impl SpaceBudget {
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, taken: Mutex::default(), grown: Notify::new() })
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    pub fn used(&self) -> u64 {
        self.taken.lock().used()
    }

    pub fn reserved(&self) -> u64 {
        self.taken.lock().reserved
    }

    /// Returns the used and reserved bytes.
    pub fn taken(&self) -> u64 {
        self.taken.lock().total()
    }

    /// Reserves `bytes`; `None` if that would exceed the limit.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Option<Reservation> {
        {
            let mut taken = self.taken.lock();
            if taken.total().checked_add(bytes)? > self.limit {
                return None;
            }
            taken.reserved += bytes;
        }
        self.grown.notify_one();
        Some(Reservation { budget: self.clone(), bytes })
    }

    /// Records that a content file occupies `is` bytes, where `was` bytes were known.
    pub fn account(&self, was: u64, is: u64) {
        self.account_reserved(was, is, None);
    }

    /// The same for bytes that were reserved in this budget before they were written. The reservation ends in the same
    /// step: if the bytes counted twice for a moment, another caller would find no space.
    pub fn account_reserved(&self, was: u64, is: u64, reserved: Option<Reservation>) {
        // One of another budget, because the content came to another tier than expected, is only given back.
        let mut reserved = reserved.filter(|reserved| std::ptr::eq(&*reserved.budget, self));
        {
            let mut taken = self.taken.lock();
            taken.used += is as i64 - was as i64;
            taken.reserved -= reserved.as_mut().map_or(0, |reserved| std::mem::take(&mut reserved.bytes));
        }
        if is > was {
            self.grown.notify_one();
        }
    }

    /// Waits until more bytes are used or reserved. Returns at once if that happened since the last call. For one task.
    pub async fn grown(&self) {
        self.grown.notified().await;
    }

    /// Returns the bytes that exceed a share of the limit.
    pub fn above(&self, share: f64) -> u64 {
        self.taken().saturating_sub((self.limit as f64 * share) as u64)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.taken.lock().reserved -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_is_never_passed_and_reservations_come_back() {
        let budget = SpaceBudget::new(100);
        let first = budget.reserve(60).unwrap();
        assert!(budget.reserve(41).is_none());
        budget.account(0, 60);
        drop(first);
        assert!(budget.reserve(41).is_none());
        assert!(budget.reserve(40).is_some());
        budget.account(60, 10);
        assert_eq!((budget.used(), budget.reserved()), (10, 0));
    }

    #[test]
    fn bytes_that_were_reserved_and_written_count_once() {
        let budget = SpaceBudget::new(100);
        let reserved = budget.reserve(60).unwrap();
        budget.account_reserved(0, 50, Some(reserved));
        assert_eq!((budget.used(), budget.reserved()), (50, 0));
        assert!(budget.reserve(50).is_some());
    }
}
