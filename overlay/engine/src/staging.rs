//! What operators do: stage, flush, evict. Each operation is a stream of progress that ends with a summary.

mod cluster_share;
pub mod leases;
mod paths;
mod reporter;
mod room;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay_api::operator::{EvictRequest, FlushRequest, Progress, StageRequest, Summary};
use forebay_api::peers::ClusterShare;
use forebay_backends::decorators::Rate;
use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_policy::Write;
use forebay_prefetch::plan::StagingRefusal;
use forebay_prefetch::profile::ExpectedRead;
use forebay_prefetch::signature::Invocation;
use forebay_system::clock::unix_now;
use futures::{FutureExt, Stream, StreamExt, stream};
use tokio::task::coop::consume_budget;
use tokio_util::sync::CancellationToken;

use super::coherence::Age;
use super::namespace::{Arrivals, Ask};
use super::writeback::FlushPlan;
use super::{Inner, Ino, Overlay};
use crate::Means;
use crate::counters::ChosenBy;
use crate::fetch::FetchPriority;
use crate::permission::READ;
use crate::quotas::StageUnderWay;
use crate::space::eviction::KeepReason;
use cluster_share::FileShare;
use leases::Staging;
pub use paths::parse_path;
use reporter::{Reporter, reported};

/// Files that are staged at the same time.
const CONCURRENCY: usize = 16;
const LONG_WORK_TOLD_EVERY: Duration = Duration::from_secs(1);

/// What all files of one staging have in common.
struct StagingTerms<'a> {
    /// The version that is fetched is one that the pool had after this moment.
    begun: Instant,
    owner: &'a str,
    /// The owner is the job in which the staging was requested.
    is_jobs: bool,
    expires_unix: Option<u64>,
    rate: Option<Rate>,
    cluster: Option<ClusterShare>,
}

/// What a request asks for.
struct ToStage {
    files: Vec<Ino>,
    /// How many of the files were requested. Those after them are only expected to be read.
    declared: usize,
    /// Why those after them are expected to be read.
    expected: Vec<(Ino, ExpectedRead)>,
    /// The bytes of files that came with a listing.
    arrived: HashMap<Ino, u64>,
    /// For the operator.
    message: Option<String>,
}

/// Runs `work` until a moment, and no longer. Returns `None` if it did not finish.
async fn in_time<T>(until: Option<Instant>, work: impl Future<Output = T>) -> Option<T> {
    match until {
        Some(until) => tokio::time::timeout_at(until.into(), work).await.ok(),
        None => Some(work.await),
    }
}

