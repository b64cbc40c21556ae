//! The engine: catalog, content, fetch, flush, leases and policy behind one interface. It knows neither FUSE
//! nor command lines, and runs without root, network or mount.
//!
//! | module | does |
//! |---|---|
//! | `txn` | one change: copies records, changes them, writes them as one `WriteBatch`, then makes them visible |
//! | `namespace` | lookup, create, link, unlink, rename, readdir, file handles |
//! | `paths` | inode → path in the overlay and in the pool, and back |
//! | `attributes`, `xattrs`, `set_id` | attributes, extended attributes and ACLs, set-id bits |
//! | `rights` | mode, owner or ACL that another client changed in the pool |
//! | `permission` | what a user may do in a directory, for requests that the kernel has not checked |
//! | `policies` | the policy in force, what it says of a file, its exchange |
//! | `handles` | open, read, write, truncate, fallocate, seek, copy; writing through what does not fit |
//! | `fetch` | pool → content file |
//! | `writeback` | overlay → pool |
//! | `coherence` | pool → catalog: names, attributes, changes by other clients; whether the pool answers |
//! | `layout` | stripes and storage pools, where the pool has them |
//! | `ttl` | how long the kernel may cache an answer |
//! | `space` | space in the fast pool: eviction, and writers that must stay below the limit |
//! | `tiers` | which devices content is on, moves between them, and devices that fail |
//! | `staging` | requests of operators, and their progress: stage, flush, evict, leases |
//! | `advisor`, `ahead` | what the engine asks the `jobs` crate; what the `jobs` crate needs of the engine |
//! | `durability_epochs` | the epochs after which fetched content survives a power cut |
//! | `peers` | bytes from other nodes before the pool, and for them |
//! | `node`, `shares`, `quotas` | inodes in memory; shares of users; quotas of users and groups |
//! | `scratch` | plain directories on the fast pool, and their commit into the overlay |
//! | `served` | files for front ends without a kernel: by path, with a user's rights, under one version |
//! | `stored` | files that a front end writes once, and reads while they are resident |
//! | `views` | trees of hard links to content files, which programs read without the daemon |
//! | `salvage` | unflushed content of a catalog that cannot be opened |
//! | `background` | the tasks that run without a request |
//! | `status`, `census`, `resident_tree`, `fsck` | what operators see and check |

mod acl;
mod advisor;
mod ahead;
mod attributes;
mod background;
mod census;
mod coherence;
mod durability_epochs;
mod fetch;
mod fsck;
mod handles;
mod inode_change;
mod layout;
mod namespace;
mod node;
mod paths;
mod peers;
mod permission;
mod policies;
mod quotas;
mod resident_tree;
pub(crate) mod rights;
pub mod salvage;
mod scratch;
mod served;
mod set_id;
mod shares;
mod space;
mod staging;
mod status;
mod stored;
mod tiers;
mod ttl;
mod txn;
mod types;
mod views;
mod writeback;
mod xattrs;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use forebay_backends::{Error, ErrorKind, FileKind, Pool, PoolPath, Result, Side};
use forebay_cache::content_io::ContentIo;
use forebay_cache::{ContentNumbers, ContentStore, PreallocatedFiles, Trash};
pub use forebay_catalog::WriteFaults;
use forebay_catalog::{Catalog, Durability, InodeRecord};
use forebay_system::descriptors;
use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};

use crate::node::{Node, NodeTable};
use crate::space::order::EvictionOrder;
pub use advisor::{Advisor, Foreseen, Means};
pub use ahead::{AHEAD_REQUESTS, requests_of};
pub use census::Census;
pub(crate) use coherence::Growth;
pub use forebay_cache::{Content, content_io};
pub use forebay_policy::Policy;
pub(crate) use namespace::NamesState;
pub use namespace::{DirOrder, Placed};
pub use peers::{Holding, Loan, PeerSource, PeerWish};
pub use resident_tree::{ResidentDirectory, ResidentTree};
pub use served::{Purged, Served, ServedEntry, ServedFile, UserGroups};
pub use shares::{Shares, UserSlot};
pub use staging::{parse_path, summary};
pub use stored::NewFile;
pub(crate) use txn::Txn;
pub use types::{
    Attr, Caller, Change, DirSnapshot, Dirent, Entry, Ino, KernelCache, Lookup, Opened, Seek, SetTime, Space,
    is_writable,
};
pub(crate) use writeback::sync::NamesSync;

