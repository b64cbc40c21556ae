//! The boot of the machine in which the catalog was last opened.

use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::Durability;

/// Returns the id of this boot of the machine.
pub(super) fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

/// Returns the path of the file that records the last boot in which the catalog was opened.
fn mark_of(catalog: &Path) -> PathBuf {
    catalog.with_file_name("boot")
}

/// Records the current boot in a file that only this user can read.
pub(super) fn mark(catalog: &Path, boot: &str) -> io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    let mut file = options.open(mark_of(catalog))?;
    // Restricts a file that an earlier version made: it may be readable by all users.
    file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
    file.write_all(boot.as_bytes())
}

/// Returns whether the machine may have lost power since the catalog was last opened.
pub(super) fn may_be_torn(catalog: &Path, durability: Durability, boot: &str) -> bool {
    durability == Durability::SyncedOnly || !std::fs::read_to_string(mark_of(catalog)).is_ok_and(|b| b == boot)
}
