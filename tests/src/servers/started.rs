//! Processes that tests start, and that end with the tests.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::thread::sleep;
use std::time::{Duration, Instant};

const STARTED_WITHIN: Duration = Duration::from_secs(60);

/// Where [`free_port`] looks: below the ports that the kernel gives to connections and to listeners without a port of
/// their own (32768 and above, `ip(7)`), and above those of services.
const PORTS: Range<u16> = 10_000..32_000;

/// The claims of this process on ports. They end with the process.
static CLAIMS: Mutex<Vec<UnixDatagram>> = Mutex::new(Vec::new());

/// Returns a port on loopback that no other test gets while this process runs.
///
/// A server listens on its port some time after the port was chosen. A port that the kernel chooses is not free until
/// then: the kernel can give it to the next listener, or to a connection. Such a connection can even be one from the
/// port to itself, which answers each request with the request. So a claim is a socket in the abstract namespace, which
/// has the same scope as ports: the network namespace.
pub fn free_port() -> u16 {
    let mut claims = CLAIMS.lock().unwrap();
    // A daemon that outlived its test must not find the server of the next test at the port of its own.
    let first = std::process::id() as usize * 64 % PORTS.len();
    for port in PORTS.cycle().skip(first).take(PORTS.len()) {
        let name = SocketAddr::from_abstract_name(format!("forebay-test-port-{port}")).unwrap();
        let Ok(claim) = UnixDatagram::bind_addr(&name) else { continue };
        claims.push(claim);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no port in {PORTS:?} is free");
}

/// Returns a server's answer to a plain request, or `None` if there is no answer of HTTP.
pub fn answers(port: u16) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
    stream.write_all(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
    let mut answer = [0; 64];
    let length = stream.read(&mut answer).ok()?;
    let answer = String::from_utf8_lossy(&answer[..length]).into_owned();
    answer.starts_with("HTTP/").then_some(answer)
}

pub fn wait_until(what: &str, log: &Path, mut done: impl FnMut() -> bool) {
    let since = Instant::now();
    while !done() {
        let told = fs::read_to_string(log).unwrap_or_default();
        assert!(since.elapsed() < STARTED_WITHIN, "{what} does not answer; it says:\n{told}");
        sleep(Duration::from_millis(50));
    }
}

/// Starts a process that the kernel kills when its parent ends, even if the parent is killed.
pub fn spawn(mut command: Command, log: &Path) -> Child {
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

pub fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}
