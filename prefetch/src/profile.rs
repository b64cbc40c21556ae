//! What the runs of one signature read, and what the next run will read.
//!
//! A profile remembers the last [`RUNS_MAX`] runs: their parameters, and for each file the runs that used it. The
//! prediction for a run follows from how often a path was used lately. For paths that move with a parameter, with the
//! date or with a counter, it follows from how they moved before (`predict`).

mod codec;
mod document;
mod expected;
mod field;
mod history;
mod masks;
mod motion;
mod predict;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use crate::signature::digits::has_hash;
use crate::signature::{Invocation, Parameters, Signature};

pub use codec::DecodeError;
pub use document::{DocumentError, FileDocument, ParameterDocument, ProfileDocument, RunDocument};
pub use expected::{ExpectedRead, Reason};

/// Runs that a profile remembers. One byte stores in which of them a file was used.
pub const RUNS_MAX: usize = 8;

/// The most files that a profile remembers: those that were used most recently and most often. About 100 bytes each in
/// memory.
pub const FILES_MAX: usize = 1 << 20;

/// The most bytes of all paths of a profile together.
pub const PATHS_BYTES_MAX: usize = 128 << 20;

/// The longest path that is remembered, in bytes: Linux's own limit.
pub const PATH_BYTES_MAX: usize = 4096;

/// A file whose name contains a hash, and that only one run used, is forgotten after this many further runs: no other
/// name follows from it.
const HASHED_RUNS: u32 = 3;

/// The weight of a run relative to the next one. The weights of 8 runs are 1, 0.7, 0.49 ... 0.08, so that a file that
/// was used in the last three of many runs counts two thirds.
pub const DECAY_PER_RUN: f64 = 0.7;

/// The used parts of a file, at a granularity that depends on its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parts {
    /// Bytes of one part, at least 1.
    pub part_bytes: u64,
    /// One bit for each of 256 parts. The last part also covers everything beyond it.
    pub bits: [u64; 4],
}

impl Parts {
    /// Returns the bytes of a file of `size_bytes` that are in the parts.
    pub fn bytes(&self, size_bytes: u64) -> u64 {
        let last = 255 * u128::from(self.part_bytes);
        let begun = |part: u32| u128::from(self.part_bytes) * u128::from(part);
        let in_part = |part: u32| {
            let left = u128::from(size_bytes).saturating_sub(begun(part));
            if begun(part) == last { left } else { left.min(u128::from(self.part_bytes)) }
        };
        let set = |part: &u32| self.bits[(part / 64) as usize] >> (part % 64) & 1 == 1;
        (0..256).filter(set).map(in_part).sum::<u128>() as u64
    }

    fn count(&self) -> u32 {
        self.bits.iter().map(|word| word.count_ones()).sum()
    }

    /// Returns the used parts after another use, `new`: both together, unless more than half of them would be out of
    /// use. A program that reads other parts each time must not end with all of them.
    fn followed_by(self, new: Self) -> Self {
        if self.part_bytes != new.part_bytes {
            return new;
        }
        let mut both = new;
        both.bits.iter_mut().zip(self.bits).for_each(|(to, from)| *to |= from);
        if both.count() <= 2 * new.count() { both } else { new }
    }
}

/// One run's use of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileUse {
    /// Relative to the mount, components separated by `/`; any text. A path longer than [`PATH_BYTES_MAX`] is not
    /// remembered.
    pub path: String,
    pub size_bytes: u64,
    /// In the order of first uses, from 1.
    pub rank: u32,
    /// `None`: the whole file.
    pub parts: Option<Parts>,
}

/// One remembered run.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RememberedRun {
    ended_unix: u64,
    parameters: Parameters,
}

/// One remembered file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RememberedFile {
    path: Box<str>,
    size_bytes: u64,
    rank: u32,
    /// Bit 0: used in the newest run, bit 1: in the one before it. Never 0.
    used: u8,
    parts: Option<Box<Parts>>,
}

