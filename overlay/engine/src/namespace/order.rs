//! A directory's entries in an order that is the same at every moment, with a cookie for each.
//!
//! A program reads a directory in parts, and the directory changes in between. The next part may come from another
//! snapshot, from the kernel's cache that another reader filled, or from a daemon that was started since. So the cookie
//! of an entry depends on its name alone: an entry that stays keeps its place, whatever is added or removed around it.
//! The hash is keyed by a secret of the catalog, so that no user can choose names that share a place with another's.

use std::hash::Hasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_backends::{Error, ErrorKind, FileKind, Result, Side};
use forebay_catalog::Catalog;

use super::super::{DirSnapshot, Dirent, Entry, Inner, Ino, Overlay};

/// Cookies are positive as `off_t`, with room to spare.
const COOKIE_BITS: u32 = 62;
/// The lowest bits of a cookie distinguish entries with the same hash.
const SAME_HASH_BITS: u32 = 6;
const SAME_HASH_MASK: u64 = (1 << SAME_HASH_BITS) - 1;

/// The key of the secret in the catalog.
const KEY_META: &str = "cookie_key";

/// The hash that gives names their places.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NameHash(u64, u64);

impl NameHash {
    /// Returns the hash of a catalog, which keeps its key for good.
    pub fn of(catalog: &Catalog) -> Result<Self> {
        if let Some((a, b)) = catalog.meta(KEY_META)? {
            return Ok(Self(a, b));
        }
        let key = (rand::random::<u64>(), rand::random::<u64>());
        catalog.set_meta(KEY_META, &key)?;
        Ok(Self(key.0, key.1))
    }

    /// Returns the first cookie that a name of this hash may have. It is above those of `.` and `..`.
    fn place(self, name: &[u8]) -> u64 {
        #[allow(
            deprecated,
            reason = "its successor may be another function in the next release; this one is SipHash-2-4"
        )]
        let mut hasher = std::hash::SipHasher::new_with_keys(self.0, self.1);
        hasher.write(name);
        let place = hasher.finish() >> (u64::BITS - COOKIE_BITS) & !SAME_HASH_MASK;
        place.max(1 << SAME_HASH_BITS)
    }
}

/// Distinguishes the states of names, over all directories.
static NEXT_STATE: AtomicU64 = AtomicU64::new(1);

/// The state of the names of one directory: another number after each change.
#[derive(Debug)]
pub(crate) struct NamesState(AtomicU64);

impl Default for NamesState {
    fn default() -> Self {
        Self(AtomicU64::new(NEXT_STATE.fetch_add(1, Ordering::Relaxed)))
    }
}

impl NamesState {
    fn get(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    /// Records that the names changed: snapshots that were begun before are old.
    pub fn changed(&self) {
        self.0.store(NEXT_STATE.fetch_add(1, Ordering::Relaxed), Ordering::SeqCst);
    }
}

/// The entries of a directory at one moment, without `.` and `..`, ascending by cookie.
#[derive(Debug)]
pub struct DirOrder {
    pub dir: Ino,
    pub parent: Ino,
    state: u64,
    slots: Vec<OrderSlot>,
    /// All names, one after the other.
    names: Vec<u8>,
}

#[derive(Debug, Clone, Copy)]
struct OrderSlot {
    cookie: u64,
    ino: Ino,
    name_at: u32,
    name_len: u8,
    kind: FileKind,
}

/// One entry of a [`DirOrder`].
#[derive(Debug, Clone, Copy)]
pub struct Placed<'a> {
    pub cookie: u64,
    pub name: &'a [u8],
    pub ino: Ino,
    pub kind: FileKind,
}

impl DirOrder {
    /// Returns the number of the state that it shows.
    pub fn state(&self) -> u64 {
        self.state
    }

    /// Returns its size in memory.
    pub fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<OrderSlot>() + self.names.capacity() + size_of::<Self>()
    }

    /// Returns the entries after a cookie, whose own name may be gone.
    pub fn after(&self, cookie: u64) -> impl Iterator<Item = Placed<'_>> {
        let first = self.slots.partition_point(|slot| slot.cookie <= cookie);
        self.slots.iter().skip(first).map(|slot| Placed {
            cookie: slot.cookie,
            name: self.name(slot),
            ino: slot.ino,
            kind: slot.kind,
        })
    }

    fn name(&self, slot: &OrderSlot) -> &[u8] {
        let at = slot.name_at as usize;
        self.names.get(at..at + usize::from(slot.name_len)).unwrap_or_default()
    }

    fn add(&mut self, hash: NameHash, name: &[u8], ino: Ino, kind: FileKind) -> Result<()> {
        let (Ok(name_at), Ok(name_len)) = (u32::try_from(self.names.len()), u8::try_from(name.len())) else {
            return Err(Error::new(ErrorKind::OutOfRange, Side::Application, "a directory with 4 GiB of names"));
        };
        self.names.extend_from_slice(name);
        self.slots.push(OrderSlot { cookie: hash.place(name), ino, name_at, name_len, kind });
        Ok(())
    }

    /// Sorts all entries. Entries with the same hash follow each other by name.
    fn sort(&mut self) {
        let mut slots = std::mem::take(&mut self.slots);
        slots.sort_unstable_by(|a, b| (a.cookie, self.name(a)).cmp(&(b.cookie, self.name(b))));
        let (mut place, mut same) = (0, 0);
        for slot in &mut slots {
            same = if slot.cookie == place { (same + 1).min(SAME_HASH_MASK) } else { 0 };
            place = slot.cookie;
            slot.cookie |= same;
        }
        slots.shrink_to_fit();
        self.names.shrink_to_fit();
        self.slots = slots;
    }
}

