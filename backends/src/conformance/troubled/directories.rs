//! Directories that a single worker uses.

use crate::conformance::context::Outcome;
use crate::conformance::ensure;
use crate::{Error, ErrorKind, FileKind};

use super::{TroubledCase, excused};

/// A round counts as so many rounds.
const CALLS_EACH: u32 = 2;

pub(super) async fn work(stage: TroubledCase) -> Outcome {
    stage.trouble(500);
    let mut round = 0;
    while stage.goes_on(round * CALLS_EACH) {
        round += 1;
        let path = stage.path(&format!("directory-{round}"));
        let pool = &stage.setting.troubled;
        let made = stage.call("mkdir", pool.mkdir(&path, &stage.attrs())).await?;
        let there = is_there(&stage, &path).await?;
        match made {
            Ok(stat) => ensure!(there && stat.kind == FileKind::Directory, "{path} was made, and is not there"),
            Err(error) => alone("mkdir", &error)?,
        }
        if !there {
            continue;
        }
        let removed = stage.call("remove_dir", pool.remove_dir(&path)).await?;
        let there = is_there(&stage, &path).await?;
        match removed {
            Ok(()) => ensure!(!there, "{path} was removed, and is there"),
            Err(error) => alone("remove_dir", &error)?,
        }
    }
    Ok(())
}

/// No other worker makes or removes entries of this directory, so an error must not say so.
fn alone(what: &str, error: &Error) -> Outcome {
    let others = [ErrorKind::Exists, ErrorKind::NotFound, ErrorKind::NotEmpty];
    ensure!(!others.contains(&error.kind()), "{what}: no other worker did anything: {error}");
    excused(what, error)
}

async fn is_there(stage: &TroubledCase, path: &crate::PoolPath) -> Outcome<bool> {
    match stage.soundly(|| stage.setting.sound.stat(path)).await {
        Ok(_) => Ok(true),
        Err(error) if error.is(ErrorKind::NotFound) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
