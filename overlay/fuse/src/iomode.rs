//! Chooses the I/O mode of each open, so that the kernel never has to refuse one.
//!
//! The kernel (`fs/fuse/iomode.c`) allows on one inode either cached opens or passthrough opens, and only one backing
//! file at a time. Beside passthrough opens it allows only opens that ask for passthrough, too. An open that breaks
//! these rules fails with EIO. An open that asks for both passthrough and direct I/O is served by the daemon and counts
//! as passthrough. A plain direct open is allowed if the inode has no passthrough opens, but a shared mapping of it
//! makes the inode cached. The table in [`InodeOpens::choose`] follows from these rules.
//!
//! The daemon raises a count before the kernel gets the reply to an open, and lowers it after the kernel released the
//! open. So the daemon's counts are never below the kernel's: a chosen mode may be slower than possible, but is never
//! refused.

mod table;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_engine::{Content, Ino};
use lru::LruCache;
use parking_lot::Mutex;

use super::handle::Mode;
use table::{OpenRecord, OpenTable, SlotId};

const SHARDS: usize = 32;
/// Bound on the backing ids that are kept for the next open of a file. Each pins one open file in the kernel, and saves
/// a fifth of the cost of an open.
const IDLE_BACKINGS_MAX: usize = 16 << 10;

/// Makes files known to the kernel as backing files.
pub trait Registrar: Send + Sync {
    /// Registers `file`. Returns the id under which the kernel knows it; never 0.
    fn register(&self, file: &File) -> io::Result<u32>;
    /// Frees the id. Open files go on using the backing file.
    fn unregister(&self, id: u32);
}

/// Whether opens can get passthrough.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PassthroughState {
    On,
    /// Off for the rest of the mount. The text says why, and what to do about it.
    Off(String),
}

/// What is known of an open when its mode is chosen.
#[derive(Debug, Clone, Copy)]
pub struct Wish<'a> {
    /// The content file, if the kernel may use it.
    pub content: Option<&'a Arc<Content>>,
    pub writable: bool,
}

/// An open that was left by a previous process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InheritedOpens {
    pub ino: Ino,
    pub readers: u32,
    pub writers: u32,
}

pub struct IoModes {
    shards: Vec<Mutex<Shard>>,
    registrar: Box<dyn Registrar>,
    table: Option<OpenTable>,
    off: AtomicBool,
    why_off: Mutex<String>,
}

struct Shard {
    inodes: HashMap<Ino, InodeOpens>,
    /// Inodes without opens that have a backing id; the least recently used one goes first.
    idle: LruCache<Ino, ()>,
}

/// The kernel's opens of one inode. Changed only by `IoModes`, under the lock of the inode's shard.
#[derive(Debug, Default)]
struct InodeOpens {
    cached: u32,
    /// Opens in passthrough, and beside it.
    passthrough: u32,
    direct: u32,
    writers: u32,
    backing: Option<Backing>,
    slot: Option<SlotId>,
}

#[derive(Debug)]
struct Backing {
    /// Id of the content file.
    content: u64,
    id: u32,
    /// False once the content was replaced: the id is then not kept after the last present open.
    current: bool,
    /// The open file that the kernel holds by the id. While the daemon keeps it, it does not open the content file a
    /// second time: each of two open files would look to the other like a possible writer. `None`: a process that died
    /// opened the file; the id is given back at the last release.
    ours: Option<Arc<Content>>,
}

/// A chosen mode, with the backing id for passthrough. A drop without [`Grant::commit`] takes it back: the kernel never
/// got the reply.
pub struct Grant {
    modes: Arc<IoModes>,
    pub ino: Ino,
    pub mode: Mode,
    pub backing: u32,
    writable: bool,
    committed: bool,
}

impl Grant {
    /// Returns whether the reply to the kernel must have the backing id.
    pub fn needs_backing(&self) -> bool {
        matches!(self.mode, Mode::Passthrough | Mode::Beside)
    }

    /// Keeps the open counted until it is released. Called just before the reply.
    pub fn commit(mut self) {
        self.committed = true;
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        if !self.committed {
            self.modes.release(self.ino, self.mode, self.writable);
        }
    }
}

impl InodeOpens {
    /// Returns the mode for an open, given the present opens of the inode:
    ///
    /// | open now | the file may be passed through | it may not |
    /// |---|---|---|
    /// | nothing | passthrough | cached |
    /// | cached | cached | cached |
    /// | passthrough, same content file | passthrough | beside |
    /// | passthrough, another content file | beside | beside |
    /// | only direct | cached, since one of them may have a shared mapping | cached |
    ///
    /// Mode direct is given only if the table of open modes has no room for a record.
    fn choose(&self, content: Option<u64>) -> Mode {
        debug_assert!(self.cached == 0 || self.passthrough == 0, "the kernel refuses this mix");
        match (content, &self.backing) {
            (Some(content), Some(backing)) if self.passthrough > 0 && backing.content == content => Mode::Passthrough,
            _ if self.passthrough > 0 => Mode::Beside,
            (Some(_), _) if self.cached == 0 && self.direct == 0 => Mode::Passthrough,
            _ => Mode::Cached,
        }
    }

