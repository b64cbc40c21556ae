//! Mounts of the program under test, on a disk of their own corner, and gone when a test ends, however it ends.

use std::ffi::{CString, OsStr};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use forebay_api::operator::Status;
use forebay_daemon::mounts;
use forebay_daemon::registry::{self, Phase, Process, Runtime, State};
use tempfile::TempDir;

use crate::process::{self, Answer};
use crate::servers::Remote;
use crate::tree::{Files, Tree};

/// How long any command of the program may take, unless a test says otherwise.
pub const COMMAND: Duration = Duration::from_secs(90);
/// How long a worker may take to serve again after it was killed.
const RESTART: Duration = Duration::from_secs(30);

/// For tests that keep the machine busy: one at a time.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Directories on a disk: `pool`, `fast`, `mnt`, and `native` for comparison. What is mounted below them is taken
/// away when this is dropped, and its processes are killed.
#[derive(Debug)]
pub struct Place {
    root: TempDir,
}

impl Default for Place {
    fn default() -> Self {
        Self::new()
    }
}

impl Place {
    pub fn new() -> Self {
        // SAFETY: a plain system call.
        assert!(unsafe { libc::geteuid() } == 0, "this test mounts and changes owners: run it as root");
        let base = std::env::var_os("FOREBAY_TEST_DIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from);
        const TMPFS_MAGIC: i64 = 0x0102_1994;
        let kind = rustix::fs::statfs(&base).expect("the directory for tests is there").f_type;
        assert!(kind != TMPFS_MAGIC, "{} is a tmpfs: set FOREBAY_TEST_DIR to a disk", base.display());
        let root = tempfile::Builder::new().prefix("forebay-").tempdir_in(base).expect("a directory for tests");
        let place = Self { root };
        // Other users pass through it.
        fs::set_permissions(place.root.path(), fs::Permissions::from_mode(0o755)).unwrap();
        for dir in ["pool", "fast", "mnt", "native"] {
            fs::create_dir(place.at(dir)).unwrap();
        }
        place
    }

    pub fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        self.root.path().join(path)
    }

    pub fn pool(&self) -> PathBuf {
        self.at("pool")
    }

    pub fn fast(&self) -> PathBuf {
        self.at("fast")
    }

    pub fn mnt(&self) -> PathBuf {
        self.at("mnt")
    }

    pub fn native(&self) -> PathBuf {
        self.at("native")
    }

    /// A program, at a path that every user may pass.
    pub fn lend(&self, program: &Path) -> PathBuf {
        // Two that copy at once would find each other's half-written file.
        static LENDING: Mutex<()> = Mutex::new(());
        let _turn = LENDING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let lent = self.at(program.file_name().expect("a program has a name"));
        if !lent.exists() {
            fs::copy(program, &lent).expect("room for a copy");
        }
        lent
    }

    /// Lets users mount, for this thread and what it starts: in mounts of its own, where everybody may open
    /// `/dev/fuse` and use `allow_other`, whatever the machine says.
    pub fn let_users_mount(&self) {
        // SAFETY: a plain system call; it concerns this thread alone.
        let own = unsafe { libc::unshare(libc::CLONE_NEWNS) };
        assert!(own == 0, "no mounts of our own: {}", std::io::Error::last_os_error());
        let script = "mount --make-rprivate /
            mknod -m 666 dev-fuse c 10 229 && mount --bind dev-fuse /dev/fuse
            echo user_allow_other >fuse.conf && touch /etc/fuse.conf && mount --bind fuse.conf /etc/fuse.conf";
        process::sh(self.root.path(), script, Duration::from_secs(10));
    }

    /// Gives all directories to a user.
    pub fn give_to(&self, user: u32) {
        for dir in [self.pool(), self.fast(), self.mnt(), self.native()] {
            std::os::unix::fs::chown(dir, Some(user), Some(user)).expect("root may give away");
        }
    }

    /// A small file system of its own at a directory of this place: `kind` is `tmpfs`, or `ext4` on a loop device.
    pub fn small_disk(&self, name: &str, kind: &str, mib: u64) -> PathBuf {
        let dir = self.at(name);
        fs::create_dir_all(&dir).unwrap();
        let script = match kind {
            "tmpfs" => format!("mount -t tmpfs -o size={mib}m tmpfs {name}"),
            _ => {
                format!("truncate -s {mib}M {name}.img && mkfs.{kind} -q {name}.img && mount -o loop {name}.img {name}")
            }
        };
        process::sh(self.root.path(), &script, Duration::from_secs(60));
        dir
    }

