//! A reverse proxy: the responses of one web server, kept on the fast pool as RFC 9111 allows.
//!
//! | module | does |
//! |---|---|
//! | `directives`, `freshness` | what may be kept, and how long |
//! | `head` | the head of a response as it is kept |
//! | `store` | responses on the fast pool |
//! | `origin` | requests to the web server |
//! | `flight` | one question to the web server for all clients that wait for the answer |
//! | `flight_list` | the flights under way |

pub(crate) mod directives;
mod flight;
mod flight_list;
mod freshness;
mod head;
mod origin;
mod store;
mod tail;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use forebay_engine::{Overlay, ServedFile};
use futures::FutureExt;
use headers::{ETag, HeaderMapExt};
use http::header::{self, HeaderMap, HeaderValue};
use http::{Method, Request, Response, StatusCode, Version};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use self::directives::Directives;
use self::flight::{BodyEnd, Coming, Flight, Question, Stage, outdated_by};
use self::flight_list::{FlightList, FlightStart};
pub use self::freshness::FreshnessOptions;
use self::freshness::{Freshness, Use};
use self::head::{ResponseHead, end_to_end};
pub use self::origin::check_origin;
use self::origin::{NoAnswer, OriginRequest, OriginResponse, OriginServer};
use self::store::{ResponsePlace, ResponseStore, Stored, StoredBody};
use crate::body::ReplyBody;
use crate::cache_status::{CacheResult, CacheStatus};
use crate::content::ranges::{Selection, Wanted, select};
use crate::content::{BodySource, Validators, body, failed, reply, wanted};
use crate::listener::{HttpClient, RequestContent};
use crate::send_budget::ResponseBudget;
use crate::transport::Windows;

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

/// A flight, and its answer if that is for the client that began it alone.
type Begun = (Arc<Flight>, Option<oneshot::Receiver<OriginResponse>>);

/// What is kept, and what is coming.
struct KeptResponses {
    store: Arc<ResponseStore>,
    flights: Mutex<FlightList>,
}

impl KeptResponses {
    async fn invalidate(&self, target: &str) {
        self.flights.lock().outdate(|flight| flight.is_of(target));
        self.store.invalidate(target).await;
    }
}

/// The responses of one web server.
pub struct ReverseProxy {
    origin: Arc<OriginServer>,
    kept: Arc<KeptResponses>,
    pub changes: bool,
}

/// A GET or HEAD request.
struct ProxiedGet<'a> {
    method: &'a Method,
    target: &'a str,
    /// As the client sent them.
    headers: &'a HeaderMap,
    windows: Option<&'a Windows>,
    budget: &'a ResponseBudget,
    origin: &'a OriginServer,
    sender: Sender,
    forwarded: OnceLock<HeaderMap>,
}

/// The client that sent a request, and the protocol.
#[derive(Debug, Clone, Copy)]
struct Sender {
    version: Version,
    address: IpAddr,
    tls: bool,
    /// `Authorization` is for this node.
    is_ours: bool,
}

impl Sender {
    fn of<T>(request: &Request<T>, client: &HttpClient, is_ours: bool) -> Self {
        let tls = client.windows.is_none();
        Self { version: request.version(), address: client.address.ip(), tls, is_ours }
    }

    fn forwarded(&self, origin: &OriginServer, headers: &HeaderMap) -> HeaderMap {
        let mut forwarded = origin.forwarded(headers, self.version, self.address, self.tls);
        if self.is_ours {
            forwarded.remove(header::AUTHORIZATION);
        }
        forwarded
    }
}

