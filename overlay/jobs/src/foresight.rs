//! Predicts what a job will read from what earlier runs read. Profiles are learned when a job ends, and used to stage
//! files when the next run begins.
//!
//! The `prefetch` crate decides. This module keeps the profiles for its decisions, and carries the decisions out.
//!
//! Readers go first: a request without a waiting reader begins only while no reader waits for the pool, or as one of a
//! few after a short while (`engine/fetch/demand_priority`). The less of the data that was staged for earlier runs was
//! used, the more probable a use must be before it is staged. So wasted prefetch throttles itself, profile by profile.
//!
//! `forebay stage -- COMMAND` uses the same plan, but with leases. Expected files for which the plan has no room are
//! left out and reported. If the paths that are named beside the command do not fit, the stage is refused as a whole.
//! With `--within`, the chosen files fit into the time at the measured speed of the pool
//! (`engine/fetch/bandwidth_estimator`), and staging ends when the time is up. `forebay stage` also waits its turn,
//! goes no faster than `--rate`, and ends with the command; files that are resident by then stay, leased.

mod access_predictor;
mod directory_prefetch;
mod explain;
mod job_prefetch;
mod learn;

use std::collections::HashMap;
use std::sync::Arc;

use forebay_api::foresight::{AheadReport, ProfileSummary};
use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_catalog::{JobSerial, ProfileHead};
use forebay_engine::{Foreseen, Ino, Means, blocking, parse_path};
use forebay_prefetch::plan::{PlanLimits, StagingCandidate, plan, probability_min};
use forebay_prefetch::profile::{ExpectedRead, Profile};
use forebay_system::clock::unix_now;
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::Jobs;
use crate::JobsInner;
use access_predictor::AccessPredictor;
pub use forebay_prefetch::profile::ProfileDocument;
pub use forebay_prefetch::signature::Invocation;
use job_prefetch::JobPrefetch;

/// A job without a profile uses the profile of the most similar signature, if the similarity is at least this.
const SIMILARITY_MIN: f64 = 0.5;
/// Predictions for the jobs and readers of a mount, and the prefetch that is under way.
pub(crate) struct Foresight {
    /// The runtime on which staging runs.
    pub runtime: Handle,
    running: Mutex<HashMap<JobSerial, Arc<JobPrefetch>>>,
    pub access_predictor: AccessPredictor,
    /// Held while a profile is read, changed and written.
    learning: Mutex<()>,
}

impl Foresight {
    /// Needs a tokio runtime.
    pub fn new() -> Self {
        Self {
            runtime: Handle::current(),
            running: Mutex::default(),
            access_predictor: AccessPredictor::default(),
            learning: Mutex::default(),
        }
    }

    /// Returns whether a file was staged for a running job, or a short while ago for a reader that is followed.
    pub fn keeps(&self, ino: Ino) -> bool {
        self.access_predictor.keeps(ino)
            || self.running.lock().values().any(|ahead| ahead.staged.lock().contains_key(&ino))
    }

    /// Returns why a file was staged for a running job.
    fn staged_for(&self, ino: Ino) -> Option<String> {
        let running = self.running.lock();
        let ahead = running.values().find(|ahead| ahead.staged.lock().contains_key(&ino))?;
        ahead.foreseen.lock().get(&ino).cloned()
    }
}

/// Returns a profile as operators see it.
fn summary_of(head: ProfileHead) -> ProfileSummary {
    ProfileSummary {
        id: head.signature.id(),
        accuracy: (head.staged_bytes > 0.0).then(|| (head.used_bytes / head.staged_bytes).min(1.0)),
        signature: head.signature,
        runs: head.runs,
        files: head.files,
        encoded_bytes: head.encoded_bytes,
        last_seen_unix: head.last_seen_unix,
    }
}

impl JobsInner {
    /// Returns what a command will read, and which of it is worth staging now. Empty if no similar run is known.
    pub(crate) fn foresee(&self, invocation: &Invocation, means: Means) -> Result<Foreseen> {
        let (expected, accuracy) = self.expected(invocation)?;
        let pool = means.pool.unwrap_or_else(|| self.engine.pool_rate(None));
        let candidates = expected.iter().enumerate().map(|(at, expected)| StagingCandidate {
            file: at as u64,
            // What is resident needs room as well, but no time.
            bytes: expected.bytes,
            missing_bytes: match means.time {
                Some(_) => parse_path(&expected.path)
                    .ok()
                    .and_then(|path| self.engine.missing_at(&path))
                    .map_or(expected.bytes, |bytes| bytes.min(expected.bytes)),
                None => expected.bytes,
            },
            probability: expected.probability,
            rank: expected.rank,
        });
        let limits = PlanLimits {
            room_bytes: self.room_ahead()?.saturating_sub(means.declared_bytes),
            time: means.time,
            probability_min: probability_min(accuracy),
        };
        let plan = plan(candidates.collect(), &pool, &limits);
        Ok(Foreseen { expected, plan })
    }

