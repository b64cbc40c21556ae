//! Mounts as the kernel lists them, read without accessing any of them.

use std::ffi::OsString;
use std::io::{self, BufRead};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::mount::MountFlags;

use crate::terminal::visible;

/// The file system type of Forebay's mounts, as `/proc/self/mountinfo` shows it.
pub const FS_TYPE: &str = "fuse.forebay";

/// One line of mountinfo.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// The number that the kernel gives to the mount while it exists. Other mounts may get it later.
    pub id: u64,
    pub mountpoint: PathBuf,
    /// The directory of its file system that it shows.
    pub root: PathBuf,
    pub fs_type: String,
    pub source: String,
    /// `major:minor` of the superblock.
    pub device: String,
    pub read_only: bool,
    /// Flags of the mount and of its file system.
    pub flags: MountFlags,
    /// For a FUSE mount: the user who mounted it.
    pub user: Option<u32>,
}

impl MountEntry {
    /// Returns whether it is a Forebay mount that root made.
    pub fn is_roots(&self) -> bool {
        self.fs_type == FS_TYPE && self.user == Some(0)
    }
}

/// Returns all mounts of this process's namespace, in the order in which they were made.
pub fn list() -> io::Result<Vec<MountEntry>> {
    parse(io::BufReader::new(std::fs::File::open("/proc/self/mountinfo")?))
}

fn parse(lines: impl BufRead) -> io::Result<Vec<MountEntry>> {
    let mut mounts = Vec::new();
    for line in lines.split(b'\n') {
        let line = line?;
        let mut fields = line.split(|b| *b == b' ');
        let id = fields.next().and_then(|id| std::str::from_utf8(id).ok()?.parse().ok());
        let (device, root, mountpoint) = (fields.nth(1), fields.next(), fields.next());
        let own = fields.next().unwrap_or_default();
        let mut tail = fields.skip_while(|f| *f != b"-").skip(1);
        let (Some(id), Some(device), Some(root), Some(mountpoint), Some(fs_type), Some(source)) =
            (id, device, root, mountpoint, tail.next(), tail.next())
        else {
            continue;
        };
        let shared = tail.next().unwrap_or_default();
        let own = shown_flags(own);
        mounts.push(MountEntry {
            id,
            mountpoint: decode_octal(mountpoint),
            root: decode_octal(root),
            fs_type: String::from_utf8_lossy(fs_type).into_owned(),
            source: decode_octal(source).to_string_lossy().into_owned(),
            device: String::from_utf8_lossy(device).into_owned(),
            read_only: own.contains(MountFlags::RDONLY),
            flags: own | shown_flags(shared),
            user: shared
                .split(|b| *b == b',')
                .find_map(|option| std::str::from_utf8(option.strip_prefix(b"user_id=")?).ok()?.parse().ok()),
        });
    }
    Ok(mounts)
}

fn shown_flags(options: &[u8]) -> MountFlags {
    let flag = |shown: &[u8]| OPTIONS.iter().find(|(name, _)| name.as_bytes() == shown).map(|(_, flag)| *flag);
    options.split(|b| *b == b',').filter_map(flag).collect()
}

/// Returns all mounts in the namespace of a process.
pub fn list_of(pid: u32) -> io::Result<Vec<MountEntry>> {
    parse(io::BufReader::new(std::fs::File::open(format!("/proc/{pid}/mountinfo"))?))
}

/// Returns those among all mounts that show a tree of another mount, which is given by its path. The last made is first.
pub fn that_show<'a>(all: &'a [MountEntry], tree: &Path) -> Vec<&'a MountEntry> {
    // Of mounts at one place, the last one counts.
    let holds = all.iter().rev().filter(|at| tree.starts_with(&at.mountpoint));
    let holder = holds.max_by_key(|at| at.mountpoint.components().count());
    let Some((holder, below)) = holder.and_then(|at| Some((at, tree.strip_prefix(&at.mountpoint).ok()?))) else {
        return Vec::new();
    };
    let root = if below.as_os_str().is_empty() { holder.root.clone() } else { holder.root.join(below) };
    all.iter().rev().filter(|at| at.device == holder.device && at.root == root && at.mountpoint != tree).collect()
}

/// Returns the mount at exactly this path, the topmost if there are several.
pub fn at(mountpoint: &Path) -> io::Result<Option<MountEntry>> {
    Ok(list()?.into_iter().rev().find(|m| m.mountpoint == mountpoint))
}

