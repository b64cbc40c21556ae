//! What all requests share.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use forebay_backends::{Error, Result, Side};
use forebay_engine::{Caller, Change, Entry, Ino, KernelCache, Opened, Overlay, UserSlot};
use forebay_jobs::Jobs;
use fuser::{FopenFlags, ReplyCreate, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyXattr, Request};
use tokio::runtime::Handle as Runtime;

use super::dirs::Dirs;
use super::handle::{Handle, Mode};
use super::init::{Handshake, Terms};
use super::iomode::{Grant, IoModes, Wish};
use super::notifier::KernelNotifier;
use super::pm_qos::Wakeups;
use super::reopen::Adopted;
use super::text_busy::is_running;
use super::{convert, cpu_affinity, dirsync, dispatch, setid};

/// One mount's side of the conversation with the kernel.
#[derive(Clone)]
pub struct Front(Arc<Shared>);

pub struct Shared {
    pub overlay: Overlay,
    pub jobs: Jobs,
    pub runtime: Runtime,
    pub modes: Arc<IoModes>,
    pub dirs: Dirs,
    pub adopted: Arc<Adopted>,
    pub wakeups: Arc<Wakeups>,
    /// Which attach this is: handles of others are known by it.
    pub epoch: u32,
    pub mountpoint: PathBuf,
    pub terms: Terms,
    /// Set while the session begins.
    pub handshake: OnceLock<Handshake>,
    /// Set once the session has begun.
    pub kernel: OnceLock<Arc<KernelNotifier>>,
}

impl std::ops::Deref for Front {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl Front {
    pub fn new(shared: Shared) -> Self {
        Self(Arc::new(shared))
    }