    /// What lies mounted below this place, as this thread sees it, innermost first: mountpoint and type. Paths of
    /// ours need no decoding.
    fn mounted(&self) -> Vec<(PathBuf, String)> {
        let text = fs::read_to_string("/proc/thread-self/mountinfo").unwrap_or_default();
        let mounts = text.lines().rev().filter_map(|line| {
            let (place, kind) = line.split_once(" - ")?;
            Some((PathBuf::from(place.split(' ').nth(4)?), kind.split(' ').next()?.to_owned()))
        });
        mounts.filter(|(mountpoint, _)| mountpoint.starts_with(self.root.path())).collect()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for (mountpoint, _) in self.mounted().into_iter().filter(|(_, kind)| kind == mounts::FS_TYPE) {
            let umount = process::spawn(Command::new(process::forebay()).arg("umount").arg(mountpoint));
            if let Ok(mut umount) = umount
                && process::wait(&mut umount, Duration::from_secs(20)).is_none()
            {
                let _ = umount.kill();
            }
        }
        for entry in registry::entries().into_iter().filter(|e| e.mountpoint().starts_with(self.root.path())) {
            kill(entry.state.supervisor);
            if let Some(worker) = entry.state.worker {
                kill(worker);
            }
            entry.runtime.remove();
        }
        for (mountpoint, _) in self.mounted() {
            detach(&mountpoint);
        }
        // The record of a mixed root that was not unmounted.
        Runtime::of(&self.mnt()).remove();
        if thread::panicking() && std::env::var_os("FOREBAY_KEEP").is_some() {
            self.root.disable_cleanup(true);
            eprintln!("kept: {}", self.root.path().display());
        }
    }
}

fn detach(mountpoint: &Path) {
    let Ok(path) = CString::new(mountpoint.as_os_str().as_bytes()) else { return };
    // SAFETY: the path ends with NUL and outlives the call.
    unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
}

/// `kill -9`; returns when the process has ended.
pub fn kill(process: Process) {
    if process.is_alive() {
        // SAFETY: a plain system call on a process that was started for this place.
        unsafe { libc::kill(process.pid.cast_signed(), libc::SIGKILL) };
    }
    let deadline = Instant::now() + Duration::from_secs(10);
    while process.is_alive() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
}

/// How to mount.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// `--limit`; 2G if not given.
    pub limit: Option<String>,
    /// The text of a policy.
    pub policy: Option<String>,
    /// `--throttle`
    pub throttle: Option<String>,
    pub immutable: bool,
    /// The limit of open files that the daemon starts with; if not given, that of this process.
    pub descriptors: Option<u64>,
    /// Further arguments of `forebay mount`.
    pub more: Vec<String>,
    /// As this user and group, with no privileges.
    pub user: Option<u32>,
    /// The pool; if not given, the place's directory.
    pub remote: Option<Remote>,
}

impl Options {
    pub fn policy(text: &str) -> Self {
        Self { policy: Some(text.into()), ..Self::default() }
    }
}

/// A mount that serves.
#[derive(Debug)]
pub struct Mount {
    pub place: Place,
    options: Options,
}

impl Mount {
    /// Flushes when it is told to, and not before.
    #[track_caller]
    pub fn manual() -> Self {
        Self::new(Options::policy("[default]\nflush = \"manual\"\n"))
    }

    #[track_caller]
    pub fn new(options: Options) -> Self {
        Self::on(Place::new(), options)
    }

    #[track_caller]
    pub fn on(place: Place, options: Options) -> Self {
        let mount = Self { place, options };
        mount.mount();
        mount
    }

    /// Mounts again what was unmounted or killed.
    #[track_caller]
    pub fn mount(&self) {
        attempt(&self.place, &self.options).ok();
    }

    #[track_caller]
    pub fn umount(&self) {
        self.forebay(["umount"], &[&self.place.mnt()]).ok();
    }

    /// A path below the mount.
    pub fn path(&self, below: impl AsRef<Path>) -> PathBuf {
        self.place.mnt().join(below)
    }

    /// The same path in a pool that is the place's directory.
    pub fn pool(&self, below: impl AsRef<Path>) -> PathBuf {
        assert!(self.options.remote.is_none(), "the pool is behind a server");
        self.place.pool().join(below)
    }

    /// The pool, past us.
    pub fn tree(&self) -> Arc<dyn Tree> {
        match &self.options.remote {
            Some(remote) => remote.tree.clone(),
            None => Arc::new(Files(self.place.pool())),
        }
    }

    /// Runs the program with words and with paths.
    #[track_caller]
    pub fn forebay<const N: usize>(&self, words: [&str; N], paths: &[&Path]) -> Answer {
        process::run(self.command().args(words).args(paths), COMMAND)
    }

    fn command(&self) -> Command {
        program_as(&self.place, self.options.user)
    }

