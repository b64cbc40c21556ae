//! Checks that only the daemon's user can change a fast directory. The daemon would read, follow or overwrite with its
//! own rights what another user puts there.

use std::fs::{self, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use forebay_backends::{Error, ErrorKind, Result, Side};

/// Write permission of the group and of all other users.
const SHARED: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// Checks an existing directory, and returns its path without symbolic links.
///
/// # Errors
/// `InvalidInput`, with the unsafe part of the path and the remedy.
pub fn take(path: &Path) -> Result<PathBuf> {
    let failed = |error: io::Error| Error::io(error, Side::Cache, format!("fast-pool directory {}", path.display()));
    let real = path.canonicalize().map_err(failed)?;
    for above in real.ancestors().skip(1) {
        let meta = fs::symlink_metadata(above).map_err(failed)?;
        let shared = meta.mode() & SHARED != 0;
        // In a sticky directory, only the owner of an entry can rename or remove it. The owner is checked one level
        // below.
        if !is_trusted(&meta) || (shared && meta.mode() & STICKY == 0) {
            return Err(refused(path, above, "another user may change it"));
        }
    }
    let meta = fs::symlink_metadata(&real).map_err(failed)?;
    if meta.uid() != own_uid() {
        return Err(refused(path, &real, "it belongs to another user"));
    }
    if meta.mode() & SHARED != 0 {
        // Entries may have been created by any user.
        let is_empty = fs::read_dir(&real).map_err(failed)?.next().is_none();
        if !is_empty {
            return Err(refused(path, &real, "other users could write there, and it is not empty"));
        }
    }
    // The directory of a mount that has scratch directories of other users may be passed through; see `scratch`.
    if !matches!(meta.mode() & 0o7777, 0o700 | 0o711) {
        fs::set_permissions(&real, Permissions::from_mode(0o700)).map_err(|error| match error.raw_os_error() {
            Some(libc::EROFS) => {
                failed(error).context("the file system is read-only; give one (--fast) that can be written")
            }
            _ => failed(error),
        })?;
    }
    check_entries(path, &real, 2)?;
    Ok(real)
}

/// Checks that the entries of the directory, and of the directory of content files, belong to the user and are no
/// symbolic links.
fn check_entries(fast: &Path, dir: &Path, depth: usize) -> Result<()> {
    let failed = |error: io::Error| Error::io(error, Side::Cache, format!("fast-pool directory {}", fast.display()));
    for entry in fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let meta = match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other.map_err(failed)?,
        };
        // The directory `lost+found`, if the fast directory is the root of a file system.
        if depth == 2 && path.file_name().is_some_and(|name| name == "lost+found") {
            continue;
        }
        let is_own = meta.uid() == own_uid() && !meta.is_symlink();
        if !is_own || (meta.is_dir() && meta.mode() & SHARED != 0) {
            return Err(refused(fast, &path, "another user may have made or changed it"));
        }
        if depth == 2 && meta.is_dir() && path.file_name().is_some_and(|name| name == "content") {
            check_entries(fast, &path, depth - 1)?;
        }
    }
    Ok(())
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn is_trusted(meta: &Metadata) -> bool {
    meta.uid() == 0 || meta.uid() == own_uid()
}

fn refused(fast: &Path, part: &Path, why: &str) -> Error {
    Error::new(
        ErrorKind::InvalidInput,
        Side::Application,
        format!(
            "fast-pool directory {}: {}: {why}; give a directory (--fast) that you own with mode 0700, below directories \
             that only you and root can write",
            fast.display(),
            part.display()
        ),
    )
}
