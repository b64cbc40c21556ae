//! Whether the client of an HTTP/2 connection still takes something, and asks for something.
//!
//! HTTP/1 responses wait in the socket, where [`crate::transport::Patient`] sees that nothing is taken. An HTTP/2 client has a
//! window for each response: with a window of nothing, the socket takes everything, such as answers to its pings, and no byte
//! of a response is sent. So what counts is the content that leaves, and what the responses wait for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::send_budget::{ConnectionBudget, ResponseBudget};

/// Bytes of the head of a frame (RFC 9113, section 4.1).
const FRAME_HEAD: usize = 9;
/// The type of a frame with content of a response.
const DATA: u8 = 0;

/// What happens on one connection.
#[derive(Clone)]
pub struct Http2Activity(Arc<ActivityShared>);

struct ActivityShared {
    state: Mutex<ActivityState>,
    /// Once the connection is known to be one of HTTP/2.
    begun: Notify,
    budget: ConnectionBudget,
}

struct ActivityState {
    /// Requests that are being answered, and responses whose bodies have not come to their end.
    open: usize,
    /// Those of which the connection has a piece that it cannot send yet, or so much of all that there is no room for another
    /// piece. The others wait for the pool.
    unsent: usize,
    /// Bytes of content that the connection has got from responses.
    given: u64,
    /// Those that it has sent.
    sent: u64,
    /// When a request came, content moved, or a response ended.
    moved: Instant,
}

/// How long a client may do nothing.
#[derive(Debug, Clone, Copy)]
pub struct Http2Patience {
    /// While there is no response for it.
    pub idle: Duration,
    /// While content waits for it.
    pub stalled: Duration,
}

impl Http2Activity {
    pub fn new() -> Self {
        let state = ActivityState { open: 0, unsent: 0, given: 0, sent: 0, moved: Instant::now() };
        let (state, budget) = (Mutex::new(state), ConnectionBudget::new());
        Self(Arc::new(ActivityShared { state, begun: Notify::new(), budget }))
    }

    /// The connection is one of HTTP/2.
    pub fn begin(&self) {
        self.0.begun.notify_one();
    }

    /// A request has come.
    pub fn open(&self) -> OpenResponse {
        let mut state = self.0.state.lock();
        state.open += 1;
        state.moved = Instant::now();
        OpenResponse { activity: self.clone(), budget: self.0.budget.response(), has_unsent: false }
    }

    /// Waits until the client has done nothing for too long. Of a connection of another version of HTTP, it waits for ever.
    pub async fn until_over(&self, patience: Http2Patience) -> Http2End {
        self.0.begun.notified().await;
        loop {
            let (left, end) = {
                let state = self.0.state.lock();
                (state.left(patience, Instant::now()), state.end())
            };
            match left {
                Some(Duration::ZERO) => return end,
                Some(left) => tokio::time::sleep(left).await,
                // Whatever ends this moves something, and begins another wait of this length at least.
                None => tokio::time::sleep(patience.idle.min(patience.stalled)).await,
            }
        }
    }

    fn sent(&self, bytes: u64) {
        let mut state = self.0.state.lock();
        state.sent += bytes;
        state.moved = Instant::now();
    }
}

/// Why a connection is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Http2End {
    /// The client asks for nothing, and everything was sent.
    Idle,
    /// The client takes nothing of what waits for it.
    Stalled,
}

impl ActivityState {
    fn end(&self) -> Http2End {
        if self.open == 0 && self.given <= self.sent { Http2End::Idle } else { Http2End::Stalled }
    }

    /// Returns how long the connection may still be as it is; `None` while the responses wait for the pool.
    fn left(&self, patience: Http2Patience, now: Instant) -> Option<Duration> {
        let limit = match (self.open, self.unsent) {
            // The last pieces of responses that have ended may be unsent. Those that a client has cancelled count, too.
            (0, _) if self.given > self.sent => patience.stalled.max(patience.idle),
            (0, _) => patience.idle,
            (open, unsent) if unsent < open => return None,
            _ => patience.stalled,
        };
        Some(limit.saturating_sub(now.saturating_duration_since(self.moved)))
    }
}

/// A request until the end of its response.
pub struct OpenResponse {
    activity: Http2Activity,
    budget: ResponseBudget,
    /// The connection has not asked for another piece since it got one, or there is no room for it.
    has_unsent: bool,
}

impl OpenResponse {
    /// Returns the room for pieces of the response.
    pub fn budget(&self) -> ResponseBudget {
        self.budget.clone()
    }

    /// The connection has asked for a piece of the body that is not there yet.
    pub fn waits(&mut self) {
        match self.budget.is_waited_for() {
            // Only what the client takes makes room.
            true if !self.has_unsent => {
                self.has_unsent = true;
                self.activity.0.state.lock().unsent += 1;
            }
            true => {}
            false => self.wanted(),
        }
    }

    /// The connection asks for a piece of the body: it has sent some of the last one.
    pub fn wanted(&mut self) {
        if std::mem::take(&mut self.has_unsent) {
            let mut state = self.activity.0.state.lock();
            state.unsent -= 1;
            state.moved = Instant::now();
        }
    }

