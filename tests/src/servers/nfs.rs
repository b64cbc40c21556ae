//! nfs-ganesha on loopback, in a temporary directory, on free ports, for one test.
//!
//! Ganesha serves NFS version 3 only after it has registered with a portmapper. If no portmapper runs, the test starts
//! one until then, in a network namespace of its own, so that nothing listens on port 111 of this machine. Ganesha
//! reaches it by its Unix socket.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::started::free_port;

const RPCBIND_SOCKET: &str = "/run/rpcbind.sock";
const START_LIMIT: Duration = Duration::from_secs(120);
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// Another process may take a free port before the server binds it.
const START_ATTEMPTS: u32 = 3;
/// The text in the server's log once it serves.
const READY: &str = "NFS SERVER INITIALIZED";
const MISSING: &str = "is not installed: run `packaging/deps test`, or apt-get install nfs-ganesha nfs-ganesha-vfs \
                       rpcbind iproute2";

/// How the server treats root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Squash {
    /// Root stays root.
    None,
    /// Root becomes the user `nobody`.
    Root,
}

/// A server with one export, `/pool`. It ends when this value is dropped or its thread ends.
#[derive(Debug)]
pub struct NfsServer {
    dir: TempDir,
    export: PathBuf,
    squash: Squash,
    nfs_port: u16,
    mount_port: u16,
    ganesha: Option<Running>,
}

/// A child that is killed and waited for when this is dropped.
#[derive(Debug)]
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Fails only if the process has ended and was waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    fn has_ended(&mut self) -> bool {
        !matches!(self.0.try_wait(), Ok(None))
    }

    /// Sends SIGTERM. The drop kills the process if it does not end within [`STOP_LIMIT`].
    fn stop(mut self) {
        let pid = self.0.id();
        // SAFETY: a plain system call on our own child, which was not waited for.
        unsafe { libc::kill(pid.cast_signed(), libc::SIGTERM) };
        let _ = wait_until(STOP_LIMIT, || self.has_ended());
    }
}

impl NfsServer {
    /// Starts a server with its files in a new directory below `parent`. `parent` must not be on an overlayfs, which
    /// has no file handles.
    ///
    /// # Panics
    /// If a program or a privilege is missing, or the server does not start. The message says what to do.
    #[track_caller]
    pub fn start(parent: &Path, squash: Squash) -> Self {
        Self::start_with(parent, None, squash)
    }

    /// Starts a server with the files of `export`, a file system that has file handles.
    #[track_caller]
    pub fn exporting(export: &Path, parent: &Path, squash: Squash) -> Self {
        Self::start_with(parent, Some(export), squash)
    }

    #[track_caller]
    fn start_with(parent: &Path, export: Option<&Path>, squash: Squash) -> Self {
        // SAFETY: a plain system call.
        assert!(unsafe { libc::geteuid() } == 0, "this test starts an NFS server: run it as root");
        for program in ["ganesha.nfsd", "rpcbind", "ip", "unshare"] {
            assert!(is_installed(program), "{program} {MISSING}");
        }
        let dir = tempfile::Builder::new().prefix("forebay-nfs-").tempdir_in(parent).expect("make a directory");
        let export = export.map_or_else(|| dir.path().join("export"), Path::to_owned);
        fs::create_dir_all(&export).expect("make the export");
        fs::create_dir(dir.path().join("recovery")).expect("make the server's own directory");
        let mut server = Self { dir, export, squash, nfs_port: 0, mount_port: 0, ganesha: None };
        let mut failure = String::new();
        for _ in 0..START_ATTEMPTS {
            (server.nfs_port, server.mount_port) = (free_port(), free_port());
            match server.launch() {
                Ok(()) => return server,
                Err(why) => failure = why,
            }
        }
        panic!("nfs-ganesha does not start: {failure}");
    }

    /// Returns the URL of the export, `nfs://…`.
    pub fn url(&self) -> String {
        self.url_of("/pool")
    }

    /// Returns the URL of another path.
    pub fn url_of(&self, path: &str) -> String {
        self.url_by(path, self.nfs_port)
    }

    /// Returns the URL of a path with another port for NFS, on which a proxy forwards the calls.
    pub fn url_by(&self, path: &str, nfs_port: u16) -> String {
        format!("nfs://127.0.0.1{path}?nfsport={nfs_port}&mountport={}", self.mount_port)
    }

    pub fn nfs_port(&self) -> u16 {
        self.nfs_port
    }

    pub fn mount_port(&self) -> u16 {
        self.mount_port
    }

    /// Returns the exported directory, for changes that bypass the server.
    pub fn export(&self) -> PathBuf {
        self.export.clone()
    }

    /// Kills the server with SIGKILL.
    pub fn kill(&mut self) {
        self.ganesha = None;
    }

    /// Starts the server again, on the same ports.
    #[track_caller]
    pub fn start_again(&mut self) {
        assert!(self.ganesha.is_none(), "the server runs");
        if let Err(why) = self.launch() {
            panic!("nfs-ganesha does not start again: {why}");
        }
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("ganesha.log")
    }

