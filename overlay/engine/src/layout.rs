//! Where the pool keeps content: its stripes and storage pools. The engine asks once, and remembers the answer for a
//! while. Pools without layouts are never asked.
//!
//! A rule of the policy may name a storage pool. So `open`, `create` and `close` ask for it first, in a call that a
//! session thread does not wait for. For the kernel's cache times, only storage pools count that are known without
//! asking. So such a rule affects these times only after the file was opened, or listed by `ls`. While the pool does
//! not answer, the background flush leaves the file alone: a rule may say that it is not flushed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_backends::{FileKind, Layout, Result, Version};
use futures::FutureExt;
use futures::future::join_all;
use lru::LruCache;
use parking_lot::Mutex;

use super::{Inner, Ino};
use crate::node::Node;

/// Layouts that are remembered.
const REMEMBERED: usize = 16_384;
/// The pool may move files between storage pools, or give directories another one, without notice.
const HOLDS_FOR: Duration = Duration::from_secs(600);
/// Objects of one listing that the pool is asked about at the same time.
const ASKED_AT_ONCE: usize = 16;
/// How far the tree is walked up to a directory that the pool has.
const MAX_DEPTH: usize = 4096;

/// The layouts that were requested lately.
pub(crate) struct Layouts {
    known: Mutex<LruCache<Ino, KnownLayout>>,
}

struct KnownLayout {
    /// Another object of the same name may have another layout.
    object: Option<Version>,
    layout: Option<Arc<Layout>>,
    asked: Instant,
}

impl Default for Layouts {
    fn default() -> Self {
        Self { known: Mutex::new(LruCache::unbounded()) }
    }
}

/// The pool object that determines where an inode's content is, or will go.
struct Subject {
    ino: Ino,
    object: Option<Version>,
}

impl Inner {
    /// Returns where the content of a file is in the pool, or where a flush will put it; for a directory, where the
    /// content of new files goes. `None`: not known. Asks the pool if there is no recent answer.
    pub async fn layout_of(&self, node: &Node) -> Option<Arc<Layout>> {
        self.ask_layout(node).await.unwrap_or(None)
    }

    /// Like [`Self::layout_of`], but returns errors.
    ///
    /// # Errors
    /// `Timeout` and `Unavailable`: the layout may be known later.
    pub(super) async fn ask_layout(&self, node: &Node) -> Result<Option<Arc<Layout>>> {
        let Some(subject) = self.layout_subject(node) else { return Ok(None) };
        if let Some(known) = self.known_layout(&subject) {
            return Ok(known);
        }
        let Ok(path) = self.pool_path(subject.ino) else { return Ok(None) };
        let layout = match self.ask(self.pool.layout(&path)).await {
            Ok(layout) => layout.map(Arc::new),
            Err(e) if e.is_unreachable() => return Err(e),
            Err(error) => {
                tracing::debug!(%path, %error, "the pool does not tell the layout");
                None
            }
        };
        let known = KnownLayout { object: subject.object, layout: layout.clone(), asked: Instant::now() };
        let mut all = self.layouts.known.lock();
        all.put(subject.ino, known);
        if all.len() > REMEMBERED {
            all.pop_lru();
        }
        Ok(layout)
    }

    /// Asks for the storage pool of an inode. If it cannot be found out now, the inode counts as in no storage pool.
    pub async fn learn_storage_pool(&self, node: &Node) {
        let _ = self.ask_layout(node).await;
    }

    /// Asks for the storage pool of an inode if it is not known; `false` if the pool does not answer. Not for threads
    /// that must not wait.
    pub fn knows_storage_pool(&self, node: &Node) -> bool {
        if self.layout_subject(node).is_none_or(|subject| self.known_layout(&subject).is_some()) {
            return true;
        }
        tokio::runtime::Handle::try_current()
            .is_ok_and(|runtime| runtime.block_on(self.ask_layout(node).boxed_local()).is_ok())
    }

    /// Returns the storage pool, if it is known without asking.
    pub fn known_storage_pool(&self, node: &Node) -> Option<String> {
        self.known_layout(&self.layout_subject(node)?)??.storage_pool.clone()
    }

    /// Returns the storage pools of many inodes, by the names that users know.
    pub async fn storage_pools(&self, inos: &[Ino]) -> Vec<Option<String>> {
        if !self.pool.capabilities().layouts {
            return vec![None; inos.len()];
        }
        let mut pools = Vec::with_capacity(inos.len());
        for some in inos.chunks(ASKED_AT_ONCE) {
            pools.extend(join_all(some.iter().map(|ino| self.storage_pool(*ino))).await);
        }
        pools
    }

    async fn storage_pool(&self, ino: Ino) -> Option<String> {
        let node = self.node(ino).ok()?;
        if !matches!(node.state.lock().record.kind, FileKind::File | FileKind::Directory) {
            return None;
        }
        let layout = self.layout_of(&node).await?;
        layout.storage_pool.as_deref().map(|pool| self.policy().storage_pool_name(pool).to_owned())
    }

    fn known_layout(&self, subject: &Subject) -> Option<Option<Arc<Layout>>> {
        let mut known = self.layouts.known.lock();
        let known = known.get(&subject.ino)?;
        let same = match (&known.object, &subject.object) {
            (Some(then), Some(now)) => then.same_object(now),
            (then, now) => then.is_none() && now.is_none(),
        };
        (same && known.asked.elapsed() < HOLDS_FOR).then(|| known.layout.clone())
    }

    /// Returns the inode if the pool has it, or else the nearest directory above it that the pool has: new files go
    /// where this directory says.
    fn layout_subject(&self, node: &Node) -> Option<Subject> {
        if !self.pool.capabilities().layouts {
            return None;
        }
        let mut ino = node.ino;
        for _ in 0..MAX_DEPTH {
            let node = self.node(ino).ok()?;
            let state = node.state.lock();
            if ino == Ino::ROOT || state.record.in_pool() {
                return Some(Subject { ino, object: state.record.version.clone() });
            }
            ino = state.record.links.first()?.0;
        }
        None
    }
}
