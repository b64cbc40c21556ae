//! Makes one name of the pool equal to the overlay's.
//!
//! The next step of a name is remove, rename, link or create; or other names have to come first. If names wait for each
//! other in a circle, one of them is parked under a temporary name.

use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, FileKind, Result, Side};
use forebay_catalog::{InodeRecord, Link, NameRecord};
use futures::FutureExt;
use futures::future::BoxFuture;

use super::super::{Inner, Ino, Txn};
use super::attrs::FlushAttempt;

/// Steps that one name may take: more would be a loop.
const MAX_STEPS: u32 = 100_000;

/// Circles in which no name can be freed, because another flush frees one: more than this are no coincidence.
const MAX_STUCK: u32 = 1000;

/// How often a file is flushed before its last known name goes: its content, attributes that were set separately, and
/// what changed meanwhile.
const LAST_ATTEMPTS: u32 = 5;

/// What is to be done next for a name.
pub(super) enum NextStep {
    /// Other names come first.
    First(Vec<Link>),
    /// What was written to a file is flushed first: after this name is gone, no known name leads to the file.
    Content(Ino),
    Step(ReconcileStep),
}

/// One call to the pool.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReconcileStep {
    /// Remove what the pool has there.
    Remove { occupant: Ino },
    /// Move an object of the pool to this name; `occupant` is replaced.
    Rename { from: Link, moved: Ino, occupant: Option<Ino> },
    /// Give an object of the pool this name, too; `occupant` is removed first.
    Link { ino: Ino, existing: Link },
    /// Create what the pool does not have; `occupant`, a file, is replaced by a file.
    Create { ino: Ino, occupant: Option<Ino> },
}

/// Which of the names that wait for each other was freed.
enum Freed {
    /// The last name of the chain: it looks again by itself.
    Last,
    /// Another name of the chain: the names that wait for it look again from there on.
    Another,
    None,
}

/// A name that is being placed.
struct BlockedName {
    link: Link,
    /// The names that it waits for and that were not looked at yet.
    first: std::vec::IntoIter<Link>,
    looks: u32,
}

impl BlockedName {
    fn new(link: Link) -> Self {
        Self { link, first: Vec::new().into_iter(), looks: 0 }
    }
}

impl Inner {
    /// Makes what the pool has under a name equal to what the mount shows, after the names that come first.
    ///
    /// The chain of waiting names is a list, not recursive calls: a removed tree may have any depth.
    pub fn reconcile_name<'a>(self: &'a Arc<Self>, parent: Ino, name: &'a [u8]) -> BoxFuture<'a, Result<()>> {
        async move {
            let mut chain = vec![BlockedName::new((parent, name.into()))];
            let (mut stuck, mut looked) = (0, false);
            while let Some(last) = chain.last_mut() {
                let (parent, name) = last.link.clone();
                if let Some(link) = last.first.next() {
                    if chain.iter().all(|w| w.link != link) {
                        chain.push(BlockedName::new(link));
                        continue;
                    }
                    match self.break_cycle(&link, &chain).await? {
                        Freed::Last => {
                            if let Some(last) = chain.last_mut() {
                                last.first = Vec::new().into_iter();
                            }
                        }
                        Freed::Another => _ = chain.pop(),
                        // Another flush was faster: the waiting names may have nothing to wait for any more.
                        Freed::None if stuck < MAX_STUCK => {
                            stuck += 1;
                            chain.pop();
                            tokio::task::yield_now().await;
                        }
                        Freed::None => return Err(circle(&link)),
                    }
                    continue;
                }
                let record = self.catalog.name(parent, &name)?;
                if !record.differs() {
                    chain.pop();
                    continue;
                }
                last.looks += 1;
                if last.looks > MAX_STEPS {
                    let what = format!("{}: flushing does not end", name.escape_ascii());
                    return Err(Error::new(ErrorKind::Corrupt, Side::Cache, what));
                }
                let next = match self.resolve_doubt_around(parent, &name, &record).await {
                    Ok(true) => continue,
                    Ok(false) => self.next(parent, &name, &record),
                    Err(e) => Err(e),
                };
                let step = match next {
                    Ok(NextStep::Content(ino)) => self.flush_last(ino).await,
                    Ok(NextStep::Step(step)) => self.take_step(parent, &name, &record, step).await,
                    Ok(NextStep::First(names)) => {
                        last.first = names.into_iter();
                        Ok(())
                    }
                    Err(e) => Err(e),
                };
                match step {
                    // Another flush was faster, and the name has another record since: look again.
                    Err(e)
                        if matches!(e.kind(), ErrorKind::Stale | ErrorKind::NotFound)
                            && !self.catalog.name(parent, &name)?.is_as(&record) => {}
                    // Or another client removed the directory: what is newer in the overlay is created anew, the directory
                    // first.
                    Err(e) if is_news_of_parents(&e) && !looked => {
                        looked = true;
                        self.look_above(parent).await?;
                    }
                    other => other?,
                }
            }
            Ok(())
        }
        .boxed()
    }

