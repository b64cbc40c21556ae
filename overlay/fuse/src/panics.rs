//! A panic ends the worker. What it left half done in memory is not to be believed, and nothing would tell: locks are
//! free again. The supervisor starts another worker, which begins with what the catalog has.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// How long a request may take to be answered whose work panicked on another thread. Without an answer the kernel sends it
/// to the next worker, which would end by it, too.
const GRACE: Duration = Duration::from_millis(100);
/// What the worker ends with.
pub const STATUS: i32 = 70;

static ENDING: AtomicBool = AtomicBool::new(false);

/// From now on a panic, on whichever thread, ends this process.
pub fn end_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        let later = || {
            thread::sleep(GRACE);
            end()
        };
        // Before the log, which may block.
        let first = !ENDING.swap(true, Ordering::SeqCst);
        if first && thread::Builder::new().name("ending".into()).spawn(later).is_err() {
            end();
        }
        tracing::error!("{panic}; this worker ends, and another one goes on from the catalog");
    }));
}

/// A request was answered whose work panicked: nothing is waited for any more.
pub(super) fn answered() {
    if ENDING.load(Ordering::SeqCst) {
        end();
    }
}

/// At once: what ends in the usual way writes down what it believes.
fn end() -> ! {
    // SAFETY: it takes a number, and does not return.
    unsafe { libc::_exit(STATUS) }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::process::Command;

    use super::super::dispatch::dispatch;
    use super::*;

    const CHILD: &str = "FOREBAY_TEST_PANICS";

    /// Run by the tests below, in a process of its own.
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
            dispatch(runtime.handle(), None, "test", work, |outcome: forebay_backends::Result<()>| {
                let mut out = std::io::stderr();
                writeln!(out, "answered {}", outcome.unwrap_err().errno()).unwrap();
            });
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
