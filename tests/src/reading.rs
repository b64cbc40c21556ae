//! Accesses that a test plans and another process carries out, in every way to read.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub const PAGE: u64 = 4096;
/// The start and the length of a read through a mapping or with O_DIRECT are multiples of this.
pub const BLOCK: u64 = PAGE;
/// The bytes that sendfile and copy_file_range move at once: the default capacity of a pipe.
pub const PIPE: u64 = 16 * PAGE;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum How {
    Read,
    Pread,
    Readv,
    IoUring,
    /// With the kernel's readahead.
    IoUringAhead,
    Sendfile,
    Splice,
    CopyFileRange,
    Direct,
    Mmap,
}

/// All ways except mappings.
pub const CALLS_TO_READ: [How; 8] =
    [How::Read, How::Pread, How::Readv, How::IoUring, How::Sendfile, How::Splice, How::CopyFileRange, How::Direct];

pub const WAYS_TO_READ: [How; 9] = [
    How::Read,
    How::Pread,
    How::Readv,
    How::IoUring,
    How::Sendfile,
    How::Splice,
    How::CopyFileRange,
    How::Direct,
    How::Mmap,
];

/// One access of a job.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Step {
    pub file: PathBuf,
    pub how: How,
    pub from: u64,
    pub len: u64,
}

/// Carries out the steps in order.
pub fn carry_out(plan: &[Step]) {
    let sink = tempfile::tempfile_in("/var/tmp").unwrap();
    let mut ring = io_uring::IoUring::new(2).unwrap();
    plan.iter().for_each(|step| step.carry_out(&sink, &mut ring));
}

impl Step {
    /// Returns the range of whole pages that the access touches, within a file of `size` bytes.
    pub fn pages(&self, size: u64) -> Range<u64> {
        self.from / PAGE * PAGE..((self.from + self.len).div_ceil(PAGE) * PAGE).min(size)
    }

    fn carry_out(&self, sink: &File, ring: &mut io_uring::IoUring) {
        let flags = if self.how == How::Direct { libc::O_DIRECT } else { 0 };
        let file = OpenOptions::new().read(true).custom_flags(flags).open(&self.file).unwrap();
        if self.how != How::IoUringAhead {
            // No readahead.
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
        }
        let (from, len) = (self.from, self.len as usize);
        let mut buffer = vec![0u8; len + BLOCK as usize];
        let aligned = buffer.as_ptr().align_offset(BLOCK as usize);
        let buffer = &mut buffer[aligned..aligned + len];
        let done = match self.how {
            How::Read => {
                rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(from)).unwrap();
                (&file).read(buffer).unwrap()
            }
            How::Pread | How::Direct => file.read_at(buffer, from).unwrap(),
            How::Readv => {
                let (a, b) = buffer.split_at_mut(len / 2);
                let mut vectors = [std::io::IoSliceMut::new(a), std::io::IoSliceMut::new(b)];
                rustix::io::preadv(&file, &mut vectors, from).unwrap()
            }
            How::IoUring | How::IoUringAhead => {
                let fd = io_uring::types::Fd(file.as_raw_fd());
                let read = io_uring::opcode::Read::new(fd, buffer.as_mut_ptr(), len as u32).offset(from).build();
                // SAFETY: the buffer outlives the wait for the completion.
                unsafe { ring.submission().push(&read).unwrap() };
                ring.submit_and_wait(1).unwrap();
                usize::try_from(ring.completion().next().unwrap().result()).unwrap()
            }
            How::Sendfile => rustix::fs::sendfile(sink, &file, Some(&mut from.clone()), len).unwrap(),
            How::CopyFileRange => {
                // copy_file_range needs source and target on the same file system.
                let here = tempfile::tempfile_in(".").unwrap();
                let device = |file: &File| file.metadata().unwrap().dev();
                let sink = if device(sink) == device(&file) { sink } else { &here };
                rustix::fs::copy_file_range(&file, Some(&mut from.clone()), sink, Some(&mut 0), len).unwrap()
            }
            How::Splice => {
                let (out, into) = rustix::pipe::pipe().unwrap();
                rustix::pipe::fcntl_setpipe_size(&into, 1 << 20).unwrap();
                let flags = rustix::pipe::SpliceFlags::empty();
                let done = rustix::pipe::splice(&file, Some(&mut from.clone()), &into, None, len, flags).unwrap();
                drop(out);
                done
            }
            How::Mmap => {
                let (flags, map_flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
                // SAFETY: a new mapping that nothing else uses, of a file that no process truncates.
                unsafe {
                    let start = rustix::mm::mmap(std::ptr::null_mut(), len, flags, map_flags, &file, from).unwrap();
                    rustix::mm::madvise(start, len, rustix::mm::Advice::Random).unwrap();
                    for page in (0..len).step_by(PAGE as usize) {
                        std::ptr::read_volatile(start.cast::<u8>().add(page));
                    }
                    rustix::mm::munmap(start, len).unwrap();
                }
                len
            }
        };
        assert_eq!(done, len, "{self:?}");
    }
}
