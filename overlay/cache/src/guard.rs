//! Whether a fast directory is for its user alone: what another user can put there would be read, followed or overwritten
//! with the rights of the daemon.

use std::fs::{self, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use forebay_backends::{Error, ErrorKind, Result, Side};

/// Group and all others may write.
const SHARED: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// Takes an existing directory, and returns the path to it that has no symbolic link in it.
///
/// # Errors
/// `NotPermitted`, with the part that is not safe and the remedy.
pub fn take(path: &Path) -> Result<PathBuf> {
    let failed = |error: io::Error| Error::io(error, Side::Cache, format!("fast-pool directory {}", path.display()));
    let real = path.canonicalize().map_err(failed)?;
    for above in real.ancestors().skip(1) {
        let meta = fs::symlink_metadata(above).map_err(failed)?;
        let shared = meta.mode() & SHARED != 0;
        // In a sticky directory a name belongs to the owner of what it names, and that is checked one step further down.
        if !is_trusted(&meta) || (shared && meta.mode() & STICKY == 0) {
            return Err(refused(path, above, "another user may change it"));
        }
    }
    let meta = fs::symlink_metadata(&real).map_err(failed)?;
    if meta.uid() != own_uid() {
        return Err(refused(path, &real, "it belongs to another user"));
    }
    if meta.mode() & SHARED != 0 {
        // What is in it may be anyone's.
        let is_empty = fs::read_dir(&real).map_err(failed)?.next().is_none();
        if !is_empty {
            return Err(refused(path, &real, "other users could write there, and it is not empty"));
        }
    }
    if meta.mode() & 0o7777 != 0o700 {
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

/// What is in the directory, and in those of the content files, is the user's own, and is no link to elsewhere.
fn check_entries(fast: &Path, dir: &Path, depth: usize) -> Result<()> {
    let failed = |error: io::Error| Error::io(error, Side::Cache, format!("fast-pool directory {}", fast.display()));
    for entry in fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let meta = match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other.map_err(failed)?,
        };
        // Of a disk that is a fast directory by itself.
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
