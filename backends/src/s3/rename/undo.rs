//! Undoing the rename of a directory that the server refuses for good.

use std::collections::VecDeque;

use bytes::Bytes;

use crate::store::moves::ShownMove;
use crate::{ErrorKind, Time};

use super::super::client::StoreRefusal;
use super::super::probe::TargetCondition;
use super::super::requests::ListedObject;
use super::notes::Move;
use super::{Bucket, Half, PAGE_KEYS};

/// Why a rename was not carried out.
pub(super) enum MoveFailure {
    /// Some keys may have been copied or moved.
    Unfinished(StoreRefusal),
    /// The server refuses the rename for good, and everything is at the source, as before.
    Undone(StoreRefusal),
}

impl From<StoreRefusal> for MoveFailure {
    fn from(refusal: StoreRefusal) -> Self {
        Self::Unfinished(refusal)
    }
}

impl Bucket {
    /// Moves a directory. If a refusal is final and nothing has left the source yet, the copies are removed again.
    pub(super) async fn move_directory(
        &self,
        what: &Move,
        since: Option<Time>,
        shown: &ShownMove,
    ) -> Result<(), MoveFailure> {
        let Err(refusal) = self.copy_and_remove(what, since, shown).await else { return Ok(()) };
        if !refusal.is_final() {
            return Err(refusal.into());
        }
        match self.undo(what, shown).await {
            Ok(true) => Err(MoveFailure::Undone(refusal)),
            Ok(false) => Err(refusal.into()),
            Err(error) => {
                tracing::warn!(from = what.from, to = what.to, %error, "a rename that is refused cannot be undone yet");
                Err(refusal.into())
            }
        }
    }

    /// Removes the copies from the target. Returns `false`, and changes nothing, if an object has left the source.
    async fn undo(&self, what: &Move, shown: &ShownMove) -> Result<bool, StoreRefusal> {
        if self.has_moved(what).await? {
            return Ok(false);
        }
        let directories = self.each_key(what, None, Half::Undo, shown).await?;
        self.remove_directories(what, None, Half::Undo, directories, shown).await?;
        self.forget_directory(&what.to);
        Ok(true)
    }

    /// Whether the target has a copy whose source is not there any more.
    async fn has_moved(&self, what: &Move) -> Result<bool, StoreRefusal> {
        // Both listings are in the order of the keys' bytes.
        let (mut sources, mut is_first, mut next) = (VecDeque::new(), true, None);
        let mut token = None;
        loop {
            let page = self.client.list(&what.to, false, token.as_deref(), PAGE_KEYS).await?;
            for ListedObject { key, .. } in page.objects {
                let rest = key.strip_prefix(&what.to).unwrap_or_default();
                if rest.is_empty() || rest.ends_with('/') {
                    continue;
                }
                loop {
                    while sources.front().is_some_and(|source: &String| source.as_str() < rest) {
                        sources.pop_front();
                    }
                    if !sources.is_empty() || (next.is_none() && !is_first) {
                        break;
                    }
                    let page = self.client.list(&what.from, false, next.as_deref(), PAGE_KEYS).await?;
                    let rests = page.objects.iter().filter_map(|source| source.key.strip_prefix(&what.from));
                    sources.extend(rests.map(str::to_owned));
                    (is_first, next) = (false, page.next);
                }
                let is_at_source = sources.front().is_some_and(|source| source == rest);
                if !is_at_source && self.client.head(&key).await?.is_some_and(|there| there.meta.copied.is_some()) {
                    return Ok(true);
                }
            }
            token = page.next;
            if token.is_none() {
                return Ok(false);
            }
        }
    }

    /// Removes a key of the target if it is a copy of the source.
    pub(super) async fn remove_copy(&self, what: &Move, from: &str, to: &str) -> Result<(), StoreRefusal> {
        let source = match self.client.head(from).await {
            // What cannot be looked at was not copied.
            Err(refusal) if refusal.is_final() => return Ok(()),
            source => source?,
        };
        let (Some(source), Some(copy)) = (source, self.client.head(to).await?) else { return Ok(()) };
        if source.is_anonymous() || !copy.is_copy_of(&source) {
            return Ok(());
        }
        let same = TargetCondition::Same(&copy);
        if what.replaces && to == what.to {
            // The empty directory that was there stays. It must not be taken for the source.
            let mut meta = copy.meta.clone();
            meta.copied = None;
            meta.touch(Time::now());
            return self.client.put(to, Bytes::new(), &meta, same.heeded(self.conditional.put)).await.map(drop);
        }
        match self.client.delete(to, same.heeded(self.conditional.delete)).await {
            // Another client changed it meanwhile.
            Err(refusal) if refusal.is(ErrorKind::Conflict) => Ok(()),
            answer => answer,
        }
    }
}
