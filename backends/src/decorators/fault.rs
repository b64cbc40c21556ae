//! A pool that fails: at random from a seed, at the n-th call, or completely.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::sync::watch;

use crate::{Error, ErrorKind, Pool, Result, Side};

use super::{Around, CallKind, Decorated, PoolAnswer, PoolCall};

/// A pool that fails as configured. Without configuration it never fails.
pub type Fault = Decorated<Faults>;

/// When a call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultMoment {
    /// Before the pool sees the call.
    Before,
    /// After the call took effect; its answer is lost.
    After,
}

/// The probabilities that a call fails, each from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Odds {
    pub before: f64,
    pub after: f64,
}

/// The call that fails, by its number, counted from 1.
#[derive(Debug, Clone, Copy)]
struct Appointed {
    number: u64,
    moment: FaultMoment,
    /// All later calls fail, too, before they reach the pool, as if the caller had crashed.
    and_all_later: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outage {
    None,
    Down,
    Hanging,
}

#[derive(Debug)]
struct FaultPlan {
    random: ChaCha8Rng,
    odds: BTreeMap<CallKind, Odds>,
    error: ErrorKind,
    calls: u64,
    appointed: Option<Appointed>,
}

/// The failures that [`Fault`] injects.
#[derive(Debug)]
pub struct Faults {
    plan: Mutex<FaultPlan>,
    outage: watch::Sender<Outage>,
}

impl Fault {
    /// The same `seed` gives the same failures to the same sequence of calls.
    pub fn new(inner: Arc<dyn Pool>, seed: u64) -> Self {
        let random = ChaCha8Rng::seed_from_u64(seed);
        let plan =
            FaultPlan { random, odds: BTreeMap::new(), error: ErrorKind::Unavailable, calls: 0, appointed: None };
        Self::with(inner, Faults { plan: Mutex::new(plan), outage: watch::Sender::new(Outage::None) })
    }

    /// Lets calls of one kind fail at random.
    pub fn set_odds(&self, kind: CallKind, odds: Odds) {
        self.around.plan.lock().odds.insert(kind, odds);
    }

    /// Lets calls of every kind fail at random.
    pub fn set_all_odds(&self, odds: Odds) {
        self.around.plan.lock().odds = CallKind::ALL.into_iter().map(|kind| (kind, odds)).collect();
    }

    /// Sets the kind of the errors from now on; `Unavailable` by default. An outage is always `Unavailable`.
    pub fn set_error(&self, kind: ErrorKind) {
        self.around.plan.lock().error = kind;
    }

    /// While the pool is down, every call fails with `Unavailable`; calls in progress lose their answers.
    pub fn set_down(&self, down: bool) {
        self.around.outage.send_replace(if down { Outage::Down } else { Outage::None });
    }

    /// While the pool hangs, no call is answered; waiting calls continue when the pool is released.
    pub fn set_hanging(&self, hanging: bool) {
        self.around.outage.send_replace(if hanging { Outage::Hanging } else { Outage::None });
    }

    /// The number of calls so far, including each page of a listing and each piece of a `put`: the upper bound for a
    /// sweep over [`fail_call`](Self::fail_call) or [`crash_at`](Self::crash_at).
    pub fn calls(&self) -> u64 {
        self.around.plan.lock().calls
    }

    /// Lets the `number`-th call from now on, counted from 1, fail, and no other.
    pub fn fail_call(&self, number: u64, moment: FaultMoment) {
        self.appoint(number, moment, false);
    }

    /// Lets the `number`-th call from now on and all later ones fail, until [`heal`](Self::heal).
    pub fn crash_at(&self, number: u64, moment: FaultMoment) {
        self.appoint(number, moment, true);
    }

    /// Clears all configured failures, and ends an outage.
    pub fn heal(&self) {
        let mut plan = self.around.plan.lock();
        plan.appointed = None;
        plan.odds.clear();
        drop(plan);
        self.around.outage.send_replace(Outage::None);
    }

    fn appoint(&self, number: u64, moment: FaultMoment, and_all_later: bool) {
        let mut plan = self.around.plan.lock();
        let number = plan.calls.saturating_add(number);
        plan.appointed = Some(Appointed { number, moment, and_all_later });
    }
}

impl FaultPlan {
    /// Counts a call and decides whether and when it fails.
    fn decide(&mut self, kind: CallKind) -> Option<FaultMoment> {
        self.calls += 1;
        if let Some(appointed) = self.appointed {
            if self.calls == appointed.number {
                return Some(appointed.moment);
            }
            if appointed.and_all_later && self.calls > appointed.number {
                return Some(FaultMoment::Before);
            }
        }
        // One draw for each call, so that the odds of one kind do not shift the failures of another.
        let drawn: f64 = self.random.random();
        let odds = self.odds.get(&kind)?;
        if drawn < odds.before {
            Some(FaultMoment::Before)
        } else if drawn < odds.before + odds.after {
            Some(FaultMoment::After)
        } else {
            None
        }
    }
}

impl Faults {
    /// Waits while the pool hangs; fails while it is down.
    async fn reach(&self, call: &PoolCall<'_>) -> Result<()> {
        let mut outage = self.outage.subscribe();
        loop {
            match *outage.borrow_and_update() {
                Outage::None => return Ok(()),
                Outage::Down => {
                    let context = format!("{call}: the pool was switched off");
                    return Err(Error::new(ErrorKind::Unavailable, Side::Pool, context));
                }
                Outage::Hanging => {}
            }
            // The sender lives in `self`, so the channel is open.
            let _ = outage.changed().await;
        }
    }
}

impl Around for Faults {
    fn around<'a, T: PoolAnswer>(
        &'a self,
        call: PoolCall<'a>,
        inner: BoxFuture<'a, Result<T>>,
    ) -> BoxFuture<'a, Result<T>> {
        async move {
            self.reach(&call).await?;
            let (moment, kind) = {
                let mut plan = self.plan.lock();
                (plan.decide(call.kind), plan.error)
            };
            if moment == Some(FaultMoment::Before) {
                return Err(Error::new(kind, Side::Pool, format!("{call}: made to fail before it reached the pool")));
            }
            let answer = inner.await?;
            self.reach(&call).await?;
            if moment == Some(FaultMoment::After) {
                return Err(Error::new(kind, Side::Pool, format!("{call}: made to lose its answer")));
            }
            Ok(answer)
        }
        .boxed()
    }
}
