//! Requests of the kernel or of clients.

use std::fmt;

use forebay_backends::latency::LatencySnapshot;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::exposition::Exposition;

/// The counts of the requests that a front end answers.
#[derive(Debug, Clone, Default)]
pub struct OperationCounts {
    /// By operation: from the arrival of a request to its answer.
    pub latencies: Vec<(&'static str, LatencySnapshot)>,
    /// Requests that wait for something.
    pub waiting: u64,
}

/// Exports the requests of the kernel to a mount.
pub struct OperationMetrics<F>(F);

impl<F: Fn() -> OperationCounts + Send + Sync + 'static> OperationMetrics<F> {
    /// `counts` returns the counts of the present moment.
    pub fn new(counts: F) -> Self {
        Self(counts)
    }
}

impl<F> fmt::Debug for OperationMetrics<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OperationMetrics")
    }
}

impl<F: Fn() -> OperationCounts + Send + Sync + 'static> Collector for OperationMetrics<F> {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let OperationCounts { latencies, waiting } = (self.0)();
        let mut out = Exposition(encoder);
        out.histograms(
            "fuse_request_duration_seconds",
            "Time from the arrival of a request of the kernel to its answer",
            latencies.into_iter().map(|(operation, latency)| ([("operation", operation)], latency)),
        )?;
        out.gauge(
            "fuse_requests_waiting",
            "Requests of the kernel that wait for the pool, the fast pool or an earlier request",
            waiting as f64,
        )
    }
}
