//! Where the pool keeps content: its stripes and storage pools. The engine asks once, and asks again after a while. Pools
//! without layouts are never asked.
//!
//! A rule of the policy may name a storage pool. So `open`, `create` and `close` ask for it first, in a call that a
//! session thread does not wait for. For the kernel's cache times, only storage pools count that are known without
//! asking. So such a rule affects these times only after the file was opened, or listed by `ls`.
//!
//! The last answer holds until there is another one. Without any, a rule may say what no other rule says, and what cannot
//! be undone does not happen: a file that may be local is not sent (`writeback.rs`), and content that may be pinned is not
//! evicted (`wants_storage_pool`) until the pool was asked. While the pool does not answer, the background flush leaves
//! the file alone: a rule may say that it is not flushed.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay_backends::{Error, ErrorKind, FileKind, Layout, Result, Side, Version};
use forebay_policy::Read;
use futures::FutureExt;
use futures::future::join_all;
use lru::LruCache;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::{Inner, Ino};
use crate::node::Node;
use crate::pool_calls::CONFIRM_WITHIN;

/// Layouts that are remembered at least: some 16 MiB. Eviction asks for those of all content that may go, so twice as many
/// as there are such files are remembered, too.
const REMEMBERED: usize = 65_536;
/// The pool may move files between storage pools, or give directories another one, without notice.
const HOLDS_FOR: Duration = Duration::from_secs(600);
/// How long the pool is not asked again after it refused to tell a layout.
const REFUSED_FOR: Duration = Duration::from_secs(10);
/// Objects that the pool is asked about at the same time.
pub(crate) const ASKED_AT_ONCE: usize = 16;
/// Inodes that eviction waits to know the storage pool of.
const WANTED: usize = 4_096;
/// How far the tree is walked up to a directory that the pool has.
const MAX_DEPTH: usize = 4096;

/// The layouts that were requested lately.
pub(crate) struct Layouts {
    known: Mutex<LruCache<Ino, KnownLayout>>,
    /// Inodes that eviction spared because their storage pool is not known.
    wanted: Mutex<HashSet<Ino>>,
    is_wanted: Notify,
    /// For one caller that asks for those that are wanted.
    asking: tokio::sync::Mutex<()>,
    /// Counts the answers for those that were wanted.
    learned: AtomicU64,
}

#[derive(Clone)]
struct KnownLayout {
    /// Another object of the same name may have another layout.
    object: Option<Version>,
    answer: LayoutAnswer,
    asked: Instant,
}

#[derive(Clone)]
enum LayoutAnswer {
    /// `None`: the object has none.
    Told(Option<Arc<Layout>>),
    /// The pool answered, but did not tell, and never did before. It may have told the stripe, and not the storage pool.
    Refused(ErrorKind, Option<Arc<Layout>>),
}

impl KnownLayout {
    fn is_fresh(&self) -> bool {
        let holds = match self.answer {
            LayoutAnswer::Told(_) => HOLDS_FOR,
            LayoutAnswer::Refused(..) => REFUSED_FOR,
        };
        self.asked.elapsed() < holds
    }

    fn told(self) -> Option<Option<Arc<Layout>>> {
        match self.answer {
            LayoutAnswer::Told(layout) => Some(layout),
            LayoutAnswer::Refused(..) => None,
        }
    }
}

impl Default for Layouts {
    fn default() -> Self {
        Self {
            known: Mutex::new(LruCache::unbounded()),
            wanted: Mutex::default(),
            is_wanted: Notify::new(),
            asking: tokio::sync::Mutex::default(),
            learned: AtomicU64::new(0),
        }
    }
}

impl Layouts {
    /// The number of answers that eviction waited for, so far.
    pub(crate) fn learned(&self) -> u64 {
        self.learned.load(Ordering::Acquire)
    }

    fn remember(&self, subject: Subject, answer: LayoutAnswer, evictable_files: u64) {
        let most = REMEMBERED.max(usize::try_from(evictable_files).unwrap_or(usize::MAX).saturating_mul(2));
        let mut all = self.known.lock();
        all.put(subject.ino, KnownLayout { object: subject.object, answer, asked: Instant::now() });
        // There may be fewer files by now: the map shrinks by some at a time.
        for _ in 0..2 {
            if all.len() > most {
                all.pop_lru();
            }
        }
    }
}

