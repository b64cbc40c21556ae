//! The end of a response that the fast pool has no room for. It is passed on through memory: a piece stays there until all
//! clients that read the response have it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// The most bytes that wait for slower clients. Small pieces are joined, so that this is the memory that they take.
const WAITING_BYTES: u64 = 2 << 20;
/// The most responses whose ends are passed on: with [`WAITING_BYTES`], and a piece more, this bounds the memory.
pub const TAILS_MAX: usize = 64;
/// Pieces up to this size are joined.
const JOINED_BYTES: usize = 64 << 10;
/// A client that holds up another one, and takes nothing for so long, is left behind.
const STALLED: Duration = Duration::from_secs(30);
/// The same for a client that holds up nobody but the origin.
const STALLED_ALONE: Duration = Duration::from_secs(60);
/// How often it is checked whether a client is to be left behind.
const CHECK_EVERY: Duration = Duration::from_secs(1);

/// The clients that read a response, and the end of it that is passed on, if there is one.
#[derive(Debug)]
pub struct Tail {
    state: Mutex<TailState>,
    moved: Notify,
    /// [`TAILS_MAX`] permits.
    all: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct TailState {
    next: u64,
    readers: HashMap<u64, Reading>,
    passed_on: Option<PassedOn>,
}

/// Where a client reads.
#[derive(Debug, Clone, Copy)]
struct Reading {
    at: u64,
    /// Since when it could have taken more.
    since: Instant,
}

#[derive(Debug)]
struct PassedOn {
    /// What comes before this offset is in the fast pool.
    from: u64,
    /// The offset of the first piece.
    start: u64,
    /// The offset behind the last piece.
    end: u64,
    pieces: VecDeque<Vec<u8>>,
    _one: OwnedSemaphorePermit,
}

/// Where bytes of a response are.
#[derive(Debug, PartialEq, Eq)]
pub enum TailBytes {
    /// This many of them are in the fast pool.
    Stored(u32),
    Passed(Bytes),
    /// The client was left behind.
    Lost,
}

impl Tail {
    /// `all`: the semaphore of all tails.
    pub fn new(all: Arc<Semaphore>) -> Self {
        Self { state: Mutex::default(), moved: Notify::new(), all }
    }

    /// Counts a client that reads from this offset; `None` if the end of the response is passed on already.
    pub fn join(&self, at: u64) -> Option<u64> {
        let mut state = self.state.lock();
        if state.passed_on.is_some() {
            return None;
        }
        state.next += 1;
        let reader = state.next;
        state.readers.insert(reader, Reading { at, since: Instant::now() });
        Some(reader)
    }

    pub fn moved_to(&self, reader: u64, at: u64) {
        if let Some(known) = self.state.lock().readers.get_mut(&reader) {
            *known = Reading { at, since: Instant::now() };
        }
        self.moved.notify_waiters();
    }

    pub fn leave(&self, reader: u64) {
        self.state.lock().readers.remove(&reader);
        self.moved.notify_waiters();
    }

    /// From this offset on, the response is passed on. Returns `false` if too many responses are.
    pub fn begin(&self, from: u64) -> bool {
        let Ok(one) = self.all.clone().try_acquire_owned() else { return false };
        let passed = PassedOn { from, start: from, end: from, pieces: VecDeque::new(), _one: one };
        self.state.lock().passed_on = Some(passed);
        true
    }

    /// Whether no client reads anything before the end that is passed on.
    pub fn is_all_that_is_read(&self) -> bool {
        let state = self.state.lock();
        state.passed_on.as_ref().is_some_and(|passed| state.readers.values().all(|reading| reading.at >= passed.from))
    }

    pub fn is_begun(&self) -> bool {
        self.state.lock().passed_on.is_some()
    }

    /// Adds a piece, once there is room for it. Returns `false` if nobody reads the response any more.
    pub async fn push(&self, piece: Bytes) -> bool {
        loop {
            let moved = self.moved.notified();
            {
                let mut state = self.state.lock();
                let TailState { readers, passed_on: Some(passed), .. } = &mut *state else { return false };
                let fastest = readers.values().map(|reading| reading.at).max().unwrap_or(0);
                let (start, is_full) = (passed.start, passed.end - passed.start >= WAITING_BYTES);
                readers.retain(|_, reading| {
                    let limit = if reading.at < fastest { STALLED } else { STALLED_ALONE };
                    !is_full || reading.at > start + JOINED_BYTES as u64 || reading.since.elapsed() < limit
                });
                let Some(slowest) = readers.values().map(|reading| reading.at).min() else { return false };
                passed.drop_before(slowest);
                if passed.end - passed.start < WAITING_BYTES {
                    // Until now, there was nothing that these could take.
                    let waiting = readers.values_mut().filter(|reading| reading.at >= passed.end);
                    waiting.for_each(|reading| reading.since = Instant::now());
                    passed.push(&piece);
                    return true;
                }
            }
            let _ = tokio::time::timeout(CHECK_EVERY, moved).await;
        }
    }

