//! Asks other nodes for a range, before the pool is asked.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use forebay_backends::{Content, Error, ErrorKind, PoolPath, Result, Side, Version};
use forebay_cluster::{Asking, AskingStep, Enquiry, NodeId, PassOver, PeerAnswer, RANGE_BYTES};
use forebay_engine::{Loan, PeerSource, PeerWish};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, stream};
use http::StatusCode;
use reqwest::Response;
use tokio::time::{sleep, timeout};

use crate::peers::{Peers, RangeInUse, RangeOwners};
use crate::wire::{
    FrameHead, FrameReader, HOLDERS, PASSED_OVER, PeerFrame, PeerRequest, RETRY_AFTER_MS, fits_in_head, nodes_in,
    reason_in, target,
};

/// The longest time until the first bytes of an owner that reads the pool, and says that it does. After it, the next owner is
/// asked, or the pool: the owner's own devices may hang.
const FIRST_BYTES_WITHIN: Duration = Duration::from_secs(60);
/// When a node that has become busy while it read the pool is asked again.
const BUSY_AGAIN: Duration = Duration::from_millis(50);
/// The longest pause that a busy node may ask for.
const BUSY_LONGEST: Duration = Duration::from_secs(5);

/// Asks the other nodes of a cluster before the pool.
pub struct PeerClient(pub Arc<Peers>);

impl PeerSource for PeerClient {
    fn stream(&self, wish: PeerWish) -> BoxFuture<'_, Option<Content>> {
        self.0.search(wish).boxed()
    }

    fn first_owned(&self, path: &PoolPath, version: &Version) -> Vec<Range<u64>> {
        self.0.first_owned(path, version)
    }

    fn announce(&self, path: &PoolPath) {
        self.0.announce(path);
    }
}

/// An answer that brings content.
struct Incoming {
    peers: Arc<Peers>,
    from: NodeId,
    response: Response,
    frames: FrameReader,
    /// What has not come yet.
    left: Range<u64>,
    /// The longest pause between bytes.
    pause: Duration,
    has_begun: bool,
    _in_use: Option<RangeInUse>,
}

impl Peers {
    /// Returns content of the beginning of a wish, of which the first chunk has begun to come. It may end before the wish
    /// does: other nodes own the rest.
    async fn search(self: &Arc<Self>, wish: PeerWish) -> Option<Content> {
        let file = self.file_key(&wish.path);
        let end = wish.range.end.min((wish.range.start / RANGE_BYTES + 1) * RANGE_BYTES);
        let wish = PeerWish { range: wish.range.start..end, ..wish };
        let owners = self.owners(file, &wish.version, wish.range.start);
        let this = &owners.cluster.this;
        if !fits_in_head(&wish.path, &wish.version, &owners.cluster.settings.token) {
            tracing::debug!(path = %wish.path, "its path is too long for a request to a peer");
            return None;
        }
        // What is fetched for others comes from the pool: they have asked the others.
        if !owners.cluster.settings.placing.asks(this) || self.for_others.overlaps(file, &wish.range) {
            return None;
        }
        let roster = &owners.cluster.roster;
        let unsettled = self.is_unsettled();
        let mut asking = Asking::begin(self.now(), this, owners.key, roster, &owners.ranked, unsettled, false);
        let in_use = self.from_others.begin(file, wish.range.clone());
        if self.for_others.overlaps(file, &wish.range) {
            return None;
        }
        loop {
            let step = {
                let state = &mut *self.state.lock();
                asking.next(self.now(), &state.patience, &mut state.suspicions, &mut state.pass_overs)
            };
            let enquiry = match step {
                AskingStep::Pool => return None,
                AskingStep::Wait(until) => {
                    sleep(until.saturating_sub(self.now())).await;
                    continue;
                }
                AskingStep::Ask(enquiry) => enquiry,
            };
            for (enquiry, answer) in self.ask(&mut asking, enquiry, &owners, &wish).await {
                match answer {
                    Ok(incoming) => return Some(Incoming { _in_use: Some(in_use), ..incoming }.into_stream()),
                    Err(mut answer) => {
                        if let PeerAnswer::Busy { holders, .. } = &mut answer {
                            // Holders may have left since.
                            holders.retain(|id| roster.get(id).is_some());
                        }
                        match &answer {
                            PeerAnswer::Busy { .. } => self.note_passed_over(&enquiry.peer, PassOver::Busy),
                            PeerAnswer::Not(why) => self.note_passed_over(&enquiry.peer, *why),
                            PeerAnswer::Content => {}
                        }
                        let state = &mut *self.state.lock();
                        asking.answered(
                            self.now(),
                            (&enquiry.peer, enquiry.purpose),
                            &answer,
                            &mut state.suspicions,
                            &mut state.pass_overs,
                        );
                    }
                }
            }
        }
    }