    /// Returns what a command will read, and the share of the data staged for similar runs that was used.
    fn expected(&self, invocation: &Invocation) -> Result<(Vec<ExpectedRead>, f64)> {
        let signature = invocation.signature();
        let accuracy = |head: Option<&ProfileHead>| match head {
            Some(head) if head.staged_bytes > 0.0 => head.used_bytes / head.staged_bytes,
            _ => 1.0,
        };
        if let Some(profile) = self.engine.catalog().profile(&signature)? {
            let head = self.engine.catalog().profile_head(&signature)?;
            return Ok((profile.predict_at(invocation, unix_now()), accuracy(head.as_ref())));
        }
        let mut nearest: Option<(f64, u64, ProfileHead)> = None;
        self.engine.catalog().profiles(|head| {
            let near = signature.similarity(&head.signature);
            let rank = |(near, seen, _): &(f64, u64, ProfileHead)| (*near, *seen);
            let candidate = (near, head.last_seen_unix, head);
            if near >= SIMILARITY_MIN && nearest.as_ref().is_none_or(|best| rank(&candidate) > rank(best)) {
                nearest = Some(candidate);
            }
            Ok(true)
        })?;
        let Some((near, _, head)) = nearest else { return Ok((Vec::new(), 1.0)) };
        let Some(profile) = self.engine.catalog().profile(&head.signature)? else { return Ok((Vec::new(), 1.0)) };
        Ok((profile.predict_similar(invocation, near), accuracy(Some(&head))))
    }

    /// Returns the bytes that staged data may occupy: all but those that are dirty, leased, or staged for jobs.
    fn room_ahead(&self) -> Result<u64> {
        self.room_beside(|_| true)
    }

    /// The same, with the bytes that are staged for this job.
    fn room_ahead_for(&self, job: &Arc<JobPrefetch>) -> Result<u64> {
        self.room_beside(|ahead| !Arc::ptr_eq(ahead, job))
    }

    fn room_beside(&self, counts: impl Fn(&Arc<JobPrefetch>) -> bool) -> Result<u64> {
        let running = self.foresight.running.lock();
        let counted = running.values().filter(|ahead| counts(ahead));
        let staged: u64 = counted.map(|ahead| ahead.staged.lock().values().sum::<u64>()).sum();
        drop(running);
        Ok(self.engine.room_ahead()?.saturating_sub(staged))
    }

    fn profile_of(&self, wanted: &str) -> Result<ProfileHead> {
        let mut found = Vec::new();
        self.engine.catalog().profiles(|head| {
            if head.signature.id() == wanted || head.signature.as_str() == wanted {
                found.push(head);
            }
            Ok(true)
        })?;
        let many = found.len() > 1;
        match found.pop() {
            Some(_) if many => {
                let what = format!("several profiles are called {wanted}: give the whole signature");
                Err(Error::new(ErrorKind::InvalidInput, Side::Application, what))
            }
            Some(head) => Ok(head),
            None => Err(Error::new(ErrorKind::NotFound, Side::Application, format!("there is no profile {wanted}"))),
        }
    }

    fn import_profile(&self, document: ProfileDocument) -> Result<ProfileHead> {
        let invalid = |e: String| Error::new(ErrorKind::InvalidInput, Side::Application, e);
        let profile = Profile::try_from(document).map_err(|e| invalid(e.to_string()))?;
        let mut head = ProfileHead {
            signature: profile.signature(),
            runs: profile.runs() as u64,
            files: profile.files().count() as u64,
            encoded_bytes: 0,
            last_seen_unix: profile.last_seen_unix(),
            staged_bytes: 0.0,
            used_bytes: 0.0,
        };
        let _learning = self.foresight.learning.lock();
        self.engine.catalog().put_profile(&mut head, &profile)?;
        Ok(head)
    }
}

impl Jobs {
    /// Returns all profiles, in the order of their signatures.
    pub async fn profiles(&self) -> Result<Vec<ProfileSummary>> {
        let inner = self.inner.clone();
        blocking(move || {
            let mut all = Vec::new();
            inner.engine.catalog().profiles(|head| {
                all.push(summary_of(head));
                Ok(true)
            })?;
            Ok(all)
        })
        .await
    }

    /// Returns one profile with its content, by its short name or its signature.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput` if several profiles have the short name.
    pub async fn profile(&self, wanted: String) -> Result<(ProfileSummary, ProfileDocument)> {
        let inner = self.inner.clone();
        blocking(move || {
            let head = inner.profile_of(&wanted)?;
            let gone = || Error::new(ErrorKind::NotFound, Side::Cache, format!("there is no profile {wanted}"));
            let profile = inner.engine.catalog().profile(&head.signature)?.ok_or_else(gone)?;
            Ok((summary_of(head), ProfileDocument::from(&profile)))
        })
        .await
    }

    /// Imports a profile. It replaces one of the same signature.
    ///
    /// # Errors
    /// `InvalidInput` that names the field.
    pub async fn import_profile(&self, document: ProfileDocument) -> Result<ProfileSummary> {
        let inner = self.inner.clone();
        blocking(move || inner.import_profile(document).map(summary_of)).await
    }

    /// Deletes one profile, or all. Returns how many were deleted.
    ///
    /// # Errors
    /// As [`Self::profile`].
    pub async fn forget_profiles(&self, wanted: Option<String>) -> Result<u64> {
        let inner = self.inner.clone();
        blocking(move || {
            let _learning = inner.foresight.learning.lock();
            let mut signatures = Vec::new();
            match wanted {
                Some(wanted) => signatures.push(inner.profile_of(&wanted)?.signature),
                None => inner.engine.catalog().profiles(|head| {
                    signatures.push(head.signature);
                    Ok(true)
                })?,
            }
            signatures.iter().try_for_each(|signature| inner.engine.catalog().delete_profile(signature))?;
            Ok(signatures.len() as u64)
        })
        .await
    }
}

#[cfg(test)]
mod tests;
