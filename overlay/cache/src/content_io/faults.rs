//! Writes of content files that fail on purpose, as on a full device or at a quota of the file system; for tests.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use forebay_backends::{Error, Result, Side};

use super::{ContentIo, describe};

/// The error of all writes. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct ContentFaults(Arc<AtomicI32>);

impl ContentFaults {
    /// Makes all writes fail with this errno from now on; 0: none.
    pub fn fail_writes(&self, errno: i32) {
        self.0.store(errno, Ordering::Release);
    }

    /// Returns the same I/O with these faults.
    pub fn over(&self, io: Arc<dyn ContentIo>) -> Arc<dyn ContentIo> {
        Arc::new(FaultyContentIo { io, faults: self.clone() })
    }
}

struct FaultyContentIo {
    io: Arc<dyn ContentIo>,
    faults: ContentFaults,
}

#[async_trait]
impl ContentIo for FaultyContentIo {
    async fn write_at(&self, file: Arc<File>, offset: u64, data: Bytes) -> Result<()> {
        match self.faults.0.load(Ordering::Acquire) {
            0 => self.io.write_at(file, offset, data).await,
            errno => Err(Error::os(errno, Side::Cache, describe("write", offset, data.len()))),
        }
    }

    async fn read_at(&self, file: Arc<File>, offset: u64, len: usize) -> Result<Bytes> {
        self.io.read_at(file, offset, len).await
    }

    fn name(&self) -> &'static str {
        self.io.name()
    }
}
