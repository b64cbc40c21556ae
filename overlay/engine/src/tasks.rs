//! Work in tasks and threads of its own.
//!
//! The work is boxed before tokio gets it, so that tokio's code for a task is compiled once for each type of result, and not
//! for each caller.

use forebay_backends::{Error, ErrorKind, Result, Side};
use futures::FutureExt;

/// Runs work that blocks on the disk, outside of the threads that must not wait.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let work: Box<dyn FnOnce() -> Result<T> + Send> = Box::new(work);
    outcome(tokio::task::spawn_blocking(work).await)
}

/// Runs long work that blocks on a thread of this name, so that tools that show threads tell what it costs. The runtime
/// does not end before it.
pub(crate) async fn on_thread<T: Send + 'static>(
    name: &'static str,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let runtime = tokio::runtime::Handle::current();
    let work = move || {
        let _inside = runtime.enter();
        work()
    };
    blocking(move || {
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
        let thread = thread.map_err(|e| Error::io(e, Side::Cache, format!("starting {name}")))?;
        thread
            .join()
            .unwrap_or_else(|_| Err(Error::new(ErrorKind::Os(libc::EIO), Side::Cache, format!("{name} panicked"))))
    })
    .await
}

/// Runs work to its end, although its caller may go away meanwhile.
pub(crate) async fn to_its_end<T: Send + 'static>(work: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
    outcome(tokio::spawn(work.boxed()).await)
}

fn outcome<T>(ended: std::result::Result<Result<T>, tokio::task::JoinError>) -> Result<T> {
    let early = |e| Error::new(ErrorKind::Os(libc::EIO), Side::Cache, format!("a task ended early: {e}"));
    ended.map_err(early)?
}
