//! `forebay status`: works whether or not the daemon answers.

use std::path::Path;

use forebay_api::jobs::{ObserverKind, ObserverStatus};
use forebay_api::operator::{DeviceState, DeviceStatus, Status};
use forebay_daemon::multi_mount::MultiMountRoot;
use forebay_daemon::registry::{self, RegisteredMount};
use forebay_daemon::{Failure, client};

use crate::exit::Exit;
use crate::output::Output;
use crate::targets;
use crate::values::{bytes, counted, files, moment, shown, span, under_way};

pub fn run(path: Option<&Path>, output: &Output) -> Result<Exit, Failure> {
    let root = path.and_then(MultiMountRoot::meant_by);
    let entries: Vec<RegisteredMount> = match (&root, path) {
        (Some(root), _) => root.mounts().into_iter().filter_map(|(_, entry)| entry).collect(),
        (None, Some(_)) => targets::meant(path)?.into_iter().map(|place| place.entry).collect(),
        (None, None) => registry::entries(),
    };
    let unknown = if path.is_none() { registry::foreign_mounts(&entries) } else { Vec::new() };
    if entries.is_empty() && unknown.is_empty() && !output.json {
        output.line("no forebay mounts");
    }
    let mut exit = Exit::Done;
    for entry in &entries {
        let status = client::status(entry);
        if status.is_err() {
            exit = Exit::NoDaemon;
        }
        match (&status, output.json) {
            (_, true) => as_json(entry, &status, output),
            (Ok(status), false) => show(entry, status, output),
            (Err(failure), false) => show_dead(entry, failure, output),
        }
    }
    for (name, _) in root.iter().flat_map(MultiMountRoot::mounts).filter(|(_, entry)| entry.is_none()) {
        exit = Exit::NoDaemon;
        root.iter().for_each(|root| show_missing(root, name, output));
    }
    for mountpoint in unknown {
        // It may be a working mount of another user, so this is no failure.
        let place = mountpoint.display();
        output.note(match registry::other_program(&mountpoint) {
            Some(version) => format!("{place}  a mount of forebay {version}: run this command with that version"),
            None => {
                format!("{place}  a mount of another user, or of a daemon that is gone: forebay umount --lazy {place}")
            }
        });
    }
    Ok(exit)
}

fn as_json(entry: &RegisteredMount, status: &Result<Status, Failure>, output: &Output) {
    output.json(&serde_json::json!({
        "mountpoint": entry.mountpoint(),
        "socket": entry.runtime.socket(),
        "state": entry.state,
        "supervisor_alive": entry.supervisor_alive(),
        "worker_alive": entry.worker_alive(),
        "status": status.as_ref().ok(),
        "error": status.as_ref().err(),
    }));
}

fn show_missing(root: &MultiMountRoot, name: &str, output: &Output) {
    let failure = root.lacks(name);
    if output.json {
        output.json(&serde_json::json!({ "mountpoint": root.path_of(name), "status": null, "error": failure }));
    } else {
        output.line(format!("{}  NOT MOUNTED", root.path_of(name).display()));
        output.line(format!("  {failure}"));
    }
}

fn show_dead(entry: &RegisteredMount, failure: &Failure, output: &Output) {
    let state = &entry.state;
    output.line(format!("{}  NOT SERVING", entry.mountpoint().display()));
    output.line(format!("  daemon      {failure}"));
    output.line(format!(
        "  last known  {:?} since {}, pid {}",
        state.phase,
        moment(state.since_unix),
        state.supervisor.pid
    ));
    if let Some(last) = &state.last_exit {
        output.line(format!("  last exit   the worker {last} (restarts: {})", state.restarts));
    }
    output.line(format!("  pool        {}", state.config.source()));
    for fast in &state.config.fast {
        output.line(format!("  fast pool   {} (holds everything that was written and not flushed)", fast.display()));
    }
}

