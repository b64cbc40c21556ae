//! Code that the tests of the whole workspace share.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "it is test code: a panic is a failed test")]

pub mod cache_node;
pub mod cluster;
pub mod disk;
pub mod engine;
pub mod expects;
pub mod held;
pub mod model;

pub mod http;
pub mod load;
pub mod mapped;
pub mod mount;
pub mod network;
pub mod observed;
pub mod process;
pub mod reading;
pub mod scratch;
pub mod servers;
pub mod settings;
pub mod strace;
pub mod sweep;
pub mod tree;
pub mod truth;
pub mod users;
pub mod webdriver;
