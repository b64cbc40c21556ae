//! Mounts of the program under test, each in its own directory on a disk. They are removed when a test ends, however it
//! ends.

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
use forebay_daemon::registry::{self, MountState, Phase, Process, Runtime};
use tempfile::TempDir;

use crate::process::{self, Answer};
use crate::servers::Remote;
use crate::tree::{Files, Tree};

/// The time limit of a command of the program, unless a test sets another one.
pub const COMMAND: Duration = Duration::from_secs(90);
/// The longest time from the death of a worker until another one serves.
const RESTART: Duration = Duration::from_secs(120);

/// Excludes other tests that keep the machine busy, until the guard is dropped.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Directories on a disk: `pool`, `fast`, `mnt`, and `native` for comparison. When this value is dropped, everything
/// that is mounted below them is unmounted, and the processes of those mounts are killed.
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
        // Other users must be able to pass through this directory.
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

    /// Copies a program to a path that every user can reach.
    pub fn lend(&self, program: &Path) -> PathBuf {
        // Two copies at the same time would find each other's half-written file.
        static LENDING: Mutex<()> = Mutex::new(());
        let _turn = LENDING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let lent = self.at(program.file_name().expect("a program has a name"));
        if !lent.exists() {
            fs::copy(program, &lent).expect("room for a copy");
        }
        lent
    }

    /// Lets users mount, for this thread and its children. They get a mount namespace of their own, in which every user
    /// may open `/dev/fuse` and use `allow_other`, whatever the settings of the machine.
    pub fn let_users_mount(&self) {
        // SAFETY: a plain system call; it concerns this thread alone.
        let own = unsafe { libc::unshare(libc::CLONE_NEWNS) };
        assert!(own == 0, "no mounts of our own: {}", std::io::Error::last_os_error());
        let script = "mount --make-rprivate /
            mknod -m 666 dev-fuse c 10 229 && mount --bind dev-fuse /dev/fuse
            echo user_allow_other >fuse.conf && touch /etc/fuse.conf && mount --bind fuse.conf /etc/fuse.conf";
        process::sh(self.root.path(), script, Duration::from_secs(60));
    }

    /// Lets other users pass through the directories above the fast pool, to their scratch directories.
    pub fn let_users_pass(&self) {
        for above in self.fast().ancestors().skip(1).take_while(|above| above.starts_with(self.root.path())) {
            let mode = fs::metadata(above).unwrap().permissions().mode();
            fs::set_permissions(above, fs::Permissions::from_mode(mode | 0o001)).unwrap();
        }
    }

    /// Makes a user the owner of all directories.
    pub fn give_to(&self, user: u32) {
        for dir in [self.pool(), self.fast(), self.mnt(), self.native()] {
            std::os::unix::fs::chown(dir, Some(user), Some(user)).expect("root may give away");
        }
    }

    /// Mounts a small file system at a directory of this place: `kind` is `tmpfs`, or `ext4` on a loop device.
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

    /// Prints the end of the log of each mount below this place.
    fn show_logs(&self) {
        const SHOWN: usize = 8000;
        for entry in registry::entries().into_iter().filter(|e| e.mountpoint().starts_with(self.root.path())) {
            let log = fs::read_to_string(entry.runtime.log()).unwrap_or_default();
            let skip = log.char_indices().rev().nth(SHOWN).map_or(0, |(at, _)| at);
            println!("--- log of {}\n{}", entry.mountpoint().display(), &log[skip..]);
        }
    }

    /// Returns the mountpoint and type of everything that is mounted below this place in this thread's namespace,
    /// innermost first. Paths of places need no decoding.
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
        if thread::panicking() {
            self.show_logs();
        }
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
        // Removes the record of a mixed root that was not unmounted.
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

/// Sends SIGKILL, and waits until the process has ended, 10 seconds at most.
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

/// The options of a mount.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// `--limit`; 2G if not given.
    pub limit: Option<String>,
    /// The text of a policy.
    pub policy: Option<String>,
    /// `--throttle`
    pub throttle: Option<String>,
    pub immutable: bool,
    /// The daemon's limit of open files; if not given, that of this process.
    pub descriptors: Option<u64>,
    /// Further arguments of `forebay mount`.
    pub more: Vec<String>,
    /// The user and group that mount, without privileges.
    pub user: Option<u32>,
    /// The pool; if not given, the directory of the place.
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
    /// Mounts with the policy `manual`: only a request flushes.
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

    /// Mounts again after an unmount or a kill.
    #[track_caller]
    pub fn mount(&self) {
        attempt(&self.place, &self.options).ok();
    }

    #[track_caller]
    pub fn umount(&self) {
        self.forebay(["umount"], &[&self.place.mnt()]).ok();
    }

    /// Returns a path below the mount.
    pub fn path(&self, below: impl AsRef<Path>) -> PathBuf {
        self.place.mnt().join(below)
    }

    /// Returns the same path in a pool that is the place's directory.
    pub fn pool(&self, below: impl AsRef<Path>) -> PathBuf {
        assert!(self.options.remote.is_none(), "the pool is behind a server");
        self.place.pool().join(below)
    }

    /// Returns the pool's content, read without the mount.
    pub fn tree(&self) -> Arc<dyn Tree> {
        match &self.options.remote {
            Some(remote) => remote.tree.clone(),
            None => Arc::new(Files(self.place.pool())),
        }
    }

    /// Runs `forebay` with words and then paths as its arguments.
    #[track_caller]
    pub fn forebay<const N: usize>(&self, words: [&str; N], paths: &[&Path]) -> Answer {
        process::run(self.command().args(words).args(paths), COMMAND)
    }

    fn command(&self) -> Command {
        program_as(&self.place, self.options.user)
    }

    /// Returns a command that runs a program as the user of the mount.
    pub fn as_user(&self, program: &Path) -> Command {
        as_user(&self.place, program, self.options.user)
    }

    /// Flushes everything, and waits until it is in the pool.
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

    /// Returns the state that the supervisor stored last.
    #[track_caller]
    pub fn state(&self) -> MountState {
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

    /// Waits until a worker other than `old` serves.
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

    /// Returns the resident memory of the worker.
    pub fn rss_bytes(&self) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/status", self.worker().pid)).expect("the worker runs");
        let line = text.lines().find(|l| l.starts_with("VmRSS:")).expect("VmRSS");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number") * 1024
    }
}

/// Returns a command that runs the program under test, as a user without privileges or as root.
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

/// Tries to mount, and returns the outcome.
#[track_caller]
pub fn attempt(place: &Place, options: &Options) -> Answer {
    let pool = options.remote.as_ref().map_or_else(|| place.pool(), |remote| PathBuf::from(&remote.url));
    attempt_with(
        place,
        options,
        &[pool.as_os_str(), place.mnt().as_os_str(), "--fast".as_ref(), place.fast().as_os_str()],
    )
}

/// Tries to mount, with pool, mountpoint and fast directories as words of the command line.
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
        // SAFETY: between fork and exec, the closure makes one system call with a value from before the fork.
        unsafe { std::os::unix::process::CommandExt::pre_exec(&mut command, set) };
    }
    process::run(command.args(&options.more), COMMAND)
}

/// Returns the content of a file that describes itself: the same for the same seed, with nothing in common between
/// seeds.
pub fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 16);
    for at in 0..len.div_ceil(16) as u64 {
        // Copies, and no iterators: these take most of a test's time where nothing is optimized.
        bytes.extend_from_slice(&seed.to_le_bytes());
        bytes.extend_from_slice(&(at ^ seed.rotate_left(17)).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
