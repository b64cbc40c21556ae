//! One module for each command, or for a few similar ones.

mod allocation;
mod doctor;
mod documents;
mod explain;
mod fsck;
mod job;
mod listing;
mod mount;
mod multi_mount;
mod observe;
mod options;
mod peers;
mod policy;
mod processes;
mod profile;
mod quota;
mod run;
mod scratch;
mod serve;
mod simulate;
mod slurm;
mod status;
mod top;
mod transfer;
mod umount;
mod view;

use forebay_daemon::Failure;

use crate::args::Command;
use crate::output::Output;

pub fn run(command: Command, output: &Output) -> Result<u8, Failure> {
    let exit = match command {
        Command::Run(args) => return run::run(args, output),
        Command::Mount(args) => mount::run(args, output),
        Command::Serve(args) => serve::run(args, output),
        Command::SignUrl(args) => serve::sign(&args, output),
        Command::Umount(args) => umount::run(&args, output),
        Command::Status { path } => status::run(path.as_deref(), output),
        Command::Stage(args) => transfer::stage(args, output),
        Command::Flush(args) => transfer::flush(args, output),
        Command::Evict(args) => transfer::evict(args, output),
        Command::Release(args) => transfer::release(args, output),
        Command::Dirty { path } => listing::dirty(path.as_deref(), output),
        Command::Ls { path, recursive } => listing::ls(&path, recursive, output),
        Command::Du { path, summarize } => listing::du(&path, summarize, output),
        Command::Peers { path } => peers::run(path.as_deref(), output),
        Command::Explain { path } => explain::run(&path, output),
        Command::Observe(args) => observe::run(args, output),
        Command::Job { command } => job::run(command, output),
        Command::Scratch { command } => scratch::run(command, output),
        Command::Policy { command } => policy::run(command, output),
        Command::Quota { command } => quota::run(command, output),
        Command::View { command } => view::run(command, output),
        Command::Slurm { command } => slurm::run(&command, output),
        Command::Profile { command } => profile::run(command, output),
        Command::Top { path, interval, count } => top::run(path.as_deref(), interval, count, output),
        Command::Doctor { fast, pool, dry_run } => doctor::run(pool.as_deref(), &fast, dry_run, output),
        Command::Fsck { place, repair, new_root } => fsck::run(&place, repair, new_root, output),
        Command::Simulate { command } => simulate::run(&command, output),
        Command::Supervise => processes::supervise(),
        Command::Worker { runtime } => processes::worker(&runtime),
        Command::Man { dir } => documents::man(&dir),
        Command::Completions { shell } => documents::completions(shell),
    };
    exit.map(|exit| exit as u8)
}
