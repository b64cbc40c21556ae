//! A foresight that tests decide.

use forebay_backends::Result;
use forebay_engine::{Advisor, Foreseen, Means};
use forebay_prefetch::plan::{StagingCandidate, StagingPlan};
use forebay_prefetch::profile::{ExpectedRead, Reason};
use forebay_prefetch::signature::Invocation;

/// Expects that every command reads these files, each of one byte.
#[derive(Debug)]
pub struct Expects(pub &'static [&'static str]);

impl Advisor for Expects {
    fn foresee(&self, _invocation: &Invocation, _means: Means) -> Result<Foreseen> {
        let (probability, why) = (1.0, Reason::Replayed { used: 1, seen: 1 });
        let expected = |(path, rank): (&&str, u32)| ExpectedRead {
            path: (*path).into(),
            bytes: 1,
            rank,
            probability,
            parts: None,
            why: why.clone(),
        };
        let chosen = |rank: u32| StagingCandidate { file: rank.into(), bytes: 1, missing_bytes: 1, probability, rank };
        let ranks = 0..self.0.len() as u32;
        let plan = StagingPlan { chosen: ranks.clone().map(chosen).collect(), ..StagingPlan::default() };
        Ok(Foreseen { expected: self.0.iter().zip(ranks).map(expected).collect(), plan })
    }
}
