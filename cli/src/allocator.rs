//! The allocator of the program, RocksDB included. It must bound the memory of a daemon that runs for months, and keep
//! the buffers of chunks mapped from one to the next: the kernel clears each page anew, which takes longer than to fill it.

use tikv_jemallocator::Jemalloc;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

/// Two arenas for all threads (and jemalloc's own for the largest pieces), since with one for each thread each would keep
/// what a burst took. What was free for a second goes back to the system, by threads that do just that.
// SAFETY: jemalloc reads a symbol of this name as a pointer to text that ends with a zero, and so it is.
#[unsafe(export_name = "malloc_conf")]
static OPTIONS: &[u8; 70] = b"narenas:2,background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0\0";
