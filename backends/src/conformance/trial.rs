//! The suite on a pool in use: in its own directory, with a time limit for every case, and without leftovers.

use std::sync::Arc;
use std::time::Duration;

use crate::decorators::{Fault, Metrics};
use crate::{Attrs, Error, ErrorKind, Pool, PoolPath, Result, Side, Time};

use super::context::remove_tree;
use super::{Case, run_case};

/// How long the removal of the scratch directory may take.
const CLEAR_LIMIT: Duration = Duration::from_secs(120);
/// How long [`Trial::run`] waits for calls in progress after a case was stopped.
const STOP_LIMIT: Duration = Duration::from_secs(30);
const STOP_PAUSE: Duration = Duration::from_millis(10);

/// The result of a case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CaseVerdict {
    Passed,
    /// The case needs a capability that the pool lacks, and the pool refused the calls as it must.
    NotApplicable,
    /// The reason for the failure.
    Failed(String),
}

/// A scratch directory below the root of a pool.
pub struct Trial {
    pool: Arc<dyn Pool>,
    scratch: PoolPath,
}

impl Trial {
    /// A name for the scratch directory of a trial, different for each call.
    pub fn unique_name() -> PoolPath {
        let name = format!("forebay-doctor-{}-{:016x}", std::process::id(), rand::random::<u64>());
        PoolPath::root().join(name.as_bytes())
    }

    /// Makes the scratch directory, which must not exist.
    ///
    /// # Errors
    /// Those of [`Pool::mkdir`]; `ReadOnly` if the pool is read-only.
    pub async fn begin(pool: Arc<dyn Pool>, scratch: PoolPath) -> Result<Self> {
        if pool.capabilities().read_only {
            let context = format!("make {scratch} in {}", pool.url());
            return Err(Error::new(ErrorKind::ReadOnly, Side::Pool, context));
        }
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let (atime, mtime) = (Time::now(), Time::now());
        let attrs = Attrs { mode: 0o755, uid, gid, atime, mtime, xattrs: Vec::new() };
        match pool.mkdir(&scratch, &attrs).await {
            Ok(_) => Ok(Self { pool, scratch }),
            // The directory belongs to another process, however improbable that is.
            Err(error) if error.is(ErrorKind::Exists) => Err(error),
            Err(error) => {
                // The directory may exist nevertheless. The caller gets the first error, not that of this removal.
                let _ = pool.remove_dir(&scratch).await;
                Err(error)
            }
        }
    }

    /// Runs a case until it ends, until `limit` has passed, or until `stop` completes; returns `None` in the last
    /// case.
    ///
    /// After this returns, no call of a stopped case reaches the pool, unless the pool leaves a call unanswered for
    /// longer than the wait for calls in progress.
    pub async fn run(&self, case: Case, limit: Duration, stop: impl Future<Output = ()>) -> Option<CaseVerdict> {
        let calls = Arc::new(Metrics::new(Arc::clone(&self.pool)));
        let gate = Arc::new(Fault::new(Arc::clone(&calls) as Arc<dyn Pool>, 0));
        let gated = Arc::clone(&gate) as Arc<dyn Pool>;
        let scratch = self.scratch.clone();
        // A pool in a directory may block the calling thread.
        let mut work = tokio::spawn(async move { run_case(&gated, &scratch, case).await });
        let ended = tokio::select! {
            ended = &mut work => Ok(ended),
            () = tokio::time::sleep(limit) => {
                Err(Some(CaseVerdict::Failed(format!("it had not ended after {limit:?}"))))
            }
            () = stop => Err(None),
        };
        match ended {
            Ok(Ok(Ok(()))) if case.applies_to(self.pool.capabilities()) => Some(CaseVerdict::Passed),
            Ok(Ok(Ok(()))) => Some(CaseVerdict::NotApplicable),
            Ok(Ok(Err(why))) => Some(CaseVerdict::Failed(why)),
            Ok(Err(error)) => Some(CaseVerdict::Failed(format!("it broke off: {error}"))),
            Err(verdict) => {
                // The case may have spawned tasks: their calls fail from now on.
                gate.set_down(true);
                work.abort();
                let quiet = async {
                    tokio::time::sleep(STOP_PAUSE).await;
                    while calls.in_flight() > 0 {
                        tokio::time::sleep(STOP_PAUSE).await;
                    }
                };
                // Give up after that; the removal of the directory will report what it finds.
                let _ = tokio::time::timeout(STOP_LIMIT, quiet).await;
                verdict
            }
        }
    }

    /// Removes the scratch directory and everything in it.
    ///
    /// # Errors
    /// The pool's; `Timeout` if it takes longer than two minutes.
    pub async fn clear(&self) -> Result<()> {
        let (pool, scratch) = (Arc::clone(&self.pool), self.scratch.clone());
        let work = tokio::spawn(async move { remove_tree(&pool, &scratch).await });
        let failed = |kind, why: String| {
            Error::new(kind, Side::Pool, format!("remove {} from {}: {why}", self.scratch, self.pool.url()))
        };
        match tokio::time::timeout(CLEAR_LIMIT, work).await {
            Ok(Ok(Err(error))) if error.is(ErrorKind::NotFound) => Ok(()),
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => Err(failed(ErrorKind::Os(libc::EIO), error.to_string())),
            Err(_) => Err(failed(ErrorKind::Timeout, format!("not done after {CLEAR_LIMIT:?}"))),
        }
    }
}
