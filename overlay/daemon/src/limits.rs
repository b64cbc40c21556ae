//! Every bound of the local API, in one place.

use std::time::Duration;

/// How long a client waits until a daemon accepts its connection, restarts of the worker included.
pub const CONNECT: Duration = Duration::from_secs(5);
/// How long a client waits for the next line; the server sends a heartbeat every [`HEARTBEAT`].
pub const SILENCE: Duration = Duration::from_secs(20);
pub const HEARTBEAT: Duration = Duration::from_secs(2);
/// How long `status` waits without any progress.
pub const STATUS: Duration = Duration::from_secs(10);
/// How long the server waits for the request of a client that has connected.
pub const REQUEST: Duration = Duration::from_secs(10);
/// Bytes of one request line: room for a list of some hundred thousand paths.
pub const REQUEST_BYTES: u64 = 64 << 20;
/// Clients whose requests are carried out at the same time; other clients get heartbeats until their turn. `status`
/// and the verbs of allocations do not wait for a turn.
pub const CLIENTS: usize = 64;
/// Connections that are open at the same time; more wait in the socket's backlog.
pub const CONNECTIONS: usize = 1024;
/// The longest time between two samples during which jobs stay observed.
pub const INTERVAL_MS: u64 = 86_400_000;
/// The longest that one request waits for staging or a write-back.
pub const ALLOCATION_WAIT_MS: u64 = 5_000;
/// Entries of a listing in one reply line.
pub const ENTRIES_PER_REPLY: usize = 500;
/// How long `mount` waits for the daemon: long enough for a catalog that must be recovered.
pub const MOUNT: Duration = Duration::from_secs(120);
/// How long a check before the mount, or `doctor`, waits for a pool to answer.
pub const POOL_CHECK: Duration = Duration::from_secs(10);
/// How long a new mount waits for a pool that an earlier mount knew.
pub const POOL_ANSWER: Duration = Duration::from_secs(5);
/// How long a worker that takes over a mount waits for its pool. Meanwhile the mount does not answer.
pub const POOL_ANSWER_REATTACHED: Duration = Duration::from_millis(300);
/// How long `doctor` waits until a pool is attached: longer than the retries of each kind of pool.
pub const POOL_ATTACH: Duration = Duration::from_secs(120);
/// Connections to a metrics address at the same time; more wait in its backlog.
pub const METRICS_CONNECTIONS: usize = 64;
/// Threads of a metrics address that ask the devices for their space.
pub const METRICS_BLOCKING: usize = 4;
/// How often a restarted worker tries to listen on an address that another program has taken.
pub const ADDRESS_RETRY: Duration = Duration::from_secs(5);
/// The time between two updates of the page.
pub const PAGE_TICK: Duration = Duration::from_secs(1);
/// How long one case of the conformance suite may take: the case with the most requests makes 25,000, on a server that
/// answers a hundred in a second.
pub const POOL_CASE: Duration = Duration::from_secs(300);
/// How long `doctor` waits for background work of a pool, such as aborting uploads that were interrupted.
pub const POOL_REST: Duration = Duration::from_secs(10);
/// Deadline of a call to the pool that moves content. The time for its bytes at `POOL_BYTES_PER_SECOND` is added.
pub const POOL_CALL: Duration = Duration::from_secs(30);
/// A pool that is slower than this counts as not answering.
pub const POOL_BYTES_PER_SECOND: u64 = 256 << 10;
/// Deadline of a rename in a pool that has to copy what it renames; each request of the rename has a limit of its own.
pub const POOL_COPY: Duration = Duration::from_secs(3_600);
/// How long `umount` waits for the daemon to write its catalog and end.
pub const STOP: Duration = Duration::from_secs(60);
/// After a lazy unmount the daemon may have users for a long time; a daemon without users ends within this time.
pub const STOP_LAZY: Duration = Duration::from_secs(2);
/// Pools of one mixed root: each is two processes and a catalog.
pub const MIXED_POOLS: usize = 64;
/// Size of the directory of a mixed root, which holds only names.
pub const MIXED_ROOT_BYTES: u64 = 1 << 20;
/// A worker that dies younger than this counts as a rapid crash.
pub const RAPID_CRASH: Duration = Duration::from_secs(30);
/// Rapid crashes in a row after which the mount is called failing.
pub const RAPID_CRASHES: u32 = 5;
/// The pause after the first worker that died before it served, and between workers that serve but die early.
pub const BLINK: Duration = Duration::from_millis(100);
/// The longest pause before a worker is started again.
pub const RESTART_PAUSE: Duration = Duration::from_secs(5);
/// A daemon in the background empties its log when the log reaches this size.
pub const LOG_BYTES: u64 = 16 << 20;
/// A limit below one chunk leaves no room for content: probably the unit was forgotten.
pub const LIMIT_BYTES: u64 = forebay_cache::CHUNK_BYTES;
/// A fast pool with less room than this cannot even hold its catalog.
pub const FAST_FREE_BYTES: u64 = 16 << 20;
/// Connections of other nodes at the same time; further ones wait.
pub const PEER_CONNECTIONS: usize = 16_384;
/// How long a node that ends waits for etcd to forget it.
pub const LEAVE: Duration = Duration::from_secs(2);
/// How often the peers file is looked at for changes.
pub const PEERS_FILE: Duration = Duration::from_secs(2);
