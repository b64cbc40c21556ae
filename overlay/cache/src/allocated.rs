//! Which bytes of a file have space on the device (`FS_IOC_FIEMAP`, Documentation/filesystems/fiemap.rst of Linux).

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;

/// `FS_IOC_FIEMAP`: `_IOWR('f', 11, struct fiemap)`, of a header of 32 bytes.
const FIEMAP: libc::Ioctl = 0xc020_660b_u32 as libc::Ioctl;
/// Extents that one call tells of.
const EXTENTS: usize = 16;
/// `FIEMAP_EXTENT_LAST`
const LAST: u32 = 1;

/// `struct fiemap_extent` of linux/fiemap.h.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct FiemapExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// `struct fiemap` of linux/fiemap.h, with its extents.
#[repr(C)]
#[derive(Debug, Default)]
struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [FiemapExtent; EXTENTS],
}

/// Returns whether all bytes of a range have space, written or not; `None`: the file system does not tell.
pub fn has_space(file: &File, range: Range<u64>) -> Option<bool> {
    let mut at = range.start;
    while at < range.end {
        let (extent_count, length) = (EXTENTS as u32, range.end - at);
        let mut map = Fiemap { start: at, length, extent_count, ..Fiemap::default() };
        // SAFETY: the kernel reads the header, and writes at most `extent_count` extents behind it.
        let done = unsafe { libc::ioctl(file.as_raw_fd(), FIEMAP, &raw mut map) };
        if done != 0 {
            return None;
        }
        let before = at;
        for extent in map.extents.iter().take((map.mapped_extents as usize).min(EXTENTS)) {
            if extent.logical > at {
                return Some(false);
            }
            at = at.max(extent.logical.saturating_add(extent.length));
            if at < range.end && extent.flags & LAST != 0 {
                return Some(false);
            }
        }
        if at == before {
            return Some(false);
        }
    }
    Some(true)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_hole_is_seen_also_if_blocks_lie_behind_the_end() {
        let file = tempfile::tempfile_in("/var/tmp").unwrap();
        let has_space = |range: Range<u64>| has_space(&file, range).unwrap();
        file.set_len(1 << 20).unwrap();
        assert!(!has_space(0..4096));
        let keep_size = rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, keep_size, 4 << 20, 1 << 20).unwrap();
        assert!(!has_space(0..4096) && !has_space(0..1 << 20));
        // Space without data, data that is not on the device yet, and data that is.
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 8192).unwrap();
        file.write_all_at(&[1; 8192], 8192).unwrap();
        assert!(has_space(0..16384) && has_space(5000..9000) && !has_space(0..16385));
        file.sync_all().unwrap();
        assert!(has_space(0..16384) && !has_space(16000..20000));
        // Many extents: written and unwritten ones by turns.
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 1 << 20).unwrap();
        for block in (0..256).step_by(2) {
            file.write_all_at(&[1; 4096], block * 4096).unwrap();
        }
        file.sync_all().unwrap();
        assert!(has_space(0..1 << 20) && !has_space(0..(1 << 20) + 1));
    }
}
