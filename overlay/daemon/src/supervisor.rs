//! The process that keeps a mount alive. It holds the `/dev/fuse` descriptor, starts the worker, and starts another one
//! if the worker dies. It opens no catalog and touches neither pool nor fast pool.
//!
//! Programs wait while there is no worker. So the next one starts at once if the last one served requests, or after
//! `limits::BLINK` if more than `RAPID_CRASHES` in a row died early. After workers that died before they served, the
//! pauses double, up to `RESTART_PAUSE`.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use forebay_backends::{Error, ErrorKind};
use forebay_fuse as fuse;
use futures::FutureExt;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncBufReadExt;
use tokio::process::Child;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::config::MountConfig;
use super::registry::{MountState, Phase, Process, Runtime, now_unix};
use super::{Failure, FailureKind, confinement, limits, mounts, unmount, view_mounts, worker};

/// What a supervisor or a worker writes to its standard output, once: one line of JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StartOutcome {
    Ready(Ready),
    Failed(Failure),
}

/// A mount that serves.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Ready {
    pub mountpoint: PathBuf,
    pub pid: u32,
    /// The kernel reads resident files without the daemon.
    pub passthrough: bool,
    /// Why there is no passthrough.
    #[serde(default)]
    pub no_passthrough: Option<String>,
    pub dirty_files: u64,
    /// What a low limit of descriptors costs.
    #[serde(default)]
    pub few_descriptors: Option<String>,
    /// Why the pool is not attached yet.
    #[serde(default)]
    pub not_attached: Option<String>,
}

impl StartOutcome {
    /// Writes it to standard output. The reader may be gone; that is no error.
    pub fn tell(&self) {
        if let Ok(mut line) = serde_json::to_vec(self) {
            line.push(b'\n');
            let mut out = io::stdout().lock();
            let _ = out.write_all(&line).and_then(|()| out.flush());
        }
    }
}

/// Starts a supervisor in the background and returns when the mount serves.
pub fn launch(config: &MountConfig) -> Result<Ready, Failure> {
    let runtime = Runtime::of(&config.mountpoint);
    let failed = |e: io::Error| Failure::io("cannot start the daemon", &e);
    // The lock is tried before the log is emptied, so that the log of a running daemon is kept.
    drop(runtime.claim()?);
    let log = OpenOptions::new().create(true).append(true).open(runtime.log()).map_err(failed)?;
    log.set_len(0).map_err(failed)?;
    let mut child = Command::new(program().map_err(failed)?)
        .arg(super::SUPERVISE_COMMAND)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::from(log))
        .spawn()
        .map_err(failed)?;
    let text = serde_json::to_vec(config).map_err(|e| failed(io::Error::other(e)))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(&text).map_err(failed)?;
    }
    match first_line(child.stdout.take()) {
        Some(StartOutcome::Ready(ready)) => Ok(ready),
        Some(StartOutcome::Failed(failure)) => Err(failure),
        None => Err(Failure::new(FailureKind::Other, "the daemon ended, or did not mount in time")
            .remedy(format!("its log says more: {}; or use -f", runtime.log().display()))),
    }
}

/// Returns the line that the supervisor writes, if it comes within [`limits::MOUNT`].
fn first_line(stdout: Option<std::process::ChildStdout>) -> Option<StartOutcome> {
    let mut lines = io::BufReader::new(stdout?);
    let (answer, answers) = mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = lines.read_line(&mut line).map(|_| line);
        // After the deadline the receiver is gone.
        let _ = answer.send(read);
    });
    let line = answers.recv_timeout(limits::MOUNT).ok()?.ok()?;
    serde_json::from_str(&line).ok()
}

/// Returns the program file by its present name: after an upgrade the next worker runs the new program.
fn program() -> io::Result<PathBuf> {
    let exe = std::env::current_exe()?;
    Ok(if exe.exists() { exe } else { PathBuf::from("/proc/self/exe") })
}

