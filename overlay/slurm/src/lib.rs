//! Slurm's calls, in terms of allocations (`forebay_api::allocations`). This crate knows neither sockets nor mounts: the
//! caller carries out the verbs. `site` checks the configuration of Slurm.
//!
//! Slurm's own promises, which these calls rely on (prolog_epilog guide of Slurm 22.05 and 24.11): a prolog runs as
//! root before any process of the job, without a user's environment; if it fails, the node is drained and the job is
//! held; an epilog runs when all processes of the job are gone; if it fails, the node is drained.

mod environment;
mod phases;
pub mod site;

pub use environment::{SlurmJob, job_name};
pub use phases::{epilog, prolog};
