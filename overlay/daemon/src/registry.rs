//! The runtime directories: they record which mounts exist, and so which mount a path belongs to.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use super::config::MountConfig;
use super::protocol::remedy_for;
use super::{Failure, FailureKind, cache_node, mounts, paths};
pub use forebay_system::process::Process;

/// The phase of a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    Starting,
    Serving,
    /// The worker died; another one is starting.
    Restarting,
    /// The worker dies again and again. The mount is kept, and a new worker is started every few seconds.
    Failing,
}

/// The state of a mount that is known without asking its daemon. Only the supervisor writes it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MountState {
    pub version: String,
    pub config: MountConfig,
    pub supervisor: Process,
    pub worker: Option<Process>,
    pub phase: Phase,
    /// When the phase began, in seconds since 1970.
    pub since_unix: u64,
    pub restarts: u64,
    /// How the last worker ended.
    pub last_exit: Option<String>,
    /// The command that makes the mount again.
    pub command: String,
}

/// How often the lock of a directory is tried, and how long after each failure.
const CLAIMS: u32 = 10;
const CLAIM_PAUSE: Duration = Duration::from_millis(20);

/// A mount's runtime directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runtime(PathBuf);

impl Runtime {
    /// Returns the directory of a mountpoint, for the user who mounts.
    pub fn of(mountpoint: &Path) -> Self {
        Self(own_root().join(format!("{:016x}", paths::stable_hash(mountpoint.as_os_str()))))
    }

    pub fn at(dir: PathBuf) -> Self {
        Self(dir)
    }

    pub fn dir(&self) -> &Path {
        &self.0
    }

    pub fn socket(&self) -> PathBuf {
        self.0.join("control.sock")
    }

    fn state(&self) -> PathBuf {
        self.0.join("state.json")
    }

    pub fn log(&self) -> PathBuf {
        self.0.join("daemon.log")
    }

