//! How much of its responses an HTTP/2 connection may have in memory.
//!
//! A client says how much it takes of each response, and has many of them at once. The connection asks each body for a piece
//! before it knows whether the client takes any of it. So a piece is read only once there is room for it, and the room is free
//! again when the piece was sent or dropped. Responses share most of the room. Each has a little of its own, so that those that
//! a client leaves alone do not keep it from the others.
//!
//! HTTP/1 has one response at a time: there is no such bound.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The largest piece, in bytes.
pub const PIECE_BYTES: u32 = 256 << 10;
/// What the responses of a connection share, in bytes.
const SHARED_BYTES: u32 = 1 << 20;
/// The part of what is free that one piece takes: a single response gets large pieces, and many get small ones.
const FREE_SHARE: u32 = 4;
/// The smallest piece of a longer response for which shared room is taken, in bytes.
const SHARED_PIECE_BYTES: u32 = 16 << 10;
/// What each response has of its own, in bytes: one piece.
const OWN_PIECE_BYTES: u32 = 8 << 10;

/// The room of one connection.
pub struct ConnectionBudget(Arc<Semaphore>);

/// The room that one response may use. By default, there is no bound.
#[derive(Clone, Default)]
pub struct ResponseBudget(Option<Arc<ResponseRoom>>);

struct ResponseRoom {
    shared: Arc<Semaphore>,
    /// One permit: for a piece of [`OWN_PIECE_BYTES`].
    own: Arc<Semaphore>,
    /// A piece waits for room.
    waits: AtomicBool,
}

/// Room for a piece that is about to be read.
pub struct PieceRoom {
    bytes: u32,
    permit: Option<OwnedSemaphorePermit>,
    /// What the responses of the connection share.
    shared: Option<Arc<Semaphore>>,
}

/// A piece that takes room until it is dropped.
struct CountedPiece {
    piece: Bytes,
    _permit: OwnedSemaphorePermit,
    /// For what it has beyond the room that was waited for.
    _excess: Option<OwnedSemaphorePermit>,
}

impl AsRef<[u8]> for CountedPiece {
    fn as_ref(&self) -> &[u8] {
        &self.piece
    }
}

impl ConnectionBudget {
    pub fn new() -> Self {
        Self(Arc::new(Semaphore::new(SHARED_BYTES as usize)))
    }

    /// Returns the room for another response.
    pub fn response(&self) -> ResponseBudget {
        let (shared, own) = (self.0.clone(), Arc::new(Semaphore::new(1)));
        ResponseBudget(Some(Arc::new(ResponseRoom { shared, own, waits: AtomicBool::new(false) })))
    }
}

impl ResponseBudget {
    /// Waits for room for a piece of at most `wanted` bytes.
    pub async fn room(&self, wanted: u64) -> PieceRoom {
        let most = wanted.min(PIECE_BYTES.into()) as u32;
        let Some(room) = &self.0 else { return PieceRoom { bytes: most, permit: None, shared: None } };
        let piece = |bytes, permit| PieceRoom { bytes, permit, shared: Some(room.shared.clone()) };
        let free = room.shared.available_permits() as u32;
        let bytes = (free / FREE_SHARE).max(SHARED_PIECE_BYTES).min(most);
        if let Ok(permit) = room.shared.clone().try_acquire_many_owned(bytes) {
            return piece(bytes, Some(permit));
        }
        let (own, shared) = (most.min(OWN_PIECE_BYTES), most.min(SHARED_PIECE_BYTES));
        if let Ok(permit) = room.own.clone().try_acquire_owned() {
            return piece(own, Some(permit));
        }
        let _waiting = WaitingPiece::begin(&room.waits);
        // They are never closed.
        tokio::select! {
            permit = room.own.clone().acquire_owned() => piece(own, permit.ok()),
            permit = room.shared.clone().acquire_many_owned(shared) => piece(shared, permit.ok()),
        }
    }

    /// Whether a piece waits until the client takes some of what the connection has.
    pub fn is_waited_for(&self) -> bool {
        self.0.as_ref().is_some_and(|room| room.waits.load(Ordering::Relaxed))
    }
}

impl PieceRoom {
    /// The most bytes that the piece should have.
    pub fn bytes(&self) -> u32 {
        self.bytes
    }

