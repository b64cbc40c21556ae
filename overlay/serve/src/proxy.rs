//! A reverse proxy: the responses of one web server, kept on the fast pool as RFC 9111 allows.
//!
//! | module | does |
//! |---|---|
//! | `directives`, `freshness` | what may be kept, and how long |
//! | `head` | the head of a response as it is kept |
//! | `store` | responses on the fast pool |
//! | `origin` | requests to the web server |
//! | `flight` | one question to the web server for all clients that wait for the answer |

mod directives;
mod flight;
mod freshness;
mod head;
mod origin;
mod store;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use forebay_engine::{Overlay, ServedFile};
use headers::{ETag, HeaderMapExt};
use http::header::{self, HeaderMap, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use self::directives::Directives;
use self::flight::{BodyEnd, Coming, Flight, Question, Stage, outdated_by};
pub use self::freshness::FreshnessOptions;
use self::freshness::Use;
use self::head::{Head, end_to_end};
pub use self::origin::check_origin;
use self::origin::{NoAnswer, Origin, OriginRequest, OriginResponse};
use self::store::{Place, ResponseStore, Stored, StoredBody};
use crate::body::ReplyBody;
use crate::content::ranges::{Selection, Wanted, select};
use crate::content::{BodySource, Validators, body, failed, reply, wanted};
use crate::listener::{HttpClient, RequestContent};
use crate::transport::Windows;

/// How often a request looks for a kept response again after a flight that was for another request.
const ATTEMPTS: u32 = 3;
/// A part of a response that is further than this from what has come, in bytes, is asked for by itself.
const NEAR_BYTES: u64 = 8 << 20;
/// How often responses that were evicted are removed from the names.
const SWEEP_EVERY: Duration = Duration::from_secs(600);

/// How a reverse proxy serves.
#[derive(Debug, Clone)]
pub struct ProxyOptions {
    /// `http://HOST[:PORT]` or `https://HOST[:PORT]`
    pub origin: String,
    /// The node's name: requests that come back to it are refused.
    pub node: String,
    pub freshness: FreshnessOptions,
    /// Requests that change something are forwarded, too.
    pub changes: bool,
}

type Flights = Arc<Mutex<HashMap<Place, Arc<Flight>>>>;

/// The responses of one web server.
pub struct ReverseProxy {
    origin: Arc<Origin>,
    store: Arc<ResponseStore>,
    flights: Flights,
    pub changes: bool,
}

/// A GET or HEAD request.
struct Wish<'a> {
    method: &'a Method,
    target: &'a str,
    headers: &'a HeaderMap,
    forwarded: HeaderMap,
    windows: Option<&'a Windows>,
}

impl BodySource for StoredBody {
    fn served(&self) -> &ServedFile {
        &self.file
    }
}

impl ReverseProxy {
    /// Needs a tokio runtime.
    ///
    /// # Errors
    /// The URL is not one of a web server's root, or the system's certificates cannot be read.
    pub fn new(overlay: Overlay, options: ProxyOptions) -> Result<Self, String> {
        let origin = Arc::new(Origin::new(&options.origin, &options.node)?);
        let store = Arc::new(ResponseStore::new(overlay.clone(), options.freshness));
        let swept = Arc::downgrade(&store);
        tokio::spawn(async move {
            let mut result = match swept.upgrade() {
                Some(store) => store.remove_unfinished().await,
                None => return,
            };
            loop {
                if let Err(e) = result {
                    tracing::warn!("responses that were evicted keep their names: {e}");
                }
                tokio::time::sleep(SWEEP_EVERY).await;
                if swept.strong_count() == 0 {
                    return;
                }
                result = overlay.remove_evicted().await;
            }
        });
        Ok(Self { origin, store, flights: Flights::default(), changes: options.changes })
    }

    /// Closes responses that were not used for a while.
    pub fn tidy(&self) {
        self.store.tidy(Instant::now());
    }

