//! POSIX access control lists, as the kernel's `fs/posix_acl.c` handles them: pure functions on the value of
//! the attributes `system.posix_acl_access` and `system.posix_acl_default`.
//!
//! An ACL that says no more than the nine permission bits is *equivalent* to the mode and is not stored.

use forebay_backends::{Error, ErrorKind, FileKind, Result, Side};

use crate::permission::UserGroups;

/// Name of the attribute that extends the permission bits of any object but a symbolic link.
pub const ACCESS: &[u8] = b"system.posix_acl_access";
/// Name of the attribute of a directory that new entries inherit.
pub const DEFAULT: &[u8] = b"system.posix_acl_default";

const VERSION: u32 = 2;
const HEADER_BYTES: usize = 4;
const ENTRY_BYTES: usize = 8;
/// The kernel's limit is the 64 KiB of an attribute's value.
const ENTRIES_MAX: usize = ((64 << 10) - HEADER_BYTES) / ENTRY_BYTES;
/// The id of entries without a user or group id.
const NO_ID: u32 = u32::MAX;

/// The subject of an entry, in the order in which entries must appear.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tag {
    Owner = 0x01,
    User = 0x02,
    OwningGroup = 0x04,
    Group = 0x08,
    Mask = 0x10,
    Other = 0x20,
}

impl Tag {
    fn from_raw(raw: u16) -> Option<Self> {
        [Self::Owner, Self::User, Self::OwningGroup, Self::Group, Self::Mask, Self::Other]
            .into_iter()
            .find(|tag| *tag as u16 == raw)
    }

    fn names_somebody(self) -> bool {
        matches!(self, Self::User | Self::Group)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AclEntry {
    pub tag: Tag,
    /// Read 4, write 2, execute 1.
    pub perm: u16,
    /// Only of [`Tag::User`] and [`Tag::Group`].
    pub id: u32,
}

/// A valid ACL: owner, owning group and other exactly once, a mask if a user or group is named, all in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acl {
    entries: Vec<AclEntry>,
}

/// The mode and the ACLs of a new object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InheritedAcl {
    pub mode: u32,
    pub access: Option<Acl>,
    pub default: Option<Acl>,
}

fn invalid(why: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, Side::Application, format!("access control list: {why}"))
}

impl Acl {
    /// Reads the value of an attribute. `None`: an ACL without entries, which removes the attribute.
    ///
    /// # Errors
    /// `Unsupported` for another version of the format, `InvalidInput` for a value that breaks a rule of [`Acl`].
    pub fn parse(value: &[u8]) -> Result<Option<Self>> {
        let (header, body) = value.split_first_chunk::<HEADER_BYTES>().ok_or_else(|| invalid("too short"))?;
        if u32::from_le_bytes(*header) != VERSION {
            return Err(Error::new(ErrorKind::Unsupported, Side::Application, "access control list: unknown version"));
        }
        if body.len() % ENTRY_BYTES != 0 || body.len() / ENTRY_BYTES > ENTRIES_MAX {
            return Err(invalid("its length is not that of whole entries"));
        }
        let entries = body.chunks_exact(ENTRY_BYTES).map(parse_entry).collect::<Result<Vec<_>>>()?;
        if entries.is_empty() {
            return Ok(None);
        }
        check(&entries)?;
        Ok(Some(Self { entries }))
    }

    /// Returns the value of the attribute.
    pub fn encode(&self) -> Vec<u8> {
        let mut value = Vec::with_capacity(HEADER_BYTES + self.entries.len() * ENTRY_BYTES);
        value.extend_from_slice(&VERSION.to_le_bytes());
        for entry in &self.entries {
            value.extend_from_slice(&(entry.tag as u16).to_le_bytes());
            value.extend_from_slice(&entry.perm.to_le_bytes());
            value.extend_from_slice(&entry.id.to_le_bytes());
        }
        value
    }

    /// Returns the ACL that is equivalent to `mode`.
    #[cfg(test)]
    pub fn from_mode(mode: u32) -> Self {
        let entry = |tag, shift: u32| AclEntry { tag, perm: ((mode >> shift) & 7) as u16, id: NO_ID };
        Self { entries: vec![entry(Tag::Owner, 6), entry(Tag::OwningGroup, 3), entry(Tag::Other, 0)] }
    }

    /// Returns whether the nine permission bits say everything that the ACL says.
    pub fn is_equivalent_to_mode(&self) -> bool {
        self.entries.iter().all(|entry| matches!(entry.tag, Tag::Owner | Tag::OwningGroup | Tag::Other))
    }

