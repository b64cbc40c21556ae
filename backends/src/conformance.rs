//! The suite that every pool must pass, against the real server if the pool has one.
//!
//! A case for a capability that the pool lacks asserts the refusal instead: the call fails with `Unsupported` and
//! changes nothing. Each case works in its own directory beneath the scratch directory and removes that directory at
//! its end.

mod attributes;
mod conditions;
mod content;
mod context;
mod directories;
mod errors;
mod links;
mod parts;
pub mod reads;
mod renames;
mod trial;
pub mod troubled;

use std::fmt;
use std::sync::Arc;

use futures::future::BoxFuture;
use futures::{StreamExt, stream};

use crate::{Capabilities, Pool, PoolPath};

use context::{CaseContext, Outcome};
pub use trial::{CaseVerdict, Trial};

/// One promise of the [`Pool`] trait and the code that checks it.
#[derive(Clone, Copy)]
pub struct Case {
    pub name: &'static str,
    /// The capabilities without which the case asserts only the refusal.
    needs: &'static [fn(&Capabilities) -> bool],
    check: fn(CaseContext) -> BoxFuture<'static, Outcome>,
}

impl Case {
    /// Whether the pool has the capabilities that the case needs.
    pub fn applies_to(&self, can: &Capabilities) -> bool {
        self.needs.iter().all(|able| able(can))
    }
}

/// The result of one case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaseResult {
    pub name: &'static str,
    /// The reason for the failure; `None` if the case passed.
    pub failure: Option<String>,
}

/// The results of all cases for one pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The pool's URL.
    pub pool: String,
    pub results: Vec<CaseResult>,
}

impl Report {
    pub fn passed(&self) -> bool {
        !self.results.is_empty() && self.results.iter().all(|result| result.failure.is_none())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let failed: Vec<_> = self.results.iter().filter(|result| result.failure.is_some()).collect();
        writeln!(f, "{}: {} of {} cases failed", self.pool, failed.len(), self.results.len())?;
        for result in failed {
            writeln!(f, "  {}: {}", result.name, result.failure.as_deref().unwrap_or_default())?;
        }
        Ok(())
    }
}

/// All cases, in the order in which they begin.
pub fn cases() -> Vec<Case> {
    [directories::CASES, content::CASES, conditions::CASES, attributes::CASES, links::CASES, renames::CASES]
        .into_iter()
        .chain([errors::CASES, parts::CASES])
        .flatten()
        .copied()
        .collect()
}

/// Cases that run at once. Most of the time they wait for the server.
const AT_ONCE: usize = 8;

/// Runs every case in directories beneath `scratch`, an existing directory of the pool, and prints the name and
/// result of each to standard output. Cases create files of up to 64 MiB.
pub async fn run(pool: Arc<dyn Pool>, scratch: PoolPath) -> Report {
    run_cases(pool, scratch, cases()).await
}

/// As [`run`], with these cases.
pub async fn run_cases(pool: Arc<dyn Pool>, scratch: PoolPath, cases: Vec<Case>) -> Report {
    let one = async |case: Case| {
        let failure = run_case(&pool, &scratch, case).await.err();
        println!("conformance of {}: {} ... {}", pool.url(), case.name, failure.as_deref().unwrap_or("ok"));
        CaseResult { name: case.name, failure }
    };
    let results = stream::iter(cases).map(one).buffered(AT_ONCE).collect().await;
    Report { pool: pool.url(), results }
}

/// Runs one case.
pub async fn run_case(pool: &Arc<dyn Pool>, scratch: &PoolPath, case: Case) -> Result<(), String> {
    let context = CaseContext::new(Arc::clone(pool), scratch, case.name).await?;
    let outcome = (case.check)(context.clone()).await;
    let cleaned = context.remove_all().await;
    outcome.and(cleaned).map_err(|failure| failure.to_string())
}

/// A table entry for an async function, with the capabilities that the case needs.
macro_rules! case {
    ($function:ident $(, needs $($able:expr),+)?) => {
        $crate::conformance::Case {
            name: stringify!($function),
            needs: &[$($($able),+)?],
            check: |context| ::futures::FutureExt::boxed($function(context)),
        }
    };
}

/// Fails the case if the condition does not hold.
macro_rules! ensure {
    ($condition:expr, $($why:tt)+) => {
        if !$condition {
            return Err($crate::conformance::context::CaseFailure::new(format!($($why)+)));
        }
    };
}

/// Fails the case if two values differ, and shows both.
macro_rules! ensure_eq {
    ($left:expr, $right:expr, $($what:tt)+) => {{
        let (left, right) = (&$left, &$right);
        if left != right {
            let what = format!($($what)+);
            return Err($crate::conformance::context::CaseFailure::new(format!("{what}: {left:?} is not {right:?}")));
        }
    }};
}

use {case, ensure, ensure_eq};