/// Mounts, and supervises until the mount is gone. `confined` is called once this process has given up what it does not
/// need, and `on_ready` once, when the mount serves.
pub fn run(config: MountConfig, confined: fn(), on_ready: &dyn Fn(&Ready)) -> Result<(), Failure> {
    let failed = |e: io::Error| Failure::io("cannot start the supervisor", &e);
    let runtime = Runtime::of(&config.mountpoint);
    let lock = runtime.claim()?;
    // It is held until the directory is removed: the directory of a new mount must not be.
    let held = lock.try_clone().map_err(failed)?;
    // Files of a mount that ended without its supervisor would be taken for this mount's.
    runtime.clear();
    // A working directory would keep its file system busy for as long as the mount lives.
    std::env::set_current_dir("/").map_err(failed)?;
    let rt = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let mounted = mount(&config).inspect(|_| {
        // Nothing is mounted after this point, and there is no other thread yet.
        confinement::confine();
        confined();
    });
    let task = async {
        let device = mounted?;
        let mut supervisor = Supervisor::new(config, runtime.clone(), device, lock).map_err(failed)?;
        let outcome = supervisor.supervise(on_ready).await;
        supervisor.end().await;
        outcome
    };
    let outcome = rt.block_on(task.boxed_local());
    runtime.remove();
    drop(held);
    // A pool that does not answer may hold a thread, which ends only with the process.
    rt.shutdown_background();
    outcome
}

/// Mounts. No process serves the mount yet.
fn mount(config: &MountConfig) -> Result<OwnedFd, Failure> {
    let mut options = worker::mount_options(config);
    options.flags |= config.forbidden();
    Ok(fuse::mount_device(&options)?)
}

struct Supervisor {
    program: PathBuf,
    runtime: Runtime,
    state: MountState,
    device: OwnedFd,
    signals: Signals,
    /// A signal has asked for the end of the mount.
    asked_to_end: bool,
    _lock: File,
}

/// How one worker ended.
enum Ended {
    /// The mount is gone.
    Unmounted,
    /// It reported why it could not start.
    Refused(Failure),
    /// `served`: it answered requests before. `panicked`: a program fault, which may hit the next worker, too.
    Died { why: String, served: bool, panicked: bool },
}

impl Supervisor {
    fn new(config: MountConfig, runtime: Runtime, device: OwnedFd, lock: File) -> io::Result<Self> {
        let state = MountState {
            version: env!("CARGO_PKG_VERSION").into(),
            command: config.command_line(),
            config,
            supervisor: Process::current(),
            worker: None,
            phase: Phase::Starting,
            since_unix: now_unix(),
            restarts: 0,
            last_exit: None,
        };
        Ok(Self {
            program: program()?,
            runtime,
            state,
            device,
            signals: Signals::new()?,
            asked_to_end: false,
            _lock: lock,
        })
    }

    async fn supervise(&mut self, on_ready: &dyn Fn(&Ready)) -> Result<(), Failure> {
        let mut on_ready = Some(on_ready);
        let (mut rapid, mut useless) = (0, 0);
        // The worker reads its configuration from the state.
        self.save();
        loop {
            let started = Instant::now();
            let ended = match self.one_life(&mut on_ready).await {
                Ok(ended) => ended,
                Err(error) => Ended::Died { why: format!("cannot be run: {error}"), served: false, panicked: false },
            };
            let (served, panicked) = match &ended {
                Ended::Died { served, panicked, .. } => (*served, *panicked),
                _ => (false, false),
            };
            let why = match ended {
                Ended::Unmounted => return Ok(()),
                Ended::Refused(failure) if on_ready.is_some() => return Err(failure),
                Ended::Died { why, .. } if on_ready.is_some() => {
                    return Err(Failure::new(FailureKind::Other, format!("the daemon {why} before it served")));
                }
                Ended::Refused(failure) => failure.what,
                Ended::Died { why, .. } => why,
            };
            useless = if served { 0 } else { useless + 1 };
            rapid = if started.elapsed() < limits::RAPID_CRASH { rapid + 1 } else { 1 };
            self.state.restarts += 1;
            self.state.last_exit = Some(why.clone());
            self.phase(if rapid > limits::RAPID_CRASHES { Phase::Failing } else { Phase::Restarting });
            let pause = pause(useless, rapid, panicked);
            tracing::error!("the worker {why}; the mount is kept, another worker starts in {} ms", pause.as_millis());
            if self.paused(pause, useless.max(rapid)).await {
                return Ok(());
            }
        }
    }

