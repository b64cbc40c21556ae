//! The suite under faults: works on a pool over a connection that fails, and checks the result over a sound one.
//!
//! No acknowledged change may be lost, and no content may appear that was not written. Bytes read are those of one
//! version. An error either says that a retry may help or reports the change of another client, and never the latter
//! if there was none. No call runs for ever. After the faults the pool works, and no unfinished file keeps a
//! directory from being removed.

mod directories;
mod files;
mod ledger;
mod listings;
mod races;
mod reads;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{StreamExt, TryStreamExt, stream};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::{Attrs, DirEntry, Error, ErrorKind, Expected, Piece, Pool, PoolPath, Result, Retry, Side, Stat, Time};

use super::context::{CaseFailure, Outcome, pattern, remove_tree};
use super::{CaseResult, Report, ensure};

/// The time limit of a call, including all its retries.
const CALL_LIMIT: Duration = Duration::from_secs(120);
/// How long calls over the sound connection are retried: the server itself may be unavailable at times.
const SOUND_LIMIT: Duration = Duration::from_secs(60);
const SOUND_PAUSE: Duration = Duration::from_millis(20);
/// If few faults happen, a case ends after at most so many times its rounds.
const ROUNDS_FACTOR_MAX: u32 = 100;
/// The largest content, in bytes: more than S3 takes in one request, so that it is sent in parts.
const CONTENT_BYTES_MAX: usize = 9 << 20;
/// One content of so many is that large; the rest has at most [`SMALL_BYTES_MAX`].
const LARGE_EVERY: u64 = 23;
const SMALL_BYTES_MAX: u64 = 200_000;

/// Injects faults into the connection to a pool.
pub trait Trouble: Send + Sync {
    /// Begins with the faults; `seed` determines them.
    fn begin(&self, seed: u64);

    /// Ends all faults.
    fn end(&self);

    /// The number of faults so far.
    fn happened(&self) -> u64;
}

/// A pool and its faults.
#[derive(Clone)]
pub struct TroubledPool {
    /// The pool over the connection that fails.
    pub troubled: Arc<dyn Pool>,
    /// The same pool over a sound connection.
    pub sound: Arc<dyn Pool>,
    pub trouble: Arc<dyn Trouble>,
    pub seed: u64,
    /// The minimum number of rounds of each case.
    pub rounds: u32,
    /// The number of faults that must happen before a case ends.
    pub faults: u64,
}

/// One case and its directory.
#[derive(Clone)]
struct TroubledCase {
    setting: TroubledPool,
    dir: PoolPath,
    owner: (u32, u32),
    /// The number of faults before the case.
    before: u64,
}

type Work = fn(TroubledCase) -> BoxFuture<'static, Outcome>;

const CASES: [(&str, Work); 5] = [
    ("what_was_answered_is_there_and_nothing_else", |stage| Box::pin(files::work(stage))),
    ("of_racing_writers_none_wins_that_was_refused", |stage| Box::pin(races::work(stage))),
    ("reads_give_one_version_or_an_error", |stage| Box::pin(reads::work(stage))),
    ("listings_are_whole_or_an_error", |stage| Box::pin(listings::work(stage))),
    ("directories_are_made_and_removed_once", |stage| Box::pin(directories::work(stage))),
];

/// Runs every case in its own directory beneath `scratch`, which exists, and prints its name and result, with the
/// seed, to standard output.
pub async fn run(setting: TroubledPool, scratch: PoolPath) -> Report {
    let pool = setting.troubled.url();
    let mut results = Vec::new();
    for (name, work) in CASES {
        let before = setting.trouble.happened();
        let failure = run_case(&setting, &scratch, name, work).await.err().map(String::from);
        let happened = setting.trouble.happened() - before;
        let seed = setting.seed;
        println!("{pool}, seed {seed}, {happened} faults: {name} ... {}", failure.as_deref().unwrap_or("ok"));
        results.push(CaseResult { name, failure });
    }
    Report { pool: format!("{pool} in trouble, seed {}", setting.seed), results }
}

async fn run_case(setting: &TroubledPool, scratch: &PoolPath, name: &str, work: Work) -> Outcome {
    let owner = setting.sound.stat(scratch).await?;
    let stage = TroubledCase {
        setting: setting.clone(),
        dir: scratch.join(name.as_bytes()),
        owner: (owner.uid, owner.gid),
        before: setting.trouble.happened(),
    };
    setting.sound.mkdir(&stage.dir, &stage.attrs()).await?;
    let outcome = work(stage.clone()).await;
    setting.trouble.end();
    outcome?;
    stage.works_again().await?;
    remove_tree(&setting.sound, &stage.dir).await?;
    Ok(())
}

impl TroubledCase {
    fn path(&self, name: &str) -> PoolPath {
        self.dir.join(name.as_bytes())
    }

