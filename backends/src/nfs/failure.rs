//! How a call fails, and the error for that.

use std::time::Duration;

use nfs3_client::RpcError;
use nfs3_client::nfs3_types::nfs3::nfsstat3;
use nfs3_client::nfs3_types::rpc::auth_stat;

use crate::{Error, ErrorKind, PoolPath, Result, Side};

/// The result of one or several calls.
pub(super) type Outcome<T> = std::result::Result<T, NfsFailure>;

#[derive(Debug)]
pub(super) enum NfsFailure {
    /// The server refused the call.
    Status(nfsstat3),
    /// No answer came: the call may have been carried out or not.
    Lost(Cause),
    /// The call was not carried out.
    Unsent(Cause),
    /// The complete error.
    Told(Error),
}

/// Why no answer came.
#[derive(Debug)]
pub(super) struct Cause {
    kind: ErrorKind,
    why: String,
    /// The answer is invalid in the protocol.
    nonsense: bool,
}

impl Cause {
    pub(super) fn new(kind: ErrorKind, why: impl Into<String>) -> Self {
        Self { kind, why: why.into(), nonsense: false }
    }

    /// An answer that is invalid in the protocol. `EIO`, so that a flush tries again later.
    fn nonsense(what: impl std::fmt::Display) -> Self {
        let why = format!("the server's answer makes no sense: {what}");
        Self { kind: ErrorKind::Os(libc::EIO), why, nonsense: true }
    }

    /// Adds the URL of the pool.
    pub(super) fn at(self, pool: &str) -> Self {
        Self { why: format!("{pool}: {}", self.why), ..self }
    }

    /// The server did not answer for so long.
    pub(super) fn silence(limit: Duration) -> Self {
        Self::new(ErrorKind::Timeout, format!("no answer within {} s", limit.as_secs()))
    }

    pub(super) fn is_silence(&self) -> bool {
        self.kind == ErrorKind::Timeout
    }

    pub(super) fn is_nonsense(&self) -> bool {
        self.nonsense
    }

    /// Whether another attempt on another connection may soon succeed.
    pub(super) fn is_passing(&self) -> bool {
        self.kind == ErrorKind::Unavailable || self.nonsense
    }

    /// The cause as an error that names the operation.
    pub(super) fn told(&self, what: impl std::fmt::Display) -> Error {
        Error::new(self.kind, Side::Pool, format!("{what}: {}", self.why))
    }
}

impl From<&RpcError> for Cause {
    fn from(error: &RpcError) -> Self {
        let kind = match error {
            RpcError::Io(io) if io.kind() == std::io::ErrorKind::InvalidData => return Self::nonsense(io),
            RpcError::Xdr(_)
            | RpcError::UnexpectedCall
            | RpcError::UnexpectedXid
            | RpcError::NotFullyParsed { .. }
            | RpcError::FragmentedReply => return Self::nonsense(error),
            RpcError::Auth(
                auth_stat::AUTH_BADCRED
                | auth_stat::AUTH_REJECTEDCRED
                | auth_stat::AUTH_TOOWEAK
                | auth_stat::AUTH_FAILED,
            ) => ErrorKind::PermissionDenied,
            RpcError::ProgUnavail
            | RpcError::ProgMismatch { .. }
            | RpcError::ProcUnavail
            | RpcError::RpcMismatch { .. } => ErrorKind::Unsupported,
            RpcError::GarbageArgs | RpcError::WrongLength => ErrorKind::Os(libc::EIO),
            _ => ErrorKind::Unavailable,
        };
        let hint = match kind {
            ErrorKind::PermissionDenied => "; the server refuses AUTH_SYS from this machine: see its exports",
            ErrorKind::Unsupported => "; the server must offer NFS version 3 over TCP",
            _ => "",
        };
        Self::new(kind, format!("{error}{hint}"))
    }
}

impl NfsFailure {
    /// The server no longer knows a handle that it issued.
    pub(super) fn is_stale(&self) -> bool {
        matches!(self, Self::Status(nfsstat3::NFS3ERR_STALE | nfsstat3::NFS3ERR_BADHANDLE))
    }

    pub(super) fn is(&self, status: nfsstat3) -> bool {
        matches!(self, Self::Status(s) if *s == status)
    }