    /// Asks a member, and a second one beside it if the first is silent for too long. Returns the answers; of content, the
    /// first one that came.
    async fn ask(
        self: &Arc<Self>,
        asking: &mut Asking,
        enquiry: Enquiry,
        owners: &RangeOwners,
        wish: &PeerWish,
    ) -> Vec<(Enquiry, Result<Incoming, PeerAnswer>)> {
        let head_came = AtomicBool::new(false);
        let mut first = self.ask_one(enquiry.clone(), owners, wish, &head_came).boxed();
        tokio::select! {
            answer = &mut first => return vec![(enquiry, answer)],
            () = sleep(enquiry.hedge_at.saturating_sub(self.now())) => {}
        }
        if head_came.load(Ordering::Relaxed) {
            // It waits for the pool.
            return vec![(enquiry, first.await)];
        }
        let second = {
            let state = &*self.state.lock();
            asking.hedge(self.now(), &enquiry.peer, &state.patience, &state.suspicions)
        };
        let Some(second) = second else { return vec![(enquiry, first.await)] };
        let ignored = AtomicBool::new(false);
        let mut other = self.ask_one(second.clone(), owners, wish, &ignored).boxed();
        tokio::select! {
            answer = &mut first => match answer {
                Ok(_) => vec![(enquiry, answer)],
                Err(_) => vec![(enquiry, answer), (second, other.await)],
            },
            answer = &mut other => match answer {
                Ok(_) if head_came.load(Ordering::Relaxed) => vec![(second, answer)],
                Ok(_) => vec![(enquiry, Err(PeerAnswer::Not(PassOver::Slow))), (second, answer)],
                Err(_) => vec![(second, answer), (enquiry, first.await)],
            },
        }
    }

    /// Asks one member, and waits until its first chunk begins to come. The bytes stay with the member until the reader
    /// has memory for them.
    async fn ask_one(
        self: &Arc<Self>,
        enquiry: Enquiry,
        owners: &RangeOwners,
        wish: &PeerWish,
        head_came: &AtomicBool,
    ) -> Result<Incoming, PeerAnswer> {
        let cluster = &owners.cluster;
        let Some(member) = cluster.roster.get(&enquiry.peer) else { return Err(PeerAnswer::Not(PassOver::Gone)) };
        let url = format!("http://{}{}", member.address, target(&wish.path));
        let asked = PeerRequest {
            from: cluster.this.clone(),
            version: wish.version.clone(),
            range: wish.range.clone(),
            purpose: enquiry.purpose,
            passed: enquiry.passed.iter().cloned().collect(),
            members: cluster.fingerprint,
        };
        let mut request = self.http.get(url).bearer_auth(&cluster.settings.token);
        for (name, value) in asked.headers() {
            request = request.header(name, value);
        }
        let began = self.now();
        let pause = enquiry.give_up_at.saturating_sub(began);
        let response = match timeout(pause, request.send()).await {
            Err(_) => {
                self.state.lock().patience.took(pause);
                return Err(PeerAnswer::Not(PassOver::Slow));
            }
            Ok(Err(error)) => {
                tracing::debug!(peer = %enquiry.peer, "a peer is passed over: {error}");
                let why = match () {
                    // The member was not asked: no request can be made of this.
                    () if error.is_builder() => PassOver::Confined,
                    () if error.is_timeout() && !error.is_connect() => PassOver::Slow,
                    () => PassOver::Gone,
                };
                return Err(PeerAnswer::Not(why));
            }
            Ok(Ok(response)) => response,
        };
        self.state.lock().patience.took(self.now().saturating_sub(began));
        head_came.store(true, Ordering::Relaxed);
        if response.status() != StatusCode::PARTIAL_CONTENT {
            return Err(refusal(&enquiry.peer, &response));
        }
        let mut incoming = Incoming {
            peers: self.clone(),
            from: enquiry.peer.clone(),
            response,
            frames: FrameReader::default(),
            left: wish.range.clone(),
            pause,
            has_begun: false,
            _in_use: None,
        };
        match timeout(FIRST_BYTES_WITHIN, incoming.begin()).await.unwrap_or(Err(PassOver::Slow)) {
            Ok(()) => Ok(incoming),
            Err(PassOver::Busy) => Err(PeerAnswer::Busy { holders: Default::default(), retry_after: BUSY_AGAIN }),
            Err(why) => Err(PeerAnswer::Not(why)),
        }
    }
}

