//! How operators are told of what they asked for: a stream of progress that ends with a summary.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay_api::operator::{Progress, Summary};
use forebay_backends::{Error, Result};
use futures::channel::mpsc;
use parking_lot::Mutex;

/// How often it is told how far something is: often enough for a bar, and a million small files pile nothing up.
const ADVANCE_TOLD_EVERY: Duration = Duration::from_millis(50);

/// Where an operation reports to. A listener that went away does not end a flush or an eviction.
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
        let bytes = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let mut told = self.advance_told.lock();
        if told.elapsed() >= ADVANCE_TOLD_EVERY {
            *told = Instant::now();
            self.send(Progress::Advanced { files, bytes });
        }
    }

    pub fn failed(&self, path: String, error: &Error) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        self.send(Progress::Failed { path, reason: error.to_string() });
    }

    /// Counts files that did not come to their end, and of which nothing more is told.
    pub fn unfinished(&self, files: u64) {
        self.failed.fetch_add(files, Ordering::Relaxed);
    }

    /// Ends what was not to be done, with what it would have done.
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
        }));
    }

    /// Ends what is not ended yet: what came to an end with an error.
    pub fn finish(&self, result: Result<()>) {
        if let Err(error) = result {
            self.failed.fetch_add(1, Ordering::Relaxed);
            self.ended(Some(error.to_string()), Some(error.errno()));
        }
    }
}

/// Does something, whether somebody listens to the end or not.
pub(crate) fn reported<W>(work: impl FnOnce(Reporter) -> W) -> mpsc::UnboundedReceiver<Progress>
where
    W: Future<Output = Result<()>> + Send + 'static,
{
    let (reporter, receiver) = Reporter::new();
    let working = work(reporter.clone());
    tokio::spawn(async move { reporter.finish(working.await) });
    receiver
}
