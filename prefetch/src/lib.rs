//! Decisions only: no I/O, no clock, no threads. The caller passes in what a decision depends on, so that each decision
//! can be replayed and tested.
//!
//! Each module decides one thing:
//!
//! * [`signature`]: which jobs are the same job again: user, account, program, script and shape of the arguments, with
//!   digits masked; apart from it the parameters: numbers and dates in the arguments, the array index
//! * [`profile`]: what the last runs read: of each file the size, the rank of its first use, its parts, and the runs
//!   that used it; `predict`: what the next run will read
//! * [`online`]: what a reader will open next, from what it opened; also which directory it will enter next
//! * [`plan`]: which expected files are worth their space and, before a deadline, their time
//! * [`eviction`]: which content goes first when the fast pool is full
//! * [`simulate`]: replays traces against the eviction policies and Belady

pub mod eviction;
pub mod online;
pub mod plan;
pub mod profile;
mod runs;
pub mod signature;
pub mod simulate;
