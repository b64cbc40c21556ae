//! Runs a command as a job: passes signals on to it, and exits as the command exits.

use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};

use super::signals::Held;

/// How often the end of the command is checked if no signal arrives.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The exit codes of shells for a command that was not found, and for one that cannot be run.
const NOT_FOUND: u8 = 127;
const NOT_RUN: u8 = 126;
/// Shells exit with 128 + n if signal n ended the command.
const BY_SIGNAL: i32 = 128;

/// Prepares this process to run a command. Orphans below the command become children of this process, so a search for
/// their ancestors finds it.
pub struct Subreaper(Held);

impl Subreaper {
    pub fn set() -> io::Result<Self> {
        let held = Held::new(&[Held::ASK_TO_END.as_slice(), &[libc::SIGCHLD]].concat())?;
        // If SIGCHLD is ignored, as the parent of this process may have set it, children vanish without a status.
        // SAFETY: the default disposition is no handler of this program.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        Ok(Self(held))
    }

    /// Runs a command to its end. Returns the exit code for this process.
    ///
    /// # Errors
    /// The command cannot be run: the error has the exit code that shells use.
    pub fn run(&self, command: &mut Command) -> Result<u8, (u8, io::Error)> {
        let before = self.0.before();
        // SAFETY: it only sets the signal mask, which is async-signal-safe.
        unsafe { command.pre_exec(move || Held::restore(&before)) };
        let child = command.spawn().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => (NOT_FOUND, error),
            _ => (NOT_RUN, error),
        })?;
        let Some(pid) = Pid::from_raw(child.id().cast_signed()) else { return Ok(NOT_RUN) };
        loop {
            match self.0.wait(Some(LOOK_EVERY)) {
                Some(came) if came.signal != libc::SIGCHLD => {
                    if let (false, Some(signal)) = (came.by_kernel, Signal::from_named_raw(came.signal)) {
                        // The command may have ended just now.
                        let _ = kill_process(pid, signal);
                    }
                }
                _ => {
                    if let Some(code) = reap(pid) {
                        return Ok(code);
                    }
                }
            }
        }
    }
}

/// Reaps all children that have ended. Returns the exit code of `child`, if it is among them.
fn reap(child: Pid) -> Option<u8> {
    let mut ended = None;
    while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
        if pid == child {
            let status = std::process::ExitStatus::from_raw(status.as_raw());
            let code = status.code().or_else(|| status.signal().map(|signal| BY_SIGNAL + signal));
            ended = Some(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(NOT_RUN));
        }
    }
    ended
}
