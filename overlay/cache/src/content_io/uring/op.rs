//! One operation under way: the memory that the kernel reads from or writes to, and the channel for the result.

use std::fs::File;
use std::io;
use std::mem;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use bytes::Bytes;
use io_uring::{opcode, squeue, types};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::content_io::into_bytes;

/// Interruptions without progress after which an operation is given up.
const INTERRUPTIONS_MAX: u32 = 1000;

pub(super) enum IoRequest {
    Write(Bytes),
    /// `buffer` starts empty and has room for `len` bytes.
    Read {
        buffer: Vec<u8>,
        len: usize,
    },
}

/// The next step of an operation after a completion.
#[derive(Debug)]
pub(super) enum OpProgress {
    /// Submit the remaining bytes.
    Submit,
    Finish(io::Result<()>),
}

/// An operation. Its buffer does not move in memory when the operation is moved: it is on the heap, or static.
pub(super) struct RingOp {
    file: Arc<File>,
    offset: u64,
    request: IoRequest,
    done_bytes: usize,
    /// Bytes that the current submission requests.
    step_bytes: usize,
    /// Interruptions since the last progress.
    interruptions: u32,
    reply: oneshot::Sender<io::Result<Bytes>>,
    /// Returned when the operation is dropped, even if its future was dropped before.
    permit: OwnedSemaphorePermit,
}

impl RingOp {
    pub fn new(
        file: Arc<File>,
        offset: u64,
        request: IoRequest,
        reply: oneshot::Sender<io::Result<Bytes>>,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        Self { file, offset, request, done_bytes: 0, step_bytes: 0, interruptions: 0, reply, permit }
    }

    /// Returns the next submission, of at most `step_bytes_max`. The caller that submits it must not touch or drop
    /// `self` before the completion.
    pub fn entry(&mut self, step_bytes_max: usize) -> squeue::Entry {
        let fd = types::Fd(self.file.as_raw_fd());
        let at = self.offset + self.done_bytes as u64;
        self.step_bytes = (self.len() - self.done_bytes).min(step_bytes_max);
        let step = u32::try_from(self.step_bytes).unwrap_or(u32::MAX);
        match &mut self.request {
            IoRequest::Write(data) => opcode::Write::new(fd, data[self.done_bytes..].as_ptr(), step).offset(at).build(),
            IoRequest::Read { buffer, .. } => {
                let room = buffer.spare_capacity_mut().as_mut_ptr().cast();
                opcode::Read::new(fd, room, step).offset(at).build()
            }
        }
    }

    /// Processes the result of the current submission: a count of bytes, or a negated errno.
    pub fn complete(&mut self, result: i32) -> OpProgress {
        let Ok(moved) = usize::try_from(result) else {
            return self.failed(-result);
        };
        assert!(moved <= self.step_bytes, "the kernel moved {moved} of {} bytes", self.step_bytes);
        self.interruptions = 0;
        self.done_bytes += moved;
        match &mut self.request {
            IoRequest::Write(_) if moved == 0 => return OpProgress::Finish(Err(io::ErrorKind::WriteZero.into())),
            IoRequest::Write(_) => {}
            IoRequest::Read { buffer, .. } => {
                // SAFETY: the kernel initialised this many bytes, within the room of the entry.
                unsafe { buffer.set_len(self.done_bytes) };
                if moved == 0 {
                    return OpProgress::Finish(Ok(())); // the end of the file
                }
            }
        }
        if self.done_bytes == self.len() { OpProgress::Finish(Ok(())) } else { OpProgress::Submit }
    }

    fn failed(&mut self, errno: i32) -> OpProgress {
        self.interruptions += 1;
        if matches!(errno, libc::EINTR | libc::EAGAIN) && self.interruptions <= INTERRUPTIONS_MAX {
            return OpProgress::Submit;
        }
        OpProgress::Finish(Err(io::Error::from_raw_os_error(errno)))
    }

    fn len(&self) -> usize {
        match &self.request {
            IoRequest::Write(data) => data.len(),
            IoRequest::Read { len, .. } => *len,
        }
    }

    /// Sends the result to the caller, if its future still exists. The kernel must be done with the operation.
    pub fn finish(self, result: io::Result<()>) {
        let Self { file, request, reply, permit, .. } = self;
        let answer = result.map(|()| match request {
            IoRequest::Read { buffer, .. } => into_bytes(buffer),
            IoRequest::Write(_) => Bytes::new(),
        });
        // Dropped first, so that the caller finds the file closed and the permit free.
        drop((file, permit));
        let _ = reply.send(answer);
    }

    /// Sends an error, and leaks the buffer and the file, because the kernel may still use them.
    pub fn abandon(self, error: io::Error) {
        let Self { file, request, reply, .. } = self;
        mem::forget((file, request));
        let _ = reply.send(Err(error));
    }
}
