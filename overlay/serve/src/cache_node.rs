//! The cache node: content, who may read it, and how often; health; purge and prefetch.

mod management;
mod restricted;

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwap;
use async_trait::async_trait;
use forebay_engine::Overlay;
use futures::FutureExt;
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use http::header::{self, HeaderValue};
use http::request::Parts;
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri, Version};
use tokio_util::sync::CancellationToken;

use self::restricted::restrict;
use crate::access::{AccessRules, Verdict, has_signature};
use crate::access_log::{AccessLog, LogEntry};
use crate::body::ReplyBody;
use crate::cache_status::{self, ResponseCounters};
use crate::content::{ContentOptions, GetRequest, METHODS, PoolContent, RequestPath, parse, reply};
use crate::listener::{Door, HttpClient, RequestContent};
use crate::proxy::{ProxyOptions, ReverseProxy};
use crate::transport::Windows;

/// How often idle files are closed, and clients forgotten that asked nothing for a while.
const TIDY_EVERY: Duration = Duration::from_secs(2);
/// Requests of a client at once are no burst up to the number of this many seconds.
const BURST_SECONDS: u32 = 2;
const HEALTH: &str = "/healthz";
const READINESS: &str = "/readyz";
/// Where management begins. No file of a pool has this name.
const MANAGEMENT: &str = "/.forebay/";

/// The most bytes of content of a request that is forwarded.
const FORWARDED_BYTES: usize = 8 << 20;

/// What a cache node serves.
pub enum ServedContent {
    /// The pool's files.
    Pool(ContentOptions),
    /// The responses of a web server.
    Origin(ProxyOptions),
}

/// How a cache node serves.
pub struct CacheNodeOptions {
    pub content: ServedContent,
    pub access: AccessRules,
    /// Requests per second of one client.
    pub rate: Option<NonZeroU32>,
    pub log: Option<AccessLog>,
    pub counters: Arc<ResponseCounters>,
}

/// A request that may be answered.
struct AdmittedRequest {
    /// As a path of files. `None`: it need not be one.
    path: Option<RequestPath>,
    /// The name of the client's token.
    user: Option<String>,
    /// How long the client may read it, if that ends.
    left: Option<Duration>,
}

/// A request that counts for how often its client asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CountedRequest {
    Within,
    /// `wait`: until the client may ask again.
    TooMany {
        wait: Duration,
    },
}

enum NodeContent {
    Pool(PoolContent),
    Origin(ReverseProxy),
}

/// A node that serves a pool, or another web server's responses, over HTTP.
pub struct CacheNode {
    overlay: Overlay,
    content: NodeContent,
    access: ArcSwap<AccessRules>,
    rates: Option<DefaultKeyedRateLimiter<IpAddr>>,
    log: Option<AccessLog>,
    counters: Arc<ResponseCounters>,
    /// The node ends: it is not ready for further requests.
    ending: CancellationToken,
}

impl CacheNode {
    /// Needs a tokio runtime. `ending`: once cancelled, the node says that it is not ready.
    ///
    /// # Errors
    /// Those of [`ReverseProxy::new`].
    pub fn new(overlay: Overlay, options: CacheNodeOptions, ending: CancellationToken) -> Result<Arc<Self>, String> {
        let quota = |rate: NonZeroU32| {
            Quota::per_second(rate).allow_burst(rate.saturating_mul(NonZeroU32::MIN.saturating_add(BURST_SECONDS - 1)))
        };
        let node = Arc::new(Self {
            content: match options.content {
                ServedContent::Pool(options) => NodeContent::Pool(PoolContent::new(overlay.clone(), options)),
                ServedContent::Origin(options) => NodeContent::Origin(ReverseProxy::new(overlay.clone(), options)?),
            },
            overlay,
            access: ArcSwap::from_pointee(options.access),
            rates: options.rate.map(|rate| RateLimiter::keyed(quota(rate))),
            log: options.log,
            counters: options.counters,
            ending,
        });
        let tidied = Arc::downgrade(&node);
        let task = async move {
            loop {
                tokio::time::sleep(TIDY_EVERY).await;
                let Some(node) = tidied.upgrade() else { return };
                match &node.content {
                    NodeContent::Pool(content) => content.tidy(),
                    NodeContent::Origin(proxy) => proxy.tidy(),
                }
                if let Some(rates) = &node.rates {
                    rates.retain_recent();
                }
            }
        };
        tokio::spawn(task.boxed());
        Ok(node)
    }

    /// Whether requests with this method are forwarded to an origin, with their content.
    fn forwards(&self, method: &Method) -> bool {
        let is_change = !matches!(*method, Method::GET | Method::HEAD | Method::TRACE | Method::CONNECT);
        is_change && matches!(&self.content, NodeContent::Origin(proxy) if proxy.changes)
    }

    /// Replaces who may read, and opens the log again by its name.
    pub fn reload(&self, access: AccessRules) {
        self.access.store(Arc::new(access));
        if let Some(log) = &self.log {
            log.reopen();
        }
    }

