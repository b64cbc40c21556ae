//! The arguments of `forebay view`, and of `forebay stage --view`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Args)]
pub struct ViewArgs {
    /// Afterwards show each PATH as a view: a read-only tree of the staged versions, at the speed of the fast pool's own
    /// file system. It ends with its lease. Only root may do that.
    #[arg(long, conflicts_with_all = ["command", "within", "dry_run"])]
    pub view: bool,
    /// Show the view only in the mount namespace of this process of a job. It ends with the job.
    #[arg(long, value_name = "PID", requires = "view")]
    pub for_job: Option<u32>,
    /// Copy files into the view that cannot be linked, because the fast pool has several devices, for example.
    #[arg(long, requires = "view")]
    pub allow_copy: bool,
}

#[derive(Debug, Subcommand)]
pub enum ViewCommand {
    /// List the views.
    List {
        /// Show only those of the mount that this path lies in.
        path: Option<PathBuf>,
    },
    /// Show a view, and what the pool has newer than it.
    Show {
        /// The path that it shows, or its name.
        view: PathBuf,
    },
    /// End a view and its lease: the mount is seen again at its path. The files stay until their space is needed.
    End {
        /// The path that it shows, or its name.
        view: PathBuf,
        /// Also if programs use it: they keep what they have open.
        #[arg(short, long)]
        lazy: bool,
    },
    /// Mount views again that still last, after their mount was unmounted or the machine was restarted.
    Restore {
        /// Only those of the mount that this path lies in.
        path: Option<PathBuf>,
    },
}
