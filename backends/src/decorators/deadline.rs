//! A time limit for the calls of a pool.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::time::timeout;

use crate::{Error, ErrorKind, Pool, Result, Side};

use super::{Around, CallKind, Decorated, PoolAnswer, PoolCall};

/// A pool whose calls fail with `Timeout` at their limit. A change that timed out may have been done, may still be
/// done later, or never.
pub type Deadline = Decorated<CallLimits>;

/// How long calls may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallLimits {
    /// For calls that move no content, and for each page of a listing.
    pub metadata: Duration,
    /// For calls that transfer content, for each piece of a stream, and for syncs, in addition to the time for their
    /// bytes.
    pub data: Duration,
    /// For renames and changes of attributes, which some pools carry out by copying.
    pub copies: Duration,
    /// The rate from which the time for content is calculated; 0 allows no time for it.
    pub min_bytes_per_second: u64,
}

impl Deadline {
    pub fn new(inner: Arc<dyn Pool>, limits: CallLimits) -> Self {
        Self::with(inner, limits)
    }
}

impl CallLimits {
    fn limit(&self, call: &PoolCall<'_>) -> Duration {
        if !call.kind.moves_data() {
            return match call.kind {
                CallKind::SyncFile | CallKind::SyncDir => self.data,
                CallKind::Rename | CallKind::SetAttrs => self.copies,
                _ => self.metadata,
            };
        }
        if self.min_bytes_per_second == 0 {
            return self.data;
        }
        let whole = Duration::from_secs(call.bytes / self.min_bytes_per_second);
        let rest = (call.bytes % self.min_bytes_per_second) as f64 / self.min_bytes_per_second as f64;
        self.data.saturating_add(whole).saturating_add(Duration::from_secs_f64(rest))
    }
}

impl Around for CallLimits {
    fn around<'a, T: PoolAnswer>(
        &'a self,
        call: PoolCall<'a>,
        inner: BoxFuture<'a, Result<T>>,
    ) -> BoxFuture<'a, Result<T>> {
        if call.kind == CallKind::PutPiece {
            return inner;
        }
        async move {
            let limit = self.limit(&call);
            timeout(limit, inner).await.unwrap_or_else(|_| {
                let context = format!("{call}: no answer within {limit:?}");
                Err(Error::new(ErrorKind::Timeout, Side::Pool, context))
            })
        }
        .boxed()
    }
}
