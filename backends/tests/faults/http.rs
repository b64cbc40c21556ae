//! Forwards HTTP requests to an S3 server, and injects faults into some of them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use forebay_backends::conformance::troubled::Trouble;

/// The fault that a request meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrong {
    /// The request arrives late.
    Late,
    /// The connection breaks before the request reaches the server.
    ResetBefore,
    /// The connection breaks after the server has carried out the request.
    ResetAfter,
    /// 503 SlowDown; the request does not reach the server.
    SlowDown,
    /// 500 InternalError, after the server has carried out the request.
    FailedAfter,
    /// The body of the answer ends half-way.
    CutShort,
    /// The answer to a GET has the ETag of another version.
    OtherEtag,
    /// 403 RequestTimeTooSkewed.
    Skewed,
    /// 403 InvalidObjectState, of a GET of an object, or of a PUT that copies one.
    Archived,
    /// The connection breaks before each planned request except the last one. The answer to that one reports an upload
    /// in parts as complete although it is not.
    Pretended,
}

/// Temporary faults.
const PASSING: [Wrong; 7] = [
    Wrong::Late,
    Wrong::ResetBefore,
    Wrong::ResetAfter,
    Wrong::SlowDown,
    Wrong::FailedAfter,
    Wrong::CutShort,
    Wrong::OtherEtag,
];
/// The probability of a fault.
const ODDS: f64 = 0.1;
const LATENESS_MS_MAX: u64 = 150;
/// The probability that a gust begins: a series of requests that all meet a fault, long enough that callers notice it.
const GUST_ODDS: f64 = 0.003;
const GUST_REQUESTS: u32 = 40;

/// An action of another client before an answer is lost, or before a late request arrives.
type Meanwhile = Box<dyn FnOnce() + Send>;

struct PlannedHttpFault {
    method: &'static str,
    wrong: Wrong,
    times: u32,
    meanwhile: Option<Meanwhile>,
}

struct Storm {
    random: ChaCha8Rng,
    /// The number of requests left in a gust.
    gust: u32,
}

impl Storm {
    /// The fault of the next request, if any, and its delay if it is late.
    fn next(&mut self) -> (Option<Wrong>, u64) {
        let (happens, which) = (self.random.random_bool(ODDS), self.random.random_range(0..PASSING.len()));
        let (begins, late_ms) = (self.random.random_bool(GUST_ODDS), self.random.random_range(0..LATENESS_MS_MAX));
        self.gust = if begins { GUST_REQUESTS } else { self.gust.saturating_sub(1) };
        ((happens || self.gust > 0).then_some(PASSING[which]), late_ms)
    }
}

#[derive(Default)]
struct HttpFaultPlan {
    storm: Mutex<Option<Storm>>,
    next: Mutex<Option<PlannedHttpFault>>,
    happened: AtomicU64,
    requests: AtomicU64,
}

impl HttpFaultPlan {
    fn decide(&self, request: &Message) -> (Option<Wrong>, Option<Meanwhile>, u64) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let method = request.head.split(' ').next().unwrap();
        let (mut wrong, late_ms) = self.storm.lock().as_mut().map_or((None, 0), Storm::next);
        let mut meanwhile = None;
        let mut next = self.next.lock();
        // Only an answer with content can have another version's ETag.
        let is_get = method == "GET" && !request.head.contains('?');
        let is_copy = request.head.to_ascii_lowercase().contains("x-amz-copy-source:");
        // A fault that is planned for POST applies to the completion of an upload in parts, not to its start; one of an
        // archived object, planned for PUT, waits for a copy of it.
        let meant = |planned: &&mut PlannedHttpFault| {
            planned.method == method
                && (method != "POST" || request.head.contains("uploadId="))
                && (planned.wrong != Wrong::Archived || method != "PUT" || is_copy)
        };
        if let Some(planned) = next.as_mut().filter(meant) {
            planned.times -= 1;
            let first = planned.wrong == Wrong::Pretended && planned.times > 0;
            wrong = Some(if first { Wrong::ResetBefore } else { planned.wrong });
            meanwhile = planned.meanwhile.take();
            if planned.times == 0 {
                *next = None;
            }
        }
        let wrong = wrong.filter(|wrong| match wrong {
            Wrong::OtherEtag => is_get,
            Wrong::Archived => is_get || is_copy,
            _ => true,
        });
        self.happened.fetch_add(u64::from(wrong.is_some()), Ordering::Relaxed);
        (wrong, meanwhile, late_ms)
    }
}

