//! Serves a mount.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};

use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_engine::Overlay;
use forebay_jobs::Jobs;
use fuser::Session;
use futures::FutureExt;
use parking_lot::Mutex;
use rustix::mount::MountFlags;
use tokio::runtime::Handle as Runtime;

use super::attach::{self, Attach};
use super::device::FuseDevice;
use super::dirs::DirHandles;
use super::init::{Handshake, HandshakeOptions, MAX_READAHEAD_BYTES};
use super::iomode::{InheritedOpens, IoModes, PassthroughState};
use super::latencies::RequestLatencies;
use super::mountpoint;
use super::notifier::KernelNotifier;
use super::pm_qos::WakeupLatency;
use super::reopen::InheritedCounts;
use super::session::{MountSession, SessionState};

/// Name of the table of open modes in the state directory.
const MODES_FILE: &str = "open-modes";

/// The kernel gives requests to waiting threads in turns. One thread more than necessary is one more thread that each
/// request may have to wake, on a core with other caches: one program's opens take twice as long with two threads on
/// two cores as with one. Few threads are needed, since long operations run on the runtime.
const THREADS_MAX: usize = 8;

/// How a mount looks and behaves.
///
/// The engine keeps access times: FUSE leaves them to the file system. Reads through the page cache or passthrough
/// never reach the daemon, so `atime` changes only if a program sets it, as on a mount with `noatime`.
#[derive(Debug, Clone)]
pub struct MountOptions {
    pub mountpoint: PathBuf,
    /// Other users than the one that mounts may use the mount; the kernel checks permissions.
    pub allow_other: bool,
    pub read_only: bool,
    /// Further flags for mount(2): `nosuid` and `nodev`, unless the caller requests fewer.
    pub flags: MountFlags,
    /// Nothing changes in the mount or in the pool: the kernel opens files without a request, and keeps their pages
    /// cached.
    pub immutable: bool,
    /// Threads that answer requests, at most one for each core. 0: one for two cores, at most 8.
    pub threads: usize,
    /// The source that `mount` and `df` show.
    pub fs_name: String,
    /// Try passthrough for resident files.
    pub passthrough: bool,
    /// The fast pool lies on a stacked file system, such as overlayfs.
    pub stacked_backing: bool,
    /// A directory, best on a tmpfs, for what the next process needs to take the mount over: the handshake and the open
    /// modes. Without one, the mount ends with this process.
    pub state_dir: Option<PathBuf>,
}

impl MountOptions {
    /// Returns the default options: writable, with passthrough, and for all users if root mounts.
    pub fn new(mountpoint: impl Into<PathBuf>) -> Self {
        Self {
            mountpoint: mountpoint.into(),
            allow_other: rustix::process::geteuid().is_root(),
            read_only: false,
            flags: MountFlags::NOSUID | MountFlags::NODEV,
            immutable: false,
            threads: 0,
            fs_name: "forebay".to_owned(),
            passthrough: true,
            stacked_backing: false,
            state_dir: None,
        }
    }

    fn threads(&self) -> usize {
        let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
        if self.threads == 0 { (cores / 2).clamp(1, THREADS_MAX) } else { self.threads.min(cores) }
    }
}

/// A mount that is being served.
pub struct Mounted {
    modes: Arc<IoModes>,
    latencies: Arc<RequestLatencies>,
    handshake: Handshake,
    unmounter: Unmounter,
    session: Mutex<Option<JoinHandle<io::Result<()>>>>,
}

/// Unmounts, from any thread.
#[derive(Debug, Clone)]
pub struct Unmounter {
    mountpoint: PathBuf,
}

impl Unmounter {
    /// See [`mountpoint::unmount`].
    pub fn unmount(&self, lazy: bool) -> Result<()> {
        mountpoint::unmount(&self.mountpoint, lazy)
    }
}

impl Mounted {
    /// Blocks until the mount is gone and its last request is answered. A second call returns at once.
    ///
    /// # Errors
    /// Side `Kernel`: the FUSE session failed.
    pub fn wait(&self) -> Result<()> {
        let Some(session) = self.session.lock().take() else { return Ok(()) };
        let outcome = session.join().unwrap_or_else(|_| Err(io::Error::other("the session panicked")));
        outcome.map_err(|error| Error::io(error, Side::Kernel, "FUSE session"))
    }

    /// Unmounts; `wait` returns after that. See [`mountpoint::unmount`].
    pub fn unmount(&self, lazy: bool) -> Result<()> {
        self.unmounter.unmount(lazy)
    }

    pub fn unmounter(&self) -> Unmounter {
        self.unmounter.clone()
    }

    /// Returns what the next process needs for [`Attach::Again`]. The state directory has it, too.
    pub fn handshake(&self) -> Handshake {
        self.handshake
    }

    /// Returns how long requests took since the start of this process.
    pub fn latencies(&self) -> Arc<RequestLatencies> {
        Arc::clone(&self.latencies)
    }

    pub fn passthrough_state(&self) -> PassthroughState {
        self.modes.passthrough_state()
    }
}

/// Mounts, and serves the mount from this process.
///
/// # Errors
/// As [`mountpoint::mount_device`] and [`serve`]; nothing stays mounted.
pub fn mount(overlay: Overlay, jobs: Jobs, options: MountOptions) -> Result<Mounted> {
    let unmounter = Unmounter { mountpoint: absolute(&options.mountpoint)? };
    let device = mountpoint::mount_device(&options)?;
    serve(overlay, jobs, device, options, Attach::Fresh).inspect_err(|_| {
        if let Err(error) = unmounter.unmount(true) {
            tracing::warn!(%error, "a mount that cannot be served could not be removed");
        }
    })
}

