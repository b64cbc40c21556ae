//! Stages on all members of the cluster: asks each of them at once, and adds up what they report.
//!
//! Each member gets the same request, fetches what it has to stage as a reader does (from the owners before the pool), and
//! reports by lines as those of the control socket. This node stages its own share without a request. A member that fails, or
//! is silent for [`STAGE_SILENCE`], stops no other one. If the receiver of the progress is dropped, all members stop.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use forebay_api::operator::{Progress, StageRequest, Summary};
use forebay_api::peers::{ClusterShare, MemberStage, MemberStageState, Placement};
use forebay_api::protocol::{Reply, Request};
use forebay_api::{Failure, FailureKind};
use forebay_cluster::Member;
use forebay_engine::Overlay;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt, future, stream};
use http::StatusCode;
use parking_lot::Mutex;
use reqwest::Response;
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::peers::{ClusterView, Peers};
use crate::wire::{MEMBERS, NODE, STAGE_BYTES, STAGE_LINE_BYTES, STAGE_PATH, STAGE_SILENCE};

/// Steps that wait for the client. If it takes none, the members are not heard, and wait, too.
const STEPS_AHEAD: usize = 64;
/// The interval of totals: often enough for a progress bar.
const TOTALS_TOLD_EVERY: Duration = Duration::from_millis(50);
/// The longest reason that is taken from the answer of a member that refuses.
const REASON_BYTES: usize = 1 << 10;

/// Why a member gives no summary.
type NoSummary = (MemberStageState, String);

impl Peers {
    /// Stages on the members that may stage a share, and returns the progress of all: totals, failed files, and at the end the
    /// sum, with what each member did. Must be called on the engine's tokio runtime.
    ///
    /// # Errors
    /// If the request cannot be one for other nodes, or no member may stage.
    pub fn stage(
        self: &Arc<Self>,
        share: ClusterShare,
        request: StageRequest,
        overlay: &Overlay,
    ) -> Result<BoxStream<'static, Progress>, Failure> {
        overlay.check_cluster_stage(&request)?;
        let cluster = self.cluster.load_full();
        let members = stagers(&cluster, share)?;
        let request = StageRequest { job: None, cluster: Some(share), ..request };
        let line = Request::Stage(request.clone()).to_line();
        let line = Bytes::from(line.map_err(|e| Failure::new(FailureKind::Other, e.to_string()))?);
        if line.len() > STAGE_BYTES {
            let failure = Failure::usage("the list of paths is too long for one request to other nodes");
            return Err(failure.remedy("split it"));
        }
        let (steps, mut receiver) = mpsc::channel(STEPS_AHEAD);
        let totals = Totals { of_members: vec![MemberTotals::default(); members.len()], told: None };
        let staging = ClusterStaging { peers: self.clone(), cluster, members, totals: Mutex::new(totals), steps };
        let overlay = overlay.clone();
        let task = async move {
            tokio::select! {
                () = staging.stage_all(&request, &line, &overlay) => {}
                () = staging.steps.closed() => {
                    tracing::info!("a stage on the cluster ended early: its client disconnected");
                }
            }
        };
        tokio::spawn(task.boxed());
        Ok(stream::poll_fn(move |cx| receiver.poll_recv(cx)).boxed())
    }
}

/// Returns the members that are to stage.
fn stagers(cluster: &ClusterView, share: ClusterShare) -> Result<Vec<Member>, Failure> {
    let (roster, placing) = (&cluster.roster, &cluster.settings.placing);
    let members: Vec<Member> = match (placing.placement, share) {
        (Placement::Own, _) => {
            return Err(Failure::usage("the nodes of this cluster ask each other for nothing: the placement is own")
                .remedy("run `forebay stage` on each node, or give another placement in the peers files"));
        }
        (Placement::Pool, ClusterShare::Owners) => {
            return Err(Failure::usage("no member owns content: the placement is pool")
                .remedy("--cluster=each, or another placement in the peers files"));
        }
        (_, ClusterShare::Each) => {
            roster.members().iter().filter(|member| placing.confine_to.allows(&member.id)).cloned().collect()
        }
        (_, ClusterShare::Owners) => {
            placing.eligible(roster).into_iter().map(|seat| roster.member(seat).clone()).collect()
        }
    };
    if members.is_empty() {
        return Err(Failure::usage("no member of the cluster may have content of this pool")
            .remedy("look at placement, confine-to and roles in the peers files; `forebay peers` lists the members"));
    }
    Ok(members)
}

/// A stage that is under way on the members.
struct ClusterStaging {
    peers: Arc<Peers>,
    cluster: Arc<ClusterView>,
    members: Vec<Member>,
    totals: Mutex<Totals>,
    steps: mpsc::Sender<Progress>,
}

struct Totals {
    of_members: Vec<MemberTotals>,
    /// When the sum was last reported.
    told: Option<Instant>,
}

