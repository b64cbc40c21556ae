//! Listings of whole directories of the pool, merged into the catalog.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use forebay_backends::{
    DirEntry, Error, ErrorKind, FileKind, NAME_MAX_BYTES, PoolPath, Result, Side, Stat, Time, Version,
};
use forebay_catalog::{Link, ListingState, NameRecord, append, decode_first, unmatched};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt, stream};

use super::super::{Inner, Ino, Txn};
use super::forget::FORGOTTEN_AT_ONCE;
use super::{Age, may_enter};
use crate::pool_calls::NameQuery;

/// A directory that changed this recently before it was listed may have changed again without a change of its times.
const RACY: Duration = Duration::from_millis(50);
/// Names that one change adds. A large directory's names in one change would be in memory twice.
const NAMES_AT_ONCE: u32 = 1_000;
/// Limits the content that may come with one listing: a share of the memory for fetches, so that several listings fit.
pub(crate) const CONTENTS_BYTES: u64 = 2 << 20;
/// Names that the pool is asked for at the same time because its listing may have omitted them.
const OMITTED_AT_ONCE: usize = 16;
/// How often a listing starts again because own flushes moved directories meanwhile.
const ATTEMPTS: u32 = 60;

/// Limits the bytes of one listing: some ten million names. A server that sends more may never end.
const LISTED_BYTES: u64 = 1 << 30;

/// The size of one piece of encoded entries.
const PIECE_BYTES: usize = 64 << 10;

/// Names that a listing did not show.
type OmittedNames = HashSet<Box<[u8]>>;

/// The entries of a pool directory, encoded. Those of a large directory are all in memory at once; encoded, they take a
/// third of the memory.
#[derive(Debug, Default)]
struct Entries(Vec<Vec<u8>>);

impl Entries {
    fn bytes(&self) -> u64 {
        (self.0.len() * PIECE_BYTES) as u64
    }

    fn add(&mut self, name: &[u8], stat: &Stat) -> Result<()> {
        let full = |piece: &Vec<u8>| piece.len() + PIECE_BYTES / 16 > PIECE_BYTES;
        if self.0.last().is_none_or(full) {
            self.0.push(Vec::with_capacity(PIECE_BYTES));
        }
        if let Some(piece) = self.0.last_mut() {
            *piece = append(&(name, stat), std::mem::take(piece)).map_err(unencoded)?;
        }
        Ok(())
    }

    /// Returns all entries. Each piece is freed after its last entry.
    fn take(self) -> impl Iterator<Item = Result<(Vec<u8>, Stat)>> {
        self.0.into_iter().flat_map(|piece| {
            let mut at = 0;
            std::iter::from_fn(move || {
                let left = piece.get(at..).filter(|left| !left.is_empty())?;
                let first = decode_first(left).map_err(unencoded);
                at = first.as_ref().map_or(piece.len(), |(_, rest)| piece.len() - rest.len());
                Some(first.map(|(entry, _)| entry))
            })
        })
    }
}

/// Names in a listing that are invalid or reserved. They do not enter the catalog, and the directory is shown without
/// them.
#[derive(Debug, Default)]
struct InvalidNames {
    names: u64,
    first: String,
}

impl InvalidNames {
    fn lets_in(&mut self, name: &[u8]) -> bool {
        let good = may_enter(name);
        if !good {
            if self.names == 0 {
                self.first = name[..name.len().min(NAME_MAX_BYTES)].escape_ascii().to_string();
            }
            self.names += 1;
        }
        good
    }

    /// Logs one line for a directory, however many names were refused.
    fn tell(&self, path: &PoolPath) {
        if self.names > 0 {
            let Self { names, first } = self;
            tracing::warn!(%path, names, first, "not shown: the pool tells names that no directory can have");
        }
    }
}

fn unencoded(error: postcard::Error) -> Error {
    Error::new(ErrorKind::Corrupt, Side::Cache, "an entry of a listing").with_source(error)
}

/// Files whose content came with the listing of their directory: name, version, all bytes.
pub(crate) type ListedContents = Vec<(Vec<u8>, Version, Bytes)>;

/// What a listing says of a known file or directory.
type Child = (Ino, Link, Stat);

impl Inner {
    /// Makes sure that the catalog has all names of a directory, as fresh as the policy requires.
    pub async fn ensure_listed(&self, dir: Ino) -> Result<()> {
        self.ensure_listed_as(dir, Age::Metadata, None).await
    }

