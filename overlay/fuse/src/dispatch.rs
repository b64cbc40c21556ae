//! Runs each request until it is answered.
//!
//! Each operation of the engine is one future, polled first on the session thread. If the answer is in memory or in the
//! catalog, the future is ready then and the reply is sent at once. If it needs the pool or the disk, the same future
//! goes to tokio. No operation has a second, "fast" implementation.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_engine::Shares;
use futures::FutureExt;
use tokio::runtime::Handle;

use super::latencies::{Operation, RequestLatencies};
use super::panics;

/// Runs `work` and hands its outcome to `reply`, exactly once.
///
/// `work` is polled once on the calling thread. A cache hit is answered on that thread, since handing a request to
/// another thread costs half of the request rate. If `work` is still pending, it goes to the runtime, which also calls
/// `reply`. The first poll has no waker. That is sound because the runtime polls the task again before anything may
/// rely on a wake-up.
///
/// `of`: the user of the request. If the user's share of waiting requests is used up, the request waits for an earlier
/// request of the same user.
///
/// A panic in `work` is answered with EIO, and ends this worker. Without an answer the kernel would resend the request
/// to the next worker.
pub fn dispatch<T, W, R>(
    runtime: &Handle,
    latencies: &Arc<RequestLatencies>,
    of: Option<(&Arc<Shares>, u32)>,
    operation: Operation,
    work: W,
    reply: R,
) where
    T: 'static,
    W: Future<Output = Result<T>> + Send + 'static,
    R: FnOnce(Result<T>) + Send + 'static,
{
    let (begun, counted) = (Instant::now(), latencies.clone());
    let task = Box::pin(async move {
        match AssertUnwindSafe(work).catch_unwind().await {
            Ok(outcome) => reply(outcome),
            Err(panic) => {
                reply(Err(panicked(operation.name(), panic.as_ref())));
                panics::answered();
            }
        }
        counted.of(operation).observe(begun.elapsed());
    });
    run(runtime, latencies, of, task);
}

/// Polls `task` here, and on the runtime if it is not ready then or must wait for its turn. Not part of [`dispatch`]:
/// it would be compiled once for each operation.
fn run(
    runtime: &Handle,
    latencies: &Arc<RequestLatencies>,
    of: Option<(&Arc<Shares>, u32)>,
    mut task: Pin<Box<dyn Future<Output = ()> + Send>>,
) {
    let _inside = runtime.enter();
    if let Some((shares, user)) = of
        && shares.must_wait(user)
    {
        let (shares, latencies) = (shares.clone(), latencies.clone());
        runtime.spawn(async move {
            let _waits = Waits::new(latencies);
            let _counted = shares.request_in_turn(user).await;
            task.await;
        });
        return;
    }
    match task.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(()) => {}
        Poll::Pending => {
            let counted = of.map(|(shares, user)| shares.begin_request(user));
            let waits = Waits::new(latencies.clone());
            runtime.spawn(async move {
                let _waits = waits;
                task.await;
                drop(counted);
            });
        }
    }
}

/// A request that waits, until it is dropped.
struct Waits(Arc<RequestLatencies>);

impl Waits {
    fn new(latencies: Arc<RequestLatencies>) -> Self {
        latencies.wait();
        Self(latencies)
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.waited();
    }
}

fn panicked(operation: &'static str, panic: &(dyn Any + Send)) -> Error {
    let message = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned());
    tracing::error!(operation, %message, "a request panicked and is answered with EIO");
    Error::new(ErrorKind::Os(libc::EIO), Side::Cache, format!("{operation} panicked: {message}"))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
    }

    #[test]
    fn a_hit_is_answered_on_the_calling_thread() {
        let runtime = runtime();
        let (tx, rx) = mpsc::channel();
        dispatch(runtime.handle(), &Arc::default(), None, Operation::Read, async { Ok(7) }, move |outcome| {
            tx.send((outcome.unwrap(), thread::current().id())).unwrap();
        });
        assert_eq!(rx.try_recv().unwrap(), (7, thread::current().id()));
    }

    #[test]
    fn a_miss_is_answered_by_the_runtime() {
        let runtime = runtime();
        let (tx, rx) = mpsc::channel();
        let work = async {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            tokio::task::yield_now().await;
            Ok(7)
        };
        dispatch(runtime.handle(), &Arc::default(), None, Operation::Read, work, move |outcome| {
            tx.send((outcome.unwrap(), thread::current().id())).unwrap();
        });
        let (value, thread) = rx.recv().unwrap();
        assert_eq!(value, 7);
        assert_ne!(thread, thread::current().id());
    }

    #[test]
    fn a_panic_is_answered_with_eio() {
        let runtime = runtime();
        for after_await in [false, true] {
            let (tx, rx) = mpsc::channel();
            let work = async move {
                if after_await {
                    tokio::task::yield_now().await;
                }
                panic!("on purpose");
                #[allow(unreachable_code)]
                Ok(())
            };
            dispatch(runtime.handle(), &Arc::default(), None, Operation::Read, work, move |outcome: Result<()>| {
                tx.send(outcome).unwrap()
            });
            assert_eq!(rx.recv().unwrap().unwrap_err().errno(), libc::EIO);
        }
    }
}
