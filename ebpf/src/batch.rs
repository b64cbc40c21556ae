//! Reads entries of a hash map, thousands in one system call: `bpf(2)` with `BPF_MAP_LOOKUP_BATCH`, since Linux 5.6.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, BorrowedFd};

use aya::Pod;

/// `enum bpf_cmd`.
const LOOKUP_BATCH: libc::c_int = 24;

/// Attempts to read an entry while a CPU blocks it.
const ATTEMPTS: u32 = 64;

/// `union bpf_attr`, for this command.
#[repr(C)]
struct BatchAttributes {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

/// Iterates over a map once. Entries that are added meanwhile may be left out.
pub struct MapBatches<'a> {
    map: BorrowedFd<'a>,
    /// The start of the next batch; `None` before the first.
    at: Option<u32>,
    is_over: bool,
}

impl<'a> MapBatches<'a> {
    pub fn of(map: BorrowedFd<'a>) -> Self {
        Self { map, at: None, is_over: false }
    }

    /// The next entries, at most `at_most`; empty after the last.
    ///
    /// # Safety
    /// The map is a hash map with these types of keys and values.
    ///
    /// # Errors
    /// The kernel's. `ENOSPC`: more than `at_most` entries have the same hash.
    pub unsafe fn next<K: Pod, V: Pod>(&mut self, at_most: usize) -> io::Result<Vec<(K, V)>> {
        if self.is_over {
            return Ok(Vec::new());
        }
        let mut keys = vec![MaybeUninit::<K>::uninit(); at_most];
        let mut values = vec![MaybeUninit::<V>::uninit(); at_most];
        let asked = u32::try_from(at_most).map_err(io::Error::other)?;
        let mut next = 0u32;
        let mut attributes = BatchAttributes {
            in_batch: self.at.as_ref().map_or(0, |at| std::ptr::from_ref(at) as u64),
            out_batch: &raw mut next as u64,
            keys: keys.as_mut_ptr() as u64,
            values: values.as_mut_ptr() as u64,
            count: asked,
            map_fd: self.map.as_raw_fd() as u32,
            elem_flags: 0,
            flags: 0,
        };
        for attempt in 0.. {
            // SAFETY: all pointers are to writable memory of sufficient length, by the caller's promise about the
            // map.
            let done = unsafe {
                libc::syscall(libc::SYS_bpf, LOOKUP_BATCH, &raw mut attributes, size_of::<BatchAttributes>())
            };
            if done == 0 {
                break;
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::ENOENT) => {
                    self.is_over = true;
                    break;
                }
                // A CPU blocks the next entry: the entries before it are returned, if there are any.
                Some(libc::EBUSY | libc::EDEADLK | libc::ETIMEDOUT) if attempt < ATTEMPTS => {
                    if attributes.count > 0 {
                        break;
                    }
                    attributes.count = asked;
                }
                _ => return Err(error),
            }
        }
        self.at = Some(next);
        let told = keys.into_iter().zip(values).take(attributes.count as usize);
        // SAFETY: the kernel has filled in so many, and any bytes are a valid key and a valid value.
        Ok(told.map(|(key, value)| unsafe { (key.assume_init(), value.assume_init()) }).collect())
    }
}