impl ProxiedGet<'_> {
    /// The headers that the origin sees. What a response varies by is what they say.
    fn forwarded(&self) -> &HeaderMap {
        self.forwarded.get_or_init(|| self.sender.forwarded(self.origin, self.headers))
    }
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
        let origin = Arc::new(OriginServer::new(&options.origin, &options.node)?);
        let store = Arc::new(ResponseStore::new(overlay.clone(), options.freshness));
        let swept = Arc::downgrade(&store);
        let task = async move {
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
        };
        tokio::spawn(task.boxed());
        let kept = Arc::new(KeptResponses { store, flights: Mutex::default() });
        Ok(Self { origin, kept, changes: options.changes })
    }

    /// Closes responses that were not used for a while.
    pub fn tidy(&self) {
        self.kept.store.tidy(Instant::now());
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
        let target = &origin::canonical(target);
        // The canonical path is the one that the origin gets.
        if !origin::is_plain(origin::path_of(target)) {
            let why = "the path has dot segments, backslashes or escapes that are none";
            return reply::text(StatusCode::BAD_REQUEST, why);
        }
        let sender = Sender::of(request, client, is_ours);
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return self.change(request, target, sender, &client.budget).await;
        }
        let is_http1 = request.version() != Version::HTTP_2;
        self.get(ProxiedGet {
            method: request.method(),
            target,
            headers: request.headers(),
            windows: client.windows.as_ref().filter(|_| is_http1),
            budget: &client.budget,
            origin: &self.origin,
            sender,
            forwarded: OnceLock::new(),
        })
        .await
    }

    /// Forwards a request that may change something. What it changes is not kept any longer (RFC 9111, section 4.4), also if
    /// its client has gone, or the origin does not answer.
    async fn change(
        &self,
        request: &Request<RequestContent>,
        target: &str,
        sender: Sender,
        budget: &ResponseBudget,
    ) -> Response<ReplyBody> {
        let content = match request.body() {
            RequestContent::Some(bytes) => bytes.clone(),
            _ => Bytes::new(),
        };
        let method = request.method().clone();
        let is_safe = method == Method::OPTIONS;
        let headers = sender.forwarded(&self.origin, request.headers());
        let asked = OriginRequest { method, target: target.to_owned(), headers, content };
        let host = request.uri().authority().map(|authority| authority.as_str());
        let host = host.or_else(|| request.headers().get(header::HOST)?.to_str().ok()).map(str::to_owned);
        let (origin, kept, target) = (self.origin.clone(), self.kept.clone(), target.to_owned());
        let task = async move {
            let answer = origin.send(asked).await;
            if is_safe || answer.as_ref().is_ok_and(OriginResponse::has_changed_nothing) {
                return answer;
            }
            let none = HeaderMap::new();
            let headers = answer.as_ref().map_or(&none, |answer| &answer.head.headers);
            for target in outdated_by(&target, headers, host.as_deref()) {
                kept.invalidate(&target).await;
            }
            answer
        };
        let changing = tokio::spawn(task.boxed());
        match changing.await {
            Ok(Ok(answer)) => passed(answer, "forebay; fwd=method", false, budget),
            Ok(Err(why)) => no_answer(why),
            Err(_) => no_answer(NoAnswer::Unreachable),
        }
    }

    /// Removes what is kept for a URL's path and below it. Returns the number of responses.
    ///
    /// # Errors
    /// Those of the catalog.
    pub async fn purge(&self, path: &str) -> forebay_backends::Result<u64> {
        self.kept.flights.lock().outdate(|_| true);
        self.kept.store.purge(&origin::canonical(path)).await
    }

    /// Asks for a URL, and returns the bytes of its body once it is kept.
    ///
    /// # Errors
    /// The status of the response that there is instead; 400 for a path that is not forwarded.
    pub async fn prefetch<T>(
        &self,
        target: &str,
        request: &Request<T>,
        client: &HttpClient,
    ) -> Result<u64, StatusCode> {
        let target = &origin::canonical(target);
        if !origin::is_plain(origin::path_of(target)) {
            return Err(StatusCode::BAD_REQUEST);
        }
        let headers = Sender::of(request, client, true).forwarded(&self.origin, &HeaderMap::new());
        let (place, stored) = self.kept.store.find(target, &headers).await;
        if let Some(stored) = &stored
            && stored.fresh.for_request(&headers, SystemTime::now()) == Use::Fresh
        {
            return Ok(stored.body.length);
        }
        let question = Question { target: target.to_owned(), headers, stored };
        let Some((flight, direct)) = self.join(place, question) else { return Err(StatusCode::SERVICE_UNAVAILABLE) };
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

    async fn get(&self, wish: ProxiedGet<'_>) -> Response<ReplyBody> {
        let said = match wish.headers.contains_key(header::CACHE_CONTROL) {
            true => Directives::of(wish.headers),
            false => Directives::default(),
        };
        if said.has("no-store") {
            return self.pass(&wish, "forebay; fwd=request").await;
        }
        let store = &self.kept.store;
        // First, the answer to another client may do. If it does not, this one asks for itself.
        for joins in [true, false] {
            let (place, stored) = store.find_for(wish.target, || wish.forwarded()).await;
            let now = SystemTime::now();
            match stored.as_ref().map(|stored| (stored, stored.fresh.for_request(wish.headers, now))) {
                Some((stored, Use::Fresh)) => return self.send_fresh(stored, &wish).await,
                Some((stored, Use::WhileAsking)) => {
                    self.join(place, question(&wish, Some(stored.clone())));
                    return self.send(stored, &wish, CacheStatus::STALE).await;
                }
                _ if said.has("only-if-cached") => {
                    return reply::text(StatusCode::GATEWAY_TIMEOUT, "this is not kept, or not fresh");
                }
                // A response without content is not kept.
                _ if *wish.method == Method::HEAD => break,
                _ => {}
            }
            let is_stale = stored.is_some();
            let question = question(&wish, stored);
            let begun = if joins { self.join(place, question) } else { self.fly(place, question, false) };
            let Some((flight, direct)) = begun else { break };
            if let Some(response) = self.landed(&flight, direct, is_stale, &wish).await {
                return response;
            }
        }
        self.pass(&wish, "forebay; fwd=miss").await
    }

    /// Answers with what a flight brought; `None` if that is for another client. `direct`: this client began the flight.
    async fn landed(
        &self,
        flight: &Flight,
        direct: Option<oneshot::Receiver<OriginResponse>>,
        is_stale: bool,
        wish: &ProxiedGet<'_>,
    ) -> Option<Response<ReplyBody>> {
        let stage = flight.stage().await;
        let now = SystemTime::now();
        let is_first = direct.is_some();
        // Only the client that asked may use what is not fresh (RFC 9111, section 4).
        let may_use = |head: &ResponseHead, fresh: &Freshness| {
            is_first || (head.is_for(wish.forwarded()) && fresh.for_request(wish.headers, now) == Use::Fresh)
        };
        let response = match stage {
            Stage::Coming(coming) if may_use(&coming.head, &coming.fresh) => {
                let status = match (is_first, is_stale) {
                    (true, false) => CacheStatus::new(CacheResult::Miss, "forebay; fwd=uri-miss; stored"),
                    (true, true) => CacheStatus::new(CacheResult::Miss, "forebay; fwd=stale; stored"),
                    (false, _) => CacheStatus::new(CacheResult::Collapsed, "forebay; fwd=uri-miss; collapsed"),
                };
                self.send_coming(&coming, is_first, wish, status).await
            }
            Stage::Kept(stored) if may_use(&stored.head, &stored.fresh) => self.send_fresh(&stored, wish).await,
            Stage::Confirmed(stored) if may_use(&stored.head, &stored.fresh) => {
                let status = CacheStatus::new(CacheResult::Confirmed, "forebay; fwd=stale; fwd-status=304");
                self.send(&stored, wish, status).await
            }
            Stage::StandIn(stored) if stored.head.is_for(wish.forwarded()) => {
                let status = CacheStatus::new(CacheResult::Stale, "forebay; hit; detail=ORIGIN-FAILS");
                self.send(&stored, wish, status).await
            }
            Stage::Failed(why) => no_answer(why),
            Stage::Alone => {
                // The answer is to a request without conditions and ranges.
                let direct = direct.filter(|_| !origin::has_conditions(wish.headers));
                match direct {
                    Some(direct) => match direct.await {
                        Ok(answer) => passed(answer, "forebay; fwd=uri-miss", false, wish.budget),
                        Err(_) => self.pass(wish, "forebay; fwd=miss").await,
                    },
                    None => self.pass(wish, "forebay; fwd=miss").await,
                }
            }
            Stage::Asking | Stage::Coming(_) | Stage::Kept(_) | Stage::Confirmed(_) | Stage::StandIn(_) => return None,
        };
        Some(response)
    }

    /// Joins the flight of a place, or begins it. The one who begins it gets an answer that is for it alone. `None` if there
    /// are too many flights.
    fn join(&self, place: ResponsePlace, question: Question) -> Option<Begun> {
        if let Some(flight) = self.kept.flights.lock().at(&place) {
            return Some((flight, None));
        }
        self.fly(place, question, true)
    }

    /// Begins a flight. `is_joined`: others may join it.
    fn fly(&self, place: ResponsePlace, question: Question, is_joined: bool) -> Option<Begun> {
        // Another client may have begun one meanwhile.
        let flight = match self.kept.flights.lock().begin(place, &question.target, is_joined) {
            FlightStart::Begun(flight) => flight,
            FlightStart::Joined(flight) => return Some((flight, None)),
            FlightStart::TooMany => return None,
        };
        let (direct, answer) = oneshot::channel();
        let (origin, kept, flying) = (self.origin.clone(), self.kept.clone(), flight.clone());
        let task = async move {
            let also_at = |place: &ResponsePlace| {
                if is_joined {
                    kept.flights.lock().also_at(place, &flying);
                }
            };
            flying.clone().fly(origin, kept.store.clone(), question, direct, also_at).await;
            kept.flights.lock().end(&flying);
        };
        tokio::spawn(task.boxed());
        Some((flight, Some(answer)))
    }

    /// Forwards a request for one client alone.
    async fn pass(&self, wish: &ProxiedGet<'_>, status: &'static str) -> Response<ReplyBody> {
        let asked = OriginRequest {
            method: wish.method.clone(),
            target: wish.target.to_owned(),
            headers: wish.forwarded().clone(),
            content: Bytes::new(),
        };
        match self.origin.send(asked).await {
            Ok(answer) => passed(answer, status, *wish.method == Method::HEAD, wish.budget),
            Err(why) => no_answer(why),
        }
    }

    async fn send_fresh(&self, stored: &Arc<Stored>, wish: &ProxiedGet<'_>) -> Response<ReplyBody> {
        let status = CacheStatus::fresh_for(stored.fresh.seconds_left(SystemTime::now()));
        self.send(stored, wish, status).await
    }

    async fn send(&self, stored: &Arc<Stored>, wish: &ProxiedGet<'_>, status: CacheStatus) -> Response<ReplyBody> {
        let age = stored.fresh.age(SystemTime::now());
        let mut response = described(&stored.head, Some(age), status);
        let Some(Selection { parts, length }) = selected(&stored.head, stored.body.length, wish, &mut response) else {
            return response;
        };
        if *wish.method == Method::HEAD || length == 0 {
            return response;
        }
        match body(&stored.body, parts, length, (wish.windows, wish.budget)).await {
            Ok(body) => *response.body_mut() = body,
            Err(error) => return failed(&error),
        }
        response
    }

    async fn send_coming(
        &self,
        coming: &Arc<Coming>,
        is_first: bool,
        wish: &ProxiedGet<'_>,
        status: CacheStatus,
    ) -> Response<ReplyBody> {
        // Only the client that asked first gets it from the origin.
        let age = (!is_first).then(|| coming.fresh.age(SystemTime::now()));
        let mut response = described(&coming.head, age, status.clone());
        let Some(length) = coming.length else {
            if wish.headers.contains_key(header::RANGE) {
                return self.send_whole(coming, wish, status).await;
            }
            let selected = selected(&coming.head, 0, wish, &mut response);
            if selected.is_some() {
                response.headers_mut().remove(header::CONTENT_LENGTH);
                let Some(pieces) = coming.pieces(0..u64::MAX, wish.budget) else {
                    return self.pass(wish, "forebay; fwd=miss").await;
                };
                *response.body_mut() = ReplyBody::pieces(pieces, None);
            }
            return response;
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
                    let Some(pieces) = coming.pieces(part.clone(), wish.budget) else {
                        return self.pass(wish, "forebay; fwd=miss").await;
                    };
                    *response.body_mut() = ReplyBody::pieces(pieces, Some(length));
                }
                response
            }
            _ => self.send_whole(coming, wish, status).await,
        }
    }

    /// Answers once all of the response has come.
    async fn send_whole(
        &self,
        coming: &Arc<Coming>,
        wish: &ProxiedGet<'_>,
        status: CacheStatus,
    ) -> Response<ReplyBody> {
        match coming.end().await {
            BodyEnd::Whole(Some(stored)) => self.send(&stored, wish, status).await,
            _ => self.pass(wish, "forebay; fwd=miss").await,
        }
    }
}

