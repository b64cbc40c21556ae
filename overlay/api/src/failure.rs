//! The reason why a command failed.

use std::fmt;

use forebay_backends::{Error, ErrorKind, Side};
use serde::{Deserialize, Serialize};

/// The kind of a failure. The command line has an exit code for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// Part of the request was not carried out.
    Incomplete,
    /// The request is invalid.
    Usage,
    /// No daemon serves the path, or its daemon does not answer.
    NoDaemon,
    PoolUnavailable,
    NoSpace,
    /// Another process or user holds what the request needs.
    Busy,
    Denied,
    /// Stored data differs from what was written.
    Corrupt,
    /// The machine lacks a required component.
    Missing,
    /// Any other failure, and a kind that the reader does not know yet.
    #[serde(other)]
    Other,
}

/// A failure in words: what failed, on which object, why, and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Failure {
    pub kind: FailureKind,
    pub what: String,
    pub remedy: Option<String>,
}

impl Failure {
    pub fn new(kind: FailureKind, what: impl Into<String>) -> Self {
        Self { kind, what: what.into(), remedy: None }
    }

    pub fn usage(what: impl Into<String>) -> Self {
        Self::new(FailureKind::Usage, what)
    }

    /// Returns the failure for an error of the operating system about `what`.
    pub fn io(what: impl fmt::Display, error: &std::io::Error) -> Self {
        let kind = match error.raw_os_error() {
            Some(libc::EACCES | libc::EPERM | libc::EROFS) => FailureKind::Denied,
            Some(libc::ENOSPC | libc::EDQUOT) => FailureKind::NoSpace,
            Some(libc::EBUSY) => FailureKind::Busy,
            _ if error.kind() == std::io::ErrorKind::PermissionDenied => FailureKind::Denied,
            _ => FailureKind::Other,
        };
        Self::new(kind, format!("{what}: {error}"))
    }

    /// Like [`Self::io`], for a path that the user gave: if it does not exist or is of the wrong kind, the failure is a
    /// usage error.
    pub fn given(what: impl fmt::Display, error: &std::io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR | libc::EISDIR) => Self::usage(format!("{what}: {error}")),
            _ => Self::io(what, error),
        }
    }

    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        match &self.remedy {
            Some(remedy) => write!(f, "\n  try: {remedy}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Failure {}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let kind = match error.kind() {
            ErrorKind::Timeout | ErrorKind::Unavailable => FailureKind::PoolUnavailable,
            ErrorKind::NoSpace | ErrorKind::Quota => FailureKind::NoSpace,
            ErrorKind::Busy => FailureKind::Busy,
            ErrorKind::Corrupt => FailureKind::Corrupt,
            ErrorKind::InvalidInput => FailureKind::Usage,
            ErrorKind::NotFound if error.side() == Side::Application => FailureKind::Incomplete,
            ErrorKind::PermissionDenied | ErrorKind::NotPermitted | ErrorKind::ReadOnly => FailureKind::Denied,
            _ if error.side() == Side::Pool && error.retry() == forebay_backends::Retry::Later => {
                FailureKind::PoolUnavailable
            }
            _ => FailureKind::Other,
        };
        Self::new(kind, error.to_string())
    }
}
