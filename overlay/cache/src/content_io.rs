//! Reads and writes of content files by the daemon itself: it writes fetched chunks and reads chunks to flush. Files
//! that are open in passthrough mode do not use it.

mod faults;
mod plain;
#[cfg(test)]
mod tests;
mod uring;

use std::collections::TryReserveError;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use forebay_backends::{Error, ErrorKind, Result, Side};

pub use faults::ContentFaults;
use plain::PlainIo;
use uring::{RingLimits, Uring};

/// The largest file offset of Linux (`loff_t`).
const OFFSET_MAX: u64 = i64::MAX as u64;

/// Positioned I/O on content files. Errors are of [`Side::Cache`].
///
/// The number of operations under way is bounded; further ones wait for a permit. Two operations on overlapping ranges
/// have no order unless one is awaited before the other begins.
///
/// Dropping a future does not cancel an operation that has begun: it runs on, keeps its file open and its buffer
/// allocated until the kernel is done with them, and may change the file after the drop. A caller that truncates the
/// file or reuses the range must await the operation instead.
#[async_trait]
pub trait ContentIo: Send + Sync + 'static {
    /// Writes all of `data` at byte `offset`; short writes are continued. After an error, any part of `data` may have
    /// been written. The file must not be open with `O_APPEND`.
    ///
    /// Errors: `NoSpace` and `Quota` as the fast pool reports; `TooLarge` past the largest offset.
    async fn write_at(&self, file: Arc<File>, offset: u64, data: Bytes) -> Result<()>;

    /// Reads up to `len` bytes at byte `offset`; fewer only at the end of the file, none beyond it.
    async fn read_at(&self, file: Arc<File>, offset: u64, len: usize) -> Result<Bytes>;

    /// `"io_uring"` or `"plain"`.
    fn name(&self) -> &'static str;
}

/// The requested implementation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Choice {
    /// io_uring if it works, else plain.
    #[default]
    Auto,
    /// io_uring; if it does not work, plain, and a reason is returned.
    Uring,
    /// `pread` and `pwrite` on tokio's blocking threads.
    Plain,
}

/// Returns io_uring if it was not declined and a round trip through it works, else plain. The text is the reason why
/// io_uring was requested and is not used. Blocks for at most five seconds, usually for a millisecond.
///
/// The plain implementation must be used within a tokio runtime.
pub fn open(choice: Choice) -> (Arc<dyn ContentIo>, Option<String>) {
    match choice {
        Choice::Plain => (Arc::new(PlainIo::new()), None),
        Choice::Auto | Choice::Uring => open_uring_or_plain(RingLimits::DEFAULT),
    }
}

fn open_uring_or_plain(limits: RingLimits) -> (Arc<dyn ContentIo>, Option<String>) {
    match Uring::start(limits) {
        Ok(uring) => (Arc::new(uring), None),
        Err(reason) => (Arc::new(PlainIo::new()), Some(reason)),
    }
}

/// Returns a range from the page cache, without waiting for a device. `None` unless all of it is cached; empty at or
/// beyond the end of the file.
pub fn read_now(file: &File, offset: u64, len: usize) -> Option<Bytes> {
    let mut buffer = buffer_for(offset, len).ok()?;
    let room = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: len };
    let at = libc::off_t::try_from(offset).ok()?;
    // SAFETY: the iovec covers `len` bytes that belong to `buffer`, which lives until the call is done.
    let read = unsafe { libc::preadv2(file.as_raw_fd(), &room, 1, at, libc::RWF_NOWAIT) };
    let read = usize::try_from(read).ok().filter(|read| *read == len || *read == 0)?;
    // SAFETY: the kernel has initialised this many bytes, within the capacity.
    unsafe { buffer.set_len(read) };
    Some(Bytes::from(buffer))
}

/// Refuses writes that end past the largest offset. (An offset of -1 means "the file's position" to io_uring.)
fn check_write(offset: u64, len: usize) -> Result<()> {
    match offset.checked_add(len as u64) {
        Some(end) if end <= OFFSET_MAX => Ok(()),
        _ => Err(Error::new(ErrorKind::TooLarge, Side::Cache, describe("write", offset, len))),
    }
}

/// Returns how much of a read lies below the largest offset. Refuses offsets past it.
fn clip_read(offset: u64, len: usize) -> Result<usize> {
    match OFFSET_MAX.checked_sub(offset) {
        Some(room) => Ok(usize::try_from(room).unwrap_or(usize::MAX).min(len)),
        None => Err(Error::new(ErrorKind::InvalidInput, Side::Cache, describe("read", offset, len))),
    }
}

/// Returns an empty buffer with room for `len` bytes. If the allocation fails, returns an error instead of aborting.
fn buffer_for(offset: u64, len: usize) -> Result<Vec<u8>> {
    let no_memory =
        |error: TryReserveError| Error::os(libc::ENOMEM, Side::Cache, describe("read", offset, len)).with_source(error);
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(len).map_err(no_memory)?;
    Ok(buffer)
}

/// Frees the memory that a short read did not need: the bytes may stay in a cache for long.
fn into_bytes(mut buffer: Vec<u8>) -> Bytes {
    if buffer.len() < buffer.capacity() / 2 {
        buffer.shrink_to_fit();
    }
    Bytes::from(buffer)
}

fn describe(what: &str, offset: u64, len: usize) -> String {
    format!("{what} {len} bytes at offset {offset} of a content file")
}
