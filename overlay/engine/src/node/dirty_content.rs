//! What is known of dirty content beyond its record in the catalog.

use forebay_cache::Stamp;

/// Dirty content: whether the record that says so is durable, and whether the pool has the content all the same.
///
/// | transition | mark | pool's copy |
/// |---|---|---|
/// | [`Self::marked`] | volatile | equals the content until it is written |
/// | [`Self::became_only_copy`] | volatile | differs: there is none |
/// | [`Self::synced`] | durable | |
/// | [`Self::uploaded`] | | equals the content until it is written, or differs |
/// | [`Self::forget_pool_copy`] | | differs |
///
/// A write that bypasses the daemon makes no transition: it changes the stamp of the content, and the known stamp no
/// longer equals it.
#[derive(Debug, Default)]
pub(crate) struct DirtyContent {
    mark: Mark,
    pool_copy: PoolCopy,
}

/// The record in the catalog.
#[derive(Debug, Default, PartialEq, Eq)]
enum Mark {
    #[default]
    Durable,
    Volatile,
}

/// The pool's copy, compared with the content.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum PoolCopy {
    #[default]
    Differs,
    /// It equals the content as long as the content has this stamp: the content was marked dirty before any write.
    Unwritten(Stamp),
    /// It equals the content as long as the content has this stamp: it was uploaded while programs had the file open.
    Uploaded(Stamp),
}

impl DirtyContent {
    /// Clean content was marked dirty. The mark is not synced yet.
    pub fn marked(&mut self, stamp: Stamp) {
        (self.mark, self.pool_copy) = (Mark::Volatile, PoolCopy::Unwritten(stamp));
    }

    /// Clean content was marked dirty, because the pool does not have it any more. The mark is not synced yet.
    pub fn became_only_copy(&mut self) {
        (self.mark, self.pool_copy) = (Mark::Volatile, PoolCopy::Differs);
    }

    /// The mark was synced.
    pub fn synced(&mut self) {
        self.mark = Mark::Durable;
    }

    /// The daemon changes the content, or it is clean: it is not compared with the pool's copy any more.
    pub fn forget_pool_copy(&mut self) {
        self.pool_copy = PoolCopy::Differs;
    }

    /// The content was uploaded, and stays dirty. `stamp`: the stamp that it had, if no write before or after can hide
    /// behind the same stamp.
    pub fn uploaded(&mut self, stamp: Option<Stamp>) {
        self.pool_copy = stamp.map_or(PoolCopy::Differs, PoolCopy::Uploaded);
    }

    pub fn is_durable(&self) -> bool {
        self.mark == Mark::Durable
    }

    /// Returns the stamp with which the content equals the pool's copy.
    pub fn pool_stamp(&self) -> Option<Stamp> {
        match self.pool_copy {
            PoolCopy::Differs => None,
            PoolCopy::Unwritten(stamp) | PoolCopy::Uploaded(stamp) => Some(stamp),
        }
    }

    /// Returns the stamp with which the content was uploaded, if it stayed dirty.
    pub fn uploaded_stamp(&self) -> Option<Stamp> {
        match self.pool_copy {
            PoolCopy::Uploaded(stamp) => Some(stamp),
            _ => None,
        }
    }

    /// Whether content with this stamp was not written since it was marked dirty.
    pub fn is_unwritten(&self, stamp: Stamp) -> bool {
        self.pool_copy == PoolCopy::Unwritten(stamp)
    }
}
