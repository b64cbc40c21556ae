//! Extended attributes that the pool refuses: content is uploaded without them, and they stay among those to be sent.
//!
//! If the pool refuses an ACL, the group gets no more rights than the ACL gave it. Refusals at the flush are rare,
//! because `set_xattr` asks the pool first (`Pool::check_xattrs`): a directory pool tries the attribute on a file
//! without a name.

use forebay_backends::{Attrs, Error};
use parking_lot::Mutex;

use super::super::Ino;
use crate::acl::{self, Acl};

/// Files whose refused attributes are remembered. For any other file, the next upload finds them out again.
const REMEMBERED: std::num::NonZeroUsize = std::num::NonZeroUsize::MIN.saturating_add(4095);

/// Names with their values.
pub(super) type Pairs = Vec<(Vec<u8>, Vec<u8>)>;

/// Names that the pool refused, by file.
#[derive(Debug)]
pub(crate) struct RefusedNames(Mutex<lru::LruCache<Ino, Vec<Box<[u8]>>>>);

impl Default for RefusedNames {
    fn default() -> Self {
        Self(Mutex::new(lru::LruCache::new(REMEMBERED)))
    }
}

impl RefusedNames {
    /// Notes the attribute that an error says was refused. Returns whether it was not known to be.
    pub fn note(&self, ino: Ino, error: &Error) -> bool {
        let Some(name) = error.attribute() else { return false };
        let mut refused = self.0.lock();
        let names = refused.get_or_insert_mut(ino, Vec::new);
        let news = names.iter().all(|known| **known != *name);
        if news {
            names.push(name.into());
        }
        news
    }

    /// Forgets a refusal: the attribute has another value now, or the pool took it.
    pub fn take_back(&self, ino: Ino, name: &[u8]) {
        let mut refused = self.0.lock();
        let Some(names) = refused.peek_mut(&ino) else { return };
        names.retain(|known| **known != *name);
        if names.is_empty() {
            refused.pop(&ino);
        }
    }

    pub fn is_any(&self, ino: Ino) -> bool {
        self.0.lock().contains(&ino)
    }

    /// Returns the attributes without the refused ones, and the refused ones.
    pub fn split(&self, ino: Ino, mut attrs: Attrs) -> (Attrs, Pairs) {
        let names = self.0.lock().peek(&ino).cloned().unwrap_or_default();
        let is_refused = |(name, _): &(Vec<u8>, Vec<u8>)| names.iter().any(|refused| **refused == **name);
        let (refused, taken) = attrs.xattrs.into_iter().partition(is_refused);
        attrs.xattrs = taken;
        attrs.mode = mode_without(attrs.mode, &refused);
        (attrs, refused)
    }
}

/// Returns the mode of an object that cannot have these attributes. Without its ACL, the group bits, which are the
/// ACL's mask, would be the rights of the owning group.
pub(super) fn mode_without<N: AsRef<[u8]>, V: AsRef<[u8]>>(mode: u32, refused: &[(N, V)]) -> u32 {
    let Some((_, value)) = refused.iter().find(|(name, _)| name.as_ref() == acl::ACCESS) else { return mode };
    let group = Acl::parse(value.as_ref()).ok().flatten().map_or(0, |acl| acl.owning_group());
    mode & (!0o070 | group << 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_its_acl_the_owning_group_gets_no_more_than_the_acl_gave_it() {
        // u::rwx, user 7: rw-, g::r--, mask rw-, o::---
        let entry =
            |tag: u16, perm: u16, id: u32| [&tag.to_le_bytes()[..], &perm.to_le_bytes(), &id.to_le_bytes()].concat();
        let nobody = u32::MAX;
        let entries =
            [entry(1, 7, nobody), entry(2, 6, 7), entry(4, 4, nobody), entry(0x10, 6, nobody), entry(0x20, 0, nobody)];
        let value = [2u32.to_le_bytes().to_vec(), entries.concat()].concat();
        assert_eq!(mode_without(0o760, &[(acl::ACCESS.to_vec(), value)]), 0o740);
        assert_eq!(mode_without(0o760, &[(b"user.x".to_vec(), Vec::new())]), 0o760);
        assert_eq!(mode_without(0o760, &[(acl::ACCESS.to_vec(), Vec::new())]), 0o700, "unreadable");
    }
}
