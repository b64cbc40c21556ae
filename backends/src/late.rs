//! A pool whose server did not answer when the pool was to be attached.
//!
//! What a node has of a pool must be usable while the server is away, also by a daemon that starts meanwhile. So the pool
//! is described by what was known of it when it was attached last, and it is attached in the background.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{oneshot, watch};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    Attrs, Capabilities, Content, Error, ErrorKind, Expected, FileKind, Layout, Listing, Part, Pieces, Pool,
    PoolLocation, PoolPath, RenameMode, Result, SentPart, SetAttrs, Side, Space, Stat, Version, WorkProgress,
};

/// The shortest pause between two attempts to attach a pool.
const LEAST_PAUSE: Duration = Duration::from_millis(100);

/// The times of a pool that may be attached later.
#[derive(Debug, Clone, Copy)]
pub struct AttachTimes {
    /// How long its opening waits for the server.
    pub within: Duration,
    /// The deadline of the pool's calls. A call waits so long while the pool is not attached.
    pub deadline: Duration,
    /// The pause between two attempts to attach it, 100 ms at least.
    pub retry: Duration,
}

/// What is known of a pool while it is not attached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolDescription {
    /// The pool's URL, without secrets.
    pub url: String,
    pub capabilities: Capabilities,
}

impl PoolDescription {
    pub fn of(pool: &dyn Pool) -> Self {
        Self { url: pool.url(), capabilities: pool.capabilities().clone() }
    }
}

/// A pool that is attached, or will be.
pub struct OpenedPool {
    pub pool: Arc<dyn Pool>,
    /// Why it is not attached yet.
    pub not_attached: Option<String>,
}

type Attached = Option<Arc<dyn Pool>>;

struct LatePool {
    known: PoolDescription,
    attached: watch::Receiver<Attached>,
    /// Why it is not attached.
    reason: Arc<Mutex<String>>,
    patience: Duration,
    _attaching: AbortOnDropHandle<()>,
}

impl PoolLocation {
    /// Attaches a pool that is `known`. If the server does not answer in time, or names no files any more, returns a pool
    /// that is attached as soon as it does. Until then, its calls fail with `Unavailable`.
    ///
    /// # Errors
    /// Those of [`PoolLocation::open`], if the server answers.
    pub fn open_now_or_later(
        &self,
        known: PoolDescription,
        times: AttachTimes,
    ) -> BoxFuture<'static, Result<OpenedPool>> {
        let location = self.clone();
        async move {
            let (attached, mut attachment) = watch::channel(None);
            let (answer, mut answers) = oneshot::channel();
            let reason = Arc::new(Mutex::new("it has not answered yet".to_owned()));
            let attaching = attach(location, known.clone(), times, attached, answer, reason.clone());
            let attaching = tokio::spawn(attaching.boxed());
            let attaching = AbortOnDropHandle::new(attaching);
            match tokio::time::timeout(times.within, &mut answers).await {
                Ok(Ok(Err(error))) if !error.is_unreachable() => return Err(error),
                Ok(Ok(Ok(()))) => {
                    if let Some(pool) = attachment.borrow_and_update().clone() {
                        return Ok(OpenedPool { pool, not_attached: None });
                    }
                }
                _ => {}
            }
            let why = reason.lock().clone();
            tracing::warn!(path = known.url, reason = why, "the pool is not attached yet");
            let patience = times.deadline;
            let pool = LatePool { known, attached: attachment, reason, patience, _attaching: attaching };
            Ok(OpenedPool { pool: Arc::new(pool), not_attached: Some(why) })
        }
        .boxed()
    }
}

/// Tries to attach a pool until it is attached. `answer` gets the outcome of the first attempt.
async fn attach(
    location: PoolLocation,
    known: PoolDescription,
    times: AttachTimes,
    attached: watch::Sender<Attached>,
    answer: oneshot::Sender<Result<()>>,
    reason: Arc<Mutex<String>>,
) {
    let mut answer = Some(answer);
    loop {
        match location.open(times.deadline).await.and_then(|pool| check_found(pool, &known)) {
            Ok(pool) => {
                let is_as_known = PoolDescription::of(&*pool) == known;
                attached.send_replace(Some(pool));
                let is_awaited = answer.take().is_some_and(|answer| answer.send(Ok(())).is_ok());
                match (is_awaited, is_as_known) {
                    (true, _) => {}
                    (false, true) => tracing::info!(path = known.url, "the pool is attached"),
                    (false, false) => {
                        tracing::warn!(path = known.url, "the pool is attached, and has changed: mount it again");
                    }
                }
                return;
            }
            Err(error) => {
                let now = error.to_string();
                let before = std::mem::replace(&mut *reason.lock(), now.clone());
                let is_awaited = answer.take().is_some_and(|answer| answer.send(Err(error)).is_ok());
                if !is_awaited && before != now {
                    tracing::warn!(path = known.url, error = now, "the pool cannot be attached");
                }
            }
        }
        tokio::time::sleep(times.retry.max(LEAST_PAUSE)).await;
    }
}

