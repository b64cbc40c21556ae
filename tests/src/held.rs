//! A pool of which a test holds calls, or the answers to them, so that others overtake them.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use forebay_backends::Result;
use forebay_backends::decorators::{Around, Decorated, PoolAnswer, PoolCall};
use forebay_engine::{Options, Overlay};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::watch;

use crate::engine::Fixture;

/// How long a test waits for calls that are to be held.
const WITHIN: Duration = Duration::from_secs(60);

pub type HeldPool = Decorated<HeldCalls>;

type Chosen = Box<dyn Fn(&PoolCall<'_>) -> bool + Send + Sync>;

/// Holds calls before the pool sees them, or the pool's answers to them. Clones hold the same calls.
#[derive(Clone)]
pub struct HeldCalls(Arc<Gate>);

/// What is held.
struct Choice {
    accepts: Chosen,
    /// How many more of these calls.
    left: usize,
    at: HeldAt,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeldAt {
    Call,
    Answer,
}

struct Gate {
    chosen: Mutex<Option<Choice>>,
    /// How many calls wait.
    waiting: watch::Sender<usize>,
    /// Counts the releases.
    released: watch::Sender<u64>,
}

impl fmt::Debug for HeldCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldCalls").field("waiting", &self.waiting()).finish_non_exhaustive()
    }
}

impl Default for HeldCalls {
    fn default() -> Self {
        let (waiting, released) = (watch::Sender::new(0), watch::Sender::new(0));
        Self(Arc::new(Gate { chosen: Mutex::default(), waiting, released }))
    }
}

impl HeldCalls {
    /// Holds the next `calls` calls that `chosen` accepts.
    pub fn hold(&self, calls: usize, chosen: impl Fn(&PoolCall<'_>) -> bool + Send + Sync + 'static) {
        self.choose(calls, HeldAt::Call, Box::new(chosen));
    }

    /// Holds the answers to the next `calls` calls that `chosen` accepts.
    pub fn hold_answers(&self, calls: usize, chosen: impl Fn(&PoolCall<'_>) -> bool + Send + Sync + 'static) {
        self.choose(calls, HeldAt::Answer, Box::new(chosen));
    }

    fn choose(&self, left: usize, at: HeldAt, accepts: Chosen) {
        *self.0.chosen.lock().unwrap() = Some(Choice { accepts, left, at });
    }

    /// Returns how many calls wait.
    pub fn waiting(&self) -> usize {
        *self.0.waiting.borrow()
    }

    /// Waits until so many calls wait.
    pub async fn until_waiting(&self, calls: usize) {
        let mut waiting = self.0.waiting.subscribe();
        let waits = tokio::time::timeout(WITHIN, waiting.wait_for(|waiting| *waiting >= calls)).await;
        waits.unwrap_or_else(|_| panic!("{} of {calls} calls wait after {WITHIN:?}", self.waiting())).unwrap();
    }

    /// Lets all waiting calls go on, and holds no more.
    pub fn release(&self) {
        *self.0.chosen.lock().unwrap() = None;
        self.0.released.send_modify(|times| *times += 1);
    }

    fn takes(&self, call: &PoolCall<'_>) -> Option<HeldAt> {
        let mut chosen = self.0.chosen.lock().unwrap();
        let choice = chosen.as_mut().filter(|choice| choice.left > 0 && (choice.accepts)(call))?;
        choice.left -= 1;
        Some(choice.at)
    }

    async fn wait(&self) {
        let mut released = self.0.released.subscribe();
        self.0.waiting.send_modify(|waiting| *waiting += 1);
        released.changed().await.unwrap();
        self.0.waiting.send_modify(|waiting| *waiting -= 1);
    }
}

/// Opens an overlay on the fixture's pool, of which calls can be held.
pub async fn open_held(fixture: &Fixture) -> (Overlay, HeldCalls) {
    let held = HeldCalls::default();
    let pool = Arc::new(HeldPool::with(fixture.metrics.clone(), held.clone()));
    (Overlay::open(Options { pool, ..fixture.options() }).await.unwrap(), held)
}

impl Around for HeldCalls {
    fn around<'a, T: PoolAnswer>(
        &'a self,
        call: PoolCall<'a>,
        inner: BoxFuture<'a, Result<T>>,
    ) -> BoxFuture<'a, Result<T>> {
        async move {
            let at = self.takes(&call);
            if at == Some(HeldAt::Call) {
                self.wait().await;
            }
            let answer = inner.await;
            if at == Some(HeldAt::Answer) {
                self.wait().await;
            }
            answer
        }
        .boxed()
    }
}