/// An unreliable connection to a server. It ends when this value is dropped.
pub struct HttpFaultProxy {
    port: u16,
    plan: Arc<HttpFaultPlan>,
    _tasks: JoinSet<()>,
}

impl HttpFaultProxy {
    pub async fn start(server_port: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let plan = Arc::new(HttpFaultPlan::default());
        let mut tasks = JoinSet::new();
        tasks.spawn({
            let plan = Arc::clone(&plan);
            async move {
                let mut connections = JoinSet::new();
                while let Ok((client, _)) = listener.accept().await {
                    let plan = Arc::clone(&plan);
                    // A connection ends with an error.
                    connections.spawn(async move { pass_on(client, server_port, &plan).await.err() });
                }
            }
        });
        Self { port, plan, _tasks: tasks }
    }

    /// The number of requests so far.
    pub fn requests(&self) -> u64 {
        self.plan.requests.load(Ordering::Relaxed)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Injects a fault into the next `times` requests of a method.
    pub fn next(&self, method: &'static str, wrong: Wrong, times: u32) {
        *self.plan.next.lock() = Some(PlannedHttpFault { method, wrong, times, meanwhile: None });
    }

    /// Injects a fault into the next request. Meanwhile another client acts: before the client learns of the fault
    /// or, for a late request, before the server receives it.
    pub fn next_while(&self, method: &'static str, wrong: Wrong, meanwhile: impl FnOnce() + Send + 'static) {
        *self.plan.next.lock() =
            Some(PlannedHttpFault { method, wrong, times: 1, meanwhile: Some(Box::new(meanwhile)) });
    }
}

impl Trouble for HttpFaultProxy {
    fn begin(&self, seed: u64) {
        *self.plan.storm.lock() = Some(Storm { random: ChaCha8Rng::seed_from_u64(seed), gust: 0 });
    }

    fn end(&self) {
        *self.plan.storm.lock() = None;
    }

    fn happened(&self) -> u64 {
        self.plan.happened.load(Ordering::Relaxed)
    }
}

async fn pass_on(client: TcpStream, server_port: u16, plan: &HttpFaultPlan) -> io::Result<()> {
    let mut client = Peer::new(client);
    let mut server: Option<Peer> = None;
    loop {
        let request = client.message(true).await?;
        let (wrong, mut meanwhile, late_ms) = plan.decide(&request);
        match wrong {
            Some(Wrong::ResetBefore) => return Ok(()),
            Some(Wrong::SlowDown) => {
                client.refuse("503 Service Unavailable", "SlowDown", "Please reduce your request rate.").await?;
                continue;
            }
            Some(Wrong::Skewed) => {
                let message = "The difference between the request time and the server's time is too large.";
                client.refuse("403 Forbidden", "RequestTimeTooSkewed", message).await?;
                continue;
            }
            Some(Wrong::Archived) => {
                client.refuse("403 Forbidden", "InvalidObjectState", "The object is archived.").await?;
                continue;
            }
            Some(Wrong::Pretended) => {
                let body = "<CompleteMultipartUploadResult><ETag>\"0123-2\"</ETag></CompleteMultipartUploadResult>";
                let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
                client.stream.write_all(answer.as_bytes()).await?;
                continue;
            }
            Some(Wrong::Late) => {
                tokio::time::sleep(Duration::from_millis(late_ms)).await;
                if let Some(meanwhile) = meanwhile.take() {
                    tokio::task::block_in_place(meanwhile);
                }
            }
            _ => {}
        }
        if server.is_none() {
            server = Some(Peer::new(TcpStream::connect(("127.0.0.1", server_port)).await?));
        }
        let Some(peer) = server.as_mut() else { return Ok(()) };
        peer.stream.write_all(request.head.as_bytes()).await?;
        peer.stream.write_all(&request.body).await?;
        let mut answer = peer.message(!request.head.starts_with("HEAD ")).await?;
        if let Some(meanwhile) = meanwhile {
            tokio::task::block_in_place(meanwhile);
        }
        match wrong {
            Some(Wrong::ResetAfter) => return Ok(()),
            Some(Wrong::FailedAfter) => {
                client
                    .refuse("500 Internal Server Error", "InternalError", "We encountered an internal error.")
                    .await?;
                continue;
            }
            Some(Wrong::CutShort) => {
                client.stream.write_all(answer.head.as_bytes()).await?;
                client.stream.write_all(&answer.body[..answer.body.len() / 2]).await?;
                return Ok(());
            }
            Some(Wrong::OtherEtag) => answer.change_etag(),
            _ => {}
        }
        client.stream.write_all(answer.head.as_bytes()).await?;
        client.stream.write_all(&answer.body).await?;
        if answer.value("connection").is_some_and(|value| value.eq_ignore_ascii_case("close")) {
            return Ok(());
        }
    }
}

/// A request or an answer.
struct Message {
    /// Including the empty line at its end.
    head: String,
    /// As sent, including the chunk headers.
    body: Vec<u8>,
}

impl Message {
    fn value(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.split("\r\n").filter_map(|line| line.split_once(':'));
        lines.find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    }