    /// Frees one of the names that wait for each other, from `link` down to the end of the chain: one under which the
    /// pool has something else than the mount shows.
    ///
    /// A name under which the mount shows nothing is not freed: no object waits for its place. Each circle has another
    /// name: what waits for the names in a removed directory is the name of that directory, which another object takes.
    async fn break_cycle(self: &Arc<Self>, link: &Link, chain: &[BlockedName]) -> Result<Freed> {
        let from = chain.iter().position(|w| w.link == *link).unwrap_or(chain.len());
        for (at, waiting) in chain.iter().enumerate().skip(from).rev() {
            let (parent, name) = &waiting.link;
            let record = self.catalog.name(*parent, name)?;
            if let (Some(here), Some(occupant)) = (record.here_ino(), record.pool)
                && here != occupant
            {
                return Ok(match self.move_aside(&record, occupant, (*parent, name)).await? {
                    false => Freed::None,
                    true if at + 1 == chain.len() => Freed::Last,
                    true => Freed::Another,
                });
            }
        }
        Ok(Freed::None)
    }

    pub(super) fn next(&self, parent: Ino, name: &[u8], record: &NameRecord) -> Result<NextStep> {
        let above = self.unplaced_above(parent)?;
        if !above.is_empty() {
            return Ok(NextStep::First(above));
        }
        let mut occupant = None;
        if let Some(ino) = record.pool {
            match self.way_out(ino, parent, name)? {
                Some(names) => return Ok(NextStep::First(names)),
                None => occupant = Some((ino, self.record_of(ino)?)),
            }
        }
        if let Some((ino, record)) = &occupant
            && leads_to_unseen(record)
            && record.is_dirty()
        {
            return Ok(NextStep::Content(*ino));
        }
        let Some((ino, kind)) = record.here else {
            let occupant = record.pool.ok_or_else(|| corrupt(name))?;
            return Ok(NextStep::Step(ReconcileStep::Remove { occupant }));
        };
        let mover = self.record_of(ino)?;
        let occupant_is_dir = occupant.as_ref().is_some_and(|(_, r)| r.kind == FileKind::Directory);
        let must_clear = occupant.is_some() && (occupant_is_dir || kind == FileKind::Directory);
        let occupant = occupant.map(|(ino, _)| ino);
        if let (true, Some(occupant)) = (must_clear, occupant) {
            return Ok(NextStep::Step(ReconcileStep::Remove { occupant }));
        }
        let mut elsewhere = None;
        for (p, n) in &mover.pool_links {
            if self.catalog.name(*p, n)?.here_ino() != Some(ino) {
                elsewhere = Some((*p, n.clone()));
                break;
            }
        }
        if let Some(from) = elsewhere {
            return Ok(NextStep::Step(ReconcileStep::Rename { from, moved: ino, occupant }));
        }
        match (mover.pool_links.first(), occupant) {
            (Some(_), Some(occupant)) => Ok(NextStep::Step(ReconcileStep::Remove { occupant })),
            (Some(existing), None) => Ok(NextStep::Step(ReconcileStep::Link { ino, existing: existing.clone() })),
            (None, Some(occupant)) if kind != FileKind::File => Ok(NextStep::Step(ReconcileStep::Remove { occupant })),
            (None, occupant) => Ok(NextStep::Step(ReconcileStep::Create { ino, occupant })),
        }
    }

