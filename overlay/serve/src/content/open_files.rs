//! Files that are open for responses, by path: the next request for a fresh file costs no question to the engine.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use forebay_backends::{Error, ErrorKind, PoolPath, Result, Side, Version};
use forebay_engine::{Ino, Invalidations, Overlay, Served, ServedFile, UserGroups};
use futures::FutureExt;
use headers::ETag;
use http::HeaderValue;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use super::directory::time;
use super::{lendable, reply};
use crate::access::hex;
use crate::kept_open::KeptOpen;
use crate::transport::{Mapped, MappedOwner};

/// Bytes of the tag of a version, in hexadecimal: two versions of one file have the same by chance once in 2^64.
const TAG_BYTES: usize = 16;

/// An open file, and what each response says of it.
pub struct OpenFile {
    pub served: ServedFile,
    pub etag: ETag,
    pub etag_value: HeaderValue,
    /// In whole seconds.
    pub modified: SystemTime,
    pub last_modified: HeaderValue,
    pub content_type: HeaderValue,
    mapped: OnceLock<Option<Mapped>>,
}

/// What an answer is based on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerOrigin {
    /// The engine was asked now.
    Pool,
    /// The engine was asked now, and fetched all of the file.
    Fetched,
    /// The file is fresh.
    Fresh,
    /// The file is not fresh, and the engine is being asked.
    Stale,
    /// The engine was asked now, and the pool does not answer.
    Unconfirmed,
}

pub enum Found {
    /// `confirmed`: when the pool was last known to have this version, if that is known.
    File {
        file: Arc<OpenFile>,
        origin: AnswerOrigin,
        confirmed: Option<Instant>,
    },
    Directory(Ino),
}

struct Kept {
    file: Arc<OpenFile>,
    confirmed: Option<Instant>,
    /// Those before the file was opened.
    invalidations: Invalidations,
    /// A request is asking the engine again.
    refreshing: Arc<AtomicBool>,
}

struct Shared {
    overlay: Overlay,
    user: UserGroups,
    kept: Mutex<KeptOpen<PoolPath, Kept>>,
}

pub struct ServedFiles {
    shared: Arc<Shared>,
    stale_while_revalidate: Duration,
}

impl ServedFiles {
    pub fn new(overlay: Overlay, user: UserGroups, stale_while_revalidate: Duration) -> Self {
        let kept = Mutex::new(KeptOpen::new(overlay.fast_pool().budget.limit()));
        Self { shared: Arc::new(Shared { overlay, user, kept }), stale_while_revalidate }
    }

    /// Finds what a path names.
    ///
    /// # Errors
    /// As [`Overlay::open_path`].
    pub async fn open(&self, path: &PoolPath) -> Result<Found> {
        let Some((found, refresh)) = self.fresh(path) else { return self.shared.open(path).await };
        if let Some(refreshing) = refresh {
            let (shared, path) = (self.shared.clone(), path.clone());
            let task = async move {
                if let Err(error) = shared.open(&path).await {
                    tracing::warn!("a file that is not fresh could not be confirmed: {error}");
                }
                refreshing.store(false, Ordering::Release);
            };
            tokio::spawn(task.boxed());
        }
        Ok(found)
    }

    /// Returns a file that may be served without asking, and the mark of a refresh that the caller must begin.
    fn fresh(&self, path: &PoolPath) -> Option<(Found, Option<Arc<AtomicBool>>)> {
        let invalidations = self.shared.overlay.invalidations();
        let mut all = self.shared.kept.lock();
        let kept = all.get(path).filter(|kept| invalidations.allow(kept.invalidations, kept.file.is_immutable()))?;
        let age = kept.confirmed.map(|at| at.elapsed());
        let origin = match (kept.file.served.fresh_for, age) {
            (None, _) => AnswerOrigin::Fresh,
            (Some(_), None) => return None,
            (Some(fresh_for), Some(age)) if age < fresh_for => AnswerOrigin::Fresh,
            (Some(fresh_for), Some(age)) if !fresh_for.is_zero() && age < fresh_for + self.stale_while_revalidate => {
                AnswerOrigin::Stale
            }
            _ => return None,
        };
        let must = origin == AnswerOrigin::Stale && !kept.refreshing.swap(true, Ordering::AcqRel);
        let refresh = must.then(|| kept.refreshing.clone());
        Some((Found::File { file: kept.file.clone(), origin, confirmed: kept.confirmed }, refresh))
    }

    /// Closes all files. A file may have other paths than the one that a client purges, by symlinks.
    pub fn forget_all(&self) {
        let closed = self.shared.kept.lock().take_all(|_| true);
        // What a close does must not happen under the lock.
        drop(closed);
    }

    /// Closes files that were not used for a while.
    pub fn tidy(&self, now: Instant) {
        let closed = self.shared.kept.lock().take_idle(now);
        drop(closed);
    }
}