/// Returns whether a Forebay mount is at this path.
pub fn is_ours(mountpoint: &Path) -> bool {
    at(mountpoint).ok().flatten().is_some_and(|m| m.fs_type == FS_TYPE)
}

/// Returns the same from the view of another process, which may have a mount namespace of its own.
pub fn is_ours_for(pid: u32, mountpoint: &Path) -> bool {
    let at = list_of(pid).ok().and_then(|mounts| mounts.into_iter().rev().find(|m| m.mountpoint == mountpoint));
    at.is_some_and(|m| m.fs_type == FS_TYPE)
}

/// The mount options that do not depend on the file system.
const OPTIONS: [(&str, MountFlags); 10] = [
    ("ro", MountFlags::RDONLY),
    ("nosuid", MountFlags::NOSUID),
    ("nodev", MountFlags::NODEV),
    ("noexec", MountFlags::NOEXEC),
    ("noatime", MountFlags::NOATIME),
    ("nodiratime", MountFlags::NODIRATIME),
    ("relatime", MountFlags::RELATIME),
    ("sync", MountFlags::SYNCHRONOUS),
    ("dirsync", MountFlags::DIRSYNC),
    ("lazytime", MountFlags::LAZYTIME),
];

/// The options that clear one of these flags. mount(8) does not pass on `suid` and `dev`, but passes on options that it
/// does not know.
const LIFTING: [(&str, MountFlags); 11] = [
    ("rw", MountFlags::RDONLY),
    ("suid", MountFlags::NOSUID),
    ("allow_suid", MountFlags::NOSUID),
    ("dev", MountFlags::NODEV),
    ("allow_dev", MountFlags::NODEV),
    ("exec", MountFlags::NOEXEC),
    ("atime", MountFlags::NOATIME),
    ("relatime", MountFlags::NOATIME),
    ("diratime", MountFlags::NODIRATIME),
    ("async", MountFlags::SYNCHRONOUS),
    ("nolazytime", MountFlags::LAZYTIME),
];

/// Returns whether a mount accepts this option.
pub fn is_option(name: &str) -> bool {
    OPTIONS.iter().chain(&LIFTING).any(|(n, _)| *n == name)
}

/// Returns the flags for mount(2). Set-id programs and device files come from a pool that other clients write to, so
/// they work only if the options request it.
pub fn flags(options: &[String]) -> MountFlags {
    changed(MountFlags::NOSUID | MountFlags::NODEV, options)
}

/// Applies the options to the flags. Of two that contradict each other, the later wins, as in mount(8).
pub fn changed(mut flags: MountFlags, options: &[String]) -> MountFlags {
    for option in options {
        for (_, flag) in LIFTING.iter().filter(|(name, _)| name == option) {
            flags -= *flag;
        }
        for (_, flag) in OPTIONS.iter().filter(|(name, _)| name == option) {
            flags |= *flag;
        }
    }
    flags
}

/// Returns the flags with which the file system of a directory is mounted: a mount on top of it does not allow more.
pub fn flags_below(directory: &Path) -> MountFlags {
    use rustix::fs::StatVfsMountFlags as Below;
    let below = rustix::fs::statvfs(directory).map_or(Below::empty(), |stat| stat.f_flag);
    let mut flags = MountFlags::empty();
    flags.set(MountFlags::NOSUID, below.contains(Below::NOSUID));
    flags.set(MountFlags::NODEV, below.contains(Below::NODEV));
    flags.set(MountFlags::NOEXEC, below.contains(Below::NOEXEC));
    flags.set(MountFlags::RDONLY, below.contains(Below::RDONLY));
    flags
}

/// A process that keeps a mount busy, and the path by which it does.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    pub pid: u32,
    pub command: String,
    pub by: PathBuf,
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let by = self.by.display().to_string();
        write!(f, "{} (pid {}) by {}", visible(&self.command), self.pid, visible(&by))
    }
}

/// Returns at most `limit` processes that have a file below `mountpoint` open, as far as this user may see. Reads the
/// paths in /proc, and no file below the mount.
pub fn holders(mountpoint: &Path, limit: usize) -> Vec<Holder> {
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let mut found = Vec::new();
    for process in processes.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        if let Some(by) = held_by(&process.path(), mountpoint) {
            let command = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            found.push(Holder { pid, command: command.trim().to_string(), by });
            if found.len() == limit {
                break;
            }
        }
    }
    found
}

