//! The directory `saved` of each device: what was set aside, for a person to look through.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use forebay_backends::{Error, FileKind, PoolPath, Result, Side, Time};
use forebay_cache::ContentId;
use forebay_catalog::InodeRecord;
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use rustix::io::Errno;

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
            let place = SavedName::of(device, path).ok()?;
            place.take(content).ok()?;
            Some(place)
        });
        // No name could be used: for example, it is too long for this file system, or taken.
        let Some(taken) = taken else { return self.unknown(device, id, content) };
        for path in names {
            // The content is safe already: a second name is a convenience.
            let _ = SavedName::of(device, path).and_then(|other| taken.link_as(&other));
        }
        taken.dress(record);
        count(&mut self.files, device);
        Ok(())
    }

    /// Creates a directory or symlink that the pool does not have. No content depends on it. A directory gets its
    /// attributes by [`Self::dress_directory`].
    pub fn made_here(&mut self, device: &Path, path: &PoolPath, record: &InodeRecord) {
        let made = SavedName::of(device, path).and_then(|place| {
            match (record.kind, &record.target) {
                (FileKind::Directory, _) => drop(subdirectory(&place.dir, &place.name)?),
                (FileKind::Symlink, Some(target)) => rustix::fs::symlinkat(&**target, &place.dir, &*place.name)?,
                _ => {}
            }
            Ok(place)
        });
        if let (Ok(place), FileKind::Symlink) = (made, record.kind) {
            place.dress(record);
        }
    }

    /// Gives a directory the attributes that the mount showed, if it was made for a name in it: the `cp -a` that puts the
    /// names back gives them to the directories of the mount, its root included. Call it last, the deepest first.
    pub fn dress_directory(&self, device: &Path, path: &PoolPath, record: &InodeRecord) {
        let Ok(dir) = saved_directory(device, path) else { return };
        dress(&dir, record, record.mode & 0o7777);
        let time = |time: Time| Timespec { tv_sec: time.secs, tv_nsec: time.nanos.into() };
        let times = Timestamps { last_access: time(record.atime), last_modification: time(record.mtime) };
        let _ = rustix::fs::futimens(&dir, &times);
    }

    /// Sets aside a content file that is not known to equal the pool's copy.
    pub fn unknown(&mut self, device: &Path, id: ContentId, content: &Path) -> Result<()> {
        let dir = device.join("saved").join(OTHER);
        let mut place = dir.join(format!("{:x}", id.0));
        make_dir(&dir).map_err(|e| failed(&dir, e))?;
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

/// A name in a directory below `saved/files`. The directory is open: users choose the names there, and the targets of the
/// symlinks among them, so no path through that directory is followed.
struct SavedName {
    dir: OwnedFd,
    name: Vec<u8>,
}

impl SavedName {
    /// Makes the directories above a path. Fails if one of their names is taken, also by a symlink.
    fn of(device: &Path, path: &PoolPath) -> io::Result<Self> {
        let files = device.join("saved").join(FILES);
        make_dir(&files)?;
        let mut dir = OwnedFd::from(File::open(&files)?);
        let above = path.parent().unwrap_or_default();
        for name in above.components() {
            dir = subdirectory(&dir, name)?;
        }
        Ok(Self { dir, name: path.name().unwrap_or_default().to_vec() })
    }

    /// Moves a file to this name, unless the name is taken.
    fn take(&self, file: &Path) -> io::Result<()> {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        Ok(renameat_with(CWD, file, &self.dir, &*self.name, RenameFlags::NOREPLACE)?)
    }

    fn link_as(&self, other: &Self) -> io::Result<()> {
        Ok(rustix::fs::linkat(&self.dir, &*self.name, &other.dir, &*other.name, AtFlags::empty())?)
    }

    /// Gives a file or a symlink the attributes that the mount showed, without set-id bits. `saved` itself is closed to
    /// other users.
    fn dress(&self, record: &InodeRecord) {
        if record.kind == FileKind::Symlink {
            let owner = (Some(Uid::from_raw(record.uid)), Some(Gid::from_raw(record.gid)));
            let _ = rustix::fs::chownat(&self.dir, &*self.name, owner.0, owner.1, AtFlags::SYMLINK_NOFOLLOW);
            return;
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        if let Ok(saved) = rustix::fs::openat(&self.dir, &*self.name, flags, Mode::empty()) {
            dress(&saved, record, record.mode & 0o777);
        }
    }
}

/// Gives what was saved the owner and the extended attributes that the mount showed, and a mode. The bytes count, so a
/// refusal does not.
fn dress(saved: &OwnedFd, record: &InodeRecord, mode: u32) {
    for (name, value) in record.xattrs.iter().flatten() {
        let _ = rustix::fs::fsetxattr(saved, &**name, value, rustix::fs::XattrFlags::empty());
    }
    // The owner first: a change of it takes the set-id bits away.
    let _ = rustix::fs::fchown(saved, Some(Uid::from_raw(record.uid)), Some(Gid::from_raw(record.gid)));
    let _ = rustix::fs::fchmod(saved, Mode::from_raw_mode(mode));
}

/// Opens a directory below `saved/files`, or `saved/files` itself. No link is followed.
fn saved_directory(device: &Path, path: &PoolPath) -> io::Result<OwnedFd> {
    let mut dir = open_directory(rustix::fs::CWD, device.join("saved").join(FILES))?;
    for name in path.components() {
        dir = open_directory(&dir, name)?;
    }
    Ok(dir)
}

fn open_directory(above: impl AsFd, name: impl rustix::path::Arg) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(above, name, flags, Mode::empty())?)
}

