//! What operators do: stage, flush, evict. Each is a stream of progress that ends with a summary.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay_backends::decorators::Rate;
use forebay_backends::{Error, ErrorKind, FileKind, PoolPath, Result, Side};
use forebay_prefetch::signature::Invocation;
use futures::channel::mpsc;
use futures::{Stream, StreamExt, stream};
use globset::GlobBuilder;
use parking_lot::Mutex;
use tokio::task::coop::consume_budget;
use tokio_util::sync::CancellationToken;

use super::eviction::Kept;
use super::flush::Plan;
use super::names::{Arrivals, Ask};
use super::operator::{EvictRequest, FlushRequest, Progress, StageRequest, Summary};
use super::pool_view::Age;
use super::{Inner, Ino, Overlay};
use crate::catalog::LeaseRecord;
use crate::clock::unix_now;
use crate::node::Node;

/// Files that are staged at the same time.
const CONCURRENCY: usize = 16;
const LONG_WORK_TOLD_EVERY: Duration = Duration::from_secs(1);
/// How often it is told how far something is: often enough for a bar, and a million small files pile nothing up.
const ADVANCE_TOLD_EVERY: Duration = Duration::from_millis(50);
/// How often a file that changes in the pool while it is staged is begun anew.
const ATTEMPTS: u32 = 3;

/// Where an operation reports to. A listener that went away does not end a flush or an eviction.
#[derive(Clone)]
struct Reporter {
    sender: mpsc::UnboundedSender<Progress>,
    files: Arc<AtomicU64>,
    bytes: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
    skipped: Arc<AtomicU64>,
    begun: Instant,
    advance_told: Arc<Mutex<Instant>>,
}

impl Reporter {
    fn new() -> (Self, mpsc::UnboundedReceiver<Progress>) {
        let (sender, receiver) = mpsc::unbounded();
        let zero = || Arc::new(AtomicU64::new(0));
        let begun = Instant::now();
        let advance_told = Arc::new(Mutex::new(begun));
        let reporter =
            Self { sender, files: zero(), bytes: zero(), failed: zero(), skipped: zero(), begun, advance_told };
        (reporter, receiver)
    }

    fn send(&self, progress: Progress) {
        let _ = self.sender.unbounded_send(progress);
    }

    fn advanced(&self, bytes: u64) {
        let files = self.files.fetch_add(1, Ordering::Relaxed) + 1;
        let bytes = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let mut told = self.advance_told.lock();
        if told.elapsed() >= ADVANCE_TOLD_EVERY {
            *told = Instant::now();
            self.send(Progress::Advanced { files, bytes });
        }
    }

    fn failed(&self, path: String, error: &Error) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        self.send(Progress::Failed { path, reason: error.to_string() });
    }

    /// Ends what was not to be done, with what it would have done.
    fn planned(&self, files: u64, bytes: u64, message: Option<String>) {
        self.files.store(files, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
        self.done(message);
    }

    fn done(&self, message: Option<String>) {
        self.ended(message, None);
    }

    fn ended(&self, message: Option<String>, refused: Option<i32>) {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        self.send(Progress::Done(Summary {
            files: get(&self.files),
            bytes: get(&self.bytes),
            failed: get(&self.failed),
            skipped: get(&self.skipped),
            elapsed_ms: self.begun.elapsed().as_millis() as u64,
            message,
            refused,
        }));
    }
}

/// What holds for all files that are staged at once.
struct Terms<'a> {
    /// What the pool has since then is brought in.
    begun: Instant,
    owner: &'a str,
    expires_unix: Option<u64>,
    rate: Option<&'a Rate>,
}

/// The lease of a file that is being staged: where the work ends before the whole file is here, what was there before
/// is there again, unless somebody else has leased it meanwhile.
struct Unfinished<'a> {
    inner: &'a Inner,
    node: &'a Node,
    ours: LeaseRecord,
    before: Option<LeaseRecord>,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.inner.take_back_lease(self.node, &self.ours, self.before.take()) {
            tracing::warn!(%error, "the lease of what was not staged to its end stays");
        }
    }
}

