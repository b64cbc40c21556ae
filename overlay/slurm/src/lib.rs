//! Slurm's calls, in terms of allocations (`forebay_api::allocations`). This crate knows neither sockets nor mounts: the
//! caller carries out the verbs.
//!
//! | module | does |
//! |---|---|
//! | `phases` | what a prolog and an epilog do at one mount |
//! | `directives` | the `#DW` lines of a job script, as a request |
//! | `exchange` | what the controller and the nodes of a job tell each other |
//! | `outcome` | how a job ended, and what becomes of its results |
//! | `site` | checks the configuration of Slurm |
//!
//! Slurm's own promises, which these calls rely on (prolog_epilog guide of Slurm 22.05 and 24.11): a prolog runs as
//! root before any process of the job, without a user's environment; if it fails, the node is drained and the job is
//! held; an epilog runs when all processes of the job are gone; if it fails, the node is drained.

pub mod directives;
mod environment;
pub mod exchange;
pub mod outcome;
mod phases;
pub mod site;

pub use environment::{JobNode, SlurmJob, job_name};
pub use phases::{JobRemains, MountShare, Prologue, end, epilog, give_up, prolog};