    /// Like [`Self::ensure_listed`], but as fresh as `age` requires.
    pub async fn ensure_listed_since(&self, dir: Ino, age: Age) -> Result<()> {
        self.ensure_listed_as(dir, age, None).await
    }

    /// Like [`Self::ensure_listed_since`]. `contents`: gets the small files that the pool sends with the listing.
    pub async fn ensure_listed_as(&self, dir: Ino, age: Age, contents: Option<&mut ListedContents>) -> Result<()> {
        let node = self.node(dir)?;
        if node.state.lock().record.kind != FileKind::Directory {
            return Err(Error::new(ErrorKind::NotDirectory, Side::Application, self.display(dir)));
        }
        let asked = self.asked(&node.state.lock());
        self.revalidate(dir, age).await?;
        let max_age = self.names_max_age(&node, age);
        let lists_all = self.lists_all(&node, age, asked);
        {
            let state = node.state.lock();
            if state.is_unlinked(dir) || (!state.record.in_pool() && dir != Ino::ROOT) {
                return Ok(());
            }
            let complete = matches!(state.record.listing, ListingState::Complete(_));
            if complete && state.names.listed_at.is_some_and(|at| at.elapsed() < max_age) {
                return Ok(());
            }
            if state.record.version.is_some() && lists_all {
                return Ok(());
            }
        }
        match self.list(dir, contents).await {
            Err(e) if e.tells_nothing() => {
                // If all names were known once, known names are better than an error.
                let complete = matches!(node.state.lock().record.listing, ListingState::Complete(_));
                if complete { Ok(()) } else { Err(e) }
            }
            other => other,
        }
    }

    /// Reads a directory of the pool, and merges it into the catalog.
    pub fn list<'a>(&'a self, dir: Ino, mut contents: Option<&'a mut ListedContents>) -> BoxFuture<'a, Result<()>> {
        async move {
            let node = self.node(dir)?;
            let since = Instant::now();
            let _listing = node.listing.lock().await;
            if node.state.lock().names.listed_at.is_some_and(|at| at >= since) {
                // Another caller listed the directory for all callers that waited.
                return Ok(());
            }
            for attempt in 0..ATTEMPTS {
                if dir != Ino::ROOT && !node.state.lock().record.in_pool() {
                    return Ok(());
                }
                let asked = self.asked(&node.state.lock());
                let watched = self.watch(dir);
                let path = self.pool_path(dir)?;
                let read = async {
                    let stat = self.pool.stat(&path).await?;
                    if dir == Ino::ROOT {
                        self.refuse_other_root(&self.record_of(dir)?, &stat)?;
                    }
                    let mut listing = match contents {
                        Some(_) => self.pool.list_with_contents(&path, CONTENTS_BYTES).await?,
                        None => self.pool.list(&path).await?,
                    };
                    let (mut entries, mut linked, mut came) = (Entries::default(), Vec::new(), ListedContents::new());
                    let mut refused = InvalidNames::default();
                    let mut unlisted = self.names_that_may_be_omitted(dir)?;
                    while let Some(page) = listing.try_next().await? {
                        let bytes = entries.bytes() + (linked.len() * size_of::<Stat>()) as u64;
                        if bytes > LISTED_BYTES {
                            let what = format!("a listing of more than {LISTED_BYTES} bytes");
                            return Err(Error::new(ErrorKind::TooLarge, Side::Pool, what));
                        }
                        for DirEntry { name, stat, content } in page {
                            if !refused.lets_in(&name) {
                                continue;
                            }
                            entries.add(&name, &stat)?;
                            if let Some(names) = &mut unlisted {
                                names.remove(name.as_slice());
                            }
                            if stat.nlink > 1 {
                                linked.push(stat.clone());
                            }
                            let content = content.filter(|content| !content.is_empty());
                            came.extend(content.map(|it| (name, stat.version, it)));
                        }
                    }
                    refused.tell(&path);
                    let absent = match unlisted {
                        Some(names) => Some(self.ask_for_omitted(&path, names, &mut entries).await?),
                        None => None,
                    };
                    Ok((stat, entries, absent, linked, came))
                };
                let (stat, entries, absent, linked, came) = match self.ask(read).await {
                    Err(e) if e.is(ErrorKind::NotFound) => {
                        self.missing(dir, asked).await?;
                        tokio::time::sleep(Duration::from_millis(u64::from(attempt))).await;
                        continue;
                    }
                    other => other.map_err(|e| e.context(&path))?,
                };
                let mut changed = false;
                for stat in linked {
                    changed |= self.resolve_doubt_of_object(&stat).await?;
                    self.grow_object(&stat).await?;
                }
                if changed {
                    continue;
                }
                if let Some(contents) = contents.as_deref_mut() {
                    *contents = came;
                }
                if let Some(children) = self.merge(dir, &stat, (entries, absent), &watched)? {
                    let are_known = self.children_changed(children, &watched).await?;
                    {
                        let mut state = node.state.lock();
                        // Not if something that was found meanwhile requires another listing.
                        if watched.looks_again() {
                            state.validated = None;
                        } else if are_known && matches!(state.record.listing, ListingState::Complete(_)) {
                            state.names.listed_at = Some(watched.began());
                        }
                    }
                    // New entries inherit the directory's ACL. It is read now, so that it is known even if the pool stops
                    // answering.
                    let _ = self.known_xattrs(dir).await;
                    return Ok(());
                }
                tokio::time::sleep(Duration::from_millis(u64::from(attempt))).await;
            }
            if matches!(node.state.lock().record.listing, ListingState::Complete(_)) {
                // The flusher is busy in this directory. All its names were known once.
                return Ok(());
            }
            let what = format!("{}: changes all the time while it is listed", self.display(dir));
            Err(Error::new(ErrorKind::Busy, Side::Pool, what))
        }
        .boxed()
    }

