//! What the file system under a directory pool can do: tried if the directory is writable, else known by kind.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RenameFlags, StatVfsMountFlags, Timespec, Timestamps, Uid, XattrFlags, fchown,
    fsetxattr, fstatfs, fstatvfs, ftruncate, futimens, linkat, makedev, mkdirat, mknodat, openat, renameat_with,
    symlinkat, unlinkat,
};
use rustix::io::{Errno, pwrite};
use rustix::process::geteuid;

use crate::unfinished::unique_name;
use crate::{Capabilities, ConditionalPut, FileKind, ListingSupport, Objects, Renames, Versions};

use super::attrs::AttributeTarget;
use super::stat::{stat_fd, stat_name};
use super::stripes::Striped;

/// `f_type` of file systems that answer without a network.
const LOCAL_FILE_SYSTEMS: [u64; 15] = [
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // xfs
    0x9123_683e, // btrfs
    0x0102_1994, // tmpfs
    0x8584_58f6, // ramfs
    0x794c_7630, // overlayfs
    0x2fc1_2fc1, // zfs
    0xf2f5_2010, // f2fs
    0xca45_1a4e, // bcachefs
    0x3153_464a, // jfs
    0x4d44,      // vfat
    0x2011_bab0, // exfat
    0x7366_746e, // ntfs3
    0x7371_7368, // squashfs
    0xe0f5_e1e2, // erofs
];
/// `f_type` of local file systems without lasting inode numbers: they draw them when a name is looked up, or are images
/// that are replaced as a whole. overlayfs has lasting ones for directories only if all layers are on one file system.
const PASSING_NUMBERS: [u64; 5] = [
    0x4d44,      // vfat
    0x2011_bab0, // exfat
    0x7371_7368, // squashfs
    0xe0f5_e1e2, // erofs
    0x794c_7630, // overlayfs
];
/// `f_type` of file systems behind servers that have lasting inode numbers. FUSE and CIFS may have none.
const LASTING_NUMBERS: [u64; 5] = [
    0x6969,      // NFS
    0x0bd0_0bd0, // Lustre
    0x1983_0326, // BeeGFS
    0x00c3_6400, // CephFS
    0x4750_4653, // GPFS
];
/// The size of a sparse file that shows whether holes take space.
const SPARSE_PROBE_BYTES: u64 = 4 << 20;
/// BeeGFS keeps times in whole seconds.
const BEEGFS_TIME_NS: u32 = 1_000_000_000;
/// The name of a link in a directory that the probe makes.
pub(super) const PROBED_LINK: &CStr = c"link";
const PROBE_NANOS: u32 = 123_456_789;

/// The capabilities of the trait, and those that only this pool needs to know.
#[derive(Debug, Clone)]
pub(super) struct Abilities {
    pub(super) public: Capabilities,
    pub(super) rename_noreplace: bool,
}

pub(super) fn probe(root: BorrowedFd<'_>, striped: Option<Striped>) -> rustix::io::Result<Abilities> {
    let vfs = fstatvfs(root)?;
    // The kernel's types differ between machines; the magic numbers have 32 bits.
    let magic = fstatfs(root)?.f_type as u64 & 0xffff_ffff;
    let local = LOCAL_FILE_SYSTEMS.contains(&magic);
    let mut abilities = Abilities {
        public: Capabilities {
            local,
            read_only: vfs.f_flag.contains(StatVfsMountFlags::RDONLY),
            objects: Objects {
                symlinks: true,
                symlink_times: true,
                hard_links: true,
                special_files: geteuid().is_root(),
                xattrs: local,
                owners: geteuid().is_root(),
                sparse: true,
            },
            renames: Renames::Atomic { exchange: local },
            listings: ListingSupport::Whole,
            listed_contents: false,
            versions: Versions {
                confirmed_by_reads: false,
                alone: false,
                of_directories: true,
                outlive_mounts: keeps_identities(magic),
            },
            streams: false,
            ranged_write: true,
            parts_ahead: None,
            conditional_put: if local { ConditionalPut::Atomic } else { ConditionalPut::Checked },
            layouts: striped.is_some(),
            time_granularity_ns: if striped == Some(Striped::BeeGfs) { BEEGFS_TIME_NS } else { tick_ns() },
            name_max: u32::try_from(vfs.f_namemax).ok().filter(|max| *max > 0).unwrap_or(255),
            path_max: None,
        },
        rename_noreplace: local,
    };
    if abilities.public.read_only {
        return Ok(abilities);
    }
    let before = stat_fd(root)?;
    match Probe::new(root) {
        Ok(probe) => {
            let ran = probe.run(&mut abilities);
            drop(probe);
            // If another client makes a name within these milliseconds, the change time still shows it.
            let _ = AttributeTarget::handle(root, FileKind::Directory).set_times(None, Some(before.mtime));
            ran?;
        }
        Err(Errno::ROFS) => abilities.public.read_only = true,
        // The root is not writable, but directories beneath it may be: keep what the kind tells.
        Err(Errno::ACCESS | Errno::PERM | Errno::NOSPC | Errno::DQUOT) => {}
        Err(errno) => return Err(errno),
    }
    Ok(abilities)
}

/// Whether an object of a file system of this kind has the same inode number after another mount.
fn keeps_identities(magic: u64) -> bool {
    let local = LOCAL_FILE_SYSTEMS.contains(&magic) && !PASSING_NUMBERS.contains(&magic);
    local || LASTING_NUMBERS.contains(&magic)
}