    fn change_etag(&mut self) {
        let Some(etag) = self.value("etag").map(str::to_owned) else { return };
        self.head = self.head.replace(&etag, "\"0123456789abcdef0123456789abcdef\"");
    }
}

/// One end of the connection, and the bytes that it sent in advance.
struct Peer {
    stream: TcpStream,
    ahead: Vec<u8>,
}

impl Peer {
    fn new(stream: TcpStream) -> Self {
        // Small messages must not wait for each other.
        let _ = stream.set_nodelay(true);
        Self { stream, ahead: Vec::new() }
    }

    async fn more(&mut self) -> io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        match self.stream.read(&mut buffer).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            length => {
                self.ahead.extend_from_slice(&buffer[..length]);
                Ok(())
            }
        }
    }

    async fn until(&mut self, end: &[u8]) -> io::Result<Vec<u8>> {
        loop {
            if let Some(at) = self.ahead.windows(end.len()).position(|window| window == end) {
                return Ok(self.ahead.drain(..at + end.len()).collect());
            }
            self.more().await?;
        }
    }

    async fn exactly(&mut self, length: usize) -> io::Result<Vec<u8>> {
        while self.ahead.len() < length {
            self.more().await?;
        }
        Ok(self.ahead.drain(..length).collect())
    }

    async fn message(&mut self, with_body: bool) -> io::Result<Message> {
        let head = String::from_utf8_lossy(&self.until(b"\r\n\r\n").await?).into_owned();
        let mut message = Message { head, body: Vec::new() };
        if !with_body {
            return Ok(message);
        }
        if let Some(length) = message.value("content-length").and_then(|value| value.parse().ok()) {
            message.body = self.exactly(length).await?;
        } else if message.value("transfer-encoding").is_some() {
            loop {
                let line = self.until(b"\r\n").await?;
                let length = std::str::from_utf8(&line)
                    .ok()
                    .and_then(|line| usize::from_str_radix(line.trim().split(';').next().unwrap_or_default(), 16).ok());
                let length = length.ok_or(io::ErrorKind::InvalidData)?;
                message.body.extend(line);
                message.body.extend(self.exactly(length + 2).await?);
                if length == 0 {
                    break;
                }
            }
        }
        Ok(message)
    }

    async fn refuse(&mut self, status: &str, code: &str, message: &str) -> io::Result<()> {
        let body = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>{message}</Message></Error>");
        let length = body.len();
        let answer =
            format!("HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {length}\r\n\r\n{body}");
        self.stream.write_all(answer.as_bytes()).await
    }
}
