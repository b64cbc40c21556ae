//! Blocks signals and waits for them.

use std::io;
use std::mem::MaybeUninit;
use std::time::Duration;

/// A signal that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Came {
    pub signal: i32,
    /// The kernel sent it, as for Ctrl-C on a terminal, which goes to all processes that run there.
    pub by_kernel: bool,
}

/// Signals that are blocked in this thread, and in threads that it starts, until this is dropped.
pub struct Held {
    held: libc::sigset_t,
    before: libc::sigset_t,
}

impl Held {
    /// The signals that ask a program to end.
    pub const ASK_TO_END: [i32; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

    /// Must be called before there are other threads: the signals would be delivered to those.
    pub fn new(signals: &[i32]) -> io::Result<Self> {
        let mut held = MaybeUninit::uninit();
        let mut before = MaybeUninit::uninit();
        // SAFETY: both sets are written before they are read, and outlive the calls.
        unsafe {
            libc::sigemptyset(held.as_mut_ptr());
            for signal in signals {
                libc::sigaddset(held.as_mut_ptr(), *signal);
            }
            match libc::pthread_sigmask(libc::SIG_BLOCK, held.as_ptr(), before.as_mut_ptr()) {
                0 => Ok(Self { held: held.assume_init(), before: before.assume_init() }),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        }
    }

    /// Waits for the next of these signals, at most for `limit`.
    pub fn wait(&self, limit: Option<Duration>) -> Option<Came> {
        let limit = limit.map(|limit| libc::timespec {
            tv_sec: limit.as_secs() as libc::time_t,
            tv_nsec: limit.subsec_nanos().into(),
        });
        let mut info = MaybeUninit::uninit();
        let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: set and limit outlive the call; `info` is read only if the call says that it was written.
        unsafe {
            let signal = libc::sigtimedwait(&raw const self.held, info.as_mut_ptr(), limit);
            let info: libc::siginfo_t = if signal > 0 { info.assume_init() } else { return None };
            Some(Came { signal, by_kernel: info.si_code == libc::SI_KERNEL })
        }
    }

    /// Restores the earlier signal mask, for a child process. Async-signal-safe.
    pub(super) fn restore(before: &libc::sigset_t) -> io::Result<()> {
        // SAFETY: the set outlives the call.
        match unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) } {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    pub(super) fn before(&self) -> libc::sigset_t {
        self.before
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = Self::restore(&self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_is_held_back_is_told_and_not_obeyed() {
        let held = Held::new(&[libc::SIGUSR1]).unwrap();
        assert_eq!(held.wait(Some(Duration::ZERO)), None);
        // SAFETY: a plain system call, for this thread alone.
        unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGUSR1) };
        assert_eq!(held.wait(None), Some(Came { signal: libc::SIGUSR1, by_kernel: false }));
    }
}
