//! Whether the bytes that were written through to the pool are durable there.

/// Bytes after which they are made durable: an error of the pool reaches the program while it still writes, and a power
/// cut of the pool's machine loses no more than this.
const UNSYNCED_MAX_BYTES: u64 = 64 << 20;

/// The bytes of a file that were written through to the pool.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PoolSync {
    #[default]
    Synced,
    /// So many bytes may not be durable.
    Unsynced(u64),
    /// The pool lost some: each `fsync` fails.
    Lost,
}

impl PoolSync {
    pub fn wrote(&mut self, bytes: u64) {
        *self = match *self {
            Self::Synced => Self::Unsynced(bytes),
            Self::Unsynced(before) => Self::Unsynced(before.saturating_add(bytes)),
            Self::Lost => Self::Lost,
        };
    }

    /// A sync succeeded that began when there were so many bytes.
    pub fn synced(&mut self, before: Self) {
        if *self == before && before != Self::Lost {
            *self = Self::Synced;
        }
    }

    pub fn lost(&mut self) {
        *self = Self::Lost;
    }

    pub fn is_due(self) -> bool {
        matches!(self, Self::Unsynced(bytes) if bytes >= UNSYNCED_MAX_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sync_covers_what_was_written_before_it_and_what_was_lost_stays_lost() {
        let mut sync = PoolSync::default();
        sync.wrote(10);
        let before = sync;
        sync.wrote(UNSYNCED_MAX_BYTES);
        sync.synced(before);
        assert_eq!(sync, PoolSync::Unsynced(UNSYNCED_MAX_BYTES + 10));
        assert!(sync.is_due() && !before.is_due());
        sync.synced(sync);
        assert_eq!(sync, PoolSync::Synced);
        sync.lost();
        sync.wrote(1);
        sync.synced(sync);
        assert_eq!(sync, PoolSync::Lost);
    }
}
