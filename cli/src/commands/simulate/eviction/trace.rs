//! Files with traces.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use forebay_daemon::{Failure, FailureKind};
use forebay_prefetch::simulate::{Trace, jobs, oracle_general};

/// The most bytes of a decompressed trace, which is held in memory.
const TRACE_BYTES_MAX: u64 = 16 << 30;

/// The first bytes of a zstd frame.
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xB5, 0x2F, 0xFD];

/// Reads a trace in any supported format.
///
/// # Errors
/// Names the file and the mistake.
pub fn read(path: &Path) -> Result<Trace, Failure> {
    let bytes =
        decompressed(path).map_err(|error| Failure::new(FailureKind::Usage, format!("{}: {error}", path.display())))?;
    // Binary records contain zeros, and text does not.
    let is_text = bytes.trim_ascii_start().starts_with(b"{") && !bytes.contains(&0);
    let parsed = if is_text { jobs::parse(&bytes) } else { oracle_general::parse(&bytes) };
    parsed.map_err(|why| {
        let known = "a trace is of libCacheSim's oracleGeneral format, or what `forebay --json job show` prints";
        Failure::new(FailureKind::Usage, format!("{} is no trace: {why} ({known})", path.display()))
    })
}

fn decompressed(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut file = BufReader::new(File::open(path)?);
    let mut magic = Vec::new();
    file.by_ref().take(ZSTD_MAGIC.len() as u64).read_to_end(&mut magic)?;
    let is_zstd = magic == ZSTD_MAGIC;
    let whole = magic.as_slice().chain(file);
    let mut bytes = Vec::new();
    if is_zstd {
        let limited = zstd::Decoder::new(whole)?.take(TRACE_BYTES_MAX + 1).read_to_end(&mut bytes);
        limited.map_err(|error| {
            std::io::Error::new(error.kind(), format!("cannot be decompressed ({error}): is it cut short?"))
        })?;
    } else {
        whole.take(TRACE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    }
    if bytes.len() as u64 > TRACE_BYTES_MAX {
        return Err(std::io::Error::other("has more than 16 GiB of requests: give a part of it"));
    }
    Ok(bytes)
}