fn held_by(process: &Path, mountpoint: &Path) -> Option<PathBuf> {
    let inside = |link: PathBuf| std::fs::read_link(link).ok().filter(|target| target.starts_with(mountpoint));
    let fixed = ["cwd", "root", "exe"].into_iter().find_map(|name| inside(process.join(name)));
    fixed
        .or_else(|| std::fs::read_dir(process.join("fd")).ok()?.flatten().find_map(|fd| inside(fd.path())))
        .or_else(|| mapped(process, mountpoint))
}

/// Returns a file below the mount that is mapped, even if it is no longer open.
fn mapped(process: &Path, mountpoint: &Path) -> Option<PathBuf> {
    let maps = std::fs::read(process.join("maps")).ok()?;
    maps.split(|b| *b == b'\n').find_map(|line| {
        let start = line.iter().position(|b| *b == b'/')?;
        let path = Path::new(std::ffi::OsStr::from_bytes(&line[start..]));
        path.starts_with(mountpoint).then(|| path.to_path_buf())
    })
}

/// Returns the file system that `/etc/fstab` has above a path and that is not mounted now: what is made there would be
/// hidden by it. Those with `noauto` are left out, and those below which another mounted file system holds the path.
pub fn not_mounted_above(path: &Path) -> Option<PathBuf> {
    let fstab = std::fs::read("/etc/fstab").ok()?;
    not_mounted_of(&fstab, &list().ok()?, path)
}

fn not_mounted_of(fstab: &[u8], mounted: &[MountEntry], path: &Path) -> Option<PathBuf> {
    let above = fstab.split(|b| *b == b'\n').filter_map(|line| {
        let mut fields = line.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty());
        let (_, mountpoint) = (fields.next().filter(|spec| !spec.starts_with(b"#"))?, fields.next()?);
        let options = fields.nth(1).unwrap_or_default();
        let is_auto = !options.split(|b| *b == b',').any(|option| option == b"noauto");
        // Without a slash at its end.
        is_auto.then(|| decode_octal(mountpoint).components().collect::<PathBuf>())
    });
    // The root is mounted always; a container may not show it.
    let mut above = above.filter(|at| at.is_absolute() && at != Path::new("/") && path.starts_with(at));
    let is_held = |at: &Path, by: &Path| by.starts_with(at) && path.starts_with(by);
    above.find(|at| !mounted.iter().any(|mount| is_held(at, &mount.mountpoint)))
}

