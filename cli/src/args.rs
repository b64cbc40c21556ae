//! The command line.

mod batch;
mod policy;
mod quota;
mod scratch;
mod serve;
mod simulate;
mod view;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use clap::{Args, Parser, Subcommand, ValueEnum};
use forebay_api::peers::ClusterShare;
use forebay_daemon::config::ThrottleConfig;

pub use batch::{
    AllocationCommand, BeginArgs, BurstBufferCommand, ExchangedJobArgs, HookArgs, JobCommand, JobNameArgs,
    SlurmCommand, StartArgs, WaitArgs,
};
pub use policy::PolicyCommand;
pub use quota::QuotaCommand;
pub use scratch::{ScratchCommand, ScratchCreateArgs};
pub use serve::{AccessLogFormat, ServeArgs, SignUrlArgs};
pub use simulate::{EvictionArgs, SimulateClusterArgs, SimulateCommand};
pub use view::{ViewArgs, ViewCommand};

use crate::values;

/// A caching overlay in front of a bulk pool: stages what a job reads onto local NVMe, absorbs what it writes.
#[derive(Debug, Parser)]
#[command(name = "forebay", version, max_term_width = 100)]
pub struct Cli {
    /// Print JSON, one object on each line.
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Mount a pool, and return when the mount serves.
    Mount(MountArgs),
    /// Unmount. Changes that are not in the pool yet stay in the fast pool until the next mount.
    Umount(UmountArgs),
    /// Serve a pool over HTTP as a cache node, read-only, until SIGTERM.
    Serve(ServeArgs),
    /// Sign a URL of a cache node, so that whoever has it may read the file for a while.
    SignUrl(SignUrlArgs),
    /// Show the mounts: pool, space, dirty and resident files.
    Status {
        /// Show only the mount that this path lies in.
        path: Option<PathBuf>,
    },
    /// Fetch files into the fast pool, and keep them there under a lease. Fails if a byte is missing.
    Stage(StageArgs),
    /// Write dirty files back to the pool.
    Flush(FlushArgs),
    /// Remove clean content from the fast pool. Dirty content stays.
    Evict(EvictArgs),
    /// End the leases of one owner. The files stay until their space is needed.
    Release(ReleaseArgs),
    /// List changes that are not in the pool yet.
    Dirty {
        /// A path under the mount. Not needed if there is only one mount.
        path: Option<PathBuf>,
    },
    /// List files with their residency.
    Ls {
        /// A file or directory under a mount.
        path: PathBuf,
        /// Also everything below the directory.
        #[arg(short = 'R', long)]
        recursive: bool,
    },
    /// Sum up sizes and resident bytes.
    Du {
        /// A file or directory under a mount.
        path: PathBuf,
        /// Show only the total.
        #[arg(short, long)]
        summarize: bool,
    },
    /// Show why a file is resident or not, which jobs read it, and what would evict it.
    Explain {
        /// A file under a mount.
        path: PathBuf,
    },
    /// Show the other nodes of the cluster: what they gave and got, and why any was passed over.
    Peers {
        /// A path under the mount; needed if there are several mounts.
        path: Option<PathBuf>,
    },
    /// Policy: rules for how paths are read, written, flushed and kept.
    Policy {
        #[command(subcommand)]
        command: PolicyCommand,
    },
    /// Quotas: what users and groups hold of the fast pool, and what they may.
    Quota {
        #[command(subcommand)]
        command: QuotaCommand,
    },
    /// Run a command as a job, and record what it reads and writes under the mounts. Exits as the command does.
    Run(RunArgs),
    /// Record what running processes use, until they end or Ctrl-C is pressed.
    Observe(ObserveArgs),
    /// Show jobs and what they used; stage for batch jobs before they start, and write back after their end.
    Job {
        #[command(subcommand)]
        command: JobCommand,
    },
    /// Scratch directories: plain directories on the fast pool for what a job writes, and their commit into the mount.
    Scratch {
        #[command(subcommand)]
        command: ScratchCommand,
    },
    /// Views: staged trees that programs read without the daemon. `stage --view` makes them.
    View {
        #[command(subcommand)]
        command: ViewCommand,
    },
    /// What Slurm runs at the beginning and the end of a job on this node.
    Slurm {
        #[command(subcommand)]
        command: SlurmCommand,
    },
    /// Profiles: what earlier runs of jobs read, and `run` and `stage` fetch for the next run.
    Profile {
        #[command(subcommand)]
        command: ProfileCommand,
    },
    /// Show which job reads how much, and from where: page cache, fast pool or pool.
    ///
    /// On a terminal this is a dashboard: rates by source, the fast pool and its devices, calls to the pool with their
    /// latencies, jobs, the files that a job uses now, and files that are not in the pool yet. Its last line lists the
    /// keys. Without a terminal, and with --count or --json, it prints lines.
    Top {
        /// Show only the mount that this path lies in.
        path: Option<PathBuf>,
        /// How long one sample takes.
        #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = values::interval)]
        interval: Duration,
        /// End after this many samples.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        count: Option<u32>,
    },
    /// Check what this machine allows, what is lost without it, and how to allow it. Check a pool.
    Doctor {
        /// A fast directory to check.
        #[arg(long)]
        fast: Vec<PathBuf>,
        /// A pool to check: print what it can do, and run the conformance suite in a new directory, which is removed
        /// afterwards.
        #[arg(long, value_name = "URL")]
        pool: Option<String>,
        /// Print what the pool can do, without the suite.
        #[arg(long, requires = "pool")]
        dry_run: bool,
    },
    /// Compare the catalog of a fast pool with its content files.
    Fsck {
        /// A mountpoint, or a fast directory that no daemon has open.
        place: PathBuf,
        /// Repair what can be repaired.
        #[arg(long)]
        repair: bool,
        /// Accept that the pool's directory is another one than before: it was replaced, for example restored from a
        /// backup. For a fast directory that no daemon has open. Not for a pool that is merely not mounted.
        #[arg(long)]
        new_root: bool,
    },
    /// Try decisions on a trace, or on a cluster that does not exist.
    Simulate {
        #[command(subcommand)]
        command: SimulateCommand,
    },
    /// Supervise a mount that is described on standard input.
    #[command(hide = true, name = forebay_daemon::SUPERVISE_COMMAND)]
    Supervise,
    /// Serve the mount of a runtime directory, on the descriptor that is standard input.
    #[command(hide = true, name = forebay_daemon::WORKER_COMMAND)]
    Worker { runtime: PathBuf },
    /// Write the manual pages into a directory.
    #[command(hide = true)]
    Man { dir: PathBuf },
    /// Print the completions of a shell.
    #[command(hide = true)]
    Completions { shell: clap_complete::Shell },
}

