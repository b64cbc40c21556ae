//! The rate at which the flush may send, which changes with the time of the day and with the policy.

use std::sync::Arc;

use forebay_backends::decorators::Rate;
use forebay_system::clock::minute_of_day;
use parking_lot::Mutex;

use crate::Inner;

/// The rate in force, in bytes per second, with what has passed under it.
#[derive(Debug, Default)]
pub(crate) struct UploadRate(Mutex<Option<(u64, Arc<Rate>)>>);

impl Inner {
    /// Returns when `bytes` may be sent.
    pub(crate) async fn may_send(&self, bytes: u64) {
        let policy = self.policy().write_back.rate_at(minute_of_day());
        let rate = {
            let mut known = self.flusher.rate.0.lock();
            if known.as_ref().map(|(bytes, _)| *bytes) != policy {
                *known = policy.map(|bytes| (bytes, Arc::new(Rate::bandwidth(bytes))));
            }
            known.as_ref().map(|(_, rate)| rate.clone())
        };
        if let Some(rate) = rate {
            rate.pass_in_turn(bytes).await;
        }
    }
}
