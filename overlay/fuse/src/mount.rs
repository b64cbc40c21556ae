//! Serving a mount.

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
use parking_lot::Mutex;
use rustix::mount::MountFlags;
use tokio::runtime::Handle as Runtime;

use super::attach::{self, Attach};
use super::device::Device;
use super::dirs::Dirs;
use super::front::{Front, Shared};
use super::init::{Handshake, MAX_READAHEAD_BYTES, Terms};
use super::iomode::{Inherited, IoModes, PassthroughState};
use super::mountpoint;
use super::notifier::KernelNotifier;
use super::pm_qos::Wakeups;
use super::reopen::Adopted;

/// Name of the table of open modes in the state directory.
const MODES_FILE: &str = "open-modes";

/// The kernel gives requests to waiting threads in turns. A thread more than are needed is one more that is fetched out
/// of its sleep for each request, with the caches of another core: one program's opens take twice as long with two
/// threads on two cores as with one. What takes long is done elsewhere, so few are needed.
const THREADS_MAX: usize = 8;

/// How a mount looks and behaves.
///
/// Access times are the engine's: FUSE leaves them to the file system, reads through the page cache or through
/// passthrough never reach us, and so `atime` moves only where it is set, as on a mount with `noatime`.
#[derive(Debug, Clone)]
pub struct MountOptions {
    pub mountpoint: PathBuf,
    /// Users other than the one that mounts may use it; the kernel checks permissions.
    pub allow_other: bool,
    pub read_only: bool,
    /// What mount(2) is told beside that: `nosuid` and `nodev`, unless the mount asks for less.
    pub flags: MountFlags,
    /// Nothing changes, here or in the pool: files are opened without asking us, and stay in the page cache.
    pub immutable: bool,
    /// Threads that answer requests: at most as many as there are cores are used. 0 for one for each two cores, and
    /// no more than 8.
    pub threads: usize,
    /// What `mount` and `df` show as the source.
    pub fs_name: String,
    /// Try passthrough for resident files.
    pub passthrough: bool,
    /// The fast pool lies on a stacked file system, such as overlayfs.
    pub stacked_backing: bool,
    /// A directory, best on a tmpfs, for what the next process must know to take the mount over: the handshake
    /// and the open modes. Without one, the mount ends with this process.
    pub state_dir: Option<PathBuf>,
}

impl MountOptions {
    /// The usual mount of root's: for all users, writable, with passthrough.
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
    handshake: Handshake,
    unmounter: Unmounter,
    session: Mutex<Option<JoinHandle<io::Result<()>>>>,
}

/// Takes a mount away, from any thread.
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
    /// Side `Kernel`: the conversation with the kernel broke off.
    pub fn wait(&self) -> Result<()> {
        let Some(session) = self.session.lock().take() else { return Ok(()) };
        let outcome = session.join().unwrap_or_else(|_| Err(io::Error::other("the session panicked")));
        outcome.map_err(|error| Error::io(error, Side::Kernel, "FUSE session"))
    }

    /// Takes the mount away; `wait` returns after that. See [`mountpoint::unmount`].
    pub fn unmount(&self, lazy: bool) -> Result<()> {
        self.unmounter.unmount(lazy)
    }

    pub fn unmounter(&self) -> Unmounter {
        self.unmounter.clone()
    }

    /// What the next process needs for [`Attach::Again`]. It is in the state directory too.
    pub fn handshake(&self) -> Handshake {
        self.handshake
    }

    pub fn passthrough_state(&self) -> PassthroughState {
        self.modes.passthrough_state()
    }
}

/// Mounts, and serves from this process.
///
/// # Errors
/// As [`mountpoint::mount_device`] and [`serve`]; nothing stays mounted.
pub fn mount(overlay: Overlay, jobs: Jobs, options: MountOptions) -> Result<Mounted> {
    let unmounter = Unmounter { mountpoint: absolute(&options.mountpoint)? };
    let device = mountpoint::mount_device(&options)?;
    serve(overlay, jobs, device, options, Attach::Fresh).inspect_err(|_| {
        if let Err(error) = unmounter.unmount(true) {
            tracing::warn!(%error, "a mount that can't be served stays behind");
        }
    })
}

/// `jobs` are those of `overlay`. Answers the requests that come from `device`, with threads of its own, until the mount is gone. Must be
/// called inside a tokio runtime, which does what can't be answered at once.
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
    let device = Device::new(device);
    let (modes, opens) = open_modes(&device, options.state_dir.as_deref(), attach)?;
    let modes = Arc::new(modes);
    let epoch = rand::random::<u32>();
    let sync = options.flags.contains(MountFlags::SYNCHRONOUS);
    let front = Front::new(Shared {
        overlay: overlay.clone(),
        jobs,
        runtime: runtime.clone(),
        modes: Arc::clone(&modes),
        dirs: Dirs::new(epoch),
        adopted: Arc::new(Adopted::default()),
        wakeups: Arc::new(Wakeups::new(overlay.policy().wakeup_latency)),
        epoch,
        mountpoint: mountpoint.clone(),
        terms: Terms {
            // Of what is written past the daemon nothing is synced but the bytes.
            passthrough: options.passthrough && !options.immutable && !sync,
            stacked_backing: options.stacked_backing,
            no_open: options.immutable,
            sync,
            dirsync: sync || options.flags.contains(MountFlags::DIRSYNC),
        },
        handshake: OnceLock::new(),
        kernel: OnceLock::new(),
    });
    let session = attach::session(front.clone(), &device, attach, options.threads()).map_err(kernel)?;
    let handshake = front.handshake.get().copied().ok_or_else(|| kernel(io::Error::other("no handshake")))?;
    if let (Attach::Fresh, Some(dir)) = (attach, &options.state_dir) {
        handshake.save(dir).map_err(|error| state_failed(error, dir))?;
    }
    let notifier = KernelNotifier::new(session.notifier(), &device, Arc::clone(&modes)).map_err(kernel)?;
    let notifier = Arc::new(notifier);
    overlay.set_kernel(Arc::clone(&notifier) as _);
    let _ = front.kernel.set(notifier);
    modes.probe();
    if attach == Attach::Fresh {
        raise_readahead(&mountpoint);
    }
    overlay.expect_inherited(opens.iter().map(|open| open.ino));
    runtime.spawn(Arc::clone(&front.adopted).adopt(overlay, opens));
    let session = run(session).map_err(kernel)?;
    Ok(Mounted { modes, handshake, unmounter: Unmounter { mountpoint }, session: Mutex::new(Some(session)) })
}

fn run(session: Session<Front>) -> io::Result<JoinHandle<io::Result<()>>> {
    thread::Builder::new().name("forebay-fuse".to_owned()).spawn(move || session.run())
}

fn state_failed(error: io::Error, dir: &Path) -> Error {
    Error::io(error, Side::Cache, format!("state directory {}", dir.display()))
}

fn open_modes(device: &Device, state_dir: Option<&Path>, attach: Attach) -> Result<(IoModes, Vec<Inherited>)> {
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

/// The kernel offers FUSE no more readahead than 128 KiB; only root can raise it, and only from outside. Cold
/// sequential reads of files that are not passed through gain half from it.
fn raise_readahead(mountpoint: &Path) {
    let Some(number) = mountpoint::device_number(mountpoint) else { return };
    let knob = format!("/sys/class/bdi/{number}/read_ahead_kb");
    if let Err(error) = fs::write(&knob, (MAX_READAHEAD_BYTES >> 10).to_string()) {
        tracing::debug!(%knob, %error, "the readahead stays at the kernel's default");
    }
}
