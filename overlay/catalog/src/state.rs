//! The state of one file's content: how much of it is resident, and whether it is newer than the pool's copy.
//!
//! ```text
//!              begin_fetch            complete
//!   ┌─ Absent ────────────► Partial ────────────► Resident ◄───────────┐
//!   │    ▲  ▲                  │                   │   │               │
//!   │    │  └── evict ─────────┴─── evict ─────────┘   │ modify        │ flushed
//!   │    └───── pool_changed (from the three) ──┘      ▼               │
//!   └────────────────── replace (truncate to 0) ────► Dirty ───────────┘
//! ```
//!
//! `moved` changes the content file of whole content, and nothing else.
//!
//! A file that does not fit into the fast pool is written through to the pool's copy, if the pool can write ranges:
//! `begin_write_through` leads from Absent to WrittenThrough, and `end_write_through` back. Meanwhile no bytes are resident and none can be fetched, so
//! there is nothing that could differ from the pool's copy.
//!
//! If the pool cannot write ranges but takes parts ahead of an object, `spill` leads from Dirty to Spilled: ranges of the
//! content are in parts in the pool (`Spilled` in the catalog), and the content file has holes there. `unspill` leads back
//! when no range is left, and `flushed_in_parts` to Absent when the pool has the file.
//!
//! Dirty content cannot be evicted and cannot be replaced by the pool's: there is no such transition.
//!
//! Dirty content is always whole, on the fast pool and in parts: a partial file is completed before it is modified. A partial dirty file could show
//! zeros or old bytes after a power cut, and recovery would need two sets of extents. The price is that the first write
//! to a large file that is not resident fetches it.
//!
//! While a file is dirty, the size and mtime of its content file are the truth: the daemon does not see passthrough
//! writes. The flush that makes the file clean copies size and mtime into the record. If nothing was written until the
//! last close, the file is marked clean again.