/// What one member has reported so far.
#[derive(Debug, Clone, Copy, Default)]
struct MemberTotals {
    planned_files: u64,
    planned_bytes: u64,
    files: u64,
    bytes: u64,
}

impl Totals {
    fn sum(&self, of: impl Fn(&MemberTotals) -> u64) -> u64 {
        self.of_members.iter().map(of).fold(0, u64::saturating_add)
    }
}

impl ClusterStaging {
    async fn stage_all(&self, request: &StageRequest, line: &Bytes, overlay: &Overlay) {
        let begun = Instant::now();
        let each = self.members.iter().enumerate().map(|(at, member)| {
            async move {
                let ended = match member.id == self.cluster.this {
                    true => self.stage_here(at, overlay.stage(request.clone()).boxed()).await,
                    false => self.ask(at, member, line.clone()).await,
                };
                self.outcome(at, ended, begun.elapsed())
            }
            .boxed()
        });
        let members = future::join_all(each).await;
        let _ = self.steps.send(Progress::Done(self.summary(members, begun.elapsed()))).await;
    }

    /// Follows the stage of this node.
    async fn stage_here(&self, at: usize, mut progress: BoxStream<'_, Progress>) -> Result<Summary, NoSummary> {
        while let Some(step) = progress.next().await {
            if let Some(summary) = self.take(at, step).await {
                return Ok(summary);
            }
        }
        Err((MemberStageState::Incomplete, "it stopped the work without a summary".into()))
    }

    /// Asks another member to stage, and follows it to its end.
    async fn ask(&self, at: usize, member: &Member, line: Bytes) -> Result<Summary, NoSummary> {
        let ClusterStaging { peers, cluster, .. } = self;
        let request = peers
            .http
            .post(format!("http://{}{STAGE_PATH}", member.address))
            .bearer_auth(&cluster.settings.token)
            .header(NODE, cluster.this.as_str())
            .header(MEMBERS, format!("{:016x}", cluster.fingerprint))
            .body(line);
        let response = match timeout(STAGE_SILENCE, request.send()).await {
            Err(_) => return Err(silent()),
            Ok(Err(error)) => return Err(unreachable(&error)),
            Ok(Ok(response)) => response,
        };
        if response.status() != StatusCode::OK {
            return Err((MemberStageState::Refused, refusal(response).await));
        }
        let mut lines = ReplyLines { response, pending: BytesMut::new() };
        let mut summary = None;
        loop {
            match lines.next().await {
                Ok(Reply::Progress(step)) => summary = self.take(at, step).await.or(summary),
                Ok(Reply::Alive) => {}
                Ok(Reply::Error(failure)) => return Err((MemberStageState::Refused, failure.what)),
                ended => return summary.ok_or_else(|| ended.err().unwrap_or_else(broken)),
            }
        }
    }

    /// Reports a step of one member. Returns its summary, which is the last one.
    async fn take(&self, at: usize, step: Progress) -> Option<Summary> {
        let told = match step {
            Progress::Planned { files, bytes } => {
                let mut totals = self.totals.lock();
                let member = &mut totals.of_members[at];
                (member.planned_files, member.planned_bytes) = (files, bytes);
                let (files, bytes) = (totals.sum(|of| of.planned_files), totals.sum(|of| of.planned_bytes));
                Some(Progress::Planned { files, bytes })
            }
            Progress::Advanced { files, bytes } => {
                let mut totals = self.totals.lock();
                let member = &mut totals.of_members[at];
                (member.files, member.bytes) = (files, bytes);
                let is_due = totals.told.is_none_or(|told| told.elapsed() >= TOTALS_TOLD_EVERY);
                if is_due {
                    totals.told = Some(Instant::now());
                }
                let (files, bytes) = (totals.sum(|of| of.files), totals.sum(|of| of.bytes));
                is_due.then_some(Progress::Advanced { files, bytes })
            }
            Progress::Failed { path, reason } => {
                Some(Progress::Failed { path, reason: format!("{}: {reason}", self.members[at].id) })
            }
            Progress::UnderWay(works) => Some(Progress::UnderWay(works)),
            // Only of a command.
            Progress::Wanted(_) => None,
            Progress::Done(summary) => return Some(summary),
        };
        if let Some(told) = told {
            let _ = self.steps.send(told).await;
        }
        None
    }

    /// Returns what a member did. Of a member without a summary, what it has reported before.
    fn outcome(&self, at: usize, ended: Result<Summary, NoSummary>, took: Duration) -> MemberStage {
        let node = self.members[at].id.to_string();
        match ended {
            Ok(summary) => {
                let state = match (summary.refused, summary.failed) {
                    (Some(_), _) => MemberStageState::Refused,
                    (None, 0) => MemberStageState::Staged,
                    (None, _) => MemberStageState::Incomplete,
                };
                let Summary { files, bytes, failed, elapsed_ms, message, .. } = summary;
                MemberStage { node, state, files, bytes, failed, elapsed_ms, message }
            }
            Err((state, why)) => {
                let MemberTotals { files, bytes, .. } = self.totals.lock().of_members[at];
                let elapsed_ms = took.as_millis() as u64;
                MemberStage { node, state, files, bytes, failed: 1, elapsed_ms, message: Some(why) }
            }
        }
    }