    fn attrs(&self) -> Attrs {
        let time = Time { secs: 1_500_000_000, nanos: 987_654_321 };
        Attrs { mode: 0o755, uid: self.owner.0, gid: self.owner.1, atime: time, mtime: time, xattrs: Vec::new() }
    }

    fn random(&self, part: u64) -> ChaCha8Rng {
        ChaCha8Rng::seed_from_u64(self.setting.seed.wrapping_mul(1_000_003).wrapping_add(part))
    }

    /// Begins with the faults.
    fn trouble(&self, part: u64) {
        self.setting.trouble.begin(self.random(part).random());
    }

    /// Whether to continue after so many rounds.
    fn goes_on(&self, rounds: u32) -> bool {
        let most = self.setting.rounds.saturating_mul(ROUNDS_FACTOR_MAX);
        let few = self.setting.trouble.happened() - self.before < self.setting.faults;
        rounds < self.setting.rounds || few && rounds < most
    }

    /// Makes a call over the connection that fails; fails if the call does not end.
    async fn call<T>(&self, what: &str, call: impl Future<Output = Result<T>>) -> Outcome<Result<T>> {
        let ended = tokio::time::timeout(CALL_LIMIT, call).await;
        ended.map_err(|_| CaseFailure::new(format!("{what} had not ended after {CALL_LIMIT:?}")))
    }

    async fn put(&self, path: &PoolPath, content: u64, expected: &Expected) -> Outcome<Result<Stat>> {
        let data = content_of(content);
        let put = put(&self.setting.troubled, path, data, self.attrs(), expected);
        self.call(&format!("put {path}"), put).await
    }

    /// Makes a call over the sound connection; retries it while the server is unavailable.
    async fn soundly<T, F>(&self, call: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let since = Instant::now();
        loop {
            match call().await {
                Err(error) if error.retry() == Retry::Later && since.elapsed() < SOUND_LIMIT => {
                    tokio::time::sleep(SOUND_PAUSE).await;
                }
                answer => return answer,
            }
        }
    }

    /// The actual content of the pool at `path`: bytes and attributes of one moment, or nothing.
    async fn truth(&self, path: &PoolPath) -> Outcome<Option<(Stat, Bytes)>> {
        Ok(self.soundly(|| content_at(&*self.setting.sound, path)).await?)
    }

    /// Checks that the pool works after the faults.
    async fn works_again(&self) -> Outcome {
        let (path, pool) = (self.path("afterwards"), &self.setting.troubled);
        let content = 7;
        // One call may still meet a consequence of the faults, such as a broken connection.
        let put = match self.put(&path, content, &Expected::Anything).await? {
            Err(error) if error.retry() == Retry::Later => self.put(&path, content, &Expected::Anything).await?,
            answer => answer,
        };
        put?;
        let found = self.call("read", content_at(&**pool, &path)).await??;
        ensure!(found.is_some_and(|(_, data)| data == content_of(content)), "afterwards: other bytes than were put");
        self.call("remove", pool.remove(&path, &Expected::Anything)).await??;
        Ok(())
    }
}

/// The content with that number; all contents differ.
fn content_of(number: u64) -> Bytes {
    let mut random = ChaCha8Rng::seed_from_u64(number);
    let length = match number % LARGE_EVERY {
        0 => CONTENT_BYTES_MAX,
        _ => 8 + random.random_range(0..SMALL_BYTES_MAX) as usize,
    };
    pattern(number, length)
}

async fn put(pool: &Arc<dyn Pool>, path: &PoolPath, data: Bytes, attrs: Attrs, expected: &Expected) -> Result<Stat> {
    let size = data.len() as u64;
    pool.put(path, size, stream::iter([Ok(Piece { offset: 0, data })]).boxed(), &attrs, expected).await
}

/// The whole content and its attributes; `None` if there is no file.
async fn content_at(pool: &dyn Pool, path: &PoolPath) -> Result<Option<(Stat, Bytes)>> {
    loop {
        let stat = match pool.stat(path).await {
            Err(error) if error.is(ErrorKind::NotFound) => return Ok(None),
            stat => stat?,
        };
        match pool.read(path, &stat.version, 0..stat.size).await {
            Err(error) if error.is(ErrorKind::Stale) => {}
            data => return Ok(Some((stat, data?))),
        }
    }
}

async fn list(pool: &dyn Pool, path: &PoolPath) -> Result<Vec<DirEntry>> {
    let pages: Vec<Vec<DirEntry>> = pool.list(path).await?.try_collect().await?;
    Ok(pages.concat())
}

/// Fails if faults of the connection do not explain an error.
fn excused(what: &str, error: &Error) -> Outcome {
    let clear = error.retry() == Retry::Later && error.side() == Side::Pool;
    ensure!(clear, "{what}: {:?} is no error of a way that fails: {error}", error.kind());
    Ok(())
}
