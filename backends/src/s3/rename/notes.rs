//! Notes of renames, and what is finished from them: interrupted renames at the attach, and those that failed half-way in
//! the background.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::FutureExt;
use serde::{Deserialize, Serialize};

use crate::store::keys::{KEY_MAX, is_reserved, is_unspeakable};
use crate::store::moves::OpenMove;
use crate::unfinished::is_alive;
use crate::{ErrorKind, RESERVED_PREFIX, Result, Time};

use super::super::api::Condition;
use super::super::client::StoreRefusal;
use super::super::requests::ListedObject;
use super::undo::MoveFailure;
use super::{Bucket, PAGE_KEYS};

/// A rename that another node began so long ago counts as abandoned.
const ABANDONED_AFTER: Duration = Duration::from_secs(15 * 60);
/// How long an attach waits for the interrupted renames.
const FINISHED_WITHIN: Duration = Duration::from_secs(20);
/// The longest note that is read: two keys and a few numbers are much shorter.
const NOTE_BYTES_MAX: u64 = 64 << 10;
/// The pauses before a rename that failed half-way is tried again.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(5 * 60);

/// The content of a note.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Move {
    pub(super) from: String,
    pub(super) to: String,
    /// The source is all keys that begin with `from`, not the key `from` alone.
    pub(super) directory: bool,
    /// The target did not exist.
    pub(super) absent: bool,
    /// An empty directory was at the target.
    #[serde(default)]
    pub(super) replaces: bool,
    /// The write number of the source. The server's clock ticks in seconds, so a new object may get the same name at
    /// the same time.
    pub(super) write: Option<String>,
    pub(super) node: String,
    pub(super) pid: i32,
    pub(super) since_secs: i64,
}

/// A rename that this process has taken over from its note.
struct NotedMove {
    note: String,
    what: Move,
    /// The time of the note, by the server's clock.
    since: Time,
    /// For a directory.
    open: Option<OpenMove>,
}

impl Move {
    /// Whether a pool below `root` can have noted this: whoever can write the note may have no rights outside of the
    /// pool.
    fn is_below(&self, root: &str) -> bool {
        let is_own = |key: &str| {
            key.strip_prefix(root)
                .is_some_and(|rest| !rest.is_empty() && !rest.split('/').any(is_reserved) && !is_unspeakable(rest))
                && key.len() <= KEY_MAX
                && (key.ends_with('/') || !self.directory)
        };
        is_own(&self.from) && is_own(&self.to) && !(self.directory && self.to.starts_with(&self.from))
    }

    /// Whether the process that noted it does not carry it out any more.
    fn is_abandoned(&self) -> bool {
        let age = Time::now().secs.saturating_sub(self.since_secs);
        let is_dead = self.node == node() && !is_alive(self.pid);
        is_dead || age >= ABANDONED_AFTER.as_secs() as i64
    }
}

pub(super) fn node() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

impl Bucket {
    pub(super) fn journal(&self) -> String {
        format!("{}{}rename-", self.root, String::from_utf8_lossy(RESERVED_PREFIX))
    }

    /// Removes the note of a rename that is over; in the background, if the server does not answer.
    pub(super) async fn remove_note(self: &Arc<Self>, note: String) {
        let Err(refusal) = self.client.delete(&note, Condition::None).await else { return };
        tracing::warn!(note, error = %refusal, "the note of a rename that is over is still there");
        let bucket = Arc::downgrade(self);
        let task = async move {
            let mut pause = FIRST_PAUSE;
            loop {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
                let Some(bucket) = bucket.upgrade() else { return };
                if bucket.client.delete(&note, Condition::None).await.is_ok() {
                    return;
                }
            }
        };
        tokio::spawn(task.boxed());
    }

    /// Takes over the interrupted renames.
    async fn abandoned_moves(&self) -> Result<Vec<NotedMove>, StoreRefusal> {
        let (mut token, mut found) = (None, Vec::new());
        loop {
            let page = self.client.list(&self.journal(), false, token.as_deref(), PAGE_KEYS).await?;
            for note in page.objects {
                match self.read_note(&note).await {
                    Ok(Some(what)) if what.is_abandoned() => {
                        let open = what.directory.then(|| self.moves.open(&what.from, &what.to));
                        found.push(NotedMove { note: note.key, what, since: note.last_modified, open });
                    }
                    Ok(_) => {}
                    Err(refusal) => {
                        let error = refusal.into_error(format!("read the note of a rename, {}", note.key));
                        tracing::warn!(%error, "it is tried again when the bucket is attached");
                    }
                }
            }
            token = page.next;
            if token.is_none() {
                return Ok(found);
            }
        }
    }

    /// `None` if there is no note any more, or if it cannot be one of a pool of this bucket.
    async fn read_note(&self, note: &ListedObject) -> Result<Option<Move>, StoreRefusal> {
        if !(1..=NOTE_BYTES_MAX).contains(&note.size) {
            return Ok(None);
        }
        let text = match self.client.get(&note.key, &note.etag, 0..note.size).await {
            Ok((_, text)) => text,
            // Another daemon is working on it.
            Err(refusal) if refusal.is(ErrorKind::NotFound) || refusal.is(ErrorKind::Conflict) => return Ok(None),
            Err(refusal) => return Err(refusal),
        };
        match serde_json::from_slice::<Move>(&text) {
            Ok(what) if what.is_below(&self.root) => Ok(Some(what)),
            Ok(what) => {
                let Move { from, to, .. } = what;
                tracing::warn!(note = note.key, from, to, "this rename is none of this pool; its note is left alone");
                Ok(None)
            }
            Err(error) => {
                tracing::warn!(note = note.key, %error, "a rename that was written down cannot be read; it is left alone");
                Ok(None)
            }
        }
    }

