//! Content files: one for each overlay file that has bytes here, sparse, with the same offsets, named by
//! number and never after a path.

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

use crate::{Content, ContentId, SpaceBudget, Stamp};

/// The device's number is the top byte of a content id.
const DEVICE_SHIFT: u32 = 56;
/// Consecutive content files share a directory, so that creating them stays local on the disk.
const FILES_PER_DIR_SHIFT: u32 = 12;
/// Free space of a device that is never used: file systems crawl when they are full.
const KEEP_FREE_SHARE: f64 = 0.02;
/// Share of a device that is used where no limit was given.
const DEFAULT_LIMIT_SHARE: f64 = 0.9;

/// The kernel's clock for times of files where it has no finer one: at most 10 ms (`CONFIG_HZ=100`), with a margin.
const TICK: Duration = Duration::from_millis(12);

/// How long a daemon that is ending may take to let go of its directory.
const ENDING_MAX: Duration = Duration::from_secs(10);

/// One directory on local NVMe.
#[derive(Debug)]
pub struct Device {
    pub path: PathBuf,
    /// Held while the daemon lives, so that no other uses the directory.
    lock: File,
}

#[derive(Debug)]
pub struct ContentStore {
    devices: Vec<Device>,
    pub budget: Arc<SpaceBudget>,
    /// Two changes of a file never have the same times where the first was looked at in between.
    fine_times: bool,
    open: OpenContents,
}

/// The content files that are open in the daemon, each once, however many parts of it use it.
#[derive(Debug, Default)]
struct OpenContents {
    known: Mutex<HashMap<u64, Weak<Content>>>,
}

impl OpenContents {
    fn get(&self, id: ContentId) -> Option<Arc<Content>> {
        self.known.lock().get(&id.0)?.upgrade()
    }

    /// Adds one that was just opened; if somebody else was faster, that one is to be used.
    fn add(&self, content: Content) -> Arc<Content> {
        let mut known = self.known.lock();
        if let Some(content) = known.get(&content.id).and_then(Weak::upgrade) {
            return content;
        }
        let content = Arc::new(content);
        // When the map is full: so that closed ones are at most as many as those that are open.
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
    /// Takes the fast-pool directories, makes those that do not exist, and locks them.
    ///
    /// # Errors
    /// Names the directory and the remedy: not writable, used by another daemon, a limit above its size.
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
        Ok(Self { devices, budget: SpaceBudget::new(limit), fine_times, open: OpenContents::default() })
    }

    /// Gives every device its number in the fast pool that the catalog calls `id`, or checks that it has the one it had:
    /// content is found by it.
    pub fn identify(&self, id: &str) -> Result<()> {
        for (number, device) in self.devices.iter().enumerate() {
            device.identify(id, number)?;
        }
        Ok(())
    }

    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// The number of a new content file together with its device: the one with the most free space.
    pub fn place(&self, number: ContentId) -> ContentId {
        if self.devices.len() == 1 {
            return number;
        }
        let free = |d: &Device| rustix::fs::statvfs(&d.path).map_or(0, |s| s.f_bavail * s.f_frsize);
        let best = self.devices.iter().enumerate().max_by_key(|(_, d)| free(d)).map_or(0, |(n, _)| n);
        ContentId(number.0 | (best as u64) << DEVICE_SHIFT)
    }

    pub fn path(&self, id: ContentId) -> Result<PathBuf> {
        Ok(self.device(id)?.content_path(id))
    }

    fn device(&self, id: ContentId) -> Result<&Device> {
        let number = (id.0 >> DEVICE_SHIFT) as usize;
        self.devices.get(number).ok_or_else(|| {
            Error::new(
                ErrorKind::Corrupt,
                Side::Cache,
                format!("content {:x} is on fast-pool device {number}, which was not given (--fast)", id.0),
            )
        })
    }

    /// Makes an empty content file; what a power cut left under its number is removed.
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

    /// A content file, opened if it is not open anywhere in the daemon.
    pub fn open_content(&self, id: ContentId) -> Result<Arc<Content>> {
        if let Some(content) = self.open.get(id) {
            return Ok(content);
        }
        let path = self.path(id)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_NOATIME | libc::O_NOFOLLOW);
        let file = match options.open(&path) {
            // Stopped at the limit by a daemon that died before it could let go.
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

    /// Removes a content file; one that is not there is fine.
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

    /// Bytes that the devices still take before they are full.
    pub fn free_bytes(&self) -> u64 {
        let free = |d: &Device| {
            rustix::fs::statvfs(&d.path).map_or(0, |s| {
                let keep = (s.f_blocks as f64 * KEEP_FREE_SHARE) as u64;
                s.f_bavail.saturating_sub(keep) * s.f_frsize
            })
        };
        self.devices.iter().map(free).max().unwrap_or(0)
    }

    /// Whether a file that is changed from now on has another stamp than this one, which it has now.
    pub fn tells_times_apart(&self, stamp: &Stamp) -> bool {
        self.until_times_are_apart(stamp).is_zero()
    }

    /// How long it is until then: at most a tick.
    pub fn until_times_are_apart(&self, stamp: &Stamp) -> Duration {
        if self.fine_times {
            return Duration::ZERO;
        }
        let then = SystemTime::from(stamp.ctime) + TICK;
        then.duration_since(SystemTime::now()).unwrap_or_default().min(TICK)
    }

    /// All content written so far survives a power cut when this returns. Blocks.
    ///
    /// # Errors
    /// Also those of write-backs since the last call, whoever else was told of them.
    pub fn sync_all(&self) -> Result<()> {
        let mut synced = Ok(());
        for device in &self.devices {
            // By a descriptor that was open all the time: another one is not told what somebody was told before.
            let one = rustix::fs::syncfs(&device.lock).map_err(|e| device.failed("sync", e.into()));
            synced = synced.and(one);
        }
        synced
    }

    /// Every content file on the devices, for the sweep of orphans.
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

impl Device {
    fn open(path: &Path) -> Result<Self> {
        let fail = |what: &str, e: io::Error| {
            Error::io(e, Side::Cache, format!("fast-pool directory {}: {what}", path.display()))
        };
        // Names and bytes of everybody's files: for the daemon alone, whatever the umask is.
        let make = |dir: &Path| DirBuilder::new().recursive(true).mode(0o700).create(dir);
        let refused = |e: io::Error| match e.raw_os_error() {
            Some(libc::EROFS) => fail("the file system is read-only; give one that can be written", e),
            Some(libc::ENOSPC) => fail("the file system is full; make room or give another", e),
            Some(libc::EACCES | libc::EPERM) => fail("not writable; give one that you own", e),
            _ => fail("cannot be made", e),
        };
        make(path).map_err(refused)?;
        // Before anything is made in it: a path of another user's may lead elsewhere.
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
            // One that was killed holds it until its last thread has ended.
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
            // An empty one is what a power cut leaves of one that was not synced.
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

/// Takes the immutable flag from a content file.
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

/// Whether the file system gives a change another time than the last that was looked at (multigrain timestamps, since
/// Linux 6.13).
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
