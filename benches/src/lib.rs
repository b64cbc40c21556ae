//! The speed of a mount, as a ratio to a native directory on the file system of its fast pool.
//!
//! Everything is measured in pairs, native and mount in turns, so that other load on the machine affects both sides. A
//! row's figure is the median of the pairs' ratios, with their spread.

pub mod args;
pub mod bind;
pub mod caches;
pub mod fio;
pub mod interrupt;
pub mod machine;
pub mod mount;
pub mod pairs;
pub mod place;
pub mod report;
pub mod rows;
pub mod work;

/// A bench that fails prints its error and ends.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
