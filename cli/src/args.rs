//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use clap::{Args, Parser, Subcommand};
use forebay_daemon::config::Pace;

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
    Mount(Mount),
    /// Unmount. What is not in the pool yet stays safe in the fast pool.
    Umount(Umount),
    /// Show the mounts: pool, space, what is dirty, what is resident.
    Status {
        /// Show only the mount that this path lies in.
        path: Option<PathBuf>,
    },
    /// Bring files onto the fast pool, and keep them there under a lease. Fails where a byte is missing.
    Stage(Stage),
    /// Write what is dirty back to the pool.
    Flush(Flush),
    /// Drop clean content from the fast pool. Dirty content stays.
    Evict(Evict),
    /// End the leases of one owner: what was staged stays until its room is needed.
    Release(Release),
    /// List what is not in the pool yet.
    Dirty {
        /// A path under the mount. Not needed where there is one mount only.
        path: Option<PathBuf>,
    },
    /// List files with their residency.
    Ls {
        /// A file or directory under a mount.
        path: PathBuf,
        /// Everything below, too.
        #[arg(short = 'R', long)]
        recursive: bool,
    },
    /// Sum up sizes and resident bytes.
    Du {
        /// A file or directory under a mount.
        path: PathBuf,
        /// Only the total.
        #[arg(short, long)]
        summarize: bool,
    },
    /// Say why a file is on the fast pool or not, which jobs read it, and what would evict it.
    Explain {
        /// A file under a mount.
        path: PathBuf,
    },
    /// Run a command as a job: what it reads and writes under the mounts is noted. Ends as the command does.
    Run(Run),
    /// Note what processes use that run already, until they have ended or Ctrl-C.
    Observe(Observe),
    /// Show jobs and what they used.
    Job {
        #[command(subcommand)]
        command: JobCommand,
    },
    /// What earlier runs of jobs read: what `run` and `stage` bring in for the next.
    Profile {
        #[command(subcommand)]
        command: ProfileCommand,
    },
    /// Show which job reads how much, and from where: page cache, fast pool or pool.
    Top {
        /// Show only the mount that this path lies in.
        path: Option<PathBuf>,
        /// How long one look is.
        #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = values::interval)]
        interval: Duration,
        /// End after so many looks.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        count: Option<u32>,
    },
    /// Say what this machine allows, what a lack costs, and the command that grants it; and whether a pool is fit.
    Doctor {
        /// A fast directory to look at.
        #[arg(long)]
        fast: Vec<PathBuf>,
        /// A pool to try: print what it can do, and run the conformance suite in a directory that is made in it and
        /// removed again.
        #[arg(long, value_name = "URL")]
        pool: Option<String>,
        /// Print what the pool can do, and leave the suite out.
        #[arg(long, requires = "pool")]
        dry_run: bool,
    },
    /// Check a fast pool: the catalog against the content.
    Fsck {
        /// A mountpoint, or a fast directory that no daemon has open.
        place: PathBuf,
        /// Put right what can be.
        #[arg(long)]
        repair: bool,
    },
    /// Replay a trace of requests in a cache, and show what every eviction policy misses: against LRU, and against
    /// Belady, which knows the future.
    Simulate(Simulate),
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
pub struct Mount {
    /// The pool: `/path`, `file:///path`, `beegfs:///path`, `lustre:///path`, `nfs://server/export` or
    /// `s3://bucket/prefix`; only read: `gs://bucket/prefix`, `az://container/prefix`, `http://host/path`,
    /// `https://host/path`. Left out with --config.
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
    /// How paths are read, written, flushed and kept (TOML).
    #[arg(long, value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Mount the pools that this file describes ([[pool]]), each as a directory of the mountpoint (TOML).
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Stay in the foreground.
    #[arg(short, long)]
    pub foreground: bool,
    /// The pool never changes: opens are served by the kernel alone.
    #[arg(long)]
    pub immutable: bool,
    /// Refuse every change.
    #[arg(long)]
    pub read_only: bool,
    /// Slow the pool down, such as 100MB/s,2ms: for demonstrations and tests.
    #[arg(long, value_name = "RATE,LATENCY", value_parser = values::pace)]
    pub throttle: Option<Pace>,
    /// Budget of all buffers together.
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<ByteSize>,
    /// Threads that answer the kernel; one for each two cores, at most 8, if not given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// Options as in fstab: fast=, limit=, policy=, config=, throttle=, ro, immutable, allow_other, ...
    #[arg(short = 'o', value_name = "OPTIONS")]
    pub options: Vec<String>,
    /// Hooks that the observer does without: `-o mask_hooks=`.
    #[arg(skip)]
    pub mask_hooks: Vec<String>,
    /// Check everything and mount nothing.
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct Umount {
    /// The directory that the pool is mounted at; of a mixed root all pools are unmounted, or none.
    pub mountpoint: PathBuf,
    /// Detach at once; those who use the mount may finish.
    #[arg(long)]
    pub lazy: bool,
    /// Write everything back first, and stay mounted where that fails.
    #[arg(long)]
    pub flush: bool,
    /// Say what would be done.
    #[arg(long)]
    pub dry_run: bool,
}

/// Paths, as all commands take them.
#[derive(Debug, Args)]
pub struct Paths {
    /// Paths or globs under a mount; @FILE reads a list, and - reads one from standard input.
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<std::ffi::OsString>,
    /// Names in lists end with NUL instead of a newline.
    #[arg(short = '0', long)]
    pub null: bool,
}

#[derive(Debug, Args)]
pub struct Stage {
    /// Paths or globs under a mount; @FILE reads a list, and - reads one from standard input.
    #[arg(required_unless_present = "command", value_name = "PATH")]
    pub paths: Vec<std::ffi::OsString>,
    /// Names in lists end with NUL instead of a newline.
    #[arg(short = '0', long)]
    pub null: bool,
    /// Look for runs of COMMAND only at the mount that this path lies in.
    #[arg(long, value_name = "PATH", requires = "command")]
    pub mount: Option<PathBuf>,
    /// What earlier runs of this command, or of one like it, have read: as `run` knows it.
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<std::ffi::OsString>,
    /// How long eviction leaves the files alone, such as 12h. Until the owner's job ends, or `release`, if not given.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    pub lease: Option<Duration>,
    /// Whose lease it is, such as the name of a job. The job of `run`, or the Slurm job, or else the user, if not given.
    #[arg(long, value_name = "NAME")]
    pub owner: Option<String>,
    /// Take no more than this of the pool, such as 50MB/s.
    #[arg(long, value_name = "RATE", value_parser = values::rate)]
    pub rate: Option<u64>,
    /// End after this time, such as 90s, whatever is here by then: for COMMAND, no more is begun than fits into it.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    pub within: Option<Duration>,
    /// Say what would be brought in, and whether it fits.
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct Flush {
    #[command(flatten)]
    pub paths: Paths,
    /// Return when everything is in the pool.
    #[arg(long)]
    pub wait: bool,
    /// Say what would be written.
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct Evict {
    #[command(flatten)]
    pub paths: Paths,
    /// Staged files, too: end their leases, whoever has them.
    #[arg(long)]
    pub release_leases: bool,
    /// Say what would be dropped.
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct Release {
    /// Paths or globs under a mount; @FILE reads a list, and - reads one from standard input. All that the owner has
    /// leased, at every mount, if none is given.
    #[arg(value_name = "PATH")]
    pub paths: Vec<std::ffi::OsString>,
    /// Names in lists end with NUL instead of a newline.
    #[arg(short = '0', long)]
    pub null: bool,
    /// Whose leases end. As for `stage`: the job's, or else the user's, if not given.
    #[arg(long, value_name = "NAME")]
    pub owner: Option<String>,
    /// Say what is leased.
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct Run {
    /// The name of the job; one that runs is joined, and stays a run of the command that was told of first. The Slurm
    /// job, or else a new name, if not given.
    #[arg(long, value_name = "NAME", value_parser = values::job_id)]
    pub job: Option<String>,
    /// Only at the mount that this path lies in.
    #[arg(long, value_name = "PATH")]
    pub mount: Option<PathBuf>,
    /// Bring nothing in that earlier runs have read before this one asks for it.
    #[arg(long)]
    pub no_prefetch: bool,
    /// The command and its arguments.
    #[arg(required = true, last = true, value_name = "COMMAND")]
    pub command: Vec<std::ffi::OsString>,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("whom").required(true).args(["pid", "cgroup", "slurm_job"]))]
pub struct Observe {
    /// A process, with all that descends from it; repeat it for more.
    #[arg(long, value_name = "PID")]
    pub pid: Vec<u32>,
    /// What runs in a cgroup, and below it.
    #[arg(long, value_name = "DIR")]
    pub cgroup: Option<PathBuf>,
    /// What Slurm runs of a job on this node.
    #[arg(long, value_name = "ID")]
    pub slurm_job: Option<String>,
    /// The name of the job; one that runs is joined.
    #[arg(long, value_name = "NAME", value_parser = values::job_id)]
    pub job: Option<String>,
    /// Only at the mount that this path lies in.
    #[arg(long, value_name = "PATH")]
    pub mount: Option<PathBuf>,
    /// Bring nothing in that earlier runs have read before this one asks for it.
    #[arg(long, requires = "command")]
    pub no_prefetch: bool,
    /// What it is a run of, from its beginning: what it reads is learned, and what earlier runs have read is brought in,
    /// as by `run`. For root it is a run of the user whose process is the first of them, or else of SLURM_JOB_UID.
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<std::ffi::OsString>,
}

#[derive(Debug, Args)]
pub struct Simulate {
    /// The trace: in the oracleGeneral format of libCacheSim, or what `forebay --json job show` prints, one job on each
    /// line in the order in which they ran. Either may be compressed with zstd.
    pub trace: PathBuf,
    /// The size of the cache as a share of the bytes of all contents, such as 0.1. Repeat it, or give several with
    /// commas, for more sizes.
    #[arg(long, value_name = "F", required = true, value_delimiter = ',', value_parser = values::fraction)]
    pub cache_fraction: Vec<f64>,
    /// Only this policy, beside LRU and Belady.
    #[arg(long, value_name = "NAME", value_parser = values::evictor)]
    pub policy: Option<String>,
    /// Draw the miss ratios over the cache sizes into this file (SVG).
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum ProfileCommand {
    /// List the profiles.
    List {
        /// Only at the mount that this path lies in.
        #[arg(long, value_name = "PATH")]
        mount: Option<PathBuf>,
    },
    /// Show what runs of a command read.
    Show {
        /// Its short name, or its signature.
        profile: String,
        /// Only at the mount that this path lies in.
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
        /// Only at the mount that this path lies in.
        #[arg(long, value_name = "PATH")]
        mount: Option<PathBuf>,
    },
    /// Take a profile in that `export` printed.
    Import {
        /// The file, or - for standard input.
        file: PathBuf,
        /// Only at the mount that this path lies in.
        #[arg(long, value_name = "PATH")]
        mount: Option<PathBuf>,
    },
    /// Give a profile up.
    #[command(group = clap::ArgGroup::new("which").required(true).args(["profile", "all"]))]
    Forget {
        /// Its short name, or its signature.
        profile: Option<String>,
        /// All of them.
        #[arg(long)]
        all: bool,
        /// Only at the mount that this path lies in.
        #[arg(long, value_name = "PATH")]
        mount: Option<PathBuf>,
    },
}

#[derive(Debug, Subcommand)]
pub enum JobCommand {
    /// Show the files that a job used, in the order of their first uses; of several of one name the newest job.
    Show {
        /// The name of the job.
        id: String,
        /// Only at the mount that this path lies in.
        #[arg(long, value_name = "PATH")]
        mount: Option<PathBuf>,
    },
    /// List the jobs that are known, the oldest first.
    List {
        /// Only at the mount that this path lies in.
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
        assert!(Cli::try_parse_from(["forebay", "observe"]).is_err(), "nobody is named");
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
        assert_eq!(mount.throttle, Some(Pace { bytes_per_sec: 100_000_000, latency: Duration::from_millis(2) }));
    }
}
