//! The workloads: each does one thing to one directory or file and returns its rate. A workload does not know whether
//! the path is on a mount.

use std::fs::{self, File, OpenOptions};
use std::hint::black_box;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::Result;

pub const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;
/// The number of directories over which small files are spread.
const SPREAD: usize = 100;
/// The prefix of the names that [`make_many`] creates.
const ENTRY: &str = "entry-";

/// Fills the buffer with bytes that do not compress, by xorshift.
fn noise(buffer: &mut [u8], mut seed: u64) {
    seed |= 1;
    for word in buffer.chunks_exact_mut(8) {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        word.copy_from_slice(&seed.to_le_bytes());
    }
}

/// Reads a file from end to end, 1 MiB at a time, `rounds` times. Bytes per second.
pub fn read_sequentially(path: &Path, rounds: usize) -> Result<f64> {
    let mut buffer = vec![0; MIB];
    let mut total = 0;
    let start = Instant::now();
    for _ in 0..rounds {
        let mut file = File::open(path)?;
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                n => total += n,
            }
        }
    }
    Ok(total as f64 / start.elapsed().as_secs_f64())
}

/// Writes a new file, 1 MiB at a time, and syncs it. Bytes per second.
pub fn write_sequentially(path: &Path, bytes: usize) -> Result<f64> {
    let mut buffer = vec![0; MIB];
    noise(&mut buffer, 1);
    let start = Instant::now();
    let mut file = OpenOptions::new().create_new(true).write(true).open(path)?;
    for at in (0..bytes).step_by(MIB) {
        // No two blocks are the same.
        buffer[..8].copy_from_slice(&at.to_le_bytes());
        file.write_all(&buffer)?;
    }
    file.sync_all()?;
    drop(file);
    Ok(bytes as f64 / start.elapsed().as_secs_f64())
}

/// Maps a file and copies all of it, `rounds` times, each time with a new mapping. Bytes per second.
pub fn read_mapped(path: &Path, rounds: usize) -> Result<f64> {
    let len = usize::try_from(fs::metadata(path)?.len())?;
    let mut page = [0_u8; BLOCK];
    let start = Instant::now();
    for _ in 0..rounds {
        let file = File::open(path)?;
        // SAFETY: a new mapping that nothing else refers to; checked below.
        let map =
            unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if map == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        for at in (0..len - len % BLOCK).step_by(BLOCK) {
            // SAFETY: `at + BLOCK` is within the mapping, and the file does not shrink.
            unsafe { std::ptr::copy_nonoverlapping(map.cast::<u8>().add(at), page.as_mut_ptr(), BLOCK) };
            black_box(&mut page);
        }
        // SAFETY: the mapping that was made above.
        unsafe { libc::munmap(map, len) };
    }
    Ok((len * rounds) as f64 / start.elapsed().as_secs_f64())
}

/// Returns the names of `count` files, spread over directories below `root`.
pub fn spread_names(root: &Path, count: usize) -> Vec<PathBuf> {
    (0..count).map(|i| root.join(format!("d{:03}/f{:05}", i * SPREAD / count.max(1), i))).collect()
}

/// Creates the directories of [`spread_names`].
pub fn make_spread(root: &Path) -> Result<()> {
    for i in 0..SPREAD {
        fs::create_dir_all(root.join(format!("d{i:03}")))?;
    }
    Ok(())
}

