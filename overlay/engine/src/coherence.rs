//! Imports what the pool has into the catalog: single names, whole directories, and changes by other clients.
//!
//! The pool's answer on an inode counts only if none of the daemon's own calls that change the inode, and no move of a
//! directory, ran while the pool was asked (`QueryStamp`). Otherwise the answer may be older than the daemon's change.
//! If a fetch fails because of such a call, it waits for the end of the call and asks again.
//!
//! An answer to an earlier question than the one whose answer is known does not count either (`NodeState::is_overtaken`).

mod ask_again;
mod forget;
mod grown;
mod import;
mod listing;
mod xattrs;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_backends::{Error, ErrorKind, FileKind, RESERVED_PREFIX, Result, Side, Stat, is_file_name};
use forebay_catalog::{Link, ListingState};
use forebay_policy::Consistency;
use forebay_system::clock::unix_now;
use futures::{FutureExt, future::BoxFuture};
use tokio::time::timeout;

use super::{Inner, Ino, Txn};
use crate::node::{Node, NodeState};
use crate::pool_calls::{CONFIRM_WITHIN, NameQuery, QueryStamp};
pub(crate) use grown::Growth;
pub(crate) use import::is_other_root;
pub(crate) use listing::{CONTENTS_BYTES, ListedContents};
pub(crate) use xattrs::chmod_acl;

/// Single names that are looked up before the whole directory is listed.
const SINGLE_LOOKUPS: u32 = 4;
/// The same, for pools whose listings take a request for each name.
const SINGLE_LOOKUPS_DEAR: u32 = 32;

/// The pause before the pool is asked again because of an own change.
pub(crate) const PAUSE: Duration = Duration::from_millis(2);
/// The longest such pause before a name is looked up again: a move of its directory in an object store may take minutes.
const LOOKUP_PAUSE_MAX: Duration = Duration::from_secs(1);

/// Returns whether a name that the pool listed or found may enter the catalog. Only this function decides it: pools
/// pass on whatever their servers send.
pub(super) fn may_enter(name: &[u8]) -> bool {
    is_file_name(name) && !name.starts_with(RESERVED_PREFIX)
}

/// How old an answer of the pool may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Age {
    /// As the policy says for names and attributes.
    Metadata,
    /// As the policy says for `open`.
    Open,
    /// Given since that moment, unless the policy says that the file never changes. Waits for the answer of a slow pool.
    Since(Instant),
    /// Given since that moment, whatever the policy says: a client has requested it.
    Purge(Instant),
    /// Ask in any case: the pool has said that what is known does not hold.
    Now,
}

impl Inner {
    /// Asks the pool whether a directory and those above it are still there.
    pub(crate) async fn look_above(self: &Arc<Self>, dir: Ino) -> Result<()> {
        let mut at = dir;
        while at != Ino::ROOT {
            let Some((parent, _)) = self.record_of(at)?.links.first().cloned() else { break };
            match self.revalidate(at, Age::Now).await {
                Err(e) if e.is(ErrorKind::Stale) => {}
                other => other?,
            }
            at = parent;
        }
        Ok(())
    }

    /// Returns the inode that a name stands for now.
    pub async fn find(&self, parent: Ino, name: &[u8]) -> Result<Option<Ino>> {
        self.check_name(name)?;
        if !may_enter(name) {
            return Ok(None);
        }
        let dir = self.node(parent)?;
        if dir.state.lock().record.kind != FileKind::Directory {
            return Err(Error::new(ErrorKind::NotDirectory, Side::Application, self.display(parent)));
        }
        let record = self.catalog.name(parent, name)?;
        if let Some(ino) = record.here_ino() {
            match self.confirm(ino, &(parent, name.into())).await {
                // Checking one name of an object may show that the name belongs to another object by now.
                Ok(()) if self.has_link(ino, parent, name)? => return Ok(Some(ino)),
                Ok(()) => return Ok(self.catalog.name(parent, name)?.here_ino()),
                Err(e) if e.is(ErrorKind::Stale) => return Ok(self.catalog.name(parent, name)?.here_ino()),
                Err(e) => return Err(e),
            }
        }
        if !record.is_empty() {
            // The name was removed or moved in the mount, or a request for it is in doubt: the pool's present object
            // does not count.
            return Ok(None);
        }
        self.find_in_pool(&dir, name).await
    }

