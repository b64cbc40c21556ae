//! The thread that owns the ring: it receives operations, submits them, continues short ones, and sends the results.

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use io_uring::{IoUring, opcode, types};

use super::op::{OpProgress, RingOp};
use super::wake::Wake;
use super::{RingLimits, stopped};

/// The `user_data` of the wake-up; for operations, it is their slot.
const WAKE: u64 = u64::MAX;

/// Pause after the kernel had no memory for a submission and no completion was ready.
const KERNEL_BUSY_REST: Duration = Duration::from_millis(1);

pub(super) struct Driver {
    ring: IoUring,
    limits: RingLimits,
    inbox: mpsc::Receiver<RingOp>,
    wake: Arc<Wake>,
    in_flight: OpsInFlight,
    /// Slots of operations to submit.
    ready: VecDeque<usize>,
    /// Slot and result of each completion. Empty between two rounds; it is kept to reuse its memory.
    completions: Vec<(u64, i32)>,
    /// All senders are gone: operations in flight are finished, and no new ones arrive.
    closing: bool,
}

impl Driver {
    pub fn new(ring: IoUring, limits: RingLimits, inbox: mpsc::Receiver<RingOp>, wake: Arc<Wake>) -> Self {
        Self {
            ring,
            limits,
            inbox,
            wake,
            in_flight: OpsInFlight::default(),
            ready: VecDeque::new(),
            completions: Vec::new(),
            closing: false,
        }
    }

    /// Returns when the inbox is closed and all operations are done, or when the kernel refuses the ring. No case of
    /// the latter is known; it ends all operations with an error.
    pub fn run(mut self) {
        if let Err(error) = self.work() {
            tracing::error!(%error, "the kernel refuses the ring: content I/O has stopped");
        }
    }

    fn work(&mut self) -> io::Result<()> {
        while !self.closing || !self.in_flight.is_empty() {
            self.fill_submissions();
            self.enter()?;
            self.take_completions()?;
        }
        Ok(())
    }

    /// Fills the submission queue. Operations that do not fit wait for the next round.
    fn fill_submissions(&mut self) {
        let mut submissions = self.ring.submission();
        if !self.closing && !self.in_flight.wake_armed && !submissions.is_full() {
            let number: *mut u64 = &mut *self.in_flight.wake_number;
            let entry = opcode::Read::new(types::Fd(self.wake.raw_fd()), number.cast(), size_of::<u64>() as u32)
                .build()
                .user_data(WAKE);
            self.in_flight.wake_armed = true;
            // SAFETY: the number and the eventfd live until the completion, or are leaked (see `OpsInFlight`).
            let pushed = unsafe { submissions.push(&entry) };
            assert!(pushed.is_ok(), "there was room");
        }
        while !submissions.is_full() {
            let Some(slot) = self.ready.pop_front() else { break };
            let entry = self.in_flight.op(slot).entry(self.limits.step_bytes).user_data(slot as u64);
            // SAFETY: buffer and file belong to the operation, which stays in its slot until the completion, or is
            // leaked (see `OpsInFlight`).
            let pushed = unsafe { submissions.push(&entry) };
            assert!(pushed.is_ok(), "there was room");
        }
    }

    /// Submits, and waits for at least one completion, unless it is interrupted.
    fn enter(&mut self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR) => Ok(()),
                // The kernel has no memory for a submission, or overflowed completions must be consumed first.
                // Submissions that the kernel did not accept stay in the queue.
                Some(libc::EAGAIN | libc::EBUSY) => {
                    if self.ring.completion().is_empty() {
                        thread::sleep(KERNEL_BUSY_REST);
                    }
                    Ok(())
                }
                _ => Err(error),
            },
        }
    }

    /// Processes the completions. Overflowed ones follow in the next round: the kernel keeps them
    /// (`IORING_FEAT_NODROP`).
    fn take_completions(&mut self) -> io::Result<()> {
        let mut completions = mem::take(&mut self.completions);
        completions.extend(self.ring.completion().map(|completion| (completion.user_data(), completion.result())));
        for (user_data, result) in completions.drain(..) {
            if user_data == WAKE {
                self.in_flight.wake_armed = false;
                self.woken(result)?;
                continue;
            }
            let slot = user_data as usize;
            match self.in_flight.op(slot).complete(result) {
                OpProgress::Submit => self.ready.push_back(slot),
                OpProgress::Finish(result) => self.in_flight.take(slot).finish(result),
            }
        }
        self.completions = completions;
        Ok(())
    }

    fn woken(&mut self, result: i32) -> io::Result<()> {
        if result < 0 && !matches!(-result, libc::EINTR | libc::EAGAIN) {
            return Err(io::Error::from_raw_os_error(-result));
        }
        self.wake.acknowledge();
        loop {
            match self.inbox.try_recv() {
                Ok(op) => {
                    let slot = self.in_flight.put(op);
                    self.ready.push_back(slot);
                }
                Err(mpsc::TryRecvError::Empty) => return Ok(()),
                Err(mpsc::TryRecvError::Disconnected) => {
                    self.closing = true;
                    return Ok(());
                }
            }
        }
    }
}

/// All memory that the kernel may be reading from or writing to.
///
/// Closing a ring does not wait for its operations. So operations that remain when this is dropped, because the thread
/// panicked or the kernel refused the ring, are leaked: a leak is better than memory that the kernel writes to after
/// its reuse.
#[derive(Default)]
struct OpsInFlight {
    /// Never longer than the number of operations that callers were permitted at once.
    slots: Vec<Option<RingOp>>,
    free: Vec<usize>,
    /// Receives the eventfd's counter, whose value is not used.
    wake_number: Box<u64>,
    wake_armed: bool,
}

impl OpsInFlight {
    fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len() && !self.wake_armed
    }

    fn put(&mut self, op: RingOp) -> usize {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        assert!(self.slots[slot].is_none(), "slot {slot} is free");
        self.slots[slot] = Some(op);
        slot
    }

    fn op(&mut self, slot: usize) -> &mut RingOp {
        match &mut self.slots[slot] {
            Some(op) => op,
            None => unreachable!("slot {slot} holds an operation"),
        }
    }

    fn take(&mut self, slot: usize) -> RingOp {
        match self.slots[slot].take() {
            Some(op) => {
                self.free.push(slot);
                op
            }
            None => unreachable!("slot {slot} holds an operation"),
        }
    }
}

impl Drop for OpsInFlight {
    fn drop(&mut self) {
        if self.wake_armed {
            mem::forget(mem::take(&mut self.wake_number));
        }
        for op in self.slots.drain(..).flatten() {
            op.abandon(stopped());
        }
    }
}

/// Ends in the way the thread does when it panics with `op` under way.
#[cfg(test)]
pub(super) fn die_with(op: RingOp) {
    OpsInFlight::default().put(op);
}
