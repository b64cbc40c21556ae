//! Follows readers: predicts which files they open next from the files that they open, and stages them.
//!
//! Only two kinds of opens count: those with a cache miss, and those of staged files. If everything is resident, no
//! work is needed and none is done.
//!
//! A reader is a job, or else a session (one terminal, one service). If the names of a directory are not known, the
//! directory is listed in the pool with lower priority than readers. Suggestions go through the planner. Files that are
//! staged and not opened yet take at most `POOL_SHARE` of the fast pool. A staged file counts as wasted when it is
//! evicted, or after `PATIENCE`.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forebay_backends::FileKind;
use forebay_engine::{AHEAD_REQUESTS, Ino, Opened, blocking, requests_of};
use forebay_prefetch::online::{Online, OpenEvent, OpenedKind, ReaderId, Sibling, Suggestion, Who};
use forebay_prefetch::plan::{PROBABILITY_MIN, PlanLimits, StagingCandidate, plan};
use futures::FutureExt;
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, mpsc};

use super::directory_prefetch::{NextDirectory, Walks};
use crate::Jobs;
use crate::JobsInner;

/// Opens that wait to be examined. More are ignored: a busy daemon has no time for predictions.
const WAITING_MAX: usize = 4096;
/// Opens that are examined together.
const BATCH: usize = 64;
/// Bytes of one file that are staged at most; readahead serves the rest.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// The share of the fast pool that staged files may take that no reader has opened yet.
pub(super) const POOL_SHARE: f64 = 0.25;
/// A staged file that was not opened within this time counts as wasted.
const PATIENCE: Duration = Duration::from_secs(600);
/// How often `PATIENCE` is checked.
const LOOKS: Duration = Duration::from_secs(10);
/// Names of a directory that are examined at most.
const SIBLINGS_MAX: usize = 1 << 17;
/// Files that are awaited at most; each takes some 150 bytes.
const AWAITED_MAX: usize = 1 << 16;
/// The share of the time that listings may take.
const LISTING_SHARE: f64 = 0.05;
/// The time that listings may take at once.
const LISTING_AT_ONCE: Duration = Duration::from_millis(200);

#[derive(Debug, Clone, Copy)]
enum PredictorEvent {
    Opened {
        reader: Who,
        ino: Ino,
    },
    Gone(Ino),
    /// The file or directory could not be staged.
    Failed(Ino),
    Ended(Who),
}

/// A file that was staged, or was resident, and is expected to be opened.
#[derive(Debug)]
struct AwaitedFile {
    reader: Who,
    since: Instant,
    /// The bytes that were requested from the pool for it.
    bytes: u64,
    why: String,
}

impl AwaitedFile {
    fn is_kept(&self) -> bool {
        self.bytes > 0 && self.since.elapsed() < PATIENCE
    }
}

/// Awaited files, and the sum of their bytes.
#[derive(Debug, Default)]
struct AwaitedFiles {
    files: HashMap<Ino, AwaitedFile>,
    bytes: u64,
}

impl AwaitedFiles {
    fn insert(&mut self, ino: Ino, awaited: AwaitedFile) {
        self.bytes += awaited.bytes;
        if let Some(before) = self.files.insert(ino, awaited) {
            self.bytes -= before.bytes;
        }
    }

    fn remove(&mut self, ino: Ino) -> Option<AwaitedFile> {
        let removed = self.files.remove(&ino);
        self.bytes -= removed.as_ref().map_or(0, |awaited| awaited.bytes);
        removed
    }

    /// Removes the files for which `holds` returns true, and returns them.
    fn take(&mut self, holds: impl Fn(&AwaitedFile) -> bool) -> Vec<(Ino, AwaitedFile)> {
        let taken: Vec<(Ino, AwaitedFile)> = self.files.extract_if(|_, awaited| holds(awaited)).collect();
        self.bytes -= taken.iter().map(|(_, awaited)| awaited.bytes).sum::<u64>();
        taken
    }
}

/// A file that a reader will probably open.
pub(super) struct PredictedFile {
    pub ino: Ino,
    pub probability: f64,
    pub why: String,
}

