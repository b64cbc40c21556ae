//! Accepts connections, answers their requests through a [`Door`], and ends in good order.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::pin::pin;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::FutureExt;
use futures::future::BoxFuture;
use http::header::{CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING};
use http::request::Parts;
use http::{HeaderValue, Request, Response, StatusCode, Version};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::rt::{Read, Write};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_util::sync::CancellationToken;

use super::body::ReplyBody;
use super::content::reply::text;
use super::content_turns::ContentTurns;
use super::http2_activity::{Http2Activity, Http2End, Http2Patience};
use super::send_budget::ResponseBudget;
use super::transport::{Patient, Plain, Windows};

/// The pause after a connection could not be accepted: probably the process is out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Content of a request that is read before the request is refused, in bytes.
const CONTENT_BYTES: usize = 64 << 10;
/// Content of a request for which it needs no turn, in bytes: many small requests may wait for a slow origin.
const SMALL_CONTENT_BYTES: usize = 16 << 10;
/// Of all listeners of this process.
static CONTENT_TURNS: LazyLock<Arc<ContentTurns>> = LazyLock::new(ContentTurns::new);
/// Network prefix that stands for one IPv6 client: one user has that many addresses.
const CLIENT_PREFIX_V6: u32 = 64;
/// Requests of one HTTP/2 connection at the same time.
const STREAMS: u32 = 100;
/// What a client may send of the content of one HTTP/2 request before it is read, in bytes. Requests that wait for a turn leave
/// theirs unread. The window of the connection has room for all of them, so that they do not stop a request that has a turn.
const STREAM_WINDOW_BYTES: u32 = 64 << 10;

/// What answers requests.
#[async_trait]
pub trait Door: Send + Sync + 'static {
    async fn answer(&self, request: Request<RequestContent>, client: HttpClient) -> Response<ReplyBody>;

    /// The most bytes of content that a request with this head may have. More than none only for a client that may have its
    /// request answered: content waits in memory. What is learned about the request may go into the extensions of its head.
    fn content_max(&self, _head: &mut Parts, _client: &HttpClient) -> usize {
        0
    }
}

/// The content of a request. A request for a file has none, and a proxy before this server may see another request in
/// content (RFC 9110, section 9.3.1).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestContent {
    None,
    Some(Bytes),
    /// There is more than the door takes.
    TooLong,
    /// The end of the request does not come.
    Late,
}

impl RequestContent {
    /// Returns the last response of a connection, if the request has content that is not taken.
    pub fn refused(&self) -> Option<Response<ReplyBody>> {
        let mut response = match self {
            Self::None | Self::Some(_) => return None,
            Self::TooLong => text(StatusCode::BAD_REQUEST, "a request here has no content, or less of it"),
            Self::Late => text(StatusCode::REQUEST_TIMEOUT, "the end of the request does not come"),
        };
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        Some(response)
    }
}

/// Whose request it is.
#[derive(Clone)]
pub struct HttpClient {
    pub address: SocketAddr,
    /// Where mapped bodies can be lent to; `None` with TLS. Only HTTP/1.x responses may be lent.
    pub windows: Option<Windows>,
    /// The room for pieces of the response.
    pub(crate) budget: ResponseBudget,
}

impl HttpClient {
    /// Returns the address by which limits of one client count.
    pub fn counted_address(&self) -> IpAddr {
        one_client(self.address.ip())
    }
}

/// Returns the address that stands for one client.
fn one_client(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let mask = u128::MAX << (128 - CLIENT_PREFIX_V6);
            IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & mask))
        }
        v4 => v4,
    }
}

/// Bytes that a listener takes as the head of a request, if it is told nothing else.
pub const REQUEST_HEAD_BYTES: usize = 32 << 10;

/// What one listener allows.
#[derive(Debug, Clone)]
pub struct ListenerLimits {
    /// Connections at the same time. Further ones wait in the kernel's queue.
    pub connections: usize,
    /// How long a client may take for the head of a request, for its TLS handshake, and between two requests.
    pub head: Duration,
    /// Bytes of the head of a request.
    pub head_bytes: usize,
    /// How long a client may take nothing of a response.
    pub stalled: Duration,
    /// How long requests may take to their end when the listener stops.
    pub ending: Duration,
}

