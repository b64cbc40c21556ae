//! The observer of a mount: which places it watches, and what its records say of the overlay's files.
//!
//! Three kinds of places are watched. In the mount, inode numbers are those of the overlay. In the content directory of
//! each fast device, a first touch has the path, the path has the number of the content file, and the catalog has the
//! inode of that content file. If the pool is a directory, it is watched for jobs alone, since reads of it bypass the
//! mount. There is room for `MAX_PLACES` places; the pool is the first to be left out.
//!
//! The source of the bytes follows from the pages that had to be filled: from the fast pool for a content file, through
//! the daemon for the mount. Bytes that were read without filling a page came from memory. Pages that readahead filled
//! and no program read do not count as read. Idle records that belong to no job are dropped beyond `RESTING_MAX`, and all
//! idle records while the kernel's table is more than half full. If the path of a record was lost, the record is dropped,
//! so that the next touch sends the path.

use std::collections::{HashMap, HashSet};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_api::jobs::Traffic;
use forebay_api::operator::TypedPath;
use forebay_api::paths;
use forebay_cache::ContentId;
use forebay_ebpf::layout::MAX_PLACES;
use forebay_ebpf::{FirstTouch, Key, NO_JOB, Observer, ObserverOptions, Record, WatchedPlace, Way};
use forebay_engine::Ino;
use parking_lot::Mutex;

use super::accounting::{FileId, PATH_BYTES_MAX, PartMap};
use super::observer_activation::ObserverActivation;
use crate::JobsInner;

/// Bound on the records that belong to no job and did not change since they were last read. More are dropped.
const RESTING_MAX: usize = 4096;

/// Bytes of the paths that are remembered, for the files of all records. A longer path, or one beyond that, is not.
const PATHS_BYTES: usize = 32 << 20;

/// What stands for the paths of the pool's files that are not remembered.
const OTHER_PATHS: &str = "…";

/// Records that are read before the ring is emptied again.
const NAMED_EVERY: usize = 1024;

/// The places and hooks of a mount that the observer uses.
#[derive(Debug, Clone)]
pub struct WatchOptions {
    pub mountpoint: PathBuf,
    /// The pool's own directory, if the pool is a directory.
    pub pool: Option<PathBuf>,
    /// Hooks that are not used, by the names of their tracepoints. `all`: no hook is used.
    pub masked: Vec<String>,
}

/// An inode of a watched file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct WatchedInode {
    device: u32,
    ino: u64,
    generation: u32,
}

impl WatchedInode {
    fn of(key: &Key) -> Self {
        Self { device: key.device, ino: key.ino, generation: key.generation }
    }
}

/// What earlier records and the ring told.
#[derive(Default)]
struct KnownFiles {
    /// When records were last read.
    at: Option<Instant>,
    /// The files that inodes of the fast pool and the pool belong to, and the first known paths of those of the overlay.
    files: HashMap<WatchedInode, (FileId, TypedPath)>,
    /// The bytes of the paths in `files`.
    path_bytes: usize,
    counted: HashMap<Key, Traffic>,
    /// Records whose files were unknown when records were last read.
    unnamed: HashSet<Key>,
}

impl KnownFiles {
    /// Remembers which file was touched. Without room, without its path: that is asked for when it is counted.
    fn remember(&mut self, inode: WatchedInode, file: FileId, path: TypedPath) {
        if self.files.contains_key(&inode) {
            return;
        }
        let known = match file {
            FileId::Pool(id) => (FileId::Pool(self.within_room(id, OTHER_PATHS)), path),
            FileId::Overlay(ino) => (FileId::Overlay(ino), self.within_room(path, "")),
        };
        self.path_bytes += bytes_of(&known);
        self.files.insert(inode, known);
    }

    /// Returns a path if there is room for it, else what stands for it.
    fn within_room(&self, path: TypedPath, otherwise: &str) -> TypedPath {
        let fits = path.len() <= PATH_BYTES_MAX && self.path_bytes + path.len() <= PATHS_BYTES;
        if fits { path } else { otherwise.to_owned() }
    }

