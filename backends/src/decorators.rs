//! Pools that wrap another pool: slower, faulty, with deadlines, counted. Each is an [`Around`]: one function that
//! every call, every page of a listing and every piece of a stream or a `put` passes through.

mod call;
mod deadline;
mod fault;
mod metrics;
mod throttle;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, future, stream};

use crate::{
    Attrs, Capabilities, Content, Expected, FileKind, Layout, Listing, Part, Pieces, Pool, PoolPath, RenameMode,
    Result, SentPart, SetAttrs, Space, Stat, Version, WorkProgress,
};

pub use call::{CallKind, PoolAnswer, PoolCall};
pub use deadline::{CallLimits, Deadline};
pub use fault::{Fault, FaultMoment, Faults, Odds};
pub use metrics::{CallCounters, CallStats, Metrics, MetricsSnapshot, SlowCall};
pub use throttle::{Rate, Throttle};

/// What a decorator does with a call to the wrapped pool.
pub trait Around: Send + Sync + 'static {
    /// Answers `call`. `inner` is the wrapped pool's own answer; it does nothing before it is awaited.
    fn around<'a, T: PoolAnswer>(
        &'a self,
        call: PoolCall<'a>,
        inner: BoxFuture<'a, Result<T>>,
    ) -> BoxFuture<'a, Result<T>>;
}

/// A pool wrapped in an [`Around`].
pub struct Decorated<A> {
    inner: Arc<dyn Pool>,
    around: Arc<A>,
}

impl<A: Around> Decorated<A> {
    pub fn with(inner: Arc<dyn Pool>, around: A) -> Self {
        Self { inner, around: Arc::new(around) }
    }

    /// The wrapped pool.
    pub fn inner(&self) -> &Arc<dyn Pool> {
        &self.inner
    }

    fn around<'a, T: PoolAnswer>(
        &'a self,
        kind: CallKind,
        path: &'a PoolPath,
        bytes: u64,
        inner: BoxFuture<'a, Result<T>>,
    ) -> BoxFuture<'a, Result<T>> {
        self.around.around(PoolCall::new(kind, path, bytes), inner)
    }
}

impl<A> fmt::Debug for Decorated<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decorated").field("url", &self.inner.url()).finish_non_exhaustive()
    }
}

/// Sends each page of a listing through the decorator too.
fn pages<A: Around>(around: Arc<A>, path: PoolPath, listing: Listing) -> Listing {
    stream::try_unfold((around, path, listing), |(around, path, mut listing)| async move {
        let next = async { listing.next().await.transpose() }.boxed();
        let page = around.around(PoolCall::step(CallKind::ListPage, CallKind::List, &path, 0), next).await?;
        Ok(page.map(|page| (page, (around, path, listing))))
    })
    .boxed()
}

/// Sends each piece of a stream through the decorator.
fn parts<A: Around>(around: Arc<A>, path: PoolPath, content: Content) -> Content {
    stream::try_unfold((around, path, content), |(around, path, mut content)| async move {
        let next = async { content.next().await.transpose() }.boxed();
        let piece = around.around(PoolCall::step(CallKind::ReadPiece, CallKind::Read, &path, 0), next).await?;
        Ok(piece.map(|piece| (piece, (around, path, content))))
    })
    .boxed()
}

/// Sends each piece of a `put` or another call with content through the decorator, once the source has produced it.
fn pieces<'a, A: Around>(around: &'a A, within: CallKind, path: &'a PoolPath, content: Pieces<'a>) -> Pieces<'a> {
    content
        .then(move |piece| async move {
            let piece = piece?;
            let call = PoolCall::step(CallKind::PutPiece, within, path, piece.data.len() as u64);
            around.around(call, future::ready(Ok(piece)).boxed()).await
        })
        .boxed()
}

#[async_trait]
impl<A: Around> Pool for Decorated<A> {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn url(&self) -> String {
        self.inner.url()
    }

    fn retried_requests(&self) -> u64 {
        self.inner.retried_requests()
    }

