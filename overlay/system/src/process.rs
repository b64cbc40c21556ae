//! Processes, from /proc. Reads only files that do not need the process itself: a process that waits for an answer of
//! this daemon holds the locks under which the kernel reads its command line, its environment and its mappings.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

/// A process. The start tick distinguishes it from a later process with the same pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Process {
    pub pid: u32,
    pub start_ticks: u64,
}

impl Process {
    pub fn current() -> Self {
        Self::of(std::process::id())
    }

    pub fn of(pid: u32) -> Self {
        Self { pid, start_ticks: stat(pid).map_or(0, |stat| stat.start_ticks) }
    }

    /// Returns whether any of its threads is left. The first thread may end before the other threads, and its open
    /// files stay open until the last thread ends.
    pub fn is_alive(&self) -> bool {
        stat(self.pid).is_some_and(|stat| stat.start_ticks == self.start_ticks)
    }

    /// Returns whether its first thread has not begun to exit. The kernel reports that exit after it has begun, and the
    /// process is alive until its files are closed.
    pub fn is_running(&self) -> bool {
        stat(self.pid).is_some_and(|stat| stat.start_ticks == self.start_ticks && !stat.is_exiting)
    }
}

/// The flag of a thread that has begun to exit: `PF_EXITING` of include/linux/sched.h.
const EXITING: u32 = 4;

struct ProcessStat {
    parent: u32,
    /// The first thread has begun to exit.
    is_exiting: bool,
    /// In clock ticks since boot.
    start_ticks: u64,
}

/// Returns whether a process is ending: its first thread has ended, but its files may still be open.
pub fn is_ending(pid: u32) -> bool {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    text.is_ok_and(|text| stat_fields(&text).is_some_and(|mut fields| fields.next().is_some_and(has_ended)))
}

/// Returns whether a process has an environment, or is about to have one. While it begins a program, its environment
/// reads as empty, and `spawn` may return that early.
pub fn has_environment(pid: u32) -> bool {
    // Kernel threads have no program; the link of another user's process cannot be read.
    let has_program = std::fs::read_link(format!("/proc/{pid}/exe")).is_ok();
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    has_program && !text.is_empty() && !has_empty_environment(&text)
}

/// Compares `env_start` and `env_end` of proc_pid_stat(5). The kernel sets the latter last.
fn has_empty_environment(stat: &str) -> bool {
    let ends = stat_fields(stat).and_then(|mut fields| Some((fields.nth(47)?, fields.next()?)));
    ends.is_some_and(|(start, end)| end != "0" && start == end)
}

/// Returns `None` if there is no such process, or if all its threads have ended and it is not reaped yet.
fn stat(pid: u32) -> Option<ProcessStat> {
    parse_stat(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse_stat(text: &str) -> Option<ProcessStat> {
    let mut fields = stat_fields(text)?;
    let ended = has_ended(fields.next()?);
    let parent = fields.next()?.parse().ok()?;
    let flags: u32 = fields.nth(4)?.parse().ok()?;
    let threads: u32 = fields.nth(10)?.parse().ok()?;
    if ended && threads <= 1 {
        return None;
    }
    Some(ProcessStat { parent, is_exiting: flags & EXITING != 0, start_ticks: fields.nth(1)?.parse().ok()? })
}

/// Returns the fields after the name: proc_pid_stat(5), from field 3 on.
fn stat_fields(text: &str) -> Option<std::str::SplitWhitespace<'_>> {
    // The command's name is in parentheses and may contain anything, parentheses too.
    Some(text.rsplit_once(')')?.1.split_whitespace())
}

fn has_ended(state: &str) -> bool {
    matches!(state, "Z" | "X")
}

/// Returns the process of a thread, and its parent.
pub fn process_and_parent(thread: u32) -> Option<(u32, u32)> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name))?.trim().parse().ok();
    Some((field("Tgid:")?, field("PPid:")?))
}

