//! Arguments of `forebay quota`.

use std::path::PathBuf;

use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub enum QuotaCommand {
    /// Show what users and groups hold, and what they may. The policy sets quotas: see `forebay policy apply`.
    Show {
        /// A path in the mount. Default: the only mount.
        path: Option<PathBuf>,
    },
    /// Add up what the catalog has, and compare it with the counts in use. Exits with 1 if anything differs.
    Check {
        /// A path in the mount. Default: the only mount.
        path: Option<PathBuf>,
    },
}