impl Default for ListenerLimits {
    fn default() -> Self {
        Self {
            connections: 16_384,
            head: Duration::from_secs(30),
            head_bytes: REQUEST_HEAD_BYTES,
            stalled: Duration::from_secs(60),
            ending: Duration::from_secs(30),
        }
    }
}

/// A socket that clients connect to.
pub struct Listener {
    socket: TcpListener,
    tls: Option<TlsAcceptor>,
    limits: ListenerLimits,
}

impl Listener {
    /// Takes a bound socket. Needs a tokio runtime.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn new(
        socket: std::net::TcpListener,
        tls: Option<Arc<ServerConfig>>,
        limits: ListenerLimits,
    ) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { socket: TcpListener::from_std(socket)?, tls: tls.map(TlsAcceptor::from), limits })
    }

    /// Returns the address that clients connect to.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Answers until `stop`. Then no connection is accepted, the requests under way end within the limit, and the rest
    /// is cut off.
    pub fn serve(self, door: Arc<dyn Door>, stop: CancellationToken) -> BoxFuture<'static, ()> {
        // Boxed here, so that HTTP is compiled in this crate and not in each caller.
        Box::pin(self.answer_until(door, stop))
    }

    async fn answer_until(self, door: Arc<dyn Door>, stop: CancellationToken) {
        let graceful = GracefulShutdown::new();
        let slots = Arc::new(Semaphore::new(self.limits.connections));
        let cut = CancellationToken::new();
        let _cut_off = cut.clone().drop_guard();
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => break,
                accepted = accept(&self.socket, &slots) => accepted,
            };
            match accepted {
                Ok((stream, address, slot)) => {
                    let (door, tls, limits) = (door.clone(), self.tls.clone(), self.limits.clone());
                    let (watcher, cut, stop) = (graceful.watcher(), cut.clone(), stop.clone());
                    let task = async move {
                        // The shutdown waits for it.
                        let _slot = (slot, watcher);
                        tokio::select! {
                            () = cut.cancelled() => {}
                            () = connection(stream, address, tls, &limits, stop, door) => {}
                        }
                    };
                    tokio::spawn(task.boxed());
                }
                Err(error) => {
                    tracing::warn!("cannot accept a connection: {error}");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        drop(self.socket);
        if tokio::time::timeout(self.limits.ending, graceful.shutdown()).await.is_err() {
            tracing::warn!("requests that did not end within {} s are cut off", self.limits.ending.as_secs());
        }
    }
}

async fn accept(
    socket: &TcpListener,
    slots: &Arc<Semaphore>,
) -> io::Result<(TcpStream, SocketAddr, OwnedSemaphorePermit)> {
    let slot = slots.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (stream, address) = socket.accept().await?;
    Ok((stream, address, slot))
}

async fn connection(
    stream: TcpStream,
    address: SocketAddr,
    tls: Option<TlsAcceptor>,
    limits: &ListenerLimits,
    stop: CancellationToken,
    door: Arc<dyn Door>,
) {
    // Without it, the last packet of a response may wait for the client's delayed acknowledgement.
    let _ = stream.set_nodelay(true);
    let ended = match tls {
        None => {
            let windows = Windows::default();
            let client = HttpClient { address, windows: Some(windows.clone()), budget: ResponseBudget::default() };
            exchange(Plain::new(stream, windows), Spoken::Any, client, limits, stop, door).await
        }
        Some(tls) => match tokio::time::timeout(limits.head, tls.accept(stream)).await {
            Ok(Ok(stream)) => {
                let client = HttpClient { address, windows: None, budget: ResponseBudget::default() };
                let spoken = match stream.get_ref().1.alpn_protocol() {
                    Some(b"h2") => Spoken::Http2,
                    _ => Spoken::Http1,
                };
                exchange(TokioIo::new(stream), spoken, client, limits, stop, door).await
            }
            Ok(Err(error)) => Err(format!("TLS: {error}")),
            Err(_) => Err("TLS: no handshake in time".to_owned()),
        },
    };
    if let Err(why) = ended {
        tracing::debug!(%address, "a connection ended: {why}");
    }
}

/// The version of HTTP on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spoken {
    Http1,
    Http2,
    /// The first bytes tell.
    Any,
}

