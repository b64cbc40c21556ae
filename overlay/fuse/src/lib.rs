//! The FUSE server: answers the kernel's requests to a mount.
//!
//! | module | is |
//! |---|---|
//! | `mount` | options, and serving a mount |
//! | `mountpoint` | mounting and unmounting, apart from serving: the mount outlives the daemon |
//! | `attach`, `init` | the start of a session, for the first process and for those that take over |
//! | `filesystem`, `session` | each request, turned into one call of the engine |
//! | `dispatch` | runs each request until it is answered |
//! | `latencies` | how long requests take, by operation |
//! | `dirsync` | changes that are durable before they are answered |
//! | `cpu_affinity`, `pm_qos` | on which processor a request is answered, and how fast processors wake up for it |
//! | `iomode`, `handle` | how the kernel does the I/O of each open |
//! | `dirs` | open directories |
//! | `notifier` | invalidations of what the kernel has cached |
//! | `reopen`, `resend` | what a dead process leaves: open files, unanswered requests |
//! | `setid` | set-id bits and capabilities, which writes clear |
//! | `device`, `convert` | ioctls and notifications; types |

mod attach;
mod convert;
mod cpu_affinity;
mod decided;
mod device;
mod dirs;
mod dirsync;
mod dispatch;
mod filesystem;
mod handle;
mod init;
mod iomode;
mod latencies;
mod mount;
mod mountpoint;
mod notifier;
mod panics;
mod pm_qos;
mod rename;
mod reopen;
mod resend;
mod session;
mod setid;
mod text_busy;

pub use attach::Attach;
pub use init::Handshake;
pub use iomode::PassthroughState;
pub use latencies::{Operation, RequestLatencies};
pub use mount::{MountOptions, Mounted, Unmounter, mount, serve};
pub use mountpoint::{mount_device, unmount};
pub use panics::{STATUS as PANIC_STATUS, end_on_panic};
pub use pm_qos::DEVICE as WAKEUP_DEVICE;
