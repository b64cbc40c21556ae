//! Bytes that identify their writer and their offset.

use std::sync::Arc;

/// The content of a file.
pub type Content = Arc<Vec<u8>>;

/// The size of a group of bytes that identifies its writer.
const GROUP_BYTES: u64 = 16;

/// Returns the bytes that writer `tag` writes at `offset`: each group names the tag and the place, and no byte is zero.
pub fn pattern(tag: u32, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 16);
    let first = offset / GROUP_BYTES;
    let skip = (offset % GROUP_BYTES) as usize;
    let mut group = first;
    while bytes.len() < skip + len {
        bytes.extend_from_slice(b"T");
        bytes.extend_from_slice(format!("{:07x}{:08x}", tag & 0xfff_ffff, group & 0xffff_ffff).as_bytes());
        group += 1;
    }
    bytes.drain(..skip);
    bytes.truncate(len);
    bytes
}

/// Returns `content` with `data` written at `offset`; a gap before it is filled with zeros.
pub fn written(content: &Content, offset: u64, data: &[u8]) -> Content {
    let mut bytes = content.as_ref().clone();
    let end = offset as usize + data.len();
    if bytes.len() < end {
        bytes.resize(end, 0);
    }
    bytes[offset as usize..end].copy_from_slice(data);
    Arc::new(bytes)
}

pub fn truncated(content: &Content, size: u64) -> Content {
    let mut bytes = content.as_ref().clone();
    bytes.resize(size as usize, 0);
    Arc::new(bytes)
}

/// Describes bytes in a message: their number, and the runs of bytes from one writer.
pub fn describe(bytes: &[u8]) -> String {
    let mut runs: Vec<(String, usize)> = Vec::new();
    for group in bytes.chunks(GROUP_BYTES as usize) {
        let origin = match group {
            [b'T', ..] if group.len() >= 8 => String::from_utf8_lossy(&group[1..8]).trim_start_matches('0').to_owned(),
            _ if group.iter().all(|b| *b == 0) => "zeros".into(),
            _ => "?".into(),
        };
        match runs.last_mut() {
            Some((last, len)) if *last == origin => *len += group.len(),
            _ => runs.push((origin, group.len())),
        }
    }
    let runs: Vec<String> = runs.into_iter().take(8).map(|(origin, len)| format!("{origin}×{len}")).collect();
    format!("{} bytes [{}]", bytes.len(), runs.join(" "))
}
