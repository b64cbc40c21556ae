//! The engine: catalog, content, fetch, flush, leases and policy behind one interface. It knows neither FUSE
//! nor command lines, and runs without root, network or mount.
//!
//! A module calls only modules above it in this table, or before it in its row: there is no circle. `tests/tests/tidy.rs`
//! checks that for methods of the engine, of its components and of [`Txn`], and for functions. Types may be used in both
//! directions.
//!
//! | module | does |
//! |---|---|
//! | `types`, `acl`, `advisor` | what callers see; POSIX ACLs; what the engine asks the `jobs` crate |
//! | `tasks`, `counters` | work in threads of its own; what is counted for operators |
//! | `shares`, `quotas` | shares of users; what users and groups hold, and their quotas |
//! | `node`, `paths` | inodes in memory; inode → path in the overlay and in the pool |
//! | `mount`, `policies` | what the mount was started with, and what the kernel is told; the policy in force, and settings of directories that were known |
//! | `writeback/errors`, `writeback/state`, `durability_epochs/state`, `space/order` | what is known beside the catalog: of the flush, of synced epochs, of the order of eviction |
//! | `inode_change`, `contents` | one change of one inode; content files: opened, kept open, counted |
//! | `tiers` | which tier content is in, and what is used enough to be moved |
//! | `pool_calls` | whether the pool answers, and which of its answers count |
//! | `txn` | one change: copies records, changes them, writes them as one `WriteBatch`, then makes them visible |
//! | `pool_calls/change`, `rights/news` | own calls that change the pool; rights that changed there |
//! | `set_id`, `attr` | set-id bits of written files; the attributes that the mount shows |
//! | `layout` | stripes and storage pools, where the pool has them |
//! | `decisions` | what the policy says of a file |
//! | `space/room`, `space/owner_room`, `space` | space in the fast pool: writers that wait, eviction, the hard limit |
//! | `namespace/depth` | how deep names may be |
//! | `writeback/sync`, `writeback/conflict_log`, `writeback/steps`, `writeback/in_doubt` | names made durable in the pool; what all steps of a flush share; calls to the pool whose answer was lost |
//! | `coherence` | pool → catalog: names, attributes, changes by other clients |
//! | `policy_facts` | what must be known of a file before its policy can be decided |
//! | `written_through` | the pool's copy of a file that does not fit into the fast pool |
//! | `fetch` | pool → content file |
//! | `durability_epochs` | the epochs after which fetched content survives a power cut |
//! | `tiers/device_health`, `tiers/moving`, `tiers/rounds`, `tiers/absent` | devices that fail; moves between tiers; tiers that come and go |
//! | `views/leave` | a file that a view shows gets another content file before it changes |
//! | `writeback` | overlay → pool |
//! | `rights`, `permission` | whether the kernel knows the present rights; what a user may do, for requests that the kernel has not checked |
//! | `ttl` | how long the kernel may cache an answer |
//! | `handles` | open, read, write, truncate, fallocate, seek, copy; writing through what does not fit |
//! | `attributes` | attributes: read and changed |
//! | `namespace` | lookup, create, link, unlink, rename, readdir, file handles |
//! | `xattrs` | extended attributes and ACLs |
//! | `staging/paths`, `staging/reporter` | what the paths of a request name; its progress |
//! | `views/owners`, `staging/leases` | views as owners of leases; leases |
//! | `views` | trees of hard links to content files, which programs read without the daemon |
//! | `scratch` | plain directories on the fast pool, and their commit into the overlay |
//! | `quotas/report`, `quotas/staged` | quotas counted anew; reservations of stages |
//! | `census`, `status`, `resident_tree` | what operators see |
//! | `ahead`, `staging` | what the `jobs` crate needs; requests of operators and their progress: stage, flush, evict |
//! | `policy_changes`, `job_end` | a policy is put into force, its effect is foretold, its decisions are explained; a job ends |
//! | `peers` | bytes from other nodes before the pool, and for them |
//! | `background`, `salvage` | the tasks that run without a request; unflushed content of a catalog that cannot be opened |
//! | `served`, `stored` | files for front ends without a kernel: read by path; written once, and read while they are resident |
//! | `fsck` | compares catalog and content files |
//! | `lib` | wires the components |

