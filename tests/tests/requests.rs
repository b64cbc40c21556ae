//! Requests that few programs make: whiteouts, for an overlayfs whose upper directory is on a mount, `statx`, and I/O
//! that native file systems do in another way.

use std::ffi::CString;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, chown};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

use forebay_tests::mount::{COMMAND, Mount, Options, Place, content};
use forebay_tests::process::{self, sh};

/// A user who has a name on the machine.
const USER: u32 = 65534;

fn rename(from: &Path, to: &Path, flags: u32) -> io::Result<()> {
    let text = |path: &Path| CString::new(path.as_os_str().as_bytes()).unwrap();
    let (from, to) = (text(from), text(to));
    // SAFETY: both paths end with NUL and outlive the call.
    let rc = unsafe { libc::renameat2(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), flags) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[track_caller]
fn is_whiteout(path: &Path) {
    let meta = fs::symlink_metadata(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert!(meta.file_type().is_char_device() && meta.rdev() == 0, "{}: {meta:?}", path.display());
}

/// SEMANTICS 56: "`RENAME_WHITEOUT` leaves a character device 0:0 under the old name, in the same step."
#[test]
fn a_rename_leaves_a_whiteout_where_it_is_asked_for() {
    let mount = Mount::new(Options::default());
    fs::write(mount.pool("of the pool"), "of the pool").unwrap();
    fs::write(mount.path("made here"), "made here").unwrap();
    fs::write(mount.path("target"), "target").unwrap();
    fs::create_dir_all(mount.path("dir/below")).unwrap();
    chown(mount.path("made here"), Some(7), Some(7)).unwrap();
    let names = [("of the pool", "moved"), ("made here", "target"), ("dir", "dir moved")];
    for (from, to) in names {
        rename(&mount.path(from), &mount.path(to), libc::RENAME_WHITEOUT).unwrap();
    }
    let links = fs::metadata(mount.place.mnt()).unwrap().nlink();
    let check = |at: &dyn Fn(&str) -> std::path::PathBuf| {
        names.iter().for_each(|(from, _)| is_whiteout(&at(from)));
        assert_eq!(fs::read_to_string(at("moved")).unwrap(), "of the pool");
        assert_eq!(fs::read_to_string(at("target")).unwrap(), "made here");
        assert!(at("dir moved/below").is_dir());
    };
    check(&|name| mount.path(name));
    let refused = rename(&mount.path("moved"), &mount.path("target"), libc::RENAME_WHITEOUT | libc::RENAME_NOREPLACE);
    assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EEXIST));
    mount.flush();
    check(&|name| mount.pool(name));
    assert_eq!(links, fs::metadata(mount.place.pool()).unwrap().nlink(), "directories in the root");
    let worker = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(worker);
    check(&|name| mount.path(name));
}

/// SEMANTICS 56: "So a mount can be the upper directory of an overlayfs."
#[test]
fn a_mount_is_the_upper_directory_of_an_overlayfs() {
    let mount = Mount::new(Options::default());
    for dir in ["up", "work"] {
        fs::create_dir(mount.path(dir)).unwrap();
    }
    let lower = mount.place.at("lower");
    fs::create_dir_all(lower.join("dir")).unwrap();
    for name in ["removed", "renamed", "changed", "dir/stays", "dir/goes"] {
        fs::write(lower.join(name), name).unwrap();
    }
    let merged = mount.place.at("merged");
    fs::create_dir(&merged).unwrap();
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        lower.display(),
        mount.path("up").display(),
        mount.path("work").display()
    );
    process::run(Command::new("mount").args(["-t", "overlay", "overlay", "-o", &options]).arg(&merged), COMMAND).ok();
    let script = "rm removed dir/goes; mv renamed new; echo more >> changed; echo made > made; ls . dir | sort";
    let listed = sh(&merged, script, COMMAND).out;
    process::run(Command::new("umount").arg(&merged), COMMAND).ok();
    let expected = ["changed", "dir", "dir:", "made", "new", "stays", ".:"];
    let mut listed: Vec<_> = listed.split_whitespace().collect();
    let mut expected = expected.to_vec();
    listed.sort_unstable();
    expected.sort_unstable();
    assert_eq!(listed, expected);
    mount.flush();
    for at in [mount.path("up"), mount.pool("up")] {
        ["removed", "renamed", "dir/goes"].iter().for_each(|name| is_whiteout(&at.join(name)));
        assert_eq!(fs::read_to_string(at.join("changed")).unwrap(), "changedmore\n");
        assert_eq!(fs::read_to_string(at.join("new")).unwrap(), "renamed");
    }
}