impl Overlay {
    /// Brings files in and leases them. `Done` with `failed == 0` means that every byte asked for is resident
    /// and leased. Ends when nobody listens any more: what is here whole by then stays, leased.
    pub fn stage(&self, request: StageRequest) -> impl Stream<Item = Progress> + Send + 'static {
        let (reporter, receiver) = Reporter::new();
        let stop = CancellationToken::new();
        let listened_to = stop.clone().drop_guard();
        let overlay = self.clone();
        tokio::spawn(async move {
            match stop.run_until_cancelled(overlay.stage_all(&request, &reporter)).await {
                Some(result) => finish(&reporter, result),
                None => tracing::info!("staging ended early: nobody waits for it any more"),
            }
        });
        receiver.map(move |progress| {
            // Goes with the stream.
            let _ = &listened_to;
            progress
        })
    }

    /// Writes what differs back to the pool.
    pub fn flush(&self, request: FlushRequest) -> impl Stream<Item = Progress> + Send + 'static {
        let (reporter, receiver) = Reporter::new();
        let overlay = self.clone();
        tokio::spawn(async move {
            if !request.wait && !request.dry_run {
                let only_planned = FlushRequest { dry_run: true, ..request.clone() };
                let planned = overlay.flush_paths(&only_planned, &reporter).await;
                let (background, _) = Reporter::new();
                tokio::spawn(async move { overlay.flush_paths(&request, &background).await });
                return finish(&reporter, planned);
            }
            let result = overlay.flush_paths(&request, &reporter).await;
            finish(&reporter, result);
        });
        receiver
    }

    /// Gives up clean content, whatever the eviction policy thinks of it.
    pub fn evict(&self, request: EvictRequest) -> impl Stream<Item = Progress> + Send + 'static {
        let (reporter, receiver) = Reporter::new();
        let overlay = self.clone();
        tokio::spawn(async move {
            let result = overlay.evict_paths(&request, &reporter).await;
            finish(&reporter, result);
        });
        receiver
    }

    async fn stage_all(&self, request: &StageRequest, reporter: &Reporter) -> Result<()> {
        let inner = &self.inner;
        let begun = Instant::now();
        let arrivals = Arrivals::default();
        // What comes along with a listing comes as fast as it may.
        let ask = match request.dry_run || request.bytes_per_second.is_some() {
            true => Ask::Names,
            false => Ask::Contents(&arrivals),
        };
        let mut files = self.files_of(&request.paths, ask, reporter).await?;
        let arrived = &arrivals.0.into_inner();
        let mut message = None;
        if let Some(invocation) = &request.invocation {
            message = self.add_foreseen(&mut files, invocation, request.dry_run, reporter).await?;
        }
        let (mut missing, mut total) = (0, 0);
        for ino in &files {
            consume_budget().await;
            let node = inner.node(*ino)?;
            let size = inner.attr_of(&node)?.size;
            total += size;
            missing += size.saturating_sub(inner.resident_bytes(&node, size)?);
        }
        let came = files.iter().filter_map(|ino| arrived.get(ino)).sum::<u64>();
        reporter.send(Progress::Planned { files: files.len() as u64, bytes: missing + came });
        inner.check_fits(missing, total)?;
        if request.dry_run {
            reporter.planned(files.len() as u64, missing, message);
            return Ok(());
        }
        let expires_unix = request.lease_secs.map(|s| unix_now().saturating_add(s));
        let rate = request.bytes_per_second.map(Rate::bandwidth);
        let terms = &Terms { begun, owner: &request.lease_owner, expires_unix, rate: rate.as_ref() };
        stream::iter(files)
            .for_each_concurrent(CONCURRENCY, |ino| async move {
                match self.stage_file(ino, terms).await {
                    Ok(bytes) => reporter.advanced(bytes + arrived.get(&ino).copied().unwrap_or(0)),
                    Err(e) => reporter.failed(inner.display(ino), &e),
                }
            })
            .await;
        // The leases are on the disk before anybody relies on them.
        let again = inner.clone();
        super::blocking(move || again.catalog.sync()).await?;
        reporter.done(message);
        Ok(())
    }

    /// Adds the files that a command will probably read, in the order in which it does, to those that were declared.
    /// Returns what there is to say of it.
    async fn add_foreseen(
        &self,
        files: &mut Vec<Ino>,
        invocation: &Invocation,
        dry_run: bool,
        reporter: &Reporter,
    ) -> Result<Option<String>> {
        let inner = &self.inner;
        let mut declared_bytes = 0;
        for ino in files.iter() {
            declared_bytes += inner.attr_of(&inner.node(*ino)?)?.size;
        }
        let foreseen = self.foreseen(invocation.clone(), declared_bytes).await?;
        if foreseen.expected.is_empty() {
            return Ok(Some(format!("no run like `{}` is known", invocation.signature().as_str())));
        }
        let declared: std::collections::HashSet<Ino> = files.iter().copied().collect();
        let left_out = foreseen.without_room();
        let found = stream::iter(foreseen.into_chosen()).map(|expected| async move {
            let ino = self.resolve(&parse_path(&expected.path).ok()?).await.ok()?;
            // What is gone, or is no file by now, is not asked for.
            inner.file_node(ino).is_ok().then_some((ino, expected))
        });
        let mut found = std::pin::pin!(found.buffered(CONCURRENCY));
        while let Some(found) = found.next().await {
            let Some((ino, expected)) = found.filter(|(ino, _)| !declared.contains(ino)) else { continue };
            if dry_run {
                reporter.send(Progress::Wanted((&expected).into()));
            }
            files.push(ino);
        }
        Ok((left_out > 0).then(|| format!("{left_out} files that may be read are left out: there is no room for them")))
    }

    /// Brings in what the pool has since `begun`. Returns the bytes that were not here.
    async fn stage_file(&self, ino: Ino, terms: &Terms<'_>) -> Result<u64> {
        // Of files that the pool need not be asked for there are many at once.
        consume_budget().await;
        let inner = &self.inner;
        let node = inner.node(ino)?;
        let known = inner.attr_of(&node)?.size;
        let here = inner.resident_bytes(&node, known)?;
        let mut unfinished = None;
        for _ in 0..ATTEMPTS {
            inner.revalidate(ino, Age::Since(terms.begun)).await?;
            let size = inner.attr_of(&node)?.size;
            // The lease comes first: what was fetched for it cannot go while the rest comes in.
            let ours = LeaseRecord { owner: terms.owner.into(), expires_unix: terms.expires_unix, bytes: size };
            let before = inner.lease(&node, ours.clone())?;
            match &mut unfinished {
                None => unfinished = Some(Unfinished { inner, node: &node, ours, before }),
                Some(unfinished) => unfinished.ours = ours,
            }
            let fetched = match size {
                0 => inner.complete_empty(&node),
                _ => inner.fetch_paced(&node, 0..size, terms.rate).await,
            };
            match fetched {
                Err(e) if e.is(ErrorKind::Stale) => inner.revalidate(ino, Age::Now).await?,
                Err(e) => return Err(e),
                // What is whole keeps its lease.
                Ok(()) if node.state.lock().record.file.is_whole() => return Ok(size.saturating_sub(here)),
                Ok(()) => {}
            }
        }
        Err(Error::new(ErrorKind::Stale, Side::Pool, format!("{}: changes while it is staged", inner.display(ino))))
    }

    /// What a request names; `None` is everything.
    async fn roots_of(&self, request: &FlushRequest) -> Result<Vec<Option<Ino>>> {
        if request.paths.is_empty() {
            return Ok(vec![None]);
        }
        let mut roots = Vec::new();
        for path in &request.paths {
            roots.push(Some(self.resolve(&parse_path(path)?).await?));
        }
        Ok(roots)
    }

    async fn plan_below(&self, roots: &[Option<Ino>]) -> Result<Plan> {
        let mut intents = Vec::new();
        for root in roots {
            intents.extend(self.inner.pending(*root).await?);
        }
        Ok(self.inner.plan_flush(intents))
    }

    async fn flush_paths(&self, request: &FlushRequest, reporter: &Reporter) -> Result<()> {
        let inner = &self.inner;
        let roots = self.roots_of(request).await?;
        for round in 0..3 {
            let plan = self.plan_below(&roots).await?;
            if round == 0 {
                reporter.send(Progress::Planned { files: plan.changes, bytes: plan.bytes });
            }
            if request.dry_run {
                reporter.planned(plan.changes, plan.bytes, None);
                return Ok(());
            }
            if plan.is_empty() {
                break;
            }
            let flushing = inner.flush_all(plan, |bytes| reporter.advanced(bytes));
            let failed = self.tell_of_long_work(reporter, flushing).await;
            // Names that somebody else's flush, or the program that removed them, took care of meanwhile.
            let gone = |e: &Error| matches!(e.kind(), ErrorKind::Stale | ErrorKind::NotFound);
            if round < 2 && failed.iter().all(|(_, e)| gone(e)) {
                continue;
            }
            for (path, error) in failed {
                reporter.failed(path, &error);
            }
            break;
        }
        inner.sync_flushed().await?;
        reporter.done(None);
        Ok(())
    }

    /// Reports what takes long in the pool until `work` ends.
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
        let files = self.files_of(&request.paths, Ask::Nothing, reporter).await?;
        let mut reasons = BTreeMap::new();
        for ino in files {
            consume_budget().await;
            let node = inner.node(ino)?;
            if request.release_leases && !request.dry_run {
                inner.release_lease(ino)?;
            }
            let given_up = if request.dry_run {
                let kept = inner.kept(&node.state.lock(), unix_now());
                match kept.filter(|kept| *kept != Kept::Leased || !request.release_leases) {
                    Some(kept) => Err(kept),
                    None => Ok(inner.listed(ino)?.resident_bytes),
                }
            } else {
                inner.evict_inode(ino)?
            };
            if !request.dry_run && given_up.is_ok() {
                inner.evictor.lock().remove(ino.0);
            }
            match given_up {
                Ok(bytes) => reporter.advanced(bytes),
                Err(Kept::Absent) => {}
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

    /// The regular files that paths and globs name, each once. What cannot be found is reported as failed.
    async fn files_of(&self, paths: &[String], ask: Ask<'_>, reporter: &Reporter) -> Result<Vec<Ino>> {
        let mut seen = std::collections::HashSet::new();
        let mut files = Vec::new();
        for typed in paths {
            match self.expand(typed, ask).await {
                Ok(found) => files.extend(found.into_iter().filter(|ino| seen.insert(*ino))),
                Err(e) => reporter.failed(typed.clone(), &e),
            }
        }
        Ok(files)
    }

    async fn expand(&self, typed: &str, ask: Ask<'_>) -> Result<Vec<Ino>> {
        let inner = &self.inner;
        let is_glob = |name: &str| name.contains(['*', '?', '[', '{']);
        let (root, glob) = match typed.split('/').position(is_glob) {
            // A name that exists as it is typed is meant as it is typed.
            Some(_) if self.resolve(&parse_path(typed)?).await.is_ok() => (parse_path(typed)?, None),
            Some(at) => {
                let prefix: Vec<&str> = typed.split('/').take(at).collect();
                let glob = GlobBuilder::new(typed.trim_matches('/')).literal_separator(true).build();
                let glob =
                    glob.map_err(|e| Error::new(ErrorKind::InvalidInput, Side::Application, format!("{typed}: {e}")))?;
                (parse_path(&prefix.join("/"))?, Some(glob.compile_matcher()))
            }
            None => (parse_path(typed)?, None),
        };
        let root = self.resolve(&root).await?;
        let ask = match ask {
            // What a glob leaves out is not wanted.
            Ask::Contents(_) if glob.is_some() => Ask::Names,
            ask => ask,
        };
        let tree = inner.tree(root, ask).await?;
        let mut files = Vec::new();
        let mut matched_dirs = Vec::new();
        for (ino, kind) in tree {
            if let Some(glob) = &glob {
                let Some(path) = inner.overlay_path(ino) else { continue };
                let hit = glob.is_match(path.as_path()) || matched_dirs.iter().any(|d| path.starts_with(d));
                if !hit {
                    continue;
                }
                if kind == FileKind::Directory {
                    matched_dirs.push(path);
                }
            }
            if kind == FileKind::File {
                files.push(ino);
            }
        }
        if files.is_empty() && glob.is_some() && matched_dirs.is_empty() {
            return Err(Error::new(ErrorKind::NotFound, Side::Application, format!("{typed}: nothing matches")));
        }
        Ok(files)
    }
}

impl Inner {
    /// Refuses what can never fit, before anything is fetched.
    fn check_fits(&self, missing: u64, total: u64) -> Result<()> {
        let limit = self.store.budget.limit();
        let dirty = self.dirty_bytes()?;
        let now = unix_now();
        let mut leased = 0;
        self.catalog.leases(|_, lease| {
            if lease.expires_unix.is_none_or(|at| at > now) {
                leased += lease.bytes;
            }
            Ok(true)
        })?;
        let protected = dirty.saturating_add(leased.saturating_sub(total.saturating_sub(missing)));
        if missing.saturating_add(protected) > limit {
            return Err(Error::new(
                ErrorKind::NoSpace,
                Side::Cache,
                format!(
                    "{missing} bytes are to be staged, but of {limit} bytes {dirty} are not flushed yet and {leased} are \
                     leased: flush, end leases (`forebay evict --release-leases`), or give a larger --limit"
                ),
            ));
        }
        Ok(())
    }

    /// Leases a file. The lease that it had before, if that still held.
    fn lease(&self, node: &Node, lease: LeaseRecord) -> Result<Option<LeaseRecord>> {
        let mut state = node.state.lock();
        let held = state.lease_holds(unix_now());
        let mut batch = self.catalog.batch();
        batch.put_lease(node.ino, &lease);
        self.catalog.write(batch)?;
        let before = state.lease.replace(lease);
        Ok(before.filter(|_| held))
    }

    /// Ends the lease `ours` where it is the one that holds, and the file is not whole: `before` holds again.
    fn take_back_lease(&self, node: &Node, ours: &LeaseRecord, before: Option<LeaseRecord>) -> Result<()> {
        let mut state = node.state.lock();
        if state.record.file.is_whole() || state.lease.as_ref() != Some(ours) {
            return Ok(());
        }
        let mut batch = self.catalog.batch();
        match &before {
            Some(before) => batch.put_lease(node.ino, before),
            None => batch.delete_lease(node.ino),
        }
        self.catalog.write(batch)?;
        state.lease = before;
        Ok(())
    }

    fn release_lease(&self, ino: Ino) -> Result<()> {
        let node = self.node(ino)?;
        let mut state = node.state.lock();
        if state.lease.take().is_some() {
            let mut batch = self.catalog.batch();
            batch.delete_lease(ino);
            self.catalog.write(batch)?;
        }
        Ok(())
    }
}

fn finish(reporter: &Reporter, result: Result<()>) {
    if let Err(error) = result {
        reporter.failed.fetch_add(1, Ordering::Relaxed);
        reporter.ended(Some(error.to_string()), Some(error.errno()));
    }
}

/// A path as operators type it: a leading or trailing `/` does not matter, `\xNN` is a byte.
pub(crate) fn parse_path(typed: &str) -> Result<PoolPath> {
    let bad = || Error::new(ErrorKind::InvalidInput, Side::Application, format!("{typed}: not a path in the mount"));
    let mut bytes = Vec::with_capacity(typed.len());
    let mut rest = typed.trim_matches('/').as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let hex = tail.get(1..3).and_then(|h| std::str::from_utf8(h).ok()).and_then(|h| u8::from_str_radix(h, 16).ok());
        match (first, tail.first(), hex) {
            (b'\\', Some(b'x'), Some(byte)) => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            (b'\\', Some(b'\\'), _) => {
                bytes.push(b'\\');
                rest = &tail[1..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    PoolPath::parse(bytes).ok_or_else(bad)
}

/// Collects a stream of progress into its summary and what failed.
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
