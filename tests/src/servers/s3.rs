//! Real S3 servers on loopback: versitygw, which keeps objects as plain files, and Ceph's gateway.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

pub const ACCESS_KEY: &str = "forebay";
pub const SECRET_KEY: &str = "forebay-secret";
pub const BUCKET: &str = "pool";
const STARTED_WITHIN: Duration = Duration::from_secs(60);

/// The variables by which a client is let in.
pub fn environment() -> BTreeMap<String, String> {
    [("AWS_ACCESS_KEY_ID", ACCESS_KEY), ("AWS_SECRET_ACCESS_KEY", SECRET_KEY)]
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

/// What a server answers to a plain request; `None` where none answers.
fn answers(port: u16) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
    stream.write_all(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
    let mut answer = [0; 64];
    let length = stream.read(&mut answer).ok().filter(|length| *length > 0)?;
    Some(String::from_utf8_lossy(&answer[..length]).into_owned())
}

fn wait_until(what: &str, log: &Path, mut done: impl FnMut() -> bool) {
    let since = Instant::now();
    while !done() {
        let told = fs::read_to_string(log).unwrap_or_default();
        assert!(since.elapsed() < STARTED_WITHIN, "{what} does not answer; it says:\n{told}");
        sleep(Duration::from_millis(50));
    }
}

/// A process that ends with its owner, even one that is killed.
fn spawn(mut command: Command, log: &Path) -> Child {
    let log = File::options().create(true).append(true).open(log).unwrap();
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    // SAFETY: prctl is async-signal-safe and touches no memory.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
    let program = command.get_program().to_owned();
    command.spawn().unwrap_or_else(|error| {
        panic!("{}: {error}; `make test` installs what the tests need", program.to_string_lossy())
    })
}

fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

/// Sends a signed request.
fn curl(arguments: &[&str], url: &str) -> String {
    let done = Command::new("curl")
        .args(["-fsS", "--user", &format!("{ACCESS_KEY}:{SECRET_KEY}")])
        .args(["--aws-sigv4", "aws:amz:us-east-1:s3", "-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD"])
        .args(arguments)
        .arg(url)
        .output()
        .expect("curl is missing: apt-get install curl");
    let told = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "curl {arguments:?} {url}: {told}");
    String::from_utf8_lossy(&done.stdout).into_owned()
}

/// A versitygw whose buckets are directories below a temporary one.
pub struct Versitygw {
    dir: TempDir,
    port: u16,
    child: Option<Child>,
}

impl Versitygw {
    /// Starts one with one bucket, [`BUCKET`].
    pub fn start() -> Self {
        // Attributes of objects are extended attributes of files: tmpfs would not do.
        let dir = tempfile::Builder::new().prefix("forebay-versitygw-").tempdir_in("/var/tmp").unwrap();
        for name in ["data", "iam", "versions"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let mut server = Self { dir, port: free_port(), child: None };
        server.resume();
        server.curl(&["-X", "PUT"], "");
        server
    }

    /// Starts it again where it was killed, on the same port and data.
    pub fn resume(&mut self) {
        let tools = std::env::var_os("FOREBAY_TOOLS").map(PathBuf::from).unwrap_or_default();
        let mut command = Command::new(tools.join("versitygw"));
        command
            .env("ROOT_ACCESS_KEY", ACCESS_KEY)
            .env("ROOT_SECRET_KEY", SECRET_KEY)
            .args(["--port", &format!("127.0.0.1:{}", self.port), "--quiet", "--keep-alive", "--iam-dir"])
            .arg(self.dir.path().join("iam"))
            .args(["posix", "--versioning-dir"])
            .arg(self.dir.path().join("versions"))
            .arg(self.dir.path().join("data"));
        let log = self.dir.path().join("log");
        self.child = Some(spawn(command, &log));
        let port = self.port;
        wait_until("versitygw", &log, || answers(port).is_some());
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            end(&mut child);
        }
    }

    pub fn url(&self, prefix: &str) -> String {
        format!("s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{}", self.port)
    }

    /// Sends a signed request for a key with curl. Returns what it prints.
    pub fn curl(&self, arguments: &[&str], key: &str) -> String {
        curl(arguments, format!("http://127.0.0.1:{}/{BUCKET}/{key}", self.port).trim_end_matches('/'))
    }

    /// Where the objects of the bucket are files.
    pub fn files(&self) -> PathBuf {
        self.dir.path().join("data").join(BUCKET)
    }
}

impl Drop for Versitygw {
    fn drop(&mut self) {
        self.kill();
    }
}
