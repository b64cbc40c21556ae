//! The client side of the local API. All calls block, and all have a time limit.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use forebay_api::operator::Status;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::protocol::{Reply, Request, reply_not_understood};
use super::registry::{Phase, RegisteredMount};
use super::{Failure, FailureKind, limits};

/// The replies to one request, without heartbeats, until the daemon is done.
#[derive(Debug)]
pub struct ReplyReader {
    lines: BufReader<UnixStream>,
    mountpoint: String,
    /// The version of the program that mounted it.
    version: String,
    over: bool,
}

/// Sends a request to the daemon of a mount.
pub fn call(entry: &RegisteredMount, request: &Request) -> Result<ReplyReader, Failure> {
    let mut stream = connect(entry)?;
    let mountpoint = entry.mountpoint().display().to_string();
    let line = request.to_line().map_err(|e| Failure::new(FailureKind::Other, e.to_string()))?;
    if line.len() as u64 > limits::REQUEST_BYTES {
        return Err(Failure::usage("the list of paths is too long for one request").remedy("split it"));
    }
    stream.set_read_timeout(Some(limits::SILENCE)).map_err(|e| lost(&mountpoint, &e))?;
    stream.set_write_timeout(Some(limits::SILENCE)).map_err(|e| lost(&mountpoint, &e))?;
    stream.write_all(&line).map_err(|e| lost(&mountpoint, &e))?;
    Ok(ReplyReader { lines: BufReader::new(stream), mountpoint, version: entry.state.version.clone(), over: false })
}

/// Asks for the status.
pub fn status(entry: &RegisteredMount) -> Result<Status, Failure> {
    for reply in call(entry, &Request::Status)? {
        if let Reply::Status(status) = reply? {
            return Ok(*status);
        }
    }
    Err(Failure::new(FailureKind::NoDaemon, "the daemon ended its answer before the status"))
}

/// Returns whether the daemon says anything within this time. It sends heartbeats whatever else it does.
pub fn is_alive(entry: &RegisteredMount, within: Duration) -> bool {
    let Ok(mut replies) = call(entry, &Request::Status) else { return false };
    let limited = replies.lines.get_ref().set_read_timeout(Some(within));
    let mut line = Vec::new();
    limited.and_then(|()| replies.lines.read_until(b'\n', &mut line)).is_ok_and(|bytes| bytes > 0)
}

impl Iterator for ReplyReader {
    type Item = Result<Reply, Failure>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.over {
            let mut line = Vec::new();
            let reply = match self.lines.read_until(b'\n', &mut line) {
                Ok(_) if line.ends_with(b"\n") => {
                    Reply::from_line(&line).map_err(|e| reply_not_understood(&self.version, &e))
                }
                Ok(_) => Err(lost(&self.mountpoint, &std::io::Error::from_raw_os_error(libc::ECONNRESET))),
                Err(error) => Err(lost(&self.mountpoint, &error)),
            };
            match reply {
                Ok(Reply::Alive) => {}
                Ok(Reply::End) => self.over = true,
                Ok(Reply::Error(failure)) | Err(failure) => {
                    self.over = true;
                    return Some(Err(failure));
                }
                Ok(reply) => return Some(Ok(reply)),
            }
        }
        None
    }
}

fn lost(mountpoint: &str, error: &std::io::Error) -> Failure {
    let what = match error.kind() {
        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
            format!("the daemon of {mountpoint} has said nothing for {} s", limits::SILENCE.as_secs())
        }
        _ => format!("the daemon of {mountpoint} went away while it answered ({error})"),
    };
    Failure::new(FailureKind::NoDaemon, what)
        .remedy(format!("`forebay status {mountpoint}` shows whether it was started again; then repeat the command"))
}

/// Connects within [`limits::CONNECT`]. Waits for a worker that is being restarted, but not for a dead daemon.
fn connect(entry: &RegisteredMount) -> Result<UnixStream, Failure> {
    const PAUSE: Duration = Duration::from_millis(20);
    let deadline = Instant::now() + limits::CONNECT;
    loop {
        match attempt(entry) {
            Ok(stream) => return Ok(stream),
            Err(Errno::ACCESS | Errno::PERM) => {
                return Err(Failure::new(
                    FailureKind::Denied,
                    format!("the daemon of {} belongs to another user", entry.mountpoint().display()),
                )
                .remedy("run the command as the user who mounted it"));
            }
            Err(_) if entry.is_dead() => return Err(dead(entry)),
            Err(_) if Instant::now() < deadline => std::thread::sleep(PAUSE),
            Err(errno) => return Err(silent(entry, errno)),
        }
    }
}

fn attempt(entry: &RegisteredMount) -> Result<UnixStream, Errno> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(entry.runtime.socket())?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false).map_err(|_| Errno::IO)?;
    Ok(stream)
}

/// Returns the failure for a mount whose daemon is dead.
pub fn dead(entry: &RegisteredMount) -> Failure {
    let mountpoint = entry.mountpoint().display();
    Failure::new(FailureKind::NoDaemon, format!("the daemon of {mountpoint} is not running")).remedy(format!(
        "{}   (changes that are not flushed are safe in the fast pool); or, if it is not needed any more: `forebay umount \
         {mountpoint}`",
        entry.state.command
    ))
}

fn silent(entry: &RegisteredMount, errno: Errno) -> Failure {
    let state = &entry.state;
    let mountpoint = entry.mountpoint().display();
    let why = match state.phase {
        Phase::Failing => {
            format!("its worker keeps dying ({})", state.last_exit.as_deref().unwrap_or("no reason known"))
        }
        Phase::Starting | Phase::Restarting => "its worker is starting".into(),
        Phase::Serving => format!("{errno}"),
    };
    Failure::new(
        FailureKind::NoDaemon,
        format!("the daemon of {mountpoint} does not accept requests since {} s: {why}", limits::CONNECT.as_secs()),
    )
    .remedy(format!("the log says more: {}", entry.runtime.log().display()))
}
