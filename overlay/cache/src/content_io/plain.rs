//! Content I/O by `pread` and `pwrite` on tokio's blocking threads: works everywhere.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use forebay_backends::{Error, Result, Side};
use rustix::io::Errno;
use tokio::sync::Semaphore;
use tokio::task;

use super::{ContentIo, buffer_for, check_write, clip_read, describe, into_bytes};

/// The most operations under way at once. Each occupies one of the 512 blocking threads of tokio, which the whole
/// process shares.
const IN_FLIGHT_MAX: usize = 64;

pub(super) struct PlainIo {
    in_flight: Arc<Semaphore>,
}

impl PlainIo {
    pub fn new() -> Self {
        Self { in_flight: Arc::new(Semaphore::new(IN_FLIGHT_MAX)) }
    }

    /// Runs `work` on a blocking thread, which holds the permit: work of a dropped future counts until it ends.
    async fn run<T: Send + 'static>(
        &self,
        what: String,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<T> {
        let permit = Arc::clone(&self.in_flight).acquire_owned().await;
        let work: Box<dyn FnOnce() -> io::Result<T> + Send> = Box::new(move || {
            let _permit = permit;
            work()
        });
        let finished = task::spawn_blocking(work);
        match finished.await {
            Ok(result) => result.map_err(|error| Error::io(error, Side::Cache, what)),
            Err(stopped) => Err(Error::os(libc::ECANCELED, Side::Cache, what).with_source(stopped)),
        }
    }
}

#[async_trait]
impl ContentIo for PlainIo {
    async fn write_at(&self, file: Arc<File>, offset: u64, data: Bytes) -> Result<()> {
        check_write(offset, data.len())?;
        let what = describe("write", offset, data.len());
        self.run(what, move || file.write_all_at(&data, offset)).await
    }

    async fn read_at(&self, file: Arc<File>, offset: u64, len: usize) -> Result<Bytes> {
        let len = clip_read(offset, len)?;
        let mut buffer = buffer_for(offset, len)?;
        let work = move || {
            read_full(&file, offset, len, &mut buffer)?;
            Ok(into_bytes(buffer))
        };
        self.run(describe("read", offset, len), work).await
    }

    fn name(&self) -> &'static str {
        "plain"
    }
}

/// Appends to the empty `buffer`, which has room for `len` bytes, until it holds `len` or the file ends.
fn read_full(file: &File, offset: u64, len: usize, buffer: &mut Vec<u8>) -> io::Result<()> {
    while buffer.len() < len {
        let done = buffer.len();
        let room = &mut buffer.spare_capacity_mut()[..len - done];
        match rustix::io::pread(file, room, offset + done as u64) {
            Ok((read, _)) => {
                let more = read.len();
                if more == 0 {
                    break;
                }
                // SAFETY: `pread` initialised `more` bytes after the first `done` ones, within the capacity.
                unsafe { buffer.set_len(done + more) };
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}
