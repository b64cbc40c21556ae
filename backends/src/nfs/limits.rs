//! Every bound of the NFS pool, with its unit.

use std::time::Duration;

/// Connections to one server at the same time, one call on each.
pub const MAX_CONNECTIONS: usize = 8;
/// Calls of one `put` or `read` in progress at the same time, so that other operations find a connection.
pub(super) const MAX_PARALLEL_TRANSFERS: usize = 4;
/// Changes that run to their end although their caller may have been dropped.
pub(super) const MAX_CHANGES: usize = 64;

pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// From the first byte of a request to the last of its answer, and for a free connection. A server that has much to
/// write to its disk may take long for a COMMIT.
pub(super) const RPC_TIMEOUT: Duration = Duration::from_secs(30);
/// After so long without an answer, a request that changes nothing is sent again on another connection, then after
/// twice as long, up to [`RPC_TIMEOUT`]. This is shorter than the time that users of the mount wait for an answer.
pub(super) const RESEND_AFTER: Duration = Duration::from_secs(3);
pub(super) const RETRY_PAUSE_MIN: Duration = Duration::from_millis(20);
pub(super) const RETRY_PAUSE_MAX: Duration = Duration::from_millis(500);
/// Attempts at a request whose answers are malformed. One malformed answer may be an exception; a server that does
/// not know the protocol always sends them.
pub(super) const NONSENSE_ATTEMPTS: u32 = 3;
/// Attempts at a change whose answers are lost: each time the pool checks whether the change was made, and sends it
/// again if not.
pub(super) const CHANGE_ATTEMPTS: u32 = 4;

/// Bytes in one READ or WRITE, unless the server wants less.
pub(super) const MAX_TRANSFER_BYTES: u32 = 1 << 20;
/// A longer answer is invalid in this protocol.
pub(super) const MAX_REPLY_BYTES: usize = (MAX_TRANSFER_BYTES as usize) + (1 << 20);
/// Bytes of each `put` that the server may still lose, and that are therefore kept in memory until a COMMIT.
pub(super) const MAX_UNCOMMITTED_BYTES: usize = 32 << 20;
/// Answers to READ or WRITE for one range of at most [`MAX_TRANSFER_BYTES`]. A server that transfers 4 KiB at a time
/// needs half of them.
pub(super) const MAX_PARTS: u32 = 512;
/// Times that one range is written again because the server restarted before it was committed.
pub(super) const COMMIT_ATTEMPTS: u32 = 16;

/// Bytes of a symlink's target: `PATH_MAX` without its NUL.
pub(super) const MAX_TARGET_BYTES: usize = libc::PATH_MAX as usize - 1;

/// Directories whose handles are kept.
pub(super) const MAX_DIRECTORIES: usize = 4_096;
/// How long a directory is assumed to be at its path. Another client may move it away and put another one in its
/// place, and its handle keeps working.
pub(super) const DIRECTORY_TTL: Duration = Duration::from_secs(1);
/// Files whose handles are kept for reading.
pub(super) const MAX_FILES: usize = 1_024;

/// Bytes of names, and of names with attributes, that one page of a listing requests.
pub(super) const PAGE_NAME_BYTES: u32 = 64 << 10;
pub(super) const PAGE_BYTES: u32 = 512 << 10;
/// Times that one listing starts again because the server has forgotten the position, or requests a page again
/// because an entry vanished from it.
pub(super) const LISTING_RESTARTS: u32 = 8;

/// Successive pages of a listing without a new name. Enough for a listing of several million names that starts again,
/// but not for an endless one.
pub(super) const BARREN_PAGES: u32 = 10_000;

/// Locks that serialize writers of one name within this process, by the hash of the path.
pub(super) const PUBLISH_LOCKS: usize = 64;
/// Attempts to find a free name for a temporary file.
pub(super) const NAME_ATTEMPTS: u32 = 16;
/// An unfinished file younger than this may belong to a live writer on another node.
pub(super) const SWEEP_AGE: Duration = Duration::from_secs(24 * 3600);
