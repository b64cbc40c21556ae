//! A pool that holds back one call until the test lets it go on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_backends::Result;
use forebay_backends::decorators::{Around, CallKind, Decorated, PoolAnswer, PoolCall};
use forebay_engine::{Options, Overlay};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::Notify;

use crate::engine::Fixture;

/// The call that is held back.
pub struct HeldCall {
    kind: CallKind,
    has_answer: bool,
    is_next: AtomicBool,
    is_held: Notify,
    goes_on: Notify,
}

impl HeldCall {
    /// Holds calls of this kind before they reach the pool.
    pub fn before(kind: CallKind) -> Arc<Self> {
        Self::new(kind, false)
    }

    /// Holds the pool's answers to calls of this kind.
    pub fn answer(kind: CallKind) -> Arc<Self> {
        Self::new(kind, true)
    }

    fn new(kind: CallKind, has_answer: bool) -> Arc<Self> {
        let (is_next, is_held, goes_on) = Default::default();
        Arc::new(Self { kind, has_answer, is_next, is_held, goes_on })
    }

    /// Holds the next call.
    pub fn hold_next(&self) {
        self.is_next.store(true, Ordering::Relaxed);
    }

    /// Waits until the call is held.
    pub async fn is_held(&self) {
        self.is_held.notified().await;
    }

    pub fn let_go(&self) {
        self.goes_on.notify_one();
    }

    async fn wait(&self) {
        self.is_held.notify_one();
        self.goes_on.notified().await;
    }
}

struct Holding(Arc<HeldCall>);

impl Around for Holding {
    fn around<'a, T: PoolAnswer>(
        &'a self,
        call: PoolCall<'a>,
        inner: BoxFuture<'a, Result<T>>,
    ) -> BoxFuture<'a, Result<T>> {
        let kind = call.kind;
        async move {
            let call = &self.0;
            let holds = kind == call.kind && call.is_next.swap(false, Ordering::Relaxed);
            if holds && !call.has_answer {
                call.wait().await;
            }
            let answer = inner.await;
            if holds && call.has_answer {
                call.wait().await;
            }
            answer
        }
        .boxed()
    }
}

/// Opens an overlay on the fixture's pool, which holds back the call.
pub async fn open_held(fixture: &Fixture, held: &Arc<HeldCall>) -> Overlay {
    let pool = Arc::new(Decorated::with(fixture.metrics.clone(), Holding(held.clone())));
    Overlay::open(Options { pool, ..fixture.options() }).await.unwrap()
}