    /// Whether the server may have allowed the call to another user.
    pub(super) fn is_denied(&self) -> bool {
        matches!(self, Self::Status(nfsstat3::NFS3ERR_ACCES | nfsstat3::NFS3ERR_PERM))
    }
}

/// The kind of error for an NFS status.
pub(super) fn kind_of(status: nfsstat3) -> ErrorKind {
    match status {
        nfsstat3::NFS3ERR_PERM => ErrorKind::NotPermitted,
        nfsstat3::NFS3ERR_NOENT => ErrorKind::NotFound,
        nfsstat3::NFS3ERR_ACCES => ErrorKind::PermissionDenied,
        nfsstat3::NFS3ERR_EXIST => ErrorKind::Exists,
        nfsstat3::NFS3ERR_XDEV => ErrorKind::CrossDevice,
        nfsstat3::NFS3ERR_NOTDIR => ErrorKind::NotDirectory,
        nfsstat3::NFS3ERR_ISDIR => ErrorKind::IsDirectory,
        nfsstat3::NFS3ERR_INVAL => ErrorKind::InvalidInput,
        nfsstat3::NFS3ERR_FBIG => ErrorKind::TooLarge,
        nfsstat3::NFS3ERR_NOSPC => ErrorKind::NoSpace,
        nfsstat3::NFS3ERR_ROFS => ErrorKind::ReadOnly,
        nfsstat3::NFS3ERR_MLINK => ErrorKind::TooManyLinks,
        nfsstat3::NFS3ERR_NAMETOOLONG => ErrorKind::NameTooLong,
        nfsstat3::NFS3ERR_NOTEMPTY => ErrorKind::NotEmpty,
        nfsstat3::NFS3ERR_DQUOT => ErrorKind::Quota,
        nfsstat3::NFS3ERR_STALE | nfsstat3::NFS3ERR_BADHANDLE => ErrorKind::Stale,
        nfsstat3::NFS3ERR_NOTSUPP | nfsstat3::NFS3ERR_BADTYPE | nfsstat3::NFS3ERR_REMOTE => ErrorKind::Unsupported,
        nfsstat3::NFS3ERR_NOT_SYNC | nfsstat3::NFS3ERR_BAD_COOKIE | nfsstat3::NFS3ERR_JUKEBOX => ErrorKind::Busy,
        nfsstat3::NFS3ERR_NXIO => ErrorKind::Os(libc::ENXIO),
        nfsstat3::NFS3ERR_NODEV => ErrorKind::Os(libc::ENODEV),
        nfsstat3::NFS3_OK | nfsstat3::NFS3ERR_IO | nfsstat3::NFS3ERR_TOOSMALL | nfsstat3::NFS3ERR_SERVERFAULT => {
            ErrorKind::Os(libc::EIO)
        }
    }
}

/// One call of the pool, as the context of its errors.
#[derive(Debug, Clone, Copy)]
pub(super) struct NfsCall<'a> {
    pub(super) what: &'static str,
    pub(super) path: &'a PoolPath,
}

impl<'a> NfsCall<'a> {
    pub(super) fn new(what: &'static str, path: &'a PoolPath) -> Self {
        Self { what, path }
    }

    pub(super) fn error(self, kind: ErrorKind, why: &str) -> Error {
        Error::new(kind, Side::Pool, format!("{} {}: {why}", self.what, self.path))
    }

    pub(super) fn failed(self, failure: NfsFailure) -> Error {
        let Self { what, path } = self;
        match failure {
            NfsFailure::Status(status) => Error::new(kind_of(status), Side::Pool, format!("{what} {path}")),
            NfsFailure::Lost(cause) | NfsFailure::Unsent(cause) => cause.told(format_args!("{what} {path}")),
            NfsFailure::Told(error) => error,
        }
    }

    pub(super) fn refused(self, kind: ErrorKind, why: &str) -> NfsFailure {
        NfsFailure::Told(self.error(kind, why))
    }

    /// Refuses names that this pool reserves, and names that no server accepts.
    pub(super) fn check_names(self, name_max: u32) -> Result<()> {
        if self.path.is_reserved() {
            return Err(self.error(ErrorKind::InvalidInput, "names that start with .forebay~ are the pool's own"));
        }
        if self.path.components().any(|name| name.len() > name_max as usize) {
            return Err(self.error(ErrorKind::NameTooLong, &format!("names have at most {name_max} bytes")));
        }
        Ok(())
    }
}
