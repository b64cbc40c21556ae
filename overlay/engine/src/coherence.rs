//! What the pool has, brought into the catalog: single names, whole directories, and the news that somebody
//! else changed something.
//!
//! The pool's answer on an inode counts only if none of our own calls that change the inode, and no move of a
//! directory, ran while the pool was asked (`Asked`). Else the answer may be older than our change. A fetch that fails
//! because of such a call waits for its end and asks again.

mod grown;
mod import;
mod listing;
mod watch;
use std::time::{Duration, Instant};

use forebay_backends::{
    Error, ErrorKind, FileKind, PoolPath, RESERVED_PREFIX, Result, Side, Stat, Version, is_file_name,
};
use forebay_catalog::{Link, Listing};
use forebay_policy::Consistency;
use forebay_system::clock::unix_now;
use parking_lot::Mutex;
use tokio::sync::Notify;

use self::watch::Watched;
use super::{Inner, Ino, Txn};
use crate::node::{Node, NodeState};
pub(crate) use grown::Growth;
pub(super) use import::note_object;
pub(crate) use watch::{PoolChange, Watches};

/// Names that are asked for one by one before a directory is listed whole.
const SINGLE_LOOKUPS: u32 = 4;
/// The same where a listing takes a request for each name.
const SINGLE_LOOKUPS_DEAR: u32 = 32;

/// How long the pool may take to confirm what is here: then what is here is shown, confirmed or not.
const CONFIRM_WITHIN: Duration = Duration::from_secs(1);

/// Whether a name may come into the catalog from the pool, where it was listed or is looked up. This is the one place
/// that decides it: pools tell what their servers say.
pub(super) fn may_enter(name: &[u8]) -> bool {
    is_file_name(name) && !name.starts_with(RESERVED_PREFIX)
}

/// Whether the pool answers. While it does not, calls fail at once instead of each waiting for its deadline,
/// and one task in the background finds out when it answers again.
#[derive(Debug, Default)]
pub(crate) struct Health {
    down: Mutex<Option<String>>,
    /// Rung when the pool stops answering.
    fell: Notify,
    /// When it last took too long to confirm something.
    slow: Mutex<Option<Instant>>,
}

impl Health {
    /// Why the pool counts as not answering.
    pub fn why_down(&self) -> Option<String> {
        self.down.lock().clone()
    }

    /// Returns once the pool counts as not answering. For one task.
    pub async fn until_down(&self) {
        while self.why_down().is_none() {
            self.fell.notified().await;
        }
    }

    /// Whether it was just too slow to confirm something: what is here is shown without asking again.
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
                    tracing::warn!(error = %e, "the pool does not answer; what is local goes on");
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

/// Flushes of one file that a question to the pool waits for.
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
    /// None: ask.
    Now,
}

/// The moment at which the pool was asked: an answer is believed only if nothing of ours changed the object
/// in the pool meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Asked {
    /// Calls of ours that change the object, or for a directory its names: begun and ended by then.
    calls: (u64, u64),
    /// Those that move directories, and all paths below them.
    moves: (u64, u64),
}

impl Asked {
    /// Nothing of ours was under way.
    pub fn is_quiet(self) -> bool {
        self.calls.0 == self.calls.1 && self.moves.0 == self.moves.1
    }
}

impl Inner {
    /// The present moment, for a question about an inode.
    pub fn asked(&self, state: &NodeState) -> Asked {
        Asked { calls: state.pool_calls, moves: self.dir_moves() }
    }

    /// Whether an answer on an inode that was asked for at that moment tells how it is now.
    pub fn still_holds(&self, asked: Asked, state: &NodeState) -> bool {
        asked.is_quiet() && asked == self.asked(state)
    }

