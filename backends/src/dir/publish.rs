//! Gives a staged file its name, on the caller's condition.
//!
//! For the condition `Version`, the staged file and the target are exchanged, and the displaced file is checked. If
//! it is not the expected version, both are exchanged back. In between, for microseconds and only when two writers
//! race, a reader may see the version that is then taken back. No writer may build on it: a file that may still be
//! taken back is locked by its writer (`claim`), and does not count as the expected version.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{
    AtFlags, FallocateFlags, Mode, OFlags, RenameFlags, SeekFrom, copy_file_range, fallocate, fsync, ftruncate, linkat,
    openat, renameat, renameat_with, seek,
};
use rustix::io::{Errno, pread};

use crate::{
    Attrs, ErrorKind, Expected, FileKind, NAME_MAX_BYTES, RESERVED_PREFIX, Result, Stat, UNFINISHED_XATTR, Version,
    unfinished_mark,
};

use crate::narrowed::narrowed_mode;

use super::attrs::AttributeTarget;
use super::root::PathCall;
use super::staging::{TempFile, write_all};
use super::stat::{stat_fd, stat_name};

const UNDO_ATTEMPTS: u32 = 256;
/// The first attempts follow at once; the later ones give a slow writer time to bring our file back.
const UNDO_AT_ONCE: u32 = 16;
const UNDO_PAUSE: Duration = Duration::from_millis(1);
const COPY_BYTES: usize = 1 << 20;

/// The publication of one staged file.
pub(super) struct Publish<'a> {
    pub(super) call: PathCall<'a>,
    /// The last component of the path.
    pub(super) name: &'a [u8],
    pub(super) attrs: &'a Attrs,
    pub(super) may_chown: bool,
    pub(super) rename_noreplace: bool,
    pub(super) rename_exchange: bool,
}

/// The result of an attempt to replace a version by exchange.
enum Exchanged {
    Done,
    /// The target has meanwhile got another name and must keep its inode.
    Linked(Stat),
    /// The file system cannot exchange.
    Unable,
}