    /// Answers a request. `target`: its path and query without a signature of this node. `is_ours`: its `Authorization` is
    /// for this node.
    pub async fn answer(
        &self,
        request: &Request<RequestContent>,
        client: &HttpClient,
        target: &str,
        is_ours: bool,
    ) -> Response<ReplyBody> {
        if self.origin.is_loop(request.headers()) {
            return reply::text(StatusCode::LOOP_DETECTED, "this request has come through this node already");
        }
        if !origin::is_plain(request.uri().path()) {
            return reply::text(StatusCode::BAD_REQUEST, "the path has dot segments or backslashes");
        }
        let mut headers = request.headers().clone();
        if is_ours {
            headers.remove(header::AUTHORIZATION);
        }
        let tls = client.windows.is_none();
        let forwarded = self.origin.forwarded(&headers, request.version(), client.address.ip(), tls);
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return self.change(request, target, forwarded).await;
        }
        let is_http1 = request.version() != http::Version::HTTP_2;
        let windows = client.windows.as_ref().filter(|_| is_http1);
        self.get(Wish { method: request.method(), target, headers: &headers, forwarded, windows }).await
    }

    /// Forwards a request that may change something. What it changes is not kept any longer (RFC 9111, section 4.4).
    async fn change(
        &self,
        request: &Request<RequestContent>,
        target: &str,
        forwarded: HeaderMap,
    ) -> Response<ReplyBody> {
        let content = match request.body() {
            RequestContent::Some(bytes) => bytes.clone(),
            _ => Bytes::new(),
        };
        let method = request.method().clone();
        let is_safe = matches!(method, Method::OPTIONS);
        let asked = OriginRequest { method, target: target.to_owned(), headers: forwarded, content };
        let answer = match self.origin.send(asked).await {
            Ok(answer) => answer,
            Err(why) => return no_answer(why),
        };
        if !is_safe && !answer.head.status.is_client_error() && !answer.head.status.is_server_error() {
            for target in outdated_by(target, &answer.head.headers, request.headers().get(header::HOST)) {
                self.invalidate(&target).await;
            }
        }
        passed(answer, "forebay; fwd=method", false)
    }

    async fn invalidate(&self, target: &str) {
        for flight in self.flights.lock().values().filter(|flight| flight.is_of(target)) {
            flight.outdate();
        }
        self.store.invalidate(target).await;
    }

    /// Removes what is kept for a URL's path and below it. Returns the number of responses.
    ///
    /// # Errors
    /// Those of the catalog.
    pub async fn purge(&self, path: &str) -> forebay_backends::Result<u64> {
        for flight in self.flights.lock().values() {
            flight.outdate();
        }
        self.store.purge(path).await
    }

    /// Asks for a URL, and returns the bytes of its body once it is kept.
    ///
    /// # Errors
    /// The status of the response that there is instead.
    pub async fn prefetch(&self, target: &str) -> Result<u64, StatusCode> {
        let headers = HeaderMap::new();
        let (place, stored) = self.store.find(target, &headers).await;
        if let Some(stored) = &stored
            && stored.fresh.for_request(&headers, SystemTime::now()) == Use::Fresh
        {
            return Ok(stored.body.length);
        }
        let question = Question { target: target.to_owned(), request: headers.clone(), forwarded: headers, stored };
        let (flight, direct) = self.ask(place, question);
        match flight.stage().await {
            Stage::Coming(coming) => match coming.end().await {
                BodyEnd::Whole(Some(stored)) => Ok(stored.body.length),
                _ => Err(StatusCode::BAD_GATEWAY),
            },
            Stage::Kept(stored) | Stage::Confirmed(stored) => Ok(stored.body.length),
            Stage::Failed(why) => Err(why.status()),
            Stage::Asking | Stage::StandIn(_) => Err(StatusCode::BAD_GATEWAY),
            Stage::Alone => match direct {
                Some(direct) => Err(direct.await.map_or(StatusCode::BAD_GATEWAY, |answer| answer.head.status)),
                None => Err(StatusCode::BAD_GATEWAY),
            },
        }
    }

    async fn get(&self, wish: Wish<'_>) -> Response<ReplyBody> {
        let said = Directives::of(wish.headers);
        if said.has("no-store") {
            return self.pass(&wish, "forebay; fwd=request").await;
        }
        for _ in 0..ATTEMPTS {
            let (place, stored) = self.store.find(wish.target, wish.headers).await;
            let now = SystemTime::now();
            let used = stored.as_ref().map(|stored| stored.fresh.for_request(wish.headers, now));
            let is_stale = stored.is_some();
            match (&stored, used) {
                (Some(stored), Some(Use::Fresh)) => {
                    let status = format!("forebay; hit; ttl={}", stored.fresh.seconds_left(now));
                    return self.send(stored, &wish, reply::value(status)).await;
                }
                (Some(stored), Some(Use::WhileAsking)) => {
                    self.ask(place, question(&wish, Some(stored.clone())));
                    return self.send(stored, &wish, reply::STALE).await;
                }
                _ if said.has("only-if-cached") => {
                    return reply::text(StatusCode::GATEWAY_TIMEOUT, "this is not kept, or not fresh");
                }
                // A response without content is not kept.
                _ if *wish.method == Method::HEAD => break,
                _ => {}
            }
            let (flight, direct) = self.ask(place, question(&wish, stored));
            let in_time = flight.is_asking();
            match flight.stage().await {
                Stage::Coming(coming) => {
                    let fits = coming.head.is_for(wish.headers)
                        && (in_time || coming.fresh.for_request(wish.headers, SystemTime::now()) == Use::Fresh);
                    if !fits {
                        if in_time {
                            continue;
                        }
                        break;
                    }
                    let status = match (direct.is_some(), is_stale) {
                        (true, false) => "forebay; fwd=uri-miss; stored",
                        (true, true) => "forebay; fwd=stale; stored",
                        (false, _) => "forebay; fwd=uri-miss; collapsed",
                    };
                    return self.send_coming(&coming, direct.is_some(), &wish, HeaderValue::from_static(status)).await;
                }
                Stage::Kept(stored) if stored.head.is_for(wish.headers) => {
                    let status = format!("forebay; hit; ttl={}", stored.fresh.seconds_left(SystemTime::now()));
                    return self.send(&stored, &wish, reply::value(status)).await;
                }
                Stage::Confirmed(stored) if stored.head.is_for(wish.headers) => {
                    return self
                        .send(&stored, &wish, HeaderValue::from_static("forebay; fwd=stale; fwd-status=304"))
                        .await;
                }
                Stage::StandIn(stored) if stored.head.is_for(wish.headers) => {
                    return self
                        .send(&stored, &wish, HeaderValue::from_static("forebay; hit; detail=ORIGIN-FAILS"))
                        .await;
                }
                Stage::Failed(why) => return no_answer(why),
                Stage::Alone => {
                    // The answer is to a request without conditions and ranges.
                    let plain = !origin::has_conditions(wish.headers);
                    if let (Some(direct), true) = (direct, plain)
                        && let Ok(answer) = direct.await
                    {
                        return passed(answer, "forebay; fwd=uri-miss", false);
                    }
                    break;
                }
                Stage::Asking | Stage::Kept(_) | Stage::Confirmed(_) | Stage::StandIn(_) => {}
            }
        }
        self.pass(&wish, "forebay; fwd=miss").await
    }

    /// Joins the flight of a place, or begins it. The one who begins it gets an answer that is for it alone.
    fn ask(&self, place: Place, question: Question) -> (Arc<Flight>, Option<oneshot::Receiver<OriginResponse>>) {
        let mut flights = self.flights.lock();
        if let Some(flight) = flights.get(&place) {
            return (flight.clone(), None);
        }
        let flight = Flight::new(&question.target);
        flights.insert(place.clone(), flight.clone());
        drop(flights);
        let (direct, answer) = oneshot::channel();
        let (origin, store, all) = (self.origin.clone(), self.store.clone(), self.flights.clone());
        let flying = flight.clone();
        tokio::spawn(async move {
            flying.clone().fly(origin, store, question, direct).await;
            let mut all = all.lock();
            if all.get(&place).is_some_and(|flight| Arc::ptr_eq(flight, &flying)) {
                all.remove(&place);
            }
        });
        (flight, Some(answer))
    }

    /// Forwards a request for one client alone.
    async fn pass(&self, wish: &Wish<'_>, status: &'static str) -> Response<ReplyBody> {
        let asked = OriginRequest {
            method: wish.method.clone(),
            target: wish.target.to_owned(),
            headers: wish.forwarded.clone(),
            content: Bytes::new(),
        };
        match self.origin.send(asked).await {
            Ok(answer) => passed(answer, status, *wish.method == Method::HEAD),
            Err(why) => no_answer(why),
        }
    }

    async fn send(&self, stored: &Arc<Stored>, wish: &Wish<'_>, status: HeaderValue) -> Response<ReplyBody> {
        let age = stored.fresh.age(SystemTime::now());
        let mut response = described(&stored.head, Some(age), status);
        let Some(Selection { parts, length }) = selected(&stored.head, stored.body.length, wish, &mut response) else {
            return response;
        };
        if *wish.method == Method::HEAD || length == 0 {
            return response;
        }
        match body(&stored.body, parts, length, wish.windows).await {
            Ok(body) => *response.body_mut() = body,
            Err(error) => return failed(&error),
        }
        response
    }

    async fn send_coming(
        &self,
        coming: &Arc<Coming>,
        is_first: bool,
        wish: &Wish<'_>,
        status: HeaderValue,
    ) -> Response<ReplyBody> {
        // Only the client that asked first gets it from the origin.
        let age = (!is_first).then(|| coming.fresh.age(SystemTime::now()));
        let mut response = described(&coming.head, age, status.clone());
        let Some(length) = coming.length else {
            if !origin::has_conditions(wish.headers) {
                *response.body_mut() = ReplyBody::pieces(coming.pieces(0..u64::MAX), None);
                return response;
            }
            return self.send_whole(coming, wish, status).await;
        };
        let Some(Selection { parts, length }) = selected(&coming.head, length, wish, &mut response) else {
            return response;
        };
        match &parts[..] {
            [(head, part)] if head.is_empty() => {
                if part.start > coming.progress().bytes.saturating_add(NEAR_BYTES) {
                    return self.pass(wish, "forebay; fwd=partial").await;
                }
                if length > 0 {
                    *response.body_mut() = ReplyBody::pieces(coming.pieces(part.clone()), Some(length));
                }
                response
            }
            _ => self.send_whole(coming, wish, status).await,
        }
    }

    /// Answers once all of the response has come.
    async fn send_whole(&self, coming: &Arc<Coming>, wish: &Wish<'_>, status: HeaderValue) -> Response<ReplyBody> {
        match coming.end().await {
            BodyEnd::Whole(Some(stored)) => self.send(&stored, wish, status).await,
            _ => self.pass(wish, "forebay; fwd=miss").await,
        }
    }
}

