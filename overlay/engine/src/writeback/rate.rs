//! What the flush may send in a second, which changes with the time of the day and with the policy.

use std::sync::Arc;

use forebay_backends::decorators::Rate;
use forebay_policy::SendLimits;
use forebay_system::clock::minute_of_day;
use parking_lot::Mutex;

use crate::Inner;

/// The limits in force, with what has passed under them.
#[derive(Debug, Default)]
pub(crate) struct SendRates {
    bytes: RateInForce,
    requests: RateInForce,
}

/// A rate per second, with what has passed under it.
#[derive(Debug, Default)]
struct RateInForce(Mutex<Option<(u64, Arc<Rate>)>>);

impl RateInForce {
    /// Returns the rate with this limit. It is a new one if the limit is another than before.
    fn with_limit(&self, limit: Option<u64>) -> Option<Arc<Rate>> {
        let mut known = self.0.lock();
        if known.as_ref().map(|(per_second, _)| *per_second) != limit {
            *known = limit.map(|per_second| (per_second, Arc::new(Rate::per_second(per_second))));
        }
        known.as_ref().map(|(_, rate)| rate.clone())
    }
}

impl Inner {
    /// Returns when `bytes` may be sent.
    pub(crate) async fn may_send(&self, bytes: u64) {
        if let Some(rate) = self.flusher.rates.bytes.with_limit(self.send_limits().bytes) {
            rate.pass_in_turn(bytes).await;
        }
    }

    /// Returns when one more file, name or attribute may be changed in the pool. Call it without the lock of moves:
    /// lookups wait for that one.
    pub(crate) async fn may_request(&self) {
        if let Some(rate) = self.flusher.rates.requests.with_limit(self.send_limits().requests) {
            rate.pass_in_turn(1).await;
        }
    }

    fn send_limits(&self) -> SendLimits {
        self.policy().write_back.limits_at(minute_of_day())
    }
}