impl Overlay {
    /// Returns the present entries of a directory: from `known` if it has this state, or else collected anew.
    pub async fn dir_order(&self, dir: Ino, known: impl FnOnce(u64) -> Option<Arc<DirOrder>>) -> Result<Arc<DirOrder>> {
        self.inner.ensure_listed(dir).await?;
        let node = self.inner.node(dir)?;
        let state = node.names_state.get();
        match known(state) {
            Some(order) => Ok(order),
            None => self.inner.order(dir, state).map(Arc::new),
        }
    }

    /// Returns the present entries of a directory, sorted by name.
    pub async fn read_dir(&self, dir: Ino) -> Result<DirSnapshot> {
        let order = self.dir_order(dir, |_| None).await?;
        let dirents =
            order.after(0).map(|placed| Dirent { name: placed.name.into(), ino: placed.ino, kind: placed.kind });
        let mut entries: Vec<Dirent> = dirents.collect();
        entries.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(DirSnapshot { parent: order.parent, entries: Arc::new(entries) })
    }

    /// Returns what an entry of a snapshot stands for now, counted as a lookup; `None` if its name is gone.
    pub async fn placed_entry(&self, order: &DirOrder, placed: Placed<'_>) -> Result<Option<Entry>> {
        let inner = &self.inner;
        let same = |state: u64| inner.table.peek(order.dir).is_some_and(|node| node.names_state.get() == state);
        let mut ino = match same(order.state) {
            true => Some(placed.ino),
            false => inner.catalog.name(order.dir, placed.name)?.here_ino(),
        };
        while let Some(now) = ino {
            match inner.counted_entry(now) {
                // Removed or replaced meanwhile.
                Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Stale) => {
                    ino = inner.catalog.name(order.dir, placed.name)?.here_ino().filter(|other| *other != now);
                }
                entry => return entry.map(Some),
            }
        }
        Ok(None)
    }
}

impl Inner {
    fn order(&self, dir: Ino, state: u64) -> Result<DirOrder> {
        let parent = self.node(dir)?.state.lock().record.links.first().map_or(Ino::ROOT, |(parent, _)| *parent);
        let mut order = DirOrder { dir, parent, state, slots: Vec::new(), names: Vec::new() };
        self.catalog.names(dir, |name, record| {
            if let Some((ino, kind)) = record.here {
                order.add(self.names.hash, name, ino, kind)?;
            }
            Ok(true)
        })?;
        order.sort();
        Ok(order)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(names: &[&str]) -> DirOrder {
        let mut order = DirOrder { dir: Ino(1), parent: Ino(1), state: 0, slots: Vec::new(), names: Vec::new() };
        for (at, name) in names.iter().enumerate() {
            order.add(NameHash(1, 2), name.as_bytes(), Ino(at as u64 + 2), FileKind::File).unwrap();
        }
        order.sort();
        order
    }

    #[test]
    fn a_name_keeps_its_cookie_whatever_else_is_there() {
        let names: Vec<String> = (0..1000).map(|at| format!("f{at}")).collect();
        let all = order(&names.iter().map(String::as_str).collect::<Vec<_>>());
        let some = order(&names.iter().step_by(3).map(String::as_str).collect::<Vec<_>>());
        let cookie_of = |name: &[u8]| all.after(0).find(|placed| placed.name == name).unwrap().cookie;
        assert_eq!(some.after(0).count(), 334);
        for placed in some.after(0) {
            assert_eq!(placed.cookie, cookie_of(placed.name));
            assert!(placed.cookie > 2 && i64::try_from(placed.cookie).is_ok());
        }
        // After a name that is gone by now, the rest is the same.
        let gone = all.after(0).nth(500).unwrap().cookie;
        let rest: Vec<_> = some.after(gone).map(|placed| placed.name.to_vec()).collect();
        let right = all.after(gone).filter(|p| some.after(0).any(|s| s.name == p.name)).map(|p| p.name.to_vec());
        assert!(right.eq(rest));
    }

    #[test]
    fn entries_of_one_hash_have_cookies_of_their_own() {
        let mut order = order(&["a", "b", "c"]);
        order.slots.iter_mut().for_each(|slot| slot.cookie = 64);
        order.sort();
        let is: Vec<_> = order.after(0).map(|placed| (placed.cookie, placed.name)).collect();
        assert_eq!(is, [(64, &b"a"[..]), (65, b"b"), (66, b"c")]);
        assert_eq!(order.after(65).count(), 1);
    }
}