impl Publish<'_> {
    pub(super) fn run(&self, mut staging: TempFile, expected: &Expected) -> Result<Stat> {
        match expected {
            Expected::Absent => self.create(&mut staging)?,
            Expected::Version(version) | Expected::Name(version) => {
                let together = matches!(expected, Expected::Version(_));
                if let Some(in_place) = self.replace_version(&mut staging, version, together)? {
                    return Ok(in_place);
                }
            }
            Expected::Anything => match stat_name(&staging.dir, self.name) {
                Ok(target) if target.kind == FileKind::File && target.nlink > 1 => {
                    return self.rewrite(&mut staging, &target);
                }
                Ok(_) | Err(Errno::NOENT) => self.rename(&mut staging)?,
                Err(errno) => return Err(self.call.failed(errno)),
            },
        }
        // By the open file: the name may belong to another writer by now, whose version must not be reported as ours.
        staging.stat().map_err(|errno| self.call.failed(errno))
    }

    fn conflict(&self, why: &str) -> crate::Error {
        self.call.error(ErrorKind::Conflict, why)
    }

    fn create(&self, staging: &mut TempFile) -> Result<()> {
        if self.rename_noreplace {
            let flags = RenameFlags::NOREPLACE;
            match renameat_with(&staging.dir, &staging.temp[..], &staging.dir, self.name, flags) {
                Ok(()) => {
                    staging.owned = false;
                    return Ok(());
                }
                Err(Errno::EXIST) => return Err(self.conflict("it exists already")),
                Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
                Err(errno) => return Err(self.call.failed(errno)),
            }
        }
        self.create_by_link(staging)
    }

    /// `link` refuses to replace on every file system that has hard links, over NFS too.
    fn create_by_link(&self, staging: &mut TempFile) -> Result<()> {
        let linked = linkat(&staging.dir, &staging.temp[..], &staging.dir, self.name, AtFlags::empty());
        match linked {
            Ok(()) => {}
            // If the first reply was lost, the repeated request finds the link that the first one made.
            Err(Errno::EXIST) if self.is_ours(staging) => {}
            Err(Errno::EXIST) => return Err(self.conflict("it exists already")),
            Err(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS | Errno::MLINK) => {
                return match stat_name(&staging.dir, self.name) {
                    Err(Errno::NOENT) => self.rename(staging),
                    Ok(_) => Err(self.conflict("it exists already")),
                    Err(errno) => Err(self.call.failed(errno)),
                };
            }
            Err(errno) => return Err(self.call.failed(errno)),
        }
        staging.unlink_temp().map_err(|errno| self.call.failed(errno).context("remove the temporary name"))
    }

    fn is_ours(&self, staging: &TempFile) -> bool {
        match (stat_name(&staging.dir, self.name), staging.stat()) {
            (Ok(target), Ok(ours)) => target.version.same_object(&ours.version),
            _ => false,
        }
    }

    fn rename(&self, staging: &mut TempFile) -> Result<()> {
        renameat(&staging.dir, &staging.temp[..], &staging.dir, self.name).map_err(|errno| self.call.failed(errno))?;
        staging.owned = false;
        Ok(())
    }

    /// Replaces `version`. Returns the attributes if the file was rewritten in place because it has other names that
    /// must stay `together` with this one.
    fn replace_version(&self, staging: &mut TempFile, version: &Version, together: bool) -> Result<Option<Stat>> {
        let target = self.expect(staging, version)?;
        if target.kind == FileKind::Directory {
            return Err(self.call.failed(Errno::ISDIR));
        }
        if together && target.kind == FileKind::File && target.nlink > 1 {
            return self.rewrite(staging, &target).map(Some);
        }
        let exchanged =
            if self.rename_exchange { self.exchange(staging, version, together)? } else { Exchanged::Unable };
        match exchanged {
            Exchanged::Done => Ok(None),
            Exchanged::Linked(target) => self.rewrite(staging, &target).map(Some),
            Exchanged::Unable => {
                self.expect(staging, version)?;
                self.rename(staging).map(|()| None)
            }
        }
    }

    /// Returns the target if it is the expected version.
    fn expect(&self, staging: &TempFile, version: &Version) -> Result<Stat> {
        match stat_name(&staging.dir, self.name) {
            Ok(target) if target.version.same_content(version) => Ok(target),
            Ok(_) => Err(self.conflict("it was changed by another writer")),
            Err(Errno::NOENT) => {
                // Distinguishes a missing name from a pool that is gone as a whole.
                let error = self.call.failed(Errno::NOENT);
                Err(if error.is(ErrorKind::NotFound) {
                    self.conflict("it was removed by another writer")
                } else {
                    error
                })
            }
            Err(errno) => Err(self.call.failed(errno)),
        }
    }

    fn swap(&self, staging: &TempFile) -> rustix::io::Result<()> {
        renameat_with(&staging.dir, &staging.temp[..], &staging.dir, self.name, RenameFlags::EXCHANGE)
    }

    fn exchange(&self, staging: &mut TempFile, version: &Version, together: bool) -> Result<Exchanged> {
        staging.claim();
        match self.swap(staging) {
            Ok(()) => staging.owned = false,
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => return Ok(Exchanged::Unable),
            Err(Errno::NOENT) => return Err(self.conflict("it was removed by another writer")),
            Err(errno) => return Err(self.call.failed(errno)),
        }
        let out = staging.stat_temp().map_err(|errno| self.left_behind(staging, errno))?;
        let claimed = out.kind == FileKind::File && staging.temp_is_claimed();
        if claimed || !out.version.same_content(version) {
            self.undo(staging, &out)?;
            return Err(self.conflict("it was changed by another writer"));
        }
        if together && out.kind == FileKind::File && out.nlink > 1 {
            self.undo(staging, &out)?;
            return Ok(Exchanged::Linked(out));
        }
        staging.confirm();
        staging.unlink_temp().map_err(|errno| self.call.failed(errno).context("remove the replaced version"))?;
        Ok(Exchanged::Done)
    }

    /// Puts `taken`, which was displaced instead of the expected version, back at the target. Other writers may move
    /// the target meanwhile, so each exchange may displace a file newer than the one that it puts there, and that
    /// file must go back in turn. It ends when our own file is displaced. If our file was replaced for good, it ends
    /// when an exchange displaces the file that the previous exchange put there: then the newest is at the target.
    fn undo(&self, staging: &mut TempFile, taken: &Stat) -> Result<()> {
        let mut held = taken.version.clone();
        let mut placed = None;
        for attempt in 0..UNDO_ATTEMPTS {
            match self.swap(staging) {
                Ok(()) => {}
                Err(Errno::NOENT) => {
                    // Our file was removed from the target: the file that it displaced must not be lost with it.
                    let flags = RenameFlags::NOREPLACE;
                    match renameat_with(&staging.dir, &staging.temp[..], &staging.dir, self.name, flags) {
                        Ok(()) => return Ok(()),
                        Err(Errno::EXIST) => continue,
                        Err(errno) => return Err(self.left_behind(staging, errno)),
                    }
                }
                Err(errno) => return Err(self.left_behind(staging, errno)),
            }
            let out = staging.stat_temp().map_err(|errno| self.left_behind(staging, errno))?.version;
            let ours = staging.stat().map_err(|errno| self.left_behind(staging, errno))?;
            if out.same_object(&ours.version) {
                staging.owned = true;
                return Ok(());
            }
            let superseded = placed.as_ref().is_some_and(|placed| out.same_object(placed));
            // While our file has a name, another writer has displaced it and will bring it back.
            if superseded && ours.nlink == 0 {
                return staging.unlink_temp().map_err(|errno| self.left_behind(staging, errno));
            }
            placed = Some(std::mem::replace(&mut held, out));
            if attempt >= UNDO_AT_ONCE {
                std::thread::sleep(UNDO_PAUSE);
            }
        }
        Err(self.left_behind(staging, Errno::BUSY))
    }

    /// The error after which a version of another writer may be at the temporary name. It gets a name that is listed, if
    /// that is possible: a sweep removes temporary names.
    pub(super) fn left_behind(&self, staging: &TempFile, errno: Errno) -> crate::Error {
        let suffix = [&b".conflict-"[..], staging.temp.strip_prefix(RESERVED_PREFIX).unwrap_or(&staging.temp)].concat();
        let kept = self.name.len().min(NAME_MAX_BYTES.saturating_sub(suffix.len()));
        let shown = [&self.name[..kept], &suffix].concat();
        let flags = RenameFlags::NOREPLACE;
        let at = match renameat_with(&staging.dir, &staging.temp[..], &staging.dir, &shown[..], flags) {
            Ok(()) => &shown,
            Err(_) => &staging.temp,
        };
        self.call.failed(errno).context(format!("another writer's version may be at {}", at.escape_ascii()))
    }

    /// See [`narrowed_mode`].
    fn narrowed(&self, opened: &AttributeTarget<'_>, target: &Stat) -> rustix::io::Result<u32> {
        let is_acl = |(name, _): &(Vec<u8>, Vec<u8>)| name == b"system.posix_acl_access";
        let old = match opened.xattrs() {
            Err(Errno::OPNOTSUPP) => Vec::new(),
            other => other?,
        };
        let has_acl = old.iter().chain(&self.attrs.xattrs).any(is_acl);
        Ok(narrowed_mode(target, self.attrs, has_acl))
    }

    /// Writes the staged content into a file that has other names, so that all of them keep naming one file. Readers
    /// by version get `Stale`, never a mixture. The space is reserved before anything is changed. A crash in the
    /// middle leaves a torn file with a mark, which any client with the content can rewrite.
    fn rewrite(&self, staging: &mut TempFile, target: &Stat) -> Result<Stat> {
        let fail = |errno| self.call.failed(errno).context("rewrite a file with several names in place");
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = openat(&staging.dir, self.name, flags, Mode::empty()).map_err(fail)?;
        if !stat_fd(&file).map_err(fail)?.version.same_content(&target.version) {
            return Err(self.conflict("it was changed by another writer"));
        }
        let opened = AttributeTarget::opened(file.as_fd(), FileKind::File);
        let narrowed = self.narrowed(&opened, target).map_err(fail)?;
        if narrowed != target.mode {
            opened.chmod(narrowed).map_err(fail)?;
        }
        if let Err(errno) = reserve(&staging.file, &file) {
            // Gives the space back. Nothing was written, so the times are restored.
            let _ = ftruncate(&file, target.size);
            let _ = opened.set_times(Some(target.atime), Some(target.mtime));
            let _ = opened.chmod(target.mode);
            return Err(fail(errno));
        }
        let size = stat_fd(&staging.file).map_err(fail)?.size;
        match opened.set_xattr(UNFINISHED_XATTR, &unfinished_mark(size, self.attrs.mtime)) {
            Err(Errno::OPNOTSUPP) => {}
            marked => marked.map_err(fail)?,
        }
        // The mark is on disk before the bytes that it describes, and the bytes are on disk before the mark is
        // removed.
        fsync(&file).map_err(fail)?;
        copy_content(&staging.file, &file).map_err(fail)?;
        fsync(&file).map_err(fail)?;
        opened.apply(self.attrs, self.may_chown).map_err(|why| why.of(self.call))?;
        opened.remove_other_xattrs(&self.attrs.xattrs).map_err(fail)?;
        match opened.remove_xattr(UNFINISHED_XATTR) {
            Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
            removed => removed.map_err(fail)?,
        }
        fsync(&file).map_err(fail)?;
        staging.unlink_temp().map_err(fail)?;
        stat_fd(&file).map_err(fail)
    }
}