    /// Returns the piece with this room in it. A piece whose length was not known before may have more bytes. They take shared
    /// room as far as there is some; the rest does not count.
    pub fn hold(self, piece: Bytes) -> Bytes {
        let Some(permit) = self.permit else { return piece };
        let beyond = piece.len().saturating_sub(self.bytes as usize);
        let excess = self.shared.filter(|_| beyond > 0).and_then(|shared| {
            let there = shared.available_permits().min(beyond);
            shared.try_acquire_many_owned(there as u32).ok()
        });
        Bytes::from_owner(CountedPiece { piece, _permit: permit, _excess: excess })
    }
}

/// Marks that a piece waits, also if its response ends meanwhile.
struct WaitingPiece<'a>(&'a AtomicBool);

impl<'a> WaitingPiece<'a> {
    fn begin(waits: &'a AtomicBool) -> Self {
        waits.store(true, Ordering::Relaxed);
        Self(waits)
    }
}

impl Drop for WaitingPiece<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    const LARGE: u64 = 1 << 30;

    fn piece(response: &ResponseBudget, wanted: u64) -> Option<Bytes> {
        let room = response.room(wanted).now_or_never()?;
        let bytes = vec![7; room.bytes() as usize];
        Some(room.hold(bytes.into()))
    }

    #[test]
    fn one_response_gets_large_pieces_and_many_small_ones_within_the_bound() {
        let connection = ConnectionBudget::new();
        let first = connection.response();
        assert_eq!(piece(&first, LARGE).unwrap().len(), PIECE_BYTES as usize);
        assert_eq!(piece(&first, 100).unwrap().len(), 100);
        let responses: Vec<ResponseBudget> = (0..100).map(|_| connection.response()).collect();
        let mut held: Vec<Bytes> = Vec::new();
        for _ in 0..100 {
            held.extend(responses.iter().filter_map(|response| piece(response, LARGE)));
        }
        let bytes: usize = held.iter().map(Bytes::len).sum();
        assert!(bytes <= (SHARED_BYTES + 100 * OWN_PIECE_BYTES) as usize, "{bytes}");
        assert!(responses.iter().all(|response| piece(response, LARGE).is_none()));
        held.clear();
        assert_eq!(connection.0.available_permits(), SHARED_BYTES as usize);
        assert_eq!(piece(&ResponseBudget::default(), LARGE).unwrap().len(), PIECE_BYTES as usize);
    }

    #[test]
    fn a_piece_that_is_longer_than_its_room_takes_what_is_free() {
        const LONG: usize = 400 << 10;
        let connection = ConnectionBudget::new();
        let response = connection.response();
        let long = |wanted| Some(response.room(wanted).now_or_never()?.hold(vec![7; LONG].into()));
        let first = long(1000).unwrap();
        assert_eq!(connection.0.available_permits(), SHARED_BYTES as usize - LONG);
        let rest: Vec<Bytes> = std::iter::from_fn(|| long(LARGE)).collect();
        // The last one of them takes what the response has of its own.
        assert_eq!((rest.len(), connection.0.available_permits()), (3, 0));
        drop((first, rest));
        assert_eq!(connection.0.available_permits(), SHARED_BYTES as usize);
    }

    #[tokio::test]
    async fn a_response_whose_piece_was_sent_gets_another_whatever_the_others_hold() {
        let connection = ConnectionBudget::new();
        let (left_alone, read) = (connection.response(), connection.response());
        let held: Vec<Bytes> = std::iter::from_fn(|| piece(&left_alone, LARGE)).collect();
        for _ in 0..10 {
            let first = piece(&read, LARGE).unwrap();
            assert_eq!(first.len(), OWN_PIECE_BYTES as usize);
            assert!(!read.is_waited_for());
            let mut next = std::pin::pin!(read.room(LARGE));
            assert!(next.as_mut().now_or_never().is_none() && read.is_waited_for());
            drop(first);
            assert_eq!(next.await.bytes(), OWN_PIECE_BYTES);
            assert!(!read.is_waited_for());
        }
        drop(held);
        assert_eq!(piece(&read, LARGE).unwrap().len(), PIECE_BYTES as usize);
    }
}
