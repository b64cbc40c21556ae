//! Traces of Forebay: the output of `forebay job show --json ID`, one job on each line, in the order in which the jobs
//! ran.

use serde::Deserialize;
use serde_json::Value;

use super::{Trace, TraceError};

/// The fields of a job that are used.
#[derive(Debug, Deserialize)]
struct RecordedJob {
    files: Vec<RecordedFile>,
}

#[derive(Debug, Deserialize)]
struct RecordedFile {
    /// A string, or the bytes of a path that is not UTF-8.
    path: Value,
    /// All bytes that were read of it, by all opens.
    bytes: u64,
    opens: u64,
    first_use_rank: u64,
}

/// The most opens of one file that are replayed: it limits the cost of one number in the input.
const OPENS_MAX: u64 = 10_000;

/// Parses jobs. In each job, the files are requested in the order of their first uses. Files that were opened more than
/// once are requested again in the same order, as in epochs, since the record does not contain the times. The size of a
/// file is what one open read of it on average.
///
/// # Errors
/// Names the line that is no job.
pub fn parse(text: &[u8]) -> Result<Trace, TraceError> {
    let mut requests = Vec::new();
    for (index, line) in text.split(|&byte| byte == b'\n').enumerate() {
        if line.trim_ascii().is_empty() {
            continue;
        }
        let mut job: RecordedJob = serde_json::from_slice(line)
            .map_err(|error| TraceError::Line { number: index + 1, why: error.to_string() })?;
        job.files.sort_by_key(|file| file.first_use_rank);
        let mut left: Vec<(String, u64, u64)> = job.files.into_iter().map(RecordedFile::plan).collect();
        while !left.is_empty() {
            requests.extend(left.iter().map(|(path, bytes, _)| (path.clone(), *bytes)));
            left.iter_mut().for_each(|(_, _, opens)| *opens -= 1);
            left.retain(|(_, _, opens)| *opens > 0);
            if requests.len() >= u32::MAX as usize {
                return Err(TraceError::TooManyContents);
            }
        }
    }
    match requests.is_empty() {
        true => Err(TraceError::Empty),
        false => Trace::new(requests),
    }
}

impl RecordedFile {
    /// Returns its path, its size, and the number of requests for it.
    fn plan(self) -> (String, u64, u64) {
        // A file that was inherited, or opened before the job began, has bytes and no open.
        let opens = self.opens.max(1);
        (self.path.to_string(), self.bytes.div_ceil(opens), opens.min(OPENS_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: &str = r#"{"id":"a","files":[{"path":"b","bytes":10,"opens":1,"first_use_rank":2,"parts":null},
        {"path":"a","bytes":30,"opens":3,"first_use_rank":1}]}"#;

    #[test]
    fn files_come_in_the_order_of_first_uses_and_again_as_often_as_they_were_opened() {
        let line = JOB.replace('\n', " ");
        let trace = parse(format!("{line}\n\n{line}\n").as_bytes()).unwrap();
        assert_eq!(trace.requests(), [0, 1, 0, 0, 0, 1, 0, 0]);
        assert_eq!((trace.bytes(0), trace.bytes(1)), (10, 10));
    }

    #[test]
    fn a_line_that_is_no_job_is_named() {
        let text = format!("{}\n{{\"id\":1}}\n", JOB.replace('\n', " "));
        assert!(matches!(parse(text.as_bytes()), Err(TraceError::Line { number: 2, .. })));
        assert_eq!(parse(b"\n"), Err(TraceError::Empty));
    }
}
