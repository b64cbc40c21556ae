//! Translates each request of the kernel into one call of the engine.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::SystemTime;

use bytes::Bytes;
use forebay_backends::{ErrorKind, FileKind};
use forebay_engine::{Change, Ino, Lookup, Seek};
use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags, INodeNo, IoctlFlags,
    KernelConfig, LockOwner, OpenFlags, PollEvents, PollFlags, PollNotifier, RenameFlags, ReplyAttr, ReplyBmap,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek,
    ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};

use super::handle::{Handle, Mode};
use super::latencies::Operation;
use super::session::{Granted, Kill, MountSession, is_synchronous};
use super::{convert, dirsync, init, rename, resend, setid};

/// Block size of `statfs`, in bytes.
const STATFS_BLOCK_BYTES: u32 = 4096;
const NAME_MAX_BYTES: u32 = 255;
/// Limit of one `copy_file_range` request: large enough to be cheap, small enough that a signal is handled soon. The
/// program gets a short count and calls again.
const COPY_MAX_BYTES: u64 = 128 << 20;

fn bytes(name: &OsStr) -> Vec<u8> {
    name.as_bytes().to_vec()
}

impl Filesystem for MountSession {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let (handshake, passthrough) = init::negotiate(config, self.terms);
        if self.terms.sync {
            self.modes.turn_off("with the option `sync` the daemon makes each change durable");
        } else if !self.terms.passthrough {
            self.modes.turn_off("the mount options turn it off");
        } else if !passthrough {
            self.modes.turn_off("the kernel has no FUSE passthrough; it came with Linux 6.9");
        }
        self.handshake.set(handshake).map_err(|_| io::Error::other("a second handshake"))
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let (session, thread, name) = (self.clone(), request.pid(), bytes(name));
        let work = async move { session.lookup_for(thread, Ino(parent.0), &name).await };
        let session = self.clone();
        self.dispatch(request, Operation::Lookup, work, move |outcome| match outcome {
            Ok(Lookup::Found(entry)) => session.reply_entry(&entry, reply),
            Ok(Lookup::Negative { ttl }) if !ttl.is_zero() => {
                reply.entry(&ttl, &convert::nothing(), fuser::Generation(0));
            }
            Ok(Lookup::Negative { .. }) => reply.error(Errno::ENOENT),
            Err(error) => reply.error(convert::errno(&error)),
        });
    }

    fn forget(&self, _: &Request, ino: INodeNo, count: u64) {
        self.modes.drop_backing(Ino(ino.0));
        self.overlay.forget(Ino(ino.0), count);
    }

    fn getattr(&self, request: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let (session, thread) = (self.clone(), request.pid());
        let work = async move { session.getattr_for(thread, Ino(ino.0)).await };
        self.dispatch(request, Operation::Getattr, work, |outcome| match outcome {
            Ok((attr, ttl)) => reply.attr(&ttl, &convert::attr(&attr)),
            Err(error) => reply.error(convert::errno(&error)),
        });
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let (overlay, ino, caller) = (self.overlay.clone(), Ino(ino.0), convert::caller(request));
        let mut change = Change {
            mode: mode.map(|mode| mode & 0o7777),
            uid,
            gid,
            size,
            atime: atime.map(convert::set_time),
            mtime: mtime.map(convert::set_time),
        };
        let work = async move {
            if change == Change::default() {
                return overlay.getattr(ino).await;
            }
            setid::complete(&overlay, ino, &mut change, caller).await?;
            overlay.setattr(ino, &change, caller).await
        };
        self.dispatch(request, Operation::Setattr, self.changes(ino, work), |outcome| match outcome {
            Ok((attr, ttl)) => reply.attr(&ttl, &convert::attr(&attr)),
            Err(error) => reply.error(convert::errno(&error)),
        });
    }

    fn readlink(&self, request: &Request, ino: INodeNo, reply: ReplyData) {
        let overlay = self.overlay.clone();
        let work = async move { overlay.readlink(Ino(ino.0)).await };
        self.dispatch(request, Operation::Readlink, work, |outcome| match outcome {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(convert::errno(&error)),
        });
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let Some(kind) = FileKind::from_mode(mode) else { return reply.error(Errno::EINVAL) };
        let (overlay, parent, name) = (self.overlay.clone(), Ino(parent.0), bytes(name));
        let (caller, repeated, rdev) =
            (convert::caller(request), resend::is_repeated(request), convert::rdev_from_kernel(rdev));
        let work = async move {
            let made = overlay.mknod(parent, &name, kind, mode & 0o7777, umask, rdev, caller).await;
            resend::made(&overlay, parent, &name, repeated, kind, made).await
        };
        self.dispatch_entry(request, Operation::Mknod, work, reply);
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let (overlay, parent, name) = (self.overlay.clone(), Ino(parent.0), bytes(name));
        let (caller, repeated) = (convert::caller(request), resend::is_repeated(request));
        let work = async move {
            let made = overlay.mkdir(parent, &name, mode & 0o7777, umask, caller).await;
            resend::made(&overlay, parent, &name, repeated, FileKind::Directory, made).await
        };
        self.dispatch_entry(request, Operation::Mkdir, work, reply);
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let (overlay, parent, name) = (self.overlay.clone(), Ino(parent.0), bytes(name));
        let (caller, repeated) = (convert::caller(request), resend::is_repeated(request));
        let target = bytes(target.as_os_str());
        let work = async move {
            let made = overlay.symlink(parent, &name, &target, caller).await;
            resend::made(&overlay, parent, &name, repeated, FileKind::Symlink, made).await
        };
        self.dispatch_entry(request, Operation::Symlink, work, reply);
    }

    fn link(&self, request: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let (overlay, parent, name) = (self.overlay.clone(), Ino(parent.0), bytes(name));
        let repeated = resend::is_repeated(request);
        let work = async move {
            match overlay.link(Ino(ino.0), parent, &name).await {
                Err(error) if repeated && error.is(ErrorKind::Exists) => match overlay.lookup(parent, &name).await? {
                    Lookup::Found(entry) if entry.attr.ino.0 == ino.0 => Ok(entry),
                    Lookup::Found(entry) => {
                        overlay.forget(entry.attr.ino, 1);
                        Err(error)
                    }
                    Lookup::Negative { .. } => Err(error),
                },
                outcome => outcome,
            }
        };
        self.dispatch_entry(request, Operation::Link, work, reply);
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (overlay, name, repeated) = (self.overlay.clone(), bytes(name), resend::is_repeated(request));
        let work = async move { resend::removed(repeated, overlay.unlink(Ino(parent.0), &name).await) };
        self.dispatch_done(request, Operation::Unlink, self.names(work, dirsync::nothing), reply);
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (overlay, name, repeated) = (self.overlay.clone(), bytes(name), resend::is_repeated(request));
        let work = async move { resend::removed(repeated, overlay.rmdir(Ino(parent.0), &name).await) };
        self.dispatch_done(request, Operation::Rmdir, self.names(work, dirsync::nothing), reply);
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (from, to) = ((Ino(parent.0), bytes(name)), (Ino(new_parent.0), bytes(new_name)));
        let (overlay, caller, repeated) =
            (self.overlay.clone(), convert::caller(request), resend::is_repeated(request));
        let work = async move { rename::rename(&overlay, from, to, flags, caller, repeated).await };
        self.dispatch_done(request, Operation::Rename, self.names(work, dirsync::nothing), reply);
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if self.terms.no_open {
            // ENOSYS is permanent: from now on the kernel opens files without a request, and keeps their pages.
            return reply.error(Errno::ENOSYS);
        }
        let (ino, flags, caller) = (Ino(ino.0), flags.0, convert::caller(request));
        let (session, replier) = (self.clone(), self.clone());
        let thread = request.pid();
        let job = self.jobs.job_of(thread);
        let work = async move { session.open_file(ino, flags, caller).await };
        self.dispatch(request, Operation::Open, work, move |outcome| match outcome {
            Ok(granted) => {
                replier.jobs.note_open(job, ino, &granted.opened);
                replier.jobs.follow(job, thread, ino, &granted.opened);
                replier.reply_opened(ino, flags, &granted, reply);
            }
            Err(error) => reply.error(convert::errno(&error)),
        });
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let (parent, name, caller) = (Ino(parent.0), bytes(name), convert::caller(request));
        let repeated = resend::is_repeated(request);
        let (session, replier) = (self.clone(), self.clone());
        let job = self.jobs.job_of(request.pid());
        let work = async move {
            let overlay = &session.overlay;
            let user = overlay.shares().open_new(caller.uid)?;
            let made = overlay.create(parent, &name, mode & 0o7777, umask, flags, caller).await;
            let made = resend::created(overlay, parent, &name, repeated, flags, made).await;
            match &made {
                Ok((entry, _)) => overlay.shares().made(user, entry.attr.ino),
                Err(_) => overlay.shares().not_made(user),
            }
            made.map(|(entry, opened)| (entry, opened, user))
        };
        self.dispatch(request, Operation::Create, self.names(work, dirsync::created(flags)), move |outcome| {
            match outcome {
                Ok((entry, opened, user)) => {
                    let privileged = entry.attr.mode & (libc::S_ISUID | libc::S_ISGID) != 0;
                    replier.jobs.note_create(job, entry.attr.ino, &opened);
                    replier.reply_created(&entry, flags, &Granted { opened, privileged, user }, reply);
                }
                Err(error) => reply.error(convert::errno(&error)),
            }
        });
    }

    fn read(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let cached = Handle::decode(handle).is_none_or(|handle| handle.mode == Mode::Cached);
        let cached = cached && flags.0 & libc::O_DIRECT == 0;
        let (overlay, noted, job) = (self.overlay.clone(), self.jobs.clone(), self.jobs.job_of(request.pid()));
        let work = async move { overlay.read(Ino(ino.0), offset, size).await };
        self.dispatch(request, Operation::Read, work, move |outcome| match outcome {
            Ok(data) => {
                noted.note_read(job, Ino(ino.0), offset..offset + data.len() as u64, cached);
                reply.data(&data);
            }
            Err(error) => reply.error(convert::errno(&error)),
        });
    }

    fn write(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let kill = Kill {
            bits: write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID),
            capabilities: Handle::decode(handle).is_some_and(|handle| handle.privileged),
        };
        let (session, data) = (self.clone(), Bytes::copy_from_slice(data));
        let (noted, job) = (self.jobs.clone(), self.jobs.job_of(request.pid()));
        // For O_SYNC, O_DSYNC or `sync`. After a write through the page cache the kernel sends FSYNC itself.
        let durable = is_synchronous(flags.0) && Handle::decode(handle).is_some_and(|h| h.mode != Mode::Cached);
        let work = async move {
            let count = session.write(Ino(ino.0), offset, data, kill).await?;
            if durable {
                session.overlay.fsync(Ino(ino.0), false).await?;
            }
            Ok(count)
        };
        self.dispatch(request, Operation::Write, work, move |outcome| match outcome {
            Ok(count) => {
                noted.note_write(job, Ino(ino.0), offset..offset + u64::from(count));
                reply.written(count);
            }
            Err(error) => reply.error(convert::errno(&error)),
        });
    }

    fn flush(&self, request: &Request, ino: INodeNo, handle: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        if self.terms.no_open {
            return reply.error(Errno::ENOSYS);
        }
        let writable = Handle::decode(handle).is_none_or(|handle| handle.writable);
        let overlay = self.overlay.clone();
        self.dispatch_done(request, Operation::Flush, async move { overlay.close(Ino(ino.0), writable).await }, reply);
    }

    fn release(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        flags: OpenFlags,
        _: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        // The reply comes first. If the daemon dies between the two steps, one open too many is counted, which is
        // better than one too few.
        reply.ok();
        if let Some(handle) = Handle::decode(handle) {
            self.released(Ino(ino.0), handle, flags.0);
        }
    }

    fn fsync(&self, request: &Request, ino: INodeNo, _: FileHandle, data_only: bool, reply: ReplyEmpty) {
        let overlay = self.overlay.clone();
        self.dispatch_done(request, Operation::Fsync, async move { overlay.fsync(Ino(ino.0), data_only).await }, reply);
    }

    fn opendir(&self, request: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let (opener, session, thread) = (self.clone(), self.clone(), request.pid());
        let work = async move { opener.open_dir_for(thread, Ino(ino.0)).await };
        self.dispatch(request, Operation::Opendir, work, move |outcome| match outcome {
            Ok(pages) => {
                let mut flags = FopenFlags::FOPEN_CACHE_DIR;
                flags.set(FopenFlags::FOPEN_KEEP_CACHE, pages.valid);
                session.pages_after(Ino(ino.0), flags, pages);
                reply.opened(session.dirs.insert(), flags);
            }
            Err(error) => reply.error(convert::errno(&error)),
        });
    }

    fn readdir(&self, request: &Request, ino: INodeNo, handle: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let session = self.clone();
        let work = async move {
            let outcome = session.dirs.read(&session.overlay, Ino(ino.0), handle, offset, &mut reply).await;
            Ok((reply, outcome))
        };
        // If the work panics, dropping the reply answers EIO.
        let session = self.clone();
        self.dispatch(request, Operation::Readdir, work, move |outcome| match outcome {
            Ok((reply, Ok(drops_pages))) => {
                session.before_part(Ino(ino.0), drops_pages);
                reply.ok();
            }
            Ok((reply, Err(error))) => reply.error(convert::errno(&error)),
            Err(_) => {}
        });
    }

    fn readdirplus(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let session = self.clone();
        let work = async move {
            let outcome = session.dirs.read_plus(&session.overlay, Ino(ino.0), handle, offset, &mut reply).await;
            Ok((reply, outcome))
        };
        let session = self.clone();
        self.dispatch(request, Operation::Readdirplus, work, move |outcome| match outcome {
            Ok((reply, Ok(drops_pages))) => {
                session.before_part(Ino(ino.0), drops_pages);
                reply.ok();
            }
            Ok((reply, Err(error))) => reply.error(convert::errno(&error)),
            Err(_) => {}
        });
    }

    fn releasedir(&self, _: &Request, _: INodeNo, handle: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        self.dirs.remove(handle);
        reply.ok();
    }

    fn fsyncdir(&self, request: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let overlay = self.overlay.clone();
        self.dispatch_done(request, Operation::Fsyncdir, async move { overlay.fsync_dir(Ino(ino.0)).await }, reply);
    }

    fn statfs(&self, request: &Request, ino: INodeNo, reply: ReplyStatfs) {
        let overlay = self.overlay.clone();
        let work = async move { overlay.statfs(Ino(ino.0)).await };
        self.dispatch(request, Operation::Statfs, work, |outcome| match outcome {
            Ok(space) => {
                let blocks = |bytes: u64| bytes / u64::from(STATFS_BLOCK_BYTES);
                reply.statfs(
                    blocks(space.total_bytes),
                    blocks(space.free_bytes),
                    blocks(space.available_bytes),
                    space.total_files,
                    space.free_files,
                    STATFS_BLOCK_BYTES,
                    NAME_MAX_BYTES,
                    STATFS_BLOCK_BYTES,
                );
            }
            Err(error) => reply.error(convert::errno(&error)),
        });
    }

    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _: u32,
        reply: ReplyEmpty,
    ) {
        let (overlay, name, value) = (self.overlay.clone(), bytes(name), value.to_vec());
        let (caller, repeated) = (convert::caller(request), resend::is_repeated(request));
        let work = async move {
            let set = overlay.set_xattr(Ino(ino.0), &name, &value, flags, caller).await;
            resend::attribute_set(&overlay, Ino(ino.0), &name, &value, repeated, set).await
        };
        self.dispatch_done(request, Operation::Setxattr, self.changes(Ino(ino.0), work), reply);
    }

    fn getxattr(&self, request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let (session, thread, name) = (self.clone(), request.pid(), bytes(name));
        let work = async move { session.get_xattr_for(thread, Ino(ino.0), &name).await };
        self.dispatch_sized(request, Operation::Getxattr, size, work, reply);
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let (overlay, user) = (self.overlay.clone(), request.uid());
        let work = async move {
            let mut list = Vec::new();
            // As in other file systems, only root sees the names of `trusted.` attributes.
            let shown = |name: &Vec<u8>| user == 0 || !name.starts_with(b"trusted.");
            for name in overlay.list_xattrs(Ino(ino.0)).await?.into_iter().filter(shown) {
                list.extend_from_slice(&name);
                list.push(0);
            }
            Ok(list)
        };
        self.dispatch_sized(request, Operation::Listxattr, size, work, reply);
    }

    fn removexattr(&self, request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (overlay, name) = (self.overlay.clone(), bytes(name));
        let (caller, repeated) = (convert::caller(request), resend::is_repeated(request));
        let work = async move {
            let removed = overlay.remove_xattr(Ino(ino.0), &name, caller).await;
            resend::attribute_removed(repeated, removed)
        };
        self.dispatch_done(request, Operation::Removexattr, self.changes(Ino(ino.0), work), reply);
    }

    fn fallocate(
        &self,
        request: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let (session, ino, caller) = (self.clone(), Ino(ino.0), convert::caller(request));
        let work = async move {
            session.before_change(ino, caller).await?;
            session.overlay.fallocate(ino, mode, offset, length).await
        };
        self.dispatch_done(request, Operation::Fallocate, self.changes(ino, work), reply);
    }

    fn lseek(&self, request: &Request, ino: INodeNo, _: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        let whence = match whence {
            libc::SEEK_DATA => Seek::Data,
            libc::SEEK_HOLE => Seek::Hole,
            _ => return reply.error(Errno::EINVAL),
        };
        let Ok(offset) = u64::try_from(offset) else { return reply.error(Errno::ENXIO) };
        let overlay = self.overlay.clone();
        let work = async move { overlay.seek(Ino(ino.0), offset, whence).await };
        self.dispatch(request, Operation::Lseek, work, |outcome| match outcome {
            Ok(offset) => reply.offset(i64::try_from(offset).unwrap_or(i64::MAX)),
            Err(error) => reply.error(convert::errno(&error)),
        });
    }

    fn copy_file_range(
        &self,
        request: &Request,
        from: INodeNo,
        _: FileHandle,
        from_offset: u64,
        to: INodeNo,
        _: FileHandle,
        to_offset: u64,
        len: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let (session, len, caller) = (self.clone(), len.min(COPY_MAX_BYTES), convert::caller(request));
        let (noted, job) = (self.jobs.clone(), self.jobs.job_of(request.pid()));
        let work = async move {
            session.before_change(Ino(to.0), caller).await?;
            session.overlay.copy_range(Ino(from.0), from_offset, Ino(to.0), to_offset, len).await
        };
        self.dispatch(request, Operation::CopyFileRange, self.changes(Ino(to.0), work), move |outcome| match outcome {
            Ok(count) => {
                let (read, written) = (from_offset..from_offset + count, to_offset..to_offset + count);
                noted.note_copy(job, (Ino(from.0), read), (Ino(to.0), written));
                reply.written(u32::try_from(count).unwrap_or(u32::MAX));
            }
            Err(error) => reply.error(convert::errno(&error)),
        });
    }

    // Not implemented. After ENOSYS the kernel manages without the operation, and never sends it again.

    fn access(&self, _: &Request, _: INodeNo, _: AccessFlags, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn bmap(&self, _: &Request, _: INodeNo, _: u32, _: u64, reply: ReplyBmap) {
        reply.error(Errno::ENOSYS);
    }

    fn poll(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: PollNotifier,
        _: PollEvents,
        _: PollFlags,
        reply: ReplyPoll,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn ioctl(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: IoctlFlags,
        _: u32,
        _: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }
}
