//! The allocator of the program, RocksDB included. It must bound the memory of a daemon that runs for months, and keep
//! the buffers of chunks mapped from one to the next: the kernel clears each page anew, which takes longer than to fill it.

use tikv_jemallocator::Jemalloc;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

/// One arena for all threads (and jemalloc's own for the largest pieces): with more each keeps what a burst took, and what
/// is asked for most often comes from caches of the threads. What was free for a fifth of a second, longer than a buffer
/// rests between two chunks, goes back to the system; in a daemon by a thread that does just that.
// SAFETY: jemalloc reads a symbol of this name as a pointer to text that ends with a zero, and so it is.
#[unsafe(export_name = "malloc_conf")]
static OPTIONS: &[u8; 46] = b"narenas:1,dirty_decay_ms:200,muzzy_decay_ms:0\0";

/// Starts the thread that gives memory back. It has the privileges of the thread that calls this.
pub fn give_back_in_background() {
    let mut on = true;
    // SAFETY: the name ends with a zero; the value is a bool of C, and lives through the call.
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
