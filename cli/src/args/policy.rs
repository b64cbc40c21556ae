//! Arguments of `forebay policy`.

use std::path::PathBuf;

use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Check a policy file. Prints nothing if it is right; else the file, line and column of the first error.
    Check {
        /// The policy file.
        file: PathBuf,
    },
    /// Show what differs between two policy files. Exits with 1 if anything does.
    Diff {
        /// The policy file that is compared.
        old: PathBuf,
        /// The policy file with which it is compared.
        new: PathBuf,
    },
    /// Show the settings of a path, the rule that made each of them, and what happens next to the file.
    Explain {
        /// A file or directory under a mount.
        path: PathBuf,
    },
    /// Put a policy into force at a mount that is served, until it is unmounted.
    Apply {
        /// The policy file.
        file: PathBuf,
        /// A path in the mount. Default: the only mount.
        path: Option<PathBuf>,
        /// Show what would change, and change nothing.
        #[arg(long)]
        dry_run: bool,
    },
}
