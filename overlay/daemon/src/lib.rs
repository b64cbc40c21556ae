//! The local API of a daemon, and the two processes behind a mount.
//!
//! A mount has a *supervisor*, which holds the `/dev/fuse` descriptor and does nothing else, and a *worker*, which
//! serves the descriptor, the catalog and the control socket. If the worker dies, nothing is lost: the descriptor keeps
//! the mount alive, and the supervisor starts another worker on it.
//!
//! Operators send JSON lines to the worker over a unix socket in the runtime directory of the mount. Commands find the
//! mount of a path by its text alone, so that no command ever waits for a mount that does not answer.

mod addresses;
pub mod cache_node;
pub mod child;
pub mod client;
pub mod config;
mod confinement;
pub mod doctor;
pub mod limits;
pub mod metrics;
pub mod multi_mount;
pub mod offline;
pub mod peers;
pub mod policy_files;
pub mod preflight;
pub mod process_discovery;
pub mod registry;
pub mod remount;
pub mod server;
pub mod signals;
pub mod supervisor;
pub mod unmount;
pub mod view_mounts;
pub mod worker;

pub use forebay_api::{Failure, FailureKind, paths, protocol};
pub use forebay_system::{capabilities, mounts};

/// The hidden command by which the program runs itself as a supervisor.
pub const SUPERVISE_COMMAND: &str = "supervise";
/// The hidden command by which a supervisor runs the program as a worker.
pub const WORKER_COMMAND: &str = "daemon";

/// Ends this process without the handlers of `exit(3)`. They destroy what the threads of an engine may still use, and then
/// the process ends by SIGABRT. What is not flushed is lost.
pub fn end_process(code: u8) -> ! {
    // SAFETY: it ends the process, and does nothing else.
    unsafe { libc::_exit(code.into()) }
}
