//! Content I/O by io_uring: one thread owns the ring, and callers send their operations to it.
//!
//! An operation owns its buffer and its file in [`op::RingOp`] from the moment it is sent until its completion. The
//! caller's future holds only the receiving end of a channel, so dropping it frees no memory that the kernel still
//! writes to.

mod driver;
mod op;
mod probe;
#[cfg(test)]
mod tests;
mod wake;

use std::fs::File;
use std::io;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use forebay_backends::{Error, ErrorKind, Result, Side};
use tokio::sync::{Semaphore, oneshot};

use super::{ContentIo, buffer_for, check_write, clip_read, describe};
use driver::Driver;
use op::{IoRequest, RingOp};
use wake::Wake;

/// How long the first round trip may take before io_uring counts as not working.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy)]
pub(super) struct RingLimits {
    /// Entries of the submission queue; the completion queue has twice as many.
    pub entries: u32,
    /// Operations under way at once.
    pub in_flight: usize,
    /// The most bytes that one submission reads or writes; longer operations take several steps.
    pub step_bytes: usize,
}

impl RingLimits {
    /// All operations and the wake-up fit into the submission queue, so completions never overflow. A step is the
    /// largest power of two below the most that Linux moves in one call (`MAX_RW_COUNT`, 2 GiB less a page), and fits a
    /// u32.
    pub const DEFAULT: Self = Self { entries: 128, in_flight: 127, step_bytes: 1 << 30 };
}

pub(super) struct Uring {
    /// `None` only during the drop.
    inbox: Option<mpsc::Sender<RingOp>>,
    wake: Arc<Wake>,
    in_flight: Arc<Semaphore>,
    thread: Option<JoinHandle<()>>,
}

impl Uring {
    /// Starts the thread and tries the ring. The error says why io_uring cannot be used.
    pub fn start(limits: RingLimits) -> Result<Self, String> {
        let wake = Arc::new(Wake::new().map_err(|error| format!("no eventfd for io_uring: {error}"))?);
        let (inbox, received) = mpsc::channel();
        let (started, outcome) = mpsc::sync_channel(1);
        let woken = Arc::clone(&wake);
        let body = move || match probe::working_ring(limits) {
            // If `start` no longer waits, the inbox is closed as well, and the driver ends at once.
            Ok(ring) => {
                let _ = started.send(Ok(()));
                Driver::new(ring, limits, received, woken).run();
            }
            Err(reason) => drop(started.send(Err(reason))),
        };
        let thread = thread::Builder::new()
            .name("content-io".into())
            .spawn(body)
            .map_err(|error| format!("no thread for io_uring: {error}"))?;
        match outcome.recv_timeout(PROBE_TIMEOUT) {
            Ok(Ok(())) => {}
            Ok(Err(reason)) => return Err(reason),
            Err(_) => {
                // The thread is abandoned: if the kernel answers later, the thread finds the inbox closed.
                drop(inbox);
                let _ = wake.signal();
                return Err(format!("io_uring did not answer within {PROBE_TIMEOUT:?}"));
            }
        }
        let in_flight = Arc::new(Semaphore::new(limits.in_flight));
        Ok(Self { inbox: Some(inbox), wake, in_flight, thread: Some(thread) })
    }

    /// Waits for a permit, sends the operation, and waits for its end.
    async fn run(&self, file: Arc<File>, offset: u64, request: IoRequest) -> io::Result<Bytes> {
        let permit = Arc::clone(&self.in_flight).acquire_owned().await.map_err(io::Error::other)?;
        let (reply, outcome) = oneshot::channel();
        let op = RingOp::new(file, offset, request, reply, permit);
        let sent = self.inbox.as_ref().is_some_and(|inbox| inbox.send(op).is_ok());
        if !sent {
            return Err(stopped());
        }
        self.wake.signal()?;
        outcome.await.unwrap_or_else(|_| Err(stopped()))
    }
}

impl Drop for Uring {
    /// Waits until all operations under way are done.
    fn drop(&mut self) {
        drop(self.inbox.take());
        let signalled = self.wake.signal();
        let Some(thread) = self.thread.take() else { return };
        // A reply runs the waker of the waiting task on the driver's thread; that may drop the last reference to this
        // ring.
        let on_driver = thread.thread().id() == thread::current().id();
        if signalled.is_ok() && !on_driver {
            let _ = thread.join();
        }
    }
}

#[async_trait]
impl ContentIo for Uring {
    async fn write_at(&self, file: Arc<File>, offset: u64, data: Bytes) -> Result<()> {
        check_write(offset, data.len())?;
        let len = data.len();
        if len == 0 {
            return Ok(());
        }
        let written = self.run(file, offset, IoRequest::Write(data)).await;
        written.map(drop).map_err(|error| as_error(error, || describe("write", offset, len)))
    }

    async fn read_at(&self, file: Arc<File>, offset: u64, len: usize) -> Result<Bytes> {
        let len = clip_read(offset, len)?;
        if len == 0 {
            return Ok(Bytes::new());
        }
        let request = IoRequest::Read { buffer: buffer_for(offset, len)?, len };
        let read = self.run(file, offset, request).await;
        read.map_err(|error| as_error(error, || describe("read", offset, len)))
    }

    fn name(&self) -> &'static str {
        "io_uring"
    }
}

/// The error after the thread has ended, which happens only if the kernel refuses the ring during its use.
fn stopped() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the io_uring thread has stopped; restart the daemon")
}

fn as_error(error: io::Error, what: impl FnOnce() -> String) -> Error {
    if error.raw_os_error().is_none() && error.kind() == io::ErrorKind::BrokenPipe {
        return Error::new(ErrorKind::Unavailable, Side::Cache, format!("{}: {error}", what()));
    }
    Error::io(error, Side::Cache, what())
}
