//! The rows of the table: jobs, files of a job, or files that are not in the pool yet.

use std::cmp::Ordering;

use forebay_api::jobs::Traffic;
use forebay_daemon::registry;

use super::mount_sample::{MountSample, byte_rates, per_second};
use crate::values::{bytes, shown, span};

/// What the table shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tab {
    Jobs,
    /// The files of one job.
    Files,
    Dirty,
}

impl Tab {
    pub const ALL: [Self; 3] = [Self::Jobs, Self::Files, Self::Dirty];

    pub fn columns(self) -> &'static [&'static str] {
        match self {
            Self::Jobs => &["read/s", "page cache/s", "fast pool/s", "pool/s", "written/s", "opens/s", "files", "job"],
            Self::Files => &["read/s", "page cache/s", "fast pool/s", "pool/s", "written/s", "opens/s", "file"],
            Self::Dirty => &["size", "age", "what", "file", "reason"],
        }
    }
}

/// One value in the table: how it is sorted, and how it is shown.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Number(u64, String),
    Text(String),
}

impl Value {
    pub fn text(&self) -> &str {
        match self {
            Self::Number(_, text) | Self::Text(text) => text,
        }
    }

    pub fn order(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Self::Number(ours, _), Self::Number(theirs, _)) => ours.cmp(theirs),
            _ => self.text().cmp(other.text()),
        }
    }
}

/// A row of the table. `key`: what is selected with it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TableRow {
    pub key: String,
    pub values: Vec<Value>,
}

/// Whether a column has texts, and not numbers.
pub(super) fn is_text(column: &str) -> bool {
    is_wide(column) || column == "what"
}

/// Whether a column takes the space that is left.
pub(super) fn is_wide(column: &str) -> bool {
    matches!(column, "job" | "file" | "reason")
}

fn used(traffic: &Traffic, ms: u64) -> Vec<Value> {
    let opens = per_second(traffic.opens, ms);
    let bytes = byte_rates(traffic, ms).map(|rate| Value::Number(rate, bytes(rate)));
    bytes.into_iter().chain([Value::Number(opens, opens.to_string())]).collect()
}

pub(super) fn jobs(sample: &MountSample) -> Vec<TableRow> {
    let jobs = sample.used.jobs.iter().map(|job| {
        let mut values = used(&job.traffic, sample.ms);
        values.extend([Value::Number(job.files, job.files.to_string()), Value::Text(shown(&job.id))]);
        TableRow { key: job.id.clone(), values }
    });
    let mut values = used(&sample.used.others, sample.ms);
    values.extend([Value::Number(0, String::new()), Value::Text("(no job)".into())]);
    jobs.chain([TableRow { key: String::new(), values }]).collect()
}

pub(super) fn files(sample: &MountSample) -> Vec<TableRow> {
    let rows = sample.files.iter().map(|file| {
        let mut values = used(&file.traffic, sample.ms);
        values.push(Value::Text(shown(&file.path)));
        TableRow { key: file.path.clone(), values }
    });
    rows.collect()
}

pub(super) fn dirty(sample: &MountSample) -> Vec<TableRow> {
    let now = registry::now_unix();
    let rows = sample.dirty.iter().map(|file| {
        let age = now.saturating_sub(file.since_unix);
        let reason = file.error.as_ref().unwrap_or(&file.why);
        let values = vec![
            Value::Number(file.bytes, bytes(file.bytes)),
            Value::Number(age, span(age)),
            Value::Text(file.what.name().into()),
            Value::Text(shown(&file.path)),
            Value::Text(shown(reason)),
        ];
        TableRow { key: file.path.clone(), values }
    });
    rows.collect()
}