/// Decodes the escapes of `/proc/self/mountinfo` and `/etc/fstab`: a backslash and three octal digits.
fn decode_octal(field: &[u8]) -> PathBuf {
    let mut out = Vec::with_capacity(field.len());
    let mut at = 0;
    while at < field.len() {
        let digits = field.get(at + 1..at + 4).filter(|_| field[at] == b'\\');
        let value = digits.and_then(|d| std::str::from_utf8(d).ok()).and_then(|d| u8::from_str_radix(d, 8).ok());
        match value {
            Some(byte) => {
                out.push(byte);
                at += 4;
            }
            None => {
                out.push(field[at]);
                at += 1;
            }
        }
    }
    PathBuf::from(OsString::from_vec(out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_lines_are_parsed_with_and_without_optional_fields() {
        let text =
            b"36 35 98:0 /r /mnt/a\\040b rw,noatime master:1 shared:2 - fuse.forebay /po\\040ol rw,sync,user_id=0\n\
                     37 35 0:44 / /x ro,nodev - tmpfs tmpfs rw\nrubbish\n";
        let mounts = parse(&text[..]).unwrap();
        assert_eq!((mounts.len(), mounts[0].id, mounts[1].id), (2, 36, 37));
        assert_eq!(
            (mounts[0].mountpoint.as_path(), mounts[0].root.as_path()),
            (Path::new("/mnt/a b"), Path::new("/r"))
        );
        assert_eq!((mounts[0].fs_type.as_str(), mounts[0].source.as_str()), ("fuse.forebay", "/po ol"));
        assert_eq!((mounts[0].read_only, mounts[1].read_only), (false, true));
        assert_eq!(mounts[0].flags, MountFlags::NOATIME | MountFlags::SYNCHRONOUS);
        assert_eq!((mounts[1].fs_type.as_str(), mounts[1].device.as_str()), ("tmpfs", "0:44"));
        assert_eq!((mounts[0].is_roots(), mounts[1].is_roots()), (true, false));
    }

    #[test]
    fn a_tree_is_found_where_it_is_mounted_again() {
        let text = b"1 0 8:1 / / rw - ext4 /dev/a rw\n\
                     2 1 8:2 /vol /fast rw - xfs /dev/b rw\n\
                     3 1 0:50 / /m rw - fuse.forebay pool rw\n\
                     4 3 8:2 /vol/content/views/view-1/top /m/a ro - xfs /dev/b rw\n\
                     5 3 8:2 /vol/content/views/view-2/top /m/b ro - xfs /dev/b rw\n\
                     6 3 8:1 /vol/content/views/view-1/top /m/c ro - ext4 /dev/a rw\n";
        let all = parse(&text[..]).unwrap();
        let found = that_show(&all, Path::new("/fast/content/views/view-1/top"));
        assert_eq!(found.iter().map(|at| at.mountpoint.as_path()).collect::<Vec<_>>(), [Path::new("/m/a")]);
        assert!(that_show(&all, Path::new("/other/content/views/view-1/top")).is_empty());
    }

    #[test]
    fn a_file_system_of_fstab_that_is_not_mounted_is_found_above_a_path() {
        let mounted = parse(&b"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / /nvme rw - xfs /dev/b rw\n"[..]).unwrap();
        let fstab = b"# /dev/x /off xfs defaults\nUUID=1 / ext4 defaults 0 1\n/dev/b\t/nvme/ xfs nofail\n\n/dev/c  /my\\040disk xfs\n\
                      /dev/d /cd auto ro,noauto 0 0\n/dev/e none swap sw\n/dev/f /nvme/inner ext4 defaults\n";
        let above = |path: &str| not_mounted_of(fstab, &mounted, Path::new(path));
        assert_eq!(above("/my disk/forebay").as_deref(), Some(Path::new("/my disk")));
        assert_eq!(above("/nvme/inner").as_deref(), Some(Path::new("/nvme/inner")));
        // The pool's own file system is mounted below.
        let below = parse(&b"1 0 8:1 /x /my\\040disk/pool rw - ext4 /dev/a rw\n"[..]).unwrap();
        assert_eq!(not_mounted_of(fstab, &below, Path::new("/my disk/pool/forebay")), None);
        assert_eq!(not_mounted_of(fstab, &below, Path::new("/my disk/other")).as_deref(), Some(Path::new("/my disk")));
        assert_eq!(not_mounted_of(fstab, &below, Path::new("/srv")), None, "the root is not shown");
        for path in ["/nvme/forebay", "/off/forebay", "/cd/forebay", "/var/forebay", "/my diskette"] {
            assert_eq!(above(path), None, "{path}");
        }
    }

    #[test]
    fn mountinfo_escapes_are_undone() {
        assert_eq!(decode_octal(br"/mnt/a\040b\134"), Path::new(r"/mnt/a b\"));
        assert_eq!(decode_octal(br"/plain\04"), Path::new(r"/plain\04"));
    }

    #[test]
    fn of_options_that_contradict_each_other_the_later_wins() {
        let of = |options: &str| flags(&options.split(',').map(str::to_owned).collect::<Vec<_>>());
        let usual = MountFlags::NOSUID | MountFlags::NODEV;
        assert_eq!(of("rw,async,exec"), usual);
        assert_eq!(of("suid,nosuid,noexec,exec,ro,rw"), usual);
        assert_eq!(of("suid,allow_dev,noatime,relatime,sync"), MountFlags::RELATIME | MountFlags::SYNCHRONOUS);
    }

    #[test]
    fn a_holder_cannot_steer_a_terminal() {
        let by = PathBuf::from("/m/a\x1b[31m\nforebay: unmounted\u{9b}2J");
        let holder = Holder { pid: 7, command: "\x1b]0;x\x07ä".into(), by };
        let shown = holder.to_string();
        assert_eq!(shown, r"\u{1b}]0;x\u{7}ä (pid 7) by /m/a\u{1b}[31m\nforebay: unmounted\u{9b}2J");
    }

    #[test]
    fn holders_names_a_process_with_an_open_file() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let _open = std::fs::File::create(root.join("f")).unwrap();
        let holders = holders(&root, 8);
        assert!(holders.iter().any(|h| h.pid == std::process::id() && h.by == root.join("f")), "{holders:?}");
    }
}