async fn exchange(
    io: impl Read + Write + Unpin + Send + 'static,
    spoken: Spoken,
    client: HttpClient,
    limits: &ListenerLimits,
    stop: CancellationToken,
    door: Arc<dyn Door>,
) -> Result<(), String> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .max_buf_size(limits.head_bytes)
        .writev(true)
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(STREAMS * STREAM_WINDOW_BYTES)
        .max_header_list_size(u32::try_from(limits.head_bytes).unwrap_or(u32::MAX))
        .keep_alive_interval(limits.head)
        .keep_alive_timeout(limits.head);
    builder = match spoken {
        Spoken::Http1 => builder.http1_only(),
        Spoken::Http2 => builder.http2_only(),
        Spoken::Any => builder,
    };
    let (within, activity) = (limits.head, Http2Activity::new());
    let watched = activity.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let (door, mut client) = (door.clone(), client.clone());
        let open = (request.version() == Version::HTTP_2).then(|| watched.open());
        if let Some(open) = &open {
            client.budget = open.budget();
        }
        async move {
            let (mut head, content) = request.into_parts();
            let most = door.content_max(&mut head, &client);
            let reading = read_content(&head, content, most, client.counted_address());
            let content = tokio::time::timeout(within, reading).await.unwrap_or(RequestContent::Late);
            let request = Request::from_parts(head, content);
            let response = door.answer(request, client).await;
            Ok::<_, Infallible>(match open {
                Some(open) => response.map(|body| body.watched(open)),
                None => response,
            })
        }
    });
    let io = Patient::new(io, (limits.head, limits.stalled), activity.clone(), spoken == Spoken::Http2);
    let mut connection = pin!(builder.serve_connection(io, service).into_owned());
    let patience = Http2Patience { idle: limits.head, stalled: limits.stalled };
    let mut over = pin!(activity.until_over(patience));
    // Once it is to end, nothing more is accepted, and the client is told.
    let mut ends_by = None;
    loop {
        tokio::select! {
            ended = connection.as_mut() => return ended.map_err(|error| error.to_string()),
            () = stop.cancelled(), if ends_by.is_none() => ends_by = Some(Instant::now() + limits.ending),
            end = over.as_mut(), if ends_by.is_none() => match end {
                Http2End::Idle => ends_by = Some(Instant::now() + limits.stalled),
                Http2End::Stalled => return Err("the client takes nothing".to_owned()),
            },
            () = sleep_until(ends_by) => return Err("the client does not end".to_owned()),
        }
        connection.as_mut().graceful_shutdown();
    }
}

/// Waits until this moment; for ever if there is none.
async fn sleep_until(moment: Option<Instant>) {
    match moment {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Reads the content of a request, at most so many bytes. If it is more than a little, what is returned has a turn of the
/// client, as long as it is in memory.
async fn read_content(head: &Parts, mut content: Incoming, most: usize, client: IpAddr) -> RequestContent {
    if head.version != Version::HTTP_2 {
        let mut lengths = head.headers.get_all(CONTENT_LENGTH).iter();
        let any = head.headers.contains_key(TRANSFER_ENCODING) || lengths.any(|length| length != "0");
        match any {
            false => return RequestContent::None,
            true if most == 0 => return RequestContent::TooLong,
            true => {}
        }
    }
    let (mut bytes, mut turn) = (BytesMut::new(), None);
    loop {
        // A client that sends next to nothing keeps no other one waiting.
        if most > 0 && turn.is_none() && bytes.len() > SMALL_CONTENT_BYTES {
            turn = Some(CONTENT_TURNS.turn(client).await);
        }
        match content.frame().await {
            None => break,
            Some(Ok(frame)) => bytes.extend_from_slice(frame.data_ref().map_or(&[], |data| data)),
            // What is wrong with a stream may come with its end. A stream with an error has ended, and nobody gets the
            // answer.
            Some(Err(_)) if most == 0 => break,
            Some(Err(_)) => return RequestContent::Late,
        }
        if bytes.len() > most.max(CONTENT_BYTES) {
            break;
        }
    }
    match bytes.len() {
        0 => RequestContent::None,
        length if length > most => RequestContent::TooLong,
        _ => RequestContent::Some(match turn {
            Some(turn) => turn.hold(bytes.freeze()),
            None => bytes.freeze(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_client_is_an_address_or_a_network_of_its_own() {
        let of = |text: &str| one_client(text.parse().unwrap()).to_string();
        assert_eq!(of("::ffff:10.0.0.1"), "10.0.0.1");
        assert_eq!(of("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
    }
}