    fn count(&mut self, mode: Mode) -> &mut u32 {
        match mode {
            Mode::Cached => &mut self.cached,
            Mode::Passthrough | Mode::Beside => &mut self.passthrough,
            Mode::Direct => &mut self.direct,
        }
    }

    fn opens(&self) -> u32 {
        self.cached + self.passthrough + self.direct
    }

    fn record(&self, ino: Ino) -> OpenRecord {
        OpenRecord {
            ino: ino.0,
            content: self.backing.as_ref().map_or(0, |backing| backing.content),
            backing: self.backing.as_ref().map_or(0, |backing| backing.id),
            cached: self.cached,
            passthrough: self.passthrough,
            direct: self.direct,
            writers: self.writers,
        }
    }
}

impl IoModes {
    /// Creates the modes of a fresh mount. They are kept in the file at `table`, if any, for [`Self::inherit`].
    pub fn new(registrar: Box<dyn Registrar>, table: Option<&Path>) -> io::Result<Self> {
        Ok(Self::with_table(registrar, table.map(OpenTable::create).transpose()?))
    }

    /// Takes over the modes of a mount that a previous process served. Returns the opens of that process, too.
    ///
    /// Backing ids that no open uses are given back to the kernel: the dead process cannot do it, and each id pins the
    /// space of a file.
    pub fn inherit(registrar: Box<dyn Registrar>, table: &Path) -> io::Result<(Self, Vec<InheritedOpens>)> {
        let (table, records) = OpenTable::open(table)?;
        let modes = Self::with_table(registrar, Some(table));
        let mut opens = Vec::new();
        for (slot, record) in records {
            let ino = Ino(record.ino);
            let all = record.cached + record.passthrough + record.direct;
            if record.backing != 0 && record.passthrough == 0 {
                modes.registrar.unregister(record.backing);
            }
            if all == 0 {
                modes.forget_slot(slot);
                continue;
            }
            let backing = (record.passthrough > 0 && record.backing != 0).then_some(Backing {
                content: record.content,
                id: record.backing,
                current: true,
                ours: None,
            });
            let OpenRecord { cached, passthrough, direct, writers, .. } = record;
            let mut inode = InodeOpens { cached, passthrough, direct, writers, backing, slot: Some(slot) };
            modes.persist(ino, &mut inode);
            opens.push(InheritedOpens { ino, readers: all.saturating_sub(writers), writers: writers.min(all) });
            modes.shard(ino).lock().inodes.insert(ino, inode);
        }
        Ok((modes, opens))
    }

    fn with_table(registrar: Box<dyn Registrar>, table: Option<OpenTable>) -> Self {
        let idle_max = NonZeroUsize::new(IDLE_BACKINGS_MAX / SHARDS).unwrap_or(NonZeroUsize::MIN);
        let shard = || Mutex::new(Shard { inodes: HashMap::new(), idle: LruCache::new(idle_max) });
        let shards = (0..SHARDS).map(|_| shard()).collect();
        Self { shards, registrar, table, off: AtomicBool::new(false), why_off: Mutex::new(String::new()) }
    }

    /// Chooses the mode of an open and counts it.
    pub fn grant(self: &Arc<Self>, ino: Ino, wish: Wish<'_>) -> Grant {
        let mut shard = self.shard(ino).lock();
        let content = wish.content.filter(|_| !self.off.load(Ordering::Relaxed));
        let inode = shard.inodes.entry(ino).or_default();
        let mut mode = inode.choose(content.map(|content| content.id));
        if mode == Mode::Passthrough && !content.is_some_and(|content| self.back(inode, content)) {
            mode = Mode::Cached;
        }
        *inode.count(mode) += 1;
        inode.writers += u32::from(wish.writable);
        if !self.persist(ino, inode) {
            // Without a record, the next process does not know of this open, so it must be compatible with every mode
            // that process gives. The inode has no passthrough opens, or it would have a record.
            *inode.count(mode) -= 1;
            *inode.count(Mode::Direct) += 1;
            mode = Mode::Direct;
        }
        let backing = inode.backing.as_ref().map_or(0, |backing| backing.id);
        shard.idle.pop(&ino);
        drop(shard);
        Grant { modes: Arc::clone(self), ino, mode, backing, writable: wish.writable, committed: false }
    }

    /// Stops counting an open. Returns false if it was not counted: a process that kept no record gave it.
    pub fn release(&self, ino: Ino, mode: Mode, writable: bool) -> bool {
        let mut shard = self.shard(ino).lock();
        let shard = &mut *shard;
        let Some(inode) = shard.inodes.get_mut(&ino) else { return false };
        if *inode.count(mode) == 0 {
            return false;
        }
        *inode.count(mode) -= 1;
        inode.writers = inode.writers.saturating_sub(u32::from(writable));
        if inode.opens() > 0 {
            self.persist(ino, inode);
            return true;
        }
        if inode.backing.as_ref().is_some_and(|backing| backing.current && backing.ours.is_some()) {
            self.persist(ino, inode);
            if let Some((old, ())) = shard.idle.push(ino, ()).filter(|(old, ())| *old != ino) {
                self.discard(shard, old);
            }
        } else {
            self.discard(shard, ino);
        }
        true
    }