    fn retain(&mut self, used: &HashSet<WatchedInode>) {
        self.files.retain(|inode, _| used.contains(inode));
        self.path_bytes = self.files.values().map(bytes_of).sum();
    }
}

fn bytes_of((file, path): &(FileId, TypedPath)) -> usize {
    match file {
        FileId::Pool(id) => id.len() + path.len(),
        FileId::Overlay(_) => path.len(),
    }
}

pub struct Watch {
    pub observer: Observer,
    mount: u32,
    contents: HashSet<u32>,
    pool: Option<u32>,
    /// Why the pool's own directory is not watched.
    left_out: Option<String>,
    known: Mutex<KnownFiles>,
    pub(super) rest: Mutex<ObserverActivation>,
}

/// Records that did not change since they were last read.
#[derive(Default)]
struct RestingRecords {
    of_no_job: Vec<Key>,
    of_jobs: Vec<Key>,
}

impl RestingRecords {
    fn push(&mut self, key: Key) {
        if key.job == NO_JOB { &mut self.of_no_job } else { &mut self.of_jobs }.push(key);
    }

    /// Returns the records to drop. `told` of at most `records_max` records are in the kernel's table: from half of that
    /// on, those of jobs go, too. Their counts are kept, and the next touch of such a file begins another record.
    fn into_dropped(self, told: usize, records_max: usize) -> Vec<Key> {
        let Self { of_no_job, of_jobs } = self;
        let is_scarce = told > records_max / 2;
        let mut dropped = if is_scarce || of_no_job.len() > RESTING_MAX { of_no_job } else { Vec::new() };
        if is_scarce {
            dropped.extend(of_jobs);
        }
        dropped
    }
}

/// New counts of a file.
pub struct TrafficUpdate {
    pub job: u32,
    pub file: FileId,
    /// The path of the file, if the file may be new.
    pub path: Option<TypedPath>,
    pub first_ns: u64,
    pub old: Traffic,
    pub new: Traffic,
    pub parts: PartMap,
    /// The job made the file.
    pub is_made: bool,
}

impl TrafficUpdate {
    /// Returns whether the job made the file, or wrote to it.
    pub fn is_change(&self) -> bool {
        self.is_made || self.new.written_bytes > self.old.written_bytes
    }
}

impl Watch {
    /// Starts the observer. Takes some tenths of a second.
    ///
    /// # Errors
    /// The reason why this process, or this kernel, cannot observe.
    pub fn start(inner: &JobsInner, wanted: &WatchOptions) -> Result<Self, String> {
        let mount = device_of(&wanted.mountpoint)?;
        let mount = WatchedPlace::file_system(mount, true);
        let mut places = vec![mount];
        for device in inner.engine.fast_pool().devices() {
            let dir = device.path.join("content");
            places.push(WatchedPlace::below(&dir, true).map_err(|e| format!("{}: {e}", dir.display()))?);
        }
        if places.len() > MAX_PLACES {
            return Err(format!("{} devices: at most {} can be watched", places.len() - 1, MAX_PLACES - 1));
        }
        let contents = places[1..].iter().map(|place| place.device).collect();
        let (mut pool, mut left_out) = (None, None);
        if let Some(dir) = &wanted.pool {
            match WatchedPlace::below(dir, false) {
                Ok(_) if places.len() == MAX_PLACES => left_out = Some("there are too many fast devices".into()),
                Ok(place) => {
                    pool = Some(place.device);
                    places.push(place);
                }
                Err(error) => left_out = Some(error.to_string()),
            }
        }
        let every_hook = || forebay_ebpf::probe(&[]).into_iter().map(|state| state.hook.name.to_owned()).collect();
        let masked = if wanted.masked == ["all"] { every_hook() } else { wanted.masked.clone() };
        let scratch = inner.engine.fast_pool().devices().first().map(|device| device.path.clone());
        let options = ObserverOptions { places, ignored: std::process::id(), scratch, masked };
        let observer = Observer::start(&options).map_err(|e| e.to_string())?;
        let (mount, known, rest) = (mount.device, Mutex::default(), Mutex::default());
        Ok(Self { observer, mount, contents, pool, left_out, known, rest })
    }

