//! Work in tasks and threads of its own.
//!
//! The work is boxed before tokio gets it: tokio's task is compiled once for each result type, and not for each caller,
//! which was a third of the time to compile the engine and what calls it.

use std::pin::Pin;

use forebay_backends::{Error, ErrorKind, Result, Side};

/// Runs work that blocks on the disk, outside of the threads that must not wait.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let work: Box<dyn FnOnce() -> Result<T> + Send> = Box::new(work);
    outcome(tokio::task::spawn_blocking(work).await)
}

/// Runs work to its end, although its caller may go away meanwhile.
pub(crate) async fn to_its_end<T: Send + 'static>(work: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
    let work: Pin<Box<dyn Future<Output = Result<T>> + Send>> = Box::pin(work);
    outcome(tokio::spawn(work).await)
}

fn outcome<T>(ended: std::result::Result<Result<T>, tokio::task::JoinError>) -> Result<T> {
    let early = |e| Error::new(ErrorKind::Os(libc::EIO), Side::Cache, format!("a task ended early: {e}"));
    ended.map_err(early)?
}
