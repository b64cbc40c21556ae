//! Checks what a pool can do, and runs the conformance suite in a scratch directory of the pool.

use std::sync::Arc;
use std::time::Duration;

use forebay_backends::conformance::{self, CaseVerdict, Trial};
use forebay_backends::{Capabilities, Pool, PoolLocation};
use futures::FutureExt;
use serde::Serialize;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::timeout;

use super::{Check, CheckVerdict, probes};
use crate::{Failure, FailureKind, limits};

/// One step of the check, reported as it happens.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "step", rename_all = "snake_case")]
pub enum CheckStep {
    /// The directory of the pool was checked.
    Looked(Check),
    Attached {
        pool: String,
        capabilities: Capabilities,
    },
    /// The plan for the suite.
    Planned {
        /// The scratch directory below the root of the pool; it is created and removed by this run.
        scratch: String,
        cases: usize,
        dry_run: bool,
    },
    Begun {
        case: &'static str,
    },
    Ended {
        case: &'static str,
        result: CaseEnd,
        reason: Option<String>,
    },
    Done(SuiteSummary),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CaseEnd {
    Passed,
    Failed,
    NotApplicable,
}

/// The result of the suite.
#[derive(Debug, Clone, Default, Serialize)]
pub struct SuiteSummary {
    pub passed: usize,
    pub failed: usize,
    pub not_applicable: usize,
    /// Cases that were not started, or were interrupted.
    pub not_run: usize,
    /// Why the scratch directory is still there.
    pub left_behind: Option<String>,
}

/// The outcome of the check.
#[derive(Debug, Clone)]
pub enum CheckOutcome {
    /// The directory of the pool lacks something that it needs.
    NotThere,
    /// A dry run.
    Planned,
    Tried(SuiteSummary),
}

/// A pool to check.
#[derive(Debug)]
pub struct CandidatePool {
    location: PoolLocation,
}

impl CandidatePool {
    /// # Errors
    /// `Usage` if it is no URL of a pool. No request is made.
    pub fn parse(url: &str) -> Result<Self, Failure> {
        let location = PoolLocation::parse(url).map_err(|error| Failure::usage(error.to_string()))?;
        Ok(Self { location })
    }

    /// Attaches the pool, runs the suite unless `dry_run` is set, and reports each step to `tell`. SIGINT, SIGTERM or
    /// SIGHUP stops the suite, and the scratch directory is removed; a second signal stops the removal, too.
    ///
    /// # Errors
    /// If the pool cannot be attached or written to, or a signal came before anything was done.
    pub fn examine(&self, dry_run: bool, tell: &mut dyn FnMut(&CheckStep)) -> Result<CheckOutcome, Failure> {
        if let PoolLocation::Directory(dir) = &self.location {
            let check = probes::pool_dir(dir);
            let there = check.verdict == CheckVerdict::Ok;
            tell(&CheckStep::Looked(check));
            if !there {
                return Ok(CheckOutcome::NotThere);
            }
        }
        let runtime = Runtime::new().map_err(|error| Failure::io("start threads", &error))?;
        let task = async {
            let stop = Stop::on_signals()?;
            let pool = self.attach(&stop).await?;
            let outcome = examine(pool, dry_run, &stop, tell).await;
            drop(stop);
            rest().await;
            outcome
        };
        let outcome = runtime.block_on(task.boxed_local());
        // A call to a file system that hangs never ends; do not wait for it.
        runtime.shutdown_background();
        outcome
    }

