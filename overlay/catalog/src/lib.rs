//! The catalog: the RocksDB database that knows every name and the state of every file. It is the only
//! authority; everything in memory is a cache of it.
//!
//! One change of the overlay is one [`Batch`]. When [`Catalog::write`] returns, the operating system has the batch, so
//! the batch survives the death of the process. It survives a power cut after [`Catalog::sync`].
//!
//! Content that replaces other content, by a rename or after `O_TRUNC`, is synced before the catalog (`sync_order.rs`), as
//! on ext4: for programs that replace a file without a sync.

mod allocations;
mod batch;
mod boot;
mod cf;
mod content;
mod epochs;
mod errors;
mod ids;
mod ino;
mod jobs;
mod lost_contents;
mod profiles;
mod queue;
pub mod rebuild;
mod recent;
mod records;
mod spilled;
mod state;
mod sync_order;
mod write_faults;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_backends::{Error, ErrorKind, Result, Side};
use rocksdb::{
    BlockBasedIndexType, BlockBasedOptions, Cache, ColumnFamily, ColumnFamilyDescriptor, DB, Direction, IteratorMode,
    Options,
};
use serde::{Serialize, de::DeserializeOwned};

pub use allocations::{AllocationRecord, AllocationState, AllocationWork, ScratchResults, Transition, WrongPhase};
pub use batch::Batch;
use boot::{boot_id, may_be_torn};
pub use content::ContentRecord;
use epochs::EpochNumbers;
pub use errors::damaged;
use errors::{corrupt, failed, not_opened};
use forebay_cache::group_commit::{GroupCommit, ServedTurns};
use forebay_cache::{ContentId, ContentNumbers};
use ids::IdAllocator;
pub use ino::Ino;
pub use jobs::{FileOfJob, JobHead, JobSerial};
pub use lost_contents::Lost;
use lost_contents::LostContents;
pub use profiles::ProfileHead;
use queue::{FlushQueue, IntentRecord};
pub use queue::{Lane, QueueHeads, QueueSlot, Queued, Wait};
use recent::RecentNames;
pub use records::{
    DirtyAttrs, InodeRecord, LeaseRecord, Leases, Link, ListingState, NameRecord, PendingCall, PendingChange,
    XattrChanges, Xattrs, unmatched,
};
pub use records::{append, decode, decode_first, encode};
pub use spilled::{Spilled, SpilledRange};
pub use state::FileState;
use sync_order::SyncOrder;
pub use write_faults::WriteFaults;

/// The layout of the records; a catalog of another format is refused.
const FORMAT: u32 = 8;
/// Memory for the block cache, shared by all column families.
const BLOCK_CACHE_BYTES: usize = 8 << 20;
/// Memory for records that are not yet in a table file, shared by all column families.
const WRITE_BUFFER_BYTES: usize = 8 << 20;
/// The most write buffer memory of one column family.
const FAMILY_BUFFER_BYTES: usize = 4 << 20;

/// A difference between overlay and pool.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Intent {
    /// A name differs between overlay and pool.
    Name(Ino, Box<[u8]>),
    /// Content or attributes of an inode differ between overlay and pool.
    Inode(Ino),
}

/// What survives without a sync.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// A batch survives the death of the process.
    #[default]
    Process,
    /// An unsynced batch is lost with the process, as in a power cut; for tests.
    SyncedOnly,
}

pub struct Catalog {
    db: DB,
    inodes: IdAllocator,
    contents: IdAllocator,
    epochs: EpochNumbers,
    /// Distinguishes inode numbers of this catalog from equal ones of an earlier catalog in the same place.
    generation: u32,
    /// The number of the last change that [`Self::sync_changes`] synced.
    synced_changes: AtomicU64,
    /// Notified by each change.
    changed: tokio::sync::Notify,
    /// Notified when a part in the pool may have to be removed.
    parts_leave: tokio::sync::Notify,
    /// Calls of [`Self::sync_written`].
    commits: GroupCommit,
    served: parking_lot::Mutex<ServedTurns>,
    sync_order: SyncOrder,
    lost: LostContents,
    faults: WriteFaults,
    recent: RecentNames,
    queue: FlushQueue,
    /// Jobs whose records only another version can read, and which the log has named.
    unreadable_jobs: parking_lot::Mutex<BTreeSet<JobSerial>>,
}