/// Answers the requests that come from `device`, on threads of its own, until the mount is gone. `jobs` are those of
/// `overlay`. Must be called inside a tokio runtime, which runs the requests that cannot be answered at once.
///
/// # Errors
/// Side `Kernel`: no handshake. Side `Cache`: the state directory can't be used. `InvalidInput`: no runtime, or
/// [`Attach::Again`] without a state directory.
pub fn serve(overlay: Overlay, jobs: Jobs, device: OwnedFd, options: MountOptions, attach: Attach) -> Result<Mounted> {
    let invalid = |what: &str| Error::new(ErrorKind::InvalidInput, Side::Application, what);
    let kernel = |error| Error::io(error, Side::Kernel, "begin a FUSE session");
    let runtime = Runtime::try_current().map_err(|_| invalid("serve a mount outside of a runtime"))?;
    if options.state_dir.is_none() && attach != Attach::Fresh {
        return Err(invalid("take over a mount without the state directory of its last process"));
    }
    let mountpoint = absolute(&options.mountpoint)?;
    let device = FuseDevice::new(device);
    let (modes, opens) = open_modes(&device, options.state_dir.as_deref(), attach)?;
    let modes = Arc::new(modes);
    let epoch = rand::random::<u32>();
    let sync = options.flags.contains(MountFlags::SYNCHRONOUS);
    let latencies = Arc::new(RequestLatencies::default());
    let mount_session = MountSession::new(SessionState {
        overlay: overlay.clone(),
        jobs,
        runtime: runtime.clone(),
        modes: Arc::clone(&modes),
        dirs: DirHandles::new(epoch),
        inherited: Arc::new(InheritedCounts::default()),
        wakeup_latency: Arc::new(WakeupLatency::new(overlay.policy().wakeup_latency)),
        latencies: Arc::clone(&latencies),
        epoch,
        mountpoint: mountpoint.clone(),
        terms: HandshakeOptions {
            // With `sync` there is no passthrough: the kernel would sync only the bytes of a write.
            passthrough: options.passthrough && !options.immutable && !sync,
            stacked_backing: options.stacked_backing,
            no_open: options.immutable,
            sync,
            dirsync: sync || options.flags.contains(MountFlags::DIRSYNC),
        },
        handshake: OnceLock::new(),
        kernel: OnceLock::new(),
    });
    let session = attach::session(mount_session.clone(), &device, attach, options.threads()).map_err(kernel)?;
    let handshake = mount_session.handshake.get().copied().ok_or_else(|| kernel(io::Error::other("no handshake")))?;
    if let (Attach::Fresh, Some(dir)) = (attach, &options.state_dir) {
        handshake.save(dir).map_err(|error| state_failed(error, dir))?;
    }
    let notifier = KernelNotifier::new(session.notifier(), &device, Arc::clone(&modes)).map_err(kernel)?;
    let notifier = Arc::new(notifier);
    overlay.set_kernel(Arc::clone(&notifier) as _);
    let _ = mount_session.kernel.set(notifier);
    modes.probe();
    if attach == Attach::Fresh {
        raise_readahead(&mountpoint);
    }
    overlay.expect_inherited(opens.iter().map(|open| open.ino));
    runtime.spawn(Arc::clone(&mount_session.inherited).reopen(overlay, opens).boxed());
    let session = run(session).map_err(kernel)?;
    let (unmounter, session) = (Unmounter { mountpoint }, Mutex::new(Some(session)));
    Ok(Mounted { modes, latencies, handshake, unmounter, session })
}

fn run(session: Session<MountSession>) -> io::Result<JoinHandle<io::Result<()>>> {
    thread::Builder::new().name("forebay-fuse".to_owned()).spawn(move || session.run())
}

fn state_failed(error: io::Error, dir: &Path) -> Error {
    Error::io(error, Side::Cache, format!("state directory {}", dir.display()))
}

fn open_modes(device: &FuseDevice, state_dir: Option<&Path>, attach: Attach) -> Result<(IoModes, Vec<InheritedOpens>)> {
    let registrar = Box::new(device.try_clone().map_err(|error| Error::io(error, Side::Kernel, "FUSE device"))?);
    let table = state_dir.map(|dir| dir.join(MODES_FILE));
    let modes = match (attach, &table) {
        (Attach::Again(_), Some(table)) => IoModes::inherit(registrar, table),
        (_, table) => IoModes::new(registrar, table.as_deref()).map(|modes| (modes, Vec::new())),
    };
    modes.map_err(|error| state_failed(error, state_dir.unwrap_or(Path::new("-"))))
}

fn absolute(mountpoint: &Path) -> Result<PathBuf> {
    std::path::absolute(mountpoint)
        .map_err(|error| Error::io(error, Side::Application, format!("mountpoint {}", mountpoint.display())))
}

/// The kernel limits the readahead of FUSE to 128 KiB. Only root can raise the limit, and only in /sys. Cold sequential
/// reads of files without passthrough gain half from it.
fn raise_readahead(mountpoint: &Path) {
    let Some(number) = mountpoint::device_number(mountpoint) else { return };
    let knob = format!("/sys/class/bdi/{number}/read_ahead_kb");
    if let Err(error) = fs::write(&knob, (MAX_READAHEAD_BYTES >> 10).to_string()) {
        tracing::debug!(%knob, %error, "the readahead could not be raised from the kernel's default");
    }
}
