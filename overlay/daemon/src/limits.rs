//! Every bound of the local API, in one place.

use std::time::Duration;

/// How long a client waits for a daemon to accept, restarts of the worker included.
pub const CONNECT: Duration = Duration::from_secs(5);
/// How long a client waits for the next line; the server sends a sign of life every [`HEARTBEAT`].
pub const SILENCE: Duration = Duration::from_secs(20);
pub const HEARTBEAT: Duration = Duration::from_secs(2);
/// How long the answer to `status` may get no further.
pub const STATUS: Duration = Duration::from_secs(10);
/// How long the server waits for the request of a client that has connected.
pub const REQUEST: Duration = Duration::from_secs(10);
/// Bytes of one request line: room for a list of some hundred thousand paths.
pub const REQUEST_BYTES: u64 = 64 << 20;
/// Clients worked for at a time; the others get signs of life until it is their turn. `status` does not wait.
pub const CLIENTS: usize = 64;
/// Clients that are talked to at a time; more wait in the socket's backlog.
pub const CONNECTIONS: usize = 1024;
/// The longest time between two samples for which jobs are observed.
pub const INTERVAL_MS: u64 = 86_400_000;
/// Entries of a listing in one reply line.
pub const ENTRIES_PER_REPLY: usize = 500;
/// How long `mount` waits for the daemon: long enough for a catalog that must be recovered.
pub const MOUNT: Duration = Duration::from_secs(120);
/// How long a check before the mount, or `doctor`, waits for a pool to answer.
pub const POOL_CHECK: Duration = Duration::from_secs(10);
/// How long `doctor` waits until a pool is attached: longer than the retries of each kind of pool.
pub const POOL_ATTACH: Duration = Duration::from_secs(120);
/// How long one case of the conformance suite may take on it: the one with the most requests, 25,000, on a server
/// that answers a hundred in a second.
pub const POOL_CASE: Duration = Duration::from_secs(300);
/// How long `doctor` waits for what a pool does in the background, such as giving up uploads that were cut off.
pub const POOL_REST: Duration = Duration::from_secs(10);
/// Deadline of a call to the pool that moves content, apart from the time that its bytes take
pub const POOL_CALL: Duration = Duration::from_secs(30);
/// at this rate, below which a pool counts as not answering.
pub const POOL_BYTES_PER_SECOND: u64 = 256 << 10;
/// For a rename where the pool has to copy all that it moves; each of its requests has a limit of its own.
pub const POOL_COPY: Duration = Duration::from_secs(3_600);
/// How long `umount` waits for the daemon to write its catalog and end.
pub const STOP: Duration = Duration::from_secs(60);
/// After a lazy unmount the daemon may have users for long; it is given this time to end where it has none.
pub const STOP_LAZY: Duration = Duration::from_secs(2);
/// Pools of one mixed root: each is two processes and a catalog.
pub const MIXED_POOLS: usize = 64;
/// Bytes of the directory of a mixed root, which holds nothing but names.
pub const MIXED_ROOT_BYTES: u64 = 1 << 20;
/// A worker that dies younger than this counts as a rapid crash.
pub const RAPID_CRASH: Duration = Duration::from_secs(30);
/// Rapid crashes in a row after which the mount is called failing.
pub const RAPID_CRASHES: u32 = 5;
/// The pause after the first worker that died before it served, and between workers that serve but die young.
pub const BLINK: Duration = Duration::from_millis(100);
/// The longest pause before a worker is started again.
pub const RESTART_PAUSE: Duration = Duration::from_secs(5);
/// The log of a daemon in the background is emptied when it has grown to this.
pub const LOG_BYTES: u64 = 16 << 20;
/// A fast pool that may hold less than one fetched piece serves nothing: a unit was forgotten.
pub const LIMIT_BYTES: u64 = forebay_cache::CHUNK_BYTES;
/// A fast pool with less room than this cannot even hold its catalog.
pub const FAST_FREE_BYTES: u64 = 16 << 20;
