//! A slower pool: a latency for each call, and one bandwidth for all content in both directions.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, sleep_until};

use crate::{Pool, Result};

use super::{Around, CallKind, Decorated, PoolAnswer, PoolCall};

/// Content is sent in slices, so that concurrent calls share the bandwidth instead of queueing for it.
const SLICE_BYTES: u64 = 256 << 10;

/// A pool with a configured bandwidth and latency.
pub type Throttle = Decorated<Rate>;

/// Bandwidth and latency, in tokio's time.
#[derive(Debug)]
pub struct Rate {
    /// `None`: unlimited.
    bytes_per_second: Option<u64>,
    latency: Duration,
    /// The moment at which the link is free again.
    free_at: Mutex<Option<Instant>>,
}

impl Throttle {
    /// All reads and writes share `bytes_per_second`; `None` or 0 means unlimited. `latency` is added to each call;
    /// concurrent calls wait for it concurrently.
    pub fn new(inner: Arc<dyn Pool>, bytes_per_second: Option<u64>, latency: Duration) -> Self {
        let bytes_per_second = bytes_per_second.filter(|rate| *rate > 0);
        Self::with(inner, Rate { bytes_per_second, latency, free_at: Mutex::new(None) })
    }
}

impl Rate {
    /// `units`: bytes, or whatever is counted, above 0.
    pub fn per_second(units: u64) -> Self {
        let bytes_per_second = Some(units.max(1));
        Self { bytes_per_second, latency: Duration::ZERO, free_at: Mutex::new(None) }
    }

    /// Returns when `bytes`, or other units, have passed as one. Callers pass in the order in which they call.
    pub async fn pass_in_turn(&self, bytes: u64) {
        if let Some(rate) = self.bytes_per_second {
            sleep_until(self.reserve(bytes, rate, Instant::now())).await;
        }
    }

    /// Returns when `bytes` have passed.
    async fn pass(&self, mut bytes: u64) {
        let Some(rate) = self.bytes_per_second else { return };
        // Each slice starts at the computed end of the slice before it, not when the timer, which has a resolution of
        // milliseconds, fired.
        let mut ready = Instant::now();
        while bytes > 0 {
            let slice = bytes.min(SLICE_BYTES);
            ready = self.reserve(slice, rate, ready);
            sleep_until(ready).await;
            bytes -= slice;
        }
    }

    /// Reserves the link for `bytes` that can be sent from `ready` on, and returns the moment at which they have
    /// passed.
    fn reserve(&self, bytes: u64, rate: u64, ready: Instant) -> Instant {
        let takes = Duration::from_secs_f64(bytes as f64 / rate as f64);
        let mut free_at = self.free_at.lock();
        let done = free_at.map_or(ready, |at| at.max(ready)) + takes;
        *free_at = Some(done);
        done
    }
}

impl Around for Rate {
    fn around<'a, T: PoolAnswer>(
        &'a self,
        call: PoolCall<'a>,
        inner: BoxFuture<'a, Result<T>>,
    ) -> BoxFuture<'a, Result<T>> {
        async move {
            if !call.kind.is_step() && !self.latency.is_zero() {
                sleep(self.latency).await;
            }
            if matches!(call.kind, CallKind::PutPiece | CallKind::WriteAt) {
                self.pass(call.bytes).await;
            }
            let answer = inner.await?;
            self.pass(answer.content_bytes()).await;
            Ok(answer)
        }
        .boxed()
    }
}