    async fn respond(
        &self,
        request: &Request<RequestContent>,
        client: &HttpClient,
        user: &mut Option<String>,
    ) -> Response<ReplyBody> {
        let uri = request.uri();
        let path = uri.path();
        if let Some(refused) = request.body().refused() {
            return self.refuse_content(refused, request);
        }
        match path {
            HEALTH => return reply::text(StatusCode::OK, "alive"),
            READINESS => return self.ready(),
            // RFC 9110: about the server as a whole.
            "*" if request.method() == Method::OPTIONS => return options(),
            _ => {}
        }
        // A request that may have content was counted before that was read.
        let rate = request.extensions().get().copied().unwrap_or_else(|| self.count(client));
        if let CountedRequest::TooMany { wait } = rate {
            return too_many(wait);
        }
        if let Some(command) = path.strip_prefix(MANAGEMENT) {
            return self.manage(command, request, client, user).await;
        }
        let forwards = self.forwards(request.method());
        if request.method() == Method::OPTIONS && !forwards {
            return options();
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD) && !forwards {
            let mut response = reply::text(StatusCode::METHOD_NOT_ALLOWED, "this server is read-only");
            response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(METHODS));
            return response;
        }
        let access = self.access.load_full();
        match self.admit(&access, request.method(), uri, request.headers()) {
            Ok(admitted) => {
                let left = admitted.left;
                user.clone_from(&admitted.user);
                let mut response = self.answer_admitted(request, client, admitted, access.is_open()).await;
                if !access.is_open() {
                    restrict(&mut response, left);
                }
                response
            }
            Err(refused) => *refused,
        }
    }

    /// Counts a request of a client.
    fn count(&self, client: &HttpClient) -> CountedRequest {
        match self.rates.as_ref().map(|rates| rates.check_key(&client.counted_address())) {
            Some(Err(until)) => {
                let now = governor::clock::Clock::now(&governor::clock::DefaultClock::default());
                CountedRequest::TooMany { wait: until.wait_time_from(now) }
            }
            _ => CountedRequest::Within,
        }
    }

    /// Returns the last response of a connection whose request has content that is not taken. If the client may not have the
    /// request answered, the response says why. One that asks too often is not told whether its token is right.
    fn refuse_content(&self, refused: Response<ReplyBody>, request: &Request<RequestContent>) -> Response<ReplyBody> {
        if !self.forwards(request.method()) || is_of_node(request.uri().path()) {
            return refused;
        }
        let mut response = match request.extensions().get() {
            Some(CountedRequest::TooMany { wait }) => too_many(*wait),
            _ => match self.admit(&self.access.load(), request.method(), request.uri(), request.headers()) {
                Ok(_) => return refused,
                Err(response) => *response,
            },
        };
        let ends = refused.headers().get(header::CONNECTION).cloned();
        response.headers_mut().extend(ends.map(|ends| (header::CONNECTION, ends)));
        response
    }

    /// Answers from the content. `open`: every client may read it.
    async fn answer_admitted(
        &self,
        request: &Request<RequestContent>,
        client: &HttpClient,
        admitted: AdmittedRequest,
        open: bool,
    ) -> Response<ReplyBody> {
        let uri = request.uri();
        match (&self.content, admitted.path) {
            (NodeContent::Pool(content), Some(path)) => send(content, path, request, client).await,
            (NodeContent::Pool(_), None) => reply::text(StatusCode::BAD_REQUEST, "the path is none of a file"),
            (NodeContent::Origin(proxy), _) => {
                let target = match open {
                    true => uri.path_and_query().map_or(uri.path(), |target| target.as_str()).to_owned(),
                    false => without_ours(uri),
                };
                proxy.answer(request, client, &target, !open).await
            }
        }
    }

    /// Decides whether a client may have what it asks for. For a change, it needs a token that may manage: a signed URL is
    /// for reading alone.
    fn admit(
        &self,
        access: &AccessRules,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<AdmittedRequest, Box<Response<ReplyBody>>> {
        let is_origin = matches!(self.content, NodeContent::Origin(_));
        if is_origin && access.is_open() {
            // A path of an origin may be one that no file has: it matters only if access depends on it.
            return Ok(AdmittedRequest { path: None, user: None, left: None });
        }
        let parsed = parse(uri.path()).map_err(|why| Box::new(reply::text(StatusCode::BAD_REQUEST, why)))?;
        let verdict = match self.forwards(method) && method != Method::OPTIONS {
            true => access.may_manage(headers, &parsed.path),
            // Of a file, the query does not say what is read.
            false => access.may_read(headers, &parsed.path, (uri.query(), is_origin), SystemTime::now()),
        };
        match verdict {
            Verdict::Allowed { name, left } => Ok(AdmittedRequest { path: Some(parsed), user: name, left }),
            refused => Err(Box::new(unallowed(&refused))),
        }
    }

    /// Ready: requests can be answered from the fast pool, whether the pool answers or not.
    fn ready(&self) -> Response<ReplyBody> {
        match self.ending.is_cancelled() {
            true => reply::text(StatusCode::SERVICE_UNAVAILABLE, "ending"),
            false => reply::text(StatusCode::OK, "ready"),
        }
    }
}