use forebay_cache::ContentId;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum FileStateKind {
    /// No bytes are resident.
    Absent,
    /// Some ranges are resident. They belong to the version that the record names.
    Partial(ContentId),
    /// All bytes are resident, and equal the pool's copy of the version that the record names.
    Resident(ContentId),
    /// All bytes are resident, and the pool's copy is older or does not exist. `since`: seconds since 1970.
    Dirty { content: ContentId, since: u64 },
    /// No bytes are resident, and programs of this node write to the pool's copy. The record may be one write behind.
    WrittenThrough,
    /// As `Dirty`, but some ranges are in parts in the pool instead of the content file.
    Spilled { content: ContentId, since: u64 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileState(FileStateKind);

/// A transition that does not exist in the current state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no transition {transition} from {from}")]
pub struct Illegal {
    transition: &'static str,
    from: &'static str,
}

impl FileState {
    pub fn absent() -> Self {
        Self(FileStateKind::Absent)
    }

    /// Returns the state of a file that was created in the mount.
    pub fn created(content: ContentId, now: u64) -> Self {
        Self(FileStateKind::Dirty { content, since: now })
    }

    /// The fetch of the first bytes into `content` is about to begin.
    pub fn begin_fetch(self, content: ContentId) -> Result<Self, Illegal> {
        match self.0 {
            FileStateKind::Absent => Ok(Self(FileStateKind::Partial(content))),
            _ => Err(self.illegal("begin_fetch")),
        }
    }

    /// The last missing bytes were fetched.
    pub fn complete(self) -> Result<Self, Illegal> {
        match self.0 {
            FileStateKind::Partial(content) => Ok(Self(FileStateKind::Resident(content))),
            _ => Err(self.illegal("complete")),
        }
    }

    /// The content is about to be changed in place.
    pub fn modify(self, now: u64) -> Result<Self, Illegal> {
        match self.0 {
            FileStateKind::Resident(content) => Ok(Self(FileStateKind::Dirty { content, since: now })),
            FileStateKind::Dirty { .. } | FileStateKind::Spilled { .. } => Ok(self),
            _ => Err(self.illegal("modify")),
        }
    }

    /// All content is replaced by a new content file.
    pub fn replace(self, content: ContentId, now: u64) -> Self {
        let since = match self.0 {
            FileStateKind::Dirty { since, .. } | FileStateKind::Spilled { since, .. } => since,
            _ => now,
        };
        Self(FileStateKind::Dirty { content, since })
    }

    /// The same bytes are in another content file.
    pub fn moved(self, content: ContentId) -> Result<Self, Illegal> {
        match self.0 {
            FileStateKind::Resident(_) => Ok(Self(FileStateKind::Resident(content))),
            FileStateKind::Dirty { since, .. } => Ok(Self(FileStateKind::Dirty { content, since })),
            _ => Err(self.illegal("moved")),
        }
    }

    /// The pool has exactly the local content.
    pub fn flushed(self) -> Result<Self, Illegal> {
        match self.0 {
            FileStateKind::Dirty { content, .. } => Ok(Self(FileStateKind::Resident(content))),
            _ => Err(self.illegal("flushed")),
        }
    }

    /// Ranges of the content were sent to the pool in parts.
    pub fn spill(self) -> Result<Self, Illegal> {
        match self.0 {
            FileStateKind::Dirty { content, since } => Ok(Self(FileStateKind::Spilled { content, since })),
            FileStateKind::Spilled { .. } => Ok(self),
            _ => Err(self.illegal("spill")),
        }
    }

    /// The content file has all bytes again.
    pub fn unspill(self) -> Result<Self, Illegal> {
        match self.0 {
            FileStateKind::Spilled { content, since } => Ok(Self(FileStateKind::Dirty { content, since })),
            _ => Err(self.illegal("unspill")),
        }
    }

    /// The pool has exactly the spilled content. Returns the content file to remove.
    pub fn flushed_in_parts(self) -> Result<(Self, ContentId), Illegal> {
        match self.0 {
            FileStateKind::Spilled { content, .. } => Ok((Self(FileStateKind::Absent), content)),
            _ => Err(self.illegal("flushed_in_parts")),
        }
    }

    /// Gives up the resident bytes. Returns the content file to remove.
    pub fn evict(self) -> Result<(Self, ContentId), Illegal> {
        match self.0 {
            FileStateKind::Partial(content) | FileStateKind::Resident(content) => {
                Ok((Self(FileStateKind::Absent), content))
            }
            _ => Err(self.illegal("evict")),
        }
    }

    /// The pool's copy became another version, so no resident byte belongs to it. Returns the content file to remove.
    pub fn pool_changed(self) -> Result<(Self, Option<ContentId>), Illegal> {
        match self.0 {
            FileStateKind::Absent | FileStateKind::WrittenThrough => Ok((self, None)),
            FileStateKind::Partial(content) | FileStateKind::Resident(content) => {
                Ok((Self(FileStateKind::Absent), Some(content)))
            }
            FileStateKind::Dirty { .. } | FileStateKind::Spilled { .. } => Err(self.illegal("pool_changed")),
        }
    }

    /// From now on, programs write to the pool's copy.
    pub fn begin_write_through(self) -> Result<Self, Illegal> {
        match self.0 {
            FileStateKind::Absent => Ok(Self(FileStateKind::WrittenThrough)),
            _ => Err(self.illegal("begin_write_through")),
        }
    }

    /// The last program that wrote to the pool's copy closed the file.
    pub fn end_write_through(self) -> Result<Self, Illegal> {
        match self.0 {
            FileStateKind::WrittenThrough => Ok(Self(FileStateKind::Absent)),
            _ => Err(self.illegal("end_write_through")),
        }
    }

    pub fn content(self) -> Option<ContentId> {
        match self.0 {
            FileStateKind::Absent | FileStateKind::WrittenThrough => None,
            FileStateKind::Partial(content)
            | FileStateKind::Resident(content)
            | FileStateKind::Dirty { content, .. }
            | FileStateKind::Spilled { content, .. } => Some(content),
        }
    }

    /// Returns whether the pool's copy is older than the content, or does not exist.
    pub fn is_dirty(self) -> bool {
        matches!(self.0, FileStateKind::Dirty { .. } | FileStateKind::Spilled { .. })
    }

    /// Returns whether all bytes are in the content file.
    pub fn is_whole(self) -> bool {
        matches!(self.0, FileStateKind::Resident(_) | FileStateKind::Dirty { .. })
    }

    pub fn is_partial(self) -> bool {
        matches!(self.0, FileStateKind::Partial(_))
    }

    /// Returns whether no bytes are resident.
    pub fn is_absent(self) -> bool {
        matches!(self.0, FileStateKind::Absent | FileStateKind::WrittenThrough)
    }

    pub fn is_written_through(self) -> bool {
        matches!(self.0, FileStateKind::WrittenThrough)
    }

    /// Returns whether ranges of dirty content are in parts in the pool.
    pub fn is_spilled(self) -> bool {
        matches!(self.0, FileStateKind::Spilled { .. })
    }

    fn name(self) -> &'static str {
        match self.0 {
            FileStateKind::Absent => "absent",
            FileStateKind::Partial(_) => "partial",
            FileStateKind::Resident(_) => "resident",
            FileStateKind::Dirty { .. } => "dirty",
            FileStateKind::WrittenThrough => "written through",
            FileStateKind::Spilled { .. } => "spilled",
        }
    }

    fn illegal(self, transition: &'static str) -> Illegal {
        Illegal { transition, from: self.name() }
    }
}

impl From<Illegal> for forebay_backends::Error {
    fn from(illegal: Illegal) -> Self {
        use forebay_backends::{ErrorKind, Side};
        Self::new(ErrorKind::Corrupt, Side::Cache, illegal.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone, Copy)]
    enum Step {
        BeginFetch,
        Complete,
        Modify,
        Moved,
        Replace,
        Flushed,
        Evict,
        PoolChanged,
        BeginWriteThrough,
        EndWriteThrough,
        Spill,
        Unspill,
        FlushedInParts,
    }

    fn step() -> impl Strategy<Value = Step> {
        use Step::*;
        let all = [BeginFetch, Complete, Modify, Moved, Replace, Flushed, Evict, PoolChanged];
        prop::sample::select([&all[..], &[BeginWriteThrough, EndWriteThrough, Spill, Unspill, FlushedInParts]].concat())
    }

    proptest! {
        /// Compares the state machine with a model of five facts: resident bytes (none, some, all), whether they are
        /// newer than the pool's, the content file, whether programs write to the pool's copy, and whether bytes are in
        /// parts.
        #[test]
        fn no_step_loses_newer_bytes(steps in prop::collection::vec(step(), 1..60)) {
            let mut state = FileState::absent();
            let (mut here, mut newer, mut content, mut next) = (0u8, false, None, 0u64);
            let (mut through, mut parts) = (false, false);
            for step in steps {
                next += 1;
                let before = state;
                let result = match step {
                    Step::BeginFetch => state.begin_fetch(ContentId(next)),
                    Step::Complete => state.complete(),
                    Step::Modify => state.modify(next),
                    Step::Moved => state.moved(ContentId(next)),
                    Step::Replace => Ok(state.replace(ContentId(next), next)),
                    Step::Flushed => state.flushed(),
                    Step::Evict => state.evict().map(|(s, _)| s),
                    Step::PoolChanged => state.pool_changed().map(|(s, _)| s),
                    Step::BeginWriteThrough => state.begin_write_through(),
                    Step::EndWriteThrough => state.end_write_through(),
                    Step::Spill => state.spill(),
                    Step::Unspill => state.unspill(),
                    Step::FlushedInParts => state.flushed_in_parts().map(|(s, _)| s),
                };
                let legal = match step {
                    Step::BeginFetch | Step::BeginWriteThrough => here == 0 && !through,
                    Step::EndWriteThrough => through,
                    Step::Complete => here == 1,
                    Step::Modify => here == 2,
                    Step::Moved => here == 2 && !parts,
                    Step::Replace => true,
                    Step::Flushed => newer && !parts,
                    Step::Spill => newer,
                    Step::Unspill | Step::FlushedInParts => parts,
                    Step::Evict => here > 0 && !newer,
                    Step::PoolChanged => !newer,
                };
                prop_assert_eq!(result.is_ok(), legal, "{:?} in {:?}", step, before);
                let Ok(after) = result else { continue };
                match step {
                    Step::BeginFetch => (here, content) = (1, Some(next)),
                    Step::Complete => here = 2,
                    Step::Modify => newer = true,
                    Step::Moved => content = Some(next),
                    Step::Replace => {
                        (here, newer, content, through, parts) = (2, true, Some(next), false, false);
                    }
                    Step::Spill => parts = true,
                    Step::Unspill => parts = false,
                    Step::BeginWriteThrough => through = true,
                    Step::EndWriteThrough => through = false,
                    Step::Flushed => newer = false,
                    Step::Evict | Step::PoolChanged => (here, content) = (0, None),
                    Step::FlushedInParts => (here, newer, content, parts) = (0, false, None, false),
                }
                state = after;
                prop_assert_eq!(state.is_dirty(), newer);
                prop_assert_eq!(state.is_whole(), here == 2 && !parts);
                prop_assert_eq!(state.is_spilled(), parts);
                prop_assert_eq!(state.is_absent(), here == 0);
                prop_assert_eq!(state.is_written_through(), through);
                prop_assert_eq!(state.content().map(|c| c.0), content);
            }
        }
    }
}
