//! The one error type of the project: what failed, which side caused it, and whether a retry can help.

use std::fmt;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The side that caused an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The calling program requested something impossible.
    Application,
    /// The fast pool or the catalog.
    Cache,
    /// The bulk pool.
    Pool,
    /// FUSE or another kernel interface.
    Kernel,
}

/// Whether the same call may succeed later without any intervention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    Never,
    Later,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    NotFound,
    Exists,
    NotDirectory,
    IsDirectory,
    NotEmpty,
    PermissionDenied,
    NotPermitted,
    NoSpace,
    Quota,
    TooLarge,
    NameTooLong,
    TooManyLinks,
    CrossDevice,
    Unsupported,
    InvalidInput,
    ReadOnly,
    NoAttribute,
    OutOfRange,
    Busy,
    /// The object is no longer of the version that the caller named.
    Stale,
    /// A conditional change found a version other than the expected one, and changed nothing.
    Conflict,
    /// A deadline passed.
    Timeout,
    /// The pool does not answer or is being recovered.
    Unavailable,
    /// Bytes or records contradict their checksum or each other.
    Corrupt,
    /// Anything else, by its errno.
    Os(i32),
}

impl ErrorKind {
    /// The errno for the kernel's reply.
    pub fn errno(self) -> i32 {
        match self {
            Self::NotFound => libc::ENOENT,
            Self::Exists => libc::EEXIST,
            Self::NotDirectory => libc::ENOTDIR,
            Self::IsDirectory => libc::EISDIR,
            Self::NotEmpty => libc::ENOTEMPTY,
            Self::PermissionDenied => libc::EACCES,
            Self::NotPermitted => libc::EPERM,
            Self::NoSpace => libc::ENOSPC,
            Self::Quota => libc::EDQUOT,
            Self::TooLarge => libc::EFBIG,
            Self::NameTooLong => libc::ENAMETOOLONG,
            Self::TooManyLinks => libc::EMLINK,
            Self::CrossDevice => libc::EXDEV,
            Self::Unsupported => libc::EOPNOTSUPP,
            Self::InvalidInput => libc::EINVAL,
            Self::ReadOnly => libc::EROFS,
            Self::NoAttribute => libc::ENODATA,
            Self::OutOfRange => libc::ERANGE,
            Self::Busy => libc::EBUSY,
            Self::Stale => libc::ESTALE,
            Self::Conflict | Self::Corrupt | Self::Unavailable => libc::EIO,
            Self::Timeout => libc::ETIMEDOUT,
            Self::Os(errno) => errno,
        }
    }

    /// Whether this error of `setxattr` concerns the attribute and is no fault of the pool.
    pub fn refuses_attribute(self) -> bool {
        matches!(
            self,
            Self::Unsupported
                | Self::InvalidInput
                | Self::NoSpace
                | Self::Quota
                | Self::OutOfRange
                | Self::TooLarge
                | Self::NameTooLong
                | Self::NotPermitted
                | Self::PermissionDenied
                | Self::Os(libc::E2BIG)
        )
    }

    /// The kind that stands for an errno.
    pub fn from_errno(errno: i32) -> Self {
        match errno {
            libc::ENOENT => Self::NotFound,
            libc::EEXIST => Self::Exists,
            libc::ENOTDIR => Self::NotDirectory,
            libc::EISDIR => Self::IsDirectory,
            libc::ENOTEMPTY => Self::NotEmpty,
            libc::EACCES => Self::PermissionDenied,
            libc::EPERM => Self::NotPermitted,
            libc::ENOSPC => Self::NoSpace,
            libc::EDQUOT => Self::Quota,
            libc::EFBIG => Self::TooLarge,
            libc::ENAMETOOLONG => Self::NameTooLong,
            libc::EMLINK => Self::TooManyLinks,
            libc::EXDEV => Self::CrossDevice,
            libc::EOPNOTSUPP | libc::ENOSYS => Self::Unsupported,
            libc::EINVAL => Self::InvalidInput,
            libc::EROFS => Self::ReadOnly,
            libc::ENODATA => Self::NoAttribute,
            libc::ERANGE => Self::OutOfRange,
            libc::EBUSY => Self::Busy,
            libc::ESTALE => Self::Stale,
            libc::ETIMEDOUT => Self::Timeout,
            other => Self::Os(other),
        }
    }
}