/// Returns the bytes that all files below a directory occupy; 0 if it does not exist.
pub fn disk_use(dir: &Path) -> Result<u64> {
    let mut bytes = 0;
    match fs::read_dir(dir) {
        Ok(entries) => {
            for entry in entries {
                let entry = entry?;
                let metadata = entry.metadata()?;
                bytes += if metadata.is_dir() { disk_use(&entry.path())? } else { metadata.blocks() * 512 };
            }
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(error.into()),
    }
    Ok(bytes)
}

/// Creates files of 4 KiB. Files per second.
pub fn create(names: &[PathBuf]) -> Result<f64> {
    let mut buffer = [0; BLOCK];
    noise(&mut buffer, 2);
    let start = Instant::now();
    for (i, name) in names.iter().enumerate() {
        buffer[..8].copy_from_slice(&i.to_le_bytes());
        let mut file = OpenOptions::new().create_new(true).write(true).open(name)?;
        file.write_all(&buffer)?;
    }
    Ok(names.len() as f64 / start.elapsed().as_secs_f64())
}

/// Removes files. Files per second.
pub fn unlink(names: &[PathBuf]) -> Result<f64> {
    let start = Instant::now();
    for name in names {
        fs::remove_file(name)?;
    }
    Ok(names.len() as f64 / start.elapsed().as_secs_f64())
}

/// Opens, reads and closes each file, `rounds` times. Files per second.
pub fn open_read_close(names: &[PathBuf], rounds: usize) -> Result<f64> {
    let mut buffer = [0; BLOCK];
    let start = Instant::now();
    for _ in 0..rounds {
        for name in names {
            if File::open(name)?.read(&mut buffer)? != BLOCK {
                return Err(format!("{}: short", name.display()).into());
            }
        }
    }
    Ok((names.len() * rounds) as f64 / start.elapsed().as_secs_f64())
}

/// Does the same from `clients` threads at once, each with its own part of the files.
pub fn open_read_close_at_once(names: &[PathBuf], clients: usize, rounds: usize) -> Result<f64> {
    let start = Instant::now();
    std::thread::scope(|scope| {
        let parts = names.chunks(names.len().div_ceil(clients));
        let threads: Vec<_> =
            parts.map(|part| scope.spawn(move || open_read_close(part, rounds).map_err(|e| e.to_string()))).collect();
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(done) => Ok(done.map(drop)?),
            Err(_) => Err("a client panicked".into()),
        })
    })
    .map(|()| (names.len() * rounds) as f64 / start.elapsed().as_secs_f64())
}

/// Calls `lstat` on each file, `rounds` times. Files per second.
pub fn stat(names: &[PathBuf], rounds: usize) -> Result<f64> {
    let start = Instant::now();
    for _ in 0..rounds {
        for name in names {
            black_box(rustix::fs::lstat(name)?);
        }
    }
    Ok((names.len() * rounds) as f64 / start.elapsed().as_secs_f64())
}

/// Lists a tree and gets the attributes of each entry, `rounds` times. Entries per second.
pub fn walk(root: &Path, rounds: usize) -> Result<f64> {
    fn below(dir: &Path) -> std::io::Result<usize> {
        let mut count = 0;
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            count += 1;
            if entry.metadata()?.is_dir() {
                count += below(&entry.path())?;
            }
        }
        Ok(count)
    }
    let start = Instant::now();
    let mut total = 0;
    for _ in 0..rounds {
        total += below(root)?;
    }
    Ok(total as f64 / start.elapsed().as_secs_f64())
}

/// Lists one directory of `expected` entries, `rounds` times. Entries per second.
pub fn list(dir: &Path, expected: usize, rounds: usize) -> Result<f64> {
    let start = Instant::now();
    for _ in 0..rounds {
        let mut count = 0;
        for entry in fs::read_dir(dir)? {
            black_box(entry?);
            count += 1;
        }
        if count != expected {
            return Err(format!("{}: {count} entries, not {expected}", dir.display()).into());
        }
    }
    Ok((expected * rounds) as f64 / start.elapsed().as_secs_f64())
}

/// The change that is made for each entry while its directory is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    Unlink,
    /// Creates another file in the same directory.
    Create,
}

/// Reads a directory that [`make_many`] made with `expected` entries, and changes it at each of them. Entries per
/// second.
pub fn scan_and_change(dir: &Path, expected: usize, change: Change) -> Result<f64> {
    let start = Instant::now();
    let mut count = 0;
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        // A file that is created during the scan may be listed or not.
        if !name.as_encoded_bytes().starts_with(ENTRY.as_bytes()) {
            continue;
        }
        count += 1;
        match change {
            Change::Unlink => fs::remove_file(dir.join(name))?,
            Change::Create => drop(File::create_new(dir.join(format!("new-{count:06}")))?),
        }
    }
    if count != expected {
        return Err(format!("{}: {count} entries, not {expected}", dir.display()).into());
    }
    Ok(expected as f64 / start.elapsed().as_secs_f64())
}

/// Makes a directory of `count` empty files.
pub fn make_many(dir: &Path, count: usize) -> Result<()> {
    fs::create_dir_all(dir)?;
    for i in 0..count {
        File::create_new(dir.join(format!("{ENTRY}{i:06}")))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_spread_evenly_over_directories() {
        let names = spread_names(Path::new("r"), 10_000);
        assert_eq!(names.iter().filter(|n| n.starts_with("r/d042")).count(), 100);
        assert_eq!(names.len(), 10_000);
    }
}
