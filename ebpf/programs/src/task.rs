//! Whose job a task is.

use aya_ebpf::helpers::generated::{
    bpf_get_current_ancestor_cgroup_id, bpf_get_current_cgroup_id, bpf_get_current_pid_tgid,
};

use crate::layout::{Drop, NO_JOB};
use crate::maps::{CGROUPS, TASKS, dropped, load, offset, setting};

/// How deep a cgroup is looked for.
const LEVELS: i32 = 12;

/// Whether the task that runs is of the process whose touches do not count.
#[inline(always)]
pub fn is_ignored() -> bool {
    (unsafe { bpf_get_current_pid_tgid() } >> 32) as u32 == setting!(ignored)
}

/// The number of the thread that runs.
#[inline(always)]
pub fn thread() -> u32 {
    unsafe { bpf_get_current_pid_tgid() as u32 }
}

/// The job of the task that runs: by process tree first, since that was asked for by name, then by cgroup.
#[inline(always)]
pub fn job(tgid: u32) -> u32 {
    if let Some(job) = unsafe { TASKS.get(tgid) } {
        return *job;
    }
    let own = unsafe { bpf_get_current_cgroup_id() };
    if let Some(job) = unsafe { CGROUPS.get(own) } {
        return *job;
    }
    for level in 1..LEVELS {
        let id = unsafe { bpf_get_current_ancestor_cgroup_id(level) };
        if id == 0 {
            break;
        }
        if let Some(job) = unsafe { CGROUPS.get(id) } {
            return *job;
        }
    }
    NO_JOB
}

#[inline(always)]
pub fn forked(parent: *const u8, child: *const u8) {
    let parent: u32 = load(parent, offset!(task_tgid));
    let child: u32 = load(child, offset!(task_tgid));
    // A thread is not a process.
    if parent == child {
        return;
    }
    if let Some(job) = unsafe { TASKS.get(parent) } {
        let job = *job;
        if TASKS.insert(child, job, 0).is_err() {
            dropped(Drop::Tasks);
        }
    }
}

#[inline(always)]
pub fn exited(task: *const u8) {
    let tgid: u32 = load(task, offset!(task_tgid));
    if load::<u32>(task, offset!(task_pid)) == tgid {
        let _ = TASKS.remove(tgid);
    }
}
