//! The settings that the owner of a directory makes for what is below it: its extended attribute, parsed once.

use std::sync::Arc;

use forebay_catalog::{InodeRecord, Xattrs};
use forebay_policy::{DIRECTORY_POLICY_MAX, DIRECTORY_POLICY_XATTR, DirectoryPolicy};

use super::NodeState;

/// The last value of the attribute that was parsed. An empty one has no settings.
#[derive(Debug, Default)]
pub(crate) struct ParsedPolicy {
    value: Box<[u8]>,
    /// `None`: the value is wrong, since it was set past this mount.
    policy: Option<Arc<DirectoryPolicy>>,
}

impl ParsedPolicy {
    /// Returns what a value says, if it is right.
    fn of(&mut self, value: &[u8]) -> Option<Arc<DirectoryPolicy>> {
        if value.len() > DIRECTORY_POLICY_MAX {
            return None;
        }
        if *self.value != *value {
            self.policy = DirectoryPolicy::parse(value).ok().map(Arc::new);
            self.value = value.into();
        }
        self.policy.clone()
    }
}

/// Returns the value of the attribute with the settings of a directory.
pub(crate) fn settings_in(xattrs: &Xattrs) -> Option<&[u8]> {
    xattrs.iter().find(|(name, _)| **name == *DIRECTORY_POLICY_XATTR.as_bytes()).map(|(_, value)| &**value)
}

/// Returns the settings of a directory that were changed in the mount and are not flushed yet; `None` inside: removed.
fn changed_settings(record: &InodeRecord) -> Option<Option<&[u8]>> {
    let mut changes = record.dirty_xattrs.iter();
    let change = changes.find(|(name, _)| **name == *DIRECTORY_POLICY_XATTR.as_bytes());
    change.map(|(_, value)| value.as_deref())
}

impl NodeState {
    /// Returns the settings that the owner of a directory made, if there are any and they are right. `last_known`: the value
    /// that counts while the extended attributes are not known.
    pub fn directory_policy(&mut self, last_known: Option<&[u8]>) -> Option<Arc<DirectoryPolicy>> {
        let value = match (&self.record.xattrs, changed_settings(&self.record)) {
            (Some(known), _) => settings_in(known),
            // It is on its way to the pool.
            (None, Some(change)) => change,
            (None, None) => last_known,
        };
        self.parsed_policy.of(value?)
    }

    /// Returns whether the settings of a directory are those that the catalog has.
    pub fn knows_directory_policy(&self) -> bool {
        self.record.xattrs.is_some() || changed_settings(&self.record).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_parsed_once_and_a_long_one_never() {
        let mut parsed = ParsedPolicy::default();
        let first = parsed.of(b"flush = \"manual\"").unwrap();
        assert!(Arc::ptr_eq(&first, &parsed.of(b"flush = \"manual\"").unwrap()));
        assert_ne!(first, parsed.of(b"flush = \"on-close\"").unwrap());
        assert_eq!(parsed.of(b"flush = "), None);
        assert_eq!(parsed.of(&[b'#'; DIRECTORY_POLICY_MAX + 1]), None);
        assert_eq!(*parsed.value, *b"flush = ", "a long value is not kept");
    }
}
