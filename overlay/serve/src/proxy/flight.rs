//! One question to the origin for all clients that want the answer now.
//!
//! A flight does not end with the client that began it. Its response is written to the fast pool, and each client reads what
//! has been written: the first byte does not wait for the last, and a slow client delays no other. What there is no room for
//! is passed on at the pace of the slowest client ([`Tail`]).

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use bytes::Bytes;
use futures::{Stream, stream};
use http::header::{self, HeaderMap, HeaderName};
use http::{Method, StatusCode};
use parking_lot::Mutex;
use tokio::sync::{oneshot, watch};

use super::freshness::{Freshness, Use};
use super::head::{ResponseHead, said_of, vary_of};
use super::origin::{NoAnswer, OriginRequest, OriginResponse, OriginServer, canonical, without_conditions};
use super::store::{ResponsePlace, ResponseStore, Stored, Unfinished};
use super::tail::{Tail, TailBytes};
use crate::send_budget::ResponseBudget;

/// How far a flight is.
#[derive(Clone)]
pub enum Stage {
    Asking,
    /// The body is coming.
    Coming(Arc<Coming>),
    /// What is kept by now is fresh: another flight has just ended.
    Kept(Arc<Stored>),
    /// The origin confirmed what is kept.
    Confirmed(Arc<Stored>),
    /// The origin fails, and what is kept may be used.
    StandIn(Arc<Stored>),
    /// The answer is for one client: each other client sends a request of its own.
    Alone,
    Failed(NoAnswer),
}

/// A response whose body is coming.
pub struct Coming {
    pub head: ResponseHead,
    pub fresh: Freshness,
    /// The length of the body, if it is known.
    pub length: Option<u64>,
    /// Until all of it has come: an open writer keeps the content from being flushed and evicted.
    file: Mutex<Option<Arc<Unfinished>>>,
    largest: u64,
    tail: Tail,
    progress: watch::Sender<BodyProgress>,
}

/// How much of a body has come.
#[derive(Clone)]
pub struct BodyProgress {
    pub bytes: u64,
    pub end: BodyEnd,
    /// From here on, the body is passed on, and not kept.
    is_passed_on: bool,
}

#[derive(Clone)]
pub enum BodyEnd {
    NotYet,
    /// All has come. `None`: it is not kept, or was evicted at once.
    Whole(Option<Arc<Stored>>),
    Broken,
}

/// A question to the origin.
pub struct Flight {
    /// Path and query.
    target: String,
    stage: watch::Sender<Stage>,
    /// What is kept was removed meanwhile: the answer may be older than the reason.
    outdated: AtomicBool,
}

/// What a flight asks for.
pub struct Question {
    /// Path and query.
    pub target: String,
    /// The headers of the request of the client that began it, as they are forwarded.
    pub headers: HeaderMap,
    /// What is kept, and may be confirmed.
    pub stored: Option<Arc<Stored>>,
}

impl Flight {
    pub fn new(target: &str) -> Arc<Self> {
        let stage = watch::Sender::new(Stage::Asking);
        Arc::new(Self { target: target.to_owned(), stage, outdated: AtomicBool::new(false) })
    }

    pub fn is_of(&self, target: &str) -> bool {
        self.target == target
    }

    /// Whether the head of the answer has not come yet.
    fn is_asking(&self) -> bool {
        matches!(*self.stage.borrow(), Stage::Asking)
    }

    /// The answer is not kept.
    pub fn outdate(&self) {
        self.outdated.store(true, Ordering::Release);
    }

    /// Waits for the head of the answer.
    pub async fn stage(&self) -> Stage {
        let mut stages = self.stage.subscribe();
        let known = stages.wait_for(|stage| !matches!(stage, Stage::Asking)).await;
        known.map_or(Stage::Alone, |stage| stage.clone())
    }

    pub fn is_outdated(&self) -> bool {
        self.outdated.load(Ordering::Acquire)
    }

