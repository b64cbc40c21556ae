//! Families of metrics, as a collector writes them.

use std::collections::HashMap;
use std::fmt;

use forebay_backends::latency::LatencySnapshot;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;

/// The labels of one sample: names and values.
type Labels<'a, const N: usize> = [(&'static str, &'a str); N];

/// Writes the families of one collector. The names are without prefix, and those of counters without `_total`.
pub(super) struct Exposition<'a>(pub DescriptorEncoder<'a>);

impl Exposition<'_> {
    pub fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        self.0.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)
    }

    pub fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        let mut encoder = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        encoder.encode_counter::<NoLabelSet, u64, u64>(&value, None)
    }

    pub fn gauges<'l, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels<'l, N>, f64)>,
    ) -> fmt::Result {
        let mut encoder = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in samples {
            encoder.encode_family(&labels)?.encode_gauge(&value)?;
        }
        Ok(())
    }

    pub fn counters<'l, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels<'l, N>, u64)>,
    ) -> fmt::Result {
        let mut encoder = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in samples {
            encoder.encode_family(&labels)?.encode_counter::<NoLabelSet, u64, u64>(&value, None)?;
        }
        Ok(())
    }

    /// Latencies, in seconds.
    pub fn histograms<'l, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels<'l, N>, LatencySnapshot)>,
    ) -> fmt::Result {
        let mut encoder = self.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        let no_exemplars: Option<&HashMap<usize, Exemplar<NoLabelSet, f64>>> = None;
        for (labels, latency) in samples {
            let (sum, count) = (latency.sum_us as f64 / 1e6, latency.count());
            encoder.encode_family(&labels)?.encode_histogram(sum, count, &latency.in_seconds(), no_exemplars)?;
        }
        Ok(())
    }

    pub fn info<const N: usize>(&mut self, name: &str, help: &str, labels: Labels<'_, N>) -> fmt::Result {
        self.0.encode_descriptor(name, help, None, MetricType::Info)?.encode_info(&labels)
    }
}
