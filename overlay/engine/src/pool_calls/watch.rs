//! Tracks the daemon's own changes of a directory while the pool is asked for its names. For the names that these
//! changes touched, the pool's answer is too old, and the catalog's state is newer. The rest of the answer holds.
//!
//! The version of a directory changes with the daemon's own calls as well as with those of other clients. So it does
//! not count while own calls change the directory. If `metadata-ttl` expires then, the directory is listed again, or
//! the pool is asked for the name.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::super::{Inner, Ino};

/// The questions about names, and the moves of directories, that are under way.
#[derive(Debug, Default)]
pub(crate) struct Watches(Mutex<WatchedCalls>);

#[derive(Debug, Default)]
struct WatchedCalls {
    questions: Vec<Arc<NameWatch>>,
    /// The directories that calls are moving or replacing.
    moving: Vec<Ino>,
}

#[derive(Debug)]
struct NameWatch {
    dir: Ino,
    /// A moment before the pool was asked.
    began: Instant,
    /// The directory, and those above it in the pool when the question began.
    path: HashSet<Ino>,
    seen: Mutex<Seen>,
}

/// What changed since the question.
#[derive(Debug, Default)]
struct Seen {
    names: HashSet<Box<[u8]>>,
    /// Names that a later question about them alone has brought into the catalog, or has given to another inode.
    found: HashSet<Box<[u8]>>,
    inos: HashSet<Ino>,
    look_again: bool,
    /// A call moved a directory of the path, or replaced it.
    path_changed: bool,
}

impl Watches {
    fn each(&self, dir: Ino, note: impl Fn(&mut Seen)) {
        let under_way = self.0.lock();
        under_way.questions.iter().filter(|watch| watch.dir == dir).for_each(|watch| note(&mut watch.seen.lock()));
    }

    /// Records that it is known what the pool has under a name now.
    pub fn name_changed(&self, dir: Ino, name: &[u8]) {
        self.each(dir, |seen| _ = seen.names.insert(name.into()));
    }

    /// Records that the answer to a question about a name alone is about to enter the catalog, or confirms it. Called with
    /// the namespace lock if it enters the catalog. Such an answer is no change: the rest of what is asked about the
    /// directory counts as before. `asked`: when that question began. Questions that began later may have a newer answer.
    pub fn name_found(&self, dir: Ino, name: &[u8], asked: Instant) {
        let under_way = self.0.lock();
        for watch in under_way.questions.iter().filter(|watch| watch.dir == dir && watch.began <= asked) {
            watch.seen.lock().found.insert(name.into());
        }
    }

    /// Records that the pool has more in the directory than the catalog knows.
    pub fn look_again(&self, dir: Ino) {
        self.each(dir, |seen| seen.look_again = true);
    }

    /// Records that a call ended that changed these inodes, and names of the directories among them.
    pub fn call_ended(&self, inos: &[Ino]) {
        for watch in self.0.lock().questions.iter().filter(|watch| inos.contains(&watch.dir)) {
            watch.seen.lock().inos.extend(inos);
        }
    }

    /// Records that a call begins that moves or replaces these directories. `count` is run under the lock, so that
    /// [`Inner::watch`] sees both or none.
    pub(super) fn move_begins(&self, dirs: &[Ino], count: impl FnOnce()) {
        let mut under_way = self.0.lock();
        count();
        under_way.moving.extend(dirs);
        for watch in under_way.questions.iter().filter(|watch| dirs.iter().any(|dir| watch.path.contains(dir))) {
            watch.seen.lock().path_changed = true;
        }
    }

    /// Records that such a call ended.
    pub(super) fn move_ended(&self, dirs: &[Ino], count: impl FnOnce()) {
        let mut under_way = self.0.lock();
        count();
        for dir in dirs {
            if let Some(at) = under_way.moving.iter().position(|moving| moving == dir) {
                under_way.moving.swap_remove(at);
            }
        }
    }
}

/// A question about names of a directory. Created before the pool is asked.
pub(crate) struct NameQuery<'a> {
    inner: &'a Inner,
    watch: Arc<NameWatch>,
}

impl Inner {
    pub(crate) fn watch(&self, dir: Ino) -> NameQuery<'_> {
        let began = Instant::now();
        loop {
            let moves = self.pool_calls.dir_moves();
            let path = self.pool_ancestors(dir);
            let mut under_way = self.pool_calls.watches.0.lock();
            if self.pool_calls.dir_moves() != moves {
                // The path may be another one by now.
                continue;
            }
            let path_changed = under_way.moving.iter().any(|moving| path.contains(moving));
            let seen = Mutex::new(Seen { path_changed, ..Seen::default() });
            let watch = Arc::new(NameWatch { dir, began, path, seen });
            under_way.questions.push(watch.clone());
            drop(under_way);
            return NameQuery { inner: self, watch };
        }
    }
}

impl NameQuery<'_> {
    /// Returns a moment before the pool was asked.
    pub fn began(&self) -> Instant {
        self.watch.began
    }

    /// Returns whether the path of the question led to the directory all the time.
    pub fn path_holds(&self) -> bool {
        !self.watch.seen.lock().path_changed
    }

    /// Returns whether the answer still holds for this name. If a change of the name is under way, the catalog has what
    /// was sent.
    pub fn holds(&self, name: &[u8]) -> bool {
        self.path_holds() && !self.watch.seen.lock().names.contains(name)
    }

    /// Returns whether the catalog has a later answer on this name: the name may have come to the pool after this question
    /// was answered.
    pub fn was_found(&self, name: &[u8]) -> bool {
        self.watch.seen.lock().found.contains(name)
    }

    /// Returns whether a call that changed an inode ended meanwhile.
    pub fn has_changed(&self, ino: Ino) -> bool {
        self.watch.seen.lock().inos.contains(&ino)
    }

    /// Returns whether anything of the directory changed meanwhile.
    pub fn is_touched(&self) -> bool {
        let seen = self.watch.seen.lock();
        seen.look_again || !seen.names.is_empty() || !seen.inos.is_empty()
    }

    /// Returns whether the directory must be listed again, whatever this answer says.
    pub fn looks_again(&self) -> bool {
        self.watch.seen.lock().look_again
    }
}

impl Drop for NameQuery<'_> {
    fn drop(&mut self) {
        self.inner.pool_calls.watches.0.lock().questions.retain(|watch| !Arc::ptr_eq(watch, &self.watch));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_answer_on_a_name_counts_for_the_earlier_questions_alone() {
        let (watches, dir, asked) = (Watches::default(), Ino(7), Instant::now());
        let watch = |dir: Ino, began: Instant| {
            let watch = Arc::new(NameWatch { dir, began, path: HashSet::from([dir]), seen: Mutex::default() });
            watches.0.lock().questions.push(watch.clone());
            watch
        };
        let [tick, later] = [Duration::from_millis(1), Duration::from_millis(2)];
        let earlier = watch(dir, asked);
        let (of_later, elsewhere) = (watch(dir, asked + later), watch(Ino(8), asked));
        watches.name_found(dir, b"f", asked + tick);
        let has_found = |watch: &NameWatch| watch.seen.lock().found.contains(&b"f"[..]);
        assert_eq!([&earlier, &of_later, &elsewhere].map(|watch| has_found(watch)), [true, false, false]);
    }
}