/// The parts and settings of an overlay.
pub struct Options {
    pub pool: Arc<dyn Pool>,
    /// Directories on local NVMe, in the same order at every mount. The first holds the catalog.
    pub fast: Vec<PathBuf>,
    /// Bytes that the fast pool may use in all; `None`: nine tenths of its devices.
    pub limit_bytes: Option<u64>,
    pub policy: Policy,
    /// Bytes of memory for all buffers of fetches and flushes.
    pub memory_bytes: u64,
    pub content_io: content_io::Choice,
    pub read_only: bool,
    /// The name of this node, for the names of conflicting copies.
    pub node: String,
    /// Whether the mount was taken over from a daemon that died. Programs may still have unlinked files open.
    pub reattached: bool,
    pub for_tests: TestOptions,
}

/// What only tests set.
#[derive(Debug, Clone, Default)]
pub struct TestOptions {
    /// Unsynced changes of the catalog are lost with the process, as in a power cut.
    pub lose_unsynced: bool,
    /// Content files that the daemon may have open; `None`: what its descriptors allow.
    pub open_contents: Option<usize>,
    /// Makes writes to the catalog fail.
    pub catalog_faults: WriteFaults,
}

/// Default memory for buffers.
pub const DEFAULT_MEMORY_BYTES: u64 = 32 << 20;
/// Syncs of content files that are under way at the same time.
const SYNCS: usize = 48;
/// How long the end of a mount waits for the removal of parts that no file uses.
const PARTS_REMOVED_WITHIN: std::time::Duration = std::time::Duration::from_secs(5);
/// The unit in which buffer memory is counted.
const MEMORY_UNIT_BYTES: u64 = 4096;

/// The engine. Clones share one engine.
#[derive(Clone)]
pub struct Overlay {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub pool: Arc<dyn Pool>,
    pub catalog: Arc<Catalog>,
    pub store: Arc<ContentStore>,
    /// Content files from this number on were created since the start. If no record names such a file, its record is
    /// about to be written.
    pub first_new_content: u64,
    pub trash: Trash,
    pub preallocated: Arc<PreallocatedFiles>,
    pub io: Arc<dyn ContentIo>,
    pub io_fallback: Option<String>,
    pub policies: policies::Policies,
    pub read_only: bool,
    pub node_name: String,
    pub table: NodeTable,
    pub name_hash: namespace::NameHash,
    pub deepest: namespace::Deepest,
    /// Held by [`Txn`] while it changes names.
    pub namespace: Arc<Mutex<()>>,
    pub kernel: OnceLock<Arc<dyn KernelCache>>,
    pub memory: Arc<Semaphore>,
    /// Permits to sync content files to the fast pool's devices: each sync takes a thread.
    pub syncs: Semaphore,
    pub bandwidth: fetch::BandwidthEstimator,
    pub demand: fetch::DemandPriority,
    pub evictor: EvictionOrder,
    pub making_room: space::eviction::MakingRoom,
    /// Inodes whose content file is open in the daemon, least recently used first.
    pub open_contents: Mutex<lru::LruCache<Ino, ()>>,
    /// How many content files may stay open although no program uses them.
    pub open_contents_max: usize,
    /// Held by the caller that syncs files which replaced others, for all that wait for it.
    pub syncing_replaced: tokio::sync::Mutex<()>,
    /// Held during a sync of the fast pool: the kernel reports a failure to one caller only.
    pub syncing_store: Mutex<()>,
    pub health: coherence::Health,
    pub watches: coherence::Watches,
    pub layouts: layout::Layouts,
    pub counters: status::EngineCounters,
    pub looks: status::Looks,
    pub last_census: Mutex<Arc<Census>>,
    pub census_turn: tokio::sync::Mutex<Option<census::LastCount>>,
    /// Inodes whose byte count is not in the catalog yet, although their last writer is gone.
    pub uncounted: Mutex<HashSet<Ino>>,
    /// Files that are open for writing.
    pub writing: Mutex<HashSet<Ino>>,
    pub write_throttle: space::write_throttle::WriteThrottle,
    pub room: space::room::WaitingWriters,
    pub scratch: scratch::ScratchDirs,
    pub views: views::Views,
    pub tiers: tiers::TierWork,
    pub shares: Arc<Shares>,
    pub quotas: Arc<quotas::Quotas>,
    pub stages: quotas::StagesUnderWay,
    pub parts_under_way: handles::PartsUnderWay,
    pub opened_at: std::time::Instant,
    pub reattached: bool,
    /// Files that the kernel holds open since before this daemon started, until the daemon has opened them again.
    pub inherited: Mutex<HashSet<Ino>>,
    pub flusher: writeback::Flusher,
    /// Notified when something may have to be flushed.
    pub flush_bell: Notify,
    pub conflicts: Mutex<Vec<String>>,
    pub mountpoint: Mutex<Option<String>>,
    pub passthrough: OnceLock<bool>,
    pub advisor: OnceLock<Arc<dyn Advisor>>,
    pub peers: OnceLock<Arc<dyn PeerSource>>,
    pub stop: tokio_util::sync::CancellationToken,
    /// The epoch in which something was fetched last.
    pub fetched_epoch: AtomicU64,
    /// The last epoch whose content is on the device, closed or not.
    pub synced_epoch: AtomicU64,
}