    async fn attach(&self, stop: &Stop) -> Result<Arc<dyn Pool>, Failure> {
        let location = self.location.clone();
        // On a thread of its own: opening a directory may block.
        let opening = tokio::spawn(async move { location.open(limits::POOL_ATTACH).await }.boxed());
        // The first signal does not interrupt attaching, so that a probe of the server leaves nothing behind.
        let opened = tokio::select! {
            opened = timeout(limits::POOL_ATTACH, opening) => opened,
            () = stop.asked(2) => return Err(interrupted()),
        };
        match opened {
            Ok(Ok(pool)) => Ok(pool?),
            Ok(Err(error)) => Err(Failure::new(FailureKind::Other, format!("attach the pool: {error}"))),
            Err(_) => {
                let what = format!("the pool was not attached within {} s", limits::POOL_ATTACH.as_secs());
                Err(Failure::new(FailureKind::PoolUnavailable, what).remedy("check its servers and the network"))
            }
        }
    }
}

async fn examine(
    pool: Arc<dyn Pool>,
    dry_run: bool,
    stop: &Stop,
    tell: &mut dyn FnMut(&CheckStep),
) -> Result<CheckOutcome, Failure> {
    let (cases, scratch) = (conformance::cases(), Trial::unique_name());
    let capabilities = pool.capabilities().clone();
    let read_only = capabilities.read_only;
    tell(&CheckStep::Attached { pool: pool.url(), capabilities });
    if stop.count() > 0 {
        return Err(interrupted());
    }
    let planned = CheckStep::Planned { scratch: scratch.to_string(), cases: cases.len(), dry_run };
    if dry_run {
        tell(&planned);
        return Ok(CheckOutcome::Planned);
    }
    let to_see = "its capabilities are above; use a writable pool, or leave out the suite with --dry-run";
    if read_only {
        let what = format!("{} is read-only: the suite needs to write", pool.url());
        return Err(Failure::new(FailureKind::Incomplete, what).remedy(to_see));
    }
    let beginning = tokio::spawn(Trial::begin(pool, scratch.clone()).boxed());
    let begun = tokio::select! {
        begun = timeout(limits::POOL_CHECK, beginning) => begun,
        () = stop.asked(2) => return Err(interrupted().remedy(format!("check whether {scratch} is in the pool"))),
    };
    let trial = match begun {
        Ok(Ok(begun)) => begun.map_err(|error| Failure::from(error).remedy(to_see))?,
        Ok(Err(error)) => return Err(Failure::new(FailureKind::Other, format!("make {scratch}: {error}"))),
        Err(_) => {
            let what = format!("{scratch} was not made within {} s", limits::POOL_CHECK.as_secs());
            let remedy = "check the pool's servers, and whether the directory exists all the same";
            return Err(Failure::new(FailureKind::PoolUnavailable, what).remedy(remedy));
        }
    };
    tell(&planned);
    let mut summary = SuiteSummary { not_run: cases.len(), ..SuiteSummary::default() };
    for case in cases {
        tell(&CheckStep::Begun { case: case.name });
        let Some(verdict) = trial.run(case, limits::POOL_CASE, stop.asked(1)).await else { break };
        summary.not_run -= 1;
        let (result, reason) = match verdict {
            CaseVerdict::Passed => (CaseEnd::Passed, None),
            CaseVerdict::NotApplicable => (CaseEnd::NotApplicable, None),
            CaseVerdict::Failed(why) => (CaseEnd::Failed, Some(why)),
        };
        match result {
            CaseEnd::Passed => summary.passed += 1,
            CaseEnd::Failed => summary.failed += 1,
            CaseEnd::NotApplicable => summary.not_applicable += 1,
        }
        tell(&CheckStep::Ended { case: case.name, result, reason });
        if stop.count() > 0 {
            break;
        }
    }
    let cleared = tokio::select! {
        cleared = trial.clear() => cleared.map_err(|error| error.to_string()),
        () = stop.asked(2) => Err("interrupted".to_owned()),
    };
    summary.left_behind = cleared.err().map(|why| format!("{scratch} is still in the pool: {why}"));
    tell(&CheckStep::Done(summary.clone()));
    Ok(CheckOutcome::Tried(summary))
}

/// Waits for a limited time for background work of calls that were interrupted.
async fn rest() {
    const PAUSE: Duration = Duration::from_millis(20);
    let metrics = tokio::runtime::Handle::current().metrics();
    let quiet = async {
        while metrics.num_alive_tasks() > 0 {
            tokio::time::sleep(PAUSE).await;
        }
    };
    // Connections that a server keeps open are no background work.
    let _ = timeout(limits::POOL_REST, quiet).await;
}

fn interrupted() -> Failure {
    Failure::new(FailureKind::Incomplete, "interrupted before anything was done in the pool")
}

/// Counts the signals that ask this program to end.
struct Stop {
    count: watch::Receiver<u32>,
    listening: tokio::task::AbortHandle,
}

impl Stop {
    fn on_signals() -> Result<Self, Failure> {
        let listen = |kind| signal(kind).map_err(|error| Failure::io("listen to signals", &error));
        let mut interrupt = listen(SignalKind::interrupt())?;
        let mut terminate = listen(SignalKind::terminate())?;
        let mut hangup = listen(SignalKind::hangup())?;
        let (counter, count) = watch::channel(0);
        let task = async move {
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                    _ = hangup.recv() => {}
                }
                counter.send_modify(|count| *count += 1);
            }
        };
        let listening = tokio::spawn(task.boxed());
        Ok(Self { count, listening: listening.abort_handle() })
    }

    fn count(&self) -> u32 {
        *self.count.borrow()
    }

    /// Returns when the program got `times` signals.
    async fn asked(&self, times: u32) {
        let mut count = self.count.clone();
        if count.wait_for(|count| *count >= times).await.is_err() {
            // The listener has ended, so no more signals are counted.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        self.listening.abort();
    }
}