    /// Answers `request`, on the thread that read it where that is possible: see [`dispatch::dispatch`].
    pub fn dispatch<T, W, R>(&self, request: &Request, operation: &'static str, work: W, reply: R)
    where
        T: 'static,
        W: Future<Output = Result<T>> + Send + 'static,
        R: FnOnce(Result<T>) + Send + 'static,
    {
        if !cpu_affinity::serve(request.pid()) {
            self.wakeups.serve(&self.runtime);
        }
        dispatch::dispatch(&self.runtime, Some((self.overlay.shares(), request.uid())), operation, work, reply);
    }

    /// For requests that are answered with "done".
    pub fn dispatch_done<W>(&self, request: &Request, operation: &'static str, work: W, reply: ReplyEmpty)
    where
        W: Future<Output = Result<()>> + Send + 'static,
    {
        self.dispatch(request, operation, work, |outcome| match outcome {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(convert::errno(&error)),
        });
    }

    /// For requests that make a name.
    pub fn dispatch_entry<W>(&self, request: &Request, operation: &'static str, work: W, reply: ReplyEntry)
    where
        W: Future<Output = Result<Entry>> + Send + 'static,
    {
        let (front, work) = (self.clone(), self.names(work, dirsync::entry));
        self.dispatch(request, operation, work, move |outcome| match outcome {
            Ok(entry) => front.reply_entry(&entry, reply),
            Err(error) => reply.error(convert::errno(&error)),
        });
    }

    /// A change of names. With `dirsync` it is durable before it is answered. Where it cannot be, the kernel is told an
    /// error: `uncount` then takes back what was counted for the answer.
    pub fn names<T, W, U>(&self, work: W, uncount: U) -> impl Future<Output = Result<T>> + Send + use<T, W, U>
    where
        T: Send,
        W: Future<Output = Result<T>> + Send,
        U: FnOnce(&Overlay, T) + Send,
    {
        let (dirsync, overlay) = (self.terms.dirsync, self.overlay.clone());
        async move {
            let done = work.await?;
            if !dirsync {
                return Ok(done);
            }
            dirsync::once_durable(&overlay, done, overlay.fsync_dir(Ino::ROOT), uncount).await
        }
    }

    /// A change of an inode. With `sync` it is durable before it is answered.
    pub fn changes<T, W>(&self, ino: Ino, work: W) -> impl Future<Output = Result<T>> + Send + use<T, W>
    where
        T: Send,
        W: Future<Output = Result<T>> + Send,
    {
        let (sync, overlay) = (self.terms.sync, self.overlay.clone());
        async move {
            let done = work.await?;
            if sync {
                overlay.fsync(ino, false).await?;
            }
            Ok(done)
        }
    }

    /// For requests that ask for bytes with a buffer of `size`, or with 0 for how large it must be.
    pub fn dispatch_sized<W>(&self, request: &Request, operation: &'static str, size: u32, work: W, reply: ReplyXattr)
    where
        W: Future<Output = Result<Vec<u8>>> + Send + 'static,
    {
        self.dispatch(request, operation, work, move |outcome| match outcome {
            Ok(value) if size == 0 => reply.size(value.len() as u32),
            Ok(value) if value.len() > size as usize => reply.error(fuser::Errno::ERANGE),
            Ok(value) => reply.data(&value),
            Err(error) => reply.error(convert::errno(&error)),
        });
    }

    /// Opens a file: the engine's part, and what else an open has to see to.
    pub async fn open_file(&self, ino: Ino, flags: i32, caller: Caller) -> Result<Granted> {
        let user = self.overlay.shares().open(caller.uid, ino)?;
        match self.open_counted(ino, flags, caller).await {
            Ok((opened, privileged)) => Ok(Granted { opened, privileged, user }),
            Err(error) => {
                self.overlay.shares().close(user, ino);
                Err(error)
            }
        }
    }

    async fn open_counted(&self, ino: Ino, flags: i32, caller: Caller) -> Result<(Opened, bool)> {
        if flags & libc::O_TRUNC != 0 && !is_writable(flags) {
            let mountpoint = self.mountpoint.clone();
            if self.runtime.spawn_blocking(move || is_running(&mountpoint, ino)).await.unwrap_or(false) {
                return Err(Error::os(libc::ETXTBSY, Side::Application, "truncate a running program"));
            }
        }
        let opened = self.open_for(caller.pid, ino, flags).await?;
        match self.after_open(ino, flags, caller).await {
            Ok(privileged) => Ok((opened, privileged)),
            Err(error) => {
                self.overlay.release(ino, flags);
                Err(error)
            }
        }
    }

    /// Takes privileges from a file that was truncated by the open, and tells whether writes must.
    async fn after_open(&self, ino: Ino, flags: i32, caller: Caller) -> Result<bool> {
        if !is_writable(flags) {
            return Ok(false);
        }
        if flags & libc::O_TRUNC != 0 {
            let mut change = Change { size: Some(0), ..Change::default() };
            setid::complete(&self.overlay, ino, &mut change, caller).await?;
            if change.mode.is_some() {
                change.size = None;
                self.overlay.setattr(ino, &change, caller).await?;
                self.attributes_changed(ino);
            }
        }
        setid::is_privileged(&self.overlay, ino).await
    }

    /// Chooses how the kernel does the I/O of an open. Returns its handle, and the flags of the answer.
    pub fn grant(&self, ino: Ino, flags: i32, granted: &Granted) -> (Handle, FopenFlags, Grant) {
        let Granted { opened, privileged, user } = granted;
        let (privileged, user) = (*privileged, *user);
        let writable = is_writable(flags);
        // Past the daemon the bytes alone would be synced, not the name that they are under.
        let through_daemon = writable && (privileged || is_synchronous(flags));
        let content = opened.resident.as_ref().filter(|_| !through_daemon);
        let grant = self.modes.grant(ino, Wish { content, writable });
        let mut answer = FopenFlags::empty();
        answer.set(FopenFlags::FOPEN_NOFLUSH, opened.no_flush);
        answer.set(FopenFlags::FOPEN_DIRECT_IO, matches!(grant.mode, Mode::Direct | Mode::Beside));
        answer.set(FopenFlags::FOPEN_KEEP_CACHE, grant.mode == Mode::Cached && opened.keep_cache);
        (Handle { epoch: self.epoch, mode: grant.mode, writable, privileged, user }, answer, grant)
    }

    fn generation(&self, ino: Ino) -> fuser::Generation {
        fuser::Generation(self.overlay.generation(ino))
    }

    /// Tells the kernel what a name stands for.
    pub fn reply_entry(&self, entry: &Entry, reply: ReplyEntry) {
        reply.entry(&entry.ttl, &convert::attr(&entry.attr), self.generation(entry.attr.ino));
    }

    /// Tells the kernel of an open file.
    pub fn reply_opened(&self, ino: Ino, flags: i32, granted: &Granted, reply: ReplyOpen) {
        let (handle, answer, grant) = self.grant(ino, flags, granted);
        if grant.needs_backing() {
            // SAFETY: the id is registered with this mount, and stays so while the open is counted.
            let backing = unsafe { reply.wrap_backing(grant.backing) };
            grant.commit();
            reply.opened_passthrough(handle.encode(), answer, &backing);
            backing.into_raw();
        } else {
            grant.commit();
            reply.opened(handle.encode(), answer);
        }
    }

    /// Tells the kernel of a new file that is open.
    pub fn reply_created(&self, entry: &Entry, flags: i32, granted: &Granted, reply: ReplyCreate) {
        let (handle, answer, grant) = self.grant(entry.attr.ino, flags, granted);
        let (attr, generation) = (convert::attr(&entry.attr), self.generation(entry.attr.ino));
        if grant.needs_backing() {
            // SAFETY: as in `reply_opened`.
            let backing = unsafe { reply.wrap_backing(grant.backing) };
            grant.commit();
            reply.created_passthrough(&entry.ttl, &attr, generation, handle.encode(), answer, &backing);
            backing.into_raw();
        } else {
            grant.commit();
            reply.created(&entry.ttl, &attr, generation, handle.encode(), answer);
        }
    }

    /// Writes, and takes from the file the privileges that a write ends.
    pub async fn write(&self, ino: Ino, offset: u64, data: Bytes, kill: Kill) -> Result<u32> {
        // First: there is no moment at which new content has them.
        if kill.capabilities {
            setid::clear_capabilities(&self.overlay, ino).await?;
        }
        if kill.bits && setid::clear_bits(&self.overlay, ino).await? {
            self.attributes_changed(ino);
        }
        self.overlay.write(ino, offset, data).await
    }

    /// Takes from a file the privileges that a change of its content ends, before the change: without one there is no
    /// moment at which new content has them. For requests with which the kernel does not say what to take: root stands
    /// for whoever has CAP_FSETID.
    pub async fn before_change(&self, ino: Ino, caller: Caller) -> Result<()> {
        setid::clear_capabilities(&self.overlay, ino).await?;
        if caller.uid != 0 && setid::clear_bits(&self.overlay, ino).await? {
            self.attributes_changed(ino);
        }
        Ok(())
    }

    /// The kernel closed a file, and was told that we know.
    pub fn released(&self, ino: Ino, handle: Handle, flags: i32) {
        if !self.modes.release(ino, handle.mode, handle.writable) {
            tracing::debug!(%ino, ?handle, "a release of an open that is not on record");
        } else if handle.epoch == self.epoch {
            self.overlay.release(ino, flags);
            self.overlay.shares().close(handle.user, ino);
        } else {
            self.adopted.release(&self.overlay, ino, handle.writable);
        }
    }

    /// The kernel's attributes of `ino` are stale by something that it asked for.
    pub fn attributes_changed(&self, ino: Ino) {
        if let Some(kernel) = self.kernel.get() {
            kernel.invalidate_inode(ino, false);
        }
    }
}

/// An open that may be answered.
pub struct Granted {
    pub opened: Opened,
    /// Writes must take privileges from the file.
    pub privileged: bool,
    /// With whom it is counted.
    pub user: UserSlot,
}

/// What a write takes from a file.
#[derive(Debug, Clone, Copy)]
pub struct Kill {
    pub bits: bool,
    pub capabilities: bool,
}

/// Writes by this open are durable when they are answered.
pub fn is_synchronous(flags: i32) -> bool {
    // O_SYNC contains it.
    flags & libc::O_DSYNC != 0
}

pub fn is_writable(flags: i32) -> bool {
    flags & libc::O_ACCMODE != libc::O_RDONLY
}
