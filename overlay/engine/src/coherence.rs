//! Imports what the pool has into the catalog: single names, whole directories, and changes by other clients.
//!
//! The pool's answer on an inode counts only if none of the daemon's own calls that change the inode, and no move of a
//! directory, ran while the pool was asked (`QueryStamp`). Otherwise the answer may be older than the daemon's change.
//! If a fetch fails because of such a call, it waits for the end of the call and asks again.

mod grown;
mod import;
mod listing;
mod watch;
use std::time::{Duration, Instant};

use forebay_backends::{
    Error, ErrorKind, FileKind, PoolPath, RESERVED_PREFIX, Result, Side, Stat, Version, is_file_name,
};
use forebay_catalog::{Link, ListingState};
use forebay_policy::Consistency;
use forebay_system::clock::unix_now;
use futures::{FutureExt, future::BoxFuture};
use parking_lot::Mutex;
use tokio::sync::Notify;

use self::watch::NameQuery;
use super::{Inner, Ino, Txn};
use crate::node::{Node, NodeState};
pub(crate) use grown::Growth;
pub(super) use import::note_object;
pub(crate) use watch::{PoolChange, Watches};

/// Single names that are looked up before the whole directory is listed.
const SINGLE_LOOKUPS: u32 = 4;
/// The same, for pools whose listings take a request for each name.
const SINGLE_LOOKUPS_DEAR: u32 = 32;

/// How long the pool may take to confirm cached state. After that, the state is shown unconfirmed.
const CONFIRM_WITHIN: Duration = Duration::from_secs(1);

/// Returns whether a name that the pool listed or found may enter the catalog. Only this function decides it: pools
/// pass on whatever their servers send.
pub(super) fn may_enter(name: &[u8]) -> bool {
    is_file_name(name) && !name.starts_with(RESERVED_PREFIX)
}

/// Whether the pool answers. While it does not, calls fail at once instead of waiting for their deadlines, and one
/// background task finds out when the pool answers again.
#[derive(Debug, Default)]
pub(crate) struct Health {
    down: Mutex<Option<String>>,
    /// Notified when the pool stops answering.
    fell: Notify,
    /// When the pool last took too long to confirm something.
    slow: Mutex<Option<Instant>>,
}

impl Health {
    /// Returns why the pool counts as not answering.
    pub fn why_down(&self) -> Option<String> {
        self.down.lock().clone()
    }

    /// Waits until the pool counts as not answering. For one task.
    pub async fn until_down(&self) {
        while self.why_down().is_none() {
            self.fell.notified().await;
        }
    }

    /// Returns whether the pool was just too slow to confirm something. Cached state is then shown without asking
    /// again.
    fn is_slow(&self) -> bool {
        self.slow.lock().is_some_and(|at| at.elapsed() < CONFIRM_WITHIN)
    }

    fn note_slow(&self) {
        *self.slow.lock() = Some(Instant::now());
    }

    pub fn note<T>(&self, result: &Result<T>) {
        match result {
            Err(e) if matches!(e.kind(), ErrorKind::Timeout | ErrorKind::Unavailable) => {
                let mut down = self.down.lock();
                if down.is_none() {
                    tracing::warn!(error = %e, "the pool does not answer; resident files are still served");
                    *down = Some(e.to_string());
                    self.fell.notify_one();
                }
            }
            _ => {
                if self.down.lock().take().is_some() {
                    tracing::info!("the pool answers again");
                }
            }
        }
    }
}

/// How often a question to the pool is repeated because of the daemon's own changes.
pub(super) const OWN_CHANGES: u32 = 16;

/// How old an answer of the pool may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Age {
    /// As the policy says for names and attributes.
    Metadata,
    /// As the policy says for `open`.
    Open,
    /// Given since that moment.
    Since(Instant),
    /// Ask in any case.
    Now,
}

/// The moment at which the pool was asked. An answer counts only if none of the daemon's own calls changed the object
/// in the pool meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueryStamp {
    /// Own calls that change the object or, for a directory, its names: how many had begun and ended.
    calls: (u64, u64),
    /// Own calls that move directories, and thus all paths below them: how many had begun and ended.
    moves: (u64, u64),
}

