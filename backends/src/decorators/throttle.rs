//! A slower pool: latency for each call, and one bandwidth for all content in both directions.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, sleep_until};

use crate::{Pool, Result};

use super::{Answer, Around, Call, CallKind, Decorated};

/// Content is sent in slices, so that calls at the same time share the bandwidth instead of queueing for it.
const SLICE_BYTES: u64 = 256 << 10;

/// A pool that is as slow as it is told to be.
pub type Throttle = Decorated<Rate>;

/// Bandwidth and latency, in tokio's time.
#[derive(Debug)]
pub struct Rate {
    /// `None`: without a limit.
    bytes_per_second: Option<u64>,
    latency: Duration,
    /// When the link is free again.
    free_at: Mutex<Option<Instant>>,
}

impl Throttle {
    /// `bytes_per_second` is shared by all reads and writes, `None` or 0 is without a limit; `latency` is added
    /// to each call, and calls at the same time wait for it at the same time.
    pub fn new(inner: Arc<dyn Pool>, bytes_per_second: Option<u64>, latency: Duration) -> Self {
        let bytes_per_second = bytes_per_second.filter(|rate| *rate > 0);
        Self::with(inner, Rate { bytes_per_second, latency, free_at: Mutex::new(None) })
    }
}

impl Rate {
    /// `bytes_per_second`: above 0.
    pub fn bandwidth(bytes_per_second: u64) -> Self {
        let bytes_per_second = Some(bytes_per_second.max(1));
        Self { bytes_per_second, latency: Duration::ZERO, free_at: Mutex::new(None) }
    }

    /// Returns when `bytes` have passed as one, behind those that were there before: who came first is done first.
    pub async fn pass_in_turn(&self, bytes: u64) {
        if let Some(rate) = self.bytes_per_second {
            sleep_until(self.reserve(bytes, rate, Instant::now())).await;
        }
    }

    /// Returns when `bytes` have passed.
    async fn pass(&self, mut bytes: u64) {
        let Some(rate) = self.bytes_per_second else { return };
        // Each slice follows the moment at which the one before it was done, not the one at which the timer,
        // which counts milliseconds, said so.
        let mut ready = Instant::now();
        while bytes > 0 {
            let slice = bytes.min(SLICE_BYTES);
            ready = self.reserve(slice, rate, ready);
            sleep_until(ready).await;
            bytes -= slice;
        }
    }

    /// When `bytes` that are ready to be sent at `ready` will have passed.
    fn reserve(&self, bytes: u64, rate: u64, ready: Instant) -> Instant {
        let takes = Duration::from_secs_f64(bytes as f64 / rate as f64);
        let mut free_at = self.free_at.lock();
        let done = free_at.map_or(ready, |at| at.max(ready)) + takes;
        *free_at = Some(done);
        done
    }
}

impl Around for Rate {
    fn around<'a, T: Answer>(&'a self, call: Call<'a>, inner: BoxFuture<'a, Result<T>>) -> BoxFuture<'a, Result<T>> {
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
