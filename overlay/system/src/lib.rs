//! What this machine says: processes, descriptors, the time of day.

pub mod clock;
pub mod descriptors;
pub mod process;
