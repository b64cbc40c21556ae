//! The observer: eBPF programs that see which job touches which bytes of which file, and the reader of their records.
//!
//! All programs are attached to typed tracepoints (`tp_btf`), so they read fields as the kernel does, at offsets that
//! come from the kernel's BTF at load time (`kernel_types`). One object runs on every kernel that has the
//! tracepoints; `hooks` says what goes unseen without each of them.
//!
//! The modules of `ebpf/programs`:
//!
//! * `touch`: turns a hook's report into bytes of a file; compares the device first, so that other files cost next to
//!   nothing
//! * `slot`: the counts of this CPU for one file and one task: 64 slots in memory that no other CPU writes, added to
//!   the record when the slot is reused
//! * `first`: a first touch: whether the file lies below a watched directory, its record, its path for the ring
//! * `read`: one read, which the kernel reports in pieces
//! * `folio`: the pages that the kernel maps together with a large folio
//! * `task`: the job of a task: by its process, which forks inherit, or by its cgroup
//!
//! **Reads.** A read is identified by the task's own count of read calls, its end, and its file. This is kept for
//! each task, since a task may move to another CPU. If the kernel did not report the first pieces of a read, its
//! start is derived from the pages that the task added to the cache since its last read or write, or from the
//! arguments of `read` and `pread`. The first thread of a process begins its reads by io_uring itself, until it would
//! have to wait. The part of the kernel's worker counts as the same read.
//!
//! **Mappings.** A mapping counts the pages that the kernel maps at a fault, mostly 64 KiB; the same pages count once
//! until other pages are mapped. Since Linux 6.18 the kernel maps all of a large folio but reports only the pages
//! around the fault; `folio` adds the rest.
//!
//! **Ranks.** The rank of a first touch comes from an atomic addition with ordering: LLVM compiles a relaxed one to an
//! addition that returns nothing.
//!
//! **Kernels.** Before 6.12 there is no `mm_filemap_get_pages`: pages that enter the page cache count as read, and
//! reads of cached pages go unseen. The third argument of that hook differs between kernels. It is measured at the
//! start by a read of one page, or taken from the version if neither the program's file nor the fast pool is in a page
//! cache that the hook reports. `make test-kernels` boots other kernels in emulation; Debian's and Ubuntu's 5.15, 6.1,
//! 6.8 and 7.0 passed. Verifiers before 6.9 know less about the values in registers.
//!
//! **Not exact:**
//!
//! * Cold reads, other than by `read` and `pread`, whose first pages are in memory or being read for another task, and
//!   that wait for later pages: the first part may be missing in the map of parts.
//! * Mappings of large folios of a file that is mapped several times: each folio counts whole, though a mapping may end
//!   in it.
//! * A folio of 2 MiB that is mapped by one entry: the kernel reports nothing. Before 6.18: the pages of a large folio
//!   that a fault maps in addition to its own page.
//! * A page that a fault had to wait for: it may count by itself and again with its folio.
//! * Writes: a page that is already dirty does not count again, and a large folio counts whole.
//! * A splice, or a read by io_uring, that ends where the task's previous read of the same file ended, or where that of
//!   the first thread ended: it does not count as a read of its own.
//! * Cold reads by io_uring from threads other than the first, several at once, or with gaps in the readahead: pages
//!   may be missing at the start of a read, or count twice.
//!
//! **Build.** The object is built from source if bpf-linker 0.10.3 is in the search path, else the one in the tree
//! (`programs.o`) is used. `make check-programs` builds it with the same compiler and compares. It has no debug
//! information, so it does not depend on the machine that built it.

mod batch;
mod hooks;
mod kernel_types;
pub mod layout;
mod observer;
mod places;
mod programs;
mod records;
mod touches;

pub use hooks::{Hook, HookState, probe};
pub use layout::{Count, Key, NO_JOB, Record, Way};
pub use observer::{Dropped, Observer, ObserverOptions, Ring};
pub use places::WatchedPlace;
pub use touches::FirstTouch;

/// Why no observer could be started.
#[derive(Debug, thiserror::Error)]
pub enum ObserverError {
    /// The kernel lacks a feature that the observer needs.
    #[error("{0}")]
    Kernel(String),
    /// This process may not load programs.
    #[error("CAP_BPF and CAP_PERFMON are not held")]
    Denied,
    #[error("{what}: {source}")]
    Bpf { what: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
}
