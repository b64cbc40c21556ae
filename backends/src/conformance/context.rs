//! The environment of a case.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};

use crate::{Attrs, Capabilities, DirEntry, Error, ErrorKind, Expected, FileKind, Piece, Pool, PoolPath, Stat, Time};

const REMOVE_ATTEMPTS: u32 = 300;
const REMOVE_PAUSE: Duration = Duration::from_millis(50);
/// Files that are removed concurrently: a distant pool answers each removal only after a while.
const REMOVED_AT_ONCE: usize = 16;

/// Why a case failed.
#[derive(Debug)]
pub(super) struct CaseFailure(String);

pub(super) type Outcome<T = ()> = Result<T, CaseFailure>;

impl CaseFailure {
    pub(super) fn new(why: impl Into<String>) -> Self {
        Self(why.into())
    }
}

impl fmt::Display for CaseFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<CaseFailure> for String {
    fn from(failure: CaseFailure) -> Self {
        failure.0
    }
}

impl From<Error> for CaseFailure {
    fn from(error: Error) -> Self {
        Self(format!("unexpected error: {error} ({:?})", error.kind()))
    }
}

impl From<tokio::task::JoinError> for CaseFailure {
    fn from(error: tokio::task::JoinError) -> Self {
        Self(format!("a task of the case ended: {error}"))
    }
}

/// A pool and a directory in it that belongs to one case.
#[derive(Clone)]
pub(super) struct CaseContext {
    pub(super) pool: Arc<dyn Pool>,
    pub(super) dir: PoolPath,
    uid: u32,
    gid: u32,
}

impl CaseContext {
    pub(super) async fn new(pool: Arc<dyn Pool>, scratch: &PoolPath, case: &str) -> Outcome<Self> {
        let owner = pool.stat(scratch).await?;
        let context = Self { pool, dir: scratch.join(case.as_bytes()), uid: owner.uid, gid: owner.gid };
        context.pool.mkdir(&context.dir, &context.attrs(0o755)).await?;
        Ok(context)
    }

    pub(super) fn path(&self, name: impl AsRef<[u8]>) -> PoolPath {
        name.as_ref().split(|b| *b == b'/').fold(self.dir.clone(), |path, name| path.join(name))
    }

    pub(super) fn can(&self) -> &Capabilities {
        self.pool.capabilities()
    }

    /// Attributes with past times whose nanoseconds are not round.
    pub(super) fn attrs(&self, mode: u32) -> Attrs {
        Attrs {
            mode,
            uid: self.uid,
            gid: self.gid,
            atime: Time { secs: 1_600_000_000, nanos: 123_456_789 },
            mtime: Time { secs: 1_500_000_000, nanos: 987_654_321 },
            xattrs: Vec::new(),
        }
    }

    /// Creates or replaces a file in one piece.
    pub(super) async fn put(&self, name: impl AsRef<[u8]>, data: impl Into<Bytes>) -> Outcome<Stat> {
        Ok(self.put_if(name, data, &Expected::Anything).await?)
    }

    pub(super) async fn put_if(
        &self,
        name: impl AsRef<[u8]>,
        data: impl Into<Bytes>,
        expected: &Expected,
    ) -> crate::Result<Stat> {
        let data = data.into();
        let size = data.len() as u64;
        self.put_pieces(name, size, vec![Piece { offset: 0, data }], expected).await
    }

    pub(super) async fn put_pieces(
        &self,
        name: impl AsRef<[u8]>,
        size: u64,
        pieces: Vec<Piece>,
        expected: &Expected,
    ) -> crate::Result<Stat> {
        let content = stream::iter(pieces.into_iter().map(Ok)).boxed();
        self.pool.put(&self.path(name), size, content, &self.attrs(0o640), expected).await
    }

    pub(super) async fn mkdir(&self, name: impl AsRef<[u8]>) -> Outcome<Stat> {
        Ok(self.pool.mkdir(&self.path(name), &self.attrs(0o755)).await?)
    }

    pub(super) async fn mkfile(&self, name: impl AsRef<[u8]>) -> Outcome<Stat> {
        Ok(self.pool.mknod(&self.path(name), FileKind::File, 0, &self.attrs(0o644)).await?)
    }

