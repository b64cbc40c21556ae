//! A model of the engine: a small POSIX tree in memory, driven beside the engine through the same random
//! operations, with outages and failures of the pool, changes by others, kills and power cuts among them.
//!
//! A case is of one [`World`]. In a quiet world the engine must equal the model after every operation. Where
//! others change the pool, the model takes over what the engine shows after such a change, once that was found
//! to be the pool's or ours, and equals it again until the next one. Where power is cut, the model goes back to
//! one of the moments since the last sync, and what was acknowledged must be there.

mod check;
mod config;
mod content;
mod effects;
mod end;
mod files;
mod machine;
mod names;
mod op;
mod others;
mod power;
mod reading;
mod run;
mod tree;
mod view;

pub use config::{Config, Flushing, World};
pub use op::{Allocate, Case, Exchange, Op, Other, Seeded, Spot, case};
pub use run::run;

/// Why a case failed: what was done, expected and seen.
pub type Failure = String;