    /// Returns what the observer cannot see.
    pub fn missing(&self) -> Vec<String> {
        let lacking = self.observer.hooks().iter().filter(|state| state.lacking.is_some());
        let mut missing: Vec<String> = lacking.map(|state| state.hook.without.to_owned()).collect();
        missing.extend(self.left_out.iter().map(|why| format!("what is read in the pool's own directory: {why}")));
        missing
    }

    /// Returns whether the observer misses some reads.
    pub fn misses_reads(&self) -> bool {
        self.observer.hooks().iter().any(|state| state.lacking.is_some() && state.hook.tells_reads())
    }

    /// Empties the ring, so that it does not run full.
    pub fn take_touches(&self, inner: &JobsInner) {
        self.name(inner, &mut self.known.lock());
    }

    /// Calls `each` with the counts that changed since the last time, unless that is less than `age` ago.
    pub fn collect(&self, inner: &JobsInner, age: Duration, mut each: impl FnMut(TrafficUpdate)) {
        let mut known = self.known.lock();
        if known.at.is_some_and(|at| at.elapsed() < age) {
            return;
        }
        // Inodes that have records, or whose paths were in the ring: their records are read the next time.
        let mut used: HashSet<WatchedInode> = self.name(inner, &mut known).into_iter().collect();
        let (mut resting, mut unnamed, mut told) = (RestingRecords::default(), HashSet::new(), 0);
        let all = self.observer.records(|key, record| {
            used.insert(WatchedInode::of(key));
            told += 1;
            // If the ring had room, it has the path of every file that has a record.
            if told % NAMED_EVERY == 0 || self.file(key, &known).is_none() {
                used.extend(self.name(inner, &mut known));
            }
            let Some((file, path)) = self.file(key, &known) else {
                unnamed.insert(*key);
                return;
            };
            let is_content = key.device != self.mount && matches!(file, FileId::Overlay(_));
            let old = known.counted.get(key).copied();
            let mut new = traffic(record, is_content);
            if let (true, FileId::Overlay(ino)) = (is_content, &file) {
                // The daemon wrote the bytes for which the open waited: they were in the page cache, but came from the
                // pool.
                let before = old.map_or(0, |old| old.pool_bytes);
                let more = inner.registry.take_fetched(key.job, *ino, new.read_bytes.saturating_sub(before));
                new = from_pool(new, before + more);
            }
            let path = path.filter(|_| old.is_none()).cloned();
            if old != Some(new) {
                known.counted.insert(*key, new);
                each(TrafficUpdate {
                    job: key.job,
                    file,
                    path,
                    first_ns: record.first_ns,
                    old: old.unwrap_or_default(),
                    new,
                    parts: PartMap::new(record.shift, record.read, record.written),
                    is_made: false,
                });
            } else {
                resting.push(*key);
            }
        });
        if let Err(error) = all {
            return tracing::warn!("the observer's records: {error}");
        }
        let dropped = resting.into_dropped(told, self.observer.records_max());
        for key in &dropped {
            known.counted.remove(key);
        }
        self.observer.forget(dropped);
        // Their paths were lost: the next touch sends them again.
        let lost: Vec<Key> = unnamed.intersection(&known.unnamed).copied().collect();
        unnamed.retain(|key| !known.unnamed.contains(key));
        self.observer.forget(lost);
        known.unnamed = unnamed;
        known.retain(&used);
        known.at = Some(Instant::now());
    }

    /// Drops the records of a job that has ended.
    pub fn forget(&self, job: u32) {
        let mut known = self.known.lock();
        let of_job = |key: &&Key| key.job == job;
        let of_job: Vec<Key> = known.counted.keys().chain(&known.unnamed).filter(of_job).copied().collect();
        for key in &of_job {
            known.counted.remove(key);
        }
        self.observer.forget(of_job);
    }

