//! The hard limit of the fast pool: space is reserved before it is written.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use tokio::sync::Notify;

/// The bytes of the fast pool: the limit, the used ones, and the reserved ones.
#[derive(Debug)]
pub struct SpaceBudget {
    limit: u64,
    /// Briefly negative after a start: space that the last daemon did not count is freed before the recount has found
    /// it.
    used: AtomicI64,
    reserved: AtomicU64,
    /// Notified when used or reserved bytes grow.
    grown: Notify,
}

/// Reserved space, given back when dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<SpaceBudget>,
    bytes: u64,
}

impl SpaceBudget {
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicI64::new(0), reserved: AtomicU64::new(0), grown: Notify::new() })
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed).max(0) as u64
    }

    pub fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }

    /// Reserves `bytes`; `None` if that would exceed the limit.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Option<Reservation> {
        let mut reserved = self.reserved.load(Ordering::Relaxed);
        loop {
            let total = self.used().checked_add(reserved)?.checked_add(bytes)?;
            if total > self.limit {
                return None;
            }
            let new = reserved + bytes;
            match self.reserved.compare_exchange_weak(reserved, new, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => {
                    self.grown.notify_one();
                    return Some(Reservation { budget: self.clone(), bytes });
                }
                Err(now) => reserved = now,
            }
        }
    }

    /// Records that a content file occupies `is` bytes, where `was` bytes were known.
    pub fn account(&self, was: u64, is: u64) {
        self.used.fetch_add(is as i64 - was as i64, Ordering::AcqRel);
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
        self.used().saturating_add(self.reserved()).saturating_sub((self.limit as f64 * share) as u64)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.reserved.fetch_sub(self.bytes, Ordering::AcqRel);
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
}