    /// Runs one worker from its start to its end.
    async fn one_life(&mut self, on_ready: &mut Option<&dyn Fn(&Ready)>) -> io::Result<Ended> {
        let mut child = tokio::process::Command::from(self.worker_command()?).spawn()?;
        self.state.worker = child.id().map(Process::of);
        self.save();
        let stdout = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut line = String::new();
        let mut lines = tokio::io::BufReader::new(stdout);
        {
            let mut read = std::pin::pin!(lines.read_line(&mut line));
            let mut late = std::pin::pin!(tokio::time::sleep(limits::MOUNT));
            loop {
                tokio::select! {
                    read = &mut read => {
                        read?;
                        break;
                    }
                    () = &mut late, if on_ready.is_some() => {
                        child.kill().await?;
                        let why = format!("did not serve within {} s", limits::MOUNT.as_secs());
                        return Ok(Ended::Died { why, served: false, panicked: false });
                    }
                    // No process answers the kernel yet, so only a lazy unmount is sure not to wait.
                    () = self.signals.stop(), if on_ready.is_none() => {
                        self.asked_to_end = true;
                        let mountpoint = self.state.config.mountpoint.clone();
                        tokio::task::spawn_blocking(move || stop(&mountpoint, true));
                    }
                }
            }
        }
        let mut served = false;
        match serde_json::from_str(&line) {
            Ok(StartOutcome::Ready(ready)) => {
                served = true;
                self.phase(Phase::Serving);
                if let Some(tell) = on_ready.take() {
                    tell(&Ready { pid: std::process::id(), ..ready });
                }
            }
            Ok(StartOutcome::Failed(failure)) => {
                child.wait().await?;
                return Ok(Ended::Refused(failure));
            }
            Err(_) => {}
        }
        Ok(ended(self.wait(&mut child).await?, served))
    }

    /// Returns the command of a worker. The descriptor is the worker's standard input, so that no number has to be
    /// agreed upon.
    fn worker_command(&self) -> io::Result<Command> {
        use std::os::unix::process::CommandExt;
        let program = if self.program.exists() { &self.program } else { Path::new("/proc/self/exe") };
        let mut command = Command::new(program);
        command
            .arg(super::WORKER_COMMAND)
            .arg(self.runtime.dir())
            .stdin(Stdio::from(self.device.try_clone()?))
            .stdout(Stdio::piped())
            // A process group of its own: Ctrl-C on a terminal is for the supervisor, which unmounts in good order.
            .process_group(0);
        Ok(command)
    }

    /// Waits for the worker's end. A signal meanwhile starts an unmount.
    async fn wait(&mut self, child: &mut Child) -> io::Result<ExitStatus> {
        let mut tick = tokio::time::interval(Duration::from_secs(60));
        let mut asked = 0;
        loop {
            tokio::select! {
                status = child.wait() => return status,
                () = self.signals.stop() => {
                    asked += 1;
                    self.asked_to_end = true;
                    let mountpoint = self.state.config.mountpoint.clone();
                    tokio::task::spawn_blocking(move || stop(&mountpoint, asked > 1));
                }
                _ = tick.tick() => self.bound_log(),
            }
        }
    }