    fn under_way(&self) -> Vec<WorkProgress> {
        self.inner.under_way()
    }

    fn check_path(&self, path: &PoolPath) -> Result<()> {
        self.inner.check_path(path)
    }

    async fn stat(&self, path: &PoolPath) -> Result<Stat> {
        self.around(CallKind::Stat, path, 0, self.inner.stat(path)).await
    }

    async fn still_has(&self, path: &PoolPath, version: &Version) -> Result<bool> {
        self.around(CallKind::Stat, path, 0, self.inner.still_has(path, version)).await
    }

    async fn list(&self, path: &PoolPath) -> Result<Listing> {
        let listing = self.around(CallKind::List, path, 0, self.inner.list(path)).await?;
        Ok(pages(Arc::clone(&self.around), path.clone(), listing))
    }

    async fn list_with_contents(&self, path: &PoolPath, bytes: u64) -> Result<Listing> {
        let listing = self.around(CallKind::List, path, 0, self.inner.list_with_contents(path, bytes)).await?;
        Ok(pages(Arc::clone(&self.around), path.clone(), listing))
    }

    async fn read(&self, path: &PoolPath, version: &Version, range: Range<u64>) -> Result<Bytes> {
        let bytes = range.end.min(version.size()).saturating_sub(range.start);
        self.around(CallKind::Read, path, bytes, self.inner.read(path, version, range)).await
    }

    async fn stream(&self, path: &PoolPath, version: &Version, range: Range<u64>) -> Result<Content> {
        // A pool without streams returns all content with its first answer.
        let at_once = if self.inner.capabilities().streams { 0 } else { u64::MAX };
        let bytes = range.end.min(version.size()).saturating_sub(range.start).min(at_once);
        let content = self.around(CallKind::Read, path, bytes, self.inner.stream(path, version, range)).await?;
        Ok(parts(Arc::clone(&self.around), path.clone(), content))
    }

    async fn readlink(&self, path: &PoolPath) -> Result<Vec<u8>> {
        self.around(CallKind::Readlink, path, 0, self.inner.readlink(path)).await
    }

    async fn put(
        &self,
        path: &PoolPath,
        size: u64,
        content: Pieces<'_>,
        attrs: &Attrs,
        expected: &Expected,
    ) -> Result<Stat> {
        let content = pieces(&*self.around, CallKind::Put, path, content);
        self.around(CallKind::Put, path, size, self.inner.put(path, size, content, attrs, expected)).await
    }

    async fn write_at(&self, path: &PoolPath, offset: u64, data: Bytes) -> Result<Stat> {
        let bytes = data.len() as u64;
        self.around(CallKind::WriteAt, path, bytes, self.inner.write_at(path, offset, data)).await
    }

    async fn sync_file(&self, path: &PoolPath) -> Result<()> {
        self.around(CallKind::SyncFile, path, 0, self.inner.sync_file(path)).await
    }

    async fn send_part(&self, name: &str, len: u64, content: Pieces<'_>) -> Result<SentPart> {
        let root = PoolPath::root();
        let content = pieces(&*self.around, CallKind::SendPart, &root, content);
        self.around(CallKind::SendPart, &root, len, self.inner.send_part(name, len, content)).await
    }

    async fn read_part(&self, part: &SentPart, range: Range<u64>) -> Result<Bytes> {
        let root = PoolPath::root();
        let bytes = range.end.min(part.len).saturating_sub(range.start);
        self.around(CallKind::ReadPart, &root, bytes, self.inner.read_part(part, range)).await
    }

    async fn remove_part(&self, name: &str) -> Result<()> {
        let root = PoolPath::root();
        self.around(CallKind::RemovePart, &root, 0, self.inner.remove_part(name)).await
    }

