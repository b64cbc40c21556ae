//! What a job will read, by what earlier runs of it read: learned when a job ends, and brought in when the next begins.
//!
//! The decisions are those of the `prefetch` crate; here are the profiles that it decides by, and what is done about it.
//!
//! Readers go first: a request that no reader waits for begins only while no reader waits for the pool, or as one of a
//! few after a short while (`engine/fetch/demand_priority`). The less of what was staged for earlier runs was used, the more
//! probable a use must be to be staged: prefetch that is wasted throttles itself, profile by profile.
//!
//! `forebay stage -- COMMAND` uses the same plan, but with leases. Expected files for which the plan has no room are left
//! out and reported. If the paths that are named beside the command do not fit, the stage is refused as a whole. With
//! `--within` the chosen files fit into the time by the measured speed of the pool (`engine/fetch/bandwidth_estimator`), and
//! staging ends when the time is up. `forebay stage` also waits its turn, goes no faster than `--rate`, and ends with the
//! command; files that are whole by then stay, leased.

mod access_predictor;
mod directory_prefetch;
mod explain;
mod job_prefetch;
mod learn;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_prefetch::plan::{Candidate, Limits, Plan, PoolRate, Refusal, plan, probability_min};
pub use forebay_prefetch::profile::ProfileDocument;
use forebay_prefetch::profile::{Expected, Profile};
pub use forebay_prefetch::signature::{Invocation, Signature};
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::catalog::{JobSerial, ProfileHead};
use crate::clock::unix_now;
use crate::content::CHUNK_BYTES;
use crate::engine::{Inner, blocking, parse_path};
use crate::{Ino, Overlay};
use access_predictor::AccessPredictor;
pub use forebay_api::foresight::{AheadReport, Explanation, ProfileSummary, Reader, Wanted};
use job_prefetch::JobPrefetch;

/// A profile stands in for jobs that are like its own by at least this much.
const SIMILARITY_MIN: f64 = 0.5;
/// Requests that are under way at the same time for one job, or for all readers that are followed: many small files, or
/// one large one, so that what is needed first is here first, and a reader who comes between does not wait for long.
const REQUESTS: usize = 16;

/// How many of them a file takes.
fn requests_of(bytes: u64) -> u32 {
    bytes.div_ceil(CHUNK_BYTES).clamp(1, REQUESTS as u64) as u32
}

/// What is known of the jobs of a mount, and what is under way for those that run.
pub(crate) struct Foresight {
    /// Where what is staged ahead runs.
    runtime: Handle,
    running: Mutex<HashMap<JobSerial, Arc<JobPrefetch>>>,
    pub following: AccessPredictor,
    /// Held while a profile is read, changed and written.
    learning: Mutex<()>,
}

impl Foresight {
    /// Needs a tokio runtime.
    pub fn new() -> Self {
        Self {
            runtime: Handle::current(),
            running: Mutex::default(),
            following: AccessPredictor::default(),
            learning: Mutex::default(),
        }
    }

    /// Whether a file was staged for a job that runs, or just now for a reader that is followed.
    pub fn keeps(&self, ino: Ino) -> bool {
        self.following.keeps(ino) || self.running.lock().values().any(|ahead| ahead.staged.lock().contains_key(&ino))
    }

    /// Why a file was staged for a job that runs.
    fn staged_for(&self, ino: Ino) -> Option<String> {
        let running = self.running.lock();
        let ahead = running.values().find(|ahead| ahead.staged.lock().contains_key(&ino))?;
        ahead.foreseen.lock().get(&ino).cloned()
    }
}

/// A profile, as operators are shown it.
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

/// What is spent otherwise of what there is, and what there is.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Means {
    /// What is staged as well, and goes first.
    pub declared_bytes: u64,
    /// Until it has to be here. `None`: it will be waited for.
    pub time: Option<Duration>,
    /// `None`: as fast as it is.
    pub pool: Option<PoolRate>,
}

/// What to stage for a command.
pub(crate) struct Foreseen {
    pub expected: Vec<Expected>,
    /// Its candidates are numbers of those.
    pub plan: Plan,
}

impl Foreseen {
    /// How many files are left out for this reason.
    pub fn left_out(&self, reason: Refusal) -> usize {
        self.plan.refused.iter().filter(|(_, why)| *why == reason).count()
    }

    /// What is to be staged, in that order.
    pub fn into_chosen(self) -> Vec<Expected> {
        self.plan.chosen.iter().map(|candidate| self.expected[candidate.file as usize].clone()).collect()
    }
}

impl Inner {
    /// What a command will read, and what of it is worth staging now. Nothing where no run like it is known.
    pub(crate) fn foresee(&self, invocation: &Invocation, means: Means) -> Result<Foreseen> {
        let (expected, accuracy) = self.expected(invocation)?;
        let pool = means.pool.unwrap_or_else(|| self.pool_rate(None));
        let candidates = expected.iter().enumerate().map(|(at, expected)| Candidate {
            file: at as u64,
            // What is here already needs its room as well, but no time.
            bytes: expected.bytes,
            missing_bytes: match means.time {
                Some(_) => self.missing_at(&expected.path).map_or(expected.bytes, |bytes| bytes.min(expected.bytes)),
                None => expected.bytes,
            },
            probability: expected.probability,
            rank: expected.rank,
        });
        let limits = Limits {
            room_bytes: self.room_ahead()?.saturating_sub(means.declared_bytes),
            time: means.time,
            probability_min: probability_min(accuracy),
        };
        let plan = plan(candidates.collect(), &pool, &limits);
        Ok(Foreseen { expected, plan })
    }

