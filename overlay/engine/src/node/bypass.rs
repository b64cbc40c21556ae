//! Writes that bypass the daemon: by passthrough, or by stores through a mapping.

use forebay_backends::Time;

/// Size and mtime of content: what each write changes. Not the ctime: it also moves when a writer is stopped because the
/// fast pool is full.
pub(crate) type Written = (u64, Time);

/// Whether programs may write a content file without the daemon.
///
/// ```text
/// None ── open ─▶ Writing ── stop ─▶ Stopped
///   ▲                │ ◀── resume ──────│
///   └───── end ──────┴───── end ────────┘
/// ```
/// The content file is immutable exactly while its writers are `Stopped`. A transition that sets or clears that flag
/// does not happen if the flag cannot be changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Bypass {
    #[default]
    None,
    /// With the state of the content when the file got set-id bits. Once it differs, the bits are removed.
    Writing(Option<Written>),
    /// Stopped until there is room.
    Stopped(Option<Written>),
}

impl Bypass {
    /// A program opened the file for such writes.
    pub fn open(&mut self) {
        if let Self::None = self {
            *self = Self::Writing(None);
        }
    }

    /// Stops the writers. `set_immutable` sets or clears the flag, and returns whether it could. Returns whether the
    /// writers were stopped now.
    pub fn stop(&mut self, set_immutable: impl FnOnce(bool) -> bool) -> bool {
        match *self {
            Self::Writing(set_id) if set_immutable(true) => {
                *self = Self::Stopped(set_id);
                true
            }
            _ => false,
        }
    }

    /// Lets stopped writers go on.
    pub fn resume(&mut self, set_immutable: impl FnOnce(bool) -> bool) {
        if let Self::Stopped(set_id) = *self
            && set_immutable(false)
        {
            *self = Self::Writing(set_id);
        }
    }

    /// No program can write the content any more. Returns `false` if its writers are still stopped, because the flag
    /// could not be cleared: the caller tries again later.
    pub fn end(&mut self, set_immutable: impl FnOnce(bool) -> bool) -> bool {
        self.resume(set_immutable);
        if let Self::Stopped(_) = self {
            return false;
        }
        *self = Self::None;
        true
    }

    pub fn is_stopped(&self) -> bool {
        matches!(self, Self::Stopped(_))
    }

    pub fn is_none(&self) -> bool {
        *self == Self::None
    }

    /// Returns the state of the content when the file got set-id bits.
    pub fn set_id_since(&self) -> Option<Written> {
        match self {
            Self::None => None,
            Self::Writing(since) | Self::Stopped(since) => *since,
        }
    }

    /// Notes the state of the content when the file got set-id bits; `None`: it has none.
    pub fn note_set_id(&mut self, now: Option<Written>) {
        match self {
            Self::None => {}
            Self::Writing(since) | Self::Stopped(since) => *since = now,
        }
    }
}