fn refusal(peer: &NodeId, response: &Response) -> PeerAnswer {
    let text = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
    match response.status() {
        StatusCode::PRECONDITION_FAILED => PeerAnswer::Not(PassOver::RefusedVersion),
        StatusCode::SERVICE_UNAVAILABLE => PeerAnswer::Busy {
            holders: nodes_in(text(HOLDERS).unwrap_or_default()).into_iter().collect(),
            retry_after: text(RETRY_AFTER_MS)
                .and_then(|text| text.parse().ok())
                .map_or(BUSY_AGAIN, Duration::from_millis)
                .min(BUSY_LONGEST),
        },
        StatusCode::NOT_FOUND => match text(PASSED_OVER).and_then(reason_in) {
            Some(why) => PeerAnswer::Not(why),
            None => PeerAnswer::Not(PassOver::NotResident),
        },
        // The path is too long, which is no fault of the member. Another one would say the same.
        status @ (StatusCode::URI_TOO_LONG | StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE) => {
            tracing::debug!(%peer, %status, "a peer does not take a request");
            PeerAnswer::Not(PassOver::Confined)
        }
        status => {
            tracing::warn!(%peer, %status, "a peer refuses: does it have the same token and the same version?");
            PeerAnswer::Not(PassOver::Gone)
        }
    }
}

impl Incoming {
    /// The length of the next chunk.
    fn due(&self) -> u64 {
        (self.left.end - self.left.start).min(Loan::CHUNK_BYTES)
    }

    /// Waits until the first chunk begins to come.
    async fn begin(&mut self) -> Result<(), PassOver> {
        let due = self.due();
        loop {
            match self.frames.head(due)? {
                Some(FrameHead::Chunk(_)) => {
                    self.has_begun = true;
                    return Ok(());
                }
                Some(FrameHead::Refused(why)) => return Err(why),
                Some(FrameHead::Waiting) => _ = self.frames.next(due)?,
                None => self.receive().await?,
            }
        }
    }

    /// Returns the next chunk. Must not be called after the last one.
    async fn next(&mut self) -> Result<Bytes, PassOver> {
        let due = self.due();
        loop {
            match self.frames.next(due)? {
                Some(PeerFrame::Chunk(bytes)) => {
                    self.left.start += bytes.len() as u64;
                    self.has_begun = true;
                    if self.left.is_empty() {
                        self.peers.state.lock().suspicions.answered(&self.from);
                    }
                    self.peers.note_read(&self.from, bytes.len() as u64);
                    return Ok(bytes);
                }
                Some(PeerFrame::Refused(why)) => return Err(why),
                // A member that sends content does not wait for the pool.
                Some(PeerFrame::Waiting) if self.has_begun => return Err(PassOver::Damaged),
                Some(PeerFrame::Waiting) => {}
                None => self.receive().await?,
            }
        }
    }

    /// Waits for more bytes of the answer.
    async fn receive(&mut self) -> Result<(), PassOver> {
        match timeout(self.pause, self.response.chunk()).await {
            Err(_) => Err(PassOver::Slow),
            Ok(Ok(Some(bytes))) => {
                self.frames.arrived(&bytes);
                Ok(())
            }
            Ok(Ok(None)) if self.frames.is_empty() => Err(PassOver::Gone),
            Ok(Ok(None)) => Err(PassOver::Damaged),
            Ok(Err(_)) => Err(PassOver::Gone),
        }
    }