impl Overlay {
    /// Opens the fast pool and the catalog, and starts the background work. Needs a tokio runtime.
    ///
    /// # Errors
    /// The error names what is wrong with the fast pool, the limit or the catalog, and the remedy. `Unavailable` if the
    /// catalog is new and the pool does not answer.
    pub fn open(options: Options) -> BoxFuture<'static, Result<Self>> {
        async move {
            let mut store = ContentStore::open(&options.fast, options.limit_bytes)?;
            let durability = if options.for_tests.lose_unsynced { Durability::SyncedOnly } else { Durability::Process };
            crate::salvage::sound(&options.fast[0])?;
            let catalog = Catalog::open(&options.fast[0].join("catalog"), durability)?;
            let catalog = catalog.with_faults(options.for_tests.catalog_faults);
            let id = identity(&catalog)?;
            tiers::absent::attach(&mut store, &catalog, &options.policy, &id)?;
            store.identify(&id)?;
            let store = Arc::new(store);
            claim(&catalog, &options.pool.url(), &options.fast[0])?;
            let evictor = forebay_prefetch::eviction::by_name(&options.policy.evictor, store.budget.limit())
                .ok_or_else(|| {
                    Error::new(
                        ErrorKind::InvalidInput,
                        Side::Application,
                        format!(
                            "policy: evictor = \"{}\" is not known: it is one of {}",
                            options.policy.evictor,
                            forebay_prefetch::eviction::names().collect::<Vec<_>>().join(", "),
                        ),
                    )
                })?;
            let (io, io_fallback) = content_io::open(options.content_io);
            let conflicts = catalog.meta("conflicts")?.unwrap_or_default();
            let name_hash = namespace::NameHash::of(&catalog)?;
            let deepest = namespace::Deepest::of(&catalog)?;
            let used = catalog.meta("used_bytes")?.unwrap_or(0);
            store.budget.account(0, used);
            catalog.set_queue_delay(options.policy.shortest_idle());
            let catalog = Arc::new(catalog);
            let settle = catalog.clone();
            let quotas = quotas::Quotas::open(&options.policy.quotas, &catalog)?;
            let shares = Shares::new(options.policy.shares, store.budget.limit());
            let inner = Arc::new(Inner {
                pool: options.pool,
                first_new_content: catalog.new_content()?.0,
                preallocated: PreallocatedFiles::new(store.clone(), catalog.clone()),
                catalog,
                trash: Trash::start(store.clone(), move || settle.sync())?,
                store,
                io,
                io_fallback,
                read_only: options.read_only,
                node_name: options.node,
                table: NodeTable::default(),
                name_hash,
                deepest,
                namespace: Arc::default(),
                kernel: OnceLock::new(),
                memory: Arc::new(Semaphore::new((options.memory_bytes.max(8 << 20) / MEMORY_UNIT_BYTES) as usize)),
                syncs: Semaphore::new(SYNCS),
                bandwidth: fetch::BandwidthEstimator::default(),
                demand: fetch::DemandPriority::default(),
                evictor: EvictionOrder::new(evictor),
                making_room: space::eviction::MakingRoom::default(),
                open_contents: Mutex::new(lru::LruCache::unbounded()),
                open_contents_max: options.for_tests.open_contents.unwrap_or_else(descriptors::for_contents),
                syncing_replaced: tokio::sync::Mutex::default(),
                syncing_store: Mutex::default(),
                health: coherence::Health::default(),
                watches: coherence::Watches::default(),
                layouts: layout::Layouts::default(),
                counters: status::EngineCounters::default(),
                looks: status::Looks::default(),
                last_census: Mutex::default(),
                census_turn: Default::default(),
                uncounted: Mutex::default(),
                writing: Mutex::default(),
                write_throttle: space::write_throttle::WriteThrottle::default(),
                room: space::room::WaitingWriters::default(),
                scratch: scratch::ScratchDirs::default(),
                parts_under_way: handles::PartsUnderWay::default(),
                opened_at: std::time::Instant::now(),
                views: views::Views::default(),
                tiers: tiers::TierWork::new(&options.policy),
                policies: policies::Policies::new(options.policy),
                shares,
                quotas,
                stages: quotas::StagesUnderWay::default(),
                reattached: options.reattached,
                inherited: Mutex::default(),
                flusher: writeback::Flusher::default(),
                flush_bell: Notify::new(),
                conflicts: Mutex::new(conflicts),
                mountpoint: Mutex::new(None),
                passthrough: OnceLock::new(),
                advisor: OnceLock::new(),
                peers: OnceLock::new(),
                stop: tokio_util::sync::CancellationToken::new(),
                fetched_epoch: AtomicU64::new(0),
                synced_epoch: AtomicU64::new(0),
            });
            inner.ensure_root().await?;
            let again = inner.clone();
            blocking(move || again.take_up_scratch().and_then(|()| again.take_up_views())).await?;
            background::start(&inner).await?;
            Ok(Self { inner })
        }
        .boxed()
    }

    /// Stops the background work and syncs the catalog. Nothing is flushed: dirty state stays in the fast pool.
    pub async fn shutdown(&self) -> Result<()> {
        self.inner.stop.cancel();
        // What is left is removed after the next start.
        let _ = tokio::time::timeout(PARTS_REMOVED_WITHIN, self.inner.remove_leaving_parts()).await;
        let inner = self.inner.clone();
        blocking(move || {
            inner.save_counts()?;
            inner.quotas.save(&inner.catalog)?;
            inner.preallocated.close();
            inner.catalog.set_meta("used_bytes", &inner.content_bytes())?;
            let closed = inner.close_epoch();
            inner.catalog.sync()?;
            closed.map(drop)
        })
        .await
    }

    /// Sets the receiver of notifications about cached state that the kernel must forget.
    pub fn set_kernel(&self, kernel: Arc<dyn KernelCache>) {
        let _ = self.inner.kernel.set(kernel);
        self.inner.keep_names_above_views();
    }

    /// Makes the kernel forget what the last daemon changed and did not tell it of. Call it when the mount is served,
    /// and before the daemon answers anybody else.
    pub async fn tell_kernel_of_last_daemon(&self) {
        self.inner.tell_kernel_of_commits().await;
    }

    /// Sets what `status` shows of the mount.
    pub fn set_mount(&self, mountpoint: &str, passthrough: bool) {
        *self.inner.mountpoint.lock() = Some(mountpoint.to_owned());
        let _ = self.inner.passthrough.set(passthrough);
    }

    /// Returns the users' shares of the mount's resources.
    pub fn shares(&self) -> &Arc<Shares> {
        &self.inner.shares
    }

    /// Returns whether the kernel knows an inode: it was named in a reply, and the kernel has not forgotten it.
    pub fn is_known_to_kernel(&self, ino: Ino) -> bool {
        self.inner.table.is_known_to_kernel(ino)
    }

    pub fn is_read_only(&self) -> bool {
        self.inner.read_only
    }
}