impl Shared {
    async fn open(&self, path: &PoolPath) -> Result<Found> {
        let invalidations = self.overlay.invalidations();
        let served = match self.overlay.open_path(path, &self.user).await {
            Ok(Served::File(served)) => served,
            Ok(Served::Directory(dir)) => {
                self.forget(path);
                return Ok(Found::Directory(dir));
            }
            Err(error) => {
                self.forget(path);
                return Err(error);
            }
        };
        let came = served.size > 0 && served.resident().is_some() && !served.was_resident;
        let confirmed = served.confirmed;
        let origin = match (came, confirmed.is_some()) {
            (true, _) => AnswerOrigin::Fetched,
            (false, true) => AnswerOrigin::Pool,
            (false, false) => AnswerOrigin::Unconfirmed,
        };
        let file = Arc::new(OpenFile::new(served, path)?);
        let (file, confirmed) = self.keep(path, file, confirmed, invalidations);
        Ok(Found::File { file, origin, confirmed })
    }

    fn forget(&self, path: &PoolPath) {
        let gone = self.kept.lock().take(path);
        drop(gone);
    }

    /// Keeps a file open. Returns the one to serve, and when it was confirmed: the one that is open already, with its mapping,
    /// if it is the same. `opened`: the invalidations before the file was opened. If there were more since, the file does not
    /// stay open.
    fn keep(
        &self,
        path: &PoolPath,
        file: Arc<OpenFile>,
        confirmed: Option<Instant>,
        opened: Invalidations,
    ) -> (Arc<OpenFile>, Option<Instant>) {
        let mut all = self.kept.lock();
        let before = all.take(path);
        if !self.overlay.invalidations().allow(opened, file.is_immutable()) {
            drop(all);
            drop(before);
            return (file, confirmed);
        }
        let refreshing = before.as_ref().map(|kept| kept.refreshing.clone()).unwrap_or_default();
        let of_version = before.as_ref().filter(|kept| kept.file.etag == file.etag && kept.invalidations == opened);
        let confirmed = confirmed.or(of_version.and_then(|kept| kept.confirmed));
        let file = match &before {
            Some(kept) if kept.file.is_same(&file) => kept.file.clone(),
            _ => file,
        };
        let closed = all.put(
            path.clone(),
            Kept { file: file.clone(), confirmed, invalidations: opened, refreshing },
            file.served.size,
        );
        drop(all);
        drop((before, closed));
        (file, confirmed)
    }
}

impl OpenFile {
    fn new(served: ServedFile, path: &PoolPath) -> Result<Self> {
        let text = format!("\"{}\"", tag(&served));
        let modified = time(served.mtime);
        let guess = path.name().and_then(|name| std::str::from_utf8(name).ok());
        let guess = guess.and_then(|name| mime_guess::from_path(name).first_raw());
        let etag = text.parse().map_err(|_| Error::new(ErrorKind::InvalidInput, Side::Application, text.clone()))?;
        Ok(Self {
            etag,
            etag_value: reply::value(text),
            modified,
            last_modified: reply::value(httpdate::fmt_http_date(modified)),
            content_type: HeaderValue::from_static(guess.unwrap_or("application/octet-stream")),
            mapped: OnceLock::new(),
            served,
        })
    }

    /// Whether the pool is never asked about it.
    fn is_immutable(&self) -> bool {
        self.served.fresh_for.is_none()
    }

    /// Whether both are the same bytes of the same content file.
    fn is_same(&self, other: &Self) -> bool {
        let content = |file: &Self| file.served.resident().map(|content| content.id);
        content(self).is_some() && content(self) == content(other) && self.etag == other.etag
    }
}

impl MappedOwner for OpenFile {
    /// Returns the mapping of the content file, if all of it is resident.
    fn mapped(&self) -> Option<&Mapped> {
        self.mapped.get_or_init(|| lendable(&self.served)).as_ref()
    }
}

/// Returns the tag of a version: the same on every node.
fn tag(file: &ServedFile) -> String {
    let mut hash = Sha256::new();
    match file.version() {
        // Each node has a device number of its own for the pool.
        Some(Version::Inode { dev: _, ino, born, mtime, ctime, size }) => {
            for number in [*ino, *size] {
                hash.update(number.to_le_bytes());
            }
            for time in [born, mtime, ctime] {
                hash.update(time.secs.to_le_bytes());
                hash.update(time.nanos.to_le_bytes());
            }
        }
        Some(Version::Tag { etag, id, size, mtime }) => {
            for text in [etag, id] {
                hash.update((text.len() as u64).to_le_bytes());
                hash.update(text);
            }
            hash.update(size.to_le_bytes());
            hash.update(mtime.secs.to_le_bytes());
            hash.update(mtime.nanos.to_le_bytes());
        }
        // Content that is only here: its file tells it apart.
        None => {
            hash.update(file.resident().map_or(0, |content| content.id).to_le_bytes());
            hash.update(file.mtime.secs.to_le_bytes());
            hash.update(file.mtime.nanos.to_le_bytes());
            hash.update(file.size.to_le_bytes());
        }
    }
    hex(&hash.finalize()[..TAG_BYTES])
}