/// A file that will be staged.
pub(super) struct Admitted {
    ino: Ino,
    /// Where the part that is staged ends; it begins with the file.
    end: u64,
    /// The bytes of that part that are not resident.
    bytes: u64,
    /// When the file became awaited.
    since: Instant,
}

/// What to stage and list after some opens.
#[derive(Default)]
pub(super) struct PrefetchPlan {
    files: Vec<Admitted>,
    pub directories: Vec<NextDirectory>,
    /// Directories whose names are not known.
    pub unlisted: HashSet<Ino>,
}

/// The time that listings took, less the time that they were allowed since.
#[derive(Debug)]
struct ListingTime {
    spent: Duration,
    at: Instant,
}

impl ListingTime {
    fn is_spent(&mut self) -> bool {
        let now = Instant::now();
        self.spent = self.spent.saturating_sub(now.duration_since(self.at).mul_f64(LISTING_SHARE));
        self.at = now;
        self.spent > LISTING_AT_ONCE
    }
}

/// The bytes that the fast pool can hold beside dirty, leased and staged content, as of `at`.
#[derive(Debug, Default)]
struct RoomEstimate {
    at: Option<Instant>,
    bytes: u64,
}

/// The readers that are followed, and the files that they are expected to open.
pub(crate) struct AccessPredictor {
    events: mpsc::Sender<PredictorEvent>,
    queue: Mutex<Option<mpsc::Receiver<PredictorEvent>>>,
    awaited: Mutex<AwaitedFiles>,
    /// The number of awaited files, to be read without the lock.
    awaited_count: AtomicUsize,
    /// Notified when files are awaited again.
    awaiting: Notify,
    online: Mutex<Online>,
    pub(super) walks: Mutex<Walks>,
    room: Mutex<RoomEstimate>,
    listing: Mutex<ListingTime>,
    since: Instant,
}

impl Default for AccessPredictor {
    fn default() -> Self {
        let (events, queue) = mpsc::channel(WAITING_MAX);
        Self {
            events,
            queue: Mutex::new(Some(queue)),
            awaited: Mutex::default(),
            awaited_count: AtomicUsize::new(0),
            awaiting: Notify::new(),
            online: Mutex::default(),
            walks: Mutex::default(),
            room: Mutex::default(),
            listing: Mutex::new(ListingTime { spent: Duration::ZERO, at: Instant::now() }),
            since: Instant::now(),
        }
    }
}

impl AccessPredictor {
    fn awaits(&self, ino: Ino) -> bool {
        self.awaited_count.load(Ordering::Relaxed) > 0 && self.awaited.lock().files.contains_key(&ino)
    }

    /// Returns whether a file was staged a short while ago for a reader that has not opened it yet.
    pub fn keeps(&self, ino: Ino) -> bool {
        self.awaits(ino) && self.awaited.lock().files.get(&ino).is_some_and(AwaitedFile::is_kept)
    }

    /// Returns why a file was staged that no reader has opened yet.
    pub fn why(&self, ino: Ino) -> Option<String> {
        let awaited = self.awaited.lock();
        awaited.files.get(&ino).filter(|awaited| awaited.is_kept()).map(|awaited| awaited.why.clone())
    }

    /// Handles the eviction of a file's content.
    pub fn evicted(&self, ino: Ino) {
        if self.awaits(ino) {
            self.tell(PredictorEvent::Gone(ino));
        }
    }

    pub fn job_ended(&self, number: u32) {
        self.tell(PredictorEvent::Ended(Who::Job(number)));
    }

    pub(super) fn not_brought_in(&self, ino: Ino) {
        self.tell(PredictorEvent::Failed(ino));
    }

    fn tell(&self, event: PredictorEvent) {
        // If the queue is full, the event is dropped.
        let _ = self.events.try_send(event);
    }

    fn change<T>(&self, change: impl FnOnce(&mut AwaitedFiles) -> T) -> T {
        let mut awaited = self.awaited.lock();
        let changed = change(&mut awaited);
        let before = self.awaited_count.swap(awaited.files.len(), Ordering::Relaxed);
        if before == 0 && !awaited.files.is_empty() {
            self.awaiting.notify_one();
        }
        changed
    }
}

