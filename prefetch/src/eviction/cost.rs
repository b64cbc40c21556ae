//! What a miss costs: a round trip to the pool, and the transfer of the bytes.

/// How fast the mean follows: the weight of a use is 1 in so many.
const MEMORY_USES: f64 = 4096.0;

/// The cost of fetching content, by its size, in units of a mean transfer.
///
/// The round trip is put at what the transfer of mean content costs, so that a policy that weighs by it serves both
/// who waits for files and who waits for bytes: a miss counts for its share of the missed files and of the missed bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FetchCost {
    uses: f64,
    mean_bytes: f64,
}

impl FetchCost {
    /// Notes that content of `bytes` was asked for.
    pub fn used(&mut self, bytes: u64) {
        self.uses = (self.uses + 1.0).min(MEMORY_USES);
        self.mean_bytes += (bytes as f64 - self.mean_bytes) / self.uses;
    }

    /// What it costs to bring back one byte of content of this size, where the round trip counts for `round_trip` (0 to
    /// 1) of a mean transfer. Finite and positive.
    pub fn by_byte(&self, bytes: u64, round_trip: f64) -> f64 {
        round_trip / (bytes as f64).max(1.0) + 1.0 / self.mean_bytes.max(1.0)
    }
}