#[derive(Debug, Args)]
pub struct MountArgs {
    /// The pool: `/path`, `file:///path`, `beegfs:///path`, `lustre:///path`, `nfs://server/export` or
    /// `s3://bucket/prefix`; read-only: `gs://bucket/prefix`, `az://container/prefix`, `http://host/path`,
    /// `https://host/path`. Not given with --config.
    #[arg(required_unless_present = "config")]
    pub url: Option<String>,
    /// The directory where the pool appears.
    #[arg(required_unless_present = "config")]
    pub mountpoint: Option<PathBuf>,
    /// A directory on local NVMe that holds cached content; repeat it for more devices.
    #[arg(long, value_name = "DIR")]
    pub fast: Vec<PathBuf>,
    /// The most that the fast pool may hold, such as 500G.
    #[arg(long, value_name = "SIZE")]
    pub limit: Option<ByteSize>,
    /// A file that says how paths are read, written, flushed and kept (TOML).
    #[arg(long, value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Mount the pools that this file describes ([[pool]]), each as a directory of the mountpoint (TOML).
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Stay in the foreground.
    #[arg(short, long)]
    pub foreground: bool,
    /// Declare that the pool never changes: the kernel serves opens without the daemon.
    #[arg(long)]
    pub immutable: bool,
    /// Refuse every change.
    #[arg(long)]
    pub read_only: bool,
    /// Limit rate and latency of the pool, such as 100MB/s,2ms, for demonstrations and tests.
    #[arg(long, value_name = "RATE,LATENCY", value_parser = values::pace)]
    pub throttle: Option<ThrottleConfig>,
    /// The most memory that all buffers may use together.
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<ByteSize>,
    /// Threads that answer the kernel. Default: one for two cores, at most 8.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// Serve metrics for Prometheus, and a page for a browser, over HTTP: a port of the loopback device, or
    /// ADDRESS:PORT for another one.
    #[arg(long, value_name = "ADDRESS", value_parser = forebay_daemon::metrics::parse_address)]
    pub metrics: Option<SocketAddr>,
    /// Read content from other nodes before the pool, and give it to them: a file that names them (docs/CLUSTER.md).
    #[arg(long, value_name = "FILE")]
    pub peers: Option<PathBuf>,
    /// Options as in fstab: fast=, limit=, policy=, config=, throttle=, metrics=, peers=, ro, immutable, allow_other, ...
    #[arg(short = 'o', value_name = "OPTIONS")]
    pub options: Vec<String>,
    /// Hooks of the observer to disable, as `-o mask_hooks=`.
    #[arg(skip)]
    pub mask_hooks: Vec<String>,
    /// Check everything and mount nothing.
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct UmountArgs {
    /// The mountpoint. If several pools are mounted there, all of them are unmounted, or none.
    pub mountpoint: PathBuf,
    /// Detach at once. Programs that use the mount may finish.
    #[arg(long)]
    pub lazy: bool,
    /// Write everything back first. If that fails, stay mounted.
    #[arg(long)]
    pub flush: bool,
    /// Show what would be done.
    #[arg(long)]
    pub dry_run: bool,
}

/// Paths, as all commands take them.
#[derive(Debug, Args)]
pub struct PathArgs {
    /// Paths or globs under a mount; @FILE reads a list, and - reads one from standard input.
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<std::ffi::OsString>,
    /// Names in lists end with NUL instead of a newline.
    #[arg(short = '0', long)]
    pub null: bool,
}

#[derive(Debug, Args)]
pub struct StageArgs {
    /// Paths or globs under a mount; @FILE reads a list, and - reads one from standard input.
    #[arg(required_unless_present = "command", value_name = "PATH")]
    pub paths: Vec<std::ffi::OsString>,
    /// Names in lists end with NUL instead of a newline.
    #[arg(short = '0', long)]
    pub null: bool,
    /// Look for runs of COMMAND only at the mount that this path lies in.
    #[arg(long, value_name = "PATH", requires = "command")]
    pub mount: Option<PathBuf>,
    /// Stage what earlier runs of this command, or of a similar one, read.
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<std::ffi::OsString>,
    /// How long the lease protects the files from eviction, such as 12h. Default: until the owner's job ends, or
    /// `release`.
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    pub lease: Option<Duration>,
    /// The owner of the lease, such as the name of a job. Default: the job of `run`, else the Slurm job, else the user.
    #[arg(long, value_name = "NAME")]
    pub owner: Option<String>,
    /// Read no faster than this from the pool, such as 50MB/s.
    #[arg(long, value_name = "RATE", value_parser = values::rate)]
    pub rate: Option<u64>,
    /// End after this time, such as 90s, with what is resident by then. For COMMAND, start no fetch that takes longer.
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    pub within: Option<Duration>,
    /// Stage on the nodes of the mount's cluster, this one among them, and not only here. A lease belongs to the same owner on
    /// each node, and ends on each of them by itself.
    #[arg(long, value_name = "SHARE", num_args = 0..=1, require_equals = true, default_missing_value = "each",
          conflicts_with_all = ["command", "view"])]
    pub cluster: Option<ShareChoice>,
    /// Show what would be fetched, and whether it fits.
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub view: ViewArgs,
}