    /// Returns the nine permission bits that `stat` shows under this ACL: the group's bits are the mask's, if there is
    /// a mask.
    pub fn permission_bits(&self) -> u32 {
        let group = self.group_class();
        self.entries.iter().enumerate().fold(0, |bits, (at, entry)| {
            let perm = u32::from(entry.perm);
            match entry.tag {
                Tag::Owner => bits | perm << 6,
                Tag::Other => bits | perm,
                _ if at == group => bits | perm << 3,
                _ => bits,
            }
        })
    }

    /// Returns the permissions of the owning group.
    pub fn owning_group(&self) -> u32 {
        let of = |tag| self.entries.iter().find(|entry| entry.tag == tag).map(|entry| u32::from(entry.perm));
        of(Tag::OwningGroup).unwrap_or(0) & of(Tag::Mask).unwrap_or(7)
    }

    /// Returns the access ACL after `chmod(mode)`: the group's bits go to the mask, if there is a mask.
    pub fn chmod(&self, mode: u32) -> Self {
        let mut new = self.clone();
        let group = new.group_class();
        for (at, entry) in new.entries.iter_mut().enumerate() {
            match entry.tag {
                Tag::Owner => entry.perm = ((mode >> 6) & 7) as u16,
                Tag::Other => entry.perm = (mode & 7) as u16,
                _ if at == group => entry.perm = ((mode >> 3) & 7) as u16,
                _ => {}
            }
        }
        new
    }

    /// `posix_acl_permission`: returns whether a user that is not the owner has all these permissions. `group`: the owning
    /// group.
    pub fn grants(&self, group: u32, user: &UserGroups, wanted: u32) -> bool {
        let has = |entry: &AclEntry| u32::from(entry.perm) & wanted == wanted;
        let mask = self.entries.iter().find(|entry| entry.tag == Tag::Mask);
        let unmasked = mask.is_none_or(has);
        if let Some(named) = self.entries.iter().find(|entry| entry.tag == Tag::User && entry.id == user.uid) {
            return has(named) && unmasked;
        }
        let in_group = |entry: &&AclEntry| match entry.tag {
            Tag::OwningGroup => user.groups.contains(&group),
            Tag::Group => user.groups.contains(&entry.id),
            _ => false,
        };
        let mut of_groups = self.entries.iter().filter(in_group).peekable();
        match of_groups.peek() {
            Some(_) => of_groups.any(has) && unmasked,
            None => self.entries.iter().any(|entry| entry.tag == Tag::Other && has(entry)),
        }
    }

    /// Returns the index of the entry that the group's permission bits stand for.
    fn group_class(&self) -> usize {
        let find = |tag| self.entries.iter().position(|entry| entry.tag == tag);
        find(Tag::Mask).or_else(|| find(Tag::OwningGroup)).unwrap_or(0)
    }

    /// `posix_acl_create_masq`: returns what both this default ACL and the `mode` of the creating call allow.
    fn masked_by(&self, mode: u32) -> (Self, u32) {
        let mut new = self.clone();
        let mut bits = mode;
        let group = new.group_class();
        for (at, entry) in new.entries.iter_mut().enumerate() {
            let shift = match entry.tag {
                Tag::Owner => 6,
                Tag::Other => 0,
                _ if at == group => 3,
                _ => continue,
            };
            entry.perm &= ((mode >> shift) & 7) as u16;
            bits = (bits & !(7 << shift)) | (u32::from(entry.perm) << shift);
        }
        (new, (mode & !0o777) | (bits & 0o777))
    }
}

/// Returns the mode and the ACLs of an object that is created with `mode` under `umask`. `parent_default`: the default
/// ACL of its directory. With a default ACL the umask plays no role.
pub fn inherit(kind: FileKind, mode: u32, umask: u32, parent_default: Option<&Acl>) -> InheritedAcl {
    match (kind, parent_default) {
        (FileKind::Symlink, _) => InheritedAcl { mode: 0o777, access: None, default: None },
        (_, None) => InheritedAcl { mode: mode & !(umask & 0o777), access: None, default: None },
        (kind, Some(parent)) => {
            let (access, mode) = parent.masked_by(mode);
            let access = (!access.is_equivalent_to_mode()).then_some(access);
            InheritedAcl { mode, access, default: (kind == FileKind::Directory).then(|| parent.clone()) }
        }
    }
}

/// Returns the result of setting `system.posix_acl_access` to `acl`: the new mode, and the ACL that must be stored, if
/// any. The caller clears set-group-id if the setter is neither privileged nor in the group.
pub fn set_access(mode: u32, acl: Option<Acl>) -> (u32, Option<Acl>) {
    match acl {
        None => (mode, None),
        Some(acl) => {
            let mode = (mode & !0o777) | acl.permission_bits();
            (mode, (!acl.is_equivalent_to_mode()).then_some(acl))
        }
    }
}