    /// A program as whoever mounted.
    pub fn as_user(&self, program: &Path) -> Command {
        as_user(&self.place, program, self.options.user)
    }

    /// Everything is in the pool when this returns.
    #[track_caller]
    pub fn flush(&self) {
        self.forebay(["flush", "--wait"], &[&self.place.mnt()]).ok();
    }

    pub fn runtime(&self) -> Runtime {
        match self.options.user {
            None => Runtime::of(&self.place.mnt()),
            Some(_) => {
                let entry = registry::entries().into_iter().find(|e| e.mountpoint() == self.place.mnt());
                entry.expect("the mount is registered").runtime
            }
        }
    }

    /// What the supervisor wrote down last.
    #[track_caller]
    pub fn state(&self) -> State {
        self.runtime().load().expect("the mount has a state file")
    }

    #[track_caller]
    pub fn status(&self) -> Status {
        let answer = self.forebay(["--json", "status"], &[&self.place.mnt()]).ok();
        let value: serde_json::Value = serde_json::from_str(&answer.out).expect("JSON");
        serde_json::from_value(value["status"].clone()).expect("a status")
    }

    #[track_caller]
    pub fn worker(&self) -> Process {
        self.state().worker.expect("a worker runs")
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.runtime().log()).unwrap_or_default()
    }

    /// `kill -9` of the worker; the mount stays.
    #[track_caller]
    pub fn kill_worker(&self) {
        kill(self.worker());
    }

    /// `kill -9` of supervisor and worker; the mount is dead until it is mounted again.
    #[track_caller]
    pub fn kill_all(&self) {
        let state = self.state();
        kill(state.supervisor);
        if let Some(worker) = state.worker {
            kill(worker);
        }
    }

    /// Returns when a worker other than `old` serves.
    #[track_caller]
    pub fn wait_for_other_worker(&self, old: Process) {
        let deadline = Instant::now() + RESTART;
        loop {
            let state = self.state();
            if state.phase == Phase::Serving && state.worker.is_some_and(|w| w != old && w.is_alive()) {
                return;
            }
            assert!(Instant::now() < deadline, "no worker serves after {RESTART:?}: {state:?}\n{}", self.log());
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Resident memory of the worker.
    pub fn rss_bytes(&self) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/status", self.worker().pid)).expect("the worker runs");
        let line = text.lines().find(|l| l.starts_with("VmRSS:")).expect("VmRSS");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number") * 1024
    }
}

/// The program under test, as a user with no privileges or as root.
pub fn program_as(place: &Place, user: Option<u32>) -> Command {
    as_user(place, &process::forebay(), user)
}

fn as_user(place: &Place, program: &Path, user: Option<u32>) -> Command {
    let Some(id) = user.map(|id| id.to_string()) else { return Command::new(program) };
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "--inh-caps", "-all"]);
    command.arg(place.lend(program)).env_remove("XDG_RUNTIME_DIR");
    command
}

/// Tries to mount, and says how it went.
#[track_caller]
pub fn attempt(place: &Place, options: &Options) -> Answer {
    let pool = options.remote.as_ref().map_or_else(|| place.pool(), |remote| PathBuf::from(&remote.url));
    attempt_with(
        place,
        options,
        &[pool.as_os_str(), place.mnt().as_os_str(), "--fast".as_ref(), place.fast().as_os_str()],
    )
}

/// The same with pool, mountpoint and fast directories as words of the command line.
#[track_caller]
pub fn attempt_with(place: &Place, options: &Options, words: &[&OsStr]) -> Answer {
    let mut command = program_as(place, options.user);
    command.arg("mount").args(words);
    command.args(["--limit", options.limit.as_deref().unwrap_or("2G")]);
    if let Some(text) = &options.policy {
        let file = place.at("policy.toml");
        fs::write(&file, text).unwrap();
        command.arg("--policy").arg(file);
    }
    if let Some(pace) = &options.throttle {
        command.args(["--throttle", pace]);
    }
    if options.immutable {
        command.arg("--immutable");
    }
    if let Some(remote) = &options.remote {
        command.envs(&remote.environment);
    }
    if let Some(most) = options.descriptors {
        let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
        let set = move || match unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        };
        // SAFETY: between fork and exec one system call is made, of a value that was made before.
        unsafe { std::os::unix::process::CommandExt::pre_exec(&mut command, set) };
    }
    process::run(command.args(&options.more), COMMAND)
}

/// What a file that describes itself holds: the same bytes for the same seed, and none that another seed has.
pub fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 16);
    for at in 0..len.div_ceil(16) as u64 {
        bytes.extend(seed.to_le_bytes());
        bytes.extend((at ^ seed.rotate_left(17)).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
