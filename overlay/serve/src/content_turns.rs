//! Turns to have the content of a request in memory: its bytes are bounded, and no client can have all turns.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Requests whose content is in memory at the same time.
const TURNS: usize = 32;
/// Those of one client.
const CLIENT_TURNS: usize = 8;

/// The turns of a process, or of a test.
pub struct ContentTurns {
    all: Arc<Semaphore>,
    /// Of the clients that have a turn or wait for one.
    clients: Mutex<HashMap<IpAddr, CountedClient>>,
}

struct CountedClient {
    semaphore: Arc<Semaphore>,
    /// Its requests that have a turn or wait for one.
    requests: usize,
}

/// The turn of one request. It ends when this is dropped.
pub struct ContentTurn {
    // Dropped in this order.
    _one: Option<OwnedSemaphorePermit>,
    _of_client: Option<OwnedSemaphorePermit>,
    _turns: ClientTurns,
}

/// The turns of one client, as long as a request of it has this.
struct ClientTurns {
    turns: Arc<ContentTurns>,
    client: IpAddr,
    semaphore: Arc<Semaphore>,
}

/// Content with its turn: whatever keeps the bytes keeps the turn.
struct HeldContent {
    bytes: Bytes,
    _turn: ContentTurn,
}

impl AsRef<[u8]> for HeldContent {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl ContentTurns {
    pub fn new() -> Arc<Self> {
        Arc::new(Self { all: Arc::new(Semaphore::new(TURNS)), clients: Mutex::default() })
    }

    /// Waits for a turn.
    pub async fn turn(self: &Arc<Self>, client: IpAddr) -> ContentTurn {
        let turns = ClientTurns::of(self, client);
        // Its own first: one that waits for it keeps no other client waiting. The semaphores are never closed.
        let of_client = turns.semaphore.clone().acquire_owned().await.ok();
        let one = self.all.clone().acquire_owned().await.ok();
        ContentTurn { _one: one, _of_client: of_client, _turns: turns }
    }
}

impl ContentTurn {
    /// Returns the content with this turn in it.
    pub fn hold(self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(HeldContent { bytes, _turn: self })
    }
}

impl ClientTurns {
    fn of(turns: &Arc<ContentTurns>, client: IpAddr) -> Self {
        let mut clients = turns.clients.lock();
        let new = || CountedClient { semaphore: Arc::new(Semaphore::new(CLIENT_TURNS)), requests: 0 };
        let counted = clients.entry(client).or_insert_with(new);
        counted.requests += 1;
        Self { turns: turns.clone(), client, semaphore: counted.semaphore.clone() }
    }
}

impl Drop for ClientTurns {
    fn drop(&mut self) {
        if let Entry::Occupied(mut counted) = self.turns.clients.lock().entry(self.client) {
            counted.get_mut().requests -= 1;
            if counted.get().requests == 0 {
                counted.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn a_client_leaves_turns_for_others_and_content_keeps_its_turn() {
        let turns = ContentTurns::new();
        let client = |number: u8| IpAddr::from([127, 0, 0, number]);
        let now = |number: u8| turns.turn(client(number)).now_or_never();
        let mut held: Vec<Bytes> = (0..CLIENT_TURNS).map(|_| now(1).unwrap().hold(Bytes::from_static(b"x"))).collect();
        assert!(now(1).is_none(), "the client has its share");
        let others: Vec<ContentTurn> = (CLIENT_TURNS..TURNS).map(|at| now(at as u8).unwrap()).collect();
        assert!(now(2).is_none(), "all turns are taken");
        // The task of a change may outlive its request.
        let of_task = held[0].clone();
        // Another request may just end: it has still the semaphore.
        let _ending = turns.clients.lock()[&client(1)].semaphore.clone();
        held.truncate(1);
        drop(held.pop());
        assert_eq!((&of_task[..], turns.all.available_permits()), (&b"x"[..], CLIENT_TURNS - 1));
        drop((of_task, others));
        assert_eq!(turns.all.available_permits(), TURNS);
        assert!(turns.clients.lock().is_empty(), "clients without a request are forgotten");
    }
}
