//! Renames: copies on the server, then removals.
//!
//! A rename of a directory takes many requests, and even one of a file takes two. So a note of the rename is written
//! first, beside the root's keys, and removed when the rename is done. A daemon that attaches the bucket and finds
//! the note of an interrupted rename finishes it. It moves only source objects that, by the server's clock, were
//! written before the note; it replaces nothing that was written to the target after the note; and it removes a
//! source only if the target is a copy of it.
//!
//! The rename of a live process is left alone by other processes, until it is so old that it counts as abandoned.
//!
//! If the rename of a directory fails half-way, the process goes on with it in the background. Until it is finished, the
//! directory is neither here nor there: a `stat` of the target and further renames fail with `Busy`. If the server
//! refuses it for good before anything has left the source, the rename is undone instead.

mod notes;
mod undo;

use std::cmp::Reverse;
use std::sync::Arc;

use bytes::Bytes;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};

use crate::store::keys::KEY_MAX;
use crate::store::moves::ShownMove;
use crate::{ErrorKind, RenameMode, Result, Stat, Time};

use super::api::Condition;
use super::client::StoreRefusal;
use super::metadata::{Meta, Object};
use super::probe::TargetCondition;
use super::requests::ListedObject;
use super::{Bucket, StoreCall, StoredObject, upload};

use notes::{Move, finish_later, node};
use undo::MoveFailure;

pub(super) use notes::finish;

/// Keys that are moved concurrently.
const MOVED_AT_ONCE: usize = 16;
const PAGE_KEYS: usize = 1_000;
/// How often a copy is restarted because its source was changed meanwhile.
const COPY_TRIES: usize = 5;

#[derive(Debug, Clone, Copy)]
enum Half {
    Copy,
    Remove,
    /// Removes the copies.
    Undo,
}

/// Runs work on a bounded number of keys concurrently.
struct AtOnce<F>(FuturesUnordered<F>);

impl<F> Default for AtOnce<F> {
    fn default() -> Self {
        Self(FuturesUnordered::new())
    }
}

impl<F: Future<Output = Result<(), StoreRefusal>>> AtOnce<F> {
    /// Begins another piece of work as soon as there is room for it.
    async fn begin(&mut self, work: F) -> Result<(), StoreRefusal> {
        if self.0.len() >= MOVED_AT_ONCE
            && let Some(done) = self.0.next().await
            && let Err(refusal) = done
        {
            return self.wait(Some(refusal)).await;
        }
        self.0.push(work);
        Ok(())
    }

    /// Waits until all work is done.
    async fn end(mut self) -> Result<(), StoreRefusal> {
        self.wait(None).await
    }

    /// Waits for the rest also after a failure: the server may still carry out a request that is dropped. Of several
    /// failures, one that may pass counts.
    async fn wait(&mut self, mut failed: Option<StoreRefusal>) -> Result<(), StoreRefusal> {
        while let Some(done) = self.0.next().await {
            if let Err(refusal) = done
                && failed.as_ref().is_none_or(StoreRefusal::is_final)
            {
                failed = Some(refusal);
            }
        }
        failed.map_or(Ok(()), Err)
    }
}