/// The record of one file, for reports.
#[derive(Debug, Clone, PartialEq)]
pub struct FileSummary<'a> {
    pub path: &'a str,
    /// At most a sixteenth too large, if the newest run did not use the file.
    pub size_bytes: u64,
    /// In the run that used it last, from 1.
    pub rank: u32,
    /// The probability that the next run, with any parameters, uses it, 0 to 1.
    pub probability: f64,
    /// Runs that used it, out of `seen`.
    pub used: u32,
    /// Remembered runs.
    pub seen: u32,
    /// The end of the run that used it last, in seconds since 1970.
    pub last_seen_unix: u64,
    pub parts: Option<Parts>,
}

/// See the head of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    /// One of the runs, for reports and for the signature.
    example: Invocation,
    /// The newest first, at most [`RUNS_MAX`].
    runs: Vec<RememberedRun>,
    /// Sorted by path, each path once; at most [`FILES_MAX`].
    files: Vec<RememberedFile>,
}

impl Profile {
    /// Returns a profile without runs.
    pub fn new(example: &Invocation) -> Self {
        Self { example: example.bounded().into_owned(), runs: Vec::new(), files: Vec::new() }
    }

    /// Adds one run. If a path occurs twice, its first use counts.
    pub fn fold(&mut self, invocation: &Invocation, ended_unix: u64, mut uses: Vec<FileUse>) {
        self.runs.insert(0, RememberedRun { ended_unix, parameters: invocation.parameters() });
        self.runs.truncate(RUNS_MAX);
        uses.retain(|u| u.path.len() <= PATH_BYTES_MAX && !u.path.is_empty());
        uses.sort_unstable_by(|a, b| a.path.cmp(&b.path).then(a.rank.cmp(&b.rank)));
        uses.dedup_by(|later, first| later.path == first.path);
        let mut files = Vec::with_capacity(uses.len().max(self.files.len()));
        let mut known = std::mem::take(&mut self.files).into_iter().peekable();
        for used in uses {
            while let Some(old) = known.next_if(|file| *file.path < *used.path) {
                files.extend(old.unused());
            }
            files.push(match known.next_if(|file| *file.path == *used.path) {
                Some(file) => file.used_again(used),
                None => RememberedFile::new(used),
            });
        }
        files.extend(known.filter_map(RememberedFile::unused));
        self.files = bounded(files);
    }

    /// Predicts what a job with this invocation will read, in the order of reading, each path once. Paths that were
    /// moved may not exist.
    pub fn predict(&self, invocation: &Invocation) -> Vec<ExpectedRead> {
        predict::predict(self, invocation, None)
    }

    /// Like [`Self::predict`], with the time in seconds since 1970. With it, paths that move with the day of the run
    /// are predicted after weekends and breaks, and after one run.
    pub fn predict_at(&self, invocation: &Invocation, now_unix: u64) -> Vec<ExpectedRead> {
        predict::predict(self, invocation, Some(now_unix))
    }

    /// Predicts for a job without a profile of its own, from this profile of a similar job. Every probability is
    /// multiplied by `similarity`, the similarity of the signatures, 0 to 1.
    pub fn predict_similar(&self, invocation: &Invocation, similarity: f64) -> Vec<ExpectedRead> {
        let signature = self.signature().as_str().to_owned();
        let mut expected = self.predict(invocation);
        for file in &mut expected {
            file.probability *= similarity.clamp(0.0, 1.0);
            let (used, seen) = file.why.runs();
            file.why = Reason::Similar { signature: signature.clone(), used, seen };
        }
        expected
    }

    /// Returns the profile without one of its runs.
    fn without(&self, run: usize) -> Self {
        let kept = !(1 << run);
        let mut out = self.clone();
        out.runs.remove(run);
        out.files.iter_mut().for_each(|file| file.used = masks::compressed(file.used, kept));
        out.files.retain(|file| file.used != 0);
        out
    }

    /// Returns one of the runs: an example of the signature in full.
    pub fn example(&self) -> &Invocation {
        &self.example
    }

