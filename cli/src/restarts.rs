//! Calls to a daemon whose worker dies meanwhile, and is started again.

use std::time::{Duration, Instant};

use forebay_daemon::registry::{Process, RegisteredMount};
use forebay_daemon::{Failure, FailureKind};

/// How long a daemon that is started again is waited for.
const RESTART: Duration = Duration::from_secs(15);
const PAUSE: Duration = Duration::from_millis(100);
/// A call during which so many workers died is given up: it may be what they die of.
const DEATHS_MAX: u32 = 4;

/// Carries out a call that may be repeated. Repeats it if the daemon goes away meanwhile.
pub fn repeated<T>(entry: &RegisteredMount, mut call: impl FnMut() -> Result<T, Failure>) -> Result<T, Failure> {
    let (mut until, mut deaths) = (Instant::now() + RESTART, 0);
    loop {
        let worker = worker_of(entry);
        let failure = match call() {
            Err(failure) if failure.kind == FailureKind::NoDaemon && entry.supervisor_alive() => failure,
            answer => return answer,
        };
        // However long it was at work before.
        if worker.is_some_and(|worker| !worker.is_alive()) && deaths < DEATHS_MAX {
            (until, deaths) = (Instant::now() + RESTART, deaths + 1);
        }
        if Instant::now() >= until {
            return Err(failure);
        }
        std::thread::sleep(PAUSE);
    }
}

/// Carries out a call that takes something away, and that a dying worker has done as a whole or not at all. `is_left`
/// asks the next worker, and then tells whether there is still something to take. Returns `None` if a worker died when it
/// had taken it, and before it answered.
pub fn taken_once<T>(
    entry: &RegisteredMount,
    mut call: impl FnMut() -> Result<T, Failure>,
    is_left: impl Fn() -> Result<bool, Failure>,
) -> Result<Option<T>, Failure> {
    for _ in 0..DEATHS_MAX {
        let worker = awaited(entry, |_| true);
        match call() {
            // A worker that lives may still be at it.
            Err(failure) if failure.kind == FailureKind::NoDaemon && is_replaced(entry, worker) => {
                if !is_left()? {
                    return Ok(None);
                }
            }
            answer => return answer.map(Some),
        }
    }
    call().map(Some)
}

/// Returns the worker of a mount. `None`: none serves now.
fn worker_of(entry: &RegisteredMount) -> Option<Process> {
    entry.runtime.load().ok()?.worker.filter(Process::is_alive)
}

/// Waits until another worker is there in place of one that is dead.
fn is_replaced(entry: &RegisteredMount, worker: Option<Process>) -> bool {
    worker.is_some_and(|worker| awaited(entry, |next| *next != worker).is_some())
}

/// Waits for such a worker of a mount, while its daemon may start one.
fn awaited(entry: &RegisteredMount, is_such: impl Fn(&Process) -> bool) -> Option<Process> {
    let until = Instant::now() + RESTART;
    loop {
        let worker = worker_of(entry).filter(&is_such);
        if worker.is_some() || !entry.supervisor_alive() || Instant::now() >= until {
            return worker;
        }
        std::thread::sleep(PAUSE);
    }
}
