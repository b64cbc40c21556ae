//! Concurrent writers of one version.

use futures::future::join_all;

use crate::conformance::context::{CaseFailure, Outcome};
use crate::conformance::ensure;
use crate::{ConditionalPut, ErrorKind, Expected};

use super::{TroubledCase, content_of, excused};

const WRITERS: u64 = 6;
/// The contents of each round are numbered from another multiple of this on.
const NUMBERS: u64 = 100;
/// A round makes many calls and counts as so many rounds.
const CALLS_EACH: u32 = 4;

pub(super) async fn work(stage: TroubledCase) -> Outcome {
    let path = stage.path("raced-for");
    stage.trouble(200);
    let mut before = None;
    let mut rounds = 0;
    while stage.goes_on(rounds * CALLS_EACH) {
        rounds += 1;
        let round = u64::from(rounds);
        let expected = match stage.truth(&path).await? {
            Some((stat, _)) => Expected::Version(stat.version),
            None => Expected::Absent,
        };
        let numbers = (1..=WRITERS).map(|n| round * NUMBERS + n);
        let writing = numbers.clone().map(|number| {
            let (stage, path, expected) = (stage.clone(), path.clone(), expected.clone());
            tokio::spawn(async move { stage.put(&path, number, &expected).await })
        });
        let (mut won, mut refused) = (Vec::new(), Vec::new());
        for (number, answer) in numbers.zip(join_all(writing).await) {
            match answer?? {
                Ok(_) => won.push(number),
                Err(error) if error.is(ErrorKind::Conflict) => refused.push(number),
                Err(error) => excused("put", &error)?,
            }
        }
        let found = stage.truth(&path).await?.map(|(_, data)| data);
        let candidates = (1..=WRITERS).map(|n| Some(round * NUMBERS + n)).chain([before]);
        let is = |number: &Option<u64>| number.map(content_of) == found;
        let now = candidates.into_iter().find(is).ok_or_else(|| CaseFailure::new("no writer wrote the content"))?;
        let atomic = stage.setting.troubled.capabilities().conditional_put == ConditionalPut::Atomic;
        ensure!(!atomic || won.len() <= 1, "{won:?} won in round {round}");
        ensure!(!atomic || won.is_empty() || won.first().copied() == now, "{won:?} won, and {now:?} is there");
        ensure!(won.is_empty() || now != before, "{won:?} won, and nothing changed");
        ensure!(now.is_none_or(|now| !refused.contains(&now)), "{now:?} is there, and was told of a conflict");
        before = now;
    }
    Ok(())
}
