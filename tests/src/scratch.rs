//! Scratch directories of a mount, by the commands that users have for them.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::mount::{COMMAND, Mount};
use crate::process::{Answer, forebay, run};

/// Runs `forebay scratch VERB`.
pub fn scratch(mount: &Mount, verb: &str, words: &[&str]) -> Answer {
    let mut command = Command::new(forebay());
    command.args(["scratch", verb]).args(words);
    if verb == "create" || verb == "list" {
        command.arg("--mount").arg(mount.place.mnt());
    }
    run(&mut command, COMMAND)
}

/// Creates a scratch directory. Returns its path.
pub fn create(mount: &Mount, words: &[&str]) -> PathBuf {
    scratch(mount, "create", words).ok().out.trim().into()
}

/// Commits a tree to a path of the mount.
pub fn commit(mount: &Mount, from: &Path, to: &str) -> Answer {
    scratch(mount, "commit", &[from.to_str().unwrap(), mount.path(to).to_str().unwrap()])
}

/// Merges a tree into a path of the mount.
pub fn merge(mount: &Mount, from: &Path, to: &str) -> Answer {
    scratch(mount, "commit", &["--merge", from.to_str().unwrap(), mount.path(to).to_str().unwrap()])
}

/// Returns the scratch directories of a mount as JSON.
pub fn listed(mount: &Mount) -> Vec<Value> {
    let mut command = Command::new(forebay());
    command.args(["--json", "scratch", "list", "--mount"]).arg(mount.place.mnt());
    run(&mut command, COMMAND).ok().out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Runs `forebay job VERB ID`, which must succeed: the allocation of a scratch directory has its name.
#[track_caller]
pub fn job(mount: &Mount, verb: &str, id: &str, more: &[&str]) {
    let mut command = Command::new(forebay());
    command.args(["job", verb, id, "--mount"]).arg(mount.place.mnt()).args(more);
    run(&mut command, COMMAND).ok();
}