/// SEMANTICS 56: "If the pool cannot hold such a device, the call fails with `EINVAL`."
#[test]
fn a_pool_without_devices_refuses_whiteouts() {
    // The daemon of an ordinary user cannot make devices in its pool.
    let place = Place::new();
    place.let_users_mount();
    place.give_to(USER);
    let allow_other = vec!["-o".into(), "allow_other".into()];
    let mount = Mount::on(place, Options { user: Some(USER), more: allow_other, ..Options::default() });
    fs::write(mount.path("f"), "f").unwrap();
    let refused = rename(&mount.path("f"), &mount.path("g"), libc::RENAME_WHITEOUT).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EINVAL), "{refused}");
    assert_eq!(fs::read_to_string(mount.path("f")).unwrap(), "f");
    assert!(!mount.path("g").exists());
    rename(&mount.path("f"), &mount.path("g"), 0).unwrap();
    mount.umount();
}

/// SEMANTICS 57: "`statx` returns no birth time"
#[test]
fn statx_tells_all_but_the_time_of_birth() {
    let mount = Mount::new(Options::default());
    fs::write(mount.path("f"), "content").unwrap();
    let path = CString::new(mount.path("f").as_os_str().as_bytes()).unwrap();
    for flags in [libc::AT_STATX_SYNC_AS_STAT, libc::AT_STATX_FORCE_SYNC, libc::AT_STATX_DONT_SYNC] {
        // SAFETY: a `statx` may have any bytes, so all bytes may be 0.
        let mut seen: libc::statx = unsafe { std::mem::zeroed() };
        let mask = libc::STATX_BASIC_STATS | libc::STATX_BTIME;
        // SAFETY: the path ends with NUL, and all pointers outlive the call.
        let rc = unsafe { libc::statx(libc::AT_FDCWD, path.as_ptr(), flags, mask, &mut seen) };
        assert_eq!(rc, 0, "{}", io::Error::last_os_error());
        assert_eq!(seen.stx_mask & mask, libc::STATX_BASIC_STATS, "{flags:x}");
        assert_eq!(seen.stx_size, 7);
    }
    let refused = fs::metadata(mount.path("f")).unwrap().created().unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::Unsupported, "{refused}");
}

/// Prints the first byte, waits for a line, touches every page, and prints the sum of the first bytes of the pages.
const TOUCH: &str = "
import mmap, sys
file = open(sys.argv[1], 'rb')
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print(mapped[0], flush=True)
sys.stdin.readline()
print(sum(mapped[at] for at in range(0, len(mapped), 4096)), flush=True)
";

/// Runs [`TOUCH`] on a file, and `change` while the program waits. Returns its exit status and its last line.
fn touched(mount: &Mount, name: &str, change: impl FnOnce()) -> (std::process::ExitStatus, String) {
    process::need(&["python3"]);
    let mut command = Command::new("python3");
    command.args(["-c", TOUCH]).arg(mount.path(name)).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = process::spawn(&mut command).unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert_eq!(line.trim().parse(), Ok(BEFORE), "the first byte");
    change();
    writeln!(child.stdin.take().unwrap()).unwrap();
    line.clear();
    said.read_line(&mut line).unwrap();
    (process::wait(&mut child, COMMAND).expect("it ends"), line.trim().to_owned())
}