async fn send(
    content: &PoolContent,
    parsed: RequestPath,
    request: &Request<RequestContent>,
    client: &HttpClient,
) -> Response<ReplyBody> {
    let is_http1 = matches!(request.version(), Version::HTTP_10 | Version::HTTP_11);
    let windows: Option<&Windows> = client.windows.as_ref().filter(|_| is_http1);
    let wish = GetRequest {
        method: request.method(),
        path: request.uri().path(),
        query: request.uri().query(),
        headers: request.headers(),
        windows,
        budget: &client.budget,
    };
    content.answer(parsed, wish).await
}

/// Whether the node itself answers for a path. Such requests have no content.
fn is_of_node(path: &str) -> bool {
    matches!(path, HEALTH | READINESS | "*") || path.starts_with(MANAGEMENT)
}

/// `wait`: until the client may ask again.
fn too_many(wait: Duration) -> Response<ReplyBody> {
    let mut response = reply::text(StatusCode::TOO_MANY_REQUESTS, "too many requests");
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(wait.as_secs() + 1));
    response
}

fn options() -> Response<ReplyBody> {
    let mut response = Response::new(ReplyBody::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(METHODS));
    response
}

fn unallowed(verdict: &Verdict) -> Response<ReplyBody> {
    match verdict {
        Verdict::Refused(why) => reply::text(StatusCode::FORBIDDEN, why),
        _ => {
            let mut response = reply::text(StatusCode::UNAUTHORIZED, "a bearer token or a signed URL is needed");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            response
        }
    }
}

#[async_trait]
impl Door for CacheNode {
    fn content_max(&self, head: &mut Parts, client: &HttpClient) -> usize {
        if !self.forwards(&head.method) || is_of_node(head.uri.path()) {
            return 0;
        }
        // Whether content is read tells a client whether its token is right.
        let rate = self.count(client);
        head.extensions.insert(rate);
        let is_within = rate == CountedRequest::Within;
        match is_within && self.admit(&self.access.load(), &head.method, &head.uri, &head.headers).is_ok() {
            true => FORWARDED_BYTES,
            false => 0,
        }
    }

    async fn answer(&self, request: Request<RequestContent>, client: HttpClient) -> Response<ReplyBody> {
        let begun = Instant::now();
        let mut user = None;
        let response = self.respond(&request, &client, &mut user).await;
        let (counters, kind) = (self.counters.clone(), self.counters.count(&response));
        let Some(log) = &self.log else {
            return response.map(|body| body.counted(move |bytes| counters.count_bytes(kind, bytes)));
        };
        let text = |name| {
            request.headers().get(name).map(|v: &HeaderValue| String::from_utf8_lossy(v.as_bytes()).into_owned())
        };
        let entry = LogEntry {
            time: SystemTime::now(),
            client: client.address.ip(),
            user,
            method: request.method().to_string(),
            target: unsigned(request.uri()),
            protocol: protocol(request.version()),
            status: response.status().as_u16(),
            bytes: 0,
            duration: Duration::ZERO,
            referer: text(header::REFERER).filter(|text| !has_signature(text.as_bytes())),
            agent: text(header::USER_AGENT),
            cache_status: cache_status::told(&response).map(str::to_owned),
        };
        let log = log.clone();
        response.map(|body| {
            body.counted(move |bytes| {
                counters.count_bytes(kind, bytes);
                log.note(LogEntry { bytes, duration: begun.elapsed(), ..entry });
            })
        })
    }
}

fn protocol(version: Version) -> &'static str {
    match version {
        Version::HTTP_10 => "HTTP/1.0",
        Version::HTTP_2 => "HTTP/2.0",
        _ => "HTTP/1.1",
    }
}

/// Returns the target of a request, without its signature.
fn unsigned(uri: &http::Uri) -> String {
    without(uri, &["signature="])
}

/// Returns the target of a request, without what is for this node alone: the signature, and the time that it signs.
fn without_ours(uri: &http::Uri) -> String {
    let signed = uri.query().is_some_and(|query| query.split('&').any(|part| part.starts_with("signature=")));
    if signed { without(uri, &["signature=", "expires="]) } else { without(uri, &[]) }
}

fn without(uri: &http::Uri, names: &[&str]) -> String {
    let Some(query) = uri.query() else { return uri.path().to_owned() };
    let parts: Vec<&str> = query.split('&').filter(|part| !names.iter().any(|name| part.starts_with(name))).collect();
    if parts.is_empty() { uri.path().to_owned() } else { format!("{}?{}", uri.path(), parts.join("&")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_not_logged() {
        let of = |text: &str| unsigned(&text.parse().unwrap());
        assert_eq!(of("/a?expires=1&signature=abc&x=y"), "/a?expires=1&x=y");
        assert_eq!(of("/a?signature=abc"), "/a");
        let forwarded = |text: &str| without_ours(&text.parse().unwrap());
        assert_eq!(forwarded("/a?expires=1&signature=abc&x=y"), "/a?x=y");
        assert_eq!(forwarded("/a?expires=1&x=y"), "/a?expires=1&x=y");
    }
}
