//! How fast a mount is, as a ratio to the native directory that holds its fast pool.
//!
//! Everything is measured in pairs, native and mount one after the other and in turns, so that what else the machine
//! does falls on both. A row's figure is the median of the pairs' ratios, with their spread.

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

/// A bench that fails says why and ends.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
