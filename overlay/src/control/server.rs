//! The side of the local API that answers.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use futures::{Stream, StreamExt};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

use super::protocol::{Reply, Request};
use super::{Failure, FailureKind, limits};
use crate::Overlay;
use crate::backends::PoolPath;
use crate::operator::{Progress, Status};

/// What the engine does not know of the mount that it is behind.
pub struct Facts {
    pub mountpoint: String,
    /// Whether the kernel reads resident files without asking us: it may cease to.
    pub passthrough: Box<dyn Fn() -> bool + Send + Sync>,
}

/// Binds the socket for this user alone. One that a dead worker left behind is replaced.
pub fn bind(socket: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(socket)?;
    std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Answers clients until it is dropped.
pub async fn serve(listener: UnixListener, overlay: Overlay, facts: Facts) {
    let slots = Arc::new(Semaphore::new(limits::CLIENTS));
    let facts = Arc::new(facts);
    loop {
        let Ok(slot) = slots.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let (overlay, facts) = (overlay.clone(), facts.clone());
                tokio::spawn(async move {
                    if let Err(error) = answer(stream, overlay, &facts).await {
                        tracing::debug!("a client left: {error}");
                    }
                    drop(slot);
                });
            }
            Err(error) => {
                // Out of descriptors, most likely: the next attempt comes when others may have been closed.
                tracing::warn!("cannot accept a client: {error}");
                tokio::time::sleep(limits::HEARTBEAT).await;
            }
        }
    }
}

async fn answer(stream: UnixStream, overlay: Overlay, facts: &Facts) -> io::Result<()> {
    let (read, write) = stream.into_split();
    let mut out = Replies(write);
    let mut line = Vec::new();
    let mut limited = BufReader::new(read).take(limits::REQUEST_BYTES);
    tokio::time::timeout(limits::REQUEST, limited.read_until(b'\n', &mut line)).await??;
    let outcome = match serde_json::from_slice::<Request>(&line) {
        Ok(request) => carry_out(request, overlay, facts, &mut out).await,
        Err(error) => Err(Gone::Failed(Failure::usage(format!("the request is not understood: {error}")))),
    };
    match outcome {
        Ok(()) => out.send(&Reply::End).await,
        Err(Gone::Failed(failure)) => out.send(&Reply::Error(failure)).await,
        Err(Gone::Client(error)) => Err(error),
    }
}

/// Why an answer ended early.
enum Gone {
    Client(io::Error),
    Failed(Failure),
}

impl From<io::Error> for Gone {
    fn from(error: io::Error) -> Self {
        Self::Client(error)
    }
}

impl From<Failure> for Gone {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

async fn carry_out(request: Request, overlay: Overlay, facts: &Facts, out: &mut Replies) -> Result<(), Gone> {
    match request {
        Request::Status => {
            let status = out.waiting_for(overlay.status()).await?;
            out.send(&Reply::Status(Box::new(complete(status, facts)))).await?;
        }
        Request::Stage(request) => out.forward(overlay.stage(request)).await?,
        Request::Flush(request) => out.forward(overlay.flush(request)).await?,
        Request::Evict(request) => out.forward(overlay.evict(request)).await?,
        Request::Dirty => {
            let files = out.waiting_for(overlay.dirty()).await?.map_err(Failure::from)?;
            for part in files.chunks(limits::ENTRIES_PER_REPLY) {
                out.send(&Reply::Dirty(part.to_vec())).await?;
            }
        }
        Request::Ls { path, recursive } => {
            let path = parse(&path)?;
            let listed = out.waiting_for(overlay.list_residency(&path, recursive)).await?.map_err(Failure::from)?;
            for part in listed.chunks(limits::ENTRIES_PER_REPLY) {
                out.send(&Reply::Listed(part.to_vec())).await?;
            }
        }
        Request::Fsck { repair } => {
            let report = out.waiting_for(overlay.fsck(repair)).await?.map_err(Failure::from)?;
            out.send(&Reply::Fsck(report)).await?;
        }
    }
    Ok(())
}

fn complete(mut status: Status, facts: &Facts) -> Status {
    status.mountpoint = Some(facts.mountpoint.clone());
    status.passthrough = (facts.passthrough)();
    status
}

fn parse(path: &str) -> Result<PoolPath, Failure> {
    super::paths::decode(path)
        .and_then(PoolPath::parse)
        .ok_or_else(|| Failure::usage(format!("`{path}` is not a path below the mount")))
}

struct Replies(tokio::net::unix::OwnedWriteHalf);

impl Replies {
    async fn send(&mut self, reply: &Reply) -> io::Result<()> {
        let mut line = serde_json::to_vec(reply).map_err(io::Error::other)?;
        line.push(b'\n');
        tokio::time::timeout(limits::SILENCE, self.0.write_all(&line)).await?
    }

    /// Gives signs of life while the answer is worked out. Ends with the client: work for nobody is dropped.
    async fn waiting_for<T>(&mut self, work: impl Future<Output = T>) -> io::Result<T> {
        let mut work = std::pin::pin!(work);
        loop {
            match tokio::time::timeout(limits::HEARTBEAT, &mut work).await {
                Ok(done) => return Ok(done),
                Err(_) => self.send(&Reply::Alive).await?,
            }
        }
    }

    async fn forward(&mut self, progress: impl Stream<Item = Progress>) -> Result<(), Gone> {
        let mut progress = std::pin::pin!(progress);
        let mut finished = false;
        while let Some(step) = self.waiting_for(progress.next()).await? {
            finished |= matches!(step, Progress::Done(_));
            self.send(&Reply::Progress(step)).await?;
        }
        if finished {
            return Ok(());
        }
        Err(Gone::Failed(Failure::new(FailureKind::Other, "the daemon stopped the work without a summary")))
    }
}

#[cfg(test)]
mod tests;
