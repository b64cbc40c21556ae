//! A disk that fails and recovers on command, and loses nothing.
//!
//! Two loop devices, one on top of the other, and a file system on the upper one. While the disk fails, the lower
//! device is shorter: any request of the upper one beyond its end is an I/O error, and the file system still assumes
//! its full size.
//!
//! The bitmaps and inode tables are at the front, and do not fail: once ext4 could not read a bitmap, it allocates
//! nothing from that group any more, also when the device works again.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::mount::Place;
use crate::process::{self, run};

/// The time limit of each command below.
const COMMAND: Duration = Duration::from_secs(60);
const BLOCK_BYTES: u64 = 4096;
/// Few inodes: one group of block groups describes the whole disk.
const INODES: &str = "1024";
/// `LOOP_SET_STATUS64` and `LOOP_GET_STATUS64` of linux/loop.h, the size of `struct loop_info64`, and the position of
/// `lo_sizelimit` in it: after three numbers of eight bytes, and the offset.
const SET_STATUS: libc::c_ulong = 0x4C04;
const GET_STATUS: libc::c_ulong = 0x4C05;
const STATUS_BYTES: usize = 232;
const SIZE_LIMIT_AT: usize = 32;

/// The disk, mounted at a directory of a place. Declare it before the mount that uses it, so that it is dropped later.
#[derive(Debug)]
pub struct Disk {
    pub dir: PathBuf,
    image: PathBuf,
    lower: PathBuf,
    upper: PathBuf,
    /// Where the content of files and directories begins.
    content_at: u64,
}

impl Disk {
    #[track_caller]
    pub fn new(place: &Place, name: &str, mib: u64) -> Self {
        let (dir, image) = (place.at(name), place.at(format!("{name}.img")));
        fs::create_dir_all(&dir).unwrap();
        File::create(&image).and_then(|file| file.set_len(mib << 20)).unwrap();
        let mut disk = Self { lower: attach(&image, false), upper: PathBuf::new(), dir, image, content_at: 0 };
        // No journal: if ext4 cannot write its journal, the file system is read-only until it is mounted again.
        let features = ["-q", "-F", "-b", "4096", "-N", INODES, "-O", "^has_journal,^resize_inode"];
        run(Command::new("mkfs.ext4").args(features).arg(&disk.lower), COMMAND).ok();
        let layout = run(Command::new("dumpe2fs").arg(&disk.lower), COMMAND).ok().out;
        let ranges = layout.lines().filter_map(|line| line.trim().strip_prefix("Free blocks: ")?.split_once('-'));
        let first: Option<u64> = ranges.map(|(first, _)| first.parse().expect("a number")).next();
        disk.content_at = BLOCK_BYTES * first.expect("a free block");
        // Direct I/O: the page cache of the lower device must not answer requests of the upper one.
        disk.upper = attach(&disk.lower, true);
        run(Command::new("mount").arg(&disk.upper).arg(&disk.dir), COMMAND).ok();
        disk
    }

    /// Writes dirty pages back, as the kernel does by itself. Ignores a failure: the kernel reports it to each program
    /// that asks.
    pub fn write_back(&self) {
        run(Command::new("sync").arg("-f").arg(&self.dir), COMMAND);
    }

    /// From now on every write of content, and every read of content that is not in memory, is an I/O error.
    pub fn fail(&self) {
        limit(&self.lower, self.content_at).unwrap();
    }

    /// Ends the failure. The metadata of the file system is still in memory, so it continues as if nothing had
    /// happened.
    pub fn mend(&self) {
        limit(&self.lower, 0).unwrap();
    }

    /// Drops the content files of the fast-pool directory on this disk from the page cache: reads go to the device
    /// again.
    pub fn forget_content(&self) {
        self.forget_content_of(&self.dir);
    }

    /// The same for a fast-pool directory in a directory of this disk.
    pub fn forget_content_of(&self, fast: &Path) {
        let dirs = fs::read_dir(fast.join("content")).unwrap();
        for file in dirs.flat_map(|dir| fs::read_dir(dir.unwrap().path()).unwrap()) {
            let file = File::open(file.unwrap().path()).unwrap();
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Otherwise dirty pages could not be written, and the unmount would wait for them.
        let _ = limit(&self.lower, 0);
        for (program, what) in [("umount", &self.dir), ("losetup", &self.upper), ("losetup", &self.lower)] {
            let flag = if program == "umount" { "-l" } else { "-d" };
            let child = Command::new(program).arg(flag).arg(what).stderr(std::process::Stdio::null()).spawn();
            if let Ok(mut child) = child
                && process::wait(&mut child, Duration::from_secs(20)).is_none()
            {
                let _ = child.kill();
            }
        }
        let _ = fs::remove_file(&self.image);
    }
}

#[track_caller]
fn attach(to: &Path, direct: bool) -> PathBuf {
    let direct = if direct { "--direct-io=on" } else { "--direct-io=off" };
    let said = run(Command::new("losetup").args(["--find", "--show", direct]).arg(to), COMMAND);
    assert!(said.code == Some(0), "this test needs loop devices (modprobe loop; mknod): {said}");
    PathBuf::from(said.out.trim())
}

/// Limits the length of a loop device; 0 means the length of the file or device below it.
fn limit(device: &Path, bytes: u64) -> std::io::Result<()> {
    let device = File::open(device)?;
    let mut status = [0u8; STATUS_BYTES];
    let call = |request, status: &mut [u8; STATUS_BYTES]| {
        // SAFETY: both requests take a structure of that size, which outlives the call.
        match unsafe { libc::ioctl(device.as_raw_fd(), request, status.as_mut_ptr()) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    call(GET_STATUS, &mut status)?;
    status[SIZE_LIMIT_AT..SIZE_LIMIT_AT + 8].copy_from_slice(&bytes.to_le_bytes());
    call(SET_STATUS, &mut status)
}