    /// Pauses before the next worker. Returns true if the mount is over afterwards: the kernel has ended its connection. One
    /// that was only detached, or in this namespace alone, may have users. It is over if `failed`, the workers in a row that
    /// served nothing or died early, are many, or if a signal has asked for its end: then they get errors instead of waiting
    /// for ever.
    async fn paused(&mut self, pause: Duration, failed: u32) -> bool {
        tokio::select! {
            () = tokio::time::sleep(pause) => {
                is_disconnected(&self.device)
                    || (failed > limits::RAPID_CRASHES || self.asked_to_end)
                        && !mounts::is_ours(&self.state.config.mountpoint)
            }
            // No process answers the kernel now, so only a lazy unmount is sure not to wait.
            () = self.signals.stop() => {
                let mountpoint = self.state.config.mountpoint.clone();
                let _ = tokio::task::spawn_blocking(move || stop(&mountpoint, true)).await;
                !mounts::is_ours(&self.state.config.mountpoint)
            }
        }
    }

    /// Detaches the mount if it still exists: it has no worker and will get none.
    async fn end(&mut self) {
        let mountpoint = self.state.config.mountpoint.clone();
        if mounts::is_ours(&mountpoint) {
            let detached = tokio::task::spawn_blocking(move || unmount::take_away(&mountpoint, true)).await;
            if let Ok(Err(error)) = detached {
                tracing::error!("cannot detach {}: {error}", self.state.config.mountpoint.display());
            }
        }
    }

    fn phase(&mut self, phase: Phase) {
        self.state.phase = phase;
        self.state.since_unix = now_unix();
        self.save();
    }

    fn save(&self) {
        if let Err(error) = self.runtime.save(&self.state) {
            tracing::error!("cannot write the state in {}: {error}", self.runtime.dir().display());
        }
    }

    /// Empties the log if it is too large. Both processes append to the log, so this is safe at any time.
    fn bound_log(&self) {
        let Ok(log) = OpenOptions::new().append(true).open(self.runtime.log()) else { return };
        if log.metadata().is_ok_and(|m| m.len() > limits::LOG_BYTES) && log.set_len(0).is_ok() {
            tracing::info!("the log had grown to {} bytes and was emptied", limits::LOG_BYTES);
        }
    }
}

/// Returns whether the kernel has ended the connection of a mount: no program uses the mount any more.
fn is_disconnected(device: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut polled = [PollFd::new(device, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&now)).is_ok() && polled[0].revents().contains(PollFlags::ERR)
}

fn ended(status: ExitStatus, served: bool) -> Ended {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(0), _) => Ended::Unmounted,
        (Some(forebay_fuse::PANIC_STATUS), _) => Ended::Died { why: "panicked".into(), served, panicked: true },
        (Some(code), _) => Ended::Died { why: format!("ended with code {code}"), served, panicked: false },
        (None, signal) => {
            let why = format!("was killed by signal {}", signal.unwrap_or(0));
            Ended::Died { why, served, panicked: false }
        }
    }
}

/// Returns the pause before the next worker, for which programs wait. After a worker that served, there is no pause, or
/// [`limits::BLINK`] if more than [`limits::RAPID_CRASHES`] in a row died early (`rapid`). If `useless` workers in a
/// row died before they served, the pause doubles with each, up to [`limits::RESTART_PAUSE`]. It also doubles if each
/// worker that dies early panics: a request that is sent again, or a flush, makes the next one panic as well.
fn pause(useless: u32, rapid: u32, panicked: bool) -> Duration {
    let doubled = |times: u32| limits::BLINK.saturating_mul(1 << (times - 1).min(10)).min(limits::RESTART_PAUSE);
    match (useless, rapid.saturating_sub(limits::RAPID_CRASHES)) {
        (0, 0) => Duration::ZERO,
        (0, times) if panicked => doubled(times),
        (0, _) => limits::BLINK,
        (times, _) => doubled(times),
    }
}

