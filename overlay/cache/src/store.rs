//! Content files: one for each overlay file with resident bytes, sparse, with the same offsets, named by number and
//! never after a path.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use forebay_backends::{Error, ErrorKind, Result, Side};
use parking_lot::Mutex;

use crate::device::{DEVICE_SHIFT, Device};
use crate::tiers::{FIRST_OF_TIERS, StorageTier};
use crate::views::ViewLinks;
use crate::{Content, ContentId, SpaceBudget, Stamp};

/// Free space of a device that is never used: file systems become slow when they are full.
const KEEP_FREE_SHARE: f64 = 0.02;
/// Share of a device that is used if no limit was given.
const DEFAULT_LIMIT_SHARE: f64 = 0.9;

/// The granularity of file times without a finer clock: at most 10 ms (`CONFIG_HZ=100`), with a margin.
const TICK: Duration = Duration::from_millis(12);

#[derive(Debug)]
pub struct ContentStore {
    pub(crate) devices: Vec<Device>,
    /// The bytes of all tiers that are not volatile.
    pub budget: Arc<SpaceBudget>,
    /// Fastest first.
    pub(crate) tiers: Vec<StorageTier>,
    /// Two changes of a file never have the same times if the times were read in between.
    pub(crate) fine_times: bool,
    /// Notified when the health of a device changes.
    pub(crate) health_changed: tokio::sync::Notify,
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
        let open = |(number, path): (usize, &PathBuf)| Device::open(path, number);
        let devices = paths.iter().enumerate().map(open).collect::<Result<Vec<_>>>()?;
        let total = total_bytes(devices.iter())?;
        let limit = match limit {
            Some(limit) if limit > total => {
                return Err(bad(format!(
                    "--limit is {limit} bytes, but {} has {total} bytes in all: give a smaller limit",
                    paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", "),
                )));
            }
            Some(limit) => limit,
            None => default_limit(total),
        };
        let fine_times = devices.iter().all(|device| has_fine_times(&device.lock).unwrap_or(false));
        let budget = SpaceBudget::new(limit);
        Ok(Self {
            tiers: vec![StorageTier::only(budget.clone(), devices.len())],
            devices,
            budget,
            fine_times,
            health_changed: tokio::sync::Notify::new(),
            open: OpenContents::default(),
            view_links: ViewLinks::default(),
        })
    }

    /// Gives every device its number in the fast pool, which the catalog calls `id`, or checks that the device has the
    /// same number as before: content is found by this number. `known`: the numbers of the directories that had a mark
    /// before. Returns those that have one now, of the directories that `--fast` gives: a tier may lose its content.
    ///
    /// # Errors
    /// `InvalidInput` if a directory has the mark of another fast pool, or none and is known.
    pub fn identify(&self, id: &str, known: &BTreeSet<usize>) -> Result<BTreeSet<usize>> {
        self.devices.iter().try_for_each(|device| device.identify(id, known.contains(&device.number)))?;
        Ok(self.devices.iter().map(|device| device.number).filter(|number| *number < FIRST_OF_TIERS).collect())
    }

    /// Checks that all directories carry the mark of the first one's fast pool, if that one has a mark.
    ///
    /// # Errors
    /// `InvalidInput`: the file system of a directory is not mounted, or the directory is another one.
    pub fn check_marks(&self) -> Result<()> {
        let Some(id) = self.devices.first().and_then(Device::pool_id) else { return Ok(()) };
        let other = self.devices.iter().find(|at| Device::marked(&at.path, &id) != Some(at.number));
        other.map_or(Ok(()), |device| Err(device.not_marked(&id)))
    }

    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    pub fn path(&self, id: ContentId) -> Result<PathBuf> {
        Ok(self.device(id)?.content_path(id))
    }

    /// Returns the number of the device that a content file lies on.
    pub fn device_of(&self, id: ContentId) -> usize {
        (id.0 >> DEVICE_SHIFT) as usize
    }

    pub(crate) fn device(&self, id: ContentId) -> Result<&Device> {
        let number = self.device_of(id);
        self.known_device(number).ok_or_else(|| {
            Error::new(
                ErrorKind::Corrupt,
                Side::Cache,
                format!("content {:x} is on fast-pool device {number}, which was not given (--fast)", id.0),
            )
        })
    }

    pub(crate) fn known_device(&self, number: usize) -> Option<&Device> {
        self.devices.iter().find(|device| device.number == number)
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
        self.durable_devices().map(free_bytes).max().unwrap_or(0)
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

    /// Makes all content that was written so far survive a power cut, except on devices that are bypassed. Blocks.
    ///
    /// # Errors
    /// Includes write-back errors since the last call, even if another caller got them, too.
    pub fn sync_all(&self) -> Result<()> {
        let mut synced = Ok(());
        for device in self.devices.iter().filter(|device| device.health().is_used()) {
            // Uses a descriptor that was open all the time: a new descriptor does not get errors that were already
            // reported.
            let one = rustix::fs::syncfs(&device.lock).map_err(|e| device.failed("sync", e.into()));
            if let Err(error) = &one {
                // Space was allocated before: an error is one of the device, whatever it is called.
                self.note_failure(device, error);
            }
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
        for device in self.devices.iter().filter(|device| device.health().is_used()) {
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

/// Returns the bytes that the daemon may still write to the file system of a device.
pub(crate) fn free_bytes(device: &Device) -> u64 {
    rustix::fs::statvfs(&device.path).map_or(0, |s| {
        let keep = (s.f_blocks as f64 * KEEP_FREE_SHARE) as u64;
        s.f_bavail.saturating_sub(keep) * s.f_frsize
    })
}

/// Returns the size of the file systems that the devices are in.
pub(crate) fn total_bytes<'a>(devices: impl Iterator<Item = &'a Device>) -> Result<u64> {
    let mut seen = std::collections::HashSet::new();
    let mut total = 0;
    for device in devices {
        let stat = rustix::fs::statvfs(&device.path).map_err(|e| device.failed("statvfs", e.into()))?;
        let dev = fs::metadata(&device.path).map_err(|e| device.failed("stat", e))?.dev();
        if seen.insert(dev) {
            total += stat.f_blocks * stat.f_frsize;
        }
    }
    Ok(total)
}

/// Returns the limit for file systems of this size, if none was given.
pub(crate) fn default_limit(total: u64) -> u64 {
    (total as f64 * DEFAULT_LIMIT_SHARE) as u64
}

/// Returns the id of the content file of this number on a device.
pub(crate) fn on_device(number: ContentId, device: usize) -> ContentId {
    ContentId(number.0 | (device as u64) << DEVICE_SHIFT)
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

pub(crate) fn bad(context: String) -> Error {
    Error::new(ErrorKind::InvalidInput, Side::Application, context)
}

/// Returns whether the file system gives each change a time other than the last one that was read (multigrain
/// timestamps, since Linux 6.13).
pub(crate) fn has_fine_times(file: &File) -> io::Result<bool> {
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