mod acl;
mod advisor;
mod ahead;
mod attr;
mod attributes;
mod background;
mod census;
mod coherence;
mod contents;
mod counters;
mod decisions;
mod durability_epochs;
mod fetch;
mod fsck;
mod handles;
mod inode_change;
mod job_end;
mod layout;
mod mount;
mod namespace;
mod node;
mod paths;
mod peers;
mod permission;
mod policies;
mod policy_changes;
mod policy_facts;
mod pool_calls;
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
mod tasks;
mod tiers;
mod ttl;
mod txn;
mod types;
mod views;
mod writeback;
mod written_through;
mod xattrs;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use forebay_backends::{Error, ErrorKind, FileKind, Pool, PoolPath, Result, Side, Version};
use forebay_cache::{ContentNumbers, ContentStore, PreallocatedFiles, Trash};
use forebay_catalog::{Catalog, Durability, InodeRecord};
use forebay_system::descriptors;
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::Semaphore;

use crate::node::NodeTable;
pub use advisor::{Advisor, Foreseen, Means};
pub use ahead::{AHEAD_REQUESTS, requests_of};
pub use census::Census;
pub(crate) use coherence::Growth;
use coherence::is_other_root;
pub use forebay_cache::{Content, content_io};
pub use forebay_catalog::{FileOfJob, WriteFaults};
pub use forebay_policy::Policy;
pub use job_end::EndedJob;
pub(crate) use namespace::NamesState;
pub use namespace::{DirOrder, Placed};
pub use paths::PathTooLong;
pub use peers::{Holding, Loan, PeerSource, PeerWish};
pub use policy_changes::PolicyChange;
pub use resident_tree::{ResidentDirectory, ResidentTree};
pub use served::{Invalidations, Purged, Served, ServedEntry, ServedFile, UserGroups};
pub use shares::{Shares, UserSlot};
pub use staging::{parse_path, summary};
pub use stored::NewFile;
pub use tasks::blocking;
pub(crate) use tasks::to_its_end;
pub(crate) use txn::Txn;
pub use types::{
    Attr, CachedPages, Caller, Change, DirSnapshot, Dirent, Entry, Ino, KernelCache, Lookup, Opened, Seek, SetTime,
    Space, is_writable,
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
    pub other_root: OtherRoot,
    /// The name of this node, for the names of conflicting copies.
    pub node: String,
    /// Whether the mount was taken over from a daemon that died. Programs may still have unlinked files open.
    pub reattached: bool,
    pub for_tests: TestOptions,
}

/// What to do if the root of the pool is another directory than the one that the catalog knows. Often, the file system
/// that holds the pool is not mounted, and the directory is the mount point beneath.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OtherRoot {
    /// The pool does not count as there: opening the overlay fails with `Unavailable`.
    #[default]
    Refuse,
    /// It is the pool from now on: it was replaced on purpose.
    Accept,
    /// Opening the overlay does not ask the pool, which is not attached yet. The root is compared when it is seen.
    CompareLater,
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
    /// Makes writes of fetched bytes fail.
    pub content_faults: Option<content_io::ContentFaults>,
}

/// Default memory for buffers.
pub const DEFAULT_MEMORY_BYTES: u64 = 32 << 20;
/// How long the end of a mount waits for the removal of parts that no file uses.
const PARTS_REMOVED_WITHIN: std::time::Duration = std::time::Duration::from_secs(5);
/// The unit in which buffer memory is counted.
const MEMORY_UNIT_BYTES: u64 = 4096;

/// The engine. Clones share one engine.
#[derive(Clone)]
pub struct Overlay {
    pub(crate) inner: Arc<Inner>,
}