    /// Bytes that are missing of a file, as far as it is known without asking the pool.
    fn missing_at(&self, path: &str) -> Option<u64> {
        let mut at = Ino::ROOT;
        for name in parse_path(path).ok()?.components() {
            (at, _) = self.catalog.name(at, name).ok()?.here?;
        }
        let node = self.file_node(at).ok()?;
        let size = node.state.lock().record.size;
        self.missing_bytes(&node, 0..size).ok()
    }

    /// How fast the pool is, by its answers, and no faster than it may be asked.
    pub(crate) fn pool_rate(&self, bytes_per_second_max: Option<u64>) -> PoolRate {
        let speed = self.pace.speed();
        let most = bytes_per_second_max.map_or(f64::INFINITY, |most| most as f64);
        PoolRate {
            bytes_per_second: speed.bytes_per_second.min(most).max(1.0),
            latency: speed.latency,
            concurrency: REQUESTS as u32,
        }
    }

    /// What a command will read, and what share of what was staged for runs like it was used.
    fn expected(&self, invocation: &Invocation) -> Result<(Vec<Expected>, f64)> {
        let signature = invocation.signature();
        let accuracy = |head: Option<&ProfileHead>| match head {
            Some(head) if head.staged_bytes > 0.0 => head.used_bytes / head.staged_bytes,
            _ => 1.0,
        };
        if let Some(profile) = self.catalog.profile(&signature)? {
            let head = self.catalog.profile_head(&signature)?;
            return Ok((profile.predict_at(invocation, unix_now()), accuracy(head.as_ref())));
        }
        let mut nearest: Option<(f64, u64, ProfileHead)> = None;
        self.catalog.profiles(|head| {
            let near = signature.similarity(&head.signature);
            let rank = |(near, seen, _): &(f64, u64, ProfileHead)| (*near, *seen);
            let candidate = (near, head.last_seen_unix, head);
            if near >= SIMILARITY_MIN && nearest.as_ref().is_none_or(|best| rank(&candidate) > rank(best)) {
                nearest = Some(candidate);
            }
            Ok(true)
        })?;
        let Some((near, _, head)) = nearest else { return Ok((Vec::new(), 1.0)) };
        let Some(profile) = self.catalog.profile(&head.signature)? else { return Ok((Vec::new(), 1.0)) };
        Ok((profile.predict_similar(invocation, near), accuracy(Some(&head))))
    }

    /// Bytes that what is staged ahead may occupy: all but what is dirty, leased, or staged for other jobs.
    fn room_ahead(&self) -> Result<u64> {
        let limit = (self.store.budget.limit() as f64 * self.policy.space.low_watermark) as u64;
        let mut taken = self.dirty_bytes()? + self.leased_bytes()?;
        for ahead in self.foresight.running.lock().values() {
            taken += ahead.staged.lock().values().sum::<u64>();
        }
        Ok(limit.saturating_sub(taken))
    }

    fn profile_of(&self, wanted: &str) -> Result<ProfileHead> {
        let mut found = Vec::new();
        self.catalog.profiles(|head| {
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
        self.catalog.put_profile(&mut head, &profile)?;
        Ok(head)
    }
}

impl Overlay {
    /// All profiles, in the order of their signatures.
    pub async fn profiles(&self) -> Result<Vec<ProfileSummary>> {
        let inner = self.inner.clone();
        blocking(move || {
            let mut all = Vec::new();
            inner.catalog.profiles(|head| {
                all.push(summary_of(head));
                Ok(true)
            })?;
            Ok(all)
        })
        .await
    }

    /// One profile, by its short name or its signature, with all that it says.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput` where the short name stands for several.
    pub async fn profile(&self, wanted: String) -> Result<(ProfileSummary, ProfileDocument)> {
        let inner = self.inner.clone();
        blocking(move || {
            let head = inner.profile_of(&wanted)?;
            let gone = || Error::new(ErrorKind::NotFound, Side::Cache, format!("there is no profile {wanted}"));
            let profile = inner.catalog.profile(&head.signature)?.ok_or_else(gone)?;
            Ok((summary_of(head), ProfileDocument::from(&profile)))
        })
        .await
    }

    /// Takes a profile in, in place of one of the same signature.
    ///
    /// # Errors
    /// `InvalidInput` that names the field.
    pub async fn import_profile(&self, document: ProfileDocument) -> Result<ProfileSummary> {
        let inner = self.inner.clone();
        blocking(move || inner.import_profile(document).map(summary_of)).await
    }

    /// Gives a profile up, or all of them. How many there were.
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
                None => inner.catalog.profiles(|head| {
                    signatures.push(head.signature);
                    Ok(true)
                })?,
            }
            signatures.iter().try_for_each(|signature| inner.catalog.delete_profile(signature))?;
            Ok(signatures.len() as u64)
        })
        .await
    }

    pub(crate) async fn foreseen(&self, invocation: Invocation, means: Means) -> Result<Foreseen> {
        let inner = self.inner.clone();
        blocking(move || inner.foresee(&invocation, means)).await
    }
}
