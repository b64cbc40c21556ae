//! Content files: one for each overlay file with resident bytes, sparse, with the same offsets, named by number and
//! never after a path.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use forebay_backends::{Error, ErrorKind, Result, Side};
use parking_lot::Mutex;

use forebay_system::process;

use crate::views::ViewLinks;
use crate::{Content, ContentId, SpaceBudget, Stamp};

/// The device's number is the top byte of a content id.
const DEVICE_SHIFT: u32 = 56;
/// Consecutive content files share a directory, so that creating them stays local on the disk.
const FILES_PER_DIR_SHIFT: u32 = 12;
/// Free space of a device that is never used: file systems become slow when they are full.
const KEEP_FREE_SHARE: f64 = 0.02;
/// Share of a device that is used if no limit was given.
const DEFAULT_LIMIT_SHARE: f64 = 0.9;

/// The granularity of file times without a finer clock: at most 10 ms (`CONFIG_HZ=100`), with a margin.
const TICK: Duration = Duration::from_millis(12);

/// How long an ending daemon may take to release its directory.
const ENDING_MAX: Duration = Duration::from_secs(10);

/// One directory on local NVMe.
#[derive(Debug)]
pub struct Device {
    pub path: PathBuf,
    /// Held while the daemon lives, so that no other daemon uses the directory.
    lock: File,
}

#[derive(Debug)]
pub struct ContentStore {
    devices: Vec<Device>,
    pub budget: Arc<SpaceBudget>,
    /// Two changes of a file never have the same times if the times were read in between.
    fine_times: bool,
    open: OpenContents,
    pub(crate) view_links: ViewLinks,
}

/// The content files that are open in the daemon. Each is open once, and shared by all parts of the daemon.
#[derive(Debug, Default)]
struct OpenContents {
    known: Mutex<HashMap<u64, Weak<Content>>>,
}

impl OpenContents {
    fn get(&self, id: ContentId) -> Option<Arc<Content>> {
        self.known.lock().get(&id.0)?.upgrade()
    }

    /// Adds a content file that was just opened. If another caller added it first, returns that one.
    fn add(&self, content: Content) -> Arc<Content> {
        let mut known = self.known.lock();
        if let Some(content) = known.get(&content.id).and_then(Weak::upgrade) {
            return content;
        }
        let content = Arc::new(content);
        // Pruned only when the map is full, so that entries of closed files never outnumber those of open ones.
        if known.len() == known.capacity() {
            known.retain(|_, content| content.strong_count() > 0);
            let open = known.len().max(64);
            known.shrink_to(2 * open);
            known.reserve(open);
        }
        known.insert(content.id, Arc::downgrade(&content));
        content
    }
}

