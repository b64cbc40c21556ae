//! What stays open for a while although no client reads it, in the order of its last use. Each holds a descriptor, and its
//! content is not evicted.

use std::hash::Hash;
use std::time::{Duration, Instant};

use lru::LruCache;

/// The most files that stay open.
const OPEN_MAX: usize = 1024;
/// The share of the fast pool that they may hold.
const OPEN_SHARE: u64 = 8;
/// How long a file stays open after its last use.
const IDLE: Duration = Duration::from_secs(10);

/// Open files by key. What is taken out, or has no room, is returned: closing it must not happen under the caller's lock.
pub(crate) struct KeptOpen<K: Hash + Eq, V> {
    by_key: LruCache<K, OpenEntry<V>>,
    bytes: u64,
    bytes_max: u64,
}

struct OpenEntry<V> {
    value: V,
    bytes: u64,
    used: Instant,
}

impl<K: Hash + Eq + Clone, V> KeptOpen<K, V> {
    /// `limit`: that of the fast pool, in bytes.
    pub fn new(limit: u64) -> Self {
        Self { by_key: LruCache::unbounded(), bytes: 0, bytes_max: limit / OPEN_SHARE }
    }

    /// Uses an entry.
    pub fn get(&mut self, key: &K) -> Option<&mut V> {
        let entry = self.by_key.get_mut(key)?;
        entry.used = Instant::now();
        Some(&mut entry.value)
    }

    pub fn peek(&self, key: &K) -> Option<&V> {
        self.by_key.peek(key).map(|entry| &entry.value)
    }

    pub fn take(&mut self, key: &K) -> Option<V> {
        let entry = self.by_key.pop(key)?;
        self.bytes -= entry.bytes;
        Some(entry.value)
    }

    /// Takes all whose keys `goes` accepts.
    pub fn take_all(&mut self, goes: impl Fn(&K) -> bool) -> Vec<V> {
        let keys: Vec<K> = self.by_key.iter().map(|(key, _)| key).filter(|key| goes(key)).cloned().collect();
        keys.iter().filter_map(|key| self.take(key)).collect()
    }

    /// Takes those that were not used for a while.
    pub fn take_idle(&mut self, now: Instant) -> Vec<V> {
        self.take_oldest_while(|all| {
            let oldest = all.by_key.peek_lru();
            oldest.is_some_and(|(_, entry)| now.saturating_duration_since(entry.used) >= IDLE)
        })
    }

    /// Puts an entry in place of any of the same key. Returns those that have no room any longer, maybe this one.
    pub fn put(&mut self, key: K, value: V, bytes: u64) -> Vec<V> {
        let mut closed: Vec<V> = self.take(&key).into_iter().collect();
        if bytes > self.bytes_max {
            closed.push(value);
            return closed;
        }
        self.bytes += bytes;
        self.by_key.put(key, OpenEntry { value, bytes, used: Instant::now() });
        closed.extend(self.take_oldest_while(|all| all.by_key.len() > OPEN_MAX || all.bytes > all.bytes_max));
        closed
    }

    fn take_oldest_while(&mut self, goes: impl Fn(&Self) -> bool) -> Vec<V> {
        let mut taken = Vec::new();
        while goes(self) {
            let Some((_, entry)) = self.by_key.pop_lru() else { break };
            self.bytes -= entry.bytes;
            taken.push(entry.value);
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_first_and_what_is_too_large_does_not_stay() {
        let mut open = KeptOpen::new(80);
        assert!(open.put("a", 1, 4).is_empty() && open.put("b", 2, 4).is_empty());
        assert_eq!(open.get(&"a"), Some(&mut 1));
        assert_eq!(open.put("c", 3, 4), [2]);
        assert_eq!(open.put("d", 4, 11), [4]);
        assert_eq!(open.put("a", 5, 10), [1, 3], "the old one of the same key, and the oldest");
        assert_eq!((open.peek(&"a"), open.peek(&"c")), (Some(&5), None));
        let now = Instant::now();
        assert!(open.take_idle(now).is_empty());
        assert_eq!(open.take_idle(now + IDLE), [5]);
        open.put("x", 6, 10);
        assert_eq!(open.take_all(|key| *key == "x"), [6]);
        assert!(open.put("y", 7, 10).is_empty(), "what was taken out leaves its room");
    }
}