/// Reserves space in `to` for the data of `from` if the file system can, so that writing it does not fail half way.
fn reserve(from: &OwnedFd, to: &OwnedFd) -> rustix::io::Result<()> {
    let mut at = 0;
    while let Some((start, end)) = next_data(from, at)? {
        match fallocate(to, FallocateFlags::KEEP_SIZE, start, end - start) {
            Err(errno @ (Errno::NOSPC | Errno::DQUOT | Errno::FBIG)) => return Err(errno),
            Err(_) => return Ok(()),
            Ok(()) => at = end,
        }
    }
    Ok(())
}

/// Makes `to` equal to `from`, holes included.
fn copy_content(from: &OwnedFd, to: &OwnedFd) -> rustix::io::Result<()> {
    let size = stat_fd(from)?.size;
    ftruncate(to, size)?;
    let mut at = 0;
    while let Some((start, end)) = next_data(from, at)? {
        clear_range(to, at, start)?;
        copy_range(from, to, start, end)?;
        at = end;
    }
    clear_range(to, at, size)
}

/// The next range of `file` from `at` on that is not a hole.
fn next_data(file: &OwnedFd, at: u64) -> rustix::io::Result<Option<(u64, u64)>> {
    let size = stat_fd(file)?.size;
    let start = match seek(file, SeekFrom::Data(at)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        Err(Errno::INVAL) if at < size => at,
        Err(Errno::INVAL) => return Ok(None),
        Err(errno) => return Err(errno),
    };
    let end = seek(file, SeekFrom::Hole(start)).unwrap_or(size).min(size);
    Ok(Some((start, end)).filter(|(start, end)| start < end))
}