    /// Asks the origin, and keeps its answer. `direct` gets an answer that is for the first client alone. `also_at` is told
    /// another place at which the answer will be.
    pub async fn fly(
        self: Arc<Self>,
        origin: Arc<OriginServer>,
        store: Arc<ResponseStore>,
        question: Question,
        direct: oneshot::Sender<OriginResponse>,
        also_at: impl Fn(&ResponsePlace) + Send + Sync,
    ) {
        let stage = StageTeller(&self);
        if let (_, Some(found)) = store.find(&question.target, &question.headers).await
            && found.fresh.for_request(&question.headers, SystemTime::now()) == Use::Fresh
        {
            return stage.tell(Stage::Kept(found));
        }
        let mut headers = question.headers.clone();
        without_conditions(&mut headers);
        if let Some(stored) = &question.stored {
            ask_to_confirm(&mut headers, &stored.head.headers);
        }
        let mut answer = ask(&origin, &question.target, headers.clone()).await;
        // For a client with `Authorization`, the origin has confirmed what is kept. Nothing follows for the other clients.
        let mut is_confirmed_for_one = false;
        if let (Some(stored), Ok(response)) = (&question.stored, &answer)
            && response.head.status == StatusCode::NOT_MODIFIED
        {
            let authorized = question.headers.contains_key(header::AUTHORIZATION);
            let confirmed = stored.head.confirmed(&response.head, response.asked, authorized);
            match confirmed.filter(|head| Freshness::of(head, store.options()).is_storable()) {
                Some(head) => {
                    let confirmed = store.confirm(stored, head, || self.is_outdated()).await;
                    if self.is_outdated() {
                        store.remove(&confirmed.place).await;
                    }
                    return stage.tell(Stage::Confirmed(confirmed));
                }
                // It confirms something else, or for this client alone. Ask for all of it.
                None => {
                    is_confirmed_for_one =
                        authorized && stored.head.confirmed(&response.head, response.asked, false).is_some();
                    without_conditions(&mut headers);
                    answer = ask(&origin, &question.target, headers).await;
                }
            }
        }
        let failed = answer.as_ref().map_or(true, |response| response.head.status.is_server_error());
        if let Some(stored) =
            question.stored.as_ref().filter(|stored| failed && stored.fresh.may_stand_in(SystemTime::now()))
        {
            return stage.tell(Stage::StandIn(stored.clone()));
        }
        let mut response = match answer {
            Ok(response) => response,
            Err(why) => return stage.tell(Stage::Failed(why)),
        };
        let Some(coming) = self.begin(&store, &question, &response, also_at).await else {
            // What was kept has been replaced at the origin, if only by an answer that there is nothing.
            if let Some(stored) = question.stored.as_ref().filter(|_| !failed && !is_confirmed_for_one) {
                store.remove(&stored.place).await;
            }
            // The client may have gone.
            let _ = direct.send(response);
            return stage.tell(Stage::Alone);
        };
        let coming = Arc::new(coming);
        stage.tell(Stage::Coming(coming.clone()));
        let whole = coming.receive(&mut response).await;
        let end = match coming.file() {
            _ if !whole => BodyEnd::Broken,
            _ if coming.tail.is_begun() => {
                if let Some(stored) = &question.stored {
                    store.remove(&stored.place).await;
                }
                BodyEnd::Whole(None)
            }
            None => BodyEnd::Broken,
            Some(file) => {
                // Before the look whether it is outdated: a removal after that counts for what is kept open.
                let removals = store.removals();
                let is_outdated = || self.is_outdated();
                let stored =
                    file.finish(&store, coming.head.clone(), removals, is_outdated).await.unwrap_or_else(|e| {
                        tracing::warn!("a response is not kept: {e}");
                        None
                    });
                if self.is_outdated() {
                    store.remove(&file.place).await;
                }
                BodyEnd::Whole(stored)
            }
        };
        if matches!(end, BodyEnd::Whole(Some(_))) {
            coming.file.lock().take();
        }
        coming.progress.send_modify(|progress| progress.end = end);
    }