    fn file<'a>(&self, key: &Key, known: &'a KnownFiles) -> Option<(FileId, Option<&'a TypedPath>)> {
        match known.files.get(&WatchedInode::of(key)) {
            Some((file, path)) => Some((file.clone(), Some(path))),
            None if key.device == self.mount => Some((FileId::Overlay(Ino(key.ino)), None)),
            None => None,
        }
    }

    /// Empties the ring. Returns the inodes whose paths it had.
    fn name(&self, inner: &JobsInner, known: &mut KnownFiles) -> Vec<WatchedInode> {
        let mut all = Vec::new();
        for touch in self.observer.first_touches() {
            if let Some((file, path)) = self.identify(inner, &touch) {
                let inode = WatchedInode::of(&touch.key);
                known.remember(inode, file, path);
                all.push(inode);
            }
        }
        all
    }

    /// Returns which file was touched.
    fn identify(&self, inner: &JobsInner, touch: &FirstTouch) -> Option<(FileId, TypedPath)> {
        let path = paths::encode(touch.path.as_os_str().as_bytes());
        if touch.key.device == self.mount {
            return Some((FileId::Overlay(Ino(touch.key.ino)), path));
        }
        let named = |ino| {
            let file = FileId::Overlay(ino);
            let path = inner.path_now(&file).ok().flatten();
            (file, path.unwrap_or_default())
        };
        // A content file may be known by its name in a view.
        if self.contents.contains(&touch.key.device)
            && let Some(ino) = inner.engine.file_in_view(&touch.path)
        {
            return Some(named(ino));
        }
        if self.contents.contains(&touch.key.device)
            && let Some(id) = content_id(&touch.path)
            && let Some(ino) =
                inner.registry.content_of(id).or_else(|| Some(inner.engine.catalog().content(id).ok()??.ino))
        {
            // If the pool lies on the same file system, it may have a file with such a path. If the content file no
            // longer exists, the touch was of the content file.
            let is_content = |stat: std::fs::Metadata| stat.ino() == touch.key.ino;
            if self.pool != Some(touch.key.device) || inner.engine.fast_pool().stat(id).map_or(true, is_content) {
                return Some(named(ino));
            }
        }
        (self.pool == Some(touch.key.device)).then(|| (FileId::Pool(path), TypedPath::new()))
    }
}

/// Converts a record into bytes by source. `is_content`: the record is of a content file.
fn traffic(record: &Record, is_content: bool) -> Traffic {
    let direct = record.way(Way::DirectRead).bytes;
    let cached = record.way(Way::Read).bytes + record.way(Way::Map).bytes;
    // Bytes that were read ahead but never requested do not count as read.
    let filled = record.way(Way::Fill).bytes.min(cached);
    let below = direct + filled;
    let (fast_bytes, pool_bytes) = if is_content { (below, 0) } else { (0, below) };
    Traffic {
        opens: 0,
        read_bytes: cached + direct,
        written_bytes: record.written_bytes(),
        cache_bytes: cached - filled,
        fast_bytes,
        pool_bytes,
    }
}

/// Moves the first `bytes` of the traffic to the pool: they were fetched for this reader.
fn from_pool(traffic: Traffic, bytes: u64) -> Traffic {
    let cached = traffic.cache_bytes.min(bytes);
    let fast = traffic.fast_bytes.min(bytes - cached);
    Traffic {
        cache_bytes: traffic.cache_bytes - cached,
        fast_bytes: traffic.fast_bytes - fast,
        pool_bytes: traffic.pool_bytes + cached + fast,
        ..traffic
    }
}

/// Returns the device number of the file system that is mounted at a place, without a request to it.
fn device_of(mountpoint: &Path) -> Result<u64, String> {
    let found = forebay_system::mounts::at(mountpoint).map_err(|e| e.to_string())?;
    let number = found.as_ref().and_then(|mount| mount.device.split_once(':'));
    let number = number.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    let (major, minor) = number.ok_or_else(|| format!("{} is not among the mounts", mountpoint.display()))?;
    Ok(rustix::fs::makedev(major, minor))
}

/// Returns the content file that is named by a path below the content directory.
fn content_id(path: &Path) -> Option<ContentId> {
    let mut parts = path.iter();
    let (_, name) = (parts.next()?, parts.next()?.to_str()?);
    u64::from_str_radix(name, 16).ok().filter(|_| parts.next().is_none()).map(ContentId)
}