/// Makes a range a hole, or zeros if the file system has no holes.
fn clear_range(file: &OwnedFd, start: u64, end: u64) -> rustix::io::Result<()> {
    if start >= end {
        return Ok(());
    }
    match fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, start, end - start) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {}
        punched => return punched,
    }
    let zeros = vec![0; COPY_BYTES];
    let mut at = start;
    while at < end {
        let length = COPY_BYTES.min(usize::try_from(end - at).unwrap_or(COPY_BYTES));
        write_all(file, &zeros[..length], at)?;
        at += length as u64;
    }
    Ok(())
}

fn copy_range(from: &OwnedFd, to: &OwnedFd, start: u64, end: u64) -> rustix::io::Result<()> {
    let mut at = start;
    while at < end {
        let (mut read_at, mut write_at) = (at, at);
        let length = usize::try_from(end - at).unwrap_or(usize::MAX).min(1 << 30);
        match copy_file_range(from, Some(&mut read_at), to, Some(&mut write_at), length) {
            Ok(0) => return Err(Errno::IO),
            Ok(copied) => at += copied as u64,
            Err(Errno::INTR) => {}
            Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP | Errno::PERM) => {
                return copy_by_hand(from, to, at, end);
            }
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

fn copy_by_hand(from: &OwnedFd, to: &OwnedFd, start: u64, end: u64) -> rustix::io::Result<()> {
    let mut buffer = vec![0; COPY_BYTES];
    let mut at = start;
    while at < end {
        let length = COPY_BYTES.min(usize::try_from(end - at).unwrap_or(COPY_BYTES));
        match pread(from, &mut buffer[..length], at) {
            Ok(0) => return Err(Errno::IO),
            Ok(got) => {
                write_all(to, &buffer[..got], at)?;
                at += got as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
