//! Processes that tests start, and that end with the tests.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

const STARTED_WITHIN: Duration = Duration::from_secs(60);

pub fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

/// Returns a server's answer to a plain request, or `None` if there is no answer.
pub fn answers(port: u16) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
    stream.write_all(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
    let mut answer = [0; 64];
    let length = stream.read(&mut answer).ok().filter(|length| *length > 0)?;
    Some(String::from_utf8_lossy(&answer[..length]).into_owned())
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
