//! Rights to a file whose content is replaced in place.

use crate::{Attrs, Stat};

/// The mode of a file `target` while new content, which gets `attrs`, is written into it in place: a user who may not read
/// the new content must not be able to read it meanwhile. `has_acl`: it may have an ACL, or get one; then the group bits
/// are the ACL's mask.
pub(crate) fn narrowed_mode(target: &Stat, attrs: &Attrs, has_acl: bool) -> u32 {
    let mut mode = target.mode & attrs.mode & 0o777;
    if target.uid != attrs.uid {
        mode &= 0o077;
    }
    if target.gid != attrs.gid || has_acl {
        mode &= 0o707;
    }
    if target.uid != attrs.uid || target.gid != attrs.gid {
        // The owner or group changes: a member of the new group may be in the class "other" now.
        mode &= 0o770;
    }
    mode
}