fn question(wish: &Wish<'_>, stored: Option<Arc<Stored>>) -> Question {
    let (request, forwarded) = (wish.headers.clone(), wish.forwarded.clone());
    Question { target: wish.target.to_owned(), request, forwarded, stored }
}

/// Returns a response with a kept head, still without content.
fn described(head: &Head, age: Option<Duration>, status: HeaderValue) -> Response<ReplyBody> {
    let mut response = Response::new(ReplyBody::empty());
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers.clone();
    if let Some(age) = age {
        response.headers_mut().insert(header::AGE, HeaderValue::from(age.as_secs()));
    }
    response.headers_mut().insert(reply::CACHE_STATUS, status);
    response
}

/// Selects what a request wants of a kept response; `None` if the response is complete without content.
fn selected(head: &Head, length: u64, wish: &Wish<'_>, response: &mut Response<ReplyBody>) -> Option<Selection> {
    if head.status != StatusCode::OK {
        if head.status == StatusCode::NO_CONTENT {
            return None;
        }
        return select(Wanted::Whole, length, response);
    }
    let etag: Option<ETag> = head.headers.typed_get();
    let modified = head.headers.get(header::LAST_MODIFIED).and_then(|value| value.to_str().ok());
    let modified = modified.and_then(|text| httpdate::parse_http_date(text).ok());
    match wanted(wish.method, wish.headers, Validators { etag: etag.as_ref(), modified }, length) {
        Ok(Wanted::Whole) => select(Wanted::Whole, length, response),
        Ok(part) => {
            response.headers_mut().remove(header::CONTENT_RANGE);
            select(part, length, response)
        }
        Err(status) => {
            *response.status_mut() = status;
            // About the content that is not sent.
            for name in
                [header::CONTENT_TYPE, header::CONTENT_ENCODING, header::CONTENT_LANGUAGE, header::CONTENT_RANGE]
            {
                response.headers_mut().remove(name);
            }
            None
        }
    }
}

/// Returns a response of the origin as it came. `bodiless`: it is one to HEAD.
fn passed(answer: OriginResponse, status: &'static str, bodiless: bool) -> Response<ReplyBody> {
    let mut response = Response::new(ReplyBody::empty());
    *response.status_mut() = answer.head.status;
    *response.headers_mut() = end_to_end(&answer.head.headers);
    response.headers_mut().insert(reply::CACHE_STATUS, HeaderValue::from_static(status));
    let none = matches!(answer.head.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    if !bodiless && !none {
        let length = answer.length;
        *response.body_mut() = ReplyBody::pieces(answer.into_pieces(), length);
    }
    response
}

fn no_answer(why: NoAnswer) -> Response<ReplyBody> {
    let mut response = reply::text(why.status(), why.reason());
    response.headers_mut().insert(reply::CACHE_STATUS, HeaderValue::from_static("forebay; fwd=miss"));
    response
}