fn parse_entry(raw: &[u8]) -> Result<AclEntry> {
    let (tag, perm) = (u16::from_le_bytes([raw[0], raw[1]]), u16::from_le_bytes([raw[2], raw[3]]));
    let tag = Tag::from_raw(tag).ok_or_else(|| invalid("unknown kind of entry"))?;
    let id = if tag.names_somebody() { u32::from_le_bytes([raw[4], raw[5], raw[6], raw[7]]) } else { NO_ID };
    Ok(AclEntry { tag, perm, id })
}

fn check(entries: &[AclEntry]) -> Result<()> {
    let count = |tag| entries.iter().filter(|entry| entry.tag == tag).count();
    if entries.iter().any(|entry| entry.perm & !7 != 0) {
        return Err(invalid("unknown permission"));
    }
    if !entries.is_sorted_by_key(|entry| entry.tag) {
        return Err(invalid("entries out of order"));
    }
    if [Tag::Owner, Tag::OwningGroup, Tag::Other].into_iter().any(|tag| count(tag) != 1) {
        return Err(invalid("owner, owning group and other must be there once"));
    }
    let named = count(Tag::User) + count(Tag::Group) > 0;
    if count(Tag::Mask) > 1 || (named && count(Tag::Mask) == 0) {
        return Err(invalid("one mask is needed where users or groups are named"));
    }
    if entries.iter().any(|entry| entry.tag.names_somebody() && entry.id == NO_ID) {
        return Err(invalid("a named entry without an id"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
    use std::path::{Path, PathBuf};

    use super::*;

    fn acl(text: &[(Tag, u16, u32)]) -> Acl {
        let entries = text.iter().map(|&(tag, perm, id)| AclEntry { tag, perm, id }).collect::<Vec<_>>();
        check(&entries).unwrap();
        Acl { entries }
    }

    fn named(owner: u16, user: u16, group: u16, mask: u16, other: u16) -> Acl {
        acl(&[
            (Tag::Owner, owner, NO_ID),
            (Tag::User, user, 1234),
            (Tag::OwningGroup, group, NO_ID),
            (Tag::Mask, mask, NO_ID),
            (Tag::Other, other, NO_ID),
        ])
    }

    fn minimal(owner: u16, group: u16, other: u16) -> Acl {
        Acl::from_mode(u32::from(owner) << 6 | u32::from(group) << 3 | u32::from(other))
    }

    fn samples() -> Vec<Acl> {
        let mut all = vec![named(7, 5, 5, 7, 0), named(6, 7, 4, 4, 4), named(0, 7, 7, 1, 7), named(7, 7, 7, 0, 5)];
        all.extend([minimal(7, 5, 5), minimal(6, 0, 0), minimal(7, 7, 7), minimal(4, 2, 1)]);
        all
    }

    #[test]
    fn what_is_encoded_is_parsed_again() {
        for acl in samples() {
            assert_eq!(Acl::parse(&acl.encode()).unwrap().unwrap(), acl);
        }
        assert_eq!(Acl::parse(&VERSION.to_le_bytes()).unwrap(), None);
    }

    #[test]
    fn broken_lists_are_refused() {
        let good = named(7, 5, 5, 7, 0).encode();
        let mut other_version = good.clone();
        other_version[0] = 1;
        let mut no_mask = good.clone();
        no_mask.drain(HEADER_BYTES + 3 * ENTRY_BYTES..HEADER_BYTES + 4 * ENTRY_BYTES);
        let mut unordered = good.clone();
        unordered[HEADER_BYTES..HEADER_BYTES + 16].rotate_left(8);
        let mut odd_permission = good.clone();
        odd_permission[HEADER_BYTES + 2] = 8;
        for bad in [&good[..3], &good[..good.len() - 1], &other_version, &no_mask, &unordered, &odd_permission] {
            assert!(Acl::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn without_a_default_list_the_umask_rules() {
        let got = inherit(FileKind::File, 0o6777, 0o027, None);
        assert_eq!(got, InheritedAcl { mode: 0o6750, access: None, default: None });
    }

    /// Compares with an ext4 directory. If the file system has no ACLs, the test names the remedy.
    fn judge() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::Builder::new().prefix("acl").tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().to_owned();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
        (dir, path)
    }

    fn c(path: &Path) -> CString {
        CString::new(path.as_os_str().as_bytes()).unwrap()
    }

    fn set(path: &Path, name: &[u8], acl: &Acl) {
        let (name, value) = (CString::new(name).unwrap(), acl.encode());
        // SAFETY: all pointers are to live buffers of the lengths given.
        let rc = unsafe { libc::setxattr(c(path).as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
        let error = std::io::Error::last_os_error();
        assert_eq!(rc, 0, "{}: {error}; this test needs a file system with ACLs (mount -o acl)", path.display());
    }

    fn get(path: &Path, name: &[u8]) -> Option<Acl> {
        let name = CString::new(name).unwrap();
        let mut value = vec![0; 64 << 10];
        // SAFETY: as above.
        let got = unsafe { libc::getxattr(c(path).as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
        if got < 0 {
            assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ENODATA));
            return None;
        }
        Acl::parse(&value[..got as usize]).unwrap()
    }

    fn mode(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
    }

    fn clear_default(path: &Path) {
        let name = CString::new(DEFAULT).unwrap();
        // SAFETY: as above.
        unsafe { libc::removexattr(c(path).as_ptr(), name.as_ptr()) };
    }

    #[test]
    fn new_objects_inherit_as_on_a_real_file_system() {
        let (_keep, dir) = judge();
        for (at, default) in samples().into_iter().enumerate() {
            clear_default(&dir);
            set(&dir, DEFAULT, &default);
            for asked in [0o777, 0o644, 0o600, 0o4755, 0o070, 0] {
                let file = dir.join(format!("f{at}-{asked:o}"));
                std::fs::OpenOptions::new().write(true).create_new(true).mode(asked).open(&file).unwrap();
                // The kernel decides on the set-id bits of a creating call, not the ACL.
                let want = inherit(FileKind::File, asked, 0o022, Some(&default));
                assert_eq!((mode(&file) & 0o777, get(&file, ACCESS)), (want.mode & 0o777, want.access), "{default:?}");

                let sub = dir.join(format!("d{at}-{asked:o}"));
                std::fs::DirBuilder::new().mode(asked).create(&sub).unwrap();
                let want = inherit(FileKind::Directory, asked, 0o022, Some(&default));
                let got = (mode(&sub) & 0o777, get(&sub, ACCESS), get(&sub, DEFAULT));
                assert_eq!(got, (want.mode & 0o777, want.access, want.default), "{default:?}");
            }
        }
    }

    #[test]
    fn users_are_granted_what_they_are_on_a_real_file_system() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let (_keep, base) = judge();
        let dir = base.join("judged");
        std::fs::DirBuilder::new().create(&dir).unwrap();
        let open = std::fs::File::open(&dir).unwrap();
        let of_groups = |group: u16, named: u16, mask: u16, other: u16| {
            acl(&[
                (Tag::Owner, 7, NO_ID),
                (Tag::OwningGroup, group, NO_ID),
                (Tag::Group, named, 1234),
                (Tag::Mask, mask, NO_ID),
                (Tag::Other, other, NO_ID),
            ])
        };
        let mut lists =
            vec![of_groups(7, 1, 7, 7), of_groups(1, 7, 7, 0), of_groups(7, 7, 5, 7), of_groups(0, 0, 7, 7)];
        lists.extend(samples().into_iter().filter(|list| !list.is_equivalent_to_mode()));
        for (list, gid) in lists.iter().flat_map(|list| [(list, 0), (list, 1234), (list, 77)]) {
            std::os::unix::fs::chown(&dir, Some(77), Some(gid)).unwrap();
            set(&dir, ACCESS, list);
            for uid in [77, 1234, 88] {
                let judged =
                    forebay_system::identity::as_user(uid, || forebay_system::identity::check_may_change(&open));
                let user = UserGroups { uid, groups: vec![uid] };
                let allowed = crate::permission::allows(mode(&dir), (77, gid), Some(list), &user, 3);
                assert_eq!(allowed, judged.is_ok(), "{list:?} {gid} {uid}");
            }
        }
    }

    #[test]
    fn chmod_and_setting_a_list_act_as_on_a_real_file_system() {
        let (_keep, dir) = judge();
        let file = dir.join("file");
        std::fs::write(&file, b"").unwrap();
        for list in samples() {
            let before = mode(&file);
            set(&file, ACCESS, &list);
            let (want_mode, want_list) = set_access(before, Some(list));
            assert_eq!((mode(&file), get(&file, ACCESS)), (want_mode, want_list.clone()));
            for to in [0o777, 0o640, 0o007, 0] {
                std::fs::set_permissions(&file, std::fs::Permissions::from_mode(to)).unwrap();
                let want = want_list.as_ref().map(|list| list.chmod(to));
                assert_eq!((mode(&file), get(&file, ACCESS)), (to, want));
            }
        }
    }
}