/// What each node stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ShareChoice {
    /// Each node that may have content of the pool stages everything.
    Each,
    /// Each node stages the ranges of which it is the first owner. Of files of more than 64 MiB, these get no lease.
    Owners,
}

impl From<ShareChoice> for ClusterShare {
    fn from(choice: ShareChoice) -> Self {
        match choice {
            ShareChoice::Each => Self::Each,
            ShareChoice::Owners => Self::Owners,
        }
    }
}

#[derive(Debug, Args)]
pub struct FlushArgs {
    /// Paths under a mount; @FILE reads a list, and - reads one from standard input.
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<std::ffi::OsString>,
    /// Names in lists end with NUL instead of a newline.
    #[arg(short = '0', long)]
    pub null: bool,
    /// Return when everything is in the pool.
    #[arg(long)]
    pub wait: bool,
    /// Show what would be written.
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct EvictArgs {
    #[command(flatten)]
    pub paths: PathArgs,
    /// Also evict staged files: end their leases, of all owners.
    #[arg(long)]
    pub release_leases: bool,
    /// Show what would be removed.
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct ReleaseArgs {
    /// Paths or globs under a mount; @FILE reads a list, and - reads one from standard input. Default: all files that
    /// the owner has leased, at every mount.
    #[arg(value_name = "PATH")]
    pub paths: Vec<std::ffi::OsString>,
    /// Names in lists end with NUL instead of a newline.
    #[arg(short = '0', long)]
    pub null: bool,
    /// The owner whose leases end. Default: as for `stage`.
    #[arg(long, value_name = "NAME")]
    pub owner: Option<String>,
    /// Show what is leased.
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct RunArgs {
    /// The name of the job. If a job of this name runs, the command joins it, and the job stays a run of its first
    /// command. Default: the Slurm job, else a new name.
    #[arg(long, value_name = "NAME", value_parser = values::job_id)]
    pub job: Option<String>,
    /// Use only the mount that this path lies in.
    #[arg(long, value_name = "PATH")]
    pub mount: Option<PathBuf>,
    /// Fetch nothing ahead that earlier runs read.
    #[arg(long)]
    pub no_prefetch: bool,
    /// The command and its arguments.
    #[arg(required = true, last = true, value_name = "COMMAND")]
    pub command: Vec<std::ffi::OsString>,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("whom").required(true).args(["pid", "cgroup", "slurm_job"]))]
pub struct ObserveArgs {
    /// A process with its descendants. Repeat it for more.
    #[arg(long, value_name = "PID")]
    pub pid: Vec<u32>,
    /// The processes of a cgroup, and below it.
    #[arg(long, value_name = "DIR")]
    pub cgroup: Option<PathBuf>,
    /// The processes that Slurm runs of a job on this node.
    #[arg(long, value_name = "ID")]
    pub slurm_job: Option<String>,
    /// The name of the job. If a job of this name runs, the processes join it.
    #[arg(long, value_name = "NAME", value_parser = values::job_id)]
    pub job: Option<String>,
    /// Use only the mount that this path lies in.
    #[arg(long, value_name = "PATH")]
    pub mount: Option<PathBuf>,
    /// Fetch nothing ahead that earlier runs read.
    #[arg(long, requires = "command")]
    pub no_prefetch: bool,
    /// The command that the processes run, from its beginning: what they read is learned, and what earlier runs read is
    /// fetched, as by `run`. For root, it is a run of the user of the first process, or else of SLURM_JOB_UID.
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<std::ffi::OsString>,
}

#[derive(Debug, Subcommand)]
pub enum ProfileCommand {
    /// List the profiles.
    List {
        /// Use only the mount that this path lies in.
        #[arg(long, value_name = "PATH")]
        mount: Option<PathBuf>,
    },
    /// Show what the runs of a command read.
    Show {
        /// Its short name, or its signature.
        profile: String,
        /// Use only the mount that this path lies in.
        #[arg(long, value_name = "PATH")]
        mount: Option<PathBuf>,
    },
    /// Print a profile for `import`.
    Export {
        /// Its short name, or its signature.
        profile: String,
        /// TOML instead of JSON.
        #[arg(long)]
        toml: bool,
        /// Use only the mount that this path lies in.
        #[arg(long, value_name = "PATH")]
        mount: Option<PathBuf>,
    },
    /// Import a profile that `export` printed.
    Import {
        /// The file, or - for standard input.
        file: PathBuf,
        /// Use only the mount that this path lies in.
        #[arg(long, value_name = "PATH")]
        mount: Option<PathBuf>,
    },
    /// Remove a profile.
    #[command(group = clap::ArgGroup::new("which").required(true).args(["profile", "all"]))]
    Forget {
        /// Its short name, or its signature.
        profile: Option<String>,
        /// Remove all profiles.
        #[arg(long)]
        all: bool,
        /// Use only the mount that this path lies in.
        #[arg(long, value_name = "PATH")]
        mount: Option<PathBuf>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_keeps_its_own_options() {
        let line = "forebay run --job a -- ls --json -l";
        let Command::Run(run) = Cli::parse_from(line.split(' ')).command else { panic!("not a run") };
        assert_eq!((run.job.as_deref(), run.command.len()), (Some("a"), 3));
        assert!(Cli::try_parse_from(["forebay", "run", "--job", "a b", "--", "ls"]).is_err());
        assert!(Cli::try_parse_from(["forebay", "observe"]).is_err(), "no process is named");
    }

    #[test]
    fn the_command_line_is_consistent() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn sizes_and_durations_are_read() {
        let line = "forebay mount /p /m --fast /a --fast /b --limit 500G --throttle 100MB/s,2ms";
        let Command::Mount(mount) = Cli::parse_from(line.split(' ')).command else { panic!("not a mount") };
        assert_eq!(mount.fast.len(), 2);
        assert_eq!(mount.limit, Some(ByteSize::gb(500)));
        assert_eq!(
            mount.throttle,
            Some(ThrottleConfig { bytes_per_sec: 100_000_000, latency: Duration::from_millis(2) })
        );
    }
}