/// Returns the name of a process's program, at most 15 bytes, and its real user.
pub fn name_and_owner(pid: u32) -> Option<(String, u32)> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    Some((field("Name:")?.trim().to_owned(), field("Uid:")?.split_whitespace().next()?.parse().ok()?))
}

/// Returns the living processes with these pids, and all their descendants, parents first.
pub fn tree(roots: &[u32]) -> Vec<Process> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    let mut alive = HashMap::new();
    for pid in all() {
        if let Some(stat) = stat(pid) {
            children.entry(stat.parent).or_default().push(pid);
            alive.insert(pid, stat.start_ticks);
        }
    }
    let (mut found, mut seen) = (Vec::new(), HashSet::new());
    let mut next: Vec<u32> = roots.to_vec();
    while let Some(pid) = next.pop() {
        let Some(&start_ticks) = alive.get(&pid).filter(|_| seen.insert(pid)) else { continue };
        found.push(Process { pid, start_ticks });
        next.extend(children.get(&pid).into_iter().flatten());
    }
    found
}

/// Returns the pids of all processes.
pub fn all() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_alive_until_it_is_not() {
        assert!(Process::current().is_alive());
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::of(child.id());
        assert!(process.is_alive() && process.is_running());
        assert!(tree(&[std::process::id()]).contains(&process), "a child is below its parent");
        assert_eq!(process_and_parent(child.id()), Some((child.id(), std::process::id())));
        let owner = rustix::process::getuid().as_raw();
        assert_eq!(name_and_owner(child.id()), Some(("sleep".into(), owner)));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!process.is_alive() && !process.is_running());
        assert!(tree(&[child.id()]).is_empty());
    }

    #[test]
    fn names_of_commands_are_no_obstacle() {
        let stat = parse_stat("7 (a) b (c) S 3 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 0 99 1 2").unwrap();
        assert_eq!((stat.parent, stat.is_exiting, stat.start_ticks), (3, false, 99));
        let exits = parse_stat("7 (a) S 3 0 0 0 0 4194308 0 0 0 0 0 0 0 0 0 0 1 0 99 1 2").unwrap();
        assert!(exits.is_exiting && exits.start_ticks == 99);
        assert!(parse_stat("7 (gone) Z 3 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 0 99").is_none());
    }

    #[test]
    fn a_program_that_begins_is_taken_to_have_an_environment() {
        let stat = |ends: &str| format!("7 (a) S{} {ends} 0", " 1".repeat(46));
        for begun in ["0 0", "140000 0", "140000 140400"] {
            assert!(!has_empty_environment(&stat(begun)), "{begun}");
        }
        assert!(has_empty_environment(&stat("140000 140000")));
        let mut child = std::process::Command::new("sleep").arg("60").env_clear().spawn().unwrap();
        let begun = std::time::Instant::now();
        while has_environment(child.id()) {
            assert!(begun.elapsed().as_secs() < 30, "it has no environment, and it is told");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!has_environment(child.id()) && has_environment(std::process::id()));
    }

    #[test]
    fn a_process_lives_as_long_as_any_of_its_threads() {
        let script = "import ctypes, threading, time\n\
                      threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n\
                      ctypes.CDLL(None).syscall(SYS_EXIT, 0)";
        let script = script.replace("SYS_EXIT", &libc::SYS_exit.to_string());
        let mut child = std::process::Command::new("python3").args(["-c", &script]).spawn().unwrap();
        let process = Process::of(child.id());
        let begun = std::time::Instant::now();
        while !is_ending(child.id()) {
            assert!(begun.elapsed().as_secs() < 30, "its first thread ends");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert!(process.is_alive() && !process.is_running() && child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!process.is_alive() && !is_ending(child.id()));
    }

    #[test]
    fn a_thread_belongs_to_its_process() {
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let own = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
            tell.send((own, process_and_parent(own))).unwrap();
        });
        let (thread, known) = told.recv().unwrap();
        assert_ne!(thread, std::process::id());
        assert_eq!(known.unwrap().0, std::process::id());
    }
}