/// The components of an engine, each with its state.
pub(crate) struct Inner {
    pub pool: Arc<dyn Pool>,
    pub catalog: Arc<Catalog>,
    pub store: Arc<ContentStore>,
    pub trash: Trash,
    pub preallocated: Arc<PreallocatedFiles>,
    /// For all buffers of fetches and flushes, in units of `MEMORY_UNIT_BYTES`.
    pub memory: Arc<Semaphore>,
    pub policies: policies::Policies,
    pub table: NodeTable,
    pub names: namespace::Namespace,
    pub mount: mount::MountFacts,
    pub contents: contents::ContentFiles,
    pub epochs: durability_epochs::EpochState,
    pub pool_calls: pool_calls::PoolCalls,
    pub layouts: layout::Layouts,
    pub fetcher: fetch::Fetcher,
    pub flusher: writeback::Flusher,
    pub space: space::SpaceState,
    pub tiers: tiers::TierWork,
    pub shares: Arc<Shares>,
    pub quotas: Arc<quotas::Quotas>,
    pub stages: quotas::StagesUnderWay,
    pub parts_under_way: handles::PartsUnderWay,
    pub scratch: scratch::ScratchDirs,
    pub views: views::Views,
    pub counters: counters::EngineCounters,
    pub census: census::CensusState,
    pub advisor: OnceLock<Arc<dyn Advisor>>,
    pub peers: OnceLock<Arc<dyn PeerSource>>,
    pub stop: tokio_util::sync::CancellationToken,
}

impl Overlay {
    /// Opens the fast pool and the catalog, and starts the background work. Needs a tokio runtime.
    ///
    /// # Errors
    /// The error names what is wrong with the fast pool, the limit or the catalog, and the remedy. `Unavailable` if the
    /// catalog is new and the pool does not answer, or if the mount was taken over and its catalog is not there.
    pub fn open(options: Options) -> BoxFuture<'static, Result<Self>> {
        async move {
            if options.reattached && !has_catalog(&options.fast[0])? {
                return Err(another_fast_pool(&options.fast[0]));
            }
            let mut store = ContentStore::open(&options.fast, options.limit_bytes)?;
            let durability = if options.for_tests.lose_unsynced { Durability::SyncedOnly } else { Durability::Process };
            crate::salvage::sound(&options.fast[0])?;
            let catalog = Catalog::open(&options.fast[0].join("catalog"), durability)?;
            let catalog = catalog.with_faults(options.for_tests.catalog_faults);
            if options.reattached && catalog.inode(Ino::ROOT)?.is_none() {
                return Err(another_fast_pool(&options.fast[0]));
            }
            let id = identity(&catalog)?;
            tiers::absent::attach(&mut store, &catalog, &options.policy, &id)?;
            mark_devices(&store, &catalog, &id)?;
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
            let used = catalog.meta("used_bytes")?.unwrap_or(0);
            store.budget.account(0, used);
            catalog.set_queue_delay(options.policy.shortest_idle());
            let catalog = Arc::new(catalog);
            let settle = catalog.clone();
            let quotas = quotas::Quotas::open(&options.policy.quotas, &catalog)?;
            let shares = Shares::new(options.policy.shares, store.budget.limit());
            let (io, io_fallback) = content_io::open(options.content_io);
            let io = options.for_tests.content_faults.iter().fold(io, |io, faults| faults.over(io));
            let inner = Arc::new(Inner {
                pool: options.pool,
                contents: contents::ContentFiles::new(
                    catalog.new_content()?.0,
                    options.for_tests.open_contents.unwrap_or_else(descriptors::for_contents),
                    (io, io_fallback),
                ),
                preallocated: PreallocatedFiles::new(store.clone(), catalog.clone()),
                names: namespace::Namespace::of(&catalog)?,
                flusher: writeback::Flusher::of(&catalog)?,
                catalog,
                trash: Trash::start(store.clone(), move || settle.sync())?,
                store,
                memory: Arc::new(Semaphore::new((options.memory_bytes.max(8 << 20) / MEMORY_UNIT_BYTES) as usize)),
                tiers: tiers::TierWork::new(&options.policy),
                policies: policies::Policies::new(options.policy),
                table: NodeTable::new(options.reattached),
                mount: mount::MountFacts::new(options.node, options.read_only, options.reattached),
                epochs: durability_epochs::EpochState::default(),
                pool_calls: pool_calls::PoolCalls::default(),
                layouts: layout::Layouts::default(),
                fetcher: fetch::Fetcher::default(),
                space: space::SpaceState::new(evictor),
                shares,
                quotas,
                stages: quotas::StagesUnderWay::default(),
                parts_under_way: handles::PartsUnderWay::default(),
                scratch: scratch::ScratchDirs::default(),
                views: views::Views::default(),
                counters: counters::EngineCounters::default(),
                census: census::CensusState::default(),
                advisor: OnceLock::new(),
                peers: OnceLock::new(),
                stop: tokio_util::sync::CancellationToken::new(),
            });
            inner.ensure_root(options.other_root).await?;
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
        self.inner.mount.set_kernel(kernel);
        self.inner.keep_names_above_views();
    }

