//! The cost of a miss: a round trip to the pool, and the transfer of the bytes.

/// The mean weighs a use by 1 in this many.
const MEMORY_USES: f64 = 4096.0;

/// The cost of fetching content, by its size, in units of a mean transfer.
///
/// A round trip is taken to cost as much as the transfer of content of the mean size. So a policy with these weights
/// serves readers that wait for files and readers that wait for bytes: a miss counts for its share of the missed files
/// and of the missed bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FetchCost {
    uses: f64,
    mean_bytes: f64,
}

impl FetchCost {
    /// Notes a request for content of `bytes`.
    pub fn used(&mut self, bytes: u64) {
        self.uses = (self.uses + 1.0).min(MEMORY_USES);
        self.mean_bytes += (bytes as f64 - self.mean_bytes) / self.uses;
    }

    /// Returns the cost of fetching one byte of content of this size, if a round trip costs `round_trip` (0 to 1) of a
    /// mean transfer. Finite and positive.
    pub fn by_byte(&self, bytes: u64, round_trip: f64) -> f64 {
        round_trip / (bytes as f64).max(1.0) + 1.0 / self.mean_bytes.max(1.0)
    }
}
