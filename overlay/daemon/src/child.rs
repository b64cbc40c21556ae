//! A command that is run as a job: it gets the signals that are meant for it, and how it ends is how we end.

use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};

use super::signals::Held;

/// How often it is looked for the end of a command of which nothing was told.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// As shells say that a command was not found, and that it cannot be run.
const NOT_FOUND: u8 = 127;
const NOT_RUN: u8 = 126;
/// As shells say that a command was ended by signal n: 128 + n.
const BY_SIGNAL: i32 = 128;

/// Readiness to run a command. Orphans below it become our children: who looks for their ancestors finds us.
pub struct Stage(Held);

impl Stage {
    pub fn set() -> io::Result<Self> {
        let held = Held::new(&[Held::ASK_TO_END.as_slice(), &[libc::SIGCHLD]].concat())?;
        // Where it is ignored, as whoever started us may have left it, children are gone without a word.
        // SAFETY: the default is no handler of ours.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        Ok(Self(held))
    }

    /// Runs a command to its end and returns what to exit with.
    ///
    /// # Errors
    /// It cannot be run: with what to exit with, as shells do.
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
                        // It may have ended just now.
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

/// Takes in who has ended. How `child` did, if it is among them.
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