/// Two temporary files in the root, removed when dropped.
struct Probe<'a> {
    root: BorrowedFd<'a>,
    names: [Vec<u8>; 2],
    file: OwnedFd,
}

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = unlinkat(self.root, &name[..], AtFlags::empty());
        }
    }
}

impl<'a> Probe<'a> {
    fn new(root: BorrowedFd<'a>) -> rustix::io::Result<Self> {
        let names = [unique_name(), unique_name()];
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = openat(root, &names[0][..], flags, Mode::RUSR | Mode::WUSR)?;
        let probe = Self { root, names, file };
        openat(root, &probe.names[1][..], flags, Mode::RUSR | Mode::WUSR)?;
        Ok(probe)
    }

    fn run(&self, abilities: &mut Abilities) -> rustix::io::Result<()> {
        let [first, second] = &self.names;
        let public = &mut abilities.public;
        let exchanged = renameat_with(self.root, &first[..], self.root, &second[..], RenameFlags::EXCHANGE);
        public.renames = Renames::Atomic { exchange: exchanged.is_ok() };
        let refused = renameat_with(self.root, &first[..], self.root, &second[..], RenameFlags::NOREPLACE);
        abilities.rename_noreplace = refused == Err(Errno::EXIST);
        public.objects.hard_links = self.links_are_hard()?;
        public.objects.symlinks = self.with_third(|name| symlinkat(c"x", self.root, name));
        public.objects.special_files =
            self.with_third(|name| mknodat(self.root, name, FileType::CharacterDevice, Mode::RUSR, makedev(1, 3)));
        public.objects.xattrs = fsetxattr(&self.file, c"user.forebay", b"1", XattrFlags::empty()).is_ok();
        public.objects.owners = fchown(&self.file, Some(Uid::from_raw(another_user())), None).is_ok();
        public.time_granularity_ns = self.time_granularity()?;
        public.objects.sparse = self.holes_are_free()?;
        let atomic = public.renames.exchange() && (abilities.rename_noreplace || public.objects.hard_links);
        public.conditional_put = if atomic { ConditionalPut::Atomic } else { ConditionalPut::Checked };
        Ok(())
    }

    /// Some file systems link only within one directory, or create a symlink instead.
    fn links_are_hard(&self) -> rustix::io::Result<bool> {
        let (dir, name) = (unique_name(), &self.names[0][..]);
        mkdirat(self.root, &dir[..], Mode::RWXU)?;
        let linked = openat(self.root, &dir[..], OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .and_then(|dir| {
                linkat(self.root, name, &dir, PROBED_LINK, AtFlags::empty())?;
                let same = stat_name(self.root, name).and_then(|original| {
                    Ok(stat_name(&dir, PROBED_LINK.to_bytes())?.version.same_object(&original.version))
                });
                unlinkat(&dir, PROBED_LINK, AtFlags::empty())?;
                same
            });
        let _ = unlinkat(self.root, &dir[..], AtFlags::REMOVEDIR);
        Ok(linked.unwrap_or(false))
    }

    fn with_third(&self, attempt: impl FnOnce(&[u8]) -> rustix::io::Result<()>) -> bool {
        let name = unique_name();
        let able = attempt(&name).is_ok();
        if able {
            let _ = unlinkat(self.root, &name[..], AtFlags::empty());
        }
        able
    }

    /// The coarser of the file system's stored resolution and that of the kernel's clock for it.
    fn time_granularity(&self) -> rustix::io::Result<u32> {
        let moment = Timespec { tv_sec: 1_000_000_000, tv_nsec: i64::from(PROBE_NANOS) };
        futimens(&self.file, &Timestamps { last_access: moment, last_modification: moment })?;
        let kept = stat_fd(&self.file)?.mtime.nanos;
        let units = (0..9).map(|digits| 10_u32.pow(digits));
        let stored_ns = units.into_iter().find(|unit| PROBE_NANOS / unit * unit == kept).unwrap_or(1_000_000_000);
        // Since Linux 6.13, some file systems use a finer time for a change if the old time was read before.
        for _ in 0..4 {
            let before = stat_fd(&self.file)?.mtime;
            pwrite(&self.file, b"x", 0)?;
            if stat_fd(&self.file)?.mtime == before {
                return Ok(stored_ns.max(tick_ns()));
            }
        }
        Ok(stored_ns)
    }

    fn holes_are_free(&self) -> rustix::io::Result<bool> {
        ftruncate(&self.file, SPARSE_PROBE_BYTES)?;
        pwrite(&self.file, b"x", SPARSE_PROBE_BYTES - 1)?;
        let blocks = rustix::fs::fstat(self.file.as_fd())?.st_blocks as u64;
        Ok(blocks * 512 < SPARSE_PROBE_BYTES)
    }
}

/// A user id that differs from this process's.
fn another_user() -> u32 {
    if geteuid().as_raw() == 65_534 { 65_533 } else { 65_534 }
}

/// Nanoseconds between two ticks of the clock from which file systems take times.
fn tick_ns() -> u32 {
    let tick = rustix::time::clock_getres(rustix::time::ClockId::RealtimeCoarse);
    u32::try_from(tick.tv_nsec).unwrap_or(4_000_000).max(1)
}