impl Jobs {
    /// Handles an open for reading. `thread`: the thread that opens the file.
    pub fn follow(&self, job: Option<u32>, thread: u32, ino: Ino, opened: &Opened) {
        let predictor = &self.inner.foresight.access_predictor;
        if !self.inner.engine.policy().prefetch.online || !(opened.missed || predictor.awaits(ino)) {
            return;
        }
        let reader = match job {
            Some(job) => Who::Job(job),
            // A session is all that runs at one terminal, or in one service.
            None => {
                let session = rustix::process::Pid::from_raw(thread.cast_signed());
                let session = session.and_then(|thread| rustix::process::getsid(Some(thread)).ok());
                Who::Session(session.map_or(0, |session| session.as_raw_nonzero().get().cast_unsigned()))
            }
        };
        predictor.tell(PredictorEvent::Opened { reader, ino });
    }
}

impl JobsInner {
    /// Follows readers until the mount ends.
    pub(crate) async fn follow_readers(self: Arc<Self>) {
        let Some(mut queue) = self.foresight.access_predictor.queue.lock().take() else { return };
        let turns = Arc::new(Semaphore::new(AHEAD_REQUESTS));
        let mut events = Vec::new();
        let mut looked = Instant::now();
        // The sender lives as long as the engine; the caller cancels this future.
        loop {
            let predictor = &self.foresight.access_predictor;
            let awaits_any = predictor.awaited_count.load(Ordering::Relaxed) > 0;
            tokio::select! {
                _ = queue.recv_many(&mut events, BATCH) => {}
                () = predictor.awaiting.notified(), if !awaits_any => continue,
                // To give up files that no reader opened.
                () = tokio::time::sleep(LOOKS), if awaits_any => {}
            }
            let (inner, batch) = (self.clone(), std::mem::take(&mut events));
            let look = looked.elapsed() >= LOOKS;
            if look {
                looked = Instant::now();
            }
            let next = blocking(move || {
                if look {
                    inner.give_up_waiting();
                }
                Ok(inner.next_files(&batch))
            })
            .await;
            let Ok(next) = next else { continue };
            for dir in next.unlisted {
                let inner = self.clone();
                self.foresight.runtime.spawn(async move { inner.engine.list_ahead(dir).await.map_err(drop) }.boxed());
            }
            self.bring_in_files(next.files, &turns);
            for directory in next.directories {
                let (inner, turns) = (self.clone(), turns.clone());
                let task = async move {
                    let stop = inner.engine.stop().clone();
                    stop.run_until_cancelled(inner.bring_in_directory(directory, &turns)).await;
                };
                self.foresight.runtime.spawn(task.boxed());
            }
        }
    }

    /// Begins to stage the files that were admitted.
    pub(super) fn bring_in_files(self: &Arc<Self>, files: Vec<Admitted>, turns: &Arc<Semaphore>) {
        for file in files {
            let (inner, turns) = (self.clone(), turns.clone());
            let task = async move {
                let stop = inner.engine.stop().clone();
                stop.run_until_cancelled(inner.bring_in_next(file, &turns)).await;
            };
            self.foresight.runtime.spawn(task.boxed());
        }
    }

    async fn bring_in_next(self: &Arc<Self>, file: Admitted, turns: &Semaphore) {
        let Admitted { ino, end, bytes, since } = file;
        let Ok(_turn) = turns.acquire_many(requests_of(bytes)).await else { return };
        let predictor = &self.foresight.access_predictor;
        // The reader may have opened the file meanwhile, or have ended.
        let is_awaited = |awaited: &AwaitedFiles| awaited.files.get(&ino).is_some_and(|awaited| awaited.since == since);
        if !is_awaited(&predictor.awaited.lock()) {
            return;
        }
        match self.engine.fetch_ahead(ino, 0..end).await {
            Ok(()) => self.engine.count_ahead(bytes),
            Err(error) => {
                tracing::debug!(%error, %ino, "not fetched ahead");
                if predictor.change(|awaited| is_awaited(awaited).then(|| awaited.remove(ino))).is_some() {
                    predictor.not_brought_in(ino);
                }
            }
        }
    }