fn question(wish: &ProxiedGet<'_>, stored: Option<Arc<Stored>>) -> Question {
    Question { target: wish.target.to_owned(), headers: wish.forwarded().clone(), stored }
}

/// Returns a response with a kept head, still without content.
fn described(head: &ResponseHead, age: Option<Duration>, status: CacheStatus) -> Response<ReplyBody> {
    let mut response = Response::new(ReplyBody::empty());
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers.clone();
    if let Some(age) = age {
        response.headers_mut().insert(header::AGE, HeaderValue::from(age.as_secs()));
    }
    status.append(&mut response);
    response
}

/// Selects what a request wants of a kept response; `None` if the response is complete without content.
fn selected(
    head: &ResponseHead,
    length: u64,
    wish: &ProxiedGet<'_>,
    response: &mut Response<ReplyBody>,
) -> Option<Selection> {
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
fn passed(
    answer: OriginResponse,
    status: &'static str,
    bodiless: bool,
    budget: &ResponseBudget,
) -> Response<ReplyBody> {
    let mut response = Response::new(ReplyBody::empty());
    *response.status_mut() = answer.head.status;
    *response.headers_mut() = end_to_end(&answer.head.headers);
    CacheStatus::new(CacheResult::Passed, status).append(&mut response);
    let none = matches!(answer.head.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    if !bodiless && !none {
        let length = answer.length;
        *response.body_mut() = ReplyBody::pieces(answer.into_pieces(budget.clone()), length);
    }
    response
}

fn no_answer(why: NoAnswer) -> Response<ReplyBody> {
    let mut response = reply::text(why.status(), why.reason());
    CacheStatus::new(CacheResult::Passed, "forebay; fwd=miss").set(&mut response);
    response
}