    pub(super) async fn stat(&self, name: impl AsRef<[u8]>) -> Outcome<Stat> {
        Ok(self.pool.stat(&self.path(name)).await?)
    }

    /// The whole current content.
    pub(super) async fn content(&self, name: impl AsRef<[u8]>) -> Outcome<Bytes> {
        let path = self.path(name);
        let stat = self.pool.stat(&path).await?;
        Ok(self.pool.read(&path, &stat.version, 0..stat.size).await?)
    }

    pub(super) async fn list(&self, path: &PoolPath) -> Outcome<Vec<DirEntry>> {
        let pages: Vec<Vec<DirEntry>> = self.pool.list(path).await?.try_collect().await?;
        let mut entries = pages.concat();
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    pub(super) async fn names(&self, name: impl AsRef<[u8]>) -> Outcome<Vec<Vec<u8>>> {
        Ok(self.list(&self.path(name)).await?.into_iter().map(|entry| entry.name).collect())
    }

    /// Whether two times are equal within the pool's resolution.
    pub(super) fn same_time(&self, a: Time, b: Time) -> bool {
        let ns = |time: Time| i128::from(time.secs) * 1_000_000_000 + i128::from(time.nanos);
        (ns(a) - ns(b)).unsigned_abs() < u128::from(self.can().time_granularity_ns.max(1))
    }

    /// Removes the case's directory and everything in it.
    pub(super) async fn remove_all(&self) -> Outcome {
        remove_tree(&self.pool, &self.dir).await.map_err(CaseFailure::from)
    }
}

/// Removes a directory and everything in it. Retries, because a dropped `put` may still create files for a moment, or
/// leave files that the pool has yet to remove.
pub(super) async fn remove_tree(pool: &Arc<dyn Pool>, dir: &PoolPath) -> crate::Result<()> {
    for _ in 0..REMOVE_ATTEMPTS {
        match remove_once(pool, dir).await {
            Err(error) if error.is(ErrorKind::NotEmpty) => tokio::time::sleep(REMOVE_PAUSE).await,
            answer => return answer,
        }
    }
    remove_once(pool, dir).await
}

async fn remove_once(pool: &Arc<dyn Pool>, dir: &PoolPath) -> crate::Result<()> {
    let mut open = vec![dir.clone()];
    let mut emptied = Vec::new();
    while let Some(dir) = open.pop() {
        let pages: Vec<Vec<DirEntry>> = pool.list(&dir).await?.try_collect().await?;
        let mut files = Vec::new();
        for entry in pages.concat() {
            let path = dir.join(&entry.name);
            match entry.stat.kind {
                FileKind::Directory => open.push(path),
                _ => files.push(path),
            }
        }
        let removing = stream::iter(files).map(|path| async move {
            match pool.remove(&path, &Expected::Anything).await {
                Err(error) if !error.is(ErrorKind::NotFound) => Err(error),
                _ => Ok(()),
            }
        });
        removing.buffer_unordered(REMOVED_AT_ONCE).try_collect::<()>().await?;
        emptied.push(dir);
    }
    for dir in emptied.iter().rev() {
        pool.remove_dir(dir).await?;
    }
    Ok(())
}

/// Fails if a call succeeded, or failed with another error.
pub(super) fn refused<T: fmt::Debug>(what: &str, answer: crate::Result<T>, kind: ErrorKind) -> Outcome {
    refused_as_one_of(what, answer, &[kind])
}

pub(super) fn refused_as_one_of<T: fmt::Debug>(what: &str, answer: crate::Result<T>, kinds: &[ErrorKind]) -> Outcome {
    match answer {
        Err(error) if kinds.contains(&error.kind()) => Ok(()),
        Err(error) => Err(CaseFailure::new(format!("{what}: {:?} instead of {kinds:?}: {error}", error.kind()))),
        Ok(answer) => Err(CaseFailure::new(format!("{what}: no error, but {answer:?} instead of {kinds:?}"))),
    }
}

/// Bytes that differ from offset to offset and from seed to seed.
pub(super) fn pattern(seed: u64, length: usize) -> Bytes {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut data = Vec::with_capacity(length + 8);
    while data.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        data.extend_from_slice(&state.to_le_bytes());
    }
    data.truncate(length);
    data.into()
}