    /// Begins to keep a response; `None` if it is not to be kept.
    async fn begin(
        &self,
        store: &ResponseStore,
        question: &Question,
        response: &OriginResponse,
        also_at: impl Fn(&ResponsePlace),
    ) -> Option<Coming> {
        let mut names = vary_of(&response.head.headers)?;
        let before = if names.is_empty() { None } else { store.varies_by(&question.target).await };
        // A URL whose responses name now these headers and now those varies by all of them.
        let since = before.and_then(|(known, since)| {
            let as_before = names.iter().all(|name| known.contains(name));
            names.extend(known);
            as_before.then_some(since)
        });
        names.sort_by(|a, b| a.as_str().cmp(b.as_str()));
        names.dedup();
        let varied: Vec<_> = names.iter().map(|name| (name.clone(), said_of(&question.headers, name))).collect();
        let mut head = ResponseHead::new(&response.head, varied, response.asked);
        head.authorized = question.headers.contains_key(header::AUTHORIZATION);
        let fresh = Freshness::of(&head, store.options());
        if !fresh.is_storable() || !response.is_delimited {
            return None;
        }
        let room = Some(store.room_for(response.length)?);
        let begun = async {
            if names.is_empty() {
                return store.begin(ResponsePlace::of(&question.target), room).await;
            }
            let number = since.unwrap_or_else(rand::random);
            let place = ResponsePlace::of_variant(&question.target, number, &head.varied);
            also_at(&place);
            if since.is_none() {
                store.mark(&question.target, &names, number).await?;
            }
            store.begin(place, room).await
        };
        match begun.await {
            Ok(file) => Some(Coming {
                head,
                fresh,
                length: response.length,
                file: Mutex::new(Some(Arc::new(file))),
                largest: store.largest(),
                tail: Tail::new(store.tails()),
                progress: watch::Sender::new(BodyProgress { bytes: 0, end: BodyEnd::NotYet, is_passed_on: false }),
            }),
            Err(e) => {
                tracing::warn!("a response is not kept: {e}");
                None
            }
        }
    }
}

/// Tells those that wait for a flight how far it is. If it ends without an answer, they ask for themselves.
struct StageTeller<'a>(&'a Flight);

impl StageTeller<'_> {
    fn tell(&self, stage: Stage) {
        self.0.stage.send_replace(stage);
    }
}

impl Drop for StageTeller<'_> {
    fn drop(&mut self) {
        if self.0.is_asking() {
            self.tell(Stage::Alone);
        }
    }
}

async fn ask(origin: &OriginServer, target: &str, headers: HeaderMap) -> Result<OriginResponse, NoAnswer> {
    origin.send(OriginRequest { method: Method::GET, target: target.to_owned(), headers, content: Bytes::new() }).await
}

/// Adds the conditions by which the origin confirms a response (RFC 9111, section 4.3.1).
fn ask_to_confirm(headers: &mut HeaderMap, stored: &HeaderMap) {
    for (condition, validator) in
        [(header::IF_NONE_MATCH, header::ETAG), (header::IF_MODIFIED_SINCE, header::LAST_MODIFIED)]
    {
        if let Some(value) = stored.get(validator) {
            headers.insert(condition, value.clone());
        }
    }
}

impl Coming {
    /// Writes the body as it comes. Returns whether all of it came.
    async fn receive(&self, response: &mut OriginResponse) -> bool {
        loop {
            let piece = match response.piece().await {
                Ok(Some(piece)) => piece,
                Ok(None) => return self.length.is_none_or(|length| length == self.progress.borrow().bytes),
                Err(_) => return false,
            };
            let length = piece.len() as u64;
            if self.tail.is_begun() {
                if !self.tail.push(piece).await {
                    return false;
                }
                self.progress.send_modify(|progress| progress.bytes += length);
                continue;
            }
            let Some(file) = self.file() else { return false };
            match file.append(piece.clone()).await {
                Ok(bytes) => {
                    self.progress.send_modify(|progress| progress.bytes = bytes);
                    if bytes > self.largest && !self.pass_on("it has no length, and is too large to be kept") {
                        return false;
                    }
                }
                Err(e) => {
                    if !self.pass_on(&e.to_string()) || !self.tail.push(piece).await {
                        return false;
                    }
                    self.progress.send_modify(|progress| progress.bytes += length);
                }
            }
        }
    }

    /// Passes on what comes from now on. Returns `false` if too many responses are passed on.
    fn pass_on(&self, why: &str) -> bool {
        let is_begun = self.tail.begin(self.progress.borrow().bytes);
        let done = if is_begun { "passed on" } else { "cut off, because there is no memory to pass it on" };
        tracing::warn!("a response is not kept, but {done}: {why}");
        self.progress.send_modify(|progress| progress.is_passed_on = is_begun);
        is_begun
    }