/// Opens a directory in another one, and makes it if the name is free.
fn subdirectory(dir: &OwnedFd, name: &[u8]) -> io::Result<OwnedFd> {
    match rustix::fs::mkdirat(dir, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(e) => return Err(e.into()),
    }
    open_directory(dir, name)
}

fn make_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;
    use crate::node::tests::file_of_pool;

    #[test]
    fn nothing_is_saved_through_a_symlink_of_a_user() {
        let (device, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::set_permissions(outside.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let mut aside = Aside::default();
        let path = |path: &str| PoolPath::parse(path).unwrap();
        let target = outside.path().as_os_str().as_encoded_bytes();
        let owner = |record: InodeRecord| InodeRecord {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            ..record
        };
        let link = InodeRecord { kind: FileKind::Symlink, target: Some(target.into()), ..owner(file_of_pool(0)) };
        let dir = InodeRecord { kind: FileKind::Directory, ..owner(file_of_pool(0)) };
        aside.made_here(device.path(), &path("a/link"), &link);
        // A damaged catalog may have an older record, in which the symlink was a directory.
        aside.made_here(device.path(), &path("a/link"), &dir);
        aside.made_here(device.path(), &path("a/link/made"), &dir);
        let content = device.path().join("content");
        fs::write(&content, "saved").unwrap();
        let names = [path("a/link/first"), path("a/b/second"), path("a/link/third"), path("a/fourth")];
        aside.file(device.path(), ContentId(1), &content, &names, &owner(file_of_pool(5))).unwrap();
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
        assert_eq!(fs::metadata(outside.path()).unwrap().permissions().mode() & 0o777, 0o755);
        let saved = device.path().join("saved/files/a");
        assert_eq!(fs::read_link(saved.join("link")).unwrap(), outside.path());
        for name in ["b/second", "fourth"] {
            assert_eq!(fs::read(saved.join(name)).unwrap(), b"saved", "{name}");
            assert_eq!(fs::metadata(saved.join(name)).unwrap().permissions().mode() & 0o7777, 0o644);
        }
    }

    #[test]
    fn directories_above_what_was_saved_get_their_attributes_back() {
        let device = tempfile::tempdir().unwrap();
        let mut aside = Aside::default();
        let path = |path: &str| PoolPath::parse(path).unwrap();
        let owner = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let dir = |mode, secs| InodeRecord {
            kind: FileKind::Directory,
            mode,
            uid: owner.0,
            gid: owner.1,
            mtime: Time { secs, nanos: 5 },
            ..file_of_pool(0)
        };
        let content = device.path().join("content");
        fs::write(&content, "saved").unwrap();
        let file = InodeRecord { mode: 0o4750, uid: owner.0, gid: owner.1, ..file_of_pool(5) };
        aside.file(device.path(), ContentId(1), &content, &[path("a/b/file")], &file).unwrap();
        for (name, mode, secs) in [("a/b", 0o2771, 3), ("a", 0o1777, 2), ("", 0o755, 1), ("not/there", 0o755, 4)] {
            let name = if name.is_empty() { PoolPath::root() } else { path(name) };
            aside.dress_directory(device.path(), &name, &dir(mode, secs));
        }
        let saved = device.path().join("saved");
        let mode = |below: &str| fs::metadata(saved.join(below)).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode(""), mode("files"), mode("files/a"), mode("files/a/b")), (0o700, 0o755, 0o1777, 0o2771));
        assert_eq!(mode("files/a/b/file"), 0o750, "without set-id bits");
        for (below, secs) in [("files", 1), ("files/a", 2), ("files/a/b", 3)] {
            let meta = fs::metadata(saved.join(below)).unwrap();
            assert_eq!((meta.mtime(), meta.mtime_nsec()), (secs, 5), "{below}");
        }
        assert!(!saved.join("files/not").exists());
    }
}
