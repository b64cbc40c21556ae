//! The kernel's caches.

use std::fs;
use std::path::Path;

use crate::Result;

/// What is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drop {
    /// Pages; names and attributes stay cached.
    Pages,
    /// Pages, names and attributes.
    All,
}

/// Drops the kernel's caches, of the whole machine.
///
/// # Errors
/// The caller is not root.
pub fn drop_caches(place: &Path, what: Drop) -> Result<()> {
    rustix::fs::syncfs(fs::File::open(place)?)?;
    let value = if what == Drop::Pages { "1" } else { "3" };
    fs::write("/proc/sys/vm/drop_caches", value)
        .map_err(|e| format!("cannot drop the page cache: {e}; run as root"))?;
    Ok(())
}
