//! The latencies of requests, by operation.

use std::sync::atomic::{AtomicU64, Ordering};

use forebay_backends::latency::{LatencyHistogram, LatencySnapshot};

macro_rules! operations {
    ($($variant:ident $name:literal),+ $(,)?) => {
        /// A kind of request that is counted: all that the daemon answers by a call of the engine.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Operation {
            $($variant),+
        }

        impl Operation {
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Returns the name of the request, as in `fuse_lowlevel_ops`.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name),+
                }
            }
        }
    };
}

operations! {
    Lookup "lookup",
    Getattr "getattr",
    Setattr "setattr",
    Readlink "readlink",
    Mknod "mknod",
    Mkdir "mkdir",
    Symlink "symlink",
    Link "link",
    Unlink "unlink",
    Rmdir "rmdir",
    Rename "rename",
    Open "open",
    Create "create",
    Read "read",
    Write "write",
    Flush "flush",
    Fsync "fsync",
    Opendir "opendir",
    Readdir "readdir",
    Readdirplus "readdirplus",
    Fsyncdir "fsyncdir",
    Statfs "statfs",
    Setxattr "setxattr",
    Getxattr "getxattr",
    Listxattr "listxattr",
    Removexattr "removexattr",
    Fallocate "fallocate",
    Lseek "lseek",
    CopyFileRange "copy_file_range",
}

/// The latencies of all requests since the start, from their arrival to their answer. A request pays for two looks at
/// the clock and three additions.
#[derive(Debug)]
pub struct RequestLatencies {
    of: Box<[LatencyHistogram]>,
    /// Requests that could not be answered at once, and wait.
    waiting: AtomicU64,
}

impl Default for RequestLatencies {
    fn default() -> Self {
        Self { of: Operation::ALL.iter().map(|_| LatencyHistogram::default()).collect(), waiting: AtomicU64::new(0) }
    }
}

impl RequestLatencies {
    pub(super) fn of(&self, operation: Operation) -> &LatencyHistogram {
        &self.of[operation as usize]
    }

    pub(super) fn wait(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn waited(&self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns how many requests wait for something.
    pub fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Returns the latencies of each operation, also of those without requests.
    pub fn snapshot(&self) -> Vec<(&'static str, LatencySnapshot)> {
        Operation::ALL.iter().map(|operation| (operation.name(), self.of(*operation).snapshot())).collect()
    }
}
