//! Metrics in the text format of Prometheus. docs/METRICS.md lists them; a test compares it with what a daemon exports.
//!
//! A scrape reads counters and the last census of the engine, so its cost does not depend on the number of files. Labels
//! have a few values each: no job, no user, no path.

mod engine;
mod exposition;
mod operations;
mod peers;
mod responses;

use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderValue, Response};
use prometheus_client::encoding::prometheus_text;
use prometheus_client::registry::Registry;

pub use engine::EngineMetrics;
pub use operations::{OperationCounts, OperationMetrics};
pub use peers::PeerMetrics;
pub use responses::ResponseMetrics;

use crate::ReplyBody;

/// What begins the name of every metric.
const PREFIX: &str = "forebay";

/// Returns an empty registry. Each part of a daemon registers its collectors in it.
pub fn registry() -> Registry {
    Registry::with_prefix(PREFIX)
}

/// Returns all metrics of a registry. Blocks while devices of the fast pool are asked for their space.
///
/// # Errors
/// A collector failed.
pub fn exposition(registry: &Registry) -> Result<Response<ReplyBody>, std::fmt::Error> {
    let mut text = String::new();
    prometheus_text::encode(&mut text, registry)?;
    let mut response = Response::new(ReplyBody::from(text));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(prometheus_text::CONTENT_TYPE));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}