pub(super) async fn rename(source: &StoreCall<'_>, target: &StoreCall<'_>, mode: RenameMode) -> Result<Stat> {
    let bucket = source.bucket;
    if source.path.is_root() || target.path.is_root() {
        return Err(target.error(ErrorKind::Busy));
    }
    for call in [source, target] {
        call.not_moving()?;
    }
    let found = source.find().await?;
    target.parent().await?;
    let there = bucket.find(&target.place).await.map_err(|refusal| target.refused(refusal))?;
    if mode == RenameMode::NoReplace && !matches!(there, StoredObject::Nothing) {
        return Err(target.error(ErrorKind::Exists));
    }
    let from_directory = matches!(found, StoredObject::Directory(_));
    if from_directory && target.path.starts_with(source.path) && target.path != source.path {
        return Err(target.error(ErrorKind::InvalidInput));
    }
    match (&found, &there) {
        _ if source.path == target.path => {
            return source.stat(&found).ok_or_else(|| source.error(ErrorKind::NotFound));
        }
        (StoredObject::Directory(_), StoredObject::Object(_)) => return Err(target.error(ErrorKind::NotDirectory)),
        (StoredObject::Object(_), StoredObject::Directory(_)) => {
            // As in rename(2), the error for a directory that is not empty differs from that for a directory at the
            // target.
            let kind = if source.path.starts_with(target.path) { ErrorKind::NotEmpty } else { ErrorKind::IsDirectory };
            return Err(target.error(kind));
        }
        (StoredObject::Directory(_), StoredObject::Directory(_)) => {
            let directory = target.place.directory();
            let below =
                bucket.client.list(&directory, false, None, 2).await.map_err(|refusal| target.refused(refusal))?;
            if below.objects.iter().any(|listed| listed.key != directory || listed.size > 0) {
                return Err(target.error(ErrorKind::NotEmpty));
            }
        }
        _ => {}
    }
    if target.place.shadowed {
        return Err(target.error(ErrorKind::InvalidInput));
    }
    let (from, to) = match from_directory {
        true => (source.place.directory(), target.place.directory()),
        false => (source.place.key.clone(), target.place.key.clone()),
    };
    if from_directory {
        bucket.fits(&from, &to).await.map_err(|refusal| target.refused(refusal))?;
    }
    let what = Move {
        from,
        to,
        directory: from_directory,
        absent: matches!(there, StoredObject::Nothing) && mode == RenameMode::NoReplace,
        replaces: matches!(there, StoredObject::Directory(_)),
        write: match &found {
            StoredObject::Object(object) | StoredObject::Directory(Some(object)) => object.meta.write.clone(),
            StoredObject::Directory(None) | StoredObject::Nothing => None,
        },
        node: node(),
        pid: std::process::id().cast_signed(),
        since_secs: Time::now().secs,
    };
    let absent = what.absent;
    let replaced = if let StoredObject::Object(object) = there { Some(object) } else { None };
    let bucket_too = Arc::clone(bucket);
    // The caller may be gone before the rename is done, and a half-done rename must not stay.
    let work = tokio::spawn(async move { bucket_too.begin(what, replaced).await }.boxed());
    let done = work.await.unwrap_or_else(|_| Err(StoreRefusal::local(ErrorKind::Unavailable, "it was stopped".into())));
    bucket.forget_directory(&source.place.directory());
    done.map_err(|refusal| match refusal.is(ErrorKind::Conflict) {
        true if absent => target.error(ErrorKind::Exists),
        true => target.error(ErrorKind::Busy),
        false => target.refused(refusal),
    })?;
    let now = target.find().await?;
    target.stat(&now).ok_or_else(|| target.error(ErrorKind::NotFound))
}

impl Bucket {
    /// Fails with `NameTooLong` if a key below a directory would be too long below another one.
    async fn fits(&self, from: &str, to: &str) -> Result<(), StoreRefusal> {
        if to.len() <= from.len() {
            return Ok(());
        }
        let mut token = None;
        loop {
            let page = self.client.list(from, false, token.as_deref(), PAGE_KEYS).await?;
            for ListedObject { key, .. } in page.objects {
                let rest = key.strip_prefix(from).unwrap_or_default();
                // A path has no slash at its end, and is shorter than the longest key.
                let slash = usize::from(rest.is_empty() || rest.ends_with('/'));
                if to.len() + rest.len() >= KEY_MAX + slash {
                    return Err(StoreRefusal::local(ErrorKind::NameTooLong, format!("{key} would be too long there")));
                }
            }
            token = page.next;
            if token.is_none() {
                return Ok(());
            }
        }
    }

