//! The exchange directory as the hooks of a node see it.
//!
//! It lies on a file system that may not answer, such as NFS whose server is gone. A hook that waited for it would reach
//! Slurm's time limit, which drains the node. So each call waits for a limited time. When one was not answered, no other is
//! made: it would wait as long.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use forebay_daemon::{Failure, FailureKind};
use forebay_slurm::exchange::{Exchange, ExchangedRequest, NodeReport};
use forebay_slurm::outcome::JobOutcome;

/// How long a hook waits for one answer. With the time that a prolog has for itself, it is below Slurm's limit.
pub const EXCHANGE_ANSWER: Duration = Duration::from_secs(5);

/// An exchange directory, of which each call ends in bounded time.
#[derive(Debug, Clone)]
pub struct BoundedExchange {
    exchange: Exchange,
    answers: AnswerLimit,
}

/// Whether a file system answers.
#[derive(Debug, Clone)]
struct AnswerLimit {
    dir: PathBuf,
    limit: Duration,
    /// A call was not answered in time.
    is_silent: Arc<AtomicBool>,
}

impl AnswerLimit {
    fn new(dir: &Path, within: Duration) -> Self {
        Self { dir: dir.to_owned(), limit: within.min(EXCHANGE_ANSWER), is_silent: Arc::default() }
    }

    /// Makes a call in a thread of its own, which goes on waiting if the time is up.
    fn wait<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let (done, answer) = channel();
        if !self.is_silent.load(Ordering::Acquire) {
            std::thread::spawn(move || done.send(call()));
            if let Ok(answer) = answer.recv_timeout(self.limit) {
                return answer;
            }
            self.is_silent.store(true, Ordering::Release);
        }
        let what = format!("{} has not answered for {} s", self.dir.display(), self.limit.as_secs());
        Err(Failure::new(FailureKind::Other, what)
            .remedy("check the file system that the controller and the nodes share"))
    }
}

impl BoundedExchange {
    /// Returns `None` if there is no such directory. No call waits longer than `within`, or than [`EXCHANGE_ANSWER`].
    ///
    /// # Errors
    /// Another user may write to it; it does not answer.
    pub fn open(dir: &Path, within: Duration) -> Result<Option<Self>, Failure> {
        let (answers, dir) = (AnswerLimit::new(dir, within), dir.to_owned());
        let found = answers.wait(move || Exchange::open(&dir))?;
        Ok(found.map(|exchange| Self { exchange, answers }))
    }

    fn wait<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Exchange) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let exchange = self.exchange.clone();
        self.answers.wait(move || call(&exchange))
    }

    /// As [`Exchange::request`].
    pub fn request(&self, job: &str) -> Result<Option<ExchangedRequest>, Failure> {
        let job = job.to_owned();
        self.wait(move |exchange| exchange.request(&job))
    }

    /// As [`Exchange::outcome`].
    pub fn outcome(&self, job: &str, attempt: &str) -> Result<Option<JobOutcome>, Failure> {
        let (job, attempt) = (job.to_owned(), attempt.to_owned());
        self.wait(move |exchange| exchange.outcome(&job, &attempt))
    }

    /// As [`Exchange::reports`].
    pub fn reports(&self, job: &str, attempt: &str) -> Result<Vec<NodeReport>, Failure> {
        let (job, attempt) = (job.to_owned(), attempt.to_owned());
        self.wait(move |exchange| exchange.reports(&job, &attempt))
    }

    /// As [`Exchange::put_report`]. One that is not written in time may be written later, or not at all.
    pub fn put_report(&self, job: &str, report: NodeReport) -> Result<(), Failure> {
        let job = job.to_owned();
        self.wait(move |exchange| exchange.put_report(&job, &report))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_that_does_not_answer_is_not_waited_for_again() {
        let answers = AnswerLimit::new(Path::new("/exchange"), Duration::from_millis(1));
        let (_keeps, never) = channel::<()>();
        let silent = answers.wait(move || Ok(never.recv().is_ok())).unwrap_err();
        assert!(silent.what.contains("/exchange has not answered"), "{silent}");
        let (called, calls) = channel();
        assert!(answers.clone().wait(move || Ok(called.send(()).is_ok())).is_err());
        assert!(calls.recv().is_err(), "no call is made");
    }

    #[test]
    fn what_the_directory_says_is_passed_on() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let within = Duration::from_secs(60);
        let exchange = BoundedExchange::open(dir.path(), within).unwrap().unwrap();
        assert_eq!(exchange.request("7").unwrap(), None);
        assert!(exchange.request("no number").is_err());
        assert!(BoundedExchange::open(&dir.path().join("none"), within).unwrap().is_none());
    }
}
