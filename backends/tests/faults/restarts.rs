//! A server that is killed and restarted repeatedly.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use forebay_backends::conformance::troubled::Trouble;
use parking_lot::Mutex;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// The longest time between two kills, in milliseconds.
const ALONE_MS_MAX: u64 = 700;
/// The longest time before the server is started again, in milliseconds.
const AWAY_MS_MAX: u64 = 300;

enum RestartOrder {
    Begin(u64),
    /// Answered when the server runs and is no longer killed.
    End(mpsc::Sender<()>),
}

/// The server belongs to one thread, because it ends with the thread that started it.
pub struct Restarts<P> {
    place: P,
    orders: Mutex<Option<mpsc::Sender<RestartOrder>>>,
    kills: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl<P: Send + 'static> Restarts<P> {
    /// `place` returns the facts about the server that the test needs.
    pub fn of<S: 'static>(
        start: impl FnOnce() -> S + Send + 'static,
        kill: impl Fn(&mut S) + Send + 'static,
        start_again: impl Fn(&mut S) + Send + 'static,
        place: impl FnOnce(&S) -> P + Send + 'static,
    ) -> Self {
        let (orders, received) = mpsc::channel();
        let (tell, told) = mpsc::channel();
        let kills = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&kills);
        let thread = std::thread::spawn(move || {
            let mut server = start();
            tell.send(place(&server)).unwrap();
            let mut storm: Option<ChaCha8Rng> = None;
            loop {
                let order = match storm.as_mut() {
                    None => received.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected),
                    Some(random) => received.recv_timeout(Duration::from_millis(random.random_range(50..ALONE_MS_MAX))),
                };
                match (order, storm.as_mut()) {
                    (Ok(RestartOrder::Begin(seed)), _) => storm = Some(ChaCha8Rng::seed_from_u64(seed)),
                    (Ok(RestartOrder::End(done)), _) => {
                        storm = None;
                        // The caller may be gone.
                        let _ = done.send(());
                    }
                    (Err(mpsc::RecvTimeoutError::Timeout), Some(random)) => {
                        kill(&mut server);
                        std::thread::sleep(Duration::from_millis(random.random_range(0..AWAY_MS_MAX)));
                        start_again(&mut server);
                        counted.fetch_add(1, Ordering::Relaxed);
                    }
                    (Err(_), _) => return,
                }
            }
        });
        let place = told.recv().expect("the server starts");
        Self { place, orders: Mutex::new(Some(orders)), kills, thread: Some(thread) }
    }

    pub fn place(&self) -> &P {
        &self.place
    }

    fn order(&self, order: RestartOrder) {
        self.orders.lock().as_ref().unwrap().send(order).expect("the server's thread runs");
    }
}

impl<P: Send + Sync + 'static> Trouble for Restarts<P> {
    fn begin(&self, seed: u64) {
        self.order(RestartOrder::Begin(seed));
    }

    fn end(&self) {
        let (done, ended) = mpsc::channel();
        self.order(RestartOrder::End(done));
        tokio::task::block_in_place(|| ended.recv()).expect("the server's thread runs");
    }

    fn happened(&self) -> u64 {
        self.kills.load(Ordering::Relaxed)
    }
}

impl<P> Drop for Restarts<P> {
    fn drop(&mut self) {
        self.orders.lock().take();
        if let Some(thread) = self.thread.take() {
            // The thread has already reported its result.
            let _ = thread.join();
        }
    }
}
