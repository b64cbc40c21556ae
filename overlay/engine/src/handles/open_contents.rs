//! The content files that the daemon keeps open while no program uses them.

use std::sync::Arc;

use forebay_backends::Result;
use forebay_cache::{Content, ContentId, Stamp};

use super::super::{Inner, Ino};

/// Content files that the daemon keeps open while no program uses them, at most.
const IDLE_OPEN_CONTENTS_MAX: usize = 16 << 10;
/// How many of them one more open may examine to close them.
const TRIM_TRIES: usize = 4;

impl Inner {
    /// Returns how many content files may stay open while no program uses them.
    fn idle_open_contents(&self) -> usize {
        self.open_contents_max.min(IDLE_OPEN_CONTENTS_MAX)
    }

    /// Notes that the daemon has a content file open, and closes the least recently used ones above the limit.
    pub fn keep_open(&self, ino: Ino) {
        let mut open = self.open_contents.lock();
        open.put(ino, ());
        for _ in 0..TRIM_TRIES {
            if open.len() <= self.idle_open_contents() {
                return;
            }
            let Some((victim, ())) = open.pop_lru() else { return };
            let Some(node) = self.table.peek(victim) else {
                self.release_content(victim);
                continue;
            };
            // The caller may hold the lock of a node, even of this one.
            match node.state.try_lock() {
                // After a close, a later descriptor may not be told of a failed write-back.
                Some(state) if state.record.file.is_dirty() && open.len() < self.open_contents_max => {
                    open.put(victim, ());
                }
                Some(mut state) if !state.opens.any() => {
                    state.content = None;
                    self.release_content(victim);
                }
                _ => _ = open.put(victim, ()),
            }
        }
    }

    /// Whether more content files are open than may stay open while idle.
    pub fn has_many_open(&self) -> bool {
        self.open_contents.lock().len() > self.idle_open_contents()
    }

    /// Syncs and closes idle dirty content files, if too many are open. Blocks.
    pub fn close_idle_dirty(self: &Arc<Self>) -> Result<()> {
        let idle = self.idle_dirty();
        if idle.is_empty() {
            return Ok(());
        }
        // After this, none of the syncs below takes long.
        self.sync_store()?;
        for (ino, content) in idle {
            let was = Stamp::of(&content.file)?;
            let synced = self.catalog.sync_content(&content, true);
            if synced.is_err() && self.catalog.lost(ContentId(content.id)).is_none() {
                continue;
            }
            let Some(node) = self.table.peek(ino) else { continue };
            let mut state = node.state.lock();
            let same = state.content.as_ref().is_some_and(|now| Arc::ptr_eq(now, &content));
            if !same || state.opens.any() || Stamp::of(&content.file)? != was {
                continue;
            }
            state.content = None;
            self.release_content(ino);
            drop(state);
            self.open_contents.lock().pop(&ino);
            drop(node);
            self.table.drop_idle(ino);
        }
        Ok(())
    }

    /// Returns the least recently used idle dirty content files, if more content files are open than may stay open.
    fn idle_dirty(&self) -> Vec<(Ino, Arc<Content>)> {
        let least: Vec<Ino> = {
            let open = self.open_contents.lock();
            if open.len() <= self.idle_open_contents() {
                return Vec::new();
            }
            let over = open.len() - self.idle_open_contents() / 4 * 3;
            open.iter().rev().take(over).map(|(ino, ())| *ino).collect()
        };
        let content = |ino: Ino| {
            let node = self.table.peek(ino)?;
            let state = node.state.try_lock()?;
            let idle = state.record.file.is_dirty() && !state.opens.any();
            state.content.clone().filter(|_| idle).map(|content| (ino, content))
        };
        least.into_iter().filter_map(content).collect()
    }
}