    /// Creates the directory, readable for this user alone, and takes its lock. The supervisor holds the lock as long
    /// as it lives, so that no two supervisors serve one mountpoint.
    pub fn claim(&self) -> Result<File, Failure> {
        let make = || -> io::Result<File> {
            let mut builder = std::fs::DirBuilder::new();
            builder.recursive(true);
            if let Some(root) = self.0.parent() {
                let mode = if rustix::process::geteuid().is_root() { 0o755 } else { 0o700 };
                builder.mode(mode).create(root)?;
                // Before anything is created in it, and never through a link.
                if !is_trusted(root) {
                    let why = "its parent belongs to another user, is a link, or is writable for other users: set \
                               XDG_RUNTIME_DIR to a directory of your own";
                    return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
                }
            }
            builder.mode(0o700).create(&self.0)?;
            std::fs::set_permissions(&self.0, std::fs::Permissions::from_mode(0o700))?;
            File::create(self.lock())
        };
        for _ in 0..CLAIMS {
            let lock =
                make().map_err(|e| Failure::io(format!("cannot use runtime directory {}", self.0.display()), &e))?;
            if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
                // A process that removes the directory of an earlier mount has it for a moment.
                std::thread::sleep(CLAIM_PAUSE);
                continue;
            }
            if self.is_locked_by(&lock) {
                return Ok(lock);
            }
            // The directory was removed after this lock was opened.
        }
        Err(Failure::new(FailureKind::Busy, format!("another daemon has {} for its mountpoint", self.0.display()))
            .remedy("`forebay status` shows it; `forebay umount MOUNTPOINT` ends it"))
    }

    fn lock(&self) -> PathBuf {
        self.0.join("lock")
    }

    /// Returns whether a lock file is that of the present directory.
    fn is_locked_by(&self, lock: &File) -> bool {
        let present = std::fs::symlink_metadata(self.lock());
        present.is_ok_and(|now| lock.metadata().is_ok_and(|had| (now.dev(), now.ino()) == (had.dev(), had.ino())))
    }

    /// Removes the directory of a mount whose daemons have ended, unless a new mount has the directory by now.
    pub fn remove_if_over(&self, of: &MountState) {
        let Ok(lock) = File::open(self.lock()) else { return };
        // No supervisor begins while this is held.
        let is_free = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok();
        let is_its = || self.load().is_ok_and(|now| now.supervisor == of.supervisor && !now.supervisor.is_alive());
        if is_free && self.is_locked_by(&lock) && is_its() {
            self.remove();
        }
    }

    pub fn load(&self) -> io::Result<MountState> {
        let text = std::fs::read(self.state())?;
        serde_json::from_slice(&text).map_err(io::Error::other)
    }

    /// Returns the version of the program that saved the state, if the state is of this mountpoint and this program does
    /// not understand it.
    fn other_program(&self, mountpoint: &Path) -> Option<String> {
        if self.load().is_ok() {
            return None;
        }
        let state: serde_json::Value = serde_json::from_slice(&std::fs::read(self.state()).ok()?).ok()?;
        let is_its = state["config"]["mountpoint"].as_str().map(Path::new) == Some(mountpoint);
        state["version"].as_str().filter(|_| is_its).map(str::to_owned)
    }

    /// Replaces the state atomically.
    pub fn save(&self, state: &MountState) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(state).map_err(io::Error::other)?;
        self.replace(&self.state(), &text)
    }

    /// Replaces a file of the directory atomically.
    pub fn replace(&self, file: &Path, content: &[u8]) -> io::Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Supervisor, worker and several clients of the worker may replace files at the same time.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let part = file.with_extension(format!("part-{}-{number}", std::process::id()));
        let mut options = File::options();
        // Readable for this user alone, whatever the umask; never through a link that another user created.
        options.write(true).create(true).truncate(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let written = options.open(&part).and_then(|mut out| {
            out.set_permissions(std::fs::Permissions::from_mode(0o600))?;
            out.write_all(content)?;
            out.sync_data()?;
            std::fs::rename(&part, file)
        });
        if written.is_err() {
            let _ = std::fs::remove_file(&part);
        }
        written
    }

    /// Removes what an earlier mount left, except the log and the lock.
    pub fn clear(&self) {
        let Ok(files) = std::fs::read_dir(&self.0) else { return };
        for file in files.flatten().filter(|f| f.file_name() != "lock" && f.path() != self.log()) {
            if let Err(error) = std::fs::remove_file(file.path()) {
                tracing::warn!("cannot remove {}: {error}", file.path().display());
            }
        }
    }

    /// Removes the directory. The caller has its lock: see [`Self::claim`].
    pub fn remove(&self) {
        match std::fs::remove_dir_all(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("cannot remove {}: {error}", self.0.display());
            }
            _ => {}
        }
    }
}

/// Returns the directory in which this user's mounts are registered.
fn own_root() -> PathBuf {
    let uid = rustix::process::geteuid();
    if uid.is_root() {
        return PathBuf::from("/run/forebay");
    }
    match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from) {
        Some(dir) if dir.is_absolute() && dir.is_dir() => dir.join("forebay"),
        _ => {
            let session = PathBuf::from(format!("/run/user/{}", uid.as_raw()));
            // If there is no session directory, /tmp is used. A name in /tmp that another user has taken is refused.
            let there = std::fs::symlink_metadata(&session).is_ok_and(|m| m.is_dir() && m.uid() == uid.as_raw());
            if there { session.join("forebay") } else { PathBuf::from(format!("/tmp/forebay-{}", uid.as_raw())) }
        }
    }
}

/// Returns whether only this user and root can create anything in a directory. In /tmp any user can take a name.
fn is_trusted(dir: &Path) -> bool {
    let owner = rustix::process::geteuid().as_raw();
    std::fs::symlink_metadata(dir)
        .is_ok_and(|m| m.is_dir() && (m.uid() == owner || m.uid() == 0) && m.mode() & 0o022 == 0)
}

/// A mount that this user may query.
#[derive(Debug, Clone)]
pub struct RegisteredMount {
    pub runtime: Runtime,
    pub state: MountState,
}

impl RegisteredMount {
    pub fn mountpoint(&self) -> &Path {
        &self.state.config.mountpoint
    }

    pub fn supervisor_alive(&self) -> bool {
        self.state.supervisor.is_alive()
    }

    pub fn worker_alive(&self) -> bool {
        self.state.worker.is_some_and(|w| w.is_alive())
    }

    /// Returns whether neither the supervisor nor the worker runs.
    pub fn is_dead(&self) -> bool {
        !self.supervisor_alive() && !self.worker_alive()
    }