impl ContentNumbers for Catalog {
    fn new_content(&self) -> Result<ContentId> {
        Ok(ContentId(self.contents.next(self)?))
    }
}

impl Catalog {
    /// Opens or creates the catalog in a directory.
    ///
    /// # Errors
    /// `Corrupt` if it is damaged or has another format; `Busy` if another process has it open; `InvalidInput` if a newer
    /// program made it; otherwise the error of the file system.
    pub fn open(path: &Path, durability: Durability) -> Result<Self> {
        let boot = boot_id();
        let db = open_db(path, durability, may_be_torn(path, durability, &boot))?;
        // If the mark cannot be written, the next start assumes a power cut.
        let _ = boot::mark(path, &boot);
        let mut catalog = Self::over(db, Ino::ROOT.0 + 1, 1)?;
        match catalog.meta::<u32>("format")? {
            None => {
                // Positive as a signed number, which the kernel makes of it; 0 is the generation of the root.
                catalog.set_meta("generation", &rand::random_range(1..=i32::MAX.cast_unsigned()))?;
                catalog.set_meta("format", &FORMAT)?;
            }
            Some(FORMAT) => {}
            Some(other) => {
                return Err(Error::new(
                    ErrorKind::Corrupt,
                    Side::Cache,
                    format!(
                        "catalog {} has format {other}, this program writes {FORMAT}: flush it with the program that \
                         made it, then give an empty fast pool",
                        path.display()
                    ),
                ));
            }
        }
        catalog.generation = catalog.meta("generation")?.unwrap_or(0);
        catalog.start_epoch(durability)?;
        catalog.bring_forward()?;
        Ok(catalog)
    }

    pub fn with_faults(self, faults: WriteFaults) -> Self {
        Self { faults, ..self }
    }

    /// Makes a catalog of an open database. `first_inode`: the first number to give if none was given yet.
    fn over(db: DB, first_inode: u64, epoch: u64) -> Result<Self> {
        Ok(Self {
            inodes: IdAllocator::new("next_inode", first_inode),
            contents: IdAllocator::new("next_content", 1),
            epochs: EpochNumbers::at(epoch),
            generation: 0,
            synced_changes: AtomicU64::new(u64::MAX),
            changed: tokio::sync::Notify::new(),
            parts_leave: tokio::sync::Notify::new(),
            commits: GroupCommit::default(),
            served: parking_lot::Mutex::default(),
            sync_order: SyncOrder::default(),
            lost: LostContents::load(&db)?,
            faults: WriteFaults::default(),
            recent: RecentNames::new(),
            queue: FlushQueue::load(&db)?,
            unreadable_jobs: Default::default(),
            db,
        })
    }

