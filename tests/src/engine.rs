//! An engine on a pool in memory, and the operations of programs and operators on it.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use forebay_api::operator::{EvictRequest, FlushRequest, StageRequest, Summary};
use forebay_backends::decorators::{Fault, Metrics};
use forebay_backends::memory::MemoryPool;
use forebay_backends::{Attrs, Error, ErrorKind, Expected, FileKind, Pool, PoolPath, RenameMode, Result, Time};
use forebay_engine::{
    Caller, EndedJob, FileOfJob, Ino, Lookup, Options, Overlay, Policy, TestOptions, WriteFaults, content_io, summary,
};

pub const CALLER: Caller = Caller { uid: 0, gid: 0, pid: 1 };
pub const RDWR: i32 = libc::O_RDWR;
pub const RDONLY: i32 = libc::O_RDONLY;

pub struct Fixture {
    pub memory: Arc<MemoryPool>,
    pub fault: Arc<Fault>,
    pub metrics: Arc<Metrics>,
    pub catalog_faults: WriteFaults,
    pub content_faults: content_io::ContentFaults,
    pub fast: tempfile::TempDir,
}

impl Default for Fixture {
    fn default() -> Self {
        Self::new()
    }
}

impl Fixture {
    pub fn new() -> Self {
        Self::over(MemoryPool::new())
    }

    pub fn over(memory: MemoryPool) -> Self {
        let memory = Arc::new(memory);
        let fault = Arc::new(Fault::new(memory.clone(), 1));
        fault.set_error(ErrorKind::Os(libc::EIO));
        let metrics = Arc::new(Metrics::new(fault.clone()));
        let (catalog_faults, content_faults) = Default::default();
        Self { memory, fault, metrics, catalog_faults, content_faults, fast: tempfile::tempdir().unwrap() }
    }

    pub fn options(&self) -> Options {
        let policy = "[default]\nflush = \"manual\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n";
        Options {
            pool: self.metrics.clone(),
            fast: vec![self.fast.path().to_owned()],
            limit_bytes: Some(1 << 30),
            policy: Policy::parse(policy).unwrap(),
            memory_bytes: 16 << 20,
            content_io: content_io::Choice::Plain,
            read_only: false,
            node: "here".into(),
            reattached: false,
            other_root: Default::default(),
            for_tests: TestOptions {
                catalog_faults: self.catalog_faults.clone(),
                content_faults: Some(self.content_faults.clone()),
                ..TestOptions::default()
            },
        }
    }

    pub async fn open(&self) -> Overlay {
        opened(|| self.options()).await
    }

    pub async fn limited(&self, limit: u64) -> Overlay {
        opened(|| Options { limit_bytes: Some(limit), ..self.options() }).await
    }

    /// Puts a file into the pool, as another client does.
    pub async fn put(&self, path: &str, content: &[u8]) {
        let pieces = vec![Ok(forebay_backends::Piece { offset: 0, data: Bytes::copy_from_slice(content) })];
        let pieces = Box::pin(futures::stream::iter(if content.is_empty() { Vec::new() } else { pieces }));
        let size = content.len() as u64;
        self.memory.put(&pool_path(path), size, pieces, &attrs(0o644), &Expected::Anything).await.unwrap();
    }

    pub async fn mkdir(&self, path: &str) {
        self.memory.mkdir(&pool_path(path), &attrs(0o755)).await.unwrap();
    }

    /// Returns the paths and contents of all objects in the pool. The path of a directory ends with a slash.
    pub fn pooled(&self) -> Vec<(String, String)> {
        let snapshot = self.memory.snapshot();
        let shown = |(path, entry): (PoolPath, forebay_backends::memory::SnapshotEntry)| {
            let slash = if entry.kind == FileKind::Directory { "/" } else { "" };
            (format!("{path}{slash}"), String::from_utf8_lossy(&entry.content).into_owned())
        };
        snapshot.into_iter().map(shown).collect()
    }
}

/// Opens an overlay. A task of one that was shut down in this process may hold the fast pool for a moment.
pub async fn opened(options: impl Fn() -> Options) -> Overlay {
    let begun = Instant::now();
    loop {
        match Overlay::open(options()).await {
            Err(error) if error.is(ErrorKind::Busy) && begun.elapsed() < Duration::from_secs(30) => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            opened => return opened.unwrap(),
        }
    }
}

pub fn pool_path(path: &str) -> PoolPath {
    PoolPath::parse(path).unwrap()
}

pub fn attrs(mode: u32) -> Attrs {
    Attrs { mode, uid: 0, gid: 0, atime: Time::now(), mtime: Time::now(), xattrs: Vec::new() }
}

pub fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(path, content)| ((*path).to_owned(), (*content).to_owned())).collect()
}

pub async fn find(overlay: &Overlay, path: &str) -> Ino {
    overlay.resolve(&pool_path(path)).await.unwrap()
}

pub async fn read(overlay: &Overlay, path: &str) -> Result<String> {
    let ino = overlay.resolve(&pool_path(path)).await?;
    overlay.open_file(ino, RDONLY).await?;
    let bytes = overlay.read(ino, 0, 64 << 20).await;
    overlay.release(ino, RDONLY);
    Ok(String::from_utf8_lossy(&bytes?).into_owned())
}

