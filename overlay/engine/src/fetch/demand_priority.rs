//! Priority at the pool: requests that a reader waits for go before fetches ahead of the readers.
//!
//! A fetch ahead begins a request only while no reader waits for one. If the many readers of a job leave no such
//! moment, fetching ahead would never help the job. So a few requests begin after a short while anyway: fewer than a
//! reader may have in flight.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore, SemaphorePermit};

/// How long a fetch ahead lets readers go first.
const PATIENCE: Duration = Duration::from_millis(10);
/// Requests that all fetches ahead together may have in flight while readers wait.
const IMPATIENT_MAX: usize = 2;

#[derive(Debug)]
pub(crate) struct DemandPriority {
    readers: AtomicUsize,
    no_reader: Notify,
    impatient: Semaphore,
}

impl Default for DemandPriority {
    fn default() -> Self {
        Self { readers: AtomicUsize::new(0), no_reader: Notify::new(), impatient: Semaphore::new(IMPATIENT_MAX) }
    }
}

/// While this lives, a reader waits for the pool.
#[derive(Debug)]
pub(crate) struct DemandRead<'a>(&'a DemandPriority);

impl Drop for DemandRead<'_> {
    fn drop(&mut self) {
        if self.0.readers.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.no_reader.notify_waiters();
        }
    }
}

impl DemandPriority {
    pub fn read(&self) -> DemandRead<'_> {
        self.readers.fetch_add(1, Ordering::AcqRel);
        DemandRead(self)
    }

    /// Waits until a request that no reader waits for may begin. The caller keeps the permit as long as the request
    /// lasts.
    pub async fn ahead(&self) -> Option<SemaphorePermit<'_>> {
        let quiet = async {
            loop {
                let notified = self.no_reader.notified();
                if self.readers.load(Ordering::Acquire) == 0 {
                    return;
                }
                notified.await;
            }
        };
        let impatient = async {
            tokio::time::sleep(PATIENCE).await;
            self.impatient.acquire().await.ok()
        };
        tokio::select! {
            () = quiet => None,
            permit = impatient => permit,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn is_ready<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Option<T> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_ahead_waits_for_readers_but_not_for_ever() {
        let turns = DemandPriority::default();
        assert!(turns.ahead().await.is_none(), "there is no reader");
        let reading = turns.read();
        let mut waits = std::pin::pin!(turns.ahead());
        assert!(is_ready(waits.as_mut()).is_none());
        drop(reading);
        assert!(waits.await.is_none(), "at once");
        let _reading = turns.read();
        let held = [turns.ahead().await, turns.ahead().await];
        assert!(held.iter().all(Option::is_some));
        let mut third = std::pin::pin!(turns.ahead());
        tokio::time::sleep(PATIENCE * 100).await;
        assert!(is_ready(third.as_mut()).is_none(), "no more than a few");
        drop(held);
        assert!(third.await.is_some());
    }
}
