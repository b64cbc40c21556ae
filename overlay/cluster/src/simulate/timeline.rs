//! What was read when.

use std::time::Duration;

use crate::Moment;

/// The points of a timeline.
const POINTS: u64 = 200;

/// How far the cluster was at one moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClusterProgress {
    pub at: Duration,
    /// Of all bytes that all jobs read, between 0 and 1.
    pub read: f64,
    /// Bytes that had left the pool, as a multiple of the data set.
    pub pool_copies: f64,
}

/// Points at equal steps of what was read.
#[derive(Debug, Clone, Default)]
pub struct Timeline {
    points: Vec<ClusterProgress>,
    all: u64,
    read: u64,
}

impl Timeline {
    /// `all` is the number of ranges that all jobs read together.
    pub(super) fn new(all: u64) -> Self {
        Self { points: Vec::with_capacity(POINTS as usize + 2), all, read: 0 }
    }

    /// A job has one range more.
    pub(super) fn note(&mut self, at: Moment, pool_copies: f64) {
        self.read += 1;
        let is_due = self.read == 1 || self.read * POINTS / self.all != (self.read - 1) * POINTS / self.all;
        if is_due {
            self.points.push(ClusterProgress { at, read: self.read as f64 / self.all as f64, pool_copies });
        }
    }

    pub fn points(&self) -> &[ClusterProgress] {
        &self.points
    }
}