    /// Returns the names that the pool had in a directory, if its listings may omit names.
    fn names_that_may_be_omitted(&self, dir: Ino) -> Result<Option<OmittedNames>> {
        if !self.pool.capabilities().listings.may_omit_known() {
            return Ok(None);
        }
        let mut names = OmittedNames::new();
        self.catalog.names(dir, |name, record| {
            if record.pool.is_some() {
                names.insert(name.into());
            }
            Ok(true)
        })?;
        Ok(Some(names))
    }

    /// Asks the pool for names that its listing did not show, and adds those that are there. Returns those that are not. A
    /// name that the pool refuses to tell of stays as it is.
    async fn ask_for_omitted(
        &self,
        dir: &PoolPath,
        names: OmittedNames,
        entries: &mut Entries,
    ) -> Result<OmittedNames> {
        let ask = |name: Box<[u8]>| async {
            let stat = self.pool.stat(&dir.join(&name)).await;
            (name, stat)
        };
        let mut absent = OmittedNames::new();
        let mut answers = stream::iter(names).map(ask).buffer_unordered(OMITTED_AT_ONCE);
        while let Some((name, stat)) = answers.next().await {
            match stat {
                Ok(stat) => entries.add(&name, &stat)?,
                Err(e) if e.is(ErrorKind::NotFound) => _ = absent.insert(name),
                Err(e) if e.tells_nothing() => return Err(e),
                Err(error) => tracing::debug!(%dir, name = %name.escape_ascii(), %error, "it keeps its name"),
            }
        }
        Ok(absent)
    }

