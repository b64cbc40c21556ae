//! A signal ends the run between two samples, so that the mounts are unmounted.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::Result;

static ASKED: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_: libc::c_int) {
    ASKED.store(true, Ordering::Relaxed);
}

/// Installs handlers that note SIGINT, SIGTERM and SIGHUP for [`check`].
pub fn watch() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the handler only stores to an atomic.
        unsafe { libc::signal(signal, note as *const () as libc::sighandler_t) };
    }
}

/// # Errors
/// A signal was received.
pub fn check() -> Result<()> {
    if ASKED.load(Ordering::Relaxed) {
        return Err("interrupted".into());
    }
    Ok(())
}
