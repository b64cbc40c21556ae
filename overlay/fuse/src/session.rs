//! State and helpers that all requests share.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use forebay_backends::{Error, Result, Side};
use forebay_engine::{CachedPages, Caller, Change, Entry, Ino, KernelCache, Opened, Overlay, UserSlot, is_writable};
use forebay_jobs::Jobs;
use fuser::{FopenFlags, ReplyCreate, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyXattr, Request};
use tokio::runtime::Handle as Runtime;

use super::dirs::DirHandles;
use super::handle::{Handle, Mode};
use super::init::{Handshake, HandshakeOptions};
use super::iomode::{Grant, IoModes, Wish};
use super::latencies::{Operation, RequestLatencies};
use super::notifier::KernelNotifier;
use super::pm_qos::WakeupLatency;
use super::reopen::InheritedCounts;
use super::text_busy::is_running;
use super::{convert, cpu_affinity, dirsync, dispatch, setid};

/// The daemon's side of one FUSE mount.
#[derive(Clone)]
pub struct MountSession(Arc<SessionState>);

pub struct SessionState {
    pub overlay: Overlay,
    pub jobs: Jobs,
    pub runtime: Runtime,
    pub modes: Arc<IoModes>,
    pub dirs: DirHandles,
    pub inherited: Arc<InheritedCounts>,
    pub wakeup_latency: Arc<WakeupLatency>,
    pub latencies: Arc<RequestLatencies>,
    /// Identifies this attach. A handle with another epoch was issued by another process.
    pub epoch: u32,
    pub mountpoint: PathBuf,
    pub terms: HandshakeOptions,
    /// Set while the session begins.
    pub handshake: OnceLock<Handshake>,
    /// Set once the session has begun.
    pub kernel: OnceLock<Arc<KernelNotifier>>,
}

impl std::ops::Deref for MountSession {
    type Target = SessionState;

    fn deref(&self) -> &SessionState {
        &self.0
    }
}

impl MountSession {
    pub fn new(shared: SessionState) -> Self {
        Self(Arc::new(shared))
    }

    /// Called before a part of a listing is sent.
    pub fn before_part(&self, dir: Ino, drops_pages: bool) {
        if let Some(kernel) = self.kernel.get().filter(|_| drops_pages) {
            kernel.drop_listing(dir);
        }
    }

    /// Answers `request`, if possible on the thread that read it: see [`dispatch::dispatch`].
    pub fn dispatch<T, W, R>(&self, request: &Request, operation: Operation, work: W, reply: R)
    where
        T: 'static,
        W: Future<Output = Result<T>> + Send + 'static,
        R: FnOnce(Result<T>) + Send + 'static,
    {
        if !cpu_affinity::serve(request.pid()) {
            self.wakeup_latency.serve(&self.runtime);
        }
        let of = (self.overlay.shares(), request.uid());
        dispatch::dispatch(&self.runtime, &self.latencies, Some(of), operation, work, reply);
    }

    /// For requests whose reply has no content.
    pub fn dispatch_done<W>(&self, request: &Request, operation: Operation, work: W, reply: ReplyEmpty)
    where
        W: Future<Output = Result<()>> + Send + 'static,
    {
        self.dispatch(request, operation, work, |outcome| match outcome {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(convert::errno(&error)),
        });
    }

    /// For requests that create a name.
    pub fn dispatch_entry<W>(&self, request: &Request, operation: Operation, work: W, reply: ReplyEntry)
    where
        W: Future<Output = Result<Entry>> + Send + 'static,
    {
        let (session, work) = (self.clone(), self.names(work, dirsync::entry));
        self.dispatch(request, operation, work, move |outcome| match outcome {
            Ok(entry) => session.reply_entry(&entry, reply),
            Err(error) => reply.error(convert::errno(&error)),
        });
    }

    /// Runs a change of names. With `dirsync` the change is durable before it is answered. If it cannot be made
    /// durable, the kernel gets an error, and `uncount` takes back what was counted for the answer.
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

    /// Runs a change of an inode. With `sync` the change is durable before it is answered.
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

    /// For requests that return bytes into a buffer of `size`. With size 0, the reply is the size that the buffer must
    /// have.
    pub fn dispatch_sized<W>(&self, request: &Request, operation: Operation, size: u32, work: W, reply: ReplyXattr)
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

    /// Opens a file: counts it for the user, opens it in the engine, and clears privileges that a truncation ends.
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

    /// Clears the privileges of a file that the open truncated. Returns whether writes must clear privileges.
    async fn after_open(&self, ino: Ino, flags: i32, caller: Caller) -> Result<bool> {
        if flags & libc::O_TRUNC != 0 {
            let mut change = Change { size: Some(0), ..Change::default() };
            setid::complete(&self.overlay, ino, &mut change, caller).await?;
            if change.mode.is_some() {
                change.size = None;
                self.overlay.setattr(ino, &change, caller).await?;
                self.attributes_changed(ino);
            }
        }
        if !is_writable(flags) {
            return Ok(false);
        }
        setid::is_privileged(&self.overlay, ino).await
    }