/// Asks for the storage pools that eviction has to know.
pub(crate) async fn layout_loop(inner: Arc<Inner>) {
    loop {
        inner.layouts.is_wanted.notified().await;
        inner.learn_wanted_layouts().await;
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
        match self.ask_layout(node).await {
            Ok(layout) => layout,
            Err(_) => match self.known_layout(&self.layout_subject(node)?)?.answer {
                LayoutAnswer::Refused(_, stripe_alone) => stripe_alone,
                LayoutAnswer::Told(layout) => layout,
            },
        }
    }

    /// Like [`Self::layout_of`], but returns errors. The last answer stands in for one that does not come.
    ///
    /// # Errors
    /// `Timeout` and `Unavailable`, and others if the pool refuses to tell: the layout may be known later.
    pub(super) async fn ask_layout(&self, node: &Node) -> Result<Option<Arc<Layout>>> {
        let Some(subject) = self.layout_subject(node) else { return Ok(None) };
        self.layouts.known.lock().promote(&subject.ino);
        let known = self.known_layout(&subject);
        if let Some(known) = known.as_ref().filter(|known| known.is_fresh()) {
            return match &known.answer {
                LayoutAnswer::Told(layout) => Ok(layout.clone()),
                LayoutAnswer::Refused(kind, _) => {
                    let what = format!("{}: the pool does not tell the layout", self.display(subject.ino));
                    Err(Error::new(*kind, Side::Pool, what))
                }
            };
        }
        let told = known.and_then(KnownLayout::told);
        let Ok(path) = self.pool_path(subject.ino) else { return Ok(told.flatten()) };
        let answer = match self.ask(self.pool.layout(&path)).await {
            Ok(layout) => Ok(layout.map(Arc::new)),
            Err(e) if e.is(ErrorKind::Unsupported) => Ok(None),
            Err(e) => Err(e.context(&path)),
        };
        match (answer, told) {
            (Ok(Some(layout)), told) if layout.is_storage_pool_untold => {
                let error = Error::new(ErrorKind::Busy, Side::Pool, format!("{path}: the storage pool is not told"));
                let (answer, result) = match told {
                    Some(layout) => (LayoutAnswer::Told(layout.clone()), Ok(layout)),
                    None => (LayoutAnswer::Refused(error.kind(), Some(layout)), Err(error)),
                };
                self.remember_layout(subject, answer);
                result
            }
            (Ok(layout), _) => {
                self.remember_layout(subject, LayoutAnswer::Told(layout.clone()));
                Ok(layout)
            }
            (Err(error), Some(layout)) => {
                tracing::debug!(%path, %error, "the layout that was told last still counts");
                if !error.is_unreachable() {
                    self.remember_layout(subject, LayoutAnswer::Told(layout.clone()));
                }
                Ok(layout)
            }
            (Err(error), None) => {
                tracing::debug!(%path, %error, "the pool does not tell the layout");
                // If another client removed the object, the directory above it is asked about as soon as that is known.
                if !error.is_unreachable() && !error.is_gone() {
                    self.remember_layout(subject, LayoutAnswer::Refused(error.kind(), None));
                }
                Err(error)
            }
        }
    }

    /// Asks for the storage pool of an inode. If it cannot be found out and never was, the inode counts as in no storage
    /// pool.
    pub async fn learn_storage_pool(&self, node: &Node) {
        let _ = self.ask_layout(node).await;
    }

    /// Asks for the storage pool of an inode if there is no recent answer; `false` if the pool does not answer, and never
    /// did. Not for threads that must not wait.
    pub fn knows_storage_pool(&self, node: &Node) -> bool {
        let known = |subject| self.known_layout(&subject).is_some_and(|known| known.is_fresh());
        if self.layout_subject(node).is_none_or(known) {
            return true;
        }
        tokio::runtime::Handle::try_current().is_ok_and(|runtime| {
            let asked = runtime.block_on(self.ask_layout(node).boxed_local());
            asked.map_or_else(|error| !error.is_unreachable(), |_| true)
        })
    }

    /// Returns the storage pool, if it is known without asking. An old answer counts.
    pub fn known_storage_pool(&self, node: &Node) -> Option<String> {
        self.known_layout(&self.layout_subject(node)?)?.told()??.storage_pool.clone()
    }

    /// Returns whether the pool told the layout of an inode, however long ago, or has none to tell.
    pub(crate) fn is_layout_told(&self, node: &Node) -> bool {
        let told = |subject| self.known_layout(&subject).is_some_and(|known| known.told().is_some());
        self.layout_subject(node).is_none_or(told)
    }

    /// Returns whether a rule by storage pools may pin an inode, and its storage pool is not known. Then the pool is asked
    /// for it in the background.
    pub(crate) fn wants_storage_pool(&self, node: &Node) -> bool {
        if !self.policy().may_read_by_storage_pool(Read::Pin) {
            return false;
        }
        let Some(subject) = self.layout_subject(node) else { return false };
        match self.known_layout(&subject) {
            Some(KnownLayout { answer: LayoutAnswer::Told(_), .. }) => return false,
            Some(refused) if refused.is_fresh() => return true,
            _ => {}
        }
        let mut wanted = self.layouts.wanted.lock();
        if wanted.len() < WANTED {
            wanted.insert(node.ino);
            self.layouts.is_wanted.notify_one();
        }
        true
    }

    /// Waits a moment for the storage pools that eviction has to know. Returns whether there were answers since there were
    /// `learned` of them.
    pub(crate) async fn learns_wanted_layouts(&self, learned: u64) -> bool {
        if !self.policy().may_read_by_storage_pool(Read::Pin) {
            return false;
        }
        let _ = timeout(CONFIRM_WITHIN, self.learn_wanted_layouts()).await;
        self.layouts.learned() != learned
    }

    async fn learn_wanted_layouts(&self) {
        let _asking = self.layouts.asking.lock().await;
        let wanted = std::mem::take(&mut *self.layouts.wanted.lock());
        let wanted: Vec<Ino> = wanted.into_iter().collect();
        for some in wanted.chunks(ASKED_AT_ONCE) {
            let asked = some.iter().map(|ino| async move {
                let Ok(node) = self.node(*ino) else { return false };
                let is_told = self.ask_layout(&node).await.is_ok();
                drop(node);
                self.table.drop_idle(*ino);
                is_told
            });
            let told = join_all(asked).await.into_iter().filter(|is_told| *is_told).count();
            self.layouts.learned.fetch_add(told as u64, Ordering::Release);
        }
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

    fn remember_layout(&self, subject: Subject, answer: LayoutAnswer) {
        self.layouts.remember(subject, answer, self.space.evictor.evictable().files);
    }

    /// Returns what the pool told last of an object, however long ago. Does not count as a use: eviction goes through all
    /// files.
    fn known_layout(&self, subject: &Subject) -> Option<KnownLayout> {
        let known = self.layouts.known.lock();
        let known = known.peek(&subject.ino)?;
        let same = match (&known.object, &subject.object) {
            (Some(then), Some(now)) => then.same_object(now),
            (then, now) => then.is_none() && now.is_none(),
        };
        same.then(|| known.clone())
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
