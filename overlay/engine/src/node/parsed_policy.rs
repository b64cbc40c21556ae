//! The settings that the owner of a directory makes for what is below it: its extended attribute, parsed once.

use std::sync::Arc;

use forebay_policy::{DIRECTORY_POLICY_MAX, DIRECTORY_POLICY_XATTR, DirectoryPolicy};

use super::NodeState;

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

impl NodeState {
    /// Returns the settings that the owner of a directory made, if there are any and they are right.
    pub fn directory_policy(&mut self) -> Option<Arc<DirectoryPolicy>> {
        let mut xattrs = self.record.xattrs.iter().flatten();
        let (_, value) = xattrs.find(|(name, _)| **name == *DIRECTORY_POLICY_XATTR.as_bytes())?;
        self.parsed_policy.of(value)
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
