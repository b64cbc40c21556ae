//! Decisions, and nothing else: no I/O, no clock, no threads. What a decision needs to know is passed in, so that every
//! one of them can be replayed and tested.

pub mod eviction;
pub mod online;
pub mod plan;
pub mod profile;
mod runs;
pub mod signature;
pub mod simulate;
