//! Requests that come a second time.
//!
//! When the daemon dies, the kernel repeats what it had not yet answered. It may have done it all the same: then
//! the name that is to be made exists, and the one that is to be removed does not. A repeated request that finds
//! its own work done succeeds. (Exchanging two names is the one change that can't be told from not having
//! happened; it is done again.)

use forebay_backends::{ErrorKind, FileKind, Result};
use forebay_engine::{Entry, Ino, Lookup, Opened, Overlay};
use fuser::Request;

/// `FUSE_UNIQUE_RESEND`: the kernel marks the number of a repeated request.
const RESENT: u64 = 1 << 63;

pub fn is_repeated(request: &Request) -> bool {
    request.unique().0 & RESENT != 0
}

/// The outcome of making a name: of a repeated request, what is there is its own work.
pub async fn made(
    overlay: &Overlay,
    parent: Ino,
    name: &[u8],
    repeated: bool,
    kind: FileKind,
    outcome: Result<Entry>,
) -> Result<Entry> {
    match outcome {
        Err(error) if repeated && error.is(ErrorKind::Exists) => found(overlay, parent, name, kind).await?.ok_or(error),
        outcome => outcome,
    }
}

/// The same of a file that is open then.
pub async fn created(
    overlay: &Overlay,
    parent: Ino,
    name: &[u8],
    repeated: bool,
    flags: i32,
    outcome: Result<(Entry, Opened)>,
) -> Result<(Entry, Opened)> {
    match outcome {
        Err(error) if repeated && error.is(ErrorKind::Exists) => {
            let entry = found(overlay, parent, name, FileKind::File).await?.ok_or(error)?;
            match overlay.open_file(entry.attr.ino, flags).await {
                Ok(opened) => Ok((entry, opened)),
                Err(error) => {
                    overlay.forget(entry.attr.ino, 1);
                    Err(error)
                }
            }
        }
        outcome => outcome,
    }
}

/// The entry under a name, if it is of that kind. Counts a lookup where it returns one.
pub async fn found(overlay: &Overlay, parent: Ino, name: &[u8], kind: FileKind) -> Result<Option<Entry>> {
    match overlay.lookup(parent, name).await? {
        Lookup::Found(entry) if entry.attr.kind == kind => Ok(Some(entry)),
        Lookup::Found(entry) => {
            overlay.forget(entry.attr.ino, 1);
            Ok(None)
        }
        Lookup::Negative { .. } => Ok(None),
    }
}

/// The outcome of removing a name: a repeated request that finds nothing removed it.
pub fn removed(repeated: bool, outcome: Result<()>) -> Result<()> {
    match outcome {
        Err(error) if repeated && error.is(ErrorKind::NotFound) => Ok(()),
        outcome => outcome,
    }
}

/// The outcome of moving a name: a repeated request that finds only the target moved it.
pub async fn moved(
    overlay: &Overlay,
    new_parent: Ino,
    new_name: &[u8],
    repeated: bool,
    outcome: Result<()>,
) -> Result<()> {
    match outcome {
        Err(error) if repeated && error.is(ErrorKind::NotFound) => match overlay.lookup(new_parent, new_name).await? {
            Lookup::Found(entry) => {
                overlay.forget(entry.attr.ino, 1);
                Ok(())
            }
            Lookup::Negative { .. } => Err(error),
        },
        outcome => outcome,
    }
}