impl Inner {
    /// Returns the node of an inode.
    ///
    /// # Errors
    /// `Stale` if there is no such inode.
    pub fn node(&self, ino: Ino) -> Result<Arc<Node>> {
        self.table
            .get(&self.catalog, ino, |record| self.distrust(ino, record))?
            .ok_or_else(|| Error::new(ErrorKind::Stale, Side::Application, format!("inode {ino} was deleted")))
    }

    /// Returns the node of a file that the caller found a while ago, or `None` if the file was removed since.
    pub fn node_unless_gone(&self, ino: Ino) -> Result<Option<Arc<Node>>> {
        let node = match self.node(ino) {
            Err(e) if e.is(ErrorKind::Stale) => return Ok(None),
            node => node?,
        };
        let is_gone = {
            let state = node.state.lock();
            state.is_deleted() || state.is_unlinked(ino)
        };
        Ok((!is_gone).then_some(node))
    }

    /// Gives up clean content whose last bytes were fetched in an epoch that ended in a power cut: they may
    /// never have reached the disk.
    fn distrust(&self, ino: Ino, record: &mut InodeRecord) -> Result<()> {
        let (false, Some(id)) = (record.file.is_dirty(), record.file.content()) else { return Ok(()) };
        if !self.catalog.has_dead_epochs() {
            return Ok(());
        }
        let content = self.catalog.content(id)?;
        if !content.as_ref().is_none_or(|c| self.catalog.is_dead(c.epoch)) {
            return Ok(());
        }
        (record.file, _) = record.file.evict()?;
        let mut batch = self.catalog.batch();
        batch.put_inode(ino, record, record.is_dirty());
        batch.delete_content(id);
        self.catalog.write(batch)?;
        self.trash.discard(id, content.map_or(0, |c| c.bytes));
        Ok(())
    }