    /// Chooses how the kernel does the I/O of an open. Returns the handle, the flags of the answer, and the grant.
    pub fn grant(&self, ino: Ino, flags: i32, granted: &Granted) -> (Handle, FopenFlags, Grant) {
        let Granted { opened, privileged, user } = granted;
        let (privileged, user) = (*privileged, *user);
        let writable = is_writable(flags);
        // For a synchronous passthrough write the kernel would sync only the bytes, not the name of the file.
        let through_daemon = writable && (privileged || is_synchronous(flags));
        let content = opened.resident.as_ref().filter(|_| !through_daemon);
        let grant = self.modes.grant(ino, Wish { content, writable });
        let mut answer = FopenFlags::empty();
        answer.set(FopenFlags::FOPEN_NOFLUSH, opened.no_flush);
        answer.set(FopenFlags::FOPEN_DIRECT_IO, matches!(grant.mode, Mode::Direct | Mode::Beside));
        answer.set(FopenFlags::FOPEN_KEEP_CACHE, grant.mode == Mode::Cached && opened.pages.valid);
        (Handle { epoch: self.epoch, mode: grant.mode, writable, privileged, user }, answer, grant)
    }

    fn generation(&self, ino: Ino) -> fuser::Generation {
        fuser::Generation(self.overlay.generation(ino))
    }

    /// Replies with the inode of a name.
    pub fn reply_entry(&self, entry: &Entry, reply: ReplyEntry) {
        reply.entry(&entry.ttl, &convert::attr(&entry.attr), self.generation(entry.attr.ino));
    }

    /// Notes what an answer to an open with these flags does to the kernel's page cache. Called before the answer is sent.
    pub fn pages_after(&self, ino: Ino, answer: FopenFlags, pages: CachedPages) {
        if !answer.contains(FopenFlags::FOPEN_KEEP_CACHE) {
            self.overlay.pages_dropped(ino, pages);
        }
    }

    /// Replies with an open file.
    pub fn reply_opened(&self, ino: Ino, flags: i32, granted: &Granted, reply: ReplyOpen) {
        let (handle, answer, grant) = self.grant(ino, flags, granted);
        self.pages_after(ino, answer, granted.opened.pages);
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

    /// Replies with a new file that is open.
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

    /// Clears the privileges that a write ends, and writes.
    pub async fn write(&self, ino: Ino, offset: u64, data: Bytes, kill: Kill) -> Result<u32> {
        // Before the write, so that new content never has these privileges.
        if kill.capabilities {
            setid::clear_capabilities(&self.overlay, ino).await?;
        }
        if kill.bits && setid::clear_bits(&self.overlay, ino).await? {
            self.attributes_changed(ino);
        }
        self.overlay.write(ino, offset, data).await
    }

    /// Clears the privileges of a file that a change of its content ends. The caller does so before the change, so that
    /// new content never has them. For requests in which the kernel does not say what to clear: root stands for a
    /// caller with CAP_FSETID.
    pub async fn before_change(&self, ino: Ino, caller: Caller) -> Result<()> {
        setid::clear_capabilities(&self.overlay, ino).await?;
        if caller.uid != 0 && setid::clear_bits(&self.overlay, ino).await? {
            self.attributes_changed(ino);
        }
        Ok(())
    }

    /// Handles the release of a file, after the kernel got the reply.
    pub fn released(&self, ino: Ino, handle: Handle, flags: i32) {
        // A close may start background work, which needs the runtime.
        let _inside = self.runtime.enter();
        if !self.modes.release(ino, handle.mode, handle.writable) {
            tracing::debug!(%ino, ?handle, "a release of an open that is not on record");
        } else if handle.epoch == self.epoch {
            self.overlay.release(ino, flags);
            self.overlay.shares().close(handle.user, ino);
        } else {
            self.inherited.release(&self.overlay, ino, handle.writable);
        }
    }

    /// Invalidates the kernel's attributes of `ino`, after one of its own requests changed them.
    pub fn attributes_changed(&self, ino: Ino) {
        if let Some(kernel) = self.kernel.get() {
            kernel.invalidate_inode(ino, false);
        }
    }
}

/// An open that is ready for its reply.
pub struct Granted {
    pub opened: Opened,
    /// Writes must clear privileges of the file.
    pub privileged: bool,
    /// The user for whom the open is counted.
    pub user: UserSlot,
}

/// The privileges that a write clears.
#[derive(Debug, Clone, Copy)]
pub struct Kill {
    pub bits: bool,
    pub capabilities: bool,
}

/// Returns whether writes by this open must be durable before they are answered.
pub fn is_synchronous(flags: i32) -> bool {
    // O_SYNC includes O_DSYNC.
    flags & libc::O_DSYNC != 0
}
