//! A pool of which a test holds calls, so that others overtake them.

use std::fmt;
use std::sync::{Arc, Mutex};

use forebay_backends::Result;
use forebay_backends::decorators::{Around, Decorated, PoolAnswer, PoolCall};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::watch;

pub type HeldPool = Decorated<HeldCalls>;

type Chosen = Box<dyn Fn(&PoolCall<'_>) -> bool + Send + Sync>;

/// Holds calls before the pool sees them. Clones hold the same calls.
#[derive(Clone)]
pub struct HeldCalls(Arc<Gate>);

struct Gate {
    /// The calls to hold, and how many more of them.
    chosen: Mutex<Option<(Chosen, usize)>>,
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
        *self.0.chosen.lock().unwrap() = Some((Box::new(chosen), calls));
    }

    /// Returns how many calls wait.
    pub fn waiting(&self) -> usize {
        *self.0.waiting.borrow()
    }

    /// Waits until so many calls wait.
    pub async fn until_waiting(&self, calls: usize) {
        self.0.waiting.subscribe().wait_for(|waiting| *waiting >= calls).await.unwrap();
    }

    /// Lets all waiting calls go on, and holds no more.
    pub fn release(&self) {
        *self.0.chosen.lock().unwrap() = None;
        self.0.released.send_modify(|times| *times += 1);
    }

    fn takes(&self, call: &PoolCall<'_>) -> bool {
        let mut chosen = self.0.chosen.lock().unwrap();
        match &mut *chosen {
            Some((accepts, left)) if *left > 0 && accepts(call) => {
                *left -= 1;
                true
            }
            _ => false,
        }
    }
}

impl Around for HeldCalls {
    fn around<'a, T: PoolAnswer>(
        &'a self,
        call: PoolCall<'a>,
        inner: BoxFuture<'a, Result<T>>,
    ) -> BoxFuture<'a, Result<T>> {
        async move {
            let mut released = self.0.released.subscribe();
            if self.takes(&call) {
                self.0.waiting.send_modify(|waiting| *waiting += 1);
                released.changed().await.unwrap();
                self.0.waiting.send_modify(|waiting| *waiting -= 1);
            }
            inner.await
        }
        .boxed()
    }
}
