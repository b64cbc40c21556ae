//! Lists directories page by page, and removes the unfinished files of dead writers.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::future::BoxFuture;
use futures::{StreamExt, TryStreamExt, stream};
use nfs3_client::nfs3_types::nfs3::{READDIR3args, READDIRPLUS3args, cookieverf3, entryplus3, fattr3, nfsstat3};

use crate::unfinished::{boot_id, is_alive, is_of, writer};
use crate::{DirEntry, Listing, PoolPath, RESERVED_PREFIX, Result, Stat, is_file_name};

use super::attributes::{FoundObject, option};
use super::failure::{NfsCall, NfsFailure, Outcome};
use super::handles::Directory;
use super::limits::{BARREN_PAGES, LISTING_RESTARTS, MAX_PARALLEL_TRANSFERS, PAGE_BYTES, PAGE_NAME_BYTES, SWEEP_AGE};
use super::session::{DirectoryName, Session};

/// A name in a page, with its attributes if the server sent them.
type RawEntry = (Vec<u8>, Option<fattr3>);

/// A directory that is being listed.
struct ListingPages {
    session: Arc<Session>,
    dir: Arc<Directory>,
    cookie: u64,
    /// The ends of all pages since the listing began, or began again. A server that returns one of them again loops.
    ends: HashSet<u64>,
    verifier: cookieverf3,
    ended: bool,
    /// Successive pages without a new name.
    barren: u32,
    restarts: u32,
    /// The server sends no attributes with names.
    names_only: bool,
    /// Hashes of the names that were returned, so that a listing which starts again returns none of them twice: eight
    /// bytes for each.
    given: HashSet<u64>,
    hashing: RandomState,
}

impl ListingPages {
    fn new(session: Arc<Session>, dir: Arc<Directory>) -> Self {
        Self {
            session,
            dir,
            cookie: 0,
            ends: HashSet::from([0]),
            verifier: cookieverf3::default(),
            ended: false,
            barren: 0,
            restarts: 0,
            names_only: false,
            given: HashSet::new(),
            hashing: RandomState::new(),
        }
    }

    /// The next entries, including those with reserved names; `None` at the end.
    async fn next(&mut self, call: NfsCall<'_>) -> Outcome<Option<Vec<DirEntry>>> {
        while !self.ended {
            self.barren += 1;
            if self.barren > BARREN_PAGES {
                return Err(self.session.wrong(call, "the server's pages contain nothing new"));
            }
            let page = match self.ask().await {
                // The server has forgotten our position.
                Err(NfsFailure::Status(nfsstat3::NFS3ERR_BAD_COOKIE)) if self.restarts < LISTING_RESTARTS => {
                    self.restarts += 1;
                    (self.cookie, self.verifier) = (0, cookieverf3::default());
                    self.ends = HashSet::from([0]);
                    continue;
                }
                // An entry vanished while the server read it. For a removed directory, the error would be a stale
                // handle.
                Err(NfsFailure::Status(nfsstat3::NFS3ERR_NOENT)) if self.restarts < LISTING_RESTARTS => {
                    self.restarts += 1;
                    continue;
                }
                // Some servers support no listings with attributes, or their configuration disables them.
                Err(NfsFailure::Status(nfsstat3::NFS3ERR_NOTSUPP)) if !self.names_only => {
                    self.names_only = true;
                    continue;
                }
                page => page?,
            };
            if !self.ended && !self.ends.insert(self.cookie) {
                return Err(self.session.wrong(call, "the server's pages do not lead to an end"));
            }
            let fresh = self.fresh(page);
            let session = &self.session;
            let completing = fresh.into_iter().map(|(name, raw)| {
                let slot = DirectoryName { dir: Arc::clone(&self.dir), name };
                async move {
                    let stat = match raw {
                        Some(raw) => Some(session.stat_of(&raw)),
                        None => session.look_if_there(&slot).await?,
                    };
                    Ok(stat.map(|stat| DirEntry::new(slot.name, stat)))
                }
            });
            let entries = stream::iter(completing).buffered(MAX_PARALLEL_TRANSFERS);
            let entries: Vec<_> = entries.try_filter_map(futures::future::ok).try_collect().await?;
            if !entries.is_empty() {
                self.barren = 0;
                return Ok(Some(entries));
            }
        }
        Ok(None)
    }

