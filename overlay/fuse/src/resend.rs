//! Requests that the kernel sends a second time.
//!
//! When the daemon dies, the kernel resends the requests that were not answered. The dead daemon may have carried out
//! such a request: then the name to create exists, or the name to remove does not. A repeated request that finds its
//! own work done succeeds. (An exchange of two names leaves no trace by which it could be recognised; it is done
//! again.)

use forebay_backends::{ErrorKind, FileKind, Result};
use forebay_engine::{Entry, Ino, Lookup, Opened, Overlay};
use fuser::Request;

/// `FUSE_UNIQUE_RESEND`: the bit that the kernel sets in the number of a repeated request.
const RESENT: u64 = 1 << 63;

pub fn is_repeated(request: &Request) -> bool {
    request.unique().0 & RESENT != 0
}

/// Returns the outcome of creating a name. If a repeated request finds the name, the first attempt created it.
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

/// The same for a file that is created and opened.
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

/// Returns the entry of a name, if it is of that kind. Counts a lookup if it returns one.
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

/// Returns the outcome of removing a name. If a repeated request does not find the name, the first attempt removed it.
pub fn removed(repeated: bool, outcome: Result<()>) -> Result<()> {
    match outcome {
        Err(error) if repeated && error.is(ErrorKind::NotFound) => Ok(()),
        outcome => outcome,
    }
}

/// Returns the outcome of setting an extended attribute. If a repeated request with `XATTR_CREATE` finds the attribute
/// with its value, the first attempt created it.
pub async fn attribute_set(
    overlay: &Overlay,
    ino: Ino,
    name: &[u8],
    value: &[u8],
    repeated: bool,
    outcome: Result<()>,
) -> Result<()> {
    match outcome {
        Err(error) if repeated && error.is(ErrorKind::Exists) => match overlay.get_xattr(ino, name).await {
            Ok(has) if has == value => Ok(()),
            _ => Err(error),
        },
        outcome => outcome,
    }
}

/// Returns the outcome of removing an extended attribute. If a repeated request does not find it, the first attempt removed
/// it.
pub fn attribute_removed(repeated: bool, outcome: Result<()>) -> Result<()> {
    match outcome {
        Err(error) if repeated && error.is(ErrorKind::NoAttribute) => Ok(()),
        outcome => outcome,
    }
}

/// Returns the outcome of a rename. If a repeated request finds only the target, the first attempt moved it.
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use forebay_backends::memory::MemoryPool;
    use forebay_engine::{Caller, Options, Policy, content_io};

    use super::*;

    const CALLER: Caller = Caller { uid: 0, gid: 0, pid: 1 };

    #[tokio::test]
    async fn a_repeated_request_finds_the_attribute_that_it_created() {
        let fast = tempfile::tempdir().unwrap();
        let options = Options {
            pool: Arc::new(MemoryPool::new()),
            fast: vec![fast.path().to_owned()],
            limit_bytes: Some(64 << 20),
            policy: Policy::parse("[default]\nflush = \"manual\"\n").unwrap(),
            memory_bytes: 8 << 20,
            content_io: content_io::Choice::Plain,
            read_only: false,
            node: "here".into(),
            reattached: false,
            other_root: Default::default(),
            for_tests: Default::default(),
        };
        let overlay = Overlay::open(options).await.unwrap();
        let dir = overlay.mkdir(Ino::ROOT, b"dir", 0o755, 0, CALLER).await.unwrap().attr.ino;
        let set = |value: &'static [u8], repeated| {
            let overlay = overlay.clone();
            async move {
                let set = overlay.set_xattr(dir, b"user.a", value, libc::XATTR_CREATE, CALLER).await;
                attribute_set(&overlay, dir, b"user.a", value, repeated, set).await
            }
        };
        set(b"1", false).await.unwrap();
        set(b"1", true).await.unwrap();
        for (value, repeated) in [(&b"1"[..], false), (b"2", true)] {
            assert_eq!(set(value, repeated).await.unwrap_err().errno(), libc::EEXIST);
        }
    }
}
