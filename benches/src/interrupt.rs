//! A signal ends the run between two samples, so that what was mounted is unmounted.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::Result;

static ASKED: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_: libc::c_int) {
    ASKED.store(true, Ordering::Relaxed);
}

/// From now on SIGINT, SIGTERM and SIGHUP are noted.
pub fn watch() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the handler only stores to an atomic.
        unsafe { libc::signal(signal, note as *const () as libc::sighandler_t) };
    }
}

/// # Errors
/// Where a signal asked for the end.
pub fn check() -> Result<()> {
    if ASKED.load(Ordering::Relaxed) {
        return Err("interrupted".into());
    }
    Ok(())
}
