//! The kernel's caches.

use std::fs;
use std::path::Path;

use crate::Result;

/// What the kernel forgets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drop {
    /// Pages: names and attributes stay.
    Pages,
    /// Pages, names and attributes.
    All,
}

/// Empties caches, of the whole machine.
///
/// # Errors
/// Needs root.
pub fn drop_caches(place: &Path, what: Drop) -> Result<()> {
    rustix::fs::syncfs(fs::File::open(place)?)?;
    let value = if what == Drop::Pages { "1" } else { "3" };
    fs::write("/proc/sys/vm/drop_caches", value)
        .map_err(|e| format!("cannot drop the page cache: {e}; run as root"))?;
    Ok(())
}