    /// Returns a stream of the chunks.
    fn into_stream(self) -> Content {
        stream::unfold(Some(self), |incoming| async move {
            let mut incoming = incoming?;
            if incoming.left.is_empty() {
                return None;
            }
            match incoming.next().await {
                Ok(bytes) => Some((Ok(bytes), Some(incoming))),
                Err(why) => {
                    let Self { peers, from, .. } = &incoming;
                    peers.note_passed_over(from, why);
                    let state = &mut *peers.state.lock();
                    state.suspicions.passed_over(peers.now(), from, why);
                    state.pass_overs.count(why);
                    let error = Error::new(ErrorKind::Unavailable, Side::Pool, format!("peer {from}: {why}"));
                    Some((Err(error), None))
                }
            }
        })
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use forebay_api::peers::PeerState;
    use forebay_backends::{Time, Version};
    use forebay_cluster::{Member, Placing, Role};
    use futures::TryStreamExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::sync::oneshot;

    use super::*;
    use crate::settings::PeerSettings;
    use crate::wire::chunk_frame;

    const CHUNK: usize = Loan::CHUNK_BYTES as usize;

    /// A node whose only peer answers at this address.
    fn reader(peer: SocketAddr) -> Arc<Peers> {
        let member =
            |name: &str, address: String| Member { id: NodeId::new(name).unwrap(), address, role: Role::Compute };
        let own = member("this", "127.0.0.1:7410".into());
        let settings = PeerSettings {
            own: own.clone(),
            listen: "127.0.0.1:7410".parse().unwrap(),
            token: "0123456789abcdef".into(),
            placing: Placing::default(),
            members: vec![own, member("peer", peer.to_string())],
            etcd: None,
        };
        Peers::new("pool".into(), settings).unwrap()
    }

    /// A chunk that the peer owns, of a file in this directory.
    fn owned_by_peer(reader: &Peers, dir: &str) -> PeerWish {
        let time = Time { secs: 1, nanos: 0 };
        let version = Version::Tag { etag: "e".into(), id: String::new(), size: CHUNK as u64, mtime: time };
        let is_peers = |path: &PoolPath| {
            let owners = reader.owners(reader.file_key(path), &version, 0);
            let first = owners.ranked.first().map(|seat| owners.cluster.roster.member(*seat).id.clone());
            first.is_some_and(|first| first.as_str() == "peer")
        };
        let mut paths = (0..1000).map(|at| PoolPath::parse(format!("{dir}f{at}")).unwrap());
        let path = paths.find(is_peers).unwrap();
        PeerWish { path, version, range: 0..CHUNK as u64 }
    }

    async fn head_of_request(stream: &mut TcpStream) {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
    }

    fn state(reader: &Peers) -> Option<PeerState> {
        let members = reader.status().members;
        members.into_iter().find(|member| member.node == "peer").map(|member| member.state)
    }

    #[tokio::test]
    async fn a_search_ends_when_a_chunk_begins_to_come_and_its_bytes_come_when_they_are_taken() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let reader = reader(listener.local_addr().unwrap());
        let (go_on, goes_on) = oneshot::channel::<()>();
        let content = Bytes::from(vec![7; CHUNK]);
        let sent = content.clone();
        let peer = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            head_of_request(&mut stream).await;
            let head = format!("HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\n\r\n", 8 + CHUNK);
            stream.write_all(head.as_bytes()).await.unwrap();
            stream.write_all(&chunk_frame(&sent, crc32c::crc32c(&sent))).await.unwrap();
            stream.write_all(&sent[..1000]).await.unwrap();
            goes_on.await.unwrap();
            stream.write_all(&sent[1000..]).await.unwrap();
        });
        let found = reader.search(owned_by_peer(&reader, "")).await.expect("the peer gives");
        go_on.send(()).unwrap();
        let got: Vec<Bytes> = found.try_collect().await.unwrap();
        assert!(got == [content]);
        peer.await.unwrap();
    }

    #[tokio::test]
    async fn a_peer_that_refuses_a_long_path_is_not_suspected_but_one_that_does_not_understand_a_request_is() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let reader = reader(listener.local_addr().unwrap());
        let wish = owned_by_peer(&reader, "");
        let refusals = [
            ("414 URI Too Long", PeerState::Trusted),
            ("431 Request Header Fields Too Large", PeerState::Trusted),
            // It does not understand what is asked.
            ("400 Bad Request", PeerState::Suspected),
        ];
        for (status, then) in refusals {
            let answer = async {
                let (mut stream, _) = listener.accept().await.unwrap();
                head_of_request(&mut stream).await;
                let head = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
                stream.write_all(head.as_bytes()).await.unwrap();
                stream.shutdown().await.unwrap();
            };
            let (found, ()) = tokio::join!(reader.search(wish.clone()), answer);
            assert!(found.is_none());
            assert_eq!(state(&reader), Some(then), "{status}");
        }
        let mut passed_over = reader.status().passed_over;
        passed_over.sort_by_key(|(_, times)| *times);
        assert_eq!(passed_over, [(PassOver::Gone, 1), (PassOver::Confined, 2)]);
    }

    #[tokio::test]
    async fn what_has_too_long_a_path_for_a_request_is_not_asked_for() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let reader = reader(listener.local_addr().unwrap());
        // The longest names, each byte of which is escaped: more than a head, and more than the URI of any request.
        for depth in [45, 100] {
            let dir = format!("{}/", "\u{e9}".repeat(127)).repeat(depth);
            assert!(reader.search(owned_by_peer(&reader, &dir)).await.is_none());
        }
        assert!(listener.accept().now_or_never().is_none(), "the peer is asked");
        assert_eq!((state(&reader), reader.status().passed_over), (Some(PeerState::Trusted), Vec::new()));
    }
}
