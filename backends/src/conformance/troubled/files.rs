//! Files that are each written, renamed and removed by a single worker.

use std::collections::VecDeque;

use futures::future::try_join_all;
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::conformance::context::{CaseFailure, Outcome};
use crate::conformance::ensure;
use crate::{Error, ErrorKind, Expected, PoolPath, RenameMode, Stat};

use super::ledger::{PossibleStates, State};
use super::{TroubledCase, content_at, content_of, excused};

const WORKERS: u64 = 4;
/// The contents of each worker are numbered from another multiple of this on.
const NUMBERS: u64 = 1 << 20;

struct Worker {
    stage: TroubledCase,
    names: [PoolPath; 2],
    ledger: PossibleStates,
    random: ChaCha8Rng,
    /// The number of the last content that was put.
    number: u64,
    /// The last calls and their results, for the analysis of a failure.
    history: VecDeque<String>,
}

/// The number of calls that a failure reports.
const HISTORY: usize = 8;

pub(super) async fn work(stage: TroubledCase) -> Outcome {
    let workers = (0..WORKERS).map(|n| Worker {
        names: [stage.path(&format!("{n}-a")), stage.path(&format!("{n}-b"))],
        ledger: PossibleStates::empty(),
        random: stage.random(n),
        number: (n + 1) * NUMBERS,
        history: VecDeque::new(),
        stage: stage.clone(),
    });
    stage.trouble(100);
    let running = workers.map(|worker| tokio::spawn(worker.run()));
    let done = try_join_all(running).await?;
    stage.setting.trouble.end();
    for worker in done {
        worker?.check().await?;
    }
    Ok(())
}

impl Worker {
    async fn run(mut self) -> Outcome<Self> {
        match self.rounds().await {
            Ok(()) => Ok(self),
            Err(failure) => Err(CaseFailure::new(format!("{failure}, after {:#?}", self.history))),
        }
    }

    async fn rounds(&mut self) -> Outcome {
        let mut rounds = 0;
        while self.stage.goes_on(rounds) {
            rounds += 1;
            let Some(state) = self.look().await? else { continue };
            let name = self.random.random_range(0..2);
            match (self.random.random_range(0..10), state[name]) {
                (0..2, Some(_)) => self.remove(name, state).await?,
                (2..4, Some(_)) => self.rename(name, state).await?,
                _ => self.put(name, state).await?,
            }
        }
        Ok(())
    }

    /// Looks up the current state; `None` if the faults prevent it.
    async fn look(&mut self) -> Outcome<Option<State>> {
        if let Some(state) = self.ledger.known() {
            return Ok(Some(state));
        }
        let mut state = [None, None];
        for (name, path) in self.names.iter().enumerate() {
            let what = format!("look at {path}");
            match self.stage.call(&what, content_at(&*self.stage.setting.troubled, path)).await? {
                Ok(found) => state[name] = self.number_of(name, found.map(|(_, data)| data))?,
                Err(error) => {
                    excused(&what, &error)?;
                    return Ok(None);
                }
            }
        }
        ensure!(self.ledger.allows(state), "{}: {state:?} is not among {:?}", self.names[0], self.ledger);
        self.ledger.is(state);
        self.note(format!("found {state:?}"));
        Ok(Some(state))
    }

    fn note(&mut self, what: String) {
        self.history.push_back(what);
        if self.history.len() > HISTORY {
            self.history.pop_front();
        }
    }

    /// The number of the content that was found under a name, among those that are possible.
    fn number_of(&self, name: usize, found: Option<bytes::Bytes>) -> Outcome<Option<u64>> {
        let Some(data) = found else { return Ok(None) };
        let known = self.ledger.contents(name).into_iter().flatten().find(|number| content_of(*number) == data);
        let path = &self.names[name];
        let unknown = || {
            let possible = self.ledger.contents(name);
            CaseFailure::new(format!("{path} has {} bytes that are none of {possible:?}", data.len()))
        };
        known.map(Some).ok_or_else(unknown)
    }