/// Refuses a pool that named its files when it was attached last, and names none now: the file system behind its server may
/// not be mounted. Without names, what it says of a file would be believed at once.
fn check_found(pool: Arc<dyn Pool>, known: &PoolDescription) -> Result<Arc<dyn Pool>> {
    if known.capabilities.listings.exist() && !pool.capabilities().listings.exist() {
        let what = format!(
            "{}: the server named its files before, and names none now; if that is meant, mount it with another fast \
             directory",
            known.url
        );
        return Err(Error::new(ErrorKind::Unavailable, Side::Pool, what));
    }
    Ok(pool)
}

impl LatePool {
    fn now(&self) -> Attached {
        self.attached.borrow().clone()
    }

    async fn pool(&self) -> Result<Arc<dyn Pool>> {
        let mut attached = self.attached.clone();
        let attachment = tokio::time::timeout(self.patience, attached.wait_for(Option::is_some)).await;
        if let Ok(Ok(Some(pool))) = attachment.map(|pool| pool.map(|pool| pool.clone())) {
            return Ok(pool);
        }
        let what = format!("{} is not attached yet ({})", self.known.url, self.reason.lock());
        Err(Error::new(ErrorKind::Unavailable, Side::Pool, what))
    }
}

impl fmt::Debug for LatePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LatePool").field("url", &self.known.url).finish_non_exhaustive()
    }
}

/// Implements `Pool` by calls to the attached pool.
macro_rules! calls_when_attached {
    ($($call:ident($($argument:ident: $kind:ty),*) -> $answer:ty;)*) => {
        #[async_trait]
        impl Pool for LatePool {
            fn capabilities(&self) -> &Capabilities {
                &self.known.capabilities
            }

            fn url(&self) -> String {
                self.known.url.clone()
            }

            fn retried_requests(&self) -> u64 {
                self.now().map_or(0, |pool| pool.retried_requests())
            }

            fn under_way(&self) -> Vec<WorkProgress> {
                self.now().map_or_else(Vec::new, |pool| pool.under_way())
            }

            fn check_path(&self, path: &PoolPath) -> Result<()> {
                self.now().map_or(Ok(()), |pool| pool.check_path(path))
            }

            $(async fn $call(&self, $($argument: $kind),*) -> Result<$answer> {
                self.pool().await?.$call($($argument),*).await
            })*
        }
    };
}

calls_when_attached! {
    stat(path: &PoolPath) -> Stat;
    still_has(path: &PoolPath, version: &Version) -> bool;
    list(path: &PoolPath) -> Listing;
    list_with_contents(path: &PoolPath, bytes: u64) -> Listing;
    read(path: &PoolPath, version: &Version, range: Range<u64>) -> Bytes;
    stream(path: &PoolPath, version: &Version, range: Range<u64>) -> Content;
    readlink(path: &PoolPath) -> Vec<u8>;
    put(path: &PoolPath, size: u64, content: Pieces<'_>, attrs: &Attrs, expected: &Expected) -> Stat;
    send_part(name: &str, len: u64, content: Pieces<'_>) -> SentPart;
    read_part(part: &SentPart, range: Range<u64>) -> Bytes;
    remove_part(name: &str) -> ();
    put_parts(path: &PoolPath, parts: Vec<Part<'_>>, attrs: &Attrs, expected: &Expected) -> Stat;
    write_at(path: &PoolPath, offset: u64, data: Bytes) -> Stat;
    sync_file(path: &PoolPath) -> ();
    mkdir(path: &PoolPath, attrs: &Attrs) -> Stat;
    symlink(path: &PoolPath, target: &[u8], attrs: &Attrs) -> Stat;
    mknod(path: &PoolPath, kind: FileKind, rdev: u64, attrs: &Attrs) -> Stat;
    link(existing: &PoolPath, new: &PoolPath) -> Stat;
    remove(path: &PoolPath, expected: &Expected) -> ();
    remove_dir(path: &PoolPath) -> ();
    rename(from: &PoolPath, to: &PoolPath, mode: RenameMode) -> Stat;
    set_attrs(path: &PoolPath, changes: &SetAttrs) -> Stat;
    xattrs(path: &PoolPath) -> Vec<(Vec<u8>, Vec<u8>)>;
    set_xattr(path: &PoolPath, name: &[u8], value: &[u8]) -> ();
    check_xattrs(kind: FileKind, xattrs: &[(Vec<u8>, Vec<u8>)]) -> ();
    remove_xattr(path: &PoolPath, name: &[u8]) -> ();
    sync_dir(path: &PoolPath) -> ();
    sweep_unfinished(dir: &PoolPath, writers: &[String]) -> u64;
    abandoned(dir: &PoolPath, remove: bool) -> u64;
    space() -> Space;
    layout(path: &PoolPath) -> Option<Layout>;
}
