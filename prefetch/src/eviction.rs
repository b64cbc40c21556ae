//! The order of eviction when the fast pool is full: the [`Evictor`] trait, and one policy per file.
//!
//! A policy only orders. The caller knows what may be evicted (clean, unleased, not open); the policy asks through
//! `may_evict`.

mod cost;
mod epoch;
mod gdsf;
mod gittins;
mod lru;
mod queue;
mod s3fifo;
mod sieve;
#[cfg(test)]
mod tests;
mod wtinylfu;

pub use epoch::EpochPin;
pub use gdsf::Gdsf;
pub use gittins::Gittins;
pub use lru::Lru;
pub use s3fifo::S3Fifo;
pub use sieve::Sieve;
pub use wtinylfu::WTinyLfu;

/// One policy. Keys are opaque content ids, sizes are bytes on the fast pool. Not `Sync`: the caller locks.
///
/// The policy never evicts by itself: it may hold more than its capacity until the caller asks for victims.
pub trait Evictor: Send {
    /// Adds content that is new or was fetched again. A key that is already resident is resized instead.
    fn insert(&mut self, key: u64, bytes: u64);

    /// Notes a use. Unknown keys are ignored.
    fn access(&mut self, key: u64);

    /// Notes that the content is now `bytes` long on the fast pool. Unknown keys are ignored.
    fn resize(&mut self, key: u64, bytes: u64);

    /// Forgets content that was removed for a reason other than eviction, including its ghost. Unknown keys are
    /// ignored.
    fn remove(&mut self, key: u64);

    /// Takes out the next victim that `may_evict` allows, and remembers it if the policy has ghosts. `None` if no
    /// resident content may be evicted.
    ///
    /// The first key for which `may_evict` returns true *is* the victim, and the policy asks for no further key, so the
    /// caller may claim the content inside the closure. Refused keys stay. A call takes at most a small multiple of
    /// [`Evictor::len`] steps. A call without a victim has taken them all, so don't repeat it before something has
    /// changed.
    fn evict(&mut self, may_evict: &mut dyn FnMut(u64) -> bool) -> Option<u64>;

    /// Returns the number of resident contents.
    fn len(&self) -> usize;

    /// Returns the sum of their sizes; `u64::MAX` if it does not fit.
    fn bytes(&self) -> u64;

    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

type Build = fn(u64) -> Box<dyn Evictor>;

/// A new policy is one new file and one line in this table.
const POLICIES: &[(&str, Build)] = &[
    ("lru", |_| Box::new(Lru::new())),
    ("s3fifo", |capacity_bytes| Box::new(S3Fifo::new(capacity_bytes))),
    ("sieve", |_| Box::new(Sieve::new())),
    ("wtinylfu", |capacity_bytes| Box::new(WTinyLfu::new(capacity_bytes))),
    ("gdsf", |_| Box::new(Gdsf::new())),
    ("epoch", |_| Box::new(EpochPin::new())),
    ("gittins", |capacity_bytes| Box::new(Gittins::new(capacity_bytes))),
];

/// The default policy: the one that wins `benches/src/foresight`.
pub const DEFAULT: &str = "gittins";

/// Returns the policy that the configuration calls `name`, for a fast pool of `capacity_bytes`; `None` if there is
/// none.
pub fn by_name(name: &str, capacity_bytes: u64) -> Option<Box<dyn Evictor>> {
    POLICIES.iter().find(|(known, _)| *known == name).map(|(_, build)| build(capacity_bytes))
}

/// Returns the names that [`by_name`] knows, for messages and help texts.
pub fn names() -> impl Iterator<Item = &'static str> {
    POLICIES.iter().map(|(name, _)| *name)
}