    /// Requests one page and remembers where it ends.
    async fn ask(&mut self) -> Outcome<Vec<RawEntry>> {
        let (dir, cookie, cookieverf) = (self.dir.handle.clone(), self.cookie, self.verifier);
        let (calls, owners) = (&self.session.calls, &[self.dir.owner]);
        let (verifier, ended, entries): (_, _, Vec<(u64, RawEntry)>) = if self.names_only {
            let page = calls.call(&READDIR3args { dir, cookie, cookieverf, count: PAGE_NAME_BYTES }, owners).await?;
            let entries = page.reply.entries.into_inner().into_iter();
            let entries = entries.map(|entry| (entry.cookie, (entry.name.0.into_owned(), None))).collect();
            (page.cookieverf, page.reply.eof, entries)
        } else {
            let (dircount, maxcount) = (PAGE_NAME_BYTES, PAGE_BYTES);
            let args = READDIRPLUS3args { dir, cookie, cookieverf, dircount, maxcount };
            let page = calls.call(&args, owners).await?;
            let entries = page.reply.entries.into_inner().into_iter();
            let raw = |entry: entryplus3<'static>| (entry.name.0.into_owned(), option(entry.name_attributes));
            (page.cookieverf, page.reply.eof, entries.map(|entry| (entry.cookie, raw(entry))).collect())
        };
        self.verifier = verifier;
        self.ended = ended;
        self.cookie = entries.last().map_or(self.cookie, |(cookie, _)| *cookie);
        Ok(entries.into_iter().map(|(_, entry)| entry).collect())
    }

    /// The entries of a page that are valid names and were not returned before. Names are compared by hashes, so that
    /// two names may look the same: a page with any new name is returned whole, unless the listing began again.
    fn fresh(&mut self, page: Vec<RawEntry>) -> Vec<RawEntry> {
        let mut any = false;
        let mut named: Vec<_> = page
            .into_iter()
            .filter(|(name, _)| is_file_name(name))
            .map(|entry| {
                let first = self.given.insert(self.hashing.hash_one(&entry.0));
                any |= first;
                (first, entry)
            })
            .collect();
        named.retain(|(first, _)| *first || (any && self.restarts == 0));
        named.into_iter().map(|(_, entry)| entry).collect()
    }
}

/// Selects unfinished files for removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sweep {
    /// Files of writers that died more than a day ago.
    Old,
    /// Like `Old`, but the files are only counted.
    CountOld,
    /// Like `Old`, but files of this machine's writers need not be old.
    BeforeRemoval,
}

impl Session {
    /// The attributes of an entry that came without them; `None` if the entry has vanished.
    async fn look_if_there(&self, slot: &DirectoryName) -> Outcome<Option<Stat>> {
        match self.look(slot).await {
            Ok(found) => Ok(Some(found.stat)),
            Err(failure) if failure.is(nfsstat3::NFS3ERR_NOENT) || failure.is_stale() => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    pub(super) async fn list(self: &Arc<Self>, path: &PoolPath) -> Result<Listing> {
        let call = NfsCall::new("list", path);
        self.check(call)?;
        // The first page is requested at once: it shows whether the directory exists.
        let first = |dir: Arc<Directory>| {
            Box::pin(async move {
                let mut pages = ListingPages::new(Arc::clone(self), dir);
                let page = pages.next(call).await?;
                Ok((pages, page))
            }) as BoxFuture<'_, Outcome<(ListingPages, Option<Vec<DirEntry>>)>>
        };
        let (pages, page) = self.in_directory(path, first).await.map_err(|failure| call.failed(failure))?;
        let Some(page) = page else { return Ok(stream::empty().boxed()) };
        let rest = stream::try_unfold((pages, path.clone()), |(mut pages, path)| async move {
            let call = NfsCall::new("list", &path);
            let page = pages.next(call).await.map_err(|failure| call.failed(failure))?;
            Ok(page.map(|page| (shown(page), (pages, path))))
        });
        Ok(stream::iter([Ok(shown(page))]).chain(rest).boxed())
    }

    /// Removes the unfinished files of writers that died more than a day ago from one directory, and returns their
    /// number. If the directory is to be removed, files of this machine's writers need not be old: they lose their
    /// directory anyway. Files of `ended` need not be old either: these writers are known to have ended.
    pub(super) async fn sweep(self: &Arc<Self>, path: &PoolPath, ended: &[String], what: Sweep) -> Result<u64> {
        let call = NfsCall::new("sweep", path);
        self.check(call)?;
        let fail = |failure| call.failed(failure);
        let dir = self.directory(path).await.map_err(fail)?;
        let mut pages = ListingPages::new(Arc::clone(self), Arc::clone(&dir));
        let mut removed = 0;
        while let Some(page) = pages.next(call).await.map_err(fail)? {
            for DirEntry { name, .. } in page {
                let Some((boot, process)) = writer(&name) else { continue };
                let own = boot == boot_id();
                let has_ended = is_of(&name, ended);
                if own && is_alive(process) && !has_ended {
                    continue;
                }
                let slot = DirectoryName { dir: Arc::clone(&dir), name };
                let found: FoundObject = match self.look(&slot).await {
                    Ok(found) => found,
                    Err(failure) if failure.is(nfsstat3::NFS3ERR_NOENT) => continue,
                    Err(failure) => return Err(fail(failure)),
                };
                if has_ended || (own && what == Sweep::BeforeRemoval) || is_old(&found.stat, SWEEP_AGE) {
                    if what != Sweep::CountOld {
                        self.remove_slot(&slot, &found).await.map_err(fail)?;
                    }
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

/// By `ctime`, because a finished file already has the times of the original.
fn is_old(stat: &Stat, min_age: Duration) -> bool {
    SystemTime::now().duration_since(stat.ctime.into()).is_ok_and(|age| age >= min_age)
}