    /// Returns where the bytes from an offset on are, at most `len` of them.
    pub fn find(&self, offset: u64, len: u32) -> TailBytes {
        let state = self.state.lock();
        let Some(passed) = &state.passed_on else { return TailBytes::Stored(len) };
        if offset < passed.from {
            return TailBytes::Stored(u64::from(len).min(passed.from - offset) as u32);
        }
        if offset < passed.start {
            return TailBytes::Lost;
        }
        let mut at = passed.start;
        for piece in &passed.pieces {
            let end = at + piece.len() as u64;
            if offset < end {
                let skipped = (offset - at) as usize;
                let wanted = &piece[skipped..piece.len().min(skipped + len as usize)];
                return TailBytes::Passed(Bytes::copy_from_slice(wanted));
            }
            at = end;
        }
        TailBytes::Lost
    }
}

impl PassedOn {
    fn push(&mut self, piece: &[u8]) {
        self.end += piece.len() as u64;
        match self.pieces.back_mut() {
            Some(last) if last.len() + piece.len() <= JOINED_BYTES => last.extend_from_slice(piece),
            _ => self.pieces.push_back(piece.to_vec()),
        }
    }

    /// Drops the pieces before an offset.
    fn drop_before(&mut self, offset: u64) {
        while let Some(first) = self.pieces.front()
            && self.start + first.len() as u64 <= offset
        {
            self.start += first.len() as u64;
            self.pieces.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(byte: u8) -> Bytes {
        vec![byte; WAITING_BYTES as usize / 2].into()
    }

    #[tokio::test(start_paused = true)]
    async fn a_piece_stays_until_all_clients_have_it() {
        let tail = Arc::new(Tail::new(Arc::new(Semaphore::new(1))));
        let (slow, fast) = (tail.join(0).unwrap(), tail.join(0).unwrap());
        assert_eq!(tail.find(0, 10), TailBytes::Stored(10));
        assert!(tail.begin(100) && !tail.is_all_that_is_read());
        assert_eq!((tail.join(0), tail.find(95, 10)), (None, TailBytes::Stored(5)));
        assert!(!Tail::new(tail.all.clone()).begin(0), "there is memory for one");
        assert!(tail.push(piece(1)).await && tail.push(piece(2)).await);
        let half = WAITING_BYTES / 2;
        tail.moved_to(fast, 100 + 2 * half);
        let third = {
            let tail = tail.clone();
            tokio::spawn(async move { tail.push(piece(3)).await })
        };
        tokio::task::yield_now().await;
        assert!(!third.is_finished(), "the slower client has not read the first piece");
        assert_eq!(tail.find(100 + half - 1, 10), TailBytes::Passed(vec![1].into()));
        tail.moved_to(slow, 100 + half);
        assert!(third.await.unwrap() && tail.is_all_that_is_read());
        assert_eq!(tail.find(99 + half, 10), TailBytes::Lost);
        assert_eq!(tail.find(100 + 2 * half, 2), TailBytes::Passed(vec![3, 3].into()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_nothing_is_left_behind_if_it_holds_up_another() {
        let tail = Tail::new(Arc::new(Semaphore::new(1)));
        let (_stalled, fast) = (tail.join(0).unwrap(), tail.join(0).unwrap());
        assert!(tail.begin(0));
        assert!(tail.push(piece(1)).await && tail.push(piece(2)).await);
        tail.moved_to(fast, WAITING_BYTES);
        assert!(tail.push(piece(3)).await);
        assert_eq!(tail.find(0, 10), TailBytes::Lost);
        // One that holds up nobody but the origin has more time.
        assert!(tail.push(piece(4)).await);
        let begun = Instant::now();
        assert!(!tail.push(piece(5)).await, "nobody reads");
        assert!(begun.elapsed() > STALLED_ALONE - CHECK_EVERY);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_is_not_left_behind_because_nothing_came() {
        let tail = Tail::new(Arc::new(Semaphore::new(1)));
        let reader = tail.join(0).unwrap();
        assert!(tail.begin(0));
        tokio::time::sleep(STALLED_ALONE * 2).await;
        // As fast as they come, small pieces take no more memory than large ones.
        for _ in 0..WAITING_BYTES / 100 {
            assert!(tail.push(Bytes::from_static(&[7; 100])).await);
        }
        assert!(tail.state.lock().passed_on.as_ref().unwrap().pieces.len() < 40);
        let third = tokio::time::timeout(STALLED, tail.push(piece(8)));
        assert!(third.await.is_ok_and(|pushed| pushed) || tail.find(0, 10) == TailBytes::Passed(vec![7; 10].into()));
        tail.moved_to(reader, WAITING_BYTES);
        assert!(tail.push(piece(9)).await);
    }
}
