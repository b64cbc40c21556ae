//! The settings that the owner of a directory makes for what is below it: its extended attribute, parsed once.

use std::sync::Arc;

use forebay_catalog::InodeRecord;
use forebay_policy::{DIRECTORY_POLICY_MAX, DIRECTORY_POLICY_XATTR, DirectoryPolicy};

use super::NodeState;
use crate::policies::settings_in;

/// The last value of the attribute that was parsed.
#[derive(Debug, Default)]
pub(crate) struct ParsedPolicy(Option<(Box<[u8]>, Option<Arc<DirectoryPolicy>>)>);

impl ParsedPolicy {
    /// Returns what a value says; `None`: it is wrong, since it was set past this mount.
    fn of(&mut self, value: &[u8]) -> Option<Arc<DirectoryPolicy>> {
        if let Some((known, policy)) = &self.0
            && **known == *value
        {
            return policy.clone();
        }
        if value.len() > DIRECTORY_POLICY_MAX {
            return None;
        }
        let policy = DirectoryPolicy::parse(value).ok().map(Arc::new);
        self.0 = Some((value.into(), policy.clone()));
        policy
    }
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
        assert!(parsed.0.is_some_and(|(value, _)| *value == *b"flush = "), "a long value is not kept");
    }
}