    /// Returns whether it is a cache node: nothing is mounted, and no job writes there.
    pub fn is_cache_node(&self) -> bool {
        self.mountpoint().starts_with(cache_node::ROOT)
    }
}

/// Returns all runtime directories: this user's, and root's if they are readable.
pub(super) fn runtimes() -> impl Iterator<Item = Runtime> {
    let mut roots = vec![own_root(), PathBuf::from("/run/forebay")];
    roots.dedup();
    roots
        .into_iter()
        .filter(|root| is_trusted(root))
        .filter_map(|root| std::fs::read_dir(root).ok())
        .flat_map(|dir| dir.flatten())
        .map(|dir| Runtime(dir.path()))
}

/// Returns all registered mounts, sorted by mountpoint: this user's, and root's if they are readable.
pub fn entries() -> Vec<RegisteredMount> {
    let mut found: Vec<RegisteredMount> =
        runtimes().filter_map(|runtime| runtime.load().ok().map(|state| RegisteredMount { runtime, state })).collect();
    found.sort_by(|a, b| a.mountpoint().cmp(b.mountpoint()));
    found
}

/// A path in a mount: the mount, and the rest of the path below it, escaped for the local API.
#[derive(Debug, Clone)]
pub struct Located {
    pub entry: RegisteredMount,
    pub inner: String,
}

/// Finds the mount that a path lies in, without a request to the mount.
pub fn locate(path: &Path) -> Result<Located, Failure> {
    let text = paths::absolute(path).map_err(|e| Failure::io("cannot tell the working directory", &e))?;
    let entries = entries();
    if let Some(found) = longest(&entries, &text) {
        return Ok(found);
    }
    // A symlink may lead into a mount: follow the path up to the first forebay mount, and no further.
    let ours: Vec<PathBuf> = foreign_mounts(&[]);
    let stop =
        |p: &Path| ours.iter().any(|m| p.starts_with(m)) || entries.iter().any(|e| p.starts_with(e.mountpoint()));
    let followed = paths::follow_until(&text, stop);
    longest(&entries, &followed).ok_or_else(|| not_found(&text, &followed, &ours))
}

fn longest(entries: &[RegisteredMount], path: &Path) -> Option<Located> {
    let covers = entries.iter().filter_map(|e| paths::below(path, e.mountpoint()).map(|inner| (e, inner)));
    let (entry, inner) = covers.max_by_key(|(e, _)| e.mountpoint().as_os_str().len())?;
    Some(Located { entry: entry.clone(), inner: paths::encode(&inner) })
}

/// Returns mountpoints of type `fuse.forebay` that are not in the registry.
pub fn foreign_mounts(known: &[RegisteredMount]) -> Vec<PathBuf> {
    let mounts = mounts::list().unwrap_or_default().into_iter();
    mounts
        .filter(|m| m.fs_type == mounts::FS_TYPE && !known.iter().any(|e| e.mountpoint() == m.mountpoint))
        .map(|m| m.mountpoint)
        .collect()
}

/// Returns the version of the program that made a mount, if its state is not understood by this program.
pub fn other_program(mountpoint: &Path) -> Option<String> {
    runtimes().find_map(|runtime| runtime.other_program(mountpoint))
}

fn not_found(path: &Path, followed: &Path, ours: &[PathBuf]) -> Failure {
    let mount = ours.iter().filter(|m| followed.starts_with(m)).max_by_key(|m| m.as_os_str().len());
    match mount.map(|mount| (mount, other_program(mount))) {
        Some((mount, Some(version))) => Failure::new(
            FailureKind::NoDaemon,
            format!(
                "{} was mounted by forebay {version}, whose records forebay {} does not understand",
                mount.display(),
                env!("CARGO_PKG_VERSION")
            ),
        )
        .remedy(remedy_for(env!("CARGO_PKG_VERSION"), &version)),
        Some((mount, None)) => Failure::new(
            FailureKind::NoDaemon,
            format!("{} is under the mount {}, but its daemon is not known here", path.display(), mount.display()),
        )
        .remedy(format!(
            "run this as the user who mounted it; if its daemon is gone: forebay umount --lazy {}",
            mount.display()
        )),
        None => Failure::new(FailureKind::NoDaemon, format!("{} is under no forebay mount", path.display()))
            .remedy("`forebay status` lists the mounts; `forebay mount URL MOUNTPOINT --fast DIR` makes one"),
    }
}

