//! The arguments of `forebay scratch`.

use std::path::PathBuf;

use bytesize::ByteSize;
use clap::{Args, Subcommand};

use crate::values;

#[derive(Debug, Subcommand)]
pub enum ScratchCommand {
    /// Create a directory on the fast pool, and print its path. What is written there never passes through the mount.
    Create(ScratchCreateArgs),
    /// Move a file or a directory from a scratch directory into the mount. No byte is copied, and it appears in one step.
    Commit {
        /// A path in a scratch directory, or the directory itself.
        path: PathBuf,
        /// The path that it gets under the mount. A file may replace a file, and a directory an empty directory.
        dest: PathBuf,
        /// Merge the tree into DEST if it exists: files replace those of the same name, directories of the same name are
        /// merged, and what has no counterpart stays. Still in one step.
        #[arg(long)]
        merge: bool,
    },
    /// Remove a scratch directory with everything in it.
    Discard {
        /// The directory.
        path: PathBuf,
    },
    /// List the scratch directories.
    List {
        /// Show only those of the mount that this path lies in.
        #[arg(long, value_name = "PATH")]
        mount: Option<PathBuf>,
    },
}

#[derive(Debug, Args)]
pub struct ScratchCreateArgs {
    /// The job that it belongs to: it is removed when the allocation of this name is done. Its name is the job's.
    #[arg(long, value_name = "ID", value_parser = values::scratch_id)]
    pub job: Option<String>,
    /// Bytes to reserve. When it is full, writes are refused. Without it, as much as the fast pool has room for.
    #[arg(long, value_name = "BYTES")]
    pub size: Option<ByteSize>,
    /// The user who gets it. Only root may name another user.
    #[arg(long)]
    pub uid: Option<u32>,
    /// The mount that this path lies in. Not needed if there is only one mount.
    #[arg(long, value_name = "PATH")]
    pub mount: Option<PathBuf>,
}