    /// Like [`Inner::revalidate`], for a lookup by name. If an object has several names, each of them may belong to
    /// another object by now, and the answer for one name says nothing about the other names. So the pool is asked
    /// about this name.
    async fn confirm(&self, ino: Ino, name: &Link) -> Result<()> {
        let node = self.node(ino)?;
        let policy = self.policy_of(&node);
        let asked = {
            let state = node.state.lock();
            let one_of_several = state.record.pool_links.len() > 1 && state.record.pool_links.contains(name);
            let may_change = policy.consistency != Consistency::Immutable && !state.record.file.is_dirty();
            (one_of_several && may_change).then(|| self.asked(&state))
        };
        let listed = || {
            let dir = self.table.peek(name.0);
            let at = dir.and_then(|dir| dir.state.lock().names.listed_at);
            at.is_some_and(|at| at.elapsed() < policy.metadata_ttl)
        };
        let Some(asked) = asked.filter(|asked| asked.is_quiet() && !self.pool_calls.health.is_slow() && !listed())
        else {
            return self.revalidate(ino, Age::Metadata).await;
        };
        let watched = self.watch(name.0);
        let path = self.pool_path_of(name.0, &name.1)?;
        let Ok(answer) = timeout(CONFIRM_WITHIN, self.ask(self.pool.stat(&path))).await else {
            self.pool_calls.health.note_slow();
            return Ok(());
        };
        match answer {
            Ok(stat) => {
                let same = node.state.lock().record.is_object(&stat);
                match same {
                    true => {
                        // An earlier question may have been answered while the name was away.
                        self.pool_calls.watches.name_found(name.0, &name.1, watched.began());
                        self.news(ino, Some(name), &stat, asked).await.map(drop)
                    }
                    false => self.parted(ino, name, Some(&stat), asked, &watched),
                }
            }
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotDirectory) => {
                self.parted(ino, name, None, asked, &watched)
            }
            Err(e) if e.tells_nothing() => Ok(()),
            Err(e) => Err(e.context(&path)),
        }
    }

    /// Returns whether an inode has a name. An inode that is gone has none.
    fn has_link(&self, ino: Ino, parent: Ino, name: &[u8]) -> Result<bool> {
        match self.node(ino) {
            Ok(node) => Ok(node.state.lock().record.links.iter().any(|(p, n)| (*p, &**n) == (parent, name))),
            Err(e) if e.is(ErrorKind::Stale) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Returns whether the catalog has all names of a directory: the directory's version was confirmed as `age` requires,
    /// and all names were listed at this version. If a slow pool or the daemon's own calls left the version unconfirmed,
    /// other clients may have made names. `since`: a moment before [`Self::revalidate`].
    fn lists_all(&self, dir: &Node, age: Age, since: QueryStamp) -> bool {
        let never_changes = self.policy_of(dir).consistency == Consistency::Immutable && !matches!(age, Age::Purge(_));
        let max_age = self.names_max_age(dir, age);
        // Before the lock: it looks at the directory above.
        let is_shown = never_changes || self.listed_since(dir, max_age);
        let state = dir.state.lock();
        let is_confirmed = state.validated.is_some_and(|at| at >= since.at() || at.elapsed() < max_age);
        (is_shown || is_confirmed) && is_listed_whole(&state)
    }

    /// Returns how old an answer of the pool on the names of a directory may be.
    fn names_max_age(&self, dir: &Node, age: Age) -> Duration {
        match age {
            Age::Since(moment) | Age::Purge(moment) => moment.elapsed(),
            Age::Metadata | Age::Open | Age::Now => self.policy_of(dir).metadata_ttl,
        }
    }

    /// Forgets that a name was not in the pool, after confirming the directory as `age` requires.
    pub async fn forget_absence(&self, dir: Ino, name: &[u8], age: Age) -> Result<()> {
        self.revalidate(dir, age).await?;
        let node = self.node(dir)?;
        let mut state = node.state.lock();
        state.names.negative.remove(name);
        if !self.pool.capabilities().versions.of_directories {
            state.names.listed_at = None;
        }
        Ok(())
    }

    /// Looks up in the pool a name that the catalog does not have.
    async fn find_in_pool(&self, dir: &Node, name: &[u8]) -> Result<Option<Ino>> {
        let in_pool = || dir.ino == Ino::ROOT || dir.state.lock().record.in_pool();
        if !in_pool() {
            return Ok(None);
        }
        // The caller did not find the name, but another request may have listed the directory since. So the catalog is
        // read again wherever a complete listing is the answer.
        let here = || Ok(self.catalog.name(dir.ino, name)?.here_ino());
        let ttl = self.policy_of(dir).metadata_ttl;
        let asked = self.asked(&dir.state.lock());
        if matches!(dir.state.lock().record.listing, ListingState::Complete(_)) {
            self.revalidate(dir.ino, Age::Metadata).await?;
        }
        // Only then a listing tells that a name is absent.
        let show_all = self.pool.capabilities().listings.show_all();
        if show_all && self.lists_all(dir, Age::Metadata, asked) {
            return here();
        }
        let list_whole = {
            let mut state = dir.state.lock();
            // If the directory's version does not tell, a listing holds for `ttl`, as a single lookup does.
            let tells = self.pool.capabilities().versions.of_directories && self.still_holds(asked, &state);
            let listed = show_all
                && !tells
                && matches!(state.record.listing, ListingState::Complete(_))
                && state.names.listed_at.is_some_and(|at| at.elapsed() < ttl);
            if listed {
                return here();
            }
            if state.names.negative.get(name).is_some_and(|at| at.elapsed() < ttl) {
                return Ok(None);
            }
            state.names.single_lookups += 1;
            let dear = self.pool.capabilities().listings.ask_each();
            let enough = if dear { SINGLE_LOOKUPS_DEAR } else { SINGLE_LOOKUPS };
            // If no version tells whether an old listing still holds, the directory is listed again.
            let partly =
                state.record.listing == ListingState::Partly || !self.pool.capabilities().versions.of_directories;
            show_all && state.names.single_lookups > enough && partly
        };
        // If all names were known once, a name that was not among them counts as absent.
        let or_known = |error: Error| {
            let complete = show_all && matches!(dir.state.lock().record.listing, ListingState::Complete(_));
            if complete && error.tells_nothing() { here() } else { Err(error) }
        };
        if list_whole {
            match self.list(dir.ino, None).await {
                Ok(()) => return here(),
                // A pool that cannot list names can still look them up.
                Err(error) if error.is(ErrorKind::Unsupported) => dir.state.lock().names.single_lookups = 0,
                Err(error) => return or_known(error),
            }
        }
        let mut pause = PAUSE;
        while in_pool() {
            let watched = self.watch(dir.ino);
            // Our own flush may be moving the directory.
            let path = self.pool_path_of(dir.ino, name)?;
            match self.ask(self.pool.stat(&path)).await {
                Ok(stat) => {
                    match self.resolve_doubt_of_object(&stat).await {
                        Ok(false) => {}
                        Ok(true) => continue,
                        Err(e) => return or_known(e),
                    }
                    self.grow_object(&stat).await?;
                    if let Some(found) = self.import(dir.ino, name, &stat, &watched)? {
                        return Ok(Some(found));
                    }
                    let record = self.catalog.name(dir.ino, name)?;
                    if !record.is_empty() {
                        return Ok(record.here_ino());
                    }
                }
                Err(e) if e.is(ErrorKind::NotFound) => {
                    match self.resolve_doubt(dir.ino).await {
                        Ok(false) => {}
                        Ok(true) => continue,
                        // The pool goes on with an unfinished rename of the directory.
                        Err(e) => return or_known(e),
                    }
                    if self.note_absent(dir, name, &watched) {
                        return Ok(None);
                    }
                }
                Err(e) => return or_known(e.context(&path)),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LOOKUP_PAUSE_MAX);
        }
        here()
    }

    /// Records the pool's answer that a name is absent. Returns whether the answer counts.
    fn note_absent(&self, dir: &Node, name: &[u8], watched: &NameQuery<'_>) -> bool {
        let mut state = dir.state.lock();
        let holds = watched.holds(name) && !watched.was_found(name);
        if holds {
            state.names.note_absent(name);
        }
        holds
    }

    /// Asks the pool whether the catalog's state of an inode still holds, if the last answer is older than allowed.
    /// While the pool does not answer, the catalog's state is kept.
    ///
    /// # Errors
    /// `Stale` if the name now stands for another object, or for none.
    pub fn revalidate(&self, ino: Ino, age: Age) -> BoxFuture<'_, Result<()>> {
        async move {
            // The names of a directory change all the time while they are flushed: a listing takes care of that.
            let waits = match age {
                Age::Open => true,
                Age::Since(_) | Age::Purge(_) => self.node(ino)?.state.lock().record.kind == FileKind::File,
                Age::Metadata | Age::Now => false,
            };
            let begun = Instant::now();
            while !self.revalidate_once(ino, age, waits).await? && waits && begun.elapsed() < CONFIRM_WITHIN {
                tokio::time::sleep(PAUSE).await;
            }
            Ok(())
        }
        .boxed()
    }

    /// `waits`: for own changes that are under way. Returns `false` if one made the answer worthless all the same.
    async fn revalidate_once(&self, ino: Ino, age: Age, waits: bool) -> Result<bool> {
        let node = self.node(ino)?;
        let policy = self.policy_of(&node);
        // The owner of a lease requested this version of the file, so it is confirmed as often as names are, not at
        // every open.
        let leased = age == Age::Open && node.state.lock().leases.hold(unix_now());
        let age = if leased && policy.consistency == Consistency::CloseToOpen { Age::Metadata } else { age };
        let allowed = match (age, policy.consistency) {
            (Age::Purge(moment), _) => moment.elapsed(),
            (Age::Now, _) => Duration::ZERO,
            (_, Consistency::Immutable) => return Ok(true),
            (Age::Open, Consistency::CloseToOpen) => Duration::ZERO,
            (Age::Since(moment), _) => moment.elapsed(),
            (Age::Open, Consistency::Ttl(ttl)) => ttl,
            (Age::Metadata, _) => policy.metadata_ttl,
        };
        let holds = |state: &NodeState| {
            let local = !state.record.in_pool() && ino != Ino::ROOT;
            let is_fresh = state.validated.is_some_and(|at| at.elapsed() < allowed);
            // It is read and written in the pool, and each write would make the answer worthless.
            let is_through = waits && state.record.file.is_written_through() && state.opens.has_writer();
            local || state.record.file.is_dirty() || is_through || state.is_unlinked(ino) || is_fresh
        };
        if holds(&node.state.lock()) {
            return Ok(true);
        }
        if waits && age != Age::Metadata {
            self.await_own_change(&node).await;
        }
        let (asked, link, known) = {
            let state = node.state.lock();
            if holds(&state) {
                return Ok(true);
            }
            let opens = age == Age::Open && policy.consistency == Consistency::CloseToOpen;
            let able = opens && self.pool.capabilities().versions.alone;
            let known = able.then(|| state.record.version.clone()).flatten();
            (self.asked(&state), state.record.pool_link().cloned(), known)
        };
        if matches!(age, Age::Metadata | Age::Since(_) | Age::Purge(_)) && self.listed_since(&node, allowed) {
            return Ok(true);
        }
        // What was requested of the present state is not done with an older one, however long the answer takes: the pool's
        // own deadline limits it. Of the moves of directories, only those above the object matter then.
        let must_know = matches!(age, Age::Since(_));
        let watched = link.as_ref().filter(|_| must_know).map(|(dir, _)| self.watch(*dir));
        let path_holds = || watched.as_ref().is_some_and(NameQuery::path_holds);
        let by_path = path_holds();
        let was_moved = || by_path && !path_holds();
        let asked = if by_path { asked.of_object() } else { asked };
        let in_doubt = asked.is_quiet() && self.is_in_doubt(ino)?;
        // A step counts as under way before its call is recorded. So a doubt that belongs to a step which runs shows here,
        // and its end, which may take minutes, is not waited for.
        let now = match in_doubt {
            true if path_holds() => self.asked(&node.state.lock()).of_object(),
            true => self.asked(&node.state.lock()),
            false => asked,
        };
        if age != Age::Now && !now.is_quiet() {
            // An own call is changing the object or its path: no answer would count, and the catalog has what was sent.
            return Ok(age == Age::Metadata || !waits || !now.is_object_changing() || self.pool_calls.health.is_slow());
        }
        if in_doubt && now.is_quiet() {
            match self.resolve_doubt(ino).await {
                Ok(false) => {}
                // It may have another place in the pool, and its content may be another client's.
                Ok(true) => return Ok(false),
                // An unfinished rename is no news either: the pool goes on with it.
                Err(e) if e.tells_nothing() => return Ok(true),
                Err(e) => return Err(e),
            }
        }
        let path = match self.pool_path(ino) {
            Err(_) if was_moved() => return Ok(false),
            Err(e) if e.is(ErrorKind::NotFound) => return self.missing(ino, asked).await,
            // The question is about whatever object has the path now.
            path => path?.of_object(None),
        };
        if !must_know && !matches!(age, Age::Now | Age::Purge(_)) && self.pool_calls.health.is_slow() {
            return Ok(true);
        }
        if let Some(version) = known {
            match timeout(CONFIRM_WITHIN, self.ask(self.pool.still_has(&path, &version))).await {
                // This does not confirm what the name stands for, so `validated` stays as it is.
                Ok(Ok(true)) => return Ok(true),
                Ok(_) => {}
                Err(_) => {
                    self.pool_calls.health.note_slow();
                    return Ok(true);
                }
            }
        }
        let mut question = pin!(self.ask(self.pool.stat(&path)));
        let answer = match timeout(CONFIRM_WITHIN, question.as_mut()).await {
            Ok(answer) => answer,
            Err(_) => {
                self.pool_calls.health.note_slow();
                if !must_know {
                    return Ok(true);
                }
                question.await
            }
        };
        if was_moved() {
            return Ok(false);
        }
        match answer {
            Ok(stat) => {
                let counts = self.news(ino, link.as_ref(), &stat, asked).await?;
                self.recheck_names(ino, &stat).await?;
                Ok(counts)
            }
            Err(e) if e.is(ErrorKind::NotFound) => self.missing(ino, asked).await,
            Err(e) if e.tells_nothing() => Ok(true),
            Err(e) => Err(e.context(&path)),
        }
    }

    /// Whether the pool was asked about an object since a moment, and has answered. What only this node has needs no answer.
    pub(crate) fn is_known_since(&self, node: &Node, moment: Instant) -> bool {
        let state = node.state.lock();
        let is_own = !state.record.in_pool() || state.record.file.is_dirty() || state.is_unlinked(node.ino);
        let is_confirmed = state.validated.is_some_and(|at| at >= moment);
        drop(state);
        is_own || is_confirmed || self.listed_since(node, moment.elapsed())
    }

    /// If the pool counts fewer names of an object than the catalog knows, another client removed some or gave them to
    /// other objects: checks all of them.
    async fn recheck_names(&self, ino: Ino, stat: &Stat) -> Result<()> {
        let node = self.node(ino)?;
        let names = node.state.lock().record.pool_links.clone();
        if stat.kind == FileKind::Directory || stat.nlink as usize >= names.len() {
            return Ok(());
        }
        for link in names {
            let asked = self.asked(&node.state.lock());
            let watched = self.watch(link.0);
            let path = self.pool_path_of(link.0, &link.1)?;
            let there = match self.ask(self.pool.stat(&path)).await {
                Ok(stat) => Some(stat),
                Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotDirectory) => None,
                Err(e) => return Err(e.context(path)),
            };
            match self.parted(ino, &link, there.as_ref(), asked, &watched) {
                // The name that the caller asked about was already checked, so a stale name is no error here.
                Err(e) if e.is(ErrorKind::Stale) => {}
                other => other?,
            }
        }
        Ok(())
    }

    /// Returns whether the listing of its directory confirmed an inode within `age`.
    fn listed_since(&self, node: &Node, age: Duration) -> bool {
        let parent = {
            let state = node.state.lock();
            // If the inode was moved in the mount, the listing of its new directory did not show it.
            state.record.links.first().filter(|link| state.record.pool_links.contains(link)).map(|(parent, _)| *parent)
        };
        let Some(dir) = parent.and_then(|p| self.table.peek(p)) else { return false };
        let state = dir.state.lock();
        state.names.listed_at.is_some_and(|at| at.elapsed() < age)
    }

    /// Takes in attributes of an inode that the pool returned. `false`: the answer came too late to count.
    async fn news(&self, ino: Ino, link: Option<&Link>, stat: &Stat, asked: QueryStamp) -> Result<bool> {
        let node = self.node(ino)?;
        {
            let mut state = node.state.lock();
            if state.record.file.is_dirty() || !self.still_holds(asked, &state) {
                return Ok(state.record.file.is_dirty());
            }
            if state.is_overtaken(asked.at(), Some(stat)) {
                return Ok(true);
            }
            if state.record.version.as_ref() == Some(&stat.version) {
                state.take_answer_of(asked.at());
                return Ok(true);
            }
        }
        self.take_change(&node, link, stat, asked).await
    }

    pub fn check_name(&self, name: &[u8]) -> Result<()> {
        let max = self.pool.capabilities().name_max as usize;
        if name.len() > max {
            return Err(Error::new(
                ErrorKind::NameTooLong,
                Side::Application,
                format!("a name of {} bytes; the pool allows at most {max}", name.len()),
            ));
        }
        Ok(())
    }
}

/// Returns whether all names of a directory were listed at the version that is known.
fn is_listed_whole(state: &NodeState) -> bool {
    state.record.listing == ListingState::Complete(state.record.version.clone())
}

impl Txn<'_> {
    /// Returns whether an answer of the pool on this inode counts.
    pub(super) fn believes(&mut self, ino: Ino, asked: QueryStamp) -> Result<bool> {
        let inner = self.inner();
        Ok(inner.still_holds(asked, self.state(ino)?))
    }

    /// Returns whether the pool has a directory, as far as is known. Names that it had there must not enter the catalog
    /// if the directory is gone by now.
    fn is_dir_in_pool(&mut self, dir: Ino) -> Result<bool> {
        Ok(dir == Ino::ROOT || self.record(dir)?.in_pool())
    }
}