    /// The current version, for a condition.
    async fn expected(&self, name: usize, state: State) -> Outcome<Option<Expected>> {
        if state[name].is_none() {
            return Ok(Some(Expected::Absent));
        }
        let (path, what) = (&self.names[name], format!("stat {}", self.names[name]));
        match self.stage.call(&what, self.stage.setting.troubled.stat(path)).await? {
            Ok(stat) => Ok(Some(Expected::Version(stat.version))),
            Err(error) if error.is(ErrorKind::NotFound) => {
                let really = self.stage.truth(path).await?.map(|(stat, _)| stat);
                Err(CaseFailure::new(format!(
                    "{what}: nothing, where {state:?} should be; by the sound way {really:?}"
                )))
            }
            Err(error) => excused(&what, &error).map(|()| None),
        }
    }

    async fn put(&mut self, name: usize, state: State) -> Outcome {
        let Some(mut expected) = self.expected(name, state).await? else { return Ok(()) };
        if self.random.random_bool(0.3) {
            expected = Expected::Anything;
        }
        self.number += 1;
        let mut after = state;
        after[name] = Some(self.number);
        let answer = self.stage.put(&self.names[name].clone(), self.number, &expected).await?;
        let size = content_of(self.number).len() as u64;
        if let Ok(Stat { size: told, .. }) = &answer {
            ensure!(*told == size, "put {}: {told} bytes were told, {size} put", self.names[name]);
        }
        self.settle("put", name, answer.map(drop), &[after])
    }

    async fn remove(&mut self, name: usize, state: State) -> Outcome {
        let Some(expected) = self.expected(name, state).await? else { return Ok(()) };
        let mut after = state;
        after[name] = None;
        let removal = self.stage.setting.troubled.remove(&self.names[name], &expected);
        let answer = self.stage.call("remove", removal).await?;
        self.settle("remove", name, answer, &[after])
    }

    async fn rename(&mut self, name: usize, state: State) -> Outcome {
        let other = 1 - name;
        let mut after = state;
        (after[name], after[other]) = (None, state[name]);
        let mut both = state;
        both[other] = state[name];
        let pool = &self.stage.setting.troubled;
        let rename = pool.rename(&self.names[name], &self.names[other], RenameMode::Replace);
        let answer = self.stage.call("rename", rename).await?;
        // The copy was made, and the original was not removed.
        let half = pool.capabilities().renames.copy().then_some(both);
        self.settle("rename", name, answer.map(drop), &[&[after][..], half.as_slice()].concat())
    }

    /// `afters`: the possible states afterwards; the first is the state after success.
    fn settle(&mut self, what: &str, name: usize, answer: Result<(), Error>, afters: &[State]) -> Outcome {
        let what = format!("{what} {}", self.names[name]);
        let said = answer.as_ref().map_or_else(ToString::to_string, |()| "done".to_owned());
        self.note(format!("{what} to {:?}: {said}", afters[0]));
        match answer {
            Ok(()) => self.ledger.is(afters[0]),
            Err(error) => {
                // No other worker writes these files.
                let others = [ErrorKind::Conflict, ErrorKind::Exists, ErrorKind::NotFound, ErrorKind::Stale];
                ensure!(!others.contains(&error.kind()), "{what}: no other worker did anything: {error}");
                excused(&what, &error)?;
                afters.iter().for_each(|after| self.ledger.may_be(*after));
            }
        }
        Ok(())
    }

    async fn check(self) -> Outcome {
        let mut state = [None, None];
        for (name, path) in self.names.iter().enumerate() {
            state[name] = self.number_of(name, self.stage.truth(path).await?.map(|(_, data)| data))?;
        }
        ensure!(self.ledger.allows(state), "{}: {state:?} is not among {:?}", self.names[0], self.ledger);
        Ok(())
    }
}
