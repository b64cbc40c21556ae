//! `forebay mount`

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use forebay_daemon::config::MountConfig;
use forebay_daemon::preflight::{self, MountPlan};
use forebay_daemon::remount::{self, Remount};
use forebay_daemon::supervisor::{self, Ready};
use forebay_daemon::{Failure, policy_files, worker};

use super::{multi_mount, options, processes, view};
use crate::allocator;
use crate::args;
use crate::exit::Exit;
use crate::output::Output;
use crate::values;

pub fn run(mut args: args::MountArgs, output: &Output) -> Result<Exit, Failure> {
    let given = options::apply(&mut args)?;
    let (is_complete, kernel_options) = (given.listed, given.kernel);
    if given.remount {
        return remount(args, kernel_options, is_complete, output);
    }
    let (foreground, dry_run) = (args.foreground, args.dry_run);
    if let Some(file) = args.config.take() {
        let common = config(multi_mount::without_url(args)?, kernel_options)?;
        return multi_mount::run(&file, &common, foreground, dry_run, output);
    }
    let config = config(args, kernel_options)?;
    worker::policy(&config)?;
    let plan = preflight::check(config)?;
    if dry_run {
        show(&plan, output);
        return Ok(Exit::Done);
    }
    preflight::prepare(&plan)?;
    if plan.stale_mount {
        output.note(format!("a dead mount at {} was detached", plan.config.mountpoint.display()));
    }
    if foreground {
        processes::log();
        supervisor::run(plan.config, allocator::give_back_in_background, &|ready| {
            told(ready, output);
            notify_systemd();
        })?;
    } else {
        told(&supervisor::launch(&plan.config)?, output);
        view::restore_after_mount(&plan.config.mountpoint, output);
    }
    Ok(Exit::Done)
}

/// `-o remount`; mount(8) adds all options of fstab, or of the existing mount.
fn remount(args: args::MountArgs, options: Vec<String>, is_complete: bool, output: &Output) -> Result<Exit, Failure> {
    let dry_run = args.dry_run;
    let args = if args.config.is_some() { multi_mount::without_url(args)? } else { args };
    let asked = Remount { config: config(args, Vec::new())?, options, is_complete };
    let plan = remount::check(&asked)?;
    if dry_run {
        let how = if plan.is_read_only() { "read-only" } else { "for reading and writing" };
        output.line(format!("would remount {} {how}", plan.mountpoint.display()));
    } else {
        plan.apply()?;
    }
    Ok(Exit::Done)
}

fn config(args: args::MountArgs, kernel_options: Vec<String>) -> Result<MountConfig, Failure> {
    let pool = args.url.clone().unwrap_or_default();
    let policy = args.policy.map(|file| {
        let files = policy_files::read(&file)?;
        policy_files::compile(&files, &pool).map_err(|failure| {
            // A policy may have a table of this name; an array of such tables belongs to a configuration file.
            let is_config = files.0.iter().any(|file| file.text.contains("[[pool]]"));
            if is_config { failure.remedy("forebay mount --config FILE MOUNTPOINT") } else { failure }
        })?;
        Ok::<_, Failure>(files)
    });
    Ok(MountConfig {
        pool: args.url.unwrap_or_default(),
        mountpoint: args.mountpoint.unwrap_or_default(),
        fast: args.fast,
        limit_bytes: args.limit.map(|l| l.as_u64()),
        policy: policy.transpose()?,
        read_only: args.read_only,
        immutable: args.immutable,
        allow_other: options::allow_other(&kernel_options),
        throttle: args.throttle,
        threads: args.threads.map(usize::from),
        memory_bytes: args.memory.map(|m| m.as_u64()),
        metrics: args.metrics,
        peers: args.peers,
        mask_hooks: args.mask_hooks,
        accounts: Default::default(),
        origin: None,
        kernel_options: kernel_options.into_iter().filter(|o| o != options::ALLOW_OTHER).collect(),
    })
}

pub(super) fn told(ready: &Ready, output: &Output) {
    if output.json {
        let Ready { mountpoint, pid, passthrough, dirty_files, .. } = ready;
        output.json(&serde_json::json!({
            "mountpoint": mountpoint, "pid": pid, "passthrough": passthrough, "dirty_files": dirty_files
        }));
        return;
    }
    if ready.dirty_files > 0 {
        output.note(format!("{} of an earlier mount are not in the pool yet", values::files(ready.dirty_files)));
    }
    if let Some(why) = &ready.not_attached {
        output.note(format!("only the content of the fast pool is available, until the pool can be attached: {why}"));
    }
    if let Some(cost) = &ready.few_descriptors {
        output.note(cost);
    }
    if let Some(why) = &ready.no_passthrough {
        output.note(format!("without passthrough, the daemon serves all reads and writes: {why}"));
    }
}

pub(super) fn show(plan: &MountPlan, output: &Output) {
    if output.json {
        output.json(&serde_json::json!({
            "config": plan.config, "create": plan.to_create, "detach_dead_mount": plan.stale_mount,
            "hides_files": plan.hides_files
        }));
        return;
    }
    output.line(format!("would run: {}", plan.config.command_line()));
    for dir in &plan.to_create {
        output.line(format!("would create: {}", dir.display()));
    }
    if plan.stale_mount {
        output.line("would detach the dead mount that lies there");
    }
    if plan.hides_files {
        output.line(format!("would hide the files in {}", plan.config.mountpoint.display()));
    }
}

/// Tells systemd that a unit of `Type=notify` is ready.
pub(super) fn notify_systemd() {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match name.to_str().and_then(|n| n.strip_prefix('@')) {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&name),
    };
    let told = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(b"READY=1", &address));
    if let Err(error) = told {
        Output::new(false).note(format!("systemd could not be notified that the mount is ready: {error}"));
    }
}
