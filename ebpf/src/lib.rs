//! The observer: eBPF programs that see which job touches which bytes of which file, and what is read from them here.

mod batch;
mod hooks;
mod kernel_types;
pub mod layout;
mod observer;
mod places;
mod programs;
mod records;
mod touches;

pub use hooks::{Hook, HookState, probe, unseen_reads};
pub use layout::{Count, Key, NO_JOB, Record, Way};
pub use observer::{Dropped, Observer, Options, Ring};
pub use places::Place;
pub use touches::FirstTouch;

/// Why there is no observer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel lacks what it needs.
    #[error("{0}")]
    Kernel(String),
    /// This process may not load programs.
    #[error("CAP_BPF and CAP_PERFMON are not held")]
    Denied,
    #[error("{what}: {source}")]
    Bpf { what: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
}