    /// Makes a call to the pool, unless it is known not to answer.
    pub async fn ask<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        // Without a time between questions every call asks.
        if let Some(why) = self.health.why_down().filter(|_| !self.policy.pool_retry.is_zero()) {
            return Err(Error::new(ErrorKind::Unavailable, Side::Pool, why));
        }
        let result = call.await;
        self.health.note(&result);
        result
    }

    /// Asks the pool about an inode, under the path where it is known. Where it is not there, a flush is moving it, or
    /// did and was never answered: then it is looked for, and asked about again.
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

    /// Whether the pool answered so because our own flush moved a file, or made another version of it by its names or
    /// attributes.
    fn is_own_change(&self, node: &Node, asked: Asked, error: &Error, left: &mut u32) -> bool {
        // Something else may be where it was: of another kind, too.
        let changed =
            error.side() == Side::Pool && !matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unavailable);
        let ours = changed && *left > 0 && !self.still_holds(asked, &node.state.lock());
        *left -= u32::from(ours);
        ours
    }

    /// What is known of a file when its bytes are asked for: for [`Inner::ask_again`].
    pub fn known(&self, node: &Node) -> (Asked, Option<Version>) {
        let state = node.state.lock();
        (self.asked(&state), state.record.version.clone())
    }

    /// Whether an answer that is an error is another one the next time: it is ours to blame, or the file has another
    /// version by now, of which the same inode is to be read.
    pub async fn ask_again(
        &self,
        node: &Node,
        known: &(Asked, Option<Version>),
        error: &Error,
        left: &mut u32,
    ) -> bool {
        let (asked, version) = known;
        if self.is_own_change(node, *asked, error, left) {
            self.own_change(node).await;
            return true;
        }
        // A flush of attributes whose answer was lost made another version of the same bytes, or another client
        // appended to it.
        if *left == 0 || !error.is(ErrorKind::Stale) || node.state.lock().record.file.is_dirty() {
            return false;
        }
        *left -= 1;
        self.revalidate(node.ino, Age::Now).await.is_ok() && node.state.lock().record.version != *version
    }

    /// Waits until our own changes of a file ended, and it is known what they made of it.
    async fn own_change(&self, node: &Node) {
        drop(self.flusher.moves.read().await);
        drop(node.flush.lock().await);
    }

    /// The inode that a name stands for now.
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
                // A look at an object of several names may find that this one is another's by now.
                Ok(()) if self.has_link(ino, parent, name)? => return Ok(Some(ino)),
                Ok(()) => return Ok(self.catalog.name(parent, name)?.here_ino()),
                Err(e) if e.is(ErrorKind::Stale) => return Ok(self.catalog.name(parent, name)?.here_ino()),
                Err(e) => return Err(e),
            }
        }
        if !record.is_empty() {
            // Removed or moved here, or of ours and unanswered: not what the pool has there now.
            return Ok(None);
        }
        self.find_in_pool(&dir, name).await
    }

    /// The same as [`Inner::revalidate`] for who asks by a name. Of several names of an object each may have become
    /// another's, and what is found under one says nothing of the rest: that one is asked about.
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
            let at = dir.and_then(|dir| dir.state.lock().listed_at);
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

    /// An inode that is gone has no names.
    fn has_link(&self, ino: Ino, parent: Ino, name: &[u8]) -> Result<bool> {
        match self.node(ino) {
            Ok(node) => Ok(node.state.lock().record.links.iter().any(|(p, n)| (*p, &**n) == (parent, name))),
            Err(e) if e.is(ErrorKind::Stale) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Whether the version of a directory, which was confirmed since that moment or within `ttl`, says that the catalog
    /// has all its names. While our own calls change the directory its version says nothing of what others change.
    fn lists_all(&self, state: &NodeState, since: Asked, ttl: Duration) -> bool {
        let confirmed = self.still_holds(since, state) || state.validated.is_some_and(|at| at.elapsed() < ttl);
        confirmed && state.record.listing == Listing::Complete(state.record.version.clone())
    }

    /// Forgets that a name was not in the pool, unless that was learned as lately as `age` asks.
    pub async fn forget_absence(&self, dir: Ino, name: &[u8], age: Age) -> Result<()> {
        self.revalidate(dir, age).await?;
        let node = self.node(dir)?;
        let mut state = node.state.lock();
        state.negative.remove(name);
        if !self.pool.capabilities().directory_versions {
            state.listed_at = None;
        }
        Ok(())
    }

    /// A name that the catalog does not have.
    async fn find_in_pool(&self, dir: &Node, name: &[u8]) -> Result<Option<Ino>> {
        if !dir.state.lock().record.in_pool() && dir.ino != Ino::ROOT {
            return Ok(None);
        }
        let ttl = self.policy_of(dir).metadata_ttl;
        let asked = self.asked(&dir.state.lock());
        if matches!(dir.state.lock().record.listing, Listing::Complete(_)) {
            self.revalidate(dir.ino, Age::Metadata).await?;
        }
        let list_whole = {
            let mut state = dir.state.lock();
            if self.lists_all(&state, asked, ttl) {
                return Ok(None);
            }
            // Where the directory itself does not tell, what was listed holds for as long as what was asked for.
            let tells = self.pool.capabilities().directory_versions && self.still_holds(asked, &state);
            let listed = !tells
                && matches!(state.record.listing, Listing::Complete(_))
                && state.listed_at.is_some_and(|at| at.elapsed() < ttl);
            if listed {
                return Ok(None);
            }
            if state.negative.get(name).is_some_and(|at| at.elapsed() < ttl) {
                return Ok(None);
            }
            state.single_lookups += 1;
            let dear = self.pool.capabilities().listings_ask_each;
            let enough = if dear { SINGLE_LOOKUPS_DEAR } else { SINGLE_LOOKUPS };
            // What was listed too long ago is listed again where nothing tells that it still holds.
            let partly = state.record.listing == Listing::Partly || !self.pool.capabilities().directory_versions;
            state.single_lookups > enough && partly
        };
        if list_whole {
            match self.list(dir.ino, None).await {
                Ok(()) => return Ok(self.catalog.name(dir.ino, name)?.here_ino()),
                // A pool that lists no names still finds them.
                Err(error) if error.is(ErrorKind::Unsupported) => dir.state.lock().single_lookups = 0,
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
                    // Where all names were known once, one that was not among them is taken for new.
                    let complete = matches!(dir.state.lock().record.listing, Listing::Complete(_));
                    return if complete { Ok(None) } else { Err(e.context(&path)) };
                }
                Err(e) => return Err(e.context(&path)),
            }
            tokio::task::yield_now().await;
        }
    }

    /// The pool does not have a name, by this answer. Whether it may be believed.
    fn note_absent(&self, dir: &Node, name: &[u8], watched: &Watched<'_>) -> bool {
        let mut state = dir.state.lock();
        let holds = watched.holds(name);
        if holds {
            state.note_absent(name);
        }
        holds
    }

    /// Asks the pool whether what the catalog says of an inode still holds, if the last answer is older than
    /// allowed. While the pool does not answer, what is known stays.
    ///
    /// # Errors
    /// `Stale` where the name now stands for something else, or for nothing.
    pub async fn revalidate(&self, ino: Ino, age: Age) -> Result<()> {
        let node = self.node(ino)?;
        let policy = self.policy_of(&node);
        // Who leased a file asked for this version of it: it is confirmed like names are, not at every open.
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
            let able = opens && self.pool.capabilities().versions_alone;
            let known = able.then(|| state.record.version.clone()).flatten();
            (self.asked(&state), state.record.pool_link().cloned(), known)
        };
        if matches!(age, Age::Metadata | Age::Since(_)) && self.listed_since(&node, allowed) {
            return Ok(());
        }
        if matches!(age, Age::Metadata | Age::Open) && !asked.is_quiet() {
            // Our own call is changing it: no answer would be believed, and what is here is what was sent.
            return Ok(());
        }
        if asked.is_quiet() {
            match self.resolve_doubt_of_names(ino).await {
                Ok(false) => {}
                Err(e) if !matches!(e.kind(), ErrorKind::Timeout | ErrorKind::Unavailable) => return Err(e),
                _ => return Ok(()),
            }
        }
        let path = match self.pool_path(ino) {
            Err(e) if e.is(ErrorKind::NotFound) => return self.missing(ino, asked).await,
            // What is there now is asked, whatever it is.
            path => path?.of_object(None),
        };
        if age != Age::Now && self.health.is_slow() {
            return Ok(());
        }
        if let Some(version) = known {
            match tokio::time::timeout(CONFIRM_WITHIN, self.ask(self.pool.still_has(&path, &version))).await {
                // What its name stands for is asked as often as ever: this is no answer to that.
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

    /// Where the pool counts fewer names of an object than are known, others took some away or gave them to something
    /// else: all are looked at.
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
                // Of the name that was asked about, the first look said so.
                Err(e) if e.is(ErrorKind::Stale) => {}
                other => other?,
            }
        }
        Ok(())
    }

    /// Whether the listing of its directory confirmed an inode within `age`.
    fn listed_since(&self, node: &Node, age: Duration) -> bool {
        let parent = {
            let state = node.state.lock();
            // Where it was moved to here it was not listed.
            state.record.links.first().filter(|link| state.record.pool_links.contains(link)).map(|(parent, _)| *parent)
        };
        let Some(dir) = parent.and_then(|p| self.table.peek(p)) else { return false };
        let state = dir.state.lock();
        state.listed_at.is_some_and(|at| at.elapsed() < age)
    }

    /// The pool's attributes of an inode have arrived.
    async fn news(&self, ino: Ino, link: Option<&Link>, stat: &Stat, asked: Asked) -> Result<()> {
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
                format!("a name of {} bytes; the pool takes at most {max}", name.len()),
            ));
        }
        Ok(())
    }

    /// Tells the kernel to forget what it knows of an inode; `data`: the cached bytes too.
    pub fn tell_kernel_inode(&self, ino: Ino, data: bool) {
        if let Some(kernel) = self.kernel.get() {
            kernel.invalidate_inode(ino, data);
        }
    }

    /// What is kept for the next open of a file by way of the kernel goes, and with it the descriptor.
    pub fn release_content(&self, ino: Ino) {
        if let Some(kernel) = self.kernel.get() {
            kernel.release_content(ino);
        }
    }

    pub fn tell_kernel_name(&self, parent: Ino, name: &[u8]) {
        if let Some(kernel) = self.kernel.get() {
            kernel.invalidate_name(parent, name);
        }
    }
}

impl Txn<'_> {
    /// Whether an answer of the pool on this inode may be believed.
    pub(super) fn believes(&mut self, ino: Ino, asked: Asked) -> Result<bool> {
        let inner = self.inner();
        Ok(inner.still_holds(asked, self.state(ino)?))
    }
}
