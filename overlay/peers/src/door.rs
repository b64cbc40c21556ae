//! Answers other nodes.

mod stage;

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use forebay_backends::{Error, ErrorKind, PoolPath};
use forebay_cluster::{
    FileKey, HeldRange, Lend, LocalFacts, NodeId, PassOver, PeerAnswer, PeerAsk, RangeKey, owners_of,
};
use forebay_engine::{Holding, Loan, Overlay, blocking};
use forebay_serve::{Door, HttpClient, ReplyBody, RequestContent};
use futures::{FutureExt, stream};
use http::header::{AUTHORIZATION, CONNECTION, HeaderMap, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use sha2::{Digest, Sha256};
use tokio::sync::{Mutex, Semaphore, mpsc};

use crate::peers::{Peers, RangeOwners};
use crate::wire::{
    self, ANNOUNCE_PATH, HOLDERS, PASSED_OVER, PeerRequest, RETRY_AFTER_MS, STAGE_PATH, chunk_frame, file_of,
    refusing_frame, waiting_frame,
};

/// How often a reader hears that this node still waits for the pool.
const WAITING_EVERY: Duration = Duration::from_millis(300);
/// Frames that wait for a reader, heads and chunks.
const FRAMES_AHEAD: usize = 4;
/// Stages for other nodes at the same time; further ones wait.
const STAGES_AT_ONCE: usize = 16;

/// What answers the requests of other nodes.
pub struct PeerDoor {
    peers: Arc<Peers>,
    overlay: Overlay,
    announcement_turn: Arc<Mutex<()>>,
    stage_turns: Arc<Semaphore>,
}

/// One request, and what this node knows of it.
struct LendTask {
    peers: Arc<Peers>,
    overlay: Overlay,
    path: PoolPath,
    request: PeerRequest,
    owners: RangeOwners,
    ask: PeerAsk,
    loan: Option<Loan>,
}

type Frames = mpsc::Sender<io::Result<Bytes>>;

impl PeerDoor {
    pub fn new(peers: Arc<Peers>, overlay: Overlay) -> Self {
        let stage_turns = Arc::new(Semaphore::new(STAGES_AT_ONCE));
        Self { peers, overlay, announcement_turn: Arc::default(), stage_turns }
    }

    /// Returns whether a request has the token of the cluster.
    fn is_member(&self, headers: &HeaderMap) -> bool {
        let cluster = self.peers.cluster.load();
        let token = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        // By their hashes: so the time of the comparison tells nothing about the token.
        token
            .and_then(|text| text.strip_prefix("Bearer "))
            .is_some_and(|token| Sha256::digest(token) == Sha256::digest(&cluster.settings.token))
    }

    async fn respond(&self, request: &Request<RequestContent>) -> Response<ReplyBody> {
        if !self.is_member(request.headers()) {
            return not_a_member();
        }
        match request.uri().path() {
            ANNOUNCE_PATH => return self.take_announcement(request).await,
            STAGE_PATH => return self.stage(request),
            _ => {}
        }
        if request.method() != Method::GET {
            return status(StatusCode::METHOD_NOT_ALLOWED, "GET");
        }
        let Some(path) = file_of(request.uri().path()) else {
            return status(StatusCode::BAD_REQUEST, "there is nothing of this name for peers");
        };
        let asked = match PeerRequest::parse(request.headers()) {
            Ok(asked) => asked,
            Err(why) => return status(StatusCode::BAD_REQUEST, why),
        };
        self.peers.note_members(&asked.from, asked.members);
        let file = self.peers.file_key(&path);
        let owners = self.peers.owners(file, &asked.version, asked.range.start);
        let is_wanted = |ours: &_| wire::is_same_version(ours, &asked.version);
        // What needs no question to the pool is answered at once.
        let loan = match self.overlay.lend(&path, is_wanted, false).await {
            Ok(loan) => loan,
            Err(e) => {
                tracing::debug!(%path, "nothing is given to {}: {e}", asked.from);
                return refused(PassOver::NotResident);
            }
        };
        // Requests of one range are smaller than the range: they are given one by one.
        let key = RangeKey { file, index: asked.range.start / Loan::CHUNK_BYTES };
        let ask = PeerAsk {
            from: asked.from.clone(),
            key,
            version: asked.version_key(),
            purpose: asked.purpose,
            passed: asked.passed.iter().cloned().collect(),
        };
        let (peers, overlay) = (self.peers.clone(), self.overlay.clone());
        LendTask { peers, overlay, path, request: asked, owners, ask, loan }.begin(file)
    }
}

impl PeerDoor {
    /// Another node names what it has changed in the pool.
    async fn take_announcement(&self, request: &Request<RequestContent>) -> Response<ReplyBody> {
        let (&Method::POST, RequestContent::Some(body)) = (request.method(), request.body()) else {
            return status(StatusCode::BAD_REQUEST, "POST, with a path in each line");
        };
        // One after the other: no number of requests takes more than one thread.
        let turn = self.announcement_turn.clone().lock_owned().await;
        let (overlay, paths) = (self.overlay.clone(), wire::announced(body));
        let taken = blocking(move || {
            let _turn = turn;
            paths.iter().try_for_each(|path| overlay.take_announcement(path))
        });
        match taken.await {
            Ok(()) => status(StatusCode::OK, "taken"),
            Err(error) => {
                tracing::warn!("what another node has changed is not known: {error}");
                status(StatusCode::INTERNAL_SERVER_ERROR, "the catalog fails")
            }
        }
    }
}

#[async_trait]
impl Door for PeerDoor {
    fn content_max(&self, head: &mut Parts, _: &HttpClient) -> usize {
        let most = match head.uri.path() {
            ANNOUNCE_PATH => wire::ANNOUNCED_BYTES,
            STAGE_PATH => wire::STAGE_BYTES,
            _ => 0,
        };
        if head.method == Method::POST && most > 0 && self.is_member(&head.headers) { most } else { 0 }
    }

    async fn answer(&self, request: Request<RequestContent>, _: HttpClient) -> Response<ReplyBody> {
        match request.body().refused() {
            // Content without the token is not read, so the connection must end.
            Some(refused) if !self.is_member(request.headers()) => {
                let mut response = not_a_member();
                let ends = refused.headers().get(CONNECTION).cloned();
                response.headers_mut().extend(ends.map(|ends| (CONNECTION, ends)));
                response
            }
            Some(refused) => refused,
            None => self.respond(&request).await,
        }
    }
}

impl LendTask {
    fn held(&self, file: FileKey) -> HeldRange {
        // Whether the pool has the version is not known yet.
        let Some(loan) = &self.loan else { return HeldRange::Absent };
        match loan.holding(&self.request.range) {
            Ok(Some(Holding::Resident)) => HeldRange::Resident,
            Ok(None) => HeldRange::OtherVersion,
            _ if self.peers.from_others.overlaps(file, &self.request.range) => HeldRange::FromPeer,
            Ok(Some(Holding::UnderWay)) => HeldRange::FromPool,
            Ok(Some(Holding::Absent)) | Err(_) => HeldRange::Absent,
        }
    }

    fn decide(&self, file: FileKey) -> Lend {
        let cluster = &self.owners.cluster;
        let roster = &cluster.roster;
        let id = |seat: &u32| roster.member(*seat).id.clone();
        let owners: Vec<NodeId> = owners_of(&self.owners.ranked).iter().map(id).collect();
        let facts = LocalFacts {
            held: self.held(file),
            owners: &owners,
            may_give: roster
                .get(&cluster.this)
                .is_some_and(|this| cluster.settings.placing.gives_to(this, &self.request.from)),
            readers_give: cluster.settings.placing.readers_give(),
            // Space is made for what is fetched; if there is none, the fetch says so.
            has_room: true,
        };
        self.peers.state.lock().lender.decide(&self.ask, facts)
    }

    fn begin(self, file: FileKey) -> Response<ReplyBody> {
        let (frames, mut receiver) = mpsc::channel(FRAMES_AHEAD);
        match self.decide(file) {
            Lend::Answer(answer) => return answered(&answer),
            Lend::Give => _ = tokio::spawn(async move { self.give(&frames).await }.boxed()),
            Lend::WhenArrived | Lend::Fetch => {
                _ = tokio::spawn(async move { self.fetch_and_give(file, &frames).await }.boxed())
            }
        }
        let mut response = Response::new(ReplyBody::pieces(stream::poll_fn(move |cx| receiver.poll_recv(cx)), None));
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
        response
    }

    async fn fetch_and_give(mut self, file: FileKey, frames: &Frames) {
        let why = match self.fetch(file, frames).await {
            Ok(()) => match self.decide(file) {
                Lend::Give => return self.give(frames).await,
                Lend::Answer(PeerAnswer::Busy { .. }) => PassOver::Busy,
                Lend::Answer(PeerAnswer::Not(why)) => why,
                // It was evicted at once.
                _ => PassOver::NoRoom,
            },
            Err(why) => why,
        };
        let _ = frames.send(Ok(refusing_frame(why))).await;
    }

    /// Makes the range resident, from the pool. Goes on if the reader leaves, since other members will request it, too.
    async fn fetch(&mut self, file: FileKey, frames: &Frames) -> Result<(), PassOver> {
        let refusal = |e: Error| match e.kind() {
            ErrorKind::NoSpace | ErrorKind::Quota | ErrorKind::TooLarge => PassOver::NoRoom,
            ErrorKind::Stale | ErrorKind::NotFound => PassOver::RefusedVersion,
            _ => PassOver::NotResident,
        };
        let _for_others = self.peers.for_others.begin(file, self.request.range.clone());
        if self.loan.is_none() {
            let version = &self.request.version;
            let is_wanted = |ours: &_| wire::is_same_version(ours, version);
            let asked = self.overlay.lend(&self.path, is_wanted, true);
            self.loan = while_waiting(frames, asked).await.map_err(refusal)?;
        }
        let loan = self.loan.as_ref().ok_or(PassOver::RefusedVersion)?;
        while_waiting(frames, loan.fetch(self.request.range.clone())).await.map_err(refusal)
    }

    /// Gives what is resident. The lender has counted it.
    async fn give(self, frames: &Frames) {
        let mut ended = GiveEnds { task: &self, began: Instant::now(), success: false };
        let Some(loan) = &self.loan else { return };
        let chunk = Loan::CHUNK_BYTES;
        for index in self.request.range.start / chunk..self.request.range.end.div_ceil(chunk) {
            let (bytes, checksum) = match loan.chunk(index).await {
                Ok(chunk) => chunk,
                Err(error) => {
                    tracing::debug!("a give ends: {error}");
                    let _ = frames.send(Ok(refusing_frame(PassOver::NotResident))).await;
                    return;
                }
            };
            let length = bytes.len() as u64;
            let head = chunk_frame(&bytes, checksum);
            if frames.send(Ok(head)).await.is_err() || frames.send(Ok(bytes)).await.is_err() {
                return;
            }
            self.peers.note_given(&self.request.from, length);
        }
        ended.success = true;
    }
}

/// Tells the lender that a give has ended, whatever ended it.
struct GiveEnds<'a> {
    task: &'a LendTask,
    began: Instant,
    success: bool,
}