impl ContentStore {
    /// Opens and locks the fast-pool directories; creates those that do not exist.
    ///
    /// # Errors
    /// The error names the directory and the remedy: not writable, used by another daemon, a limit above its size.
    pub fn open(paths: &[PathBuf], limit: Option<u64>) -> Result<Self> {
        if paths.is_empty() {
            return Err(bad("a mount needs at least one fast-pool directory (--fast DIR)".into()));
        }
        crate::external_writers::ignore_lease_breaks();
        let devices = paths.iter().map(|p| Device::open(p)).collect::<Result<Vec<_>>>()?;
        let mut seen = std::collections::HashSet::new();
        let mut total = 0;
        for device in &devices {
            let stat = rustix::fs::statvfs(&device.path).map_err(|e| device.failed("statvfs", e.into()))?;
            let dev = fs::metadata(&device.path).map_err(|e| device.failed("stat", e))?.dev();
            if seen.insert(dev) {
                total += stat.f_blocks * stat.f_frsize;
            }
        }
        let limit = match limit {
            Some(limit) if limit > total => {
                return Err(bad(format!(
                    "--limit is {limit} bytes, but {} has {total} bytes in all: give a smaller limit",
                    paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", "),
                )));
            }
            Some(limit) => limit,
            None => (total as f64 * DEFAULT_LIMIT_SHARE) as u64,
        };
        let fine_times = devices.iter().all(|device| has_fine_times(&device.lock).unwrap_or(false));
        Ok(Self {
            devices,
            budget: SpaceBudget::new(limit),
            fine_times,
            open: OpenContents::default(),
            view_links: ViewLinks::default(),
        })
    }

    /// Gives every device its number in the fast pool, which the catalog calls `id`, or checks that the device has the
    /// same number as before: content is found by this number.
    pub fn identify(&self, id: &str) -> Result<()> {
        for (number, device) in self.devices.iter().enumerate() {
            device.identify(id, number)?;
        }
        Ok(())
    }

    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Returns the id of a new content file: its number and its device, which is the one with the most free space.
    pub fn place(&self, number: ContentId) -> ContentId {
        if self.devices.len() == 1 {
            return number;
        }
        on_device(number, self.roomiest_device())
    }

    pub fn path(&self, id: ContentId) -> Result<PathBuf> {
        Ok(self.device(id)?.content_path(id))
    }

    /// Returns the number of the device that a content file lies on.
    pub fn device_of(&self, id: ContentId) -> usize {
        (id.0 >> DEVICE_SHIFT) as usize
    }

    fn device(&self, id: ContentId) -> Result<&Device> {
        let number = self.device_of(id);
        self.devices.get(number).ok_or_else(|| {
            Error::new(
                ErrorKind::Corrupt,
                Side::Cache,
                format!("content {:x} is on fast-pool device {number}, which was not given (--fast)", id.0),
            )
        })
    }

    /// Makes an empty content file. Removes a file that a power cut left under the same number.
    pub fn create(&self, id: ContentId) -> Result<Arc<Content>> {
        let device = self.device(id)?;
        let path = device.content_path(id);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOATIME | libc::O_NOFOLLOW);
        let file = match options.open(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                device.make_dir(&path)?;
                options.open(&path)
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                self.remove(id)?;
                options.open(&path)
            }
            other => other,
        };
        let file = file.map_err(|e| Error::io(e, Side::Cache, format!("create content file {}", path.display())))?;
        Ok(self.open.add(Content::new(id.0, file, true)))
    }

    /// Returns a content file; opens it unless it is open already.
    pub fn open_content(&self, id: ContentId) -> Result<Arc<Content>> {
        if let Some(content) = self.open.get(id) {
            return Ok(content);
        }
        let path = self.path(id)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_NOATIME | libc::O_NOFOLLOW);
        let file = match options.open(&path) {
            // A daemon that died before it could remove the immutable flag had stopped the file's writers at the limit.
            Err(e) if e.raw_os_error() == Some(libc::EPERM) && release(&path) => options.open(&path),
            other => other,
        };
        let file = file.map_err(|e| Error::io(e, Side::Cache, format!("open content file {}", path.display())))?;
        Ok(self.open.add(Content::new(id.0, file, false)))
    }

    pub fn stat(&self, id: ContentId) -> Result<fs::Metadata> {
        let path = self.path(id)?;
        fs::metadata(&path).map_err(|e| Error::io(e, Side::Cache, format!("content file {}", path.display())))
    }

    /// Copies a content file to an empty file; a file system with reflinks copies no bytes. Returns the bytes that the copy
    /// occupies.
    pub fn copy_content(&self, id: ContentId, mut to: &File) -> Result<u64> {
        let path = self.path(id)?;
        let mut copy = || {
            // An offset of its own: the file that is open in the daemon is shared.
            let mut from = File::open(&path)?;
            if rustix::fs::ioctl_ficlone(to, &from).is_err() {
                io::copy(&mut from, &mut to)?;
            }
            Ok(to.metadata()?.blocks() * 512)
        };
        copy().map_err(|e: io::Error| Error::io(e, Side::Cache, format!("copy content file {}", path.display())))
    }

    /// Returns a nameless copy of a content file as it is at one moment, whoever writes it meanwhile. `None`: the file
    /// system cannot make one without copying the bytes.
    pub fn snapshot(&self, content: &Content) -> Option<File> {
        let dir = self.device(ContentId(content.id)).ok()?.path.join("content");
        let mut options = OpenOptions::new();
        let copy = options.read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE).open(dir).ok()?;
        rustix::fs::ioctl_ficlone(&copy, &*content.file).ok()?;
        Some(copy)
    }

    /// Removes a content file. A missing file is no error.
    pub fn remove(&self, id: ContentId) -> Result<()> {
        let path = self.path(id)?;
        let removed = match fs::remove_file(&path) {
            Err(e) if e.raw_os_error() == Some(libc::EPERM) && release(&path) => fs::remove_file(&path),
            other => other,
        };
        match removed {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(Error::io(e, Side::Cache, format!("remove content file {}", path.display())))
            }
            _ => Ok(()),
        }
    }

    /// Returns how many bytes a new content file can take before its device is full.
    pub fn free_bytes(&self) -> u64 {
        let free = |d: &Device| {
            rustix::fs::statvfs(&d.path).map_or(0, |s| {
                let keep = (s.f_blocks as f64 * KEEP_FREE_SHARE) as u64;
                s.f_bavail.saturating_sub(keep) * s.f_frsize
            })
        };
        self.devices.iter().map(free).max().unwrap_or(0)
    }

    /// Returns whether any change from now on gives the file a stamp other than this current one.
    pub fn tells_times_apart(&self, stamp: &Stamp) -> bool {
        self.until_times_are_apart(stamp).is_zero()
    }

    /// Returns how long it takes until that holds: at most a tick.
    pub fn until_times_are_apart(&self, stamp: &Stamp) -> Duration {
        if self.fine_times {
            return Duration::ZERO;
        }
        let then = SystemTime::from(stamp.ctime) + TICK;
        then.duration_since(SystemTime::now()).unwrap_or_default().min(TICK)
    }

    /// Makes all content that was written so far survive a power cut. Blocks.
    ///
    /// # Errors
    /// Includes write-back errors since the last call, even if another caller got them, too.
    pub fn sync_all(&self) -> Result<()> {
        let mut synced = Ok(());
        for device in &self.devices {
            // Uses a descriptor that was open all the time: a new descriptor does not get errors that were already
            // reported.
            let one = rustix::fs::syncfs(&device.lock).map_err(|e| device.failed("sync", e.into()));
            synced = synced.and(one);
        }
        synced
    }

    /// As [`Self::sync_all`], but other callers still get the errors that this call gets, and a file's own error may be
    /// missed. Blocks.
    ///
    /// # Errors
    /// Write-back errors that no caller got before.
    pub fn write_out(&self) -> Result<()> {
        for device in &self.devices {
            let failed = |e| device.failed("sync", e);
            let dir = fs::File::open(&device.path).map_err(failed)?;
            rustix::fs::syncfs(&dir).map_err(|e| failed(e.into()))?;
        }
        Ok(())
    }

    /// Visits every content file on the devices, for the sweep of orphans.
    pub fn walk(&self, mut each: impl FnMut(ContentId, u64) -> Result<()>) -> Result<()> {
        for device in &self.devices {
            let root = device.path.join("content");
            let Ok(dirs) = fs::read_dir(&root) else { continue };
            for dir in dirs.flatten() {
                let Ok(files) = fs::read_dir(dir.path()) else { continue };
                for file in files.flatten() {
                    let id = file.file_name().to_str().and_then(|n| u64::from_str_radix(n, 16).ok());
                    if let (Some(id), Ok(meta)) = (id, file.metadata()) {
                        each(ContentId(id), meta.blocks() * 512)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Returns the id of the content file of this number on a device.
pub(crate) fn on_device(number: ContentId, device: usize) -> ContentId {
    ContentId(number.0 | (device as u64) << DEVICE_SHIFT)
}

impl Device {
    fn open(path: &Path) -> Result<Self> {
        let fail = |what: &str, e: io::Error| {
            Error::io(e, Side::Cache, format!("fast-pool directory {}: {what}", path.display()))
        };
        // The directory holds names and bytes of all users' files, so it is for the daemon alone, whatever the umask
        // is.
        let make = |dir: &Path| DirBuilder::new().recursive(true).mode(0o700).create(dir);
        let refused = |e: io::Error| match e.raw_os_error() {
            Some(libc::EROFS) => fail("the file system is read-only; give one that can be written", e),
            Some(libc::ENOSPC) => fail("the file system is full; make room or give another", e),
            Some(libc::EACCES | libc::EPERM) => fail("not writable; give one that you own", e),
            _ => fail("cannot be made", e),
        };
        make(path).map_err(refused)?;
        // Checked before anything is created in it: a path that another user controls may lead elsewhere.
        let path = &crate::guard::take(path)?;
        make(&path.join("content")).and_then(|()| make(&path.join("catalog"))).map_err(refused)?;
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .read(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path.join("lock"))
            .map_err(|e| fail("cannot be written; give one that you own", e))?;
        Self::take(path, &lock)?;
        Ok(Self { path: path.to_owned(), lock })
    }

    fn take(path: &Path, lock: &File) -> Result<()> {
        use rustix::fs::FlockOperation::NonBlockingLockExclusive;
        let begun = Instant::now();
        while rustix::fs::flock(lock, NonBlockingLockExclusive).is_err() {
            let mut pid = String::new();
            let _ = (&*lock).rewind().and_then(|()| (&*lock).read_to_string(&mut pid));
            // A daemon that was killed holds the lock until its last thread has ended.
            if begun.elapsed() < ENDING_MAX && pid.trim().parse().is_ok_and(process::is_ending) {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            }
            return Err(Error::new(
                ErrorKind::Busy,
                Side::Cache,
                format!(
                    "fast-pool directory {} is in use by the daemon with pid {}: unmount that one, or give another \
                     directory",
                    path.display(),
                    pid.trim()
                ),
            ));
        }
        let write = || -> io::Result<()> {
            lock.set_len(0)?;
            (&*lock).rewind()?;
            (&*lock).write_all(format!("{}\n", std::process::id()).as_bytes())
        };
        write().map_err(|e| {
            Error::io(e, Side::Cache, format!("fast-pool directory {}: cannot be written; make room", path.display()))
        })
    }

    fn identify(&self, id: &str, number: usize) -> Result<()> {
        let path = self.path.join("device");
        let want = format!("{id} {number}\n");
        match fs::read_to_string(&path) {
            Ok(have) if have == want => Ok(()),
            // An empty file is left by a power cut before its sync.
            Ok(have) if !have.is_empty() => Err(bad(format!(
                "fast-pool directory {} belongs to another mount or place in the list ({} instead of {}): give the \
                 directories in the order of the first mount",
                self.path.display(),
                have.trim(),
                want.trim(),
            ))),
            _ => OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&path)
                .and_then(|mut mark| mark.write_all(want.as_bytes()).and_then(|()| mark.sync_all()))
                .map_err(|e| self.failed("cannot be written", e)),
        }
    }

    fn content_path(&self, id: ContentId) -> PathBuf {
        let mut path = self.path.join("content");
        path.push(format!("{:x}", (id.0 & !(0xff << DEVICE_SHIFT)) >> FILES_PER_DIR_SHIFT));
        path.push(format!("{:x}", id.0));
        path
    }

    fn make_dir(&self, content: &Path) -> Result<()> {
        match content.parent().map(|dir| DirBuilder::new().mode(0o700).create(dir)) {
            Some(Err(e)) if e.kind() != io::ErrorKind::AlreadyExists => Err(self.failed("make a directory", e)),
            _ => Ok(()),
        }
    }

    fn failed(&self, what: &str, error: io::Error) -> Error {
        Error::io(error, Side::Cache, format!("fast-pool directory {}: {what}", self.path.display()))
    }
}

/// Removes the immutable flag of a content file. Returns whether that worked.
fn release(path: &Path) -> bool {
    use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
    let release = || -> Option<()> {
        let file = File::open(path).ok()?;
        let flags = ioctl_getflags(&file).ok()?;
        ioctl_setflags(&file, flags - IFlags::IMMUTABLE).ok()
    };
    release().is_some()
}

fn bad(context: String) -> Error {
    Error::new(ErrorKind::InvalidInput, Side::Application, context)
}

/// Returns whether the file system gives each change a time other than the last one that was read (multigrain
/// timestamps, since Linux 6.13).
fn has_fine_times(file: &File) -> io::Result<bool> {
    let mode = rustix::fs::Mode::from_raw_mode(file.metadata()?.mode());
    let mut last = None;
    for _ in 0..64 {
        rustix::fs::fchmod(file, mode)?;
        let meta = file.metadata()?;
        let now = (meta.ctime(), meta.ctime_nsec());
        if last.replace(now) == Some(now) {
            return Ok(false);
        }
    }
    Ok(true)
}