/// What failed, on which object, why, and on which side.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    side: Side,
    context: String,
    /// The extended attribute that the object cannot have.
    attribute: Option<Box<[u8]>>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// `context` names the operation and its object and, where it helps, the remedy.
    pub fn new(kind: ErrorKind, side: Side, context: impl Into<String>) -> Self {
        Self { kind, side, context: context.into(), attribute: None, source: None }
    }

    /// An error of a system call.
    pub fn os(errno: i32, side: Side, context: impl Into<String>) -> Self {
        Self::new(ErrorKind::from_errno(errno), side, context)
    }

    pub fn io(error: std::io::Error, side: Side, context: impl Into<String>) -> Self {
        let kind = error.raw_os_error().map_or(ErrorKind::Os(libc::EIO), ErrorKind::from_errno);
        Self { kind, side, context: context.into(), attribute: None, source: Some(Box::new(error)) }
    }

    /// Names the extended attribute that was refused, if this kind of error refuses a name or value. The call then
    /// failed for no other reason.
    pub fn of_attribute(mut self, name: &[u8]) -> Self {
        if self.kind.refuses_attribute() {
            self.attribute = Some(name.into());
        }
        self
    }

    /// The extended attribute without which the same call may succeed.
    pub fn attribute(&self) -> Option<&[u8]> {
        self.attribute.as_deref()
    }

    pub fn with_source(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Puts the caller's operation in front of the context, unless the context already begins with it. Each caller on
    /// the way up may name the path, and the message names it once.
    pub fn context(mut self, what: impl fmt::Display) -> Self {
        let what = what.to_string();
        let said = self.context.strip_prefix(&what).is_some_and(|rest| rest.is_empty() || rest.starts_with(": "));
        if !said {
            self.context = format!("{what}: {}", self.context);
        }
        self
    }

    /// Returns what failed and why, without the words for the kind.
    pub fn reason(&self) -> &str {
        &self.context
    }

    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    pub fn side(&self) -> Side {
        self.side
    }

    pub fn errno(&self) -> i32 {
        self.kind.errno()
    }

    pub fn retry(&self) -> Retry {
        match self.kind {
            ErrorKind::Timeout | ErrorKind::Unavailable | ErrorKind::Busy | ErrorKind::NoSpace | ErrorKind::Quota => {
                Retry::Later
            }
            ErrorKind::Os(libc::EIO | libc::EINTR | libc::EAGAIN | libc::ENOTCONN | libc::EHOSTDOWN)
                if self.side == Side::Pool =>
            {
                Retry::Later
            }
            _ => Retry::Never,
        }
    }

    pub fn is(&self, kind: ErrorKind) -> bool {
        self.kind == kind
    }

    /// Whether no server answered, or not in time: nothing is known of what was asked.
    pub fn is_unreachable(&self) -> bool {
        matches!(self.kind, ErrorKind::Timeout | ErrorKind::Unavailable)
    }

    /// Whether what was asked about is not there, or not any more.
    pub fn is_gone(&self) -> bool {
        matches!(self.kind, ErrorKind::NotFound | ErrorKind::NotDirectory | ErrorKind::Stale)
    }

    /// Whether the answer to a question tells nothing: the pool is unreachable, or is changing the object.
    pub fn tells_nothing(&self) -> bool {
        self.is_unreachable() || self.is(ErrorKind::Busy)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = std::io::Error::from_raw_os_error(self.errno());
        let side = match self.side {
            Side::Application => "request",
            Side::Cache => "fast pool",
            Side::Pool => "pool",
            Side::Kernel => "kernel",
        };
        match self.kind {
            // The context alone says what is wrong with the request.
            ErrorKind::InvalidInput if self.side == Side::Application => write!(f, "{}", self.context)?,
            ErrorKind::Conflict => write!(f, "{}: conflicting change in the {side}", self.context)?,
            ErrorKind::Corrupt => write!(f, "{}: corrupt data in the {side}", self.context)?,
            ErrorKind::Unavailable => write!(f, "{}: the {side} does not answer", self.context)?,
            _ => write!(f, "{}: {why} ({side})", self.context)?,
        }
        if let Some(source) = &self.source
            && !matches!(self.kind, ErrorKind::Os(_))
            && source.downcast_ref::<std::io::Error>().is_none()
        {
            write!(f, ": {source}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|s| s as _)
    }
}
