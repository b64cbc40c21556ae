//! Stages for another node that stages on the whole cluster.

use std::io;
use std::pin::pin;

use bytes::Bytes;
use forebay_api::operator::StageRequest;
use forebay_api::peers::ClusterShare;
use forebay_api::protocol::{Reply, Request as ControlRequest};
use forebay_cluster::{NodeId, Placement};
use forebay_engine::Overlay;
use forebay_serve::{ReplyBody, RequestContent};
use futures::{FutureExt, StreamExt, stream};
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::{PeerDoor, status};
use crate::wire::{MEMBERS, NODE, STAGE_ALIVE_EVERY};

/// Lines that wait for the node that asks.
const LINES_AHEAD: usize = 16;
/// The longest reason of a refusal: it may quote the request.
const REASON_CHARS: usize = 400;
/// The longest name of an owner of leases: the catalog stores it with each file.
const OWNER_BYTES: usize = 255;

type Lines = mpsc::Sender<io::Result<Bytes>>;

impl PeerDoor {
    /// Stages this node's share of a request, and answers with its progress. Asks no other node to stage.
    pub(super) fn stage(&self, request: &Request<RequestContent>) -> Response<ReplyBody> {
        let (&Method::POST, RequestContent::Some(content)) = (request.method(), request.body()) else {
            return status(StatusCode::BAD_REQUEST, "POST, with a request to stage");
        };
        let asked = match self.requested(content, request.headers()) {
            Ok(asked) => asked,
            Err((code, why)) => return status(code, why.chars().take(REASON_CHARS).collect::<String>()),
        };
        let (lines, mut receiver) = mpsc::channel(LINES_AHEAD);
        let (overlay, turns) = (self.overlay.clone(), self.stage_turns.clone());
        let task = async move {
            let work = async {
                let turn = alive_until(&lines, pin!(turns.acquire())).await;
                carry_out(&overlay, asked, &lines).await;
                drop(turn);
            };
            tokio::select! {
                () = work => {}
                () = lines.closed() => tracing::info!("a stage for another node ended early: it does not listen"),
            }
        };
        tokio::spawn(task.boxed());
        let mut response = Response::new(ReplyBody::pieces(stream::poll_fn(move |cx| receiver.poll_recv(cx)), None));
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
        response
    }

    /// Returns the request in the content of an HTTP request, or why this node does not carry it out.
    fn requested(&self, content: &[u8], headers: &HeaderMap) -> Result<StageRequest, (StatusCode, String)> {
        let bad = |why: String| (StatusCode::BAD_REQUEST, why);
        let asked = match ControlRequest::from_line(content).map_err(|failure| bad(failure.what))? {
            ControlRequest::Stage(asked) => asked,
            _ => return Err(bad("a member is asked to stage, and for nothing else".into())),
        };
        let share = asked.cluster.ok_or_else(|| bad("cluster: each or owners".into()))?;
        if asked.job.is_some() {
            return Err(bad("job: jobs of another node are not known here".into()));
        }
        if asked.lease_owner.len() > OWNER_BYTES {
            return Err(bad(format!("lease_owner: at most {OWNER_BYTES} bytes")));
        }
        if asked.bytes_per_second == Some(0) {
            return Err(bad("bytes_per_second: above 0".into()));
        }
        self.overlay.check_cluster_stage(&asked).map_err(|e| bad(e.to_string()))?;
        self.check_share(headers, share)?;
        Ok(asked)
    }

    /// Checks whether this node may have content, and whether it agrees with the other node on the owners.
    fn check_share(&self, headers: &HeaderMap, share: ClusterShare) -> Result<(), (StatusCode, String)> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let from = text(NODE).and_then(|name| NodeId::new(name).ok());
        let members = text(MEMBERS).and_then(|text| u64::from_str_radix(text, 16).ok());
        let (Some(from), Some(members)) = (from, members) else {
            return Err((StatusCode::BAD_REQUEST, format!("{NODE}, {MEMBERS}: the node that asks, and its members")));
        };
        self.peers.note_members(&from, members);
        let view = self.peers.cluster.load();
        let placing = &view.settings.placing;
        if placing.placement == Placement::Own {
            return Err((StatusCode::FORBIDDEN, "by its peers file, the placement is own".into()));
        }
        if !placing.confine_to.allows(&view.this) {
            let why = "by its peers file, content is confined to other members";
            return Err((StatusCode::FORBIDDEN, why.into()));
        }
        if share == ClusterShare::Owners && members != view.fingerprint {
            let why = "it sees other members or another placement, so the shares would not fit together";
            return Err((StatusCode::CONFLICT, why.into()));
        }
        Ok(())
    }
}

async fn carry_out(overlay: &Overlay, asked: StageRequest, lines: &Lines) {
    let mut progress = pin!(overlay.stage(asked));
    while let Some(step) = alive_until(lines, progress.next()).await {
        if !send(lines, &Reply::Progress(step)).await {
            return;
        }
    }
    send(lines, &Reply::End).await;
}

/// Waits for `work`. Meanwhile the other node hears that this one is alive.
async fn alive_until<T>(lines: &Lines, mut work: impl Future<Output = T> + Unpin) -> T {
    loop {
        match timeout(STAGE_ALIVE_EVERY, &mut work).await {
            Ok(done) => return done,
            Err(_) => _ = send(lines, &Reply::Alive).await,
        }
    }
}

/// Returns whether the other node still listens.
async fn send(lines: &Lines, reply: &Reply) -> bool {
    let line = reply.to_line().map(Bytes::from).map_err(io::Error::other);
    lines.send(line).await.is_ok()
}