    async fn put_parts(
        &self,
        path: &PoolPath,
        parts: Vec<Part<'_>>,
        attrs: &Attrs,
        expected: &Expected,
    ) -> Result<Stat> {
        let bytes = parts.iter().map(Part::len).fold(0, u64::saturating_add);
        let parts = parts.into_iter().map(|part| match part {
            Part::Sent(part) => Part::Sent(part),
            Part::Here { len, content } => {
                Part::Here { len, content: pieces(&*self.around, CallKind::PutParts, path, content) }
            }
        });
        let parts = parts.collect();
        self.around(CallKind::PutParts, path, bytes, self.inner.put_parts(path, parts, attrs, expected)).await
    }

    async fn mkdir(&self, path: &PoolPath, attrs: &Attrs) -> Result<Stat> {
        self.around(CallKind::Mkdir, path, 0, self.inner.mkdir(path, attrs)).await
    }

    async fn symlink(&self, path: &PoolPath, target: &[u8], attrs: &Attrs) -> Result<Stat> {
        self.around(CallKind::Symlink, path, 0, self.inner.symlink(path, target, attrs)).await
    }

    async fn mknod(&self, path: &PoolPath, kind: FileKind, rdev: u64, attrs: &Attrs) -> Result<Stat> {
        self.around(CallKind::Mknod, path, 0, self.inner.mknod(path, kind, rdev, attrs)).await
    }

    async fn link(&self, existing: &PoolPath, new: &PoolPath) -> Result<Stat> {
        self.around(CallKind::Link, new, 0, self.inner.link(existing, new)).await
    }

    async fn remove(&self, path: &PoolPath, expected: &Expected) -> Result<()> {
        self.around(CallKind::Remove, path, 0, self.inner.remove(path, expected)).await
    }

    async fn remove_dir(&self, path: &PoolPath) -> Result<()> {
        self.around(CallKind::RemoveDir, path, 0, self.inner.remove_dir(path)).await
    }

    async fn rename(&self, from: &PoolPath, to: &PoolPath, mode: RenameMode) -> Result<Stat> {
        self.around(CallKind::Rename, from, 0, self.inner.rename(from, to, mode)).await
    }

    async fn set_attrs(&self, path: &PoolPath, changes: &SetAttrs) -> Result<Stat> {
        self.around(CallKind::SetAttrs, path, 0, self.inner.set_attrs(path, changes)).await
    }

    async fn xattrs(&self, path: &PoolPath) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        self.around(CallKind::Xattrs, path, 0, self.inner.xattrs(path)).await
    }

    async fn set_xattr(&self, path: &PoolPath, name: &[u8], value: &[u8]) -> Result<()> {
        self.around(CallKind::SetXattr, path, 0, self.inner.set_xattr(path, name, value)).await
    }

    async fn check_xattrs(&self, kind: FileKind, xattrs: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        let root = PoolPath::root();
        let call = PoolCall::new(CallKind::Xattrs, &root, 0);
        self.around.around(call, self.inner.check_xattrs(kind, xattrs)).await
    }

    async fn remove_xattr(&self, path: &PoolPath, name: &[u8]) -> Result<()> {
        self.around(CallKind::RemoveXattr, path, 0, self.inner.remove_xattr(path, name)).await
    }

    async fn sync_dir(&self, path: &PoolPath) -> Result<()> {
        self.around(CallKind::SyncDir, path, 0, self.inner.sync_dir(path)).await
    }

    async fn sweep_unfinished(&self, dir: &PoolPath, writers: &[String]) -> Result<u64> {
        self.around(CallKind::List, dir, 0, self.inner.sweep_unfinished(dir, writers)).await
    }

    async fn abandoned(&self, dir: &PoolPath, remove: bool) -> Result<u64> {
        self.around(CallKind::List, dir, 0, self.inner.abandoned(dir, remove)).await
    }

    async fn space(&self) -> Result<Space> {
        let root = PoolPath::root();
        self.around.around(PoolCall::new(CallKind::Space, &root, 0), self.inner.space()).await
    }

    async fn layout(&self, path: &PoolPath) -> Result<Option<Layout>> {
        self.around(CallKind::Layout, path, 0, self.inner.layout(path)).await
    }
}
