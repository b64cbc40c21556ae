//! The hidden commands for the two processes of a mount.

use std::io::IsTerminal;
use std::path::Path;

use forebay_daemon::supervisor::{self, StartOutcome};
use forebay_daemon::{Failure, FailureKind, worker};
use tracing_subscriber::EnvFilter;

use crate::allocator;
use crate::exit::Exit;

/// Logs to standard error what `FOREBAY_LOG` selects, else what an operator needs.
pub fn log() {
    let filter = EnvFilter::try_from_env("FOREBAY_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    // A second call has no effect.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        // The error would be printed to the same place, and printing panics if that cannot be written.
        .log_internal_errors(false)
        .try_init();
}

pub fn supervise() -> Result<Exit, Failure> {
    log();
    // Detaches from the terminal. This fails only for a group leader, which is already detached.
    let _ = rustix::process::setsid();
    let config = serde_json::from_reader(std::io::stdin().lock())
        .map_err(|e| Failure::new(FailureKind::Usage, format!("the description of the mount: {e}")))?;
    let outcome =
        supervisor::run(config, allocator::give_back_in_background, &|ready| StartOutcome::Ready(ready.clone()).tell());
    if let Err(failure) = &outcome {
        StartOutcome::Failed(failure.clone()).tell();
    }
    outcome.map(|()| Exit::Done)
}

pub fn worker(runtime: &Path) -> Result<Exit, Failure> {
    log();
    worker::run(runtime, allocator::give_back_in_background).map(|()| Exit::Done)
}
