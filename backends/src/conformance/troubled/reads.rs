//! Reads of versions of a file that is replaced continually.

use std::sync::Arc;

use bytes::Bytes;
use futures::future::join_all;
use parking_lot::Mutex;
use rand::Rng;

use crate::conformance::context::{Outcome, pattern};
use crate::conformance::ensure;
use crate::{ErrorKind, Expected, Version};

use super::{TroubledCase, excused, put};

const READERS: u64 = 4;
const BYTES_MAX: usize = 1 << 20;
/// The number of recent versions that readers remember.
const REMEMBERED: usize = 4;
/// The writer leaves each version in place for so many reads.
const READS_EACH: u32 = 5;

type Known = Arc<Mutex<Vec<(Version, Bytes)>>>;

pub(super) async fn work(stage: TroubledCase) -> Outcome {
    let known = Known::default();
    write(&stage, &known, 0).await?;
    stage.trouble(300);
    let mut rounds = 0;
    while stage.goes_on(rounds * READS_EACH) {
        rounds += 1;
        let round = u64::from(rounds);
        let readers = (0..READERS).map(|n| {
            let (stage, known) = (stage.clone(), Arc::clone(&known));
            tokio::spawn(async move { read(stage, known, round * READERS + n).await })
        });
        let readers = join_all(readers);
        let (read, wrote) = futures::join!(readers, write(&stage, &known, round));
        wrote?;
        for answer in read {
            answer??;
        }
    }
    Ok(())
}

async fn write(stage: &TroubledCase, known: &Known, round: u64) -> Outcome {
    let length = 1 + stage.random(round + 1_000).random_range(0..BYTES_MAX);
    let (path, data) = (stage.path("read"), pattern(round + 1, length));
    let write = || put(&stage.setting.sound, &path, data.clone(), stage.attrs(), &Expected::Anything);
    let stat = stage.soundly(write).await?;
    let mut known = known.lock();
    known.push((stat.version, data));
    let too_many = known.len().saturating_sub(REMEMBERED);
    known.drain(..too_many);
    Ok(())
}

async fn read(stage: TroubledCase, known: Known, part: u64) -> Outcome {
    let (path, mut random) = (stage.path("read"), stage.random(part + 10_000));
    for _ in 0..READS_EACH {
        let (version, data) = {
            let known = known.lock();
            // In most cases the newest one.
            let back = random.random_range(0..REMEMBERED * 2).min(known.len() - 1);
            let at = if back >= REMEMBERED { known.len() - 1 } else { known.len() - 1 - back };
            known[at].clone()
        };
        let start = random.random_range(0..data.len());
        let end = random.random_range(start + 1..=data.len());
        let range = start as u64..end as u64;
        let answer = stage.call("read", stage.setting.troubled.read(&path, &version, range.clone())).await?;
        match answer {
            Ok(read) => ensure!(read == data[start..end], "{range:?} of {version:?}: other bytes, {}", read.len()),
            Err(error) if error.is(ErrorKind::Stale) => {}
            Err(error) => excused("read", &error)?,
        }
    }
    Ok(())
}