    /// Merges the names and attributes of a listing into the catalog. What own calls changed meanwhile stays as the
    /// catalog has it. `absent`: if the listing may omit names, those of which the pool said that it has them no longer.
    /// Returns what the listing says of known files; `None` if it may be the listing of another directory, or the
    /// directory is gone by now.
    fn merge(
        &self,
        dir: Ino,
        stat: &Stat,
        (entries, absent): (Entries, Option<OmittedNames>),
        watched: &NameQuery<'_>,
    ) -> Result<Option<Vec<Child>>> {
        self.note_names_in(dir)?;
        let began = watched.began();
        let mut txn = Txn::begin(self);
        if !watched.path_holds() || !txn.is_dir_in_pool(dir)? {
            return Ok(None);
        }
        let links_before = txn.record(dir)?.dir_nlink;
        let was_complete = matches!(txn.record(dir)?.listing, ListingState::Complete(_));
        // The kernel may have cached that a new name does not exist.
        let told_absent = was_complete || !txn.state(dir)?.names.negative.is_empty();
        let mut names = Vec::new();
        let mut known = HashMap::new();
        self.catalog.names(dir, |name, record| {
            known.insert(Box::<[u8]>::from(name), record);
            Ok(true)
        })?;
        let mut changed = Vec::new();
        let is_dir = |record: &NameRecord| record.here.is_some_and(|(_, kind)| kind == FileKind::Directory);
        let mut subdirs = known.values().filter(|record| is_dir(record)).count() as u32;
        // A name of the mount may be removed before it is flushed. Then the pool's name that it hides must show.
        let mut hides = false;
        let mut imported = 0;
        for entry in entries.take() {
            let (name, stat) = entry?;
            match known.remove(name.as_slice()) {
                None => {
                    let now = txn.name(dir, &name)?;
                    if !now.is_empty() {
                        // Another request found, created or removed the name while the namespace lock was released.
                        let found = now.here_ino().is_some() && now.here_ino() == now.pool;
                        subdirs += u32::from(found && is_dir(&now));
                        hides |= !found;
                        continue;
                    }
                    if !watched.holds(&name) {
                        // An own flush changed the name in the pool since.
                        continue;
                    }
                    subdirs += u32::from(stat.kind == FileKind::Directory);
                    self.import_in(&mut txn, dir, &name, &stat, began)?;
                    if told_absent {
                        names.push(Box::<[u8]>::from(name));
                    }
                    imported += 1;
                    if imported % NAMES_AT_ONCE == 0 {
                        let Some(next) = self.merged_part(txn, dir, &mut names, watched)? else { return Ok(None) };
                        txn = next;
                    }
                }
                Some(_) if !watched.holds(&name) || watched.was_found(&name) => {}
                Some(record) if record.here_ino().is_some() && record.here_ino() == record.pool => {
                    changed.extend(record.pool.map(|ino| (ino, (dir, name.into()), stat)));
                }
                // The mount has another inode under the name, or the name was removed or moved in the mount: the flush
                // decides.
                Some(record) => hides |= record.pool.is_none(),
            }
        }
        for (name, record) in known {
            // A name that was found meanwhile may have been created after the listing had passed it.
            let is_newer = !watched.holds(&name) || watched.was_found(&name);
            if is_newer || absent.as_ref().is_some_and(|absent| !absent.contains(&name)) {
                continue;
            }
            if txn.touched() >= FORGOTTEN_AT_ONCE {
                let Some(next) = self.merged_part(txn, dir, &mut names, watched)? else { return Ok(None) };
                txn = next;
            }
            let now = txn.name(dir, &name)?;
            let Some(ino) = record.pool.filter(|ino| now.pool == Some(*ino)) else { continue };
            if txn.state(ino)?.is_overtaken(began, None) {
                // The pool had it after the listing had begun. If it went later, the next listing tells.
                hides = true;
                continue;
            }
            let counts = |_: &mut Txn<'_>| Ok(watched.holds(&name));
            let Some(rest) = self.forget_pool_name(txn, ino, dir, &name, &counts)? else {
                self.tell_kernel_names(dir, &mut names);
                return Ok(None);
            };
            txn = rest;
            if is_dir(&now) && !is_dir(&txn.name(dir, &name)?) {
                // It was not counted if it came while the namespace lock was released.
                subdirs = subdirs.saturating_sub(1);
            }
            if record.here_ino() == Some(ino) {
                names.push(name);
            }
        }
        // If the pool's times are in whole seconds, the whole second counts as recent.
        let tick = Duration::from_nanos(self.pool.capabilities().time_granularity_ns.into());
        let recent = RACY + tick + began.elapsed();
        let racy = is_younger(stat.mtime, recent) || is_younger(stat.ctime, recent);
        let made_meanwhile = txn.record(dir)?.dir_nlink.wrapping_sub(links_before);
        let touched = watched.is_touched();
        // The directory's own state was read before its names. A later answer may be known by now.
        let is_overtaken = txn.state(dir)?.is_overtaken(began, Some(stat));
        if !watched.has_changed(dir) && !is_overtaken {
            txn.take_attrs(dir, stat)?;
        }
        let record = txn.record(dir)?;
        // Some file systems do not count directories and report 1.
        record.dir_nlink = if stat.nlink < 2 { stat.nlink } else { (2 + subdirs).wrapping_add(made_meanwhile) };
        let is_answer = !touched && !is_overtaken;
        if is_answer && record.version.as_ref() != Some(&stat.version) {
            // Another client may have changed its ACL, too.
            record.xattrs = None;
        }
        if is_answer {
            record.version = Some(stat.version.clone());
        }
        let may_change_unseen = racy || hides || touched || !self.pool.capabilities().versions.of_directories;
        record.listing =
            ListingState::Complete(Some(if may_change_unseen { unmatched() } else { stat.version.clone() }));
        txn.on_commit(dir, move |state| {
            // The listing does not confirm known files before they have the listed state.
            state.names.listed_at = None;
            if is_answer {
                state.take_answer_of(began);
            }
            state.names.single_lookups = 0;
            state.names.negative.clear();
        })?;
        txn.commit()?;
        self.tell_kernel_names(dir, &mut names);
        Ok(Some(changed))
    }