pub async fn write(overlay: &Overlay, path: &str, content: &str) -> Result<()> {
    let path = pool_path(path);
    let parent = overlay.resolve(&path.parent().unwrap()).await?;
    let name = path.name().unwrap();
    let ino = match overlay.lookup(parent, name).await? {
        Lookup::Found(entry) => {
            overlay.open_file(entry.attr.ino, RDWR | libc::O_TRUNC).await?;
            entry.attr.ino
        }
        Lookup::Negative { .. } => overlay.create(parent, name, 0o644, 0, RDWR, CALLER).await?.0.attr.ino,
    };
    let written = overlay.write(ino, 0, Bytes::copy_from_slice(content.as_bytes())).await;
    overlay.close(ino, true).await?;
    overlay.release(ino, RDWR);
    written.map(drop)
}

pub async fn flush(overlay: &Overlay) -> Summary {
    let mut done = Summary::default();
    for _ in 0..3 {
        done = summary(overlay.flush(FlushRequest { wait: true, ..Default::default() })).await.0;
    }
    done
}

pub async fn flushed(overlay: &Overlay) {
    let done = flush(overlay).await;
    assert_eq!((done.failed, done.message), (0, None));
    assert_eq!(overlay.dirty().await.unwrap().len(), 0);
}

pub async fn evict(overlay: &Overlay, release_leases: bool) -> Summary {
    let request = EvictRequest { paths: vec![String::new()], release_leases, dry_run: false };
    summary(overlay.evict(request)).await.0
}

pub async fn stage(overlay: &Overlay, path: &str) -> (Summary, Vec<(String, String)>) {
    let request = StageRequest { paths: vec![path.into()], lease_owner: "job".into(), ..Default::default() };
    summary(overlay.stage(request)).await
}

pub async fn rename(overlay: &Overlay, from: &str, to: &str) -> Result<()> {
    let (from, to) = (pool_path(from), pool_path(to));
    let parent = overlay.resolve(&from.parent().unwrap()).await?;
    let new_parent = overlay.resolve(&to.parent().unwrap()).await?;
    overlay.rename(parent, from.name().unwrap(), new_parent, to.name().unwrap(), RenameMode::Replace).await
}

pub async fn create(overlay: &Overlay, name: &str) -> Ino {
    overlay.create(Ino::ROOT, name.as_bytes(), 0o644, 0, RDWR, CALLER).await.unwrap().0.attr.ino
}

pub async fn put(overlay: &Overlay, ino: Ino, offset: usize, data: &[u8]) {
    let written = overlay.write(ino, offset as u64, data.to_vec().into()).await;
    assert_eq!(written.unwrap() as usize, data.len(), "at {offset}");
}

pub async fn close(overlay: &Overlay, ino: Ino) {
    overlay.close(ino, true).await.unwrap();
    overlay.release(ino, RDWR);
}

/// Returns the content of a file in the pool.
pub fn in_pool(fixture: &Fixture, path: &str) -> Option<Vec<u8>> {
    let snapshot = fixture.memory.snapshot();
    snapshot.into_iter().find(|(at, _)| *at == pool_path(path)).map(|(_, entry)| entry.content.to_vec())
}

/// Copies a directory in its current state, which is what a kill of the program would leave. Repeats the copy if files
/// came, went or changed meanwhile, because RocksDB makes and removes files in the background.
pub fn image(from: &Path, to: &Path) {
    for _ in 0..100 {
        let before = contents_of(from);
        _ = std::fs::remove_dir_all(to);
        if copy(from, to).is_ok() && contents_of(from) == before {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("{} changes all the time", from.display());
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        match entry.file_type()?.is_dir() {
            true => copy(&entry.path(), &target)?,
            false => copy_file(&entry.path(), &target)?,
        }
    }
    Ok(())
}

/// Copies a file; what is zero becomes a hole, so that the copy takes no more space.
fn copy_file(from: &Path, to: &Path) -> std::io::Result<()> {
    const BLOCK: usize = 4096;
    let (content, to) = (std::fs::read(from)?, std::fs::File::create(to)?);
    to.set_len(content.len() as u64)?;
    let blocks = content.chunks(BLOCK).enumerate().filter(|(_, block)| block.iter().any(|byte| *byte != 0));
    for (at, block) in blocks {
        to.write_all_at(block, (at * BLOCK) as u64)?;
    }
    Ok(())
}

/// The files below a directory with their sizes and times of modification. A file that is gone has none.
fn contents_of(dir: &Path) -> BTreeMap<PathBuf, Option<(u64, SystemTime)>> {
    let mut contents = BTreeMap::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let metadata = entry.metadata().ok();
        if metadata.as_ref().is_some_and(std::fs::Metadata::is_dir) {
            contents.append(&mut contents_of(&path));
        }
        contents.insert(path, metadata.and_then(|found| Some((found.len(), found.modified().ok()?))));
    }
    contents
}

/// Returns a job of `CALLER` that made these files, and has ended.
pub fn job_that_made(files: &[Ino]) -> EndedJob {
    let files = files.iter().map(|ino| FileOfJob { ino: *ino, is_changed: true }).collect();
    EndedJob { user: Some(CALLER.uid), files }
}

pub fn refused<T>(result: Result<T>) -> Error {
    match result {
        Ok(_) => panic!("it succeeded"),
        Err(e) => e,
    }
}
