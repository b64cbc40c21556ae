//! The `oracleGeneral` format of libCacheSim: records of 24 bytes, little endian, packed.

use super::{Trace, TraceError};

/// `u32` time in seconds, `u64` object, `u32` bytes, `i64` index of the next request for the same object (-1: none).
const RECORD_BYTES: usize = 24;

/// Parses a decompressed trace.
///
/// # Errors
/// Describes the mismatch if the bytes are not of this format: a wrong length, or a next request that lies in the past.
pub fn parse(bytes: &[u8]) -> Result<Trace, TraceError> {
    let (records, rest) = bytes.as_chunks::<RECORD_BYTES>();
    if !rest.is_empty() {
        return Err(TraceError::Truncated { records: records.len(), left_over_bytes: rest.len() });
    }
    if records.is_empty() {
        return Err(TraceError::Empty);
    }
    if records.len() >= u32::MAX as usize {
        return Err(TraceError::TooManyContents);
    }
    for (index, record) in records.iter().enumerate() {
        let next = i64::from_le_bytes(field(record, 16));
        // Traces that were cut out of longer ones name requests beyond their end, and some traces count from 1. Only
        // this condition holds for all of them, and the field is not used otherwise.
        if next != -1 && next <= index as i64 {
            return Err(TraceError::Record { index, why: format!("its next request would be number {next}") });
        }
    }
    Trace::new(records.iter().map(|record| {
        let size = u32::from_le_bytes(field(record, 12));
        (u64::from_le_bytes(field(record, 4)), u64::from(size))
    }))
}

fn field<const N: usize>(record: &[u8; RECORD_BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|byte| record[at + byte])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(time: u32, object: u64, bytes: u32, next: i64) -> Vec<u8> {
        let mut record = time.to_le_bytes().to_vec();
        record.extend(object.to_le_bytes());
        record.extend(bytes.to_le_bytes());
        record.extend(next.to_le_bytes());
        record
    }

    #[test]
    fn records_are_packed_and_little_endian() {
        let bytes = [record(0, 1 << 40, 512, 2), record(1, 7, 100, -1), record(1, 1 << 40, 512, -1)].concat();
        let trace = parse(&bytes).unwrap();
        assert_eq!((trace.requests(), trace.bytes(0), trace.bytes(1)), (&[0, 1, 0][..], 512, 100));
    }

    #[test]
    fn what_is_cut_short_or_something_else_is_refused() {
        let whole = [record(0, 1, 1, -1), record(1, 2, 1, -1)].concat();
        assert_eq!(parse(&whole[..30]), Err(TraceError::Truncated { records: 1, left_over_bytes: 6 }));
        assert_eq!(parse(&[]), Err(TraceError::Empty));
        assert!(matches!(parse(&record(0, 1, 1, -2)), Err(TraceError::Record { index: 0, .. })));
        let back_in_time = [record(5, 1, 1, -1), record(4, 2, 1, 1)].concat();
        assert!(matches!(parse(&back_in_time), Err(TraceError::Record { index: 1, .. })));
    }
}
