//! The allocator of the program, RocksDB included. It must bound the memory of a daemon that runs for months, and keep
//! the buffers of chunks mapped from one to the next: the kernel clears each page anew, which takes longer than to fill it.

use tikv_jemallocator::Jemalloc;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

/// One arena for all threads (and jemalloc's own for the largest pieces): with more each keeps what a burst took, and what
/// is asked for most often comes from caches of the threads. What was free for a fifth of a second, longer than a buffer
/// rests between two chunks, goes back to the system, by a thread that does just that.
// SAFETY: jemalloc reads a symbol of this name as a pointer to text that ends with a zero, and so it is.
#[unsafe(export_name = "malloc_conf")]
static OPTIONS: &[u8; 69] = b"narenas:1,background_thread:true,dirty_decay_ms:200,muzzy_decay_ms:0\0";