    pub fn signature(&self) -> Signature {
        self.example.signature()
    }

    /// Returns the number of remembered runs, at most [`RUNS_MAX`].
    pub fn runs(&self) -> usize {
        self.runs.len()
    }

    /// Returns the end of the newest run, in seconds since 1970; 0 without runs.
    pub fn last_seen_unix(&self) -> u64 {
        self.runs.first().map_or(0, |run| run.ended_unix)
    }

    /// Returns the files, sorted by path.
    pub fn files(&self) -> impl Iterator<Item = FileSummary<'_>> {
        self.files.iter().map(|file| FileSummary {
            path: &file.path,
            size_bytes: file.size_bytes,
            rank: file.rank,
            probability: weight(file.used) / weight(all(self.runs.len())),
            used: file.used.count_ones(),
            seen: self.runs.len() as u32,
            last_seen_unix: self.runs.get(file.used.trailing_zeros() as usize).map_or(0, |run| run.ended_unix),
            parts: file.parts.as_deref().copied(),
        })
    }
}

impl RememberedFile {
    fn new(used: FileUse) -> Self {
        let parts = used.parts.map(Box::new);
        Self { path: used.path.into(), size_bytes: used.size_bytes, rank: used.rank, used: 1, parts }
    }

    fn used_again(mut self, new: FileUse) -> Self {
        self.used = self.used << 1 | 1;
        self.rank = new.rank;
        self.size_bytes = new.size_bytes;
        self.parts = match (self.parts, new.parts) {
            (Some(old), Some(new)) => Some(Box::new(old.followed_by(new))),
            (_, new) => new.map(Box::new),
        };
        self
    }

    /// Returns the file after a run that did not use it; `None` once no remembered run used it. From now on, its size
    /// only serves as an estimate for other files.
    fn unused(mut self) -> Option<Self> {
        self.used <<= 1;
        self.size_bytes = rounded_up(self.size_bytes);
        let is_spent = self.used.is_power_of_two() && self.used >= 1 << HASHED_RUNS && has_hash(&self.path);
        (self.used != 0 && !is_spent).then_some(self)
    }
}

/// Rounds up to five binary digits: at most a sixteenth more, and the stored size takes a third of the space.
fn rounded_up(bytes: u64) -> u64 {
    let unit = 1_u64 << bytes.checked_ilog2().unwrap_or(0).saturating_sub(4);
    bytes.div_ceil(unit).saturating_mul(unit)
}

/// Returns the most probable files, within the limits, sorted by path.
fn bounded(mut files: Vec<RememberedFile>) -> Vec<RememberedFile> {
    let bytes: usize = files.iter().map(|file| file.path.len()).sum();
    if files.len() <= FILES_MAX && bytes <= PATHS_BYTES_MAX {
        return files;
    }
    files.sort_by(|a, b| weight(b.used).total_cmp(&weight(a.used)));
    files.truncate(FILES_MAX);
    let mut left = PATHS_BYTES_MAX;
    files.retain(|file| {
        let fits = file.path.len() <= left;
        left = left.saturating_sub(file.path.len());
        fits
    });
    files.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    files
}

/// The weight of each mask: the sum of the weights of its runs.
const WEIGHTS: [f64; 256] = {
    let mut weights = [0.0; 256];
    let (mut run, mut of_run) = (0, 1.0);
    while run < RUNS_MAX {
        let mut mask = 0;
        while mask < 256 {
            if mask >> run & 1 == 1 {
                weights[mask] += of_run;
            }
            mask += 1;
        }
        of_run *= DECAY_PER_RUN;
        run += 1;
    }
    weights
};

/// Returns the weight of the runs of a mask, each weighed by its age.
fn weight(used: u8) -> f64 {
    WEIGHTS[usize::from(used)]
}

/// Returns the mask of the newest `runs`, up to 8.
fn all(runs: usize) -> u8 {
    (1_u16 << runs.min(RUNS_MAX)).wrapping_sub(1) as u8
}