    fn launch(&mut self) -> Result<(), String> {
        let config = self.dir.path().join("ganesha.conf");
        fs::write(&config, self.config()).map_err(|error| format!("write {}: {error}", config.display()))?;
        let text = |error: io::Error| error.to_string();
        File::create(self.log()).map_err(text)?;
        // One server at a time on this machine: all register the same service.
        let lock = File::create(std::env::temp_dir().join("forebay-test-rpcbind.lock")).map_err(text)?;
        lock_within(&lock, START_LIMIT * 5)?;
        let portmapper = Portmapper::present()?;
        let out = File::create(self.dir.path().join("out")).map_err(text)?;
        let mut command = Command::new("ganesha.nfsd");
        command.arg("-F").arg("-f").arg(&config).arg("-L").arg(self.log()).arg("-p").arg(self.dir.path().join("pid"));
        command.args(["-N", "NIV_EVENT"]).stdin(Stdio::null()).stderr(out.try_clone().map_err(text)?).stdout(out);
        let mut ganesha = spawn(&mut command).map_err(|error| format!("run ganesha.nfsd: {error}"))?;
        let ports = [self.nfs_port, self.mount_port];
        // The server listens before it registers, and ends if it cannot register.
        let up = wait_until(START_LIMIT, || {
            ganesha.has_ended()
                || fs::read_to_string(self.log()).is_ok_and(|log| log.contains(READY))
                    && ports.iter().all(|port| TcpStream::connect(("127.0.0.1", *port)).is_ok())
        });
        drop(portmapper);
        if !up || ganesha.has_ended() {
            let log = fs::read_to_string(self.log()).unwrap_or_default();
            let last: Vec<_> = log.lines().rev().take(12).collect();
            return Err(format!("see its log, last line first:\n{}", last.join("\n")));
        }
        self.ganesha = Some(ganesha);
        Ok(())
    }

    fn config(&self) -> String {
        let squash = match self.squash {
            Squash::None => "No_Root_Squash",
            Squash::Root => "Root_Squash",
        };
        let (dir, export) = (self.dir.path().display(), self.export.display());
        let (nfs_port, mount_port) = (self.nfs_port, self.mount_port);
        format!(
            "NFS_CORE_PARAM {{ Bind_addr = 127.0.0.1; NFS_Port = {nfs_port}; MNT_Port = {mount_port};
    Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false; Protocols = 3, 4; mount_path_pseudo = true;
    Allow_Set_Io_Flusher_Fail = true; }}
NFSV4 {{ Graceless = true; Grace_Period = 5; Lease_Lifetime = 5; RecoveryBackend = fs; RecoveryRoot = \"{dir}/recovery\";
    Only_Numeric_Owners = true; }}
NFS_KRB5 {{ Active_krb5 = false; }}
MDCACHE {{ Dir_Chunk = 0; }}
EXPORT_DEFAULTS {{ Attr_Expiration_Time = 0; }}
EXPORT {{ Export_Id = 1; Path = \"{export}\"; Pseudo = /pool; Access_Type = RW; Squash = {squash}; SecType = sys;
    Protocols = 3, 4; Transports = TCP; PrivilegedPort = false; Disable_ACL = true; MaxRead = 1048576;
    MaxWrite = 1048576; PrefRead = 1048576; PrefWrite = 1048576; FSAL {{ Name = VFS; }} }}
LOG {{ Default_Log_Level = EVENT;
    Facility {{ name = FILE; destination = \"{dir}/ganesha.log\"; enable = active; }} }}
"
        )
    }
}

impl Drop for NfsServer {
    fn drop(&mut self) {
        if let Some(ganesha) = self.ganesha.take() {
            ganesha.stop();
        }
    }
}

/// A portmapper, started by this process or by another one.
struct Portmapper {
    /// `None` if it ran already.
    _ours: Option<Running>,
}

impl Portmapper {
    fn present() -> Result<Self, String> {
        if UnixStream::connect(RPCBIND_SOCKET).is_ok() {
            return Ok(Self { _ours: None });
        }
        let mut command = Command::new("unshare");
        command.args(["-n", "sh", "-c", "ip link set lo up; exec rpcbind -w -f"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let failed = |why: String| format!("run rpcbind in a network namespace, which needs CAP_SYS_ADMIN: {why}");
        // rpcbind keeps its state in this directory, and does not create it.
        fs::create_dir_all("/run/rpcbind").map_err(|error| failed(error.to_string()))?;
        let mut rpcbind = spawn(&mut command).map_err(|error| failed(error.to_string()))?;
        let up = wait_until(START_LIMIT, || rpcbind.has_ended() || UnixStream::connect(RPCBIND_SOCKET).is_ok());
        if !up || rpcbind.has_ended() {
            return Err(failed("it does not answer".to_owned()));
        }
        Ok(Self { _ours: Some(rpcbind) })
    }
}

/// Starts a child that the kernel kills if this thread ends first.
fn spawn(command: &mut Command) -> io::Result<Running> {
    // SAFETY: prctl is a plain system call, which may be made between fork and exec.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        });
    }
    command.spawn().map(Running)
}

fn lock_within(file: &File, limit: Duration) -> Result<(), String> {
    use std::os::fd::AsRawFd;
    let mut failure = None;
    let locked = wait_until(limit, || {
        // SAFETY: a plain system call on a descriptor that is open.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
            return true;
        }
        let error = io::Error::last_os_error();
        failure = (error.kind() != ErrorKind::WouldBlock).then_some(error);
        failure.is_some()
    });
    match failure {
        None if locked => Ok(()),
        None => Err("another test starts a server for too long".to_owned()),
        Some(error) => Err(format!("lock the start of servers: {error}")),
    }
}

fn wait_until(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let started = Instant::now();
    while !done() {
        if started.elapsed() > limit {
            return false;
        }
        sleep(Duration::from_millis(20));
    }
    true
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(usual).any(|dir| dir.join(program).is_file())
}