    /// Gives back a backing id that is kept for the next open, and with it the space that the id pins. Called when the
    /// content of `ino` was replaced or evicted, or the kernel forgot the inode.
    pub fn drop_backing(&self, ino: Ino) {
        let mut shard = self.shard(ino).lock();
        let shard = &mut *shard;
        let Some(inode) = shard.inodes.get_mut(&ino) else { return };
        if inode.opens() == 0 {
            shard.idle.pop(&ino);
            self.discard(shard, ino);
        } else if inode.passthrough > 0 {
            if let Some(backing) = &mut inode.backing {
                backing.current = false;
            }
        } else if let Some(backing) = inode.backing.take() {
            self.registrar.unregister(backing.id);
            self.persist(ino, inode);
        }
    }

    /// Gives back a backing id that is kept for the next open of the inode, since it keeps the content file open.
    /// Called when the daemon closes the content file.
    pub fn drop_idle_backing(&self, ino: Ino) {
        let mut shard = self.shard(ino).lock();
        let shard = &mut *shard;
        if shard.inodes.get(&ino).is_some_and(|inode| inode.opens() == 0) {
            shard.idle.pop(&ino);
            self.discard(shard, ino);
        }
    }

    pub fn passthrough_state(&self) -> PassthroughState {
        if self.off.load(Ordering::Acquire) {
            PassthroughState::Off(self.why_off.lock().clone())
        } else {
            PassthroughState::On
        }
    }

    /// Finds out early whether passthrough is allowed, so that the state is right before the first open. Must be called
    /// after the handshake.
    pub fn probe(&self) {
        let Ok(no_regular_file) = File::open("/dev/null") else { return };
        match self.registrar.register(&no_regular_file) {
            Ok(id) => self.registrar.unregister(id),
            // The kernel checks the privilege before the file. Every other error is about the file.
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => self.register_failed(&error),
            Err(_) => {}
        }
    }

    /// Turns passthrough off from now on. The first reason is kept.
    pub fn turn_off(&self, why: impl Into<String>) {
        let mut reason = self.why_off.lock();
        if !self.off.swap(true, Ordering::AcqRel) {
            *reason = why.into();
            tracing::warn!(why = %*reason, "passthrough is off: reads and writes go through the daemon");
        }
    }

    /// Makes `content` the kernel's backing file of `inode`. Returns whether that succeeded.
    fn back(&self, inode: &mut InodeOpens, content: &Arc<Content>) -> bool {
        match &mut inode.backing {
            Some(backing) if backing.content == content.id => {
                backing.current = true;
                return true;
            }
            _ => {}
        }
        debug_assert_eq!(inode.passthrough, 0, "one backing file at a time");
        if let Some(old) = inode.backing.take() {
            self.registrar.unregister(old.id);
        }
        match self.registrar.register(&content.file) {
            Ok(id) => {
                let ours = Some(Arc::clone(content));
                inode.backing = Some(Backing { content: content.id, id, current: true, ours });
                true
            }
            Err(error) => {
                self.register_failed(&error);
                false
            }
        }
    }

    fn register_failed(&self, error: &io::Error) {
        let why = match error.raw_os_error() {
            Some(libc::EPERM) => "the daemon lacks CAP_SYS_ADMIN; run it as root, or grant it the capability",
            Some(libc::EOPNOTSUPP | libc::ENOTTY) => "the kernel has no FUSE passthrough; it came with Linux 6.9",
            Some(libc::ELOOP) => "the fast pool is on a stacked file system; mount with stacked backing files",
            _ => {
                tracing::warn!(%error, "one file could not be passed through and is served by the daemon");
                return;
            }
        };
        self.turn_off(why);
    }

    /// Stores the counts for the next process. Returns false if the table has no room for them.
    fn persist(&self, ino: Ino, inode: &mut InodeOpens) -> bool {
        let Some(table) = &self.table else { return true };
        let record = inode.record(ino);
        match &inode.slot {
            Some(slot) => table.store(slot, &record),
            None => inode.slot = table.insert(&record),
        }
        inode.slot.is_some()
    }

    fn discard(&self, shard: &mut Shard, ino: Ino) {
        let Some(inode) = shard.inodes.remove(&ino) else { return };
        debug_assert_eq!(inode.opens(), 0);
        if let Some(backing) = inode.backing {
            self.registrar.unregister(backing.id);
        }
        if let Some(slot) = inode.slot {
            self.forget_slot(slot);
        }
    }

    fn forget_slot(&self, slot: SlotId) {
        if let Some(table) = &self.table {
            table.remove(slot);
        }
    }

    fn shard(&self, ino: Ino) -> &Mutex<Shard> {
        &self.shards[ino.0 as usize % SHARDS]
    }
}

#[cfg(test)]
mod tests;
