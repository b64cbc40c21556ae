//! Whether what is to be staged fits into the fast pool, before anything is fetched.

use std::collections::{HashMap, HashSet};

use forebay_api::peers::ClusterShare;
use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_system::clock::unix_now;
use tokio::task::coop::consume_budget;

use super::super::{Inner, Ino, Overlay, blocking};

/// What one file that is to be staged takes of the fast pool.
#[derive(Debug, Clone, Copy, Default)]
struct FileRoom {
    /// Bytes that must be fetched.
    missing_bytes: u64,
    /// Bytes that its content occupies already.
    occupied_bytes: u64,
    held: HeldBytes,
}

/// Bytes that eviction spares. Those of one file are in one of the fields.
#[derive(Debug, Clone, Copy, Default)]
struct HeldBytes {
    dirty: u64,
    /// Of files that are not dirty.
    leased: u64,
}

/// What a stage takes of the fast pool, and what eviction spares beside it. Sparse files may have more bytes together than
/// 64 bits can count.
#[derive(Debug, Clone, Copy, Default)]
struct StageRoom {
    missing_bytes: u128,
    occupied_bytes: u128,
    others_dirty_bytes: u128,
    others_leased_bytes: u128,
}

impl StageRoom {
    fn add(&mut self, file: &FileRoom) {
        self.missing_bytes += u128::from(file.missing_bytes);
        self.occupied_bytes += u128::from(file.occupied_bytes);
        self.others_dirty_bytes -= u128::from(file.held.dirty);
        self.others_leased_bytes -= u128::from(file.held.leased);
    }

    fn fits(&self, limit_bytes: u64) -> bool {
        let others = self.others_dirty_bytes + self.others_leased_bytes;
        self.missing_bytes + self.occupied_bytes + others <= u128::from(limit_bytes)
    }
}

/// The files of a stage, as they are when it begins.
pub(super) struct StageSizes {
    files: HashMap<Ino, FileRoom>,
    /// What eviction spares, of these and of all other files.
    held: StageRoom,
    limit_bytes: u64,
}

impl StageSizes {
    fn room_of(&self, files: &[Ino]) -> StageRoom {
        let (mut room, mut added) = (self.held, HashSet::with_capacity(files.len()));
        let once = files.iter().filter(|ino| added.insert(**ino));
        once.filter_map(|ino| self.files.get(ino)).for_each(|file| room.add(file));
        room
    }

    /// Leaves out expected files that do not fit beside the requested ones, which are the first `declared`. Returns how many.
    pub fn leave_out(&self, files: &mut Vec<Ino>, declared: usize) -> usize {
        let expected = files.split_off(declared);
        let (mut room, count) = (self.room_of(files), expected.len());
        let mut added: HashSet<Ino> = files.iter().copied().collect();
        for ino in expected {
            let mut with = room;
            if !added.contains(&ino) {
                self.files.get(&ino).into_iter().for_each(|file| with.add(file));
            }
            if with.fits(self.limit_bytes) {
                room = with;
                added.insert(ino);
                files.push(ino);
            }
        }
        declared + count - files.len()
    }

    /// Returns the bytes of files that must be fetched.
    pub fn missing_bytes(&self, files: &[Ino]) -> u64 {
        u64::try_from(self.room_of(files).missing_bytes).unwrap_or(u64::MAX)
    }

    /// Refuses what can never fit.
    ///
    /// # Errors
    /// `NoSpace` with the numbers.
    pub fn check(&self, files: &[Ino]) -> Result<()> {
        let (room, limit) = (self.room_of(files), self.limit_bytes);
        if room.fits(limit) {
            return Ok(());
        }
        let StageRoom { missing_bytes, occupied_bytes, others_dirty_bytes, others_leased_bytes } = room;
        let total = missing_bytes + occupied_bytes;
        let what = format!(
            "{total} bytes are to be staged, {missing_bytes} of them from the pool, but of {limit} bytes, other files have \
             {others_dirty_bytes} that are not flushed yet and {others_leased_bytes} that are leased: flush, end leases \
             (`forebay evict --release-leases`), or give a larger --limit"
        );
        Err(Error::new(ErrorKind::NoSpace, Side::Cache, what))
    }
}

impl Overlay {
    /// Looks at the sizes of files that are to be staged, and at what else eviction spares.
    pub(super) async fn sizes_to_stage(&self, files: &[Ino], cluster: Option<ClusterShare>) -> Result<StageSizes> {
        let mut sizes = HashMap::with_capacity(files.len());
        for ino in files {
            consume_budget().await;
            sizes.insert(*ino, self.inner.room_of_file(*ino, cluster)?);
        }
        let inner = self.inner.clone();
        blocking(move || {
            let mut held = StageRoom::default();
            inner.each_held(|ino, bytes| {
                held.others_dirty_bytes += u128::from(bytes.dirty);
                held.others_leased_bytes += u128::from(bytes.leased);
                if let Some(file) = sizes.get_mut(&ino) {
                    file.held = bytes;
                }
            })?;
            Ok(StageSizes { files: sizes, held, limit_bytes: inner.store.budget.limit() })
        })
        .await
    }
}

impl Inner {
    fn room_of_file(&self, ino: Ino, cluster: Option<ClusterShare>) -> Result<FileRoom> {
        let Some(node) = self.node_unless_gone(ino)? else { return Ok(FileRoom::default()) };
        let share = match self.share_of(&node, cluster) {
            // It has grown since the files were found: its staging reports that.
            Err(e) if e.is(ErrorKind::NoSpace) => return Ok(FileRoom::default()),
            share => share?,
        };
        let (bytes, missing_bytes) = self.bytes_of_share(&node, &share)?;
        let state = &mut *node.state.lock();
        // Less than the resident bytes, if there are holes among them. What is in memory takes nothing of the limit.
        let in_memory = state.record.file.content().is_some_and(|id| self.store.is_volatile(id));
        let counted = if in_memory { 0 } else { self.counted_bytes(state) };
        let occupied_bytes = bytes.saturating_sub(missing_bytes).min(counted);
        Ok(FileRoom { missing_bytes, occupied_bytes, held: HeldBytes::default() })
    }

    /// Visits the files that eviction spares because the pool may not have them, and those with leases.
    fn each_held(&self, mut each: impl FnMut(Ino, HeldBytes)) -> Result<()> {
        let mut dirty_files = HashSet::new();
        self.each_dirty(|ino, dirty| {
            dirty_files.insert(ino);
            each(ino, HeldBytes { dirty, leased: 0 });
        })?;
        let now = unix_now();
        self.catalog.leases(|ino, leases| {
            if let Some(leased) = leases.bytes(now).filter(|_| !dirty_files.contains(&ino)) {
                each(ino, HeldBytes { dirty: 0, leased });
            }
            Ok(true)
        })
    }
}