    /// The connection gets a piece of the body.
    pub fn given(&mut self, bytes: u64) {
        let mut state = self.activity.0.state.lock();
        state.given += bytes;
        state.moved = Instant::now();
        if !std::mem::replace(&mut self.has_unsent, true) {
            state.unsent += 1;
        }
    }
}

impl Drop for OpenResponse {
    fn drop(&mut self) {
        let mut state = self.activity.0.state.lock();
        state.open -= 1;
        state.unsent -= usize::from(self.has_unsent);
        state.moved = Instant::now();
    }
}

/// Finds the content in what a connection sends.
pub struct SentFrames {
    activity: Http2Activity,
    head: [u8; FRAME_HEAD],
    /// Bytes of `head` that were sent.
    head_bytes: usize,
    /// Bytes of the frame that are still to be sent, after its head.
    left: usize,
}

impl SentFrames {
    pub fn new(activity: Http2Activity) -> Self {
        Self { activity, head: [0; FRAME_HEAD], head_bytes: 0, left: 0 }
    }

    /// These bytes were sent.
    pub fn sent(&mut self, mut bytes: &[u8]) {
        let mut content = 0;
        while !bytes.is_empty() {
            if self.left == 0 {
                let taken = bytes.len().min(FRAME_HEAD - self.head_bytes);
                self.head[self.head_bytes..self.head_bytes + taken].copy_from_slice(&bytes[..taken]);
                self.head_bytes += taken;
                bytes = &bytes[taken..];
                if self.head_bytes == FRAME_HEAD {
                    let [high, middle, low, ..] = self.head;
                    self.left = u32::from_be_bytes([0, high, middle, low]) as usize;
                    self.head_bytes = 0;
                }
                continue;
            }
            let taken = bytes.len().min(self.left);
            if self.head[3] == DATA {
                content += taken as u64;
            }
            self.left -= taken;
            bytes = &bytes[taken..];
        }
        if content > 0 {
            self.activity.sent(content);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    const PATIENCE: Http2Patience = Http2Patience { idle: Duration::from_secs(30), stalled: Duration::from_secs(60) };

    fn left(activity: &Http2Activity) -> Option<u64> {
        let state = activity.0.state.lock();
        state.left(PATIENCE, state.moved).map(|left| left.as_secs())
    }

    #[test]
    fn a_client_may_be_idle_stalled_or_wait_for_the_pool() {
        let activity = Http2Activity::new();
        assert_eq!(left(&activity), Some(30));
        let mut one = activity.open();
        assert_eq!(left(&activity), None, "the request is being answered");
        one.wanted();
        one.given(100);
        let mut other = activity.open();
        other.wanted();
        assert_eq!(left(&activity), None, "one waits for the client, but the other one for the pool");
        other.given(1);
        assert_eq!(left(&activity), Some(60), "both wait for the client");
        other.wanted();
        one.wanted();
        assert_eq!(left(&activity), None, "both wait for the pool");
        one.given(50);
        drop((one, other));
        assert_eq!(left(&activity), Some(60), "the last pieces are unsent");
        activity.sent(151);
        assert_eq!(left(&activity), Some(30));
        let state = activity.0.state.lock();
        assert_eq!((state.open, state.unsent), (0, 0));
        assert_eq!(state.left(PATIENCE, state.moved + Duration::from_secs(31)), Some(Duration::ZERO));
    }

    #[tokio::test]
    async fn a_response_without_room_for_a_piece_waits_for_the_client() {
        let activity = Http2Activity::new();
        let mut response = activity.open();
        let budget = response.budget();
        let mut held = Vec::new();
        while let Some(room) = budget.room(1 << 30).now_or_never() {
            held.push(room.hold(bytes::Bytes::from_static(b"x")));
        }
        response.wanted();
        response.given(1);
        activity.sent(1);
        assert_eq!(left(&activity), Some(60), "the connection may have the rest of it");
        let mut next = std::pin::pin!(budget.room(1 << 30));
        assert!(next.as_mut().now_or_never().is_none());
        response.waits();
        let moved = activity.0.state.lock().moved;
        response.waits();
        assert_eq!((left(&activity), activity.0.state.lock().moved), (Some(60), moved), "nothing moves meanwhile");
        held.clear();
        next.await;
        response.waits();
        assert_eq!(left(&activity), None, "it waits for the pool");
        drop(response);
        assert_eq!(activity.0.state.lock().unsent, 0);
    }

    #[test]
    fn content_is_told_from_other_frames_however_they_are_cut() {
        let frame = |kind: u8, bytes: usize| {
            let mut frame = vec![0, (bytes >> 8) as u8, bytes as u8, kind, 0, 0, 0, 0, 1];
            // Payloads that look like heads.
            frame.resize(FRAME_HEAD + bytes, 0);
            frame
        };
        let all = [frame(4, 6), frame(1, 300), frame(DATA, 1000), frame(6, 8), frame(DATA, 0), frame(DATA, 7)].concat();
        for cut in [1, 2, 5, 9, 10, 100, all.len()] {
            let activity = Http2Activity::new();
            let mut frames = SentFrames::new(activity.clone());
            all.chunks(cut).for_each(|bytes| frames.sent(bytes));
            assert_eq!(activity.0.state.lock().sent, 1007, "{cut}");
        }
    }
}
