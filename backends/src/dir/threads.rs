//! Calls on threads that may block.

use std::sync::Arc;

use crate::abandoned::ChangeWork;
use crate::{Error, ErrorKind, Pool, PoolPath, Result, Side};

use super::{DirPool, Shared};

/// Calls of one pool that may block at the same time. A server that hangs blocks no more threads than this.
pub const MAX_BLOCKING_CALLS: usize = 64;
/// Descriptors of the process's limit for each blocking call: with a low limit, fewer calls may block.
const CALLS_OF_DESCRIPTORS: u64 = 16;
impl DirPool {
    /// Runs `work` on a blocking thread. If the caller drops the future, `work` still runs to its end and keeps its
    /// permit.
    pub(super) async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Shared) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let stopped = |what: &str| Error::new(ErrorKind::Unavailable, Side::Pool, format!("{}: {what}", self.url()));
        let permit = Arc::clone(&self.permits).acquire_owned().await.map_err(|_| stopped("the pool is closed"))?;
        let shared = Arc::clone(&self.shared);
        let work: Box<dyn FnOnce() -> Result<T> + Send> = Box::new(move || {
            let answer = work(&shared);
            drop(permit);
            answer
        });
        tokio::task::spawn_blocking(work)
            .await
            .map_err(|failure| stopped("its worker thread ended").with_source(failure))?
    }

    /// Like [`Self::blocking`], for a change of these names. If the caller drops the future, the names are not looked at
    /// until `work` has ended, and `work` does not begin.
    pub(super) async fn changing<T: Send + 'static>(
        &self,
        names: Vec<PoolPath>,
        work: impl FnOnce(&Shared) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.publishing(names, |pool, _| work(pool)).await
    }

    /// Like [`Self::changing`]; `work` is told whether its caller has given up.
    pub(super) async fn publishing<T: Send + 'static>(
        &self,
        names: Vec<PoolPath>,
        work: impl FnOnce(&Shared, &ChangeWork) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (_caller, change) = self.shared.abandoned.begin(names);
        self.blocking(move |pool| {
            if change.is_abandoned() {
                return Err(Error::new(ErrorKind::Timeout, Side::Pool, "a call was given up before it began"));
            }
            let answer = work(pool, &change);
            // Before the caller has the answer.
            drop(change);
            answer
        })
        .await
    }

    /// Runs a cheap `work` inline if the file system is local.
    pub(super) async fn cheap<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Shared) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        if self.shared.abilities.public.local { work(&self.shared) } else { self.blocking(work).await }
    }
}

/// The number of calls that may block at the same time.
pub(super) fn blocking_calls() -> usize {
    let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(descriptors / CALLS_OF_DESCRIPTORS).unwrap_or(usize::MAX).clamp(1, MAX_BLOCKING_CALLS)
}
