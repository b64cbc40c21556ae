//! Jobs with `#DW` directives: their mount, their scripts, and what is left of them.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::mount::{COMMAND, Mount, Options, content};
use crate::process::{forebay, run};

/// Slurm refuses burst buffers to root.
pub const USER: u32 = 65_534;

/// Makes a mount in which nothing is flushed that no request asks for, and which all users see. The pool has `files`
/// files of `bytes` bytes in the directory `in`.
#[track_caller]
pub fn mount(files: u64, bytes: usize) -> Mount {
    let policy = "[default]\nflush = \"manual\"\n[prefetch]\nonline = false\n";
    let mount = Mount::new(Options { more: vec!["-o".into(), "allow_other".into()], ..Options::policy(policy) });
    mount.place.let_users_pass();
    fs::create_dir(mount.pool("in")).unwrap();
    (0..files).for_each(|at| fs::write(mount.pool(format!("in/{at}")), content(at, bytes)).unwrap());
    mount
}

/// Returns a script with these directives. `MOUNT` in them stands for the mountpoint.
pub fn script(mount: &Mount, directives: &[&str], commands: &str) -> String {
    let at = mount.place.mnt().display().to_string();
    format!("{}\n{commands}", directives.join("\n")).replace("MOUNT", &at)
}

/// Returns the report of the job with this number of Slurm.
#[track_caller]
pub fn shown(mount: &Mount, job: &str) -> Value {
    let id = format!("slurm-{job}");
    let answer = mount.forebay(["--json", "job", "show", &id, "--mount"], &[&mount.place.mnt()]).ok();
    serde_json::from_str(&answer.out).unwrap()
}

/// Returns the names in a directory, sorted; none if it does not exist.
pub fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Returns what `forebay scratch list` says.
#[track_caller]
pub fn scratch_dirs(mount: &Mount) -> String {
    run(Command::new(forebay()).args(["scratch", "list", "--mount"]).arg(mount.place.mnt()), COMMAND).ok().out
}
