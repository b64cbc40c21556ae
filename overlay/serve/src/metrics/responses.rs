//! The responses of a cache node.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::exposition::Exposition;
use crate::cache_status::ResponseCounters;

/// Exports what a cache node answered. A mount exports no sample.
#[derive(Debug)]
pub struct ResponseMetrics(pub Option<Arc<ResponseCounters>>);

impl Collector for ResponseMetrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Exposition(encoder);
        let responses = self.0.iter().flat_map(|counters| counters.responses());
        out.counters(
            "http_responses",
            "Responses of a cache node, by where their content came from and by status",
            responses.map(|(cache, status, count)| ([("cache", cache), ("status", status)], count)),
        )?;
        let sent = self.0.iter().flat_map(|counters| counters.sent_bytes());
        out.counters(
            "http_sent_bytes",
            "Content bytes that a cache node sent, by where they came from",
            sent.map(|(cache, bytes)| ([("cache", cache)], bytes)),
        )
    }
}