    /// Commits a part of a merged listing. Requests that create or remove a name wait for this change. Returns the next
    /// change; `None` if the listing does not count any more.
    fn merged_part<'a>(
        &'a self,
        txn: Txn<'a>,
        dir: Ino,
        names: &mut Vec<Box<[u8]>>,
        watched: &NameQuery<'_>,
    ) -> Result<Option<Txn<'a>>> {
        txn.commit()?;
        self.tell_kernel_names(dir, names);
        let mut next = Txn::begin(self);
        Ok((watched.path_holds() && next.is_dir_in_pool(dir)?).then_some(next))
    }

    fn tell_kernel_names(&self, dir: Ino, names: &mut Vec<Box<[u8]>>) {
        names.drain(..).for_each(|name| self.tell_kernel_name(dir, &name));
    }

    /// Applies to known files what a listing says of them. `false`: the listing is too old for some of them.
    async fn children_changed(&self, children: Vec<Child>, watched: &NameQuery<'_>) -> Result<bool> {
        let mut believed = true;
        for (ino, link, stat) in children {
            let same = match self.table.peek(ino) {
                Some(node) => node.state.lock().record.version.as_ref() == Some(&stat.version),
                None => self.catalog.inode(ino)?.is_some_and(|r| r.version.as_ref() == Some(&stat.version)),
            };
            if same {
                continue;
            }
            let Ok(node) = self.node(ino) else { continue };
            // If directories have no versions, the version always differs.
            let tells = stat.kind != FileKind::Directory || self.pool.capabilities().versions.of_directories;
            if !tells && node.state.lock().record.kind == FileKind::Directory {
                continue;
            }
            let asked = self.asked(&node.state.lock());
            // An own call is changing it, or has changed it since the pool was asked: the answer to that call is newer.
            let is_newer = watched.has_changed(ino) || !watched.holds(&link.1) || watched.was_found(&link.1);
            if is_newer || asked.is_object_changing() {
                continue;
            }
            // The path of the listing held, so moves of other directories do not matter. If it is not believed, the listing
            // does not confirm it.
            let asked = asked.of_object().since(watched.began());
            match self.take_change(&node, Some(&link), &stat, asked).await {
                Err(e) if !e.is(ErrorKind::Stale) => return Err(e),
                Ok(false) => believed = false,
                _ => {}
            }
        }
        Ok(believed)
    }
}

fn is_younger(time: Time, than: Duration) -> bool {
    let time = SystemTime::from(time);
    SystemTime::now().duration_since(time).map_or(true, |age| age < than)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_given_back_as_they_were() {
        let entry = |at: u64| {
            let version = Version::Tag { etag: format!("e{at}"), id: String::new(), size: at, mtime: Time::default() };
            let stat = Stat {
                kind: FileKind::File,
                mode: 0o644,
                uid: 1,
                gid: 2,
                nlink: 1,
                rdev: 0,
                size: at,
                occupied: Some(at),
                atime: Time::default(),
                mtime: Time::default(),
                ctime: Time::default(),
                version,
            };
            // A name may be longer than the room that a piece keeps free.
            (vec![b'x'; if at.is_multiple_of(100) { 10_000 } else { 200 }], stat)
        };
        let mut entries = Entries::default();
        (0..1_000).for_each(|at| entries.add(&entry(at).0, &entry(at).1).unwrap());
        assert!(entries.0.len() > 3);
        assert!(entries.take().map(Result::unwrap).eq((0..1_000).map(entry)));
    }
}
