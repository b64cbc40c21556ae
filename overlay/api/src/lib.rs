//! The protocol of the control socket: the types of requests and replies. This crate does not know the engine.

pub mod allocations;
mod failure;
pub mod foresight;
pub mod jobs;
pub mod operator;
pub mod paths;
pub mod peers;
pub mod policy;
pub mod protocol;
pub mod quotas;
pub mod scratch;
pub mod views;

pub use failure::{Failure, FailureKind};
