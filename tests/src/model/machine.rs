//! The engine with its pool and its fast pool, as a machine that can be killed.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicI64;

use forebay_backends::decorators::Fault;
use forebay_backends::memory::MemoryPool;
use forebay_backends::{ErrorKind, Result};
use forebay_engine::{Options, Overlay, Policy, TestOptions, content_io};
use forebay_system::clock;
use tokio::runtime::Runtime;

use super::config::{Config, World};

/// The tier in memory, below the fast directory.
const MEMORY: &str = "memory";

pub struct Machine {
    pub config: Config,
    /// The pool as other clients see and change it.
    pub memory: Arc<MemoryPool>,
    /// The pool as the engine sees it.
    pub pool: Arc<Fault>,
    home: tempfile::TempDir,
    /// How far the engine's clock is ahead of the right time, in seconds.
    pub ahead_secs: Arc<AtomicI64>,
    boots: u32,
    running: Option<(Runtime, Overlay)>,
}

impl Machine {
    pub fn new(config: Config) -> Self {
        let memory = Arc::new(MemoryPool::new());
        let pool = Arc::new(Fault::new(memory.clone(), 0));
        // Not `Unavailable`: a single failed call is not an outage.
        pool.set_error(ErrorKind::Os(libc::EIO));
        let shm = Path::new("/dev/shm");
        let dir = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
        let home = tempfile::Builder::new().prefix("forebay-model-").tempdir_in(dir).expect("a directory");
        let ahead_secs = Arc::new(AtomicI64::new(0));
        clock::run_ahead(ahead_secs.clone());
        Self { config, memory, pool, home, ahead_secs, boots: 0, running: None }
    }

    fn fast(&self) -> PathBuf {
        self.home.path().join(self.boots.to_string())
    }

    pub fn start(&mut self) -> Result<()> {
        let ahead = self.ahead_secs.clone();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .on_thread_start(move || clock::run_ahead(ahead.clone()))
            .build()
            .expect("a runtime");
        let options = Options {
            pool: self.pool.clone(),
            fast: vec![self.fast()],
            limit_bytes: Some(self.config.limit_bytes.unwrap_or(1 << 30)),
            policy: self.policy(),
            memory_bytes: 8 << 20,
            content_io: content_io::Choice::Plain,
            read_only: false,
            node: "here".into(),
            reattached: false,
            other_root: Default::default(),
            for_tests: TestOptions {
                lose_unsynced: self.config.world == World::PowerCuts,
                open_contents: self.config.few_descriptors.then_some(2),
                ..TestOptions::default()
            },
        };
        let overlay = runtime.block_on(Overlay::open(options))?;
        self.running = Some((runtime, overlay));
        Ok(())
    }

    /// Returns the policy that the configuration says at this moment.
    pub fn policy(&self) -> Policy {
        self.config.policy(&self.memory_tier())
    }

    pub fn overlay(&self) -> &Overlay {
        &self.running.as_ref().expect("a running engine").1
    }

    pub fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.running.as_ref().expect("a running engine").0.block_on(work)
    }

    /// Ends the engine as `kill -9` does: only what is on the devices at this moment is left. Before the next start,
    /// `damage` receives the fast-pool directory.
    pub fn crash(&mut self, damage: impl FnOnce(&Path)) -> Result<()> {
        let before = self.fast();
        self.boots += 1;
        let after = self.fast();
        while let Err(error) = image(&before, &after) {
            assert!(error.kind() == std::io::ErrorKind::NotFound, "a copy: {error}");
            fs::remove_dir_all(&after).expect("a directory");
        }
        // While the engine is dropped, it may still change the old directory, but not the copy.
        drop(self.running.take());
        damage(&after);
        if self.config.world == World::PowerCuts {
            let _ = fs::remove_dir_all(after.join(MEMORY));
        }
        fs::remove_dir_all(&before).expect("the old fast pool is removed");
        self.start()
    }

    /// Returns the directory of the tier in memory. It is in the fast directory, so that a crash copies it, too.
    fn memory_tier(&self) -> PathBuf {
        self.fast().join(MEMORY)
    }

    pub fn content_dir(&self) -> PathBuf {
        self.fast().join("content")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        drop(self.running.take());
    }
}

/// Copies a directory. Content files are linked, so they keep their inodes, which descriptors may have open.
///
/// # Errors
/// `NotFound` if the catalog removed one of its files meanwhile: the copied files are then inconsistent.
fn image(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to).expect("a directory");
    let mut entries: Vec<_> = fs::read_dir(from).expect("a directory").flatten().collect();
    // Content files before the catalog: the catalog gives up a content file before a thread removes it.
    entries.sort_by_key(|entry| entry.file_name() != "content" && entry.file_name() != MEMORY);
    for entry in entries {
        let target = to.join(entry.file_name());
        let kind = entry.file_type().expect("a type");
        if kind.is_dir() {
            image(&entry.path(), &target)?;
        } else if from.parent().is_some_and(|p| p.ends_with("content")) {
            match fs::hard_link(entry.path(), &target) {
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                linked => linked.expect("a link"),
            }
        } else {
            fs::copy(entry.path(), &target)?;
        }
    }
    Ok(())
}