#[cfg(test)]
mod tests {
    use forebay_ebpf::Count;

    use super::*;

    #[test]
    fn idle_records_of_jobs_are_dropped_before_the_kernels_table_is_full() {
        let key = |job, ino| Key { job, device: 1, ino, generation: 0, reserved: 0 };
        let dropped = |others: u64, of_job: u64, told| {
            let mut resting = RestingRecords::default();
            (0..others).for_each(|ino| resting.push(key(NO_JOB, ino)));
            (0..of_job).for_each(|ino| resting.push(key(7, ino)));
            let dropped = resting.into_dropped(told, 100_000);
            let of_job = dropped.iter().filter(|key| key.job == 7).count();
            (dropped.len() - of_job, of_job)
        };
        assert_eq!(dropped(4096, 40_000, 50_000), (0, 0));
        assert_eq!(dropped(4097, 40_000, 50_000), (4097, 0));
        assert_eq!(dropped(1, 40_000, 50_001), (1, 40_000));
    }

    #[test]
    fn paths_that_are_remembered_are_bounded() {
        let mut known = KnownFiles::default();
        let inode = |ino| WatchedInode { device: 1, ino, generation: 0 };
        let path = "x".repeat(PATH_BYTES_MAX);
        let all = 2 * (PATHS_BYTES / PATH_BYTES_MAX) as u64;
        (0..all).for_each(|ino| known.remember(inode(ino), FileId::Overlay(Ino(ino)), path.clone()));
        (all..2 * all).for_each(|ino| known.remember(inode(ino), FileId::Pool(path.clone()), String::new()));
        let kept: usize = known.files.values().map(bytes_of).sum();
        assert!(kept == known.path_bytes && kept <= PATHS_BYTES + all as usize * OTHER_PATHS.len(), "{kept}");
        assert_eq!(known.files.len() as u64, 2 * all, "which file was touched is known of all");
        known.retain(&HashSet::from([inode(0), inode(all)]));
        assert_eq!(known.path_bytes, PATH_BYTES_MAX + OTHER_PATHS.len());
        let long = "x".repeat(PATH_BYTES_MAX + 1);
        known.remember(inode(1), FileId::Overlay(Ino(1)), long);
        assert_eq!(known.files[&inode(1)], (FileId::Overlay(Ino(1)), String::new()));
    }

    #[test]
    fn content_files_are_known_by_their_path() {
        assert_eq!(content_id(Path::new("0/1f")), Some(ContentId(31)));
        assert_eq!(content_id(Path::new("1f")), None);
        assert_eq!(content_id(Path::new("a/b/1f")), None);
        assert_eq!(content_id(Path::new("0/readme")), None);
    }

    #[test]
    fn bytes_come_from_somewhere() {
        // SAFETY: a record is plain numbers.
        let mut record: Record = unsafe { std::mem::zeroed() };
        let count = |bytes| Count { calls: 1, bytes };
        record.ways[Way::Read as usize] = count(100);
        record.ways[Way::Map as usize] = count(20);
        record.ways[Way::DirectRead as usize] = count(7);
        record.ways[Way::Fill as usize] = count(30);
        record.ways[Way::Write as usize] = count(5);
        let content = traffic(&record, true);
        assert_eq!((content.read_bytes, content.written_bytes), (127, 5));
        assert_eq!((content.cache_bytes, content.fast_bytes, content.pool_bytes), (90, 37, 0));
        assert_eq!(traffic(&record, false).pool_bytes, 37);
        let fetched = from_pool(content, 100);
        assert_eq!(
            (fetched.read_bytes, fetched.cache_bytes, fetched.fast_bytes, fetched.pool_bytes),
            (127, 0, 27, 100)
        );
        record.ways[Way::Fill as usize] = count(1000);
        let ahead = traffic(&record, true);
        assert_eq!((ahead.cache_bytes, ahead.fast_bytes), (0, 127), "what is read ahead is not read");
    }
}
