//! The allocator of the program, including RocksDB. It must bound the memory of a daemon that runs for months, and
//! keep the buffers of chunks mapped from one chunk to the next: the kernel clears each new page, which takes longer
//! than filling it.

use tikv_jemallocator::Jemalloc;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

/// One arena for all threads (and jemalloc's own for the largest pieces): each further arena would keep what a burst
/// allocated, and the most frequent allocations are served from the threads' caches anyway. Memory that was free for
/// a fifth of a second, longer than a buffer rests between two chunks, is returned to the system; in a daemon by a
/// thread for this purpose.
// SAFETY: jemalloc reads a symbol of this name as a pointer to a zero-terminated text, and it is one.
#[unsafe(export_name = "malloc_conf")]
static OPTIONS: &[u8; 46] = b"narenas:1,dirty_decay_ms:200,muzzy_decay_ms:0\0";

/// Starts the thread that returns memory to the system. It has the privileges of the calling thread.
pub fn give_back_in_background() {
    let mut on = true;
    // SAFETY: the name ends with a zero; the value is a C bool, and lives through the call.
    let failed = unsafe {
        tikv_jemalloc_sys::mallctl(
            c"background_thread".as_ptr(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            (&raw mut on).cast(),
            size_of::<bool>(),
        )
    };
    if failed != 0 {
        let why = std::io::Error::from_raw_os_error(failed);
        eprintln!("forebay: memory is given back by the threads that free it: {why}");
    }
}
