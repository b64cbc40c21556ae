//! The cost of an eviction policy: time per operation, and memory per content.

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use forebay_prefetch::eviction::{by_name, names};

const CONTENTS: u64 = 1_000_000;
const OPERATIONS: u64 = 1_000_000;

/// The system's allocator, with a count of the allocated bytes.
struct Counting;

static HELD_BYTES: AtomicU64 = AtomicU64::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call is passed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD_BYTES.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD_BYTES.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(at, layout) }
    }
}

fn held_bytes() -> u64 {
    HELD_BYTES.load(Ordering::Relaxed)
}

/// Returns the next random number, by xorshift: Marsaglia, "Xorshift RNGs", 2003.
pub fn next(random: &mut u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random >> 11
}

pub fn rows() {
    println!("\n{CONTENTS} contents are resident. The bytes include the ghosts of evicted contents.\n");
    println!("| policy | bytes each | access | evict and insert |\n|---|---|---|---|");
    for name in names() {
        let before = held_bytes();
        let Some(mut policy) = by_name(name, CONTENTS) else { continue };
        (0..CONTENTS).for_each(|key| policy.insert(key, 1));
        let each = held_bytes().saturating_sub(before) / CONTENTS;
        let mut random = 1;
        let begun = Instant::now();
        (0..OPERATIONS).for_each(|_| policy.access(next(&mut random) % CONTENTS));
        let access = begun.elapsed().as_nanos() as u64 / OPERATIONS;
        let begun = Instant::now();
        for key in 0..OPERATIONS {
            black_box(policy.evict(&mut |_| true));
            policy.insert(CONTENTS + key, 1);
        }
        let evict = begun.elapsed().as_nanos() as u64 / OPERATIONS;
        let with_ghosts = held_bytes().saturating_sub(before) / CONTENTS;
        println!("| {name} | {each}, with ghosts {with_ghosts} | {access} ns | {evict} ns |");
    }
}
