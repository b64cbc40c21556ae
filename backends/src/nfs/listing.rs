//! Directories, page by page, and the removal of what dead writers left in them.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::future::BoxFuture;
use futures::{StreamExt, stream};
use nfs3_client::nfs3_types::nfs3::{READDIRPLUS3args, cookieverf3, nfsstat3};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::{DirEntry, Listing, PoolPath, RESERVED_PREFIX, Result, Stat};

use super::attributes::{Found, option};
use super::failure::{Call, Failure, Outcome};
use super::handles::Directory;
use super::limits::{LISTING_RESTARTS, PAGE_BYTES, PAGE_NAME_BYTES, SWEEP_AGE};
use super::session::{Session, Slot};
use super::staging::{boot_id, writer};

/// A directory that is being listed.
struct Pages {
    session: Arc<Session>,
    dir: Arc<Directory>,
    cookie: u64,
    verifier: cookieverf3,
    ended: bool,
    restarts: u32,
    /// Hashes of the names that were given out, so that a listing which starts again gives none of them twice: eight
    /// bytes for each.
    given: HashSet<u64>,
    hashing: RandomState,
}

impl Pages {
    fn new(session: Arc<Session>, dir: Arc<Directory>) -> Self {
        Self {
            session,
            dir,
            cookie: 0,
            verifier: cookieverf3::default(),
            ended: false,
            restarts: 0,
            given: HashSet::new(),
            hashing: RandomState::new(),
        }
    }

    /// The next entries, those with reserved names among them; `None` at the end.
    async fn next(&mut self, call: Call<'_>) -> Outcome<Option<Vec<DirEntry>>> {
        while !self.ended {
            let args = READDIRPLUS3args {
                dir: self.dir.handle.clone(),
                cookie: self.cookie,
                cookieverf: self.verifier,
                dircount: PAGE_NAME_BYTES,
                maxcount: PAGE_BYTES,
            };
            let page = match self.session.calls.call(&args, &[self.dir.owner]).await {
                // The server has forgotten where we were.
                Err(Failure::Status(nfsstat3::NFS3ERR_BAD_COOKIE)) if self.restarts < LISTING_RESTARTS => {
                    self.restarts += 1;
                    (self.cookie, self.verifier) = (0, cookieverf3::default());
                    continue;
                }
                page => page?,
            };
            self.verifier = page.cookieverf;
            self.ended = page.reply.eof;
            let raw = page.reply.entries.into_inner();
            if raw.is_empty() && !self.ended {
                return Err(call.refused(crate::ErrorKind::Os(libc::EIO), "the server gave a page without entries"));
            }
            let mut entries = Vec::with_capacity(raw.len());
            for entry in raw {
                self.cookie = entry.cookie;
                let name = entry.name.0.into_owned();
                if name == b"." || name == b".." {
                    continue;
                }
                let new = self.given.insert(self.hashing.hash_one(&name));
                if !new && self.restarts > 0 {
                    continue;
                }
                let stat = match option(entry.name_attributes) {
                    Some(raw) => self.session.stat_of(&raw),
                    None => match self.look(&name).await? {
                        Some(stat) => stat,
                        None => continue,
                    },
                };
                entries.push(DirEntry { name, stat });
            }
            if !entries.is_empty() {
                return Ok(Some(entries));
            }
        }
        Ok(None)
    }

    /// The attributes of an entry that came without; `None` where it has vanished.
    async fn look(&self, name: &[u8]) -> Outcome<Option<Stat>> {
        let slot = Slot { dir: Arc::clone(&self.dir), name: name.to_vec() };
        match self.session.look(&slot).await {
            Ok(found) => Ok(Some(found.stat)),
            Err(failure) if failure.is(nfsstat3::NFS3ERR_NOENT) || failure.is_stale() => Ok(None),
            Err(failure) => Err(failure),
        }
    }
}

impl Session {
    pub(super) async fn list(self: &Arc<Self>, path: &PoolPath) -> Result<Listing> {
        let call = Call::new("list", path);
        self.check(call)?;
        // The first page is asked for at once: it tells whether the directory is there.
        let first = |dir: Arc<Directory>| {
            Box::pin(async move {
                let mut pages = Pages::new(Arc::clone(self), dir);
                let page = pages.next(call).await?;
                Ok((pages, page))
            }) as BoxFuture<'_, Outcome<(Pages, Option<Vec<DirEntry>>)>>
        };
        let (pages, page) = self.in_directory(path, first).await.map_err(|failure| call.failed(failure))?;
        let Some(page) = page else { return Ok(stream::empty().boxed()) };
        let rest = stream::try_unfold((pages, path.clone()), |(mut pages, path)| async move {
            let call = Call::new("list", &path);
            let page = pages.next(call).await.map_err(|failure| call.failed(failure))?;
            Ok(page.map(|page| (shown(page), (pages, path))))
        });
        Ok(stream::iter([Ok(shown(page))]).chain(rest).boxed())
    }

    /// Removes from one directory the unfinished files of writers that died more than a day ago, and returns their
    /// number. Those of this machine need not be old where the directory is to be removed: what they write has no
    /// place any more.
    pub(super) async fn sweep(self: &Arc<Self>, path: &PoolPath, before_removal: bool) -> Result<u64> {
        let call = Call::new("sweep", path);
        self.check(call)?;
        let fail = |failure| call.failed(failure);
        let dir = self.directory(path).await.map_err(fail)?;
        let mut pages = Pages::new(Arc::clone(self), Arc::clone(&dir));
        let mut removed = 0;
        while let Some(page) = pages.next(call).await.map_err(fail)? {
            for DirEntry { name, .. } in page {
                let Some((boot, process)) = writer(&name) else { continue };
                let own = boot == boot_id();
                if own && is_alive(process) {
                    continue;
                }
                let slot = Slot { dir: Arc::clone(&dir), name };
                let found: Found = match self.look(&slot).await {
                    Ok(found) => found,
                    Err(failure) if failure.is(nfsstat3::NFS3ERR_NOENT) => continue,
                    Err(failure) => return Err(fail(failure)),
                };
                if (own && before_removal) || is_old(&found.stat, SWEEP_AGE) {
                    self.remove_slot(&slot, &found).await.map_err(fail)?;
                    removed += 1;
                }
            }
        }
        Ok(removed)
    }
}

fn shown(mut page: Vec<DirEntry>) -> Vec<DirEntry> {
    page.retain(|entry| !entry.name.starts_with(RESERVED_PREFIX));
    page
}

/// By `ctime`, because a finished file has been given the times of the original.
fn is_old(stat: &Stat, min_age: Duration) -> bool {
    SystemTime::now().duration_since(stat.ctime.into()).is_ok_and(|age| age >= min_age)
}

fn is_alive(process: i32) -> bool {
    Pid::from_raw(process).is_some_and(|process| test_kill_process(process) != Err(Errno::SRCH))
}