impl QueryStamp {
    /// Returns whether no call of the daemon was under way.
    pub fn is_quiet(self) -> bool {
        self.calls.0 == self.calls.1 && self.moves.0 == self.moves.1
    }
}

impl Inner {
    /// Returns the present moment, for a question about an inode.
    pub fn asked(&self, state: &NodeState) -> QueryStamp {
        QueryStamp { calls: state.pool_calls, moves: self.dir_moves() }
    }

    /// Returns whether the answer to a question that was asked at that moment still holds for the inode.
    pub fn still_holds(&self, asked: QueryStamp, state: &NodeState) -> bool {
        asked.is_quiet() && asked == self.asked(state)
    }

    /// Makes a call to the pool, unless the pool is known not to answer.
    pub async fn ask<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        // With a `pool_retry` of zero, every call is made.
        if let Some(why) = self.health.why_down().filter(|_| !self.policy().pool_retry.is_zero()) {
            return Err(Error::new(ErrorKind::Unavailable, Side::Pool, why));
        }
        let result = call.await;
        self.health.note(&result);
        result
    }

    /// Asks the pool about an inode, by its known path. If the pool does not find it, a flush may be moving it, or may
    /// have moved it without an answer. The doubt is resolved, and the question is asked again.
    ///
    /// # Errors
    /// `Stale` and `NotFound`: the pool no longer has it.
    pub async fn ask_of<T, F>(&self, ino: Ino, question: impl Fn(PoolPath) -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let node = self.node(ino)?;
        let mut left = OWN_CHANGES;
        loop {
            let asked = self.asked(&node.state.lock());
            let path = self.pool_path(ino)?;
            let error = match self.ask(question(path.clone())).await {
                Err(e) if left > 0 => e.context(path),
                other => return other.map_err(|e| e.context(path)),
            };
            if self.is_own_change(&node, asked, &error, &mut left) {
                self.own_change(&node).await;
            } else if error.is(ErrorKind::NotFound) {
                left -= 1;
                self.missing(ino, asked).await?;
            } else {
                return Err(error);
            }
        }
    }

    /// Returns whether one of the daemon's own changes explains the error: a flush moved the file, or changed its
    /// version by changing names or attributes.
    fn is_own_change(&self, node: &Node, asked: QueryStamp, error: &Error, left: &mut u32) -> bool {
        // Another object, even of another kind, may have the old path, so the error can be of almost any kind.
        let changed =
            error.side() == Side::Pool && !matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unavailable);
        let ours = changed && *left > 0 && !self.still_holds(asked, &node.state.lock());
        *left -= u32::from(ours);
        ours
    }

    /// Returns what is known of a file when its bytes are requested: for [`Inner::ask_again`].
    pub fn known(&self, node: &Node) -> (QueryStamp, Option<Version>) {
        let state = node.state.lock();
        (self.asked(&state), state.record.version.clone())
    }

    /// Returns whether a question that ended with an error is worth repeating: an own change explains the error, or the
    /// inode has another version by now.
    pub async fn ask_again(
        &self,
        node: &Node,
        known: &(QueryStamp, Option<Version>),
        error: &Error,
        left: &mut u32,
    ) -> bool {
        let (asked, version) = known;
        if self.is_own_change(node, *asked, error, left) {
            self.own_change(node).await;
            return true;
        }
        // A flush of attributes, whose answer was lost, made another version of the same bytes, or another client
        // appended to the file.
        if *left == 0 || !error.is(ErrorKind::Stale) || node.state.lock().record.file.is_dirty() {
            return false;
        }
        *left -= 1;
        self.revalidate(node.ino, Age::Now).await.is_ok() && node.state.lock().record.version != *version
    }

    /// Waits until the daemon's own changes of a file have ended and their results are known.
    async fn own_change(&self, node: &Node) {
        drop(self.flusher.moves.read().await);
        drop(node.flush.lock().await);
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
        let Some(asked) = asked.filter(|asked| asked.is_quiet() && !self.health.is_slow() && !listed()) else {
            return self.revalidate(ino, Age::Metadata).await;
        };
        let path = self.pool_path_of(name.0, &name.1)?;
        let Ok(answer) = tokio::time::timeout(CONFIRM_WITHIN, self.ask(self.pool.stat(&path))).await else {
            self.health.note_slow();
            return Ok(());
        };
        match answer {
            Ok(stat) => {
                let same = node.state.lock().record.is_object(&stat);
                match same {
                    true => self.news(ino, Some(name), &stat, asked).await,
                    false => self.parted(ino, name, Some(&stat), asked),
                }
            }
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotDirectory) => {
                self.parted(ino, name, None, asked)
            }
            Err(e) if matches!(e.kind(), ErrorKind::Timeout | ErrorKind::Unavailable) => Ok(()),
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

    /// Returns whether the catalog has all names of a directory: the directory's version was confirmed since that
    /// moment or within `ttl`, and all names were listed at this version. While the daemon's own calls change the
    /// directory, its version says nothing about changes by other clients.
    fn lists_all(&self, state: &NodeState, since: QueryStamp, ttl: Duration) -> bool {
        let confirmed = self.still_holds(since, state) || state.validated.is_some_and(|at| at.elapsed() < ttl);
        confirmed && state.record.listing == ListingState::Complete(state.record.version.clone())
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
        if !dir.state.lock().record.in_pool() && dir.ino != Ino::ROOT {
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
        let list_whole = {
            let mut state = dir.state.lock();
            if show_all && self.lists_all(&state, asked, ttl) {
                return here();
            }
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
        if list_whole {
            match self.list(dir.ino, None).await {
                Ok(()) => return here(),
                // A pool that cannot list names can still look them up.
                Err(error) if error.is(ErrorKind::Unsupported) => dir.state.lock().names.single_lookups = 0,
                Err(error) => return Err(error),
            }
        }
        loop {
            let watched = self.watch(dir.ino);
            // Our own flush may be moving the directory.
            let path = self.pool_path_of(dir.ino, name)?;
            match self.ask(self.pool.stat(&path)).await {
                Ok(stat) => {
                    if self.resolve_doubt_of_object(&stat).await? {
                        continue;
                    }
                    self.grow_object(&stat).await?;
                    if let Some(found) = self.adopt(dir.ino, name, &stat, &watched)? {
                        return Ok(Some(found));
                    }
                    let record = self.catalog.name(dir.ino, name)?;
                    if !record.is_empty() {
                        return Ok(record.here_ino());
                    }
                }
                Err(e) if e.is(ErrorKind::NotFound) => {
                    if self.resolve_doubt(dir.ino).await? {
                        continue;
                    }
                    if self.note_absent(dir, name, &watched) {
                        return Ok(None);
                    }
                }
                Err(e) if matches!(e.kind(), ErrorKind::Timeout | ErrorKind::Unavailable) => {
                    // If all names were known once, a name that was not among them counts as absent.
                    let complete = show_all && matches!(dir.state.lock().record.listing, ListingState::Complete(_));
                    return if complete { here() } else { Err(e.context(&path)) };
                }
                Err(e) => return Err(e.context(&path)),
            }
            tokio::task::yield_now().await;
        }
    }

    /// Records the pool's answer that a name is absent. Returns whether the answer counts.
    fn note_absent(&self, dir: &Node, name: &[u8], watched: &NameQuery<'_>) -> bool {
        let mut state = dir.state.lock();
        let holds = watched.holds(name);
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
            let node = self.node(ino)?;
            let policy = self.policy_of(&node);
            // The owner of a lease requested this version of the file, so it is confirmed as often as names are, not at
            // every open.
            let leased = age == Age::Open && node.state.lock().leases.hold(unix_now());
            let age = if leased && policy.consistency == Consistency::CloseToOpen { Age::Metadata } else { age };
            let allowed = match (age, policy.consistency) {
                (_, Consistency::Immutable) => return Ok(()),
                (Age::Now, _) | (Age::Open, Consistency::CloseToOpen) => Duration::ZERO,
                (Age::Since(moment), _) => moment.elapsed(),
                (Age::Open, Consistency::Ttl(ttl)) => ttl,
                (Age::Metadata, _) => policy.metadata_ttl,
            };
            let (asked, link, known) = {
                let state = node.state.lock();
                let local = !state.record.in_pool() && ino != Ino::ROOT;
                if local || state.record.file.is_dirty() || state.is_unlinked(ino) {
                    return Ok(());
                }
                if state.validated.is_some_and(|at| at.elapsed() < allowed) {
                    return Ok(());
                }
                let opens = age == Age::Open && policy.consistency == Consistency::CloseToOpen;
                let able = opens && self.pool.capabilities().versions.alone;
                let known = able.then(|| state.record.version.clone()).flatten();
                (self.asked(&state), state.record.pool_link().cloned(), known)
            };
            if matches!(age, Age::Metadata | Age::Since(_)) && self.listed_since(&node, allowed) {
                return Ok(());
            }
            if matches!(age, Age::Metadata | Age::Open) && !asked.is_quiet() {
                // An own call is changing the object: no answer would count, and the catalog has what was sent.
                return Ok(());
            }
            if asked.is_quiet() {
                match self.resolve_doubt(ino).await {
                    Ok(false) => {}
                    Err(e) if !matches!(e.kind(), ErrorKind::Timeout | ErrorKind::Unavailable) => return Err(e),
                    _ => return Ok(()),
                }
            }
            let path = match self.pool_path(ino) {
                Err(e) if e.is(ErrorKind::NotFound) => return self.missing(ino, asked).await,
                // The question is about whatever object has the path now.
                path => path?.of_object(None),
            };
            if age != Age::Now && self.health.is_slow() {
                return Ok(());
            }
            if let Some(version) = known {
                match tokio::time::timeout(CONFIRM_WITHIN, self.ask(self.pool.still_has(&path, &version))).await {
                    // This does not confirm what the name stands for, so `validated` stays as it is.
                    Ok(Ok(true)) => return Ok(()),
                    Ok(_) => {}
                    Err(_) => {
                        self.health.note_slow();
                        return Ok(());
                    }
                }
            }
            let Ok(answer) = tokio::time::timeout(CONFIRM_WITHIN, self.ask(self.pool.stat(&path))).await else {
                self.health.note_slow();
                return Ok(());
            };
            match answer {
                Ok(stat) => {
                    self.news(ino, link.as_ref(), &stat, asked).await?;
                    self.recheck_names(ino, &stat).await
                }
                Err(e) if e.is(ErrorKind::NotFound) => self.missing(ino, asked).await,
                Err(e) if matches!(e.kind(), ErrorKind::Timeout | ErrorKind::Unavailable) => Ok(()),
                Err(e) => Err(e.context(&path)),
            }
        }
        .boxed()
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
            let path = self.pool_path_of(link.0, &link.1)?;
            let there = match self.ask(self.pool.stat(&path)).await {
                Ok(stat) => Some(stat),
                Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotDirectory) => None,
                Err(e) => return Err(e.context(path)),
            };
            match self.parted(ino, &link, there.as_ref(), asked) {
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

    /// Takes in attributes of an inode that the pool returned.
    async fn news(&self, ino: Ino, link: Option<&Link>, stat: &Stat, asked: QueryStamp) -> Result<()> {
        let node = self.node(ino)?;
        {
            let mut state = node.state.lock();
            if !self.still_holds(asked, &state) || state.record.file.is_dirty() {
                return Ok(());
            }
            if state.record.version.as_ref() == Some(&stat.version) {
                state.validated = Some(Instant::now());
                return Ok(());
            }
        }
        self.take_change(&node, link, stat, asked).await.map(drop)
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

    /// Notifies the kernel to forget what it has cached of an inode; `data`: the cached bytes too.
    pub fn tell_kernel_inode(&self, ino: Ino, data: bool) {
        if let Some(kernel) = self.kernel.get() {
            kernel.invalidate_inode(ino, data);
        }
    }

    /// Drops the content file that is kept for the next open through the kernel, and with it the descriptor.
    pub fn release_content(&self, ino: Ino) {
        if let Some(kernel) = self.kernel.get() {
            kernel.release_content(ino);
        }
    }

    /// Notifies the kernel to forget a name. One above a mounted view stays.
    pub fn tell_kernel_name(&self, parent: Ino, name: &[u8]) {
        if self.is_pinned_name(parent, name) {
            return;
        }
        if let Some(kernel) = self.kernel.get() {
            kernel.invalidate_name(parent, name);
        }
    }
}

impl Txn<'_> {
    /// Returns whether an answer of the pool on this inode counts.
    pub(super) fn believes(&mut self, ino: Ino, asked: QueryStamp) -> Result<bool> {
        let inner = self.inner();
        Ok(inner.still_holds(asked, self.state(ino)?))
    }
}