const BEFORE: u8 = b'a';
const MAPPED_BYTES: usize = 64 << 20;

/// SEMANTICS 58: "If another client overwrites, replaces or removes a file in the pool that a program has mapped, access to
/// a page that was not in memory may end with `SIGBUS`. It never returns bytes of another version."
#[test]
fn a_mapped_file_that_was_overwritten_in_the_pool_is_of_one_version_or_a_bus_error() {
    // The pool is so slow that most of the file is not resident when it is overwritten.
    let mount = Mount::new(Options { throttle: Some("4MB/s,1ms".into()), ..Options::default() });
    let sum = |byte: u8| (u64::from(byte) * (MAPPED_BYTES / 4096) as u64).to_string();
    let overwrite = |path: &Path| {
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(&vec![b'b'; MAPPED_BYTES], 0).unwrap();
    };
    fs::write(mount.pool("in part"), vec![BEFORE; MAPPED_BYTES]).unwrap();
    let (end, said) = touched(&mount, "in part", || overwrite(&mount.pool("in part")));
    assert_eq!((end.signal(), said.as_str()), (Some(libc::SIGBUS), ""));

    // A resident file is read as it was.
    let mount = Mount::new(Options::default());
    fs::write(mount.pool("whole"), vec![BEFORE; MAPPED_BYTES]).unwrap();
    mount.forebay(["stage"], &[&mount.path("whole")]).ok();
    let (end, said) = touched(&mount, "whole", || overwrite(&mount.pool("whole")));
    assert!(end.success() && said == sum(BEFORE), "{end}: {said}");
}

/// SEMANTICS 59: "`O_DIRECT` with an offset or a length that is not a multiple of the block size either fails with `EINVAL`
/// or is carried out"
#[test]
fn unaligned_direct_io_is_refused_or_exact() {
    let mount = Mount::new(Options::default());
    let before: Vec<u8> = content(3, 1 << 20);
    fs::write(mount.pool("absent"), &before).unwrap();
    fs::write(mount.pool("staged"), &before).unwrap();
    fs::write(mount.path("made here"), &before).unwrap();
    mount.forebay(["stage"], &[&mount.path("staged")]).ok();
    for name in ["absent", "staged", "made here"] {
        let direct = |write: bool| {
            let mut options = fs::OpenOptions::new();
            options.read(!write).write(write).custom_flags(libc::O_DIRECT).open(mount.path(name)).unwrap()
        };
        let mut expected = before.clone();
        for (n, (offset, len, aligned)) in
            [(0, 4096, true), (7, 4096, false), (4096, 100, false), (512 << 10, 64 << 10, true), (100_001, 5000, false)]
                .into_iter()
                .enumerate()
        {
            // The memory is aligned: the test is about offset and length in the file.
            let mut buffer = Aligned::new();
            let there = &mut buffer.0[..len];
            match direct(false).read_at(there, offset as u64) {
                Ok(got) => assert!(got == len && *there == expected[offset..][..len], "{name}, read {offset}+{len}"),
                Err(e) => {
                    assert!(!aligned && e.raw_os_error() == Some(libc::EINVAL), "{name}, read {offset}+{len}: {e}")
                }
            }
            there.fill(n as u8);
            match direct(true).write_at(there, offset as u64) {
                Ok(got) => {
                    assert_eq!(got, len, "{name}, write {offset}+{len}");
                    expected[offset..][..len].copy_from_slice(there);
                }
                Err(e) => {
                    assert!(!aligned && e.raw_os_error() == Some(libc::EINVAL), "{name}, write {offset}+{len}: {e}")
                }
            }
        }
        assert!(fs::read(mount.path(name)).unwrap() == expected, "{name}");
        mount.flush();
        assert!(fs::read(mount.pool(name)).unwrap() == expected, "{name} in the pool");
    }
}

#[repr(align(4096))]
struct Aligned([u8; 64 << 10]);

impl Aligned {
    fn new() -> Box<Self> {
        Box::new(Self([0; 64 << 10]))
    }
}
