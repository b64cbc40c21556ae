//! The directory `saved` of each device: what was set aside, for a person to look through.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use forebay_backends::{Error, FileKind, PoolPath, Result, Side};
use forebay_cache::ContentId;
use forebay_catalog::InodeRecord;

/// Files by name: content that the pool did not have.
const FILES: &str = "files";
/// Files by number: content that may or may not be newer than the pool's copy.
const OTHER: &str = "other";

/// The number of files set aside so far, in each device's directory.
#[derive(Debug, Default)]
pub(super) struct Aside {
    files: Vec<(PathBuf, u64)>,
    other: Vec<(PathBuf, u64)>,
}

impl Aside {
    /// Sets aside a file that the pool does not have, under all its names.
    pub fn file(
        &mut self,
        device: &Path,
        id: ContentId,
        content: &Path,
        paths: &[PoolPath],
        record: &InodeRecord,
    ) -> Result<()> {
        let mut names = paths.iter();
        let taken = names.by_ref().find_map(|path| {
            let place = place(device, path);
            (make_parent(&place).is_ok() && rename_new(content, &place).is_ok()).then_some(place)
        });
        // No name could be used: for example, it is too long for this file system, or taken.
        let Some(taken) = taken else { return self.unknown(device, id, content) };
        for path in names {
            let other = place(device, path);
            // The content is safe already: a second name is a convenience.
            let _ = make_parent(&other).and_then(|()| fs::hard_link(&taken, &other));
        }
        dress(&taken, record);
        count(&mut self.files, device);
        Ok(())
    }

    /// Creates a directory or symlink that the pool does not have. No content depends on it.
    pub fn made_here(&mut self, device: &Path, path: &PoolPath, record: &InodeRecord) {
        let place = place(device, path);
        let made = make_parent(&place).and_then(|()| match (record.kind, &record.target) {
            (FileKind::Directory, _) => make_dir(&place),
            (FileKind::Symlink, Some(target)) => symlink(OsStr::from_bytes(target), &place),
            _ => Ok(()),
        });
        if made.is_ok() {
            dress(&place, record);
        }
    }

    /// Sets aside a content file that is not known to equal the pool's copy.
    pub fn unknown(&mut self, device: &Path, id: ContentId, content: &Path) -> Result<()> {
        let dir = device.join("saved").join(OTHER);
        let mut place = dir.join(format!("{:x}", id.0));
        make_parent(&place).map_err(|e| failed(&dir, e))?;
        let mut again = 1;
        while place.exists() {
            again += 1;
            place = dir.join(format!("{:x}-{again}", id.0));
        }
        rename_new(content, &place).map_err(|e| failed(&place, e))?;
        count(&mut self.other, device);
        Ok(())
    }

    pub fn told(&self) -> Vec<String> {
        let files = |count: u64| if count == 1 { "1 file".into() } else { format!("{count} files") };
        let mut told = Vec::new();
        for (device, count) in &self.files {
            let dir = device.join("saved").join(FILES);
            told.push(format!(
                "{} not in the pool: set aside with its name in {dir}; to put back, mount, compare, and: \
                 cp -a {dir}/. MOUNTPOINT/",
                files(*count),
                dir = dir.display()
            ));
        }
        for (device, count) in &self.other {
            told.push(format!(
                "{} that may be newer than the pool's or the same: set aside by number in {}; remove what is not missed",
                files(*count),
                device.join("saved").join(OTHER).display()
            ));
        }
        told
    }
}

fn place(device: &Path, path: &PoolPath) -> PathBuf {
    device.join("saved").join(FILES).join(OsStr::from_bytes(path.as_bytes()))
}

fn make_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), make_dir)
}

fn make_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
}

/// Gives a saved file the owner and the extended attributes that the mount showed. Only the owner gets access: which
/// other users could read it depended on parent directories that it no longer has. The bytes count, so a refusal does
/// not.
fn dress(path: &Path, record: &InodeRecord) {
    for (name, value) in record.xattrs.iter().flatten() {
        let _ = rustix::fs::lsetxattr(path, &**name, value, rustix::fs::XattrFlags::empty());
    }
    let _ = std::os::unix::fs::lchown(path, Some(record.uid), Some(record.gid));
    if record.kind != FileKind::Symlink {
        let mode = if record.kind == FileKind::Directory { 0o700 } else { 0o600 };
        let _ = fs::set_permissions(path, fs::Permissions::from_mode(mode));
    }
}

fn count(counts: &mut Vec<(PathBuf, u64)>, device: &Path) {
    match counts.iter_mut().find(|(d, _)| d == device) {
        Some((_, count)) => *count += 1,
        None => counts.push((device.to_path_buf(), 1)),
    }
}

fn failed(path: &Path, error: io::Error) -> Error {
    Error::io(error, Side::Cache, format!("set aside as {}", path.display()))
}
