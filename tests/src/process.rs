//! Runs programs with a time limit, and shows their output if they fail.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How a program ended.
#[derive(Debug)]
pub struct Answer {
    pub command: String,
    /// `None` if a signal killed it.
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
    pub took: Duration,
}

impl Answer {
    /// Returns the answer, which must be success.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert!(self.code == Some(0), "{self}");
        self
    }

    /// Returns the answer, which must have this exit code, and contain all of `words` on standard error or output.
    #[track_caller]
    pub fn refused(self, code: i32, words: &[&str]) -> Self {
        assert!(self.code == Some(code), "expected exit code {code}: {self}");
        let said = format!("{}{}", self.out, self.err);
        for word in words {
            assert!(said.contains(word), "it does not say `{word}`: {self}");
        }
        self
    }
}

impl std::fmt::Display for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let end = |text: &str| -> String {
            const SHOWN: usize = 6000;
            let skip = text.char_indices().rev().nth(SHOWN).map_or(0, |(at, _)| at);
            text[skip..].trim_end().to_owned()
        };
        let (code, took) = (self.code, self.took);
        writeln!(f, "`{}` ended with {code:?} after {took:?}", self.command)?;
        writeln!(f, "--- stdout\n{}", end(&self.out))?;
        write!(f, "--- stderr\n{}", end(&self.err))
    }
}

/// Runs a command to its end.
///
/// # Panics
/// If the command does not end within `limit`: it and its children are killed, and the message shows its output.
#[track_caller]
pub fn run(command: &mut Command, limit: Duration) -> Answer {
    let text = format!("{command:?}");
    let started = Instant::now();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = spawn(command).unwrap_or_else(|e| panic!("cannot run {text}: {e}"));
    let out = drain(child.stdout.take());
    let err = drain(child.stderr.take());
    let status = wait(&mut child, limit);
    let waits_in = if status.is_none() { kernel_stacks(child.id()) } else { String::new() };
    if status.is_none() {
        kill_group(child.id());
        wait(&mut child, Duration::from_secs(5));
    }
    let answer = Answer {
        command: text,
        code: status.and_then(|s| s.code()),
        out: collect(out),
        err: collect(err),
        took: started.elapsed(),
    };
    assert!(status.is_some(), "not done within {limit:?}: {answer}\n{waits_in}");
    answer
}

/// Returns what each thread of a process waits for in the kernel.
fn kernel_stacks(pid: u32) -> String {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let shown = threads.map(|thread| {
        let stack = std::fs::read_to_string(thread.path().join("stack")).unwrap_or_default();
        format!("--- kernel stack of {}\n{stack}", thread.file_name().display())
    });
    shown.collect()
}

/// Starts one program at a time. Until a child has begun its program, it has all open files of this process, including
/// those of other tests, and so keeps their mounts busy.
pub fn spawn(command: &mut Command) -> std::io::Result<Child> {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    command.spawn()
}

/// Waits for the end of a child, but not longer than `limit`.
pub fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let started = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(status) = child.try_wait().expect("the child is ours") {
            return Some(status);
        }
        if started.elapsed() > limit {
            return None;
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// Kills the process group of a child that was started as its leader.
pub fn kill_group(leader: u32) {
    // SAFETY: a plain system call. The group is that of our own child.
    unsafe { libc::kill(-leader.cast_signed(), libc::SIGKILL) };
}

fn drain(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    let mut pipe = pipe.expect("it was asked for");
    thread::spawn(move || {
        let mut text = Vec::new();
        // The output before a read error is shown, too.
        let _ = pipe.read_to_end(&mut text);
        text
    })
}

/// Returns the output of a pipe. Waits 5 seconds at most, since a grandchild may keep the pipe open.
fn collect(reader: JoinHandle<Vec<u8>>) -> String {
    let deadline = Instant::now() + Duration::from_secs(5);
    while !reader.is_finished() {
        if Instant::now() > deadline {
            return "(still open)".into();
        }
        thread::sleep(Duration::from_millis(1));
    }
    String::from_utf8_lossy(&reader.join().unwrap_or_default()).into_owned()
}

/// Waits until `holds` returns true, five minutes at most.
#[track_caller]
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(300), "{what}: not within five minutes");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Lets this process, and those that it starts, have so many files open.
pub fn allow_open_files(count: u64) {
    let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    if limit.current.is_some_and(|current| current < count) {
        limit.current = Some(count);
        limit.maximum = limit.maximum.map(|maximum| maximum.max(count));
        rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).expect("root may have more open files");
    }
}

/// Runs a shell script in `dir`, which must succeed.
#[track_caller]
pub fn sh(dir: &Path, script: &str, limit: Duration) -> Answer {
    run(Command::new("bash").args(["-euo", "pipefail", "-c", script]).current_dir(dir), limit).ok()
}

/// Returns the path of the program under test.
pub fn forebay() -> PathBuf {
    let beside = || {
        let exe = std::env::current_exe().expect("this program has a path");
        exe.parent().and_then(Path::parent).map(|dir| dir.join("forebay"))
    };
    let program = std::env::var_os("FOREBAY_BIN").map(PathBuf::from).or_else(beside).expect("a path");
    assert!(program.is_file(), "{} is not there: run `make build`, or set FOREBAY_BIN", program.display());
    program
}

/// Returns the path of a test suite that `make test` installs.
pub fn tool(name: &str) -> PathBuf {
    let home = || PathBuf::from(std::env::var_os("HOME").expect("HOME is set")).join(".cache/forebay/tools/bin");
    let dir = std::env::var_os("FOREBAY_TOOLS").map_or_else(home, PathBuf::from);
    let tool = dir.join(name);
    assert!(tool.is_file(), "{} is not there: `make test` installs it, or set FOREBAY_TOOLS", tool.display());
    tool
}

/// Fails if a program is missing, and says how to install it.
pub fn need(programs: &[&str]) {
    for program in programs {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let found = std::env::split_paths(&path).any(|dir| dir.join(program).is_file());
        assert!(found, "{program} is not installed: run `packaging/deps test`");
    }
}

/// Returns the directory with the unpacked sources of a package that this workspace is built from.
pub fn sources(package: &str) -> PathBuf {
    let mut cargo = Command::new(env!("CARGO"));
    // Packages for other platforms were never fetched.
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    cargo.args(["metadata", "--offline", "--format-version", "1", "--filter-platform", &platform, "--manifest-path"]);
    cargo.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
    let answer = run(&mut cargo, Duration::from_secs(120)).ok();
    let metadata: serde_json::Value = serde_json::from_str(&answer.out).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let found = packages.iter().find(|p| p["name"] == package).unwrap_or_else(|| panic!("{package} is not built here"));
    Path::new(found["manifest_path"].as_str().unwrap()).parent().unwrap().to_owned()
}

/// A child that is killed when this value is dropped.
pub struct Running(pub Child);

impl Running {
    pub fn new(command: &mut Command) -> Self {
        let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        Self(quiet.spawn().unwrap())
    }

    #[track_caller]
    pub fn end(mut self) -> Option<i32> {
        wait(&mut self.0, crate::mount::COMMAND).expect("it ends").code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The whole group, including the child's own children.
        kill_group(self.0.id());
        let _ = self.0.wait();
    }
}
