//! Writes into a file so that its content is on the server's disk at the end.
//!
//! An unstable WRITE is fast, but the server may lose its bytes until a COMMIT. The server's verifier, which changes
//! with each start, shows such a loss. So the client keeps all bytes written since the last COMMIT, and writes those
//! again whose verifier differs from the COMMIT's. Some servers derive the verifier from the second in which they
//! started, so that two quick starts look like one: if a connection broke in between, the verifier alone is not
//! trusted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::{Bytes, BytesMut};
use futures::FutureExt;
use nfs3_client::nfs3_types::nfs3::{COMMIT3args, WRITE3args, nfs_fh3, stable_how, writeverf3};
use nfs3_client::nfs3_types::xdr_codec::Opaque;
use tokio::task::JoinSet;

use crate::{ErrorKind, Piece};

use super::credentials::Owner;
use super::failure::{NfsCall, NfsFailure, Outcome};
use super::limits::{COMMIT_ATTEMPTS, MAX_PARALLEL_TRANSFERS, MAX_PARTS, MAX_UNCOMMITTED_BYTES};
use super::session::Session;

/// Times that bytes are written again only because a connection broke, which may have other reasons, too.
const DOUBTS: u32 = 3;

/// Bytes that the server has accepted.
#[derive(Debug)]
struct Written {
    offset: u64,
    data: Bytes,
    /// The verifier of the WRITE; `None` if the bytes are on disk.
    verifier: Option<writeverf3>,
    /// The number of broken connections before the WRITE was sent.
    breaks: u64,
}

/// An upload of content into one file. Dropping it ends the calls in progress.
pub(super) struct NfsUpload {
    session: Arc<Session>,
    file: nfs_fh3,
    owners: Vec<Owner>,
    /// Adjacent pieces that fit into one WRITE.
    gathered: Vec<Bytes>,
    gathered_at: u64,
    gathered_bytes: usize,
    under_way: JoinSet<Outcome<Vec<Written>>>,
    /// Bytes being written or written, and not committed.
    uncommitted_bytes: usize,
    uncommitted: Vec<Written>,
    may_have_written: Arc<AtomicBool>,
}

impl NfsUpload {
    pub(super) fn new(session: Arc<Session>, file: nfs_fh3, owners: Vec<Owner>) -> Self {
        Self {
            session,
            file,
            owners,
            gathered: Vec::new(),
            gathered_at: 0,
            gathered_bytes: 0,
            under_way: JoinSet::new(),
            uncommitted_bytes: 0,
            uncommitted: Vec::new(),
            may_have_written: Arc::default(),
        }
    }

    /// Takes the next piece. Waits if many writes are in progress.
    pub(super) async fn push(&mut self, call: NfsCall<'_>, piece: Piece) -> Outcome<()> {
        let Piece { mut offset, mut data } = piece;
        if offset != self.gathered_at + self.gathered_bytes as u64 {
            self.send_gathered(call).await?;
        }
        let write_bytes = self.session.sizes.write_bytes as usize;
        while !data.is_empty() {
            let part = data.split_to(data.len().min(write_bytes - self.gathered_bytes));
            if self.gathered.is_empty() {
                self.gathered_at = offset;
            }
            offset += part.len() as u64;
            self.gathered_bytes += part.len();
            self.gathered.push(part);
            if self.gathered_bytes == write_bytes {
                self.send_gathered(call).await?;
            }
        }
        Ok(())
    }

    /// Writes the rest. When it returns, all bytes are on the server's disk.
    pub(super) async fn finish(&mut self, call: NfsCall<'_>) -> Outcome<()> {
        if self.uncommitted_bytes == 0 && self.gathered_bytes > 0 {
            // Content that fits into one WRITE is made stable by that WRITE.
            let data = self.take_gathered();
            self.uncommitted_bytes = data.len();
            let (session, file, owners) = (Arc::clone(&self.session), self.file.clone(), self.owners.clone());
            let at = self.gathered_at;
            let changed = Arc::clone(&self.may_have_written);
            let written = write(&session, &file, &owners, at, data, stable_how::FILE_SYNC, &changed).await;
            self.uncommitted = written.map_err(told(call))?;
        } else {
            self.send_gathered(call).await?;
        }
        self.commit(call).await
    }

    fn take_gathered(&mut self) -> Bytes {
        let mut parts = std::mem::take(&mut self.gathered);
        let bytes = std::mem::take(&mut self.gathered_bytes);
        if parts.len() == 1
            && let Some(only) = parts.pop()
        {
            return only;
        }
        let mut joined = BytesMut::with_capacity(bytes);
        parts.iter().for_each(|part| joined.extend_from_slice(part));
        joined.freeze()
    }

