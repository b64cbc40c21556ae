//! In which boot of the machine the catalog was opened last.

use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::Durability;

/// Differs after each start of the machine.
pub(super) fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

/// Where it is noted in which boot the catalog was opened last.
fn mark_of(catalog: &Path) -> PathBuf {
    catalog.with_file_name("boot")
}

/// Notes in which boot the catalog is open, in a file that is for this user alone.
pub(super) fn mark(catalog: &Path, boot: &str) -> io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    let mut file = options.open(mark_of(catalog))?;
    // One that an earlier version made may be open to all.
    file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
    file.write_all(boot.as_bytes())
}

/// Whether the machine may have lost power since the catalog was opened last.
pub(super) fn may_be_torn(catalog: &Path, durability: Durability, boot: &str) -> bool {
    durability == Durability::SyncedOnly || !std::fs::read_to_string(mark_of(catalog)).is_ok_and(|b| b == boot)
}