    /// Finishes a rename that was begun at `since`, or undoes it if the server refuses it for good.
    async fn finish(&self, note: &str, what: &Move, since: Time) -> Result<(), StoreRefusal> {
        tracing::info!(from = what.from, to = what.to, "finishing a rename that was cut off");
        let source = self.client.head(&what.from).await?;
        let is_another = source.is_some_and(|source| what.write.is_some() && source.meta.write != what.write);
        if !is_another {
            match self.carry_out(what, None, Some(since)).await {
                Ok(()) => {}
                Err(MoveFailure::Undone(refusal)) => {
                    tracing::warn!(from = what.from, to = what.to, error = %refusal, "a rename that was cut off is undone");
                }
                Err(MoveFailure::Unfinished(refusal)) => return Err(refusal),
            }
        }
        self.client.delete(note, Condition::None).await
    }
}

/// Tries again and again to finish the rename of a directory that failed half-way, until it is done, or the pool is gone.
pub(super) async fn finish_later(bucket: Weak<Bucket>, note: String, what: Move, open: OpenMove) {
    let mut pause = FIRST_PAUSE;
    loop {
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
        let Some(bucket) = bucket.upgrade() else { return };
        let finished = async {
            match bucket.client.head(&note).await? {
                Some(found) => bucket.finish(&note, &what, found.last_modified).await,
                // An answer to HEAD does not say whether it is the bucket that is missing.
                None => match bucket.client.list(&note, false, None, 1).await?.objects.is_empty() {
                    // Another node has finished the rename.
                    true => Ok(()),
                    false => {
                        Err(StoreRefusal::local(ErrorKind::Unavailable, "its note was missing for a moment".into()))
                    }
                },
            }
        };
        let finished = finished.await;
        bucket.forget_directory(&what.from);
        match finished {
            Ok(()) => return,
            Err(refusal) => {
                open.failed(refusal.to_string());
                tracing::warn!(from = what.from, to = what.to, error = %refusal, "a rename is not finished yet");
            }
        }
    }
}

/// Finishes the interrupted renames within a short time; the rest in the background.
pub(in crate::s3) async fn finish(bucket: &Arc<Bucket>) {
    let found = match bucket.abandoned_moves().await {
        Ok(found) => found,
        Err(refusal) => {
            let error = refusal.into_error("look for interrupted renames");
            tracing::warn!(%error, "it is tried again when the bucket is attached");
            return;
        }
    };
    let too = Arc::clone(bucket);
    let task = async move {
        for NotedMove { note, what, since, open } in found {
            let Err(refusal) = too.finish(&note, &what, since).await else { continue };
            tracing::warn!(from = what.from, to = what.to, error = %refusal, "a rename that was cut off is not finished");
            if let Some(open) = open {
                open.failed(refusal.to_string());
                tokio::spawn(finish_later(Arc::downgrade(&too), note, what, open).boxed());
            }
        }
    };
    let work = tokio::spawn(task.boxed());
    // If it takes longer, objects below the moving directories appear and vanish meanwhile.
    let _ = tokio::time::timeout(FINISHED_WITHIN, work).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_down_is_read_again() {
        let what = Move {
            from: "a/".into(),
            to: "b/".into(),
            directory: true,
            absent: false,
            replaces: true,
            write: None,
            node: "n".into(),
            pid: 7,
            since_secs: 5,
        };
        let read: Move = serde_json::from_slice(&serde_json::to_vec(&what).unwrap()).unwrap();
        assert_eq!(format!("{what:?}"), format!("{read:?}"));
    }

    #[test]
    fn a_note_moves_nothing_into_or_out_of_the_pool() {
        let is_below = |from: &str, to: &str, directory| {
            let (node, write) = ("n".to_owned(), None);
            let (from, to) = (from.to_owned(), to.to_owned());
            Move { from, to, directory, absent: false, replaces: false, write, node, pid: 7, since_secs: 5 }
                .is_below("root/")
        };
        assert!(is_below("root/a/", "root/b/c/", true) && is_below("root/a", "root/b", false));
        let reserved = format!("root/{}parts/a", String::from_utf8_lossy(RESERVED_PREFIX));
        let wrong = [
            ("outside/", "root/b/", true),
            ("root/a/", "outside/", true),
            ("root/", "root/b/", true),
            ("root/a", "root/b/", true),
            ("root/a/", "root/b", true),
            ("root/a/", "root/a/b/", true),
            ("root/../a", "root/b", false),
            ("", "root/b", false),
            ("root/a", reserved.as_str(), false),
        ];
        for (from, to, directory) in wrong {
            assert!(!is_below(from, to, directory), "{from} to {to}");
        }
    }
}