    /// Returns what to stage and list after some events.
    fn next_files(&self, events: &[PredictorEvent]) -> PrefetchPlan {
        let predictor = &self.foresight.access_predictor;
        let mut online = predictor.online.lock();
        let mut next = PrefetchPlan::default();
        for event in events {
            match *event {
                PredictorEvent::Gone(ino) => {
                    predictor.change(|awaited| awaited.remove(ino));
                    online.wasted(ino.0);
                }
                PredictorEvent::Failed(ino) => online.not_staged(ino.0),
                PredictorEvent::Ended(reader) => {
                    predictor.change(|awaited| awaited.take(|awaited| awaited.reader == reader));
                    online.ended(reader);
                    predictor.walks.lock().end(reader);
                }
                PredictorEvent::Opened { reader, ino } => {
                    let was_awaited = predictor.change(|awaited| awaited.remove(ino));
                    if was_awaited.is_some_and(|awaited| awaited.bytes > 0) {
                        self.engine.count_ahead_used();
                    }
                    let job = if let Who::Job(job) = reader { Some(job) } else { None };
                    if !self.registry.may_be_helped(job) {
                        online.not_staged(ino.0);
                        continue;
                    }
                    let Some(directory) = self.engine.directory_of(ino) else { continue };
                    let at = predictor.since.elapsed();
                    let id = ReaderId { who: reader, opens: OpenedKind::Files };
                    let touch = OpenEvent { reader: id, directory: directory.0, file: ino.0, at };
                    let suggestions = online.touched(&touch, &mut |dir| self.siblings(Ino(dir), &mut next.unlisted));
                    next.files.extend(self.choose(reader, suggestions, &mut online));
                    self.walk_on(&touch, &mut online, &mut next);
                }
            }
        }
        next
    }

    /// Returns those of the suggested files that are worth staging now.
    fn choose(&self, reader: Who, suggestions: Vec<Suggestion>, online: &mut Online) -> Vec<Admitted> {
        let wanted = suggestions.into_iter().map(|suggestion| PredictedFile {
            ino: Ino(suggestion.file),
            probability: suggestion.probability,
            why: suggestion.why.to_string(),
        });
        self.admit(reader, wanted.collect(), POOL_SHARE, |ino, is_taken| match is_taken {
            true => online.staged(ino.0),
            false => online.not_staged(ino.0),
        })
    }

    /// Returns those of the wanted files, in their order, that are worth staging and fit into a share of the fast pool.
    /// They are awaited from now on. Calls `tell` for each file: true if the file is awaited now, or was before.
    pub(super) fn admit(
        &self,
        reader: Who,
        wanted: Vec<PredictedFile>,
        pool_share: f64,
        mut tell: impl FnMut(Ino, bool),
    ) -> Vec<Admitted> {
        if wanted.is_empty() {
            return Vec::new();
        }
        let predictor = &self.foresight.access_predictor;
        let now = Instant::now();
        let (mut candidates, mut ends) = (Vec::new(), HashMap::new());
        let mut seen = HashSet::new();
        for (at, wanted) in wanted.iter().enumerate() {
            // A file may have two names.
            if !seen.insert(wanted.ino) {
                continue;
            }
            // The reader that awaits it already may be nearer to it.
            if predictor.awaits(wanted.ino) {
                tell(wanted.ino, true);
                continue;
            }
            match self.engine.missing_of(wanted.ino, FILE_BYTES_MAX) {
                None => tell(wanted.ino, false),
                Some((end, bytes)) => {
                    ends.insert(wanted.ino, end);
                    candidates.push(StagingCandidate {
                        file: at as u64,
                        bytes,
                        missing_bytes: bytes,
                        probability: wanted.probability.max(PROBABILITY_MIN),
                        rank: at as u32,
                    });
                }
            }
        }
        let limit = (self.engine.fast_pool().budget.limit() as f64
            * self.engine.policy().space.low_watermark
            * pool_share) as u64;
        let room = self.room_for_followed().min(limit);
        let of = |candidate: &StagingCandidate| &wanted[candidate.file as usize];
        predictor.change(|awaited| {
            if awaited.files.len() + candidates.len() > AWAITED_MAX {
                candidates.iter().for_each(|candidate| tell(of(candidate).ino, false));
                return Vec::new();
            }
            let room_bytes = room.saturating_sub(awaited.bytes);
            let plan = plan(
                candidates,
                &self.engine.pool_rate(None),
                &PlanLimits { room_bytes, time: None, probability_min: PROBABILITY_MIN },
            );
            // A resident file is awaited as well: its open shows where the reader is.
            for candidate in &plan.chosen {
                let PredictedFile { ino, why, .. } = of(candidate);
                awaited.insert(*ino, AwaitedFile { reader, since: now, bytes: candidate.bytes, why: why.clone() });
                tell(*ino, true);
            }
            plan.refused.iter().for_each(|(candidate, _)| tell(of(candidate).ino, false));
            let missing = plan.chosen.iter().filter(|candidate| candidate.bytes > 0);
            let admitted = |one: &StagingCandidate| {
                let ino = of(one).ino;
                Some(Admitted { ino, end: *ends.get(&ino)?, bytes: one.bytes, since: now })
            };
            missing.filter_map(admitted).collect()
        })
    }