    async fn begin(self: &Arc<Self>, what: Move, replaced: Option<Object>) -> Result<(), StoreRefusal> {
        let note = format!("{}{:032x}", self.journal(), rand::random::<u128>());
        let text =
            serde_json::to_vec(&what).map_err(|e| StoreRefusal::local(ErrorKind::InvalidInput, e.to_string()))?;
        if let Err(refusal) = self.client.put(&note, Bytes::from(text), &Meta::scratch(), Condition::None).await {
            if refusal.retries > 0 {
                // It may have arrived all the same.
                self.remove_note(note).await;
            }
            return Err(refusal);
        }
        let open = what.directory.then(|| self.moves.open(&what.from, &what.to));
        let done = self.carry_out(&what, replaced.as_ref(), None).await;
        match (done, open) {
            (Err(MoveFailure::Unfinished(refusal)), Some(open)) => {
                open.failed(refusal.to_string());
                tokio::spawn(finish_later(Arc::downgrade(self), note, what, open).boxed());
                Err(refusal)
            }
            // A file that was not moved is still at the source: there is nothing to finish.
            (done, _open) => {
                self.remove_note(note).await;
                done.map_err(|(MoveFailure::Unfinished(refusal) | MoveFailure::Undone(refusal))| refusal)
            }
        }
    }

    /// `since`: this rename was begun before, at that time of the server.
    async fn carry_out(&self, what: &Move, replaced: Option<&Object>, since: Option<Time>) -> Result<(), MoveFailure> {
        let below_root = |key: &str| key.strip_prefix(&self.root).unwrap_or(key).to_owned();
        let shown = &self.moves.begin(&below_root(&what.from), &below_root(&what.to));
        if !what.directory {
            let wanted = match replaced {
                Some(object) => TargetCondition::Same(object),
                None if what.absent || since.is_none() => TargetCondition::Absent,
                None => TargetCondition::Anything,
            };
            self.copy_one((&what.from, &what.to), since, wanted, false).await?;
            self.keep_directory_of(&what.from).await?;
            return Ok(self.remove_copied(&what.from, &what.to, since).await?);
        }
        self.move_directory(what, since, shown).await
    }

    async fn copy_and_remove(&self, what: &Move, since: Option<Time>, shown: &ShownMove) -> Result<(), StoreRefusal> {
        self.each_key(what, since, Half::Copy, shown).await?;
        shown.all_copied();
        self.keep_directory_of(&what.from).await?;
        let directories = self.each_key(what, since, Half::Remove, shown).await?;
        self.remove_directories(what, since, Half::Remove, directories, shown).await
    }

    /// Removes the deepest directories first: versitygw forgets that it must remove a directory while another request
    /// empties it. The renamed directory is removed last, so that it stays visible until then.
    async fn remove_directories(
        &self,
        what: &Move,
        since: Option<Time>,
        half: Half,
        mut all: Vec<ListedObject>,
        shown: &ShownMove,
    ) -> Result<(), StoreRefusal> {
        let depth = |listed: &ListedObject| listed.key.matches('/').count();
        all.sort_unstable_by_key(|listed| Reverse(depth(listed)));
        for level in all.chunk_by(|one, next| depth(one) == depth(next)) {
            let mut at_work = AtOnce::default();
            for ListedObject { key: from, last_modified, .. } in level {
                let to = format!("{}{}", what.to, from.strip_prefix(&what.from).unwrap_or_default());
                // `last_modified` is from before the directory was emptied.
                let since = since.filter(|since| last_modified > since);
                let work = async move {
                    if matches!(half, Half::Undo) {
                        return self.remove_copy(what, from, &to).await;
                    }
                    shown.removed();
                    self.remove_copied(from, &to, since).await
                };
                at_work.begin(work).await?;
            }
            at_work.end().await?;
        }
        match half {
            Half::Undo => self.remove_copy(what, &what.from, &what.to).await,
            Half::Copy | Half::Remove => self.remove_copied(&what.from, &what.to, since).await,
        }
    }

