//! What the tests of the whole share.

pub mod mount;
pub mod process;