/// The signals that ask a process to end.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for a signal, whichever: each asks a mount to end.
    pub(super) async fn stop(&mut self) {
        self.asks_to_reload().await;
    }

    /// Waits for a signal. Returns whether it is SIGHUP, which asks a cache node to read its files again.
    pub(super) async fn asks_to_reload(&mut self) -> bool {
        tokio::select! {
            _ = self.terminate.recv() => false,
            _ = self.interrupt.recv() => false,
            _ = self.hangup.recv() => true,
        }
    }
}

/// Unmounts after a signal. A mount in use stays, and the log names the processes that use it.
pub(super) fn stop(mountpoint: &Path, lazy: bool) {
    if let Err(failure) = view_mounts::detach_below(mountpoint, lazy) {
        tracing::error!("{failure}");
        return;
    }
    match unmount::take_away(mountpoint, lazy) {
        Ok(()) if lazy => tracing::warn!("{} is detached; its daemon ends with its last user", mountpoint.display()),
        Ok(()) => tracing::info!("{} is unmounted", mountpoint.display()),
        Err(error) => tracing::error!("{}", refused(mountpoint, error)),
    }
}

/// Returns why an unmount was refused, with the processes that use the mount.
pub fn refused(mountpoint: &Path, error: Error) -> Failure {
    if error.is(ErrorKind::Busy) { in_use(mountpoint) } else { error.into() }
}

/// Returns the failure for a mountpoint in use, with the processes that use it.
pub(super) fn in_use(mountpoint: &Path) -> Failure {
    const SHOWN: usize = 5;
    let place = mountpoint.display();
    let holders: Vec<String> = mounts::holders(mountpoint, SHOWN).iter().map(ToString::to_string).collect();
    let who = if holders.is_empty() { "a process that this user may not see".into() } else { holders.join(", ") };
    Failure::new(FailureKind::Busy, format!("{place} is in use by {who}"))
        .remedy(format!("end them, or: forebay umount --lazy {place}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_served_is_followed_at_once_and_pauses_are_bounded() {
        assert_eq!(pause(0, 1, false), Duration::ZERO);
        assert_eq!(pause(0, u32::MAX, false), limits::BLINK);
        assert_eq!(pause(1, 1, false), Duration::from_millis(100));
        assert_eq!(pause(3, 3, false), Duration::from_millis(400));
        assert_eq!(pause(u32::MAX, u32::MAX, false), limits::RESTART_PAUSE);
        assert_eq!(pause(0, limits::RAPID_CRASHES, true), Duration::ZERO, "programs wait");
        assert_eq!(pause(0, limits::RAPID_CRASHES + 3, true), Duration::from_millis(400));
        assert_eq!(pause(0, u32::MAX, true), limits::RESTART_PAUSE);
    }

    #[test]
    fn a_device_is_disconnected_only_if_the_kernel_says_so() {
        // Neither a connected device nor another file reports an error.
        let (reader, writer) = std::io::pipe().unwrap();
        assert!(!is_disconnected(&reader.into()));
        // As that of a pipe without readers, and of a device whose mount is gone.
        assert!(is_disconnected(&writer.into()));
    }

    #[test]
    fn exit_zero_alone_means_unmounted() {
        use std::os::unix::process::ExitStatusExt;
        assert!(matches!(ended(ExitStatus::from_raw(0), true), Ended::Unmounted));
        assert!(
            matches!(ended(ExitStatus::from_raw(9), true), Ended::Died { why, served: true, panicked: false } if why.contains("signal 9"))
        );
        let panicked = ExitStatus::from_raw(forebay_fuse::PANIC_STATUS << 8);
        assert!(matches!(ended(panicked, true), Ended::Died { panicked: true, .. }));
        assert!(
            matches!(ended(ExitStatus::from_raw(1 << 8), false), Ended::Died { why, served: false, panicked: false } if why.contains("code 1"))
        );
    }
}