    async fn ensure_root(self: &Arc<Self>) -> Result<()> {
        if self.catalog.inode(Ino::ROOT)?.is_some() {
            return Ok(());
        }
        let stat = self.pool.stat(&PoolPath::root()).await.map_err(|e| e.context("the pool's root"))?;
        if stat.kind != FileKind::Directory {
            return Err(Error::new(
                ErrorKind::NotDirectory,
                Side::Pool,
                format!("{} is not a directory", self.pool.url()),
            ));
        }
        let mut batch = self.catalog.batch();
        batch.put_inode(Ino::ROOT, &InodeRecord::from_pool(&stat, None), false);
        self.catalog.write(batch)
    }

    pub fn check_writable(&self) -> Result<()> {
        if self.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, Side::Application, "the mount is read-only"));
        }
        Ok(())
    }
}

/// Returns the id with which the devices of this fast pool are marked.
fn identity(catalog: &Catalog) -> Result<String> {
    if let Some(id) = catalog.meta::<String>("id")? {
        return Ok(id);
    }
    let id = format!("{:016x}", rand::random::<u64>());
    catalog.set_meta("id", &id)?;
    // Synced before the devices are marked. Otherwise a power cut could leave marks with an id that no catalog has.
    catalog.sync()?;
    Ok(id)
}

/// Binds the fast pool to one pool. Fails if it caches another pool.
fn claim(catalog: &Catalog, url: &str, fast: &std::path::Path) -> Result<()> {
    match catalog.meta::<String>("pool")? {
        None => catalog.set_meta("pool", &url),
        Some(have) if have == url => Ok(()),
        Some(have) => Err(Error::new(
            ErrorKind::InvalidInput,
            Side::Application,
            format!("fast-pool directory {} caches {have}, not {url}: give another directory", fast.display()),
        )),
    }
}

/// Runs work that blocks on the disk, outside of the threads that must not wait.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    outcome(tokio::task::spawn_blocking(work).await)
}

/// Runs work to its end, although its caller may go away meanwhile.
pub(crate) async fn to_its_end<T: Send + 'static>(work: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
    outcome(tokio::spawn(work).await)
}

fn outcome<T>(ended: std::result::Result<Result<T>, tokio::task::JoinError>) -> Result<T> {
    let early = |e| Error::new(ErrorKind::Os(libc::EIO), Side::Cache, format!("a task ended early: {e}"));
    ended.map_err(early)?
}