    /// Returns the generation of all inodes of this catalog. One is enough, since no number is given twice. A file
    /// handle consists of inode number and generation, and outlives mounts and catalogs.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    pub fn new_ino(&self) -> Result<Ino> {
        Ok(Ino(self.inodes.next(self)?))
    }

    /// Reserves numbers ahead of need: if none is left, a caller that creates a file waits for the disk. Blocks.
    pub fn reserve_numbers(&self) -> Result<()> {
        self.inodes.refill(self)?;
        self.contents.refill(self)
    }

    pub fn batch(&self) -> Batch<'_> {
        Batch::new(self)
    }

    /// Applies a batch, which survives the death of the process when this returns.
    pub fn write(&self, batch: Batch<'_>) -> Result<()> {
        let write = |batch| self.db.write(batch).map_err(|e| failed("write to the catalog", e));
        let written = self.faults.check().and_then(|()| self.write_forgetting(batch.forgotten, batch.inner, write));
        batch.names.iter().for_each(|key| self.recent.forget(key));
        written?;
        self.queue.was_added(&batch.queued_for);
        if batch.parts_leave {
            self.announce_leaving_parts();
        }
        self.announce_change();
        Ok(())
    }

    /// Syncs what was written since the last call of this function. Without a new change, it does not touch the disk.
    pub fn sync_changes(&self) -> Result<()> {
        // Later writes have higher numbers, and are left to the next call.
        let written = self.db.latest_sequence_number();
        if self.has_synced(written) {
            return Ok(());
        }
        self.sync()?;
        self.synced_changes.store(written, Ordering::Release);
        Ok(())
    }

    /// Returns whether [`Self::sync_changes`] has nothing to do.
    pub fn is_synced(&self) -> bool {
        self.has_synced(self.db.latest_sequence_number())
    }

    fn has_synced(&self, change: u64) -> bool {
        self.synced_changes.load(Ordering::Acquire) == change && self.to_sync_first() == 0
    }

    /// Wakes the task that waits in [`Self::changed`]: a change was made, or is about to be made.
    pub fn announce_change(&self) {
        self.changed.notify_one();
    }

    /// Waits for a change. Returns at once if one was made since the last call. For one task.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Stores how much of the fast pool is occupied, if that changed.
    pub fn set_used_bytes(&self, bytes: u64) -> Result<()> {
        if self.meta("used_bytes")? == Some(bytes) {
            return Ok(());
        }
        self.set_meta("used_bytes", &bytes)
    }

    /// Like [`Self::sync`], but one of several waiting callers syncs for all.
    pub fn sync_written(&self) -> Result<()> {
        let turn = self.commits.ask();
        let mut served = self.served.lock();
        let Some(waiting) = self.commits.begin(turn, &served) else { return Ok(()) };
        self.sync()?;
        served.serve(waiting);
        Ok(())
    }

    pub fn inode(&self, ino: Ino) -> Result<Option<InodeRecord>> {
        self.get(cf::INODES, &ino.0.to_be_bytes())
    }

    pub fn name(&self, parent: Ino, name: &[u8]) -> Result<NameRecord> {
        let key = name_key(parent, name);
        self.recent.get(&key, || Ok(self.get(cf::NAMES, &key)?.unwrap_or_default()))
    }

    pub fn leases_of(&self, ino: Ino) -> Result<Leases> {
        Ok(self.get(cf::LEASES, &ino.0.to_be_bytes())?.unwrap_or_default())
    }

    /// Returns the inode of a pool object that has several names.
    pub fn object(&self, identity: &[u8]) -> Result<Option<Ino>> {
        self.get(cf::OBJECTS, identity)
    }

    /// Visits all names of a directory, ascending by bytes, until `each` returns `false`.
    pub fn names(&self, parent: Ino, each: impl FnMut(&[u8], NameRecord) -> Result<bool>) -> Result<()> {
        self.names_from(parent, b"", each)
    }

    /// Visits the names of a directory from `first` on.
    pub fn names_from(
        &self,
        parent: Ino,
        first: &[u8],
        mut each: impl FnMut(&[u8], NameRecord) -> Result<bool>,
    ) -> Result<()> {
        let prefix = parent.0.to_be_bytes();
        self.scan(cf::NAMES, &name_key(parent, first), |key, value| match key.strip_prefix(&prefix) {
            Some(name) => each(name, decoded(cf::NAMES, value)?),
            None => Ok(false),
        })
    }

    /// Visits all intents, with the second since 1970 at which overlay and pool first differed.
    pub fn intents(&self, mut each: impl FnMut(Intent, u64) -> Result<bool>) -> Result<()> {
        self.scan(cf::INTENTS, b"", |key, value| match Intent::decode(key) {
            Some(intent) => each(intent, decoded::<IntentRecord>(cf::INTENTS, value)?.since_unix),
            None => Err(corrupt(cf::INTENTS)),
        })
    }

    pub fn contents(&self, each: impl FnMut(ContentId, ContentRecord) -> Result<bool>) -> Result<()> {
        self.contents_as_of(|| {}, each)
    }

    /// Visits the records as they are when `begun` is called, even if they change during the visit.
    pub fn contents_as_of(
        &self,
        begun: impl FnOnce(),
        mut each: impl FnMut(ContentId, ContentRecord) -> Result<bool>,
    ) -> Result<()> {
        // An iterator is a snapshot of the database at its creation.
        let iterator = self.db.iterator_cf(self.family(cf::RESIDENCY)?, IteratorMode::Start);
        begun();
        for item in iterator {
            let (key, value) = item.map_err(|e| failed("read the catalog", e))?;
            if !each(ContentId(id_of(&key)?), content::decode_head(&value)?)? {
                break;
            }
        }
        Ok(())
    }

    pub fn leases(&self, mut each: impl FnMut(Ino, Leases) -> Result<bool>) -> Result<()> {
        self.scan(cf::LEASES, b"", |key, value| each(Ino(id_of(key)?), decoded(cf::LEASES, value)?))
    }

    pub fn inodes(&self, mut each: impl FnMut(Ino, InodeRecord) -> Result<bool>) -> Result<()> {
        self.scan(cf::INODES, b"", |key, value| each(Ino(id_of(key)?), decoded(cf::INODES, value)?))
    }

    /// The same, but logs records that cannot be decoded and passes over them.
    pub fn readable_inodes(&self, mut each: impl FnMut(Ino, InodeRecord) -> Result<bool>) -> Result<()> {
        self.scan(cf::INODES, b"", |key, value| {
            match id_of(key).and_then(|id| Ok((Ino(id), decoded(cf::INODES, value)?))) {
                Ok((ino, record)) => each(ino, record),
                Err(error) => {
                    tracing::error!(%error, key = %key.escape_ascii(), "an inode cannot be read");
                    Ok(true)
                }
            }
        })
    }

    pub fn meta<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>> {
        self.get(cf::META, key.as_bytes())
    }

    pub fn set_meta<T: Serialize>(&self, key: &str, value: &T) -> Result<()> {
        let mut batch = self.batch();
        batch.put_raw(cf::META, key.as_bytes(), &encode(value));
        self.write(batch)
    }

    /// Returns the keys in `meta` that begin with `prefix`.
    pub fn meta_keys(&self, prefix: &str) -> Result<Vec<String>> {
        let mut keys = Vec::new();
        self.scan(cf::META, prefix.as_bytes(), |key, _| {
            let is_one = key.starts_with(prefix.as_bytes());
            if is_one {
                keys.push(String::from_utf8_lossy(key).into_owned());
            }
            Ok(is_one)
        })?;
        Ok(keys)
    }

    pub fn delete_meta(&self, keys: &[String]) -> Result<()> {
        let mut batch = self.batch();
        for key in keys {
            batch.delete_raw(cf::META, key.as_bytes());
        }
        self.write(batch)
    }

    fn family(&self, name: &str) -> Result<&ColumnFamily> {
        self.db.cf_handle(name).ok_or_else(|| corrupt(name))
    }

    fn get<T: DeserializeOwned>(&self, family: &str, key: &[u8]) -> Result<Option<T>> {
        let value = self.db.get_pinned_cf(self.family(family)?, key).map_err(|e| failed("read the catalog", e))?;
        value.map(|v| decoded(family, &v)).transpose()
    }

    fn scan(&self, family: &str, first: &[u8], mut each: impl FnMut(&[u8], &[u8]) -> Result<bool>) -> Result<()> {
        let mode = IteratorMode::From(first, Direction::Forward);
        for item in self.db.iterator_cf(self.family(family)?, mode) {
            let (key, value) = item.map_err(|e| failed("read the catalog", e))?;
            if !each(&key, &value)? {
                break;
            }
        }
        Ok(())
    }
}