    async fn send_gathered(&mut self, call: NfsCall<'_>) -> Outcome<()> {
        if self.gathered_bytes == 0 {
            return Ok(());
        }
        if self.uncommitted_bytes + self.gathered_bytes > MAX_UNCOMMITTED_BYTES {
            self.commit(call).await?;
        }
        while self.under_way.len() >= MAX_PARALLEL_TRANSFERS {
            self.await_one(call).await?;
        }
        let data = self.take_gathered();
        self.uncommitted_bytes += data.len();
        self.start(self.gathered_at, data);
        Ok(())
    }

    fn start(&mut self, offset: u64, data: Bytes) {
        let (session, file, owners) = (Arc::clone(&self.session), self.file.clone(), self.owners.clone());
        let changed = Arc::clone(&self.may_have_written);
        let work = async move { write(&session, &file, &owners, offset, data, stable_how::UNSTABLE, &changed).await };
        self.under_way.spawn(work.boxed());
    }

    /// After a failure: waits for the calls in progress, and returns whether the server has refused all of them.
    pub(super) async fn has_written_nothing(&mut self) -> bool {
        while self.under_way.join_next().await.is_some() {}
        !self.may_have_written.load(Ordering::Relaxed)
    }

    async fn await_one(&mut self, call: NfsCall<'_>) -> Outcome<()> {
        if let Some(ended) = self.under_way.join_next().await {
            let written = ended.map_err(|_| call.refused(ErrorKind::Unavailable, "the task of a write ended"))?;
            self.uncommitted.extend(written.map_err(told(call))?);
        }
        Ok(())
    }

    /// Waits until all bytes sent are on the server's disk.
    async fn commit(&mut self, call: NfsCall<'_>) -> Outcome<()> {
        for round in 0..COMMIT_ATTEMPTS {
            while !self.under_way.is_empty() {
                self.await_one(call).await?;
            }
            self.uncommitted.retain(|written| written.verifier.is_some());
            if !self.uncommitted.is_empty() {
                // Commits the whole file: its writes may be anywhere.
                let args = COMMIT3args { file: self.file.clone(), offset: 0, count: 0 };
                let verifier = self.session.calls.call(&args, &self.owners).await.map_err(told(call))?.verf;
                let breaks = self.session.calls.breaks();
                let doubted = |written: &Written| written.breaks != breaks && round < DOUBTS;
                self.uncommitted.retain(|written| written.verifier != Some(verifier) || doubted(written));
            }
            if self.uncommitted.is_empty() {
                self.uncommitted_bytes = 0;
                return Ok(());
            }
            for Written { offset, data, .. } in std::mem::take(&mut self.uncommitted) {
                while self.under_way.len() >= MAX_PARALLEL_TRANSFERS {
                    self.await_one(call).await?;
                }
                self.start(offset, data);
            }
        }
        Err(call
            .refused(ErrorKind::Unavailable, "the server restarts again and again before it has written the content"))
    }
}

fn told(call: NfsCall<'_>) -> impl Fn(super::failure::NfsFailure) -> super::failure::NfsFailure {
    move |failure| super::failure::NfsFailure::Told(call.failed(failure).context("write the content"))
}

/// Writes all of `data`; continues after a short write. Sets `may_have_written` at any answer but a refusal.
async fn write(
    session: &Session,
    file: &nfs_fh3,
    owners: &[Owner],
    mut offset: u64,
    mut data: Bytes,
    stable: stable_how,
    may_have_written: &AtomicBool,
) -> Outcome<Vec<Written>> {
    let mut written = Vec::with_capacity(1);
    while !data.is_empty() {
        let count = data.len() as u32;
        let args = WRITE3args { file: file.clone(), offset, count, stable, data: Opaque::borrowed(&data) };
        let breaks = session.calls.breaks();
        let taken = session.calls.call(&args, owners).await;
        drop(args);
        if !matches!(taken, Err(NfsFailure::Status(_))) {
            may_have_written.store(true, Ordering::Relaxed);
        }
        let taken = taken?;
        let is_much = written.len() == MAX_PARTS as usize;
        if taken.count == 0 || taken.count > count || is_much {
            let why = match is_much {
                true => "the server accepts only a few bytes of each write".into(),
                false => format!("the server says that it wrote {} of {count} bytes", taken.count),
            };
            let why = format!("{}: {why}", session.location.url());
            let error = crate::Error::new(ErrorKind::Os(libc::EIO), crate::Side::Pool, why);
            return Err(super::failure::NfsFailure::Told(error));
        }
        let part = data.split_to(taken.count as usize);
        let verifier = (taken.committed == stable_how::UNSTABLE).then_some(taken.verf);
        let next = offset + u64::from(taken.count);
        written.push(Written { offset, data: part, verifier, breaks });
        offset = next;
    }
    Ok(written)
}