    /// Returns the names of the directories above whose place in the pool differs: they come first, from the top.
    fn unplaced_above(&self, dir: Ino) -> Result<Vec<Link>> {
        let mut unplaced = Vec::new();
        let mut at = dir;
        while at != Ino::ROOT {
            let link = self.node(at)?.state.lock().record.links.first().cloned();
            let Some((parent, name)) = link else { break };
            if self.catalog.name(parent, &name)?.differs() {
                unplaced.push((parent, name));
            }
            at = parent;
        }
        unplaced.reverse();
        Ok(unplaced)
    }

    /// Returns the names that come first before the pool's occupant of a name can be removed from it; `None`: none.
    fn way_out(&self, ino: Ino, parent: Ino, name: &[u8]) -> Result<Option<Vec<Link>>> {
        let occupant = self.record_of(ino)?;
        if occupant.links.is_empty() {
            if occupant.kind != FileKind::Directory {
                return Ok(None);
            }
            let mut inside = Vec::new();
            self.catalog.names(ino, |name, record| {
                if record.pool.is_some() {
                    inside.push((ino, name.into()));
                }
                Ok(true)
            })?;
            return Ok(Some(inside).filter(|i| !i.is_empty()));
        }
        let only_here = occupant.pool_links.iter().all(|(p, n)| (*p, &**n) == (parent, name));
        if !only_here {
            return Ok(None);
        }
        for (p, n) in &occupant.links {
            if self.catalog.name(*p, n)?.pool != Some(ino) {
                return Ok(Some(vec![(*p, n.clone())]));
            }
        }
        Ok(None)
    }

    /// Flushes what was written to a file, before the last known name of the file goes.
    async fn flush_last(self: &Arc<Self>, ino: Ino) -> Result<()> {
        self.ready_to_go(ino).await?;
        for _ in 0..LAST_ATTEMPTS {
            let attempt = self.flush_in_place(ino).await?;
            self.resolve_doubt(ino).await?;
            let mut txn = Txn::begin(self);
            // A program that reads it past the daemon keeps it dirty, although the pool has what was written.
            let is_uploaded = txn.state(ino)?.is_uploaded();
            let record = txn.record(ino)?;
            if !record.is_dirty() || !leads_to_unseen(record) {
                return Ok(());
            }
            let is_sent = is_uploaded && !record.dirty.any() && record.dirty_xattrs.is_empty();
            let is_conflict = attempt == FlushAttempt::Conflict;
            if !is_sent && !is_conflict {
                continue;
            }
            // After a conflict, it has no name in the mount under which ours could stay beside the other copy.
            record.unseen_links = 0;
            txn.reap(ino)?;
            txn.commit()?;
            if is_conflict {
                self.report_conflict(format!(
                    "{}: removed in the mount after it was written, and changed in the pool",
                    self.display(ino)
                ));
            }
            return Ok(());
        }
        let what = format!("{}: removed in the mount, and changes all the time while it is flushed", self.display(ino));
        Err(Error::new(ErrorKind::Busy, Side::Application, what))
    }

    /// Resolves the calls in doubt for the name, its directory, and the inodes that the mount shows and the pool has
    /// there. Returns whether there were any.
    async fn resolve_doubt_around(&self, parent: Ino, name: &[u8], record: &NameRecord) -> Result<bool> {
        let mut settled = self.resolve_doubt(parent).await?;
        for ino in [record.here_ino(), record.pool].into_iter().flatten() {
            settled |= self.resolve_doubt(ino).await?;
        }
        if !record.pending.is_empty() {
            self.resolve_doubt_of_name(parent, name).await?;
            settled = true;
        }
        Ok(settled)
    }
}

/// Whether the pool lacks a directory on the way to a name, or has something else there: another client removed or
/// replaced it.
pub(super) fn is_news_of_parents(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotDirectory)
}

/// Whether an inode has only one known name left in the pool, and its object has names that are not known: nothing
/// leads to the object any more when the known name goes.
pub(super) fn leads_to_unseen(record: &InodeRecord) -> bool {
    record.links.is_empty() && record.unseen_links > 0 && record.pool_links.len() == 1
}

fn circle(link: &Link) -> Error {
    Error::new(ErrorKind::Corrupt, Side::Cache, format!("{}: names wait for each other", link.1.escape_ascii()))
}

fn corrupt(name: &[u8]) -> Error {
    Error::new(ErrorKind::Corrupt, Side::Cache, format!("name {}", name.escape_ascii()))
}
