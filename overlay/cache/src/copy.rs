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

/// An error of a copy, and which of the two files has it.
#[derive(Debug)]
struct CopyFailure {
    is_of_target: bool,
    error: io::Error,
}

fn of_source(error: impl Into<io::Error>) -> CopyFailure {
    CopyFailure { is_of_target: false, error: error.into() }
}

fn of_target(error: impl Into<io::Error>) -> CopyFailure {
    CopyFailure { is_of_target: true, error: error.into() }
}

impl ContentStore {
    /// Copies a content file to an empty one of another device. An error of a device is noted for the device that has it.
    ///
    /// # Errors
    /// Errors of the two files.
    pub fn copy_between(
        &self,
        id: ContentId,
        (target, to): (ContentId, &File),
        goes_on: impl Fn() -> bool,
    ) -> Result<CopyEnd> {
        let path = self.path(id)?;
        let copied = File::open(&path).map_err(of_source).and_then(|from| copy(&from, to, goes_on));
        copied.map_err(|failure| {
            let device_of = if failure.is_of_target { target } else { id };
            // A content file that ends too early says nothing of its device.
            let is_of_system = failure.error.raw_os_error().is_some();
            let error = Error::io(failure.error, Side::Cache, format!("copy content file {}", path.display()));
            if is_of_system {
                self.note_error(device_of, &error);
            }
            error
        })
    }

    /// Copies a content file to an empty file. `goes_on` is asked before each chunk.
    ///
    /// # Errors
    /// Errors of the two files.
    pub fn copy_content(&self, id: ContentId, to: &File, goes_on: impl Fn() -> bool) -> Result<CopyEnd> {
        let path = self.path(id)?;
        // A file of its own: the open one is shared, and its position is not to change.
        let copied = File::open(&path).map_err(of_source).and_then(|from| copy(&from, to, goes_on));
        copied.map_err(|failure| Error::io(failure.error, Side::Cache, format!("copy content file {}", path.display())))
    }
}

fn copy(from: &File, to: &File, goes_on: impl Fn() -> bool) -> std::result::Result<CopyEnd, CopyFailure> {
    if rustix::fs::ioctl_ficlone(to, from).is_err() {
        let size = from.metadata().map_err(of_source)?.size();
        let mut buffer = Vec::new();
        let mut at = 0;
        while let Some((mut start, end)) = next_data(from, at, size).map_err(of_source)? {
            while start < end {
                if !goes_on() {
                    return Ok(CopyEnd::Stopped);
                }
                start += copy_some(from, to, start, end.min(start + CHUNK_BYTES), &mut buffer)?;
            }
            at = end;
        }
        to.set_len(size).map_err(of_target)?;
    }
    Ok(CopyEnd::Whole(to.metadata().map_err(of_target)?.blocks() * 512))
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
fn copy_some(
    from: &File,
    to: &File,
    start: u64,
    end: u64,
    buffer: &mut Vec<u8>,
) -> std::result::Result<u64, CopyFailure> {
    let (mut source, mut target) = (start, start);
    let copied = rustix::fs::copy_file_range(from, Some(&mut source), to, Some(&mut target), (end - start) as usize);
    if let Ok(copied) = copied
        && copied > 0
    {
        return Ok(copied as u64);
    }
    // Two file systems, or one that copies nothing: bytes are read and written. After an error, that tells which of the
    // files has it.
    buffer.resize((end - start) as usize, 0);
    match from.read_at(buffer, start).map_err(of_source)? {
        0 => Err(of_source(io::ErrorKind::UnexpectedEof)),
        read => to.write_all_at(&buffer[..read], start).map(|()| read as u64).map_err(of_target),
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
    fn an_error_is_of_the_file_that_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, [7u8; 100]).unwrap();
        let (reads, writes) = (File::open(&path).unwrap(), File::options().write(true).open(&path).unwrap());
        let other = tempfile::tempfile().unwrap();
        let failure = copy(&writes, &other, || true).unwrap_err();
        assert_eq!((failure.is_of_target, failure.error.raw_os_error()), (false, Some(libc::EBADF)));
        other.write_all_at(&[8; 100], 0).unwrap();
        let failure = copy(&other, &reads, || true).unwrap_err();
        assert_eq!((failure.is_of_target, failure.error.raw_os_error()), (true, Some(libc::EBADF)));
        // The file ends before its data.
        let failure = copy_some(&other, &tempfile::tempfile().unwrap(), 200, 300, &mut Vec::new()).unwrap_err();
        assert_eq!((failure.is_of_target, failure.error.raw_os_error()), (false, None));
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
