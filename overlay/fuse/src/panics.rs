//! A panic ends the worker. Its state in memory may be half changed, and nothing would show that: the panic releases
//! all locks. The supervisor starts another worker, which starts from the catalog.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// How long the process waits for the answer to a request whose work panicked on another thread. Without an answer the
/// kernel resends the request to the next worker, which would panic, too.
const GRACE: Duration = Duration::from_millis(100);
/// Exit status of a worker that panicked.
pub const STATUS: i32 = 70;

static ENDING: AtomicBool = AtomicBool::new(false);

/// Makes a panic, on any thread, end this process from now on.
pub fn end_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        let later = || {
            thread::sleep(GRACE);
            end()
        };
        // Before logging, which may block.
        let first = !ENDING.swap(true, Ordering::SeqCst);
        if first && thread::Builder::new().name("ending".into()).spawn(later).is_err() {
            end();
        }
        tracing::error!("{panic}; this worker ends, and a new one continues from the catalog");
    }));
}

/// Called when a request whose work panicked was answered: the process has nothing left to wait for.
pub(super) fn answered() {
    if ENDING.load(Ordering::SeqCst) {
        end();
    }
}

/// Ends the process without cleanup: a normal exit would write the state in memory to disk.
fn end() -> ! {
    // SAFETY: it takes a number, and does not return.
    unsafe { libc::_exit(STATUS) }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::process::Command;

    use super::super::dispatch::dispatch;
    use super::super::latencies::Operation;
    use super::*;

    const CHILD: &str = "FOREBAY_TEST_PANICS";

    /// The test below runs this in a process of its own.
    #[test]
    fn panics_in_a_process_of_its_own() {
        let Ok(how) = std::env::var(CHILD) else { return };
        end_on_panic();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let _entered = runtime.enter();
        if how == "background" {
            runtime.spawn(async { panic!("on purpose") });
        } else {
            let work = async move {
                if how == "blocking" {
                    let fails = tokio::task::spawn_blocking(|| panic!("on purpose"));
                    return fails.await.map_err(|e| {
                        forebay_backends::Error::new(
                            forebay_backends::ErrorKind::Os(libc::EIO),
                            forebay_backends::Side::Cache,
                            e.to_string(),
                        )
                    });
                }
                panic!("on purpose")
            };
            dispatch(
                runtime.handle(),
                &Default::default(),
                None,
                Operation::Read,
                work,
                |outcome: forebay_backends::Result<()>| {
                    let mut out = std::io::stderr();
                    writeln!(out, "answered {}", outcome.unwrap_err().errno()).unwrap();
                },
            );
        }
        thread::sleep(Duration::from_secs(60));
    }

    #[test]
    fn a_panic_ends_the_process_after_the_answer() {
        for how in ["request", "blocking", "background"] {
            let mut child = Command::new(std::env::current_exe().unwrap());
            child.args(["--exact", "panics::tests::panics_in_a_process_of_its_own", "--nocapture"]);
            let output = child.env(CHILD, how).output().unwrap();
            assert_eq!(output.status.code(), Some(STATUS), "{how}: {output:?}");
            let said = String::from_utf8_lossy(&output.stderr).contains(&format!("answered {}", libc::EIO));
            assert_eq!(said, how != "background", "{how}: {output:?}");
        }
    }
}