impl Overlay {
    /// Fetches files and leases them. `Done` with `failed == 0` means that every requested byte is resident and leased.
    /// Ends when the receiver is dropped, or when its time is up: files that are whole by then stay, leased. Of a request for
    /// a cluster, stages the share of this node, and asks no other node.
    pub fn stage(&self, request: StageRequest) -> impl Stream<Item = Progress> + Send + 'static {
        let (reporter, receiver) = Reporter::new();
        let stop = CancellationToken::new();
        let listened_to = stop.clone().drop_guard();
        let overlay = self.clone();
        let task = async move {
            match stop.run_until_cancelled(overlay.stage_all(&request, &reporter)).await {
                Some(result) => reporter.finish(result),
                None => tracing::info!("staging ended early: its client disconnected"),
            }
        };
        tokio::spawn(task.boxed());
        receiver.map(move |progress| {
            // Dropped with the stream, which cancels the staging.
            let _ = &listened_to;
            progress
        })
    }

    /// Writes what differs back to the pool.
    pub fn flush(&self, request: FlushRequest) -> impl Stream<Item = Progress> + Send + 'static {
        let (reporter, receiver) = Reporter::new();
        let overlay = self.clone();
        let task = async move {
            if !request.wait && !request.dry_run {
                let only_planned = FlushRequest { dry_run: true, ..request.clone() };
                let planned = overlay.flush_paths(&only_planned, &reporter).await;
                let (background, _) = Reporter::new();
                tokio::spawn(async move { overlay.flush_paths(&request, &background).await }.boxed());
                return reporter.finish(planned);
            }
            let result = overlay.flush_paths(&request, &reporter).await;
            reporter.finish(result);
        };
        tokio::spawn(task.boxed());
        receiver
    }

    /// Writes these objects back to the pool, with what is below them. Those that are gone have nothing to be written
    /// back, and a symbolic link stands for itself.
    pub fn flush_objects(&self, inos: Vec<Ino>) -> impl Stream<Item = Progress> + Send + 'static {
        let overlay = self.clone();
        reported(|reporter| async move {
            let roots: Vec<_> = inos.into_iter().map(Some).collect();
            overlay.flush_roots(&roots, false, &reporter).await
        })
    }

    /// Evicts clean content, whatever the eviction policy says about it.
    pub fn evict(&self, request: EvictRequest) -> impl Stream<Item = Progress> + Send + 'static {
        let overlay = self.clone();
        reported(|reporter| async move { overlay.evict_paths(&request, &reporter).await })
    }

    async fn stage_all(&self, request: &StageRequest, reporter: &Reporter) -> Result<()> {
        let inner = &self.inner;
        let begun = Instant::now();
        let until = request.within_ms.and_then(|ms| begun.checked_add(Duration::from_millis(ms)));
        let Some(found) = in_time(until, self.files_to_stage(request, begun, until, reporter)).await else {
            reporter.unfinished(1);
            reporter.done(Some("the time was up before all was found that is to be staged".into()));
            return Ok(());
        };
        let ToStage { mut files, declared, expected, arrived, mut message } = found?;
        let (owner, is_jobs) = inner.owner(request.job.as_deref(), &request.lease_owner);
        let sizes = self.sizes_to_stage(&files, request.cluster).await?;
        // What is expected of a file is its size at an earlier use: it may have grown since.
        match sizes.leave_out(&mut files, declared) {
            0 => {}
            left_out => {
                let why = format!("{left_out} files that may be read are left out: there is no room for them");
                message = Some(message.map_or(why.clone(), |message| format!("{message}; {why}")));
            }
        }
        let _counted = self.keep_to_quota(&mut files, declared, owner, request, &mut message).await?;
        if request.dry_run {
            let kept: HashSet<Ino> = files.iter().skip(declared).copied().collect();
            let wanted = expected.iter().filter(|(ino, _)| kept.contains(ino));
            wanted.for_each(|(_, expected)| reporter.send(Progress::Wanted(expected.into())));
        }
        let missing = sizes.missing_bytes(&files);
        let came = files.iter().filter_map(|ino| arrived.get(ino)).fold(0_u64, |sum, bytes| sum.saturating_add(*bytes));
        reporter.send(Progress::Planned { files: files.len() as u64, bytes: missing.saturating_add(came) });
        sizes.check(&files)?;
        if request.dry_run {
            reporter.planned(files.len() as u64, missing, message);
            return Ok(());
        }
        if owner.is_empty() {
            let what = "the job that is to own the leases does not run";
            return Err(Error::new(ErrorKind::NotFound, Side::Application, what));
        }
        let terms = &StagingTerms {
            begun,
            owner,
            is_jobs,
            expires_unix: request.lease_secs.map(|secs| unix_now().saturating_add(secs)),
            rate: request.bytes_per_second.map(Rate::per_second),
            cluster: request.cluster,
        };
        let settled = &AtomicU64::new(0);
        let arrived = &arrived;
        let staging = stream::iter(files.iter().copied()).for_each_concurrent(CONCURRENCY, |ino| async move {
            let staged = self.stage_file(ino, terms).await;
            settled.fetch_add(1, Ordering::Relaxed);
            match staged {
                Ok(bytes) => reporter.advanced(bytes.saturating_add(arrived.get(&ino).copied().unwrap_or(0))),
                Err(e) => reporter.failed(inner.display(ino), &e),
            }
        });
        if in_time(until, staging).await.is_none() {
            let unfinished = files.len() as u64 - settled.load(Ordering::Relaxed);
            reporter.unfinished(unfinished);
            let late = format!("the time was up before {unfinished} of {} files were resident", files.len());
            message = Some(message.map_or(late.clone(), |message| format!("{late}; {message}")));
        }
        // The leases are durable before a caller relies on them.
        let again = inner.clone();
        super::blocking(move || again.catalog.sync()).await?;
        reporter.done(message);
        Ok(())
    }

    /// Leaves out expected files that the quota of the owner's user does not allow. The others count for the user while
    /// the returned value lives.
    ///
    /// # Errors
    /// `Quota` if it does not allow the requested ones.
    async fn keep_to_quota(
        &self,
        files: &mut Vec<Ino>,
        declared: usize,
        owner: &str,
        request: &StageRequest,
        message: &mut Option<String>,
    ) -> Result<Option<StageUnderWay>> {
        if self.inner.policy().quotas.is_empty() || owner.is_empty() {
            return Ok(None);
        }
        let mut sizes = Vec::with_capacity(files.len());
        for ino in files.iter() {
            consume_budget().await;
            let node = self.inner.node_unless_gone(*ino)?;
            let leased = node.map(|node| self.inner.bytes_to_lease(&node, request.cluster)).transpose()?;
            sizes.push((*ino, leased.unwrap_or_default()));
        }
        let (inner, owner, rehearses) = (self.inner.clone(), owner.to_owned(), request.dry_run);
        let allowed = super::blocking(move || inner.allow_stage(&owner, sizes, declared, rehearses)).await?;
        let left_out = files.len() - allowed.files;
        if left_out > 0 {
            files.truncate(allowed.files);
            let why = format!("{left_out} files that may be read are left out: the user's quota has no room for them");
            *message = Some(message.take().map_or(why.clone(), |message| format!("{message}; {why}")));
        }
        Ok(allowed.under_way)
    }

    async fn files_to_stage(
        &self,
        request: &StageRequest,
        begun: Instant,
        until: Option<Instant>,
        reporter: &Reporter,
    ) -> Result<ToStage> {
        let arrivals = Arrivals::default();
        // Contents that come with a listing arrive at full speed, so they are not requested if there is a rate. They come
        // from the pool, so each member of a cluster would read them there again.
        let ask = match request.dry_run || request.bytes_per_second.is_some() || request.cluster.is_some() {
            true => Ask::Names(Age::Since(begun)),
            false => Ask::Contents(Age::Since(begun), &arrivals),
        };
        let mut files = self.files_of(&request.paths, ask, request.user.as_ref(), reporter).await?;
        self.inner.keep_share(&mut files, request.cluster, reporter).await?;
        let declared = files.len();
        let (message, expected) = match &request.invocation {
            Some(invocation) => self.add_foreseen(&mut files, invocation, (begun, until), request, reporter).await?,
            None => (None, Vec::new()),
        };
        Ok(ToStage { files, declared, expected, arrived: arrivals.0.into_inner(), message })
    }

    /// Adds to the declared files those that a command will probably read, in the order of its reads. Returns a message
    /// for the operator, and what is known of the added files.
    async fn add_foreseen(
        &self,
        files: &mut Vec<Ino>,
        invocation: &Invocation,
        (begun, until): (Instant, Option<Instant>),
        request: &StageRequest,
        reporter: &Reporter,
    ) -> Result<(Option<String>, Vec<(Ino, ExpectedRead)>)> {
        let inner = &self.inner;
        let pool = self.pool_rate(request.bytes_per_second);
        let (mut declared_bytes, mut declared_seconds) = (0_u64, 0.0);
        for ino in files.iter() {
            let Some(node) = inner.node_unless_gone(*ino)? else { continue };
            let size = inner.attr_of(&node)?.size;
            declared_bytes = declared_bytes.saturating_add(size);
            declared_seconds += pool.busy_seconds(size.saturating_sub(inner.resident_bytes(&node, size)?));
        }
        let declared = Duration::try_from_secs_f64(declared_seconds).unwrap_or(Duration::MAX);
        let left = |until: Instant| until.saturating_duration_since(Instant::now()).saturating_sub(declared);
        let means = Means { declared_bytes, time: until.map(left), pool: Some(pool) };
        let (inner_again, invocation_again) = (inner.clone(), invocation.clone());
        let foreseen = super::blocking(move || inner_again.advisor().foresee(&invocation_again, means)).await?;
        if foreseen.expected.is_empty() {
            let message = format!("no run like `{}` is known", invocation.signature().as_str());
            return Ok((Some(message), Vec::new()));
        }
        let declared: HashSet<Ino> = files.iter().copied().collect();
        let left_out = [(StagingRefusal::NoRoom, "room"), (StagingRefusal::NoTime, "time")]
            .map(|(reason, lacks)| (foreseen.left_out(reason), lacks))
            .into_iter()
            .filter(|(files, _)| *files > 0)
            .map(|(files, lacks)| format!("{files} files that may be read are left out: there is no {lacks} for them"))
            .collect::<Vec<_>>();
        let user = request.user.as_ref();
        // What the user may not read any more is not read by the job.
        let is_denied = |e: &Error| user.is_some() && e.is(ErrorKind::PermissionDenied);
        let found = stream::iter(foreseen.into_chosen()).map(|expected| async move {
            let path = parse_path(&expected.path).ok()?;
            let ino = match self.resolve_for(&path, Ask::Nothing, user).await {
                Err(e) if e.is_gone() || is_denied(&e) => return None,
                Err(e) => return Some(Err((expected.path, e))),
                Ok(ino) => ino,
            };
            // A path that is gone, or is no longer a file, is left out. The size must be that of now, because the room is
            // checked with it.
            inner.file_node(ino).ok()?;
            if let Some(user) = user {
                match inner.check_allowed(ino, user, READ).await {
                    Err(e) if e.is_gone() || is_denied(&e) => return None,
                    Err(e) => return Some(Err((expected.path, e))),
                    Ok(()) => {}
                }
            }
            match inner.revalidate(ino, Age::Since(begun)).await {
                Err(e) if e.is_gone() => None,
                // Its staging reports other errors.
                _ => Some(Ok((ino, expected))),
            }
        });
        let (mut found, mut wanted) = (std::pin::pin!(found.buffered(CONCURRENCY)), Vec::new());
        while let Some(found) = found.next().await {
            match found {
                Some(Ok((ino, expected))) if !declared.contains(&ino) => {
                    files.push(ino);
                    wanted.push((ino, expected));
                }
                Some(Err((path, e))) => reporter.failed(path, &e),
                _ => {}
            }
        }
        Ok(((!left_out.is_empty()).then(|| left_out.join("; ")), wanted))
    }

    /// Fetches the version that the pool has since `begun`. Returns the bytes that were not resident before.
    async fn stage_file(&self, ino: Ino, terms: &StagingTerms<'_>) -> Result<u64> {
        // Many files in a row may need no answer of the pool: without this, the task would not yield.
        consume_budget().await;
        let inner = &self.inner;
        let node = inner.node(ino)?;
        if let FileShare::Ranges(_) = inner.share_of(&node, terms.cluster)? {
            return self.stage_ranges(&node, terms).await;
        }
        let known = inner.attr_of(&node)?.size;
        let here = inner.resident_bytes(&node, known)?;
        let staging = Staging::begin(inner, &node, terms.owner, terms.is_jobs);
        let (node, staging) = (&node, &staging);
        let attempt = |size| async move {
            staging.lease(size, terms.expires_unix)?;
            inner.ensure(node, 0..size, FetchPriority::Ahead(terms.rate.as_ref())).await?;
            if !node.state.lock().record.file.is_whole() {
                return Ok(None);
            }
            // Another staging of the same owner may have changed the lease meanwhile.
            staging.lease(size, terms.expires_unix)?;
            Ok(Some(size.saturating_sub(here)))
        };
        inner.fetch_current(ino, terms.begun, attempt).await?.ok_or_else(|| inner.changes_while_staged(ino))
    }

    /// Returns the inodes that a request names, with the symbolic links on its paths; `None` is everything. Also returns the
    /// paths with links that lead out of the mount: only the links are flushed.
    async fn roots_of(&self, request: &FlushRequest) -> Result<(Vec<Option<Ino>>, Vec<(String, Error)>)> {
        if request.paths.is_empty() {
            return Ok((vec![None], Vec::new()));
        }
        let (mut roots, mut unfollowed) = (Vec::new(), Vec::new());
        for path in &request.paths {
            let named = self.named(&parse_path(path)?, Ask::Nothing).await?;
            // A link may be new itself.
            roots.extend(named.links.into_iter().chain([named.ino]).map(Some));
            unfollowed.extend(named.unfollowed.map(|why| (path.clone(), why)));
        }
        let mut seen = HashSet::new();
        roots.retain(|root| seen.insert(*root));
        Ok((roots, unfollowed))
    }

    async fn plan_below(&self, roots: &[Option<Ino>]) -> Result<FlushPlan> {
        let mut intents = Vec::new();
        for root in roots {
            let differences = self.inner.differences_below(*root).await?;
            self.inner.learn_storage_pools_of(&differences).await;
            intents.extend(differences);
        }
        if self.inner.policy().may_write(Write::Local) {
            let inner = self.inner.clone();
            let asked = move || {
                let unknown = inner.directories_to_ask(intents.iter());
                Ok((intents, unknown))
            };
            let unknown;
            (intents, unknown) = super::blocking(asked).await?;
            // What an owner may keep on this node is not sent while the pool does not tell: its step reports it.
            if let Err(error) = self.inner.learn_directories(unknown).await {
                tracing::debug!(%error, "the settings of directories are not known");
            }
        }
        Ok(self.inner.plan_flush(intents))
    }

    async fn flush_paths(&self, request: &FlushRequest, reporter: &Reporter) -> Result<()> {
        if !request.dry_run {
            self.inner.ask_if_back().await;
        }
        let (roots, unfollowed) = self.roots_of(request).await?;
        for (path, why) in unfollowed {
            reporter.failed(path, &why);
        }
        self.flush_roots(&roots, request.dry_run, reporter).await
    }

    /// `roots`: `None` is everything.
    async fn flush_roots(&self, roots: &[Option<Ino>], dry_run: bool, reporter: &Reporter) -> Result<()> {
        let inner = &self.inner;
        for round in 0..3 {
            let plan = self.plan_below(roots).await?;
            if round == 0 {
                reporter.send(Progress::Planned { files: plan.changes, bytes: plan.bytes });
            }
            if dry_run {
                reporter.planned(plan.changes, plan.bytes, None);
                return Ok(());
            }
            if plan.is_empty() {
                break;
            }
            let flushing = inner.flush_all(plan, |bytes| reporter.advanced(bytes));
            let failed = self.tell_of_long_work(reporter, flushing).await;
            // Another flush, or the program that removed these names, took care of them meanwhile.
            let gone = |e: &Error| matches!(e.kind(), ErrorKind::Stale | ErrorKind::NotFound);
            if round < 2 && failed.iter().all(|failed| gone(&failed.error)) {
                continue;
            }
            for failed in failed {
                reporter.failed(failed.path, &failed.error);
            }
            break;
        }
        inner.sync_flushed().await?;
        reporter.done(None);
        Ok(())
    }

    /// Reports what takes long in the pool, until `work` ends.
    async fn tell_of_long_work<T>(&self, reporter: &Reporter, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        loop {
            match tokio::time::timeout(LONG_WORK_TOLD_EVERY, &mut work).await {
                Ok(done) => return done,
                Err(_) => match self.inner.pool.under_way() {
                    under_way if under_way.is_empty() => {}
                    under_way => reporter.send(Progress::UnderWay(under_way)),
                },
            }
        }
    }

    async fn evict_paths(&self, request: &EvictRequest, reporter: &Reporter) -> Result<()> {
        let inner = &self.inner;
        let files = self.files_of(&request.paths, Ask::Nothing, None, reporter).await?;
        let mut reasons = BTreeMap::new();
        for ino in files {
            consume_budget().await;
            let Some(node) = inner.node_unless_gone(ino)? else { continue };
            if request.release_leases && !request.dry_run {
                inner.end_lease(ino, None)?;
            }
            let given_up = if request.dry_run {
                let kept = inner.kept(&node.state.lock(), unix_now());
                match kept.filter(|kept| *kept != KeepReason::Leased || !request.release_leases) {
                    Some(kept) => Err(kept),
                    None => Ok(inner.listed(ino)?.resident_bytes),
                }
            } else {
                inner.evict_inode(ino, ChosenBy::Request)?
            };
            match given_up {
                Ok(bytes) => reporter.advanced(bytes),
                Err(KeepReason::Absent) => {}
                Err(kept) => {
                    reporter.skipped.fetch_add(1, Ordering::Relaxed);
                    *reasons.entry(kept.reason()).or_insert(0u64) += 1;
                }
            }
        }
        let again = inner.clone();
        super::blocking(move || {
            again.trash.drain();
            Ok(())
        })
        .await?;
        let reasons: Vec<String> = reasons.iter().map(|(why, files)| format!("{files} {why}")).collect();
        reporter.done((!reasons.is_empty()).then(|| reasons.join("; ")));
        Ok(())
    }
}

impl Inner {
    fn changes_while_staged(&self, ino: Ino) -> Error {
        Error::new(ErrorKind::Stale, Side::Pool, format!("{}: changes while it is staged", self.display(ino)))
    }
}

/// Collects a stream of progress into its summary and the failures.
pub async fn summary(progress: impl Stream<Item = Progress>) -> (Summary, Vec<(String, String)>) {
    let mut failures = Vec::new();
    let mut last = Summary::default();
    futures::pin_mut!(progress);
    while let Some(step) = progress.next().await {
        match step {
            Progress::Failed { path, reason } => failures.push((path, reason)),
            Progress::Done(summary) => last = summary,
            _ => {}
        }
    }
    (last, failures)
}
