//! The arguments of `forebay job` and `forebay slurm`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use crate::values;

#[derive(Debug, Subcommand)]
pub enum JobCommand {
    /// Show a job: its allocation, and the files that it used in the order of their first uses. Of several jobs of one
    /// name, the newest.
    Show(JobNameArgs),
    /// List the known jobs, the oldest first.
    List {
        /// Use only the mount that this path lies in.
        #[arg(long, value_name = "PATH")]
        mount: Option<PathBuf>,
    },
    #[command(flatten)]
    Allocation(AllocationCommand),
}

/// The verbs of an allocation. Each may be repeated.
#[derive(Debug, Subcommand)]
pub enum AllocationCommand {
    /// Begin an allocation: what a batch job holds, from before its first process until its results are in the pool.
    Begin(BeginArgs),
    /// Begin to fetch and lease what the job will read.
    StageIn(WaitArgs),
    /// Exit with 0 if everything is resident and leased, with 6 while it is being fetched, with 1 if that failed or was
    /// not requested.
    Ready(WaitArgs),
    /// The processes of the job are about to run: observe them.
    Start(StartArgs),
    /// The processes of the job have ended: learn from them, and end the leases.
    End(JobNameArgs),
    /// Write back what the job wrote.
    StageOut(WaitArgs),
    /// End everything that the allocation holds. What is not in the pool yet stays dirty, and is flushed by policy.
    Teardown(JobNameArgs),
}

#[derive(Debug, Args)]
pub struct JobNameArgs {
    /// The name of the job.
    #[arg(value_parser = values::job_id)]
    pub id: String,
    /// Use only the mount that this path lies in.
    #[arg(long, value_name = "PATH")]
    pub mount: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct BeginArgs {
    #[command(flatten)]
    pub named: JobNameArgs,
    /// The user of the job. Only root may name another user.
    #[arg(long, value_name = "UID")]
    pub uid: Option<u32>,
    /// A file, directory or glob under a mount that the job will read. Repeat it for more.
    #[arg(long, value_name = "PATH")]
    pub stage_in: Vec<OsString>,
    /// What must be in the pool at the end. Repeat it for more. Default: what the job wrote, and what
    /// its user owns.
    #[arg(long, value_name = "PATH")]
    pub stage_out: Vec<OsString>,
    /// How long the leases last at most, such as 12h. Default: until the job ends.
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    pub lease: Option<Duration>,
    /// How often the scheduler has requeued the job: a larger number than before begins the next attempt.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub requeues: u64,
    /// The command that the job runs: what earlier runs read is staged as well, and this run is learned.
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct WaitArgs {
    #[command(flatten)]
    pub named: JobNameArgs,
    /// Wait for the end of the work, for this time at most. Default: return at once.
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    pub wait: Option<Duration>,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("members").args(["pid", "cgroup", "slurm_job"]))]
pub struct StartArgs {
    #[command(flatten)]
    pub named: JobNameArgs,
    /// A process of the job, with its descendants. Repeat it for more.
    #[arg(long, value_name = "PID")]
    pub pid: Vec<u32>,
    /// The processes of a cgroup, and below it.
    #[arg(long, value_name = "DIR")]
    pub cgroup: Option<PathBuf>,
    /// The steps of a Slurm job, which may begin later.
    #[arg(long, value_name = "NUMBER")]
    pub slurm_job: Option<String>,
}

#[derive(Debug, Subcommand)]
pub enum SlurmCommand {
    /// What Prolog= runs: stage what the job will read, at every mount of this user, and observe the job.
    Prolog(HookArgs),
    /// What Epilog= runs: learn from the job, and write back what it wrote.
    Epilog(HookArgs),
    /// Print the lines for slurm.conf.
    Install {
        /// The directory with the scripts.
        #[arg(long, value_name = "DIR", default_value = "/usr/share/forebay/slurm")]
        scripts: PathBuf,
    },
    /// Check the configuration of Slurm and the mounts of this node, and say what is wrong. Exits with 1 if something is.
    Check,
    /// What TaskProlog= runs: print the variables that tasks get.
    TaskProlog {
        /// The mountpoint that tasks get as FOREBAY_MOUNT. Default: the first one on this node.
        #[arg(long, value_name = "PATH")]
        mount: Option<PathBuf>,
        #[command(flatten)]
        exchange: ExchangeArgs,
        #[command(flatten)]
        records: RecordsArgs,
    },
    /// What burst_buffer.lua runs, in the controller.
    Bb {
        #[command(subcommand)]
        command: BurstBufferCommand,
    },
}

/// The calls of Slurm's burst buffer plugin. What each prints is for Slurm.
#[derive(Debug, Subcommand)]
pub enum BurstBufferCommand {
    /// Check the directives of a job script.
    Check {
        /// The script.
        script: PathBuf,
    },
    /// Tell the nodes what a job asks for. The job is pending.
    DataIn {
        #[command(flatten)]
        job: ExchangedJobArgs,
        /// The script of the job.
        script: PathBuf,
    },
    /// Check that the nodes of a job can read what it asks for. Slurm runs their prologs after this.
    PreRun {
        #[command(flatten)]
        job: ExchangedJobArgs,
    },
    /// Wait until all nodes of a job have written back, and keep what is not in the pool. Prints why a job did not run.
    DataOut {
        #[command(flatten)]
        job: ExchangedJobArgs,
        /// How long to wait.
        #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = values::duration)]
        wait: Duration,
    },
    /// Forget what a job asked for.
    Teardown {
        #[command(flatten)]
        job: ExchangedJobArgs,
        /// Results that are not in the pool may be given up, as by `scancel --hurry`.
        #[arg(long)]
        hurry: bool,
        /// How long to wait for the nodes of a job whose results are given up.
        #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = values::duration)]
        wait: Duration,
    },
    /// Print the pool.
    Pools {
        /// Its size: what the fast pools of all nodes have for scratch directories.
        #[arg(long, value_name = "BYTES")]
        capacity: bytesize::ByteSize,
    },
    /// Show the jobs with directives, and what jobs left that is not in the pool.
    Status {
        #[command(flatten)]
        exchange: ExchangeArgs,
        /// Forget what this job left.
        #[arg(long, value_name = "JOB")]
        forget: Option<String>,
        /// Leave out the reasons, which name files of users.
        #[arg(long)]
        no_reasons: bool,
    },
}

#[derive(Debug, Args)]
pub struct ExchangedJobArgs {
    #[command(flatten)]
    pub exchange: ExchangeArgs,
    /// The number of the job.
    pub job: String,
}

#[derive(Debug, Args)]
pub struct ExchangeArgs {
    /// The directory that the controller and the nodes see.
    #[arg(long, value_name = "DIR", default_value = forebay_slurm::exchange::EXCHANGE_DIR)]
    pub exchange: PathBuf,
}

#[derive(Debug, Args)]
pub struct RecordsArgs {
    /// The directory in which this node keeps what its jobs have.
    #[arg(long, value_name = "DIR", default_value = "/run/forebay-slurm")]
    pub records: PathBuf,
}

#[derive(Debug, Args)]
pub struct HookArgs {
    #[command(flatten)]
    pub exchange: ExchangeArgs,
    #[command(flatten)]
    pub records: RecordsArgs,
    /// Use only the mount that this path lies in.
    #[arg(long, value_name = "PATH")]
    pub mount: Option<PathBuf>,
    /// How long it may take. What is not done by then goes on in the daemon.
    #[arg(long, value_name = "DURATION", default_value = "20s", value_parser = values::duration)]
    pub within: Duration,
}
