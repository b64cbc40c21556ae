//! Replays a trace of requests against the policies of [`crate::eviction`], and against bounds that no policy can beat.

mod belady;
mod bound;
pub mod jobs;
pub mod oracle_general;
mod replay;
#[cfg(test)]
mod tests;
mod trace;

pub use belady::belady;
pub use bound::bound;
pub use replay::{Misses, replay};
pub use trace::{Trace, TraceError};