fn show(entry: &RegisteredMount, status: &Status, output: &Output) {
    let line = |label: &str, text: String| output.line(format!("  {label:<11} {text}"));
    output.line(format!("{}", entry.mountpoint().display()));
    line("pool", format!("{}  {}", entry.state.config.source(), pool_state(status)));
    for work in &status.under_way {
        line("under way", under_way(work));
    }
    for device in &status.fast {
        let space = format!("{} free of {}", bytes(device.free_bytes), bytes(device.total_bytes));
        let tier = device.tier.as_ref().map_or_else(String::new, |tier| format!("tier {tier}, "));
        let errors = if device.errors > 0 { format!(", {}", counted(device.errors, "error")) } else { String::new() };
        line("fast pool", format!("{}  {tier}{}{errors}, {space}", device.path, device_state(device)));
        if let Some(error) = &device.last_error {
            line("", format!("the last error: {error}"));
        }
    }
    for tier in &status.tiers {
        let (used, limit) = (bytes(tier.used_bytes), bytes(tier.limit_bytes));
        let moved = format!("{} moved up, {} moved down", files(tier.promoted_files), tier.demoted_files);
        let memory = if tier.is_volatile { ", empty after a reboot" } else { "" };
        line("tier", format!("{}  {used} of {limit}{memory}; {moved}", tier.name));
    }
    let used = format!("{} of {}", bytes(status.used_bytes), bytes(status.limit_bytes));
    line(
        "content",
        format!("{used}; {} resident, {} leased", files(status.resident_files), bytes(status.leased_bytes)),
    );
    let oldest = status.oldest_dirty_secs.map_or(String::new(), |s| format!(", the oldest for {}", span(s)));
    line("dirty", format!("{}, {}{oldest}", files(status.dirty_files), bytes(status.dirty_bytes)));
    // The line of the pool has the reason already.
    let waits_for_pool = |error: &&String| status.pool_failure.as_ref().is_some_and(|why| error.contains(why.as_str()));
    if status.flush_errors.iter().any(|error| waits_for_pool(&error)) {
        line("NOT FLUSHED", "what is dirty, until the pool answers".into());
    }
    for error in status.flush_errors.iter().filter(|error| !waits_for_pool(error)) {
        line("NOT FLUSHED", shown(error));
    }
    if status.waiting_for_room > 0 {
        let what = format!("{} until the flush has freed space", status.waiting_for_room);
        line("writers wait", what);
    }
    if let Some(rate) = status.write_pace_bytes {
        line("writers", format!("slowed to {}/s, because the flush is behind", bytes(rate)));
    }
    for stuck in status.flush_stuck.iter().filter(|stuck| !waits_for_pool(stuck)) {
        line("NO PROGRESS", shown(stuck));
    }
    for conflict in &status.conflicts {
        line("CONFLICT", shown(conflict));
    }
    let counters = &status.counters;
    let retries = match counters.pool_retries {
        0 => String::new(),
        retries => format!(", {} sent again", counted(retries, "request")),
    };
    line(
        "since start",
        format!(
            "{} read from the pool, {} written{retries}; opens: {} resident, {} not; reads: {} hits, {} misses",
            bytes(counters.pool_read_bytes),
            bytes(counters.pool_written_bytes),
            counters.opens_resident,
            counters.opens_absent,
            counters.read_hits,
            counters.read_misses
        ),
    );
    if counters.peer_read_bytes > 0 {
        line("from peers", format!("{} instead of the pool (`forebay peers`)", bytes(counters.peer_read_bytes)));
    }
    if counters.ahead_files > 0 {
        let (files, of) = (counted(counters.ahead_files, "file"), bytes(counters.ahead_bytes));
        line("read ahead", format!("{files}, {of}, {} of them opened since", counters.ahead_used_files));
    }
    let passthrough = match (&status.no_passthrough, status.passthrough) {
        (Some(why), _) => format!("no passthrough ({why})"),
        (None, true) => "passthrough".into(),
        (None, false) => "no passthrough".into(),
    };
    let restarts = match (entry.state.restarts, &entry.state.last_exit) {
        (0, _) => String::new(),
        (1, Some(last)) => format!("; restarted because it {last}"),
        (n, last) => format!("; restarted {n} times, last because it {}", last.as_deref().unwrap_or("ended")),
    };
    let pids = format!("pid {}, supervisor {}", status.pid, entry.state.supervisor.pid);
    line("daemon", format!("{pids}; {passthrough}; {}{restarts}", status.content_io));
    observer(&status.observer, line);
    if !entry.supervisor_alive() {
        line(
            "WARNING",
            "the supervisor is gone: the mount does not survive the daemon; unmount and mount again".into(),
        );
    }
}

/// The state of the pool in words.
pub fn pool_state(status: &Status) -> String {
    match &status.pool_failure {
        Some(why) => format!("{}: {}", status.pool_state, shown(why)),
        None => status.pool_state.to_string(),
    }
}

fn device_state(device: &DeviceStatus) -> String {
    let why = match (device.state, &device.failure) {
        (DeviceState::Suspect, _) if device.holds_catalog => "it holds the catalog, so it cannot be bypassed",
        (DeviceState::Bypassed, _) if device.probe_worked => "a probe worked",
        (_, Some(failure)) => failure,
        _ => return device.state.to_string(),
    };
    format!("{}: {why}", device.state)
}

fn observer(observer: &ObserverStatus, line: impl Fn(&str, String)) {
    let seen_by = match (observer.kind, &observer.why) {
        (ObserverKind::Ebpf, _) if observer.rests => "eBPF, which rests: no job runs, and eviction is far".to_owned(),
        (ObserverKind::Ebpf, _) => "eBPF".to_owned(),
        (ObserverKind::Requests, why) => format!("requests alone ({})", why.as_deref().map_or(String::new(), shown)),
    };
    line("jobs", format!("seen by {seen_by}"));
    for what in &observer.missing {
        line("not seen", shown(what));
    }
    let ObserverStatus { dropped_uses, dropped_paths, dropped_processes, .. } = *observer;
    if dropped_uses + dropped_paths + dropped_processes > 0 {
        let lost = [(dropped_uses, "use"), (dropped_paths, "path"), (dropped_processes, "process")];
        let lost: Vec<String> = lost.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} x {what}")).collect();
        line("DROPPED", format!("{}: the tables were full", lost.join(", ")));
    }
}