impl Drop for GiveEnds<'_> {
    fn drop(&mut self) {
        let LendTask { peers, request, ask, .. } = self.task;
        peers.state.lock().lender.ended(ask.key, &request.from, self.began.elapsed(), self.success);
    }
}

/// Tells the reader now and then that this node waits for the pool.
async fn while_waiting<T>(frames: &Frames, work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    loop {
        tokio::select! {
            done = &mut work => return done,
            // A reader that takes nothing, or has left, need not hear it.
            () = tokio::time::sleep(WAITING_EVERY) => {
                let _ = frames.try_send(Ok(waiting_frame()));
            }
        }
    }
}

fn not_a_member() -> Response<ReplyBody> {
    status(StatusCode::UNAUTHORIZED, "the token of the cluster is needed")
}

fn status(status: StatusCode, text: impl Into<ReplyBody>) -> Response<ReplyBody> {
    let mut response = Response::new(text.into());
    *response.status_mut() = status;
    response
}

fn refused(why: PassOver) -> Response<ReplyBody> {
    let code = if why == PassOver::RefusedVersion { StatusCode::PRECONDITION_FAILED } else { StatusCode::NOT_FOUND };
    let mut response = status(code, "");
    response.headers_mut().insert(PASSED_OVER, HeaderValue::from_static(why.as_str()));
    response
}

fn answered(answer: &PeerAnswer) -> Response<ReplyBody> {
    let (holders, retry_after) = match answer {
        PeerAnswer::Busy { holders, retry_after } => (holders, retry_after),
        PeerAnswer::Not(why) => return refused(*why),
        PeerAnswer::Content => return status(StatusCode::INTERNAL_SERVER_ERROR, ""),
    };
    let mut response = status(StatusCode::SERVICE_UNAVAILABLE, "");
    let headers = response.headers_mut();
    headers.insert(RETRY_AFTER_MS, HeaderValue::from(retry_after.as_millis() as u64));
    if let Ok(names) = HeaderValue::from_str(&wire::names(holders)) {
        headers.insert(HOLDERS, names);
    }
    response
}
