//! Reports the progress of an operation to the operator: a stream that ends with a summary.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay_api::operator::{Progress, Summary};
use forebay_backends::{Error, Result};
use futures::FutureExt;
use futures::channel::mpsc;
use parking_lot::Mutex;

/// The interval of progress messages: often enough for a progress bar, and a million small files queue up few messages.
const ADVANCE_TOLD_EVERY: Duration = Duration::from_millis(50);

/// Where an operation reports to. If the receiver is dropped, a flush or an eviction goes on.
#[derive(Clone)]
pub(crate) struct Reporter {
    sender: mpsc::UnboundedSender<Progress>,
    files: Arc<AtomicU64>,
    bytes: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
    pub skipped: Arc<AtomicU64>,
    begun: Instant,
    advance_told: Arc<Mutex<Instant>>,
}

impl Reporter {
    pub fn new() -> (Self, mpsc::UnboundedReceiver<Progress>) {
        let (sender, receiver) = mpsc::unbounded();
        let zero = || Arc::new(AtomicU64::new(0));
        let begun = Instant::now();
        let advance_told = Arc::new(Mutex::new(begun));
        let reporter =
            Self { sender, files: zero(), bytes: zero(), failed: zero(), skipped: zero(), begun, advance_told };
        (reporter, receiver)
    }

    pub fn send(&self, progress: Progress) {
        let _ = self.sender.unbounded_send(progress);
    }

    pub fn advanced(&self, bytes: u64) {
        let files = self.files.fetch_add(1, Ordering::Relaxed) + 1;
        let mut told = self.advance_told.lock();
        // Under the lock, no other call changes the sum.
        let bytes = self.bytes.load(Ordering::Relaxed).saturating_add(bytes);
        self.bytes.store(bytes, Ordering::Relaxed);
        if told.elapsed() >= ADVANCE_TOLD_EVERY {
            *told = Instant::now();
            self.send(Progress::Advanced { files, bytes });
        }
    }

    pub fn failed(&self, path: String, error: &Error) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        self.send(Progress::Failed { path, reason: error.to_string() });
    }

    /// Counts files as failed that did not finish, and that no other message names.
    pub fn unfinished(&self, files: u64) {
        self.failed.fetch_add(files, Ordering::Relaxed);
    }

    /// Ends a dry run, with what the operation would have done.
    pub fn planned(&self, files: u64, bytes: u64, message: Option<String>) {
        self.files.store(files, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
        self.done(message);
    }

    pub fn done(&self, message: Option<String>) {
        self.ended(message, None);
    }

    fn ended(&self, message: Option<String>, refused: Option<i32>) {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        self.send(Progress::Done(Summary {
            files: get(&self.files),
            bytes: get(&self.bytes),
            failed: get(&self.failed),
            skipped: get(&self.skipped),
            elapsed_ms: self.begun.elapsed().as_millis() as u64,
            message,
            refused,
            members: Vec::new(),
        }));
    }

    /// Ends the stream of an operation that failed, with its error.
    pub fn finish(&self, result: Result<()>) {
        if let Err(error) = result {
            self.failed.fetch_add(1, Ordering::Relaxed);
            self.ended(Some(error.to_string()), Some(error.errno()));
        }
    }
}

/// Runs an operation to its end, even if the receiver is dropped.
pub(crate) fn reported<W>(work: impl FnOnce(Reporter) -> W) -> mpsc::UnboundedReceiver<Progress>
where
    W: Future<Output = Result<()>> + Send + 'static,
{
    let (reporter, receiver) = Reporter::new();
    let working = work(reporter.clone());
    tokio::spawn(async move { reporter.finish(working.await) }.boxed());
    receiver
}