impl Intent {
    fn encode(&self) -> Vec<u8> {
        match self {
            Self::Inode(ino) => [b"i".as_slice(), &ino.0.to_be_bytes()].concat(),
            Self::Name(parent, name) => [b"n".as_slice(), &parent.0.to_be_bytes(), name].concat(),
        }
    }

    fn decode(key: &[u8]) -> Option<Self> {
        let (kind, rest) = key.split_first()?;
        let (ino, name) = rest.split_first_chunk::<8>()?;
        let ino = Ino(u64::from_be_bytes(*ino));
        match kind {
            b'i' => Some(Self::Inode(ino)),
            b'n' => Some(Self::Name(ino, name.into())),
            _ => None,
        }
    }
}

/// Opens the database. If `torn`, the write-ahead log after the last sync may be damaged anywhere; it is replayed up to
/// the damage. Otherwise only its last record may be cut off, by the death of the process.
fn open_db(path: &Path, durability: Durability, torn: bool) -> Result<DB> {
    let cache = Cache::new_lru_cache(BLOCK_CACHE_BYTES);
    let mut options = Options::default();
    options.create_if_missing(true);
    options.create_missing_column_families(true);
    options.set_db_write_buffer_size(WRITE_BUFFER_BYTES);
    options.set_max_total_wal_size(64 << 20);
    options.set_keep_log_file_num(2);
    options.set_max_open_files(forebay_system::descriptors::for_catalog());
    options.set_max_background_jobs(2);
    // At each start, RocksDB preallocates 1.1 times the largest write buffer for each log (the default family has one,
    // too), and 4 MiB for each manifest.
    options.set_write_buffer_size(FAMILY_BUFFER_BYTES);
    options.set_manifest_preallocation_size(64 << 10);
    options.set_manual_wal_flush(durability == Durability::SyncedOnly);
    // Any worse damage must be reported: if a record is not replayed, no name may refer to its content file any more.
    options.set_wal_recovery_mode(match torn {
        true => rocksdb::DBRecoveryMode::PointInTime,
        false => rocksdb::DBRecoveryMode::TolerateCorruptedTailRecords,
    });
    options.set_paranoid_checks(true);
    let mut families = Options::default();
    families.set_compression_type(rocksdb::DBCompressionType::Lz4);
    families.set_write_buffer_size(FAMILY_BUFFER_BYTES);
    let mut blocks = BlockBasedOptions::default();
    blocks.set_block_cache(&cache);
    blocks.set_bloom_filter(10.0, false);
    blocks.set_cache_index_and_filter_blocks(true);
    // Partitioned: for a million inodes, the filters and indexes are larger than the cache, and each lookup would read
    // a whole one.
    blocks.set_index_type(BlockBasedIndexType::TwoLevelIndexSearch);
    blocks.set_partition_filters(true);
    blocks.set_metadata_block_size(4 << 10);
    blocks.set_pin_top_level_index_and_filter(true);
    families.set_block_based_table_factory(&blocks);
    let descriptors = cf::ALL.iter().map(|name| ColumnFamilyDescriptor::new(*name, families.clone()));
    DB::open_cf_descriptors(&options, path, descriptors).map_err(|e| not_opened(path, &e))
}

pub fn name_key(parent: Ino, name: &[u8]) -> Vec<u8> {
    [parent.0.to_be_bytes().as_slice(), name].concat()
}

fn id_of(key: &[u8]) -> Result<u64> {
    key.try_into().map(u64::from_be_bytes).map_err(|_| corrupt("key"))
}

fn decoded<T: DeserializeOwned>(family: &str, bytes: &[u8]) -> Result<T> {
    decode(bytes).map_err(|e| corrupt(family).with_source(e))
}
