//! A small HTTP client, which sends what it is told to.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// How long an answer may take.
const LIMIT: Duration = Duration::from_secs(120);

/// An answer with all of its body.
#[derive(Debug)]
pub struct HttpAnswer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

/// Sends `GET` for a path. `head` has further lines, each with its end.
///
/// # Errors
/// Those of the connection; `InvalidData` if the answer is none.
pub fn get(address: SocketAddr, path: &str, head: &str) -> io::Result<HttpAnswer> {
    let host = if head.contains("Host:") { String::new() } else { format!("Host: {address}\r\n") };
    exchange(address, &format!("GET {path} HTTP/1.1\r\n{host}{head}Connection: close\r\n\r\n"))
}

/// Sends a request, and reads the answer to its end.
///
/// # Errors
/// As [`get`].
pub fn exchange(address: SocketAddr, request: &str) -> io::Result<HttpAnswer> {
    let mut stream = TcpStream::connect_timeout(&address, LIMIT)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(request.as_bytes())?;
    let (mut bytes, mut piece) = (Vec::new(), [0; 64 << 10]);
    // Some servers keep the connection open although they were asked to close it.
    while !is_whole(&bytes) {
        match stream.read(&mut piece)? {
            0 => break,
            count => bytes.extend_from_slice(&piece[..count]),
        }
    }
    let answer = String::from_utf8(bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
    let bad = || io::Error::new(io::ErrorKind::InvalidData, answer.clone());
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(bad)?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(bad)?;
    Ok(HttpAnswer { status, head: head.to_ascii_lowercase(), body: body.to_owned() })
}

/// Whether an answer has as many bytes as its head says.
fn is_whole(answer: &[u8]) -> bool {
    let text = String::from_utf8_lossy(answer);
    let Some((head, _)) = text.split_once("\r\n\r\n") else { return false };
    let length = head.lines().filter_map(|line| line.split_once(':')).find_map(|(name, value)| {
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok()).flatten()
    });
    length.is_some_and(|length| answer.len() >= head.len() + 4 + length)
}

/// Reads from the start of an endless answer until `enough` is true of the bytes so far, and closes the connection.
///
/// # Errors
/// As [`get`].
pub fn get_until(address: SocketAddr, path: &str, enough: impl Fn(&str) -> bool) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, LIMIT)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").as_bytes())?;
    let (mut bytes, mut piece) = (Vec::new(), [0; 64 << 10]);
    loop {
        match stream.read(&mut piece)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => bytes.extend_from_slice(&piece[..count]),
        }
        let text = String::from_utf8_lossy(&bytes);
        if enough(&text) {
            return Ok(text.into_owned());
        }
    }
}

/// Returns a metric that is served at a port of the loopback device, or 0 if there is none of this name.
pub fn metric(port: u16, name: &str) -> u64 {
    let scraped = get(([127, 0, 0, 1], port).into(), "/metrics", "").expect("metrics are served").body;
    let value = scraped.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.map_or(0, |value| value.parse().expect("a whole number"))
}
