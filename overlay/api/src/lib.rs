//! What is said over the control socket: the words of operators and of the daemon. It knows nothing of the engine.

mod failure;
pub mod foresight;
pub mod jobs;
pub mod operator;
pub mod paths;
pub mod protocol;

pub use failure::{Failure, FailureKind};