/// Returns the seconds since 1970.
pub fn now_unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(mountpoint: &str) -> RegisteredMount {
        let config = serde_json::from_value(serde_json::json!({
            "pool": "/p", "mountpoint": mountpoint, "fast": ["/f"], "read_only": false, "immutable": false,
            "allow_other": false
        }))
        .unwrap();
        let state = MountState {
            version: "1".into(),
            config,
            supervisor: Process::current(),
            worker: None,
            phase: Phase::Serving,
            since_unix: 0,
            restarts: 0,
            last_exit: None,
            command: String::new(),
        };
        RegisteredMount { runtime: Runtime::at("/nonexistent".into()), state }
    }

    #[test]
    fn the_longest_mountpoint_wins() {
        let entries = [entry("/m"), entry("/m/inner"), entry("/m/inne")];
        let found = longest(&entries, Path::new("/m/inner/x/y")).unwrap();
        assert_eq!(found.entry.mountpoint(), Path::new("/m/inner"));
        assert_eq!(found.inner, "x/y");
        assert!(longest(&entries, Path::new("/mm")).is_none());
    }

    #[test]
    fn a_directory_that_other_users_may_write_to_is_not_trusted() {
        let dir = tempfile::tempdir().unwrap();
        assert!(is_trusted(dir.path()));
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(!is_trusted(dir.path()));
        assert_eq!(Runtime::at(dir.path().join("r")).claim().unwrap_err().kind, FailureKind::Denied);
        assert!(!is_trusted(Path::new("/tmp")));
    }

    #[test]
    fn state_is_replaced_and_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path().join("r"));
        let _lock = runtime.claim().unwrap();
        assert_eq!(runtime.claim().unwrap_err().kind, FailureKind::Busy);
        let state = entry("/m").state;
        runtime.save(&state).unwrap();
        assert_eq!(runtime.load().unwrap().config, state.config);
        assert_eq!(runtime.dir().metadata().unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(runtime.other_program(Path::new("/m")), None, "this program made it");
    }

    #[test]
    fn the_directory_of_a_mount_that_is_over_is_removed_unless_a_new_mount_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path().join("r"));
        let over = MountState { supervisor: Process { pid: 1, start_ticks: u64::MAX }, ..entry("/m").state };
        // Another daemon is about to save its state.
        let lock = runtime.claim().unwrap();
        runtime.save(&over).unwrap();
        runtime.remove_if_over(&over);
        assert!(runtime.dir().exists());
        drop(lock);
        // Its state names another supervisor.
        let new = entry("/m").state;
        runtime.save(&new).unwrap();
        runtime.remove_if_over(&over);
        runtime.remove_if_over(&new);
        assert!(runtime.dir().exists());
        runtime.save(&over).unwrap();
        runtime.remove_if_over(&over);
        assert!(!runtime.dir().exists());
        runtime.remove_if_over(&over);
    }

    #[test]
    fn files_that_are_replaced_at_the_same_time_stay_whole() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path().into());
        let file = dir.path().join("policy.json");
        std::thread::scope(|scope| {
            for byte in b'a'..b'e' {
                let (runtime, file) = (&runtime, &file);
                scope.spawn(move || (0..50).for_each(|_| runtime.replace(file, &vec![byte; 100_000]).unwrap()));
            }
        });
        let content = std::fs::read(&file).unwrap();
        assert!(content.len() == 100_000 && content.iter().all(|byte| *byte == content[0]));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn a_state_of_another_program_tells_its_version() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path().into());
        std::fs::write(runtime.state(), r#"{"version":"9.8","config":{"mountpoint":"/m"},"phase":"dancing"}"#).unwrap();
        assert!(runtime.load().is_err());
        assert_eq!(runtime.other_program(Path::new("/m")).as_deref(), Some("9.8"));
        assert_eq!(runtime.other_program(Path::new("/n")), None);
        std::fs::write(runtime.state(), "{").unwrap();
        assert_eq!(runtime.other_program(Path::new("/m")), None);
    }
}
