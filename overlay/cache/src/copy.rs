//! Copies of content files: by reference where the file system can, else chunk by chunk, and holes stay holes.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use forebay_backends::{Error, Result, Side};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::{CHUNK_BYTES, ContentId, ContentStore};

/// How a copy ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyEnd {
    /// All bytes were copied, and the copy occupies this many.
    Whole(u64),
    /// The caller did not want it any more.
    Stopped,
}

impl ContentStore {
    /// Copies a content file to an empty file. `goes_on` is asked before each chunk.
    ///
    /// # Errors
    /// Errors of the two files.
    pub fn copy_content(&self, id: ContentId, to: &File, goes_on: impl Fn() -> bool) -> Result<CopyEnd> {
        let path = self.path(id)?;
        // A file of its own: the open one is shared, and its position is not to change.
        let copied = File::open(&path).and_then(|from| copy(&from, to, goes_on));
        copied.map_err(|e| Error::io(e, Side::Cache, format!("copy content file {}", path.display())))
    }
}

fn copy(from: &File, to: &File, goes_on: impl Fn() -> bool) -> io::Result<CopyEnd> {
    if rustix::fs::ioctl_ficlone(to, from).is_err() {
        let size = from.metadata()?.size();
        let mut buffer = Vec::new();
        let mut at = 0;
        while let Some((mut start, end)) = next_data(from, at, size)? {
            while start < end {
                if !goes_on() {
                    return Ok(CopyEnd::Stopped);
                }
                start += copy_some(from, to, start, end.min(start + CHUNK_BYTES), &mut buffer)?;
            }
            at = end;
        }
        to.set_len(size)?;
    }
    Ok(CopyEnd::Whole(to.metadata()?.blocks() * 512))
}

/// Returns the first range of data from `at` on.
fn next_data(file: &File, at: u64, size: u64) -> io::Result<Option<(u64, u64)>> {
    if at >= size {
        return Ok(None);
    }
    let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        // A file system that knows no holes.
        Err(Errno::INVAL) => return Ok(Some((at, size))),
        Err(e) => return Err(e.into()),
    };
    let end = rustix::fs::seek(file, SeekFrom::Hole(start))?;
    Ok(Some((start, end)))
}

/// Copies a part of a range that is not empty. Returns how many bytes.
fn copy_some(from: &File, to: &File, start: u64, end: u64, buffer: &mut Vec<u8>) -> io::Result<u64> {
    let (mut source, mut target) = (start, start);
    match rustix::fs::copy_file_range(from, Some(&mut source), to, Some(&mut target), (end - start) as usize) {
        Ok(copied) if copied > 0 => return Ok(copied as u64),
        // Two file systems, or one that copies nothing: bytes are read and written.
        Ok(_) | Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
        Err(e) => return Err(e.into()),
    }
    buffer.resize((end - start) as usize, 0);
    match from.read_at(buffer, start)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        read => to.write_all_at(&buffer[..read], start).map(|()| read as u64),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn holes_and_bytes_are_copied_between_file_systems() {
        let (here, there) = (tempfile::tempfile().unwrap(), tempfile::tempfile_in("/dev/shm").unwrap());
        let bytes: Vec<u8> = (0..CHUNK_BYTES as usize + 77).map(|n| (n % 251) as u8).collect();
        here.write_all_at(&bytes, 5 * CHUNK_BYTES).unwrap();
        here.set_len(20 * CHUNK_BYTES + 1).unwrap();
        let CopyEnd::Whole(occupied) = copy(&here, &there, || true).unwrap() else { panic!("stopped") };
        assert!(occupied < 3 * CHUNK_BYTES, "{occupied}");
        assert_eq!(there.metadata().unwrap().len(), 20 * CHUNK_BYTES + 1);
        let mut read = vec![0; bytes.len()];
        there.read_exact_at(&mut read, 5 * CHUNK_BYTES).unwrap();
        assert!(read == bytes);
        // And back, on a file system that may copy by itself.
        let back = tempfile::tempfile().unwrap();
        assert!(matches!(copy(&there, &back, || true).unwrap(), CopyEnd::Whole(_)));
        back.read_exact_at(&mut read, 5 * CHUNK_BYTES).unwrap();
        assert!(read == bytes);
    }

    #[test]
    fn a_copy_stops_between_chunks() {
        let (here, there) = (tempfile::tempfile().unwrap(), tempfile::tempfile_in("/dev/shm").unwrap());
        here.write_all_at(&vec![7; 3 * CHUNK_BYTES as usize], 0).unwrap();
        let chunks = Cell::new(0);
        let goes_on = || chunks.replace(chunks.get() + 1) < 2;
        assert_eq!(copy(&here, &there, goes_on).unwrap(), CopyEnd::Stopped);
        assert_eq!(there.metadata().unwrap().len(), 2 * CHUNK_BYTES);
    }
}
