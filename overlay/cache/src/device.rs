//! One directory of the fast pool.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_system::process;
use parking_lot::Mutex;

use crate::ContentId;
use crate::health::{DeviceHealth, is_device_error};
use crate::store::bad;

/// The device's number is the top byte of a content id.
pub(crate) const DEVICE_SHIFT: u32 = 56;
/// Consecutive content files share a directory, so that creating them stays local on the disk.
const FILES_PER_DIR_SHIFT: u32 = 12;
/// How long an ending daemon may take to release its directory.
const ENDING_MAX: Duration = Duration::from_secs(10);
/// The file that a probe writes.
const PROBE: &str = "probe";
const PROBE_BYTES: usize = 4096;

/// A directory on a local device.
#[derive(Debug)]
pub struct Device {
    pub path: PathBuf,
    /// The top byte of the ids of its content files.
    pub number: usize,
    /// Held while the daemon lives, so that no other daemon uses the directory.
    pub(crate) lock: File,
    health: Mutex<DeviceHealth>,
    /// What failed last.
    last_error: Mutex<Option<String>>,
}

impl Device {
    pub(crate) fn open(path: &Path, number: usize) -> Result<Self> {
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
        let health = Mutex::new(DeviceHealth::new(number == 0));
        Ok(Self { path: path.to_owned(), number, lock, health, last_error: Mutex::default() })
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

    /// Returns the number that the directory has in the fast pool with this id. `None`: it has no mark of it.
    pub(crate) fn marked(path: &Path, id: &str) -> Option<usize> {
        fs::read_to_string(path.join("device")).ok()?.strip_prefix(id)?.trim().parse().ok()
    }

    /// Returns the id of the fast pool that the directory is marked with.
    pub(crate) fn pool_id(&self) -> Option<String> {
        let mark = fs::read_to_string(self.path.join("device")).ok()?;
        mark.split_once(' ').map(|(id, _)| id.to_owned())
    }

    /// `is_known`: the directory was marked before.
    pub(crate) fn identify(&self, id: &str, is_known: bool) -> Result<()> {
        let path = self.path.join("device");
        let want = format!("{id} {}\n", self.number);
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
            // A mark that cannot be read now may be that of another mount.
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(self.failed("its mark cannot be read", e)),
            // An empty directory would be filled in the place of the one whose file system is not mounted.
            Err(_) if is_known => Err(self.not_marked(id)),
            Ok(_) | Err(_) => OpenOptions::new()
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

    /// The error for a directory that was marked before, and is not now.
    pub(crate) fn not_marked(&self, id: &str) -> Error {
        let (place, number) = (self.path.display(), self.number);
        bad(format!(
            "fast-pool directory {place} is another one than before: if its file system is not mounted, mount it; if what \
             it held is lost: echo '{id} {number}' >{place}/device"
        ))
    }

    pub(crate) fn content_path(&self, id: ContentId) -> PathBuf {
        let mut path = self.path.join("content");
        path.push(format!("{:x}", (id.0 & !(0xff << DEVICE_SHIFT)) >> FILES_PER_DIR_SHIFT));
        path.push(format!("{:x}", id.0));
        path
    }

    pub(crate) fn make_dir(&self, content: &Path) -> Result<()> {
        match content.parent().map(|dir| DirBuilder::new().mode(0o700).create(dir)) {
            Some(Err(e)) if e.kind() != io::ErrorKind::AlreadyExists => Err(self.failed("make a directory", e)),
            _ => Ok(()),
        }
    }

    pub(crate) fn failed(&self, what: &str, error: io::Error) -> Error {
        Error::io(error, Side::Cache, format!("fast-pool directory {}: {what}", self.path.display()))
    }

    pub fn health(&self) -> DeviceHealth {
        *self.health.lock()
    }

    /// Returns what failed last since the start.
    pub fn last_error(&self) -> Option<String> {
        self.last_error.lock().clone()
    }

    pub(crate) fn note_last_error(&self, error: &Error) {
        *self.last_error.lock() = Some(error.to_string());
    }

    /// Changes the health of the device. Logs the change, and what failed last.
    pub(crate) fn change_health<T>(&self, change: impl FnOnce(&mut DeviceHealth) -> T) -> T {
        let mut health = self.health.lock();
        let was = health.name();
        let result = change(&mut health);
        if health.name() != was {
            let error = self.last_error.lock();
            tracing::warn!(
                error = (!health.is_healthy()).then_some(error.as_deref()).flatten(),
                "fast-pool directory {}: {}, was {was}",
                self.path.display(),
                health.name()
            );
        }
        result
    }

    /// Writes, syncs and reads a small file. Blocks.
    ///
    /// # Errors
    /// The device does not work. A full one does.
    pub fn probe(&self) -> Result<()> {
        let failed = |what: &'static str| move |e| self.failed(what, e);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let bytes = std::process::id().to_le_bytes().repeat(PROBE_BYTES / 4);
        let written = options
            .open(self.path.join(PROBE))
            .map_err(failed("open the file of probes"))
            .and_then(|file| file.write_all_at(&bytes, 0).map(|()| file).map_err(failed("write the file of probes")));
        let file = match written {
            Err(e) if !is_device_error(e.errno()) => return Ok(()),
            written => written?,
        };
        // The space is allocated by now, so whatever fails is the device. A thin one may say that it has no space.
        file.sync_data().map_err(failed("sync the file of probes"))?;
        // The read is to come from the device. A file system without a device keeps the pages.
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
        let mut read = vec![0; PROBE_BYTES];
        file.read_exact_at(&mut read, 0).map_err(failed("read the file of probes"))?;
        match read == bytes {
            true => Ok(()),
            false => Err(self.failed("read the file of probes", io::Error::other("other bytes than were written"))),
        }
    }
}