    /// Copies one object; the copy is equal to the original, including its version. `below`: the object is below a
    /// directory that is renamed.
    async fn copy_one(
        &self,
        (from, to): (&str, &str),
        since: Option<Time>,
        wanted: TargetCondition<'_>,
        below: bool,
    ) -> Result<(), StoreRefusal> {
        let mut last = None;
        for _ in 0..COPY_TRIES {
            // A missing source was moved by an earlier try, or removed by another client.
            let Some(source) = self.client.head(from).await? else { return Ok(()) };
            if let Some(since) = since {
                let there = self.client.head(to).await?;
                let newer = there.is_some_and(|there| there.last_modified > since || there.is_copy_of(&source));
                if newer || source.last_modified > since {
                    return Ok(());
                }
            }
            let meta = source.copied();
            let onto = upload::CopyTarget { key: to, meta: &meta, conditional: &self.conditional };
            match onto.copy(&self.client, from, &source, wanted).await {
                Err(refusal) if refusal.is(ErrorKind::NotFound) => {}
                Err(refusal) if refusal.is(ErrorKind::Conflict) => {
                    // The source or the target was changed, by an earlier try or by another client.
                    match self.client.head(to).await? {
                        Some(there) if !source.is_anonymous() && there.is_copy_of(&source) => return Ok(()),
                        // Another client's object at the target stays, and so does the source.
                        Some(_) if below => return Ok(()),
                        Some(_) if matches!(wanted, TargetCondition::Absent | TargetCondition::Same(_)) => {
                            return Err(refusal);
                        }
                        _ => last = Some(refusal),
                    }
                }
                answer => return answer.map(drop),
            }
        }
        last.map_or(Ok(()), Err)
    }

    async fn remove_copied(&self, from: &str, to: &str, since: Option<Time>) -> Result<(), StoreRefusal> {
        let (Some(source), Some(copy)) = tokio::try_join!(self.client.head(from), self.client.head(to))? else {
            return Ok(());
        };
        if since.is_some() && source.is_anonymous() {
            // What is at the target may be a copy of another object.
            return Ok(());
        }
        let directory = from.ends_with('/') && source.size == 0;
        let mut others = since.is_some_and(|since| source.last_modified > since);
        let mut same = copy.is_copy_of(&source);
        if directory {
            // The directory's time may be that of the last change in it, and its name alone identifies it.
            others &= !same;
            same = true;
        }
        if !others && same {
            let still = TargetCondition::Same(&source).heeded(self.conditional.delete);
            self.client.delete(from, still).await?;
        }
        Ok(())
    }

    /// Carries out one half of the rename of a directory, or undoes the first half, key by key. Returns the directories,
    /// which the caller removes.
    async fn each_key(
        &self,
        what: &Move,
        since: Option<Time>,
        half: Half,
        shown: &ShownMove,
    ) -> Result<Vec<ListedObject>, StoreRefusal> {
        let (mut token, mut directories) = (None, Vec::new());
        loop {
            let page = self.client.list(&what.from, false, token.as_deref(), PAGE_KEYS).await?;
            let mut at_work = AtOnce::default();
            for listed in page.objects {
                let Some(rest) = listed.key.strip_prefix(&what.from) else { continue };
                let to = format!("{}{rest}", what.to);
                if matches!(half, Half::Remove | Half::Undo) && listed.key.ends_with('/') {
                    if listed.key != what.from {
                        directories.push(listed);
                    }
                    continue;
                }
                let from = listed.key;
                let work = async move {
                    match half {
                        Half::Copy => {
                            self.copy_one((&from, &to), since, wanted_below(&from, what), true).await?;
                            shown.copied();
                        }
                        Half::Remove => {
                            self.remove_copied(&from, &to, since).await?;
                            shown.removed();
                        }
                        Half::Undo => self.remove_copy(what, &from, &to).await?,
                    }
                    Ok(())
                };
                at_work.begin(work).await?;
            }
            at_work.end().await?;
            token = page.next;
            if token.is_none() {
                return Ok(directories);
            }
        }
    }
}

/// An object below a directory that is renamed must not replace another one; the directory's own object may.
fn wanted_below(from: &str, what: &Move) -> TargetCondition<'static> {
    if from == what.from { TargetCondition::Anything } else { TargetCondition::Absent }
}