    fn summary(&self, members: Vec<MemberStage>, took: Duration) -> Summary {
        let sum = |of: fn(&MemberStage) -> u64| members.iter().map(of).fold(0, u64::saturating_add);
        let reads_alone = self.cluster.settings.placing.placement == Placement::Pool;
        Summary {
            files: sum(|member| member.files),
            bytes: sum(|member| member.bytes),
            failed: sum(|member| member.failed),
            elapsed_ms: took.as_millis() as u64,
            message: reads_alone.then(|| "each member reads the pool itself: the placement is pool".into()),
            members,
            ..Summary::default()
        }
    }
}

fn silent() -> NoSummary {
    (MemberStageState::TimedOut, format!("it has said nothing for {} s", STAGE_SILENCE.as_secs()))
}

fn broken() -> NoSummary {
    (MemberStageState::Unreachable, "it ended its answer without a summary".into())
}

/// Names the innermost cause of an error: what is around it repeats the address.
fn unreachable(error: &reqwest::Error) -> NoSummary {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    (MemberStageState::Unreachable, cause.to_string())
}

/// Returns why a member refuses, which it says in the content of its answer.
async fn refusal(mut response: Response) -> String {
    let status = response.status();
    if status == StatusCode::UNAUTHORIZED {
        return "it has another token".into();
    }
    let mut text = BytesMut::new();
    while text.len() < REASON_BYTES
        && let Ok(Ok(Some(piece))) = timeout(STAGE_SILENCE, response.chunk()).await
    {
        text.extend_from_slice(&piece[..piece.len().min(REASON_BYTES)]);
    }
    let text = String::from_utf8_lossy(&text).trim().to_owned();
    match status {
        StatusCode::FORBIDDEN | StatusCode::CONFLICT => text,
        // A member of an older version does not know the request.
        _ => format!("{text} ({status}); does it have this version of forebay?"),
    }
}

/// The lines of a member's answer.
struct ReplyLines {
    response: Response,
    /// What has arrived, and was not taken.
    pending: BytesMut,
}

impl ReplyLines {
    /// Returns the next reply.
    async fn next(&mut self) -> Result<Reply, NoSummary> {
        loop {
            if let Some(reply) = next_reply(&mut self.pending)? {
                return Ok(reply);
            }
            match timeout(STAGE_SILENCE, self.response.chunk()).await {
                Err(_) => return Err(silent()),
                Ok(Ok(Some(piece))) => self.pending.extend_from_slice(&piece),
                Ok(Ok(None)) => return Err(broken()),
                Ok(Err(error)) => return Err(unreachable(&error)),
            }
        }
    }
}

/// Takes the first reply of what has arrived; `None` if its line is not complete.
fn next_reply(pending: &mut BytesMut) -> Result<Option<Reply>, NoSummary> {
    let bad = || (MemberStageState::Refused, "its answer is not understood: does it have this version?".to_owned());
    let Some(end) = pending.iter().position(|byte| *byte == b'\n') else {
        return if pending.len() > STAGE_LINE_BYTES { Err(bad()) } else { Ok(None) };
    };
    let line = pending.split_to(end + 1);
    Reply::from_line(&line).map(Some).map_err(|_| bad())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_read_line_by_line_and_what_is_none_is_refused() {
        let mut pending = BytesMut::new();
        for reply in [Reply::Alive, Reply::Progress(Progress::Advanced { files: 2, bytes: 7 }), Reply::End] {
            pending.extend_from_slice(&reply.to_line().unwrap());
        }
        pending.extend_from_slice(b"{\"reply\":\"al");
        assert!(matches!(next_reply(&mut pending), Ok(Some(Reply::Alive))));
        let Ok(Some(Reply::Progress(Progress::Advanced { files: 2, bytes: 7 }))) = next_reply(&mut pending) else {
            panic!("{pending:?}")
        };
        assert!(matches!(next_reply(&mut pending), Ok(Some(Reply::End))));
        assert!(matches!(next_reply(&mut pending), Ok(None)));
        pending.extend_from_slice(b"ive\"}\n\n");
        assert!(matches!(next_reply(&mut pending), Ok(Some(Reply::Alive))));
        assert!(next_reply(&mut pending).is_err(), "an empty line is no reply");
        let mut endless = BytesMut::from(&vec![b'x'; STAGE_LINE_BYTES + 1][..]);
        assert!(next_reply(&mut endless).is_err());
    }
}
