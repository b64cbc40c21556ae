//! A model of the engine: a small POSIX tree in memory. The same random operations run on the engine and on the model.
//! Outages and failures of the pool, changes by other clients, kills and power cuts happen among them.
//!
//! A case belongs to one [`World`]. In a quiet world the engine must equal the model after every operation. If other
//! clients change the pool, the model adopts what the engine shows after such a change, once every content is known to
//! come from the pool or from the mount. The engine must equal the model again until the next such change. After a
//! power cut the model returns to one of the moments since the last sync, and must contain everything that was
//! acknowledged.

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

pub use config::{Config, Flushing, Reading, World};
pub use op::{Allocate, Case, Exchange, Op, Other, Seeded, Spot, case};
pub use run::run;

/// Why a case failed: the operation, what was expected, and what was seen.
pub type Failure = String;