    /// Returns the bytes that files staged for followed readers may take, as of a short while ago.
    pub(super) fn room_for_followed(&self) -> u64 {
        let mut room = self.foresight.access_predictor.room.lock();
        if room.at.is_none_or(|at| at.elapsed() >= LOOKS) {
            *room = RoomEstimate { at: Some(Instant::now()), bytes: self.room_ahead().unwrap_or(0) };
        }
        room.bytes
    }

    /// Returns the files of a directory if all its names are known. If not, adds the directory to `unlisted`.
    pub(super) fn siblings(&self, dir: Ino, unlisted: &mut HashSet<Ino>) -> Option<Vec<Sibling>> {
        self.names_of(dir, FileKind::File, unlisted)
    }

    /// The same for directories, which count as one byte each.
    pub(super) fn subdirectories(&self, dir: Ino, unlisted: &mut HashSet<Ino>) -> Option<Vec<Sibling>> {
        self.names_of(dir, FileKind::Directory, unlisted)
    }

    fn names_of(&self, dir: Ino, kind: FileKind, unlisted: &mut HashSet<Ino>) -> Option<Vec<Sibling>> {
        if !self.engine.is_listed(dir)? {
            unlisted.insert(dir);
            return None;
        }
        let (began, predictor) = (Instant::now(), &self.foresight.access_predictor);
        if predictor.listing.lock().is_spent() {
            return None;
        }
        let (mut entries, mut seen) = (Vec::new(), 0);
        let listed = self.engine.catalog().names(dir, |name, record| {
            seen += 1;
            if let Some((ino, found)) = record.here
                && found == kind
                && let Some(bytes) = if kind == FileKind::File { self.engine.size_of(ino) } else { Some(1) }
            {
                let name = String::from_utf8_lossy(name).into();
                entries.push(Sibling { name, file: ino.0, bytes });
            }
            Ok(seen < SIBLINGS_MAX)
        });
        predictor.listing.lock().spent += began.elapsed();
        listed.is_ok().then_some(entries)
    }

    /// Returns how many of the first `most` names of a directory are files. `None`: its names are not known.
    pub(super) fn count_files(&self, dir: Ino, most: usize) -> Option<usize> {
        self.engine.is_listed(dir)?.then_some(())?;
        let (mut files, mut seen) = (0, 0);
        let counted = self.engine.catalog().names(dir, |_, record| {
            seen += 1;
            files += usize::from(record.here.is_some_and(|(_, kind)| kind == FileKind::File));
            Ok(seen < most)
        });
        counted.ok().map(|()| files)
    }

    /// Gives up awaited files that no reader opened within `PATIENCE`.
    fn give_up_waiting(&self) {
        let predictor = &self.foresight.access_predictor;
        let late = predictor.change(|awaited| awaited.take(|awaited| awaited.since.elapsed() > PATIENCE));
        let mut online = predictor.online.lock();
        for (ino, awaited) in late {
            // A file that was resident anyway cost nothing.
            if awaited.bytes > 0 { online.wasted(ino.0) } else { online.not_staged(ino.0) }
        }
    }
}
