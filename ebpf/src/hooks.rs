//! The places in the kernel where programs are attached, and what goes unseen without each.

use crate::kernel_types::KernelTypes;

/// A place in the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hook {
    /// The tracepoint.
    pub name: &'static str,
    /// The program.
    pub(crate) program: &'static str,
    /// Without any hook of this kind, no reads are seen.
    pub(crate) reads: bool,
    /// What the hook shows.
    pub shows: &'static str,
    /// The consequence if the kernel lacks the hook.
    pub without: &'static str,
}

/// A hook of this kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookState {
    pub hook: Hook,
    /// Why the hook is not used.
    pub lacking: Option<String>,
}

/// Every hook.
pub(crate) const HOOKS: [Hook; 8] = [
    Hook {
        name: "mm_filemap_get_pages",
        program: "get_pages",
        reads: true,
        shows: "read, pread, readv, io_uring, sendfile, copy_file_range",
        without: "reads are seen only if they bring pages into memory; so are first writes of pages",
    },
    Hook {
        name: "mm_filemap_add_to_page_cache",
        program: "add_page",
        reads: true,
        shows: "reads from a disk or from the daemon, not from memory",
        without: "reads from memory are not counted separately",
    },
    Hook {
        name: "mm_filemap_map_pages",
        program: "map_pages",
        reads: false,
        shows: "mapped files",
        without: "pages that are in memory are mapped unseen",
    },
    Hook {
        name: "mm_filemap_fault",
        program: "fault",
        reads: false,
        shows: "mapped files, where pages are not in memory",
        without: "pages that are not in memory are mapped unseen",
    },
    Hook {
        name: "writeback_dirty_folio",
        program: "dirty_folio",
        reads: false,
        shows: "what is written",
        without: "writes are not counted",
    },
    Hook {
        name: "iomap_dio_rw_begin",
        program: "direct",
        reads: false,
        shows: "O_DIRECT",
        without: "O_DIRECT is not counted",
    },
    Hook {
        name: "sched_process_fork",
        program: "fork",
        reads: false,
        shows: "the children of a job's processes",
        without: "a job is its cgroup, or the processes that it had when they were last looked for",
    },
    Hook {
        name: "sched_process_exit",
        program: "exit",
        reads: false,
        shows: "the end of a job's processes",
        without: "a job's processes are looked for in /proc",
    },
];

impl Hook {
    /// Whether reads go unseen without this hook.
    pub fn tells_reads(&self) -> bool {
        matches!(self.program, "get_pages" | "map_pages" | "fault" | "direct")
    }
}

/// The hooks of the running kernel, without those named in `masked`. Needs no privilege.
pub fn probe(masked: &[String]) -> Vec<HookState> {
    let types = KernelTypes::running();
    let lacking = |hook: &Hook| match &types {
        _ if masked.iter().any(|name| name == hook.name) => Some("masked".into()),
        Err(error) => Some(error.to_string()),
        Ok(types) if types.has_tracepoint(hook.name) => None,
        Ok(_) => Some("this kernel does not have it".into()),
    };
    HOOKS.into_iter().map(|hook| HookState { lacking: lacking(&hook), hook }).collect()
}
