//! First touches, as read from the ring.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use crate::layout::{Key, TOUCH_HEADER_BYTES, Touch};

/// A job touched a file for the first time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FirstTouch {
    pub key: Key,
    /// Ascending in the order of first touches of the observer.
    pub rank: u64,
    /// The process.
    pub pid: u32,
    /// The file's path below the watched directory, or below the root of its file system, at that moment.
    pub path: PathBuf,
}

impl FirstTouch {
    /// Parses an entry of the ring; `None` if it is truncated.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < TOUCH_HEADER_BYTES {
            return None;
        }
        // SAFETY: it is long enough for the header, which consists of plain numbers.
        let touch: Touch = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) };
        // From the file upwards, each with a zero at its end.
        let names = bytes.get(TOUCH_HEADER_BYTES..TOUCH_HEADER_BYTES + touch.names_len as usize)?;
        let names: Vec<&[u8]> = names.split(|&b| b == 0).filter(|name| !name.is_empty()).collect();
        let path = names.into_iter().rev().map(|name| OsString::from_vec(name.to_vec())).collect();
        Some(Self { key: touch.key, rank: touch.rank, pid: touch.tgid, path })
    }
}