    /// Lets what was written be evicted, once all clients read what is passed on.
    fn release_stored(&self) {
        if self.tail.is_all_that_is_read() {
            self.file.lock().take();
        }
    }

    fn file(&self) -> Option<Arc<Unfinished>> {
        self.file.lock().clone()
    }

    /// Reads a part of what has come.
    async fn read(&self, offset: u64, len: u32) -> io::Result<Bytes> {
        let len = match self.tail.find(offset, len) {
            TailBytes::Stored(len) => len,
            TailBytes::Passed(bytes) => return Ok(bytes),
            TailBytes::Lost => return Err(io::ErrorKind::TimedOut.into()),
        };
        if let Some(file) = self.file() {
            return file.read(offset, len).await.map_err(io::Error::other);
        }
        match self.end().await {
            BodyEnd::Whole(Some(stored)) => {
                let len = u64::from(len).min(stored.body.length.saturating_sub(offset)) as u32;
                stored.body.file.read(offset, len).await.map_err(io::Error::other)
            }
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    pub fn progress(&self) -> BodyProgress {
        self.progress.borrow().clone()
    }

    /// Waits until the body has come to its end, or it is known that it is not kept.
    pub async fn end(&self) -> BodyEnd {
        let mut progress = self.progress.subscribe();
        let ended = progress.wait_for(|known| known.is_passed_on || !matches!(known.end, BodyEnd::NotYet)).await;
        ended.map_or(BodyEnd::Broken, |progress| progress.end.clone())
    }

    /// Returns a part of the body, as it comes; `None` if its end is passed on already. A part without an end goes to the
    /// end of the body.
    pub fn pieces(
        self: &Arc<Self>,
        part: Range<u64>,
        budget: &ResponseBudget,
    ) -> Option<impl Stream<Item = io::Result<Bytes>> + Send + use<>> {
        let reader = BodyReader { number: self.tail.join(part.start)?, coming: self.clone() };
        let from = (reader, self.progress.subscribe(), part, budget.clone());
        Some(stream::try_unfold(from, |(reader, mut progress, part, budget)| async move {
            let coming = &reader.coming;
            if part.is_empty() {
                return Ok(None);
            }
            let there = progress
                .wait_for(|progress| progress.bytes > part.start || !matches!(progress.end, BodyEnd::NotYet))
                .await
                .map(|progress| progress.clone())
                .map_err(io::Error::other)?;
            if there.bytes <= part.start {
                return match there.end {
                    BodyEnd::Whole(_) if part.end == u64::MAX => Ok(None),
                    _ => Err(io::ErrorKind::UnexpectedEof.into()),
                };
            }
            let room = budget.room(there.bytes.min(part.end) - part.start).await;
            let piece = coming.read(part.start, room.bytes()).await?;
            if piece.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let rest = part.start + piece.len() as u64..part.end;
            coming.tail.moved_to(reader.number, rest.start);
            coming.release_stored();
            Ok(Some((room.hold(piece), (reader, progress, rest, budget))))
        }))
    }
}

/// A client that reads a body as it comes.
struct BodyReader {
    coming: Arc<Coming>,
    number: u64,
}

impl Drop for BodyReader {
    fn drop(&mut self) {
        self.coming.tail.leave(self.number);
        self.coming.release_stored();
    }
}

/// Returns where responses to this URL were kept that a changed resource makes worthless: the URL itself, and the URLs that
/// the answer names on the same origin (RFC 9111, section 4.4).
pub fn outdated_by(target: &str, answer: &HeaderMap, host: Option<&str>) -> Vec<String> {
    let mut targets = vec![target.to_owned()];
    let names: [HeaderName; 2] = [header::LOCATION, header::CONTENT_LOCATION];
    for value in names.iter().filter_map(|name| answer.get(name)?.to_str().ok()) {
        let at = url::Url::parse("http://origin/").and_then(|base| base.join(target)?.join(value));
        let Ok(at) = at else { continue };
        let authority = at.host_str().map(|name| match at.port() {
            Some(port) => format!("{name}:{port}"),
            None => name.to_owned(),
        });
        let same = authority.as_deref() == Some("origin") || authority.as_deref() == host;
        if same {
            targets.push(canonical(&at[url::Position::BeforePath..url::Position::AfterQuery]));
        }
    }
    targets
}
