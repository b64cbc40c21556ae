//! Uploads whose answer was lost: the pool may still carry one out after the flush went on without it.

use std::collections::VecDeque;

use forebay_backends::{FileKind, Stat, Time};

/// How many are remembered of a file; the oldest is forgotten first.
const REMEMBERED: usize = 8;

/// A time that is a whole number of these was set by a program, or is not as exact as the clock.
const ROUNDED_NS: u32 = 1000;

/// The sizes and times of modification of contents whose upload ended without an answer.
#[derive(Debug, Default)]
pub(crate) struct LateUploads(VecDeque<(u64, Time)>);

impl LateUploads {
    pub fn note(&mut self, size: u64, mtime: Time) {
        if self.0.contains(&(size, mtime)) {
            return;
        }
        if self.0.len() >= REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back((size, mtime));
    }

    /// Whether an object of the pool is one of these uploads, and not the file of another client, which must not be
    /// overwritten. An upload sets the time of modification to the nanosecond, so by accident no other file has it. A
    /// rounded time tells nothing: programs set equal ones on different files.
    pub fn is_one(&self, stat: &Stat) -> bool {
        let is_exact = !stat.mtime.nanos.is_multiple_of(ROUNDED_NS);
        stat.kind == FileKind::File && is_exact && self.0.contains(&(stat.size, stat.mtime))
    }
}

#[cfg(test)]
mod tests {
    use forebay_backends::Version;

    use super::*;

    fn stat(size: u64, mtime: Time) -> Stat {
        Stat {
            kind: FileKind::File,
            mode: 0o644,
            uid: 0,
            gid: 0,
            size,
            occupied: None,
            nlink: 1,
            rdev: 0,
            atime: mtime,
            mtime,
            ctime: mtime,
            version: Version::Tag { etag: String::new(), id: String::new(), size, mtime },
        }
    }

    #[test]
    fn only_the_exact_time_of_an_upload_counts() {
        let at = |nanos| Time { secs: 7, nanos };
        let mut late = LateUploads::default();
        late.note(10, at(123_456_789));
        late.note(10, at(123_000_000));
        assert!(late.is_one(&stat(10, at(123_456_789))));
        let others = [(11, 123_456_789), (10, 123_456_788), (10, 123_000_000)];
        assert!(others.iter().all(|(size, nanos)| !late.is_one(&stat(*size, at(*nanos)))));
        for size in 100..200 {
            late.note(size, at(1));
        }
        assert!(late.0.len() == REMEMBERED && late.is_one(&stat(199, at(1))));
    }
}
