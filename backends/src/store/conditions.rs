//! The conditions on changes that a store honours. A store that can only be read honours none.

/// The conditions that the server honours for one kind of request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Heeded {
    /// `If-None-Match: *`
    pub(crate) absent: bool,
    /// `If-Match`: refused with another ETag, accepted with the right one.
    pub(crate) etag: bool,
}

/// The conditions that the server honours.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Conditional {
    pub(crate) put: Heeded,
    /// For the completion of an upload in parts.
    pub(crate) complete: Heeded,
    /// For a copy's target.
    pub(crate) copy: Heeded,
    /// For a removal: `absent` is never set.
    pub(crate) delete: Heeded,
}

impl Conditional {
    /// Whether the server honours all conditions that a put needs.
    pub(crate) fn all(&self) -> bool {
        let all = Heeded { absent: true, etag: true };
        self.put == all && self.complete == all
    }
}
