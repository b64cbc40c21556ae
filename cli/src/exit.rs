//! The exit codes: documented, and stable in their meaning.

use std::fmt::Write;

use forebay_daemon::FailureKind;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    Done = 0,
    Incomplete = 1,
    Usage = 2,
    NoDaemon = 3,
    PoolUnavailable = 4,
    NoSpace = 5,
    Busy = 6,
    Denied = 7,
    Corrupt = 8,
    Missing = 9,
    Other = 10,
    Unfit = 11,
}

impl Exit {
    const ALL: [(Self, &str); 12] = [
        (Self::Done, "everything was done"),
        (Self::Incomplete, "something was not done: a file is short, or is not in the pool; the output names it"),
        (Self::Usage, "the command makes no sense as it was given"),
        (Self::NoDaemon, "no daemon serves the path, or it does not answer"),
        (Self::PoolUnavailable, "the pool does not answer"),
        (Self::NoSpace, "there is not enough space"),
        (Self::Busy, "something else holds the mountpoint or the fast directory, or the work is not finished"),
        (Self::Denied, "a permission is missing"),
        (Self::Corrupt, "stored data differs from what was written"),
        (Self::Missing, "the machine lacks something that is needed (doctor)"),
        (Self::Other, "any other failure"),
        (Self::Unfit, "the pool failed the conformance suite (doctor)"),
    ];
}

impl From<FailureKind> for Exit {
    fn from(kind: FailureKind) -> Self {
        match kind {
            FailureKind::Incomplete => Self::Incomplete,
            FailureKind::Usage => Self::Usage,
            FailureKind::NoDaemon => Self::NoDaemon,
            FailureKind::PoolUnavailable => Self::PoolUnavailable,
            FailureKind::NoSpace => Self::NoSpace,
            FailureKind::Busy => Self::Busy,
            FailureKind::Denied => Self::Denied,
            FailureKind::Corrupt => Self::Corrupt,
            FailureKind::Missing => Self::Missing,
            FailureKind::Other => Self::Other,
        }
    }
}

/// The codes with their meanings, for the help text and the manual page.
pub fn table() -> String {
    let mut out = String::from("Exit codes:\n");
    for (exit, meaning) in Exit::ALL {
        // Writing to a string does not fail.
        let _ = writeln!(out, "  {:>2}  {meaning}", exit as u8);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_numbered_without_gaps() {
        for (at, (exit, _)) in Exit::ALL.iter().enumerate() {
            assert_eq!(*exit as usize, at);
        }
    }
}