    /// Makes the kernel forget what the last daemon changed and did not tell it of. Call it when the mount is served,
    /// and before the daemon answers anybody else.
    pub async fn tell_kernel_of_last_daemon(&self) {
        self.inner.tell_kernel_of_commits().await;
    }

    /// Sets what `status` shows of the mount.
    pub fn set_mount(&self, mountpoint: &str, passthrough: bool) {
        self.inner.mount.set_up(mountpoint, passthrough);
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
        self.inner.mount.read_only
    }
}

impl Inner {
    /// Makes the record of the root in a new catalog. With an older one, makes sure that the pool still has this root.
    async fn ensure_root(self: &Arc<Self>, other: OtherRoot) -> Result<()> {
        if let Some(known) = self.catalog.inode(Ino::ROOT)? {
            return self.confirm_root(known, other).await;
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

    /// # Errors
    /// `Unavailable` if the pool has another root, and that is not accepted. A pool that does not answer is an error only
    /// if its root is to be accepted: else the root is compared again when the pool answers.
    async fn confirm_root(self: &Arc<Self>, mut known: InodeRecord, other: OtherRoot) -> Result<()> {
        if other == OtherRoot::CompareLater || !self.pool.capabilities().versions.outlive_mounts {
            return Ok(());
        }
        let stat = match self.pool.stat(&PoolPath::root()).await {
            Ok(stat) => stat,
            // Nothing was accepted.
            Err(e) if other == OtherRoot::Accept => return Err(e.context("the pool's root")),
            Err(_) => return Ok(()),
        };
        if other == OtherRoot::Refuse || !is_other_root(&known, &stat) {
            return self.refuse_other_root(&known, &stat);
        }
        let Version::Inode { dev, ino, born, .. } = stat.version else { return Ok(()) };
        tracing::warn!("{} has another root, which was accepted", self.pool.url());
        // No directory had this version, so the names are listed again before they are used.
        let never = Default::default();
        known.version = Some(Version::Inode { dev, ino, born, mtime: never, ctime: never, size: 0 });
        let mut batch = self.catalog.batch();
        batch.put_inode(Ino::ROOT, &known, known.is_dirty());
        self.catalog.write(batch)?;
        self.catalog.sync()
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

/// Returns whether a fast directory has a catalog.
fn has_catalog(fast: &std::path::Path) -> Result<bool> {
    let current = fast.join("catalog/CURRENT");
    current.try_exists().map_err(|e| Error::io(e, Side::Cache, current.display().to_string()))
}

/// The error for a mount that was taken over, and whose catalog is not in its place. The kernel knows the files of that
/// catalog by their numbers, which an empty one would give to others.
fn another_fast_pool(fast: &std::path::Path) -> Error {
    let what = format!(
        "fast-pool directory {} is another one than before, without the catalog of this mount: if its file system is not \
         mounted, or something is mounted over it, undo that; programs wait; if it is lost: `forebay umount --lazy`, then \
         `forebay fsck --repair`, or a new mount",
        fast.display()
    );
    Error::new(ErrorKind::Unavailable, Side::Cache, what)
}

/// Marks the directories of the fast pool, and records which of them are marked. One that was is refused without its mark.
/// One that is not given any more is given up.
fn mark_devices(store: &ContentStore, catalog: &Catalog, id: &str) -> Result<()> {
    const KEY: &str = "marked_devices";
    let before: BTreeSet<usize> = catalog.meta(KEY)?.unwrap_or_default();
    let mut known = before.clone();
    // First of all: directories in another order are refused, and nothing is given up.
    let marked = store.identify(id, &known)?;
    tiers::absent::give_up_directories(store, catalog, &mut known)?;
    let all = &known | &marked;
    // After the marks are on the disk.
    if all == before { Ok(()) } else { catalog.set_meta(KEY, &all) }
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
