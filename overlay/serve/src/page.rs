//! The page of a mount: its files, its data once a second, and the tree of what is resident.
//!
//! Everything that the page needs is in the program: it makes no request to another host, and works without a network.

mod events;
mod job;
mod residency;

use bytes::Bytes;
use forebay_api::jobs::{JobFile, JobSummary, Sample};
use forebay_api::operator::Status;
use forebay_api::peers::PeersStatus;
use forebay_backends::Result;
use forebay_backends::decorators::{MetricsSnapshot, SlowCall};
use futures::future::BoxFuture;
use http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS};
use http::{HeaderValue, Response, StatusCode};

pub use events::Events;
pub use job::job;
pub use residency::Residency;

use crate::ReplyBody;
use crate::metrics::OperationCounts;

/// What the page shows of a mount beside what the engine knows.
pub trait MountSource: Send + Sync + 'static {
    /// Adds to the state what the engine does not know.
    fn complete(&self, status: Status) -> Status;
    /// Returns the counts of the calls to the pool.
    fn pool_calls(&self) -> MetricsSnapshot;
    /// Returns the last calls to the pool that took long.
    fn slow_calls(&self) -> Vec<SlowCall>;
    /// Returns the counts of the requests of the kernel.
    fn operations(&self) -> OperationCounts;
    /// Returns what is known of the other nodes. `None`: the node has no peers file.
    fn peers(&self) -> Option<PeersStatus>;
    /// Returns the traffic of all jobs, for a caller that asks once a second.
    fn sample(&self) -> BoxFuture<'_, Result<Sample>>;
    /// Returns all known jobs, the oldest first.
    fn jobs(&self) -> BoxFuture<'_, Result<Vec<JobSummary>>>;
    /// Returns the files that the newest job of a name used. `None`: there is no such job.
    fn job_files(&self, id: String) -> BoxFuture<'_, Result<Option<Vec<JobFile>>>>;
}

fn json(value: &serde_json::Value) -> Response<ReplyBody> {
    let mut response = Response::new(ReplyBody::from(value.to_string()));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

fn failed(status: StatusCode, why: &str) -> Response<ReplyBody> {
    let mut response = json(&serde_json::json!({ "error": why }));
    *response.status_mut() = status;
    response
}

/// The page runs its own scripts alone, and connects to this server alone.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";

/// The files of the page: path, type, content.
const FILES: [(&str, &str, &str); 9] = [
    ("/", HTML, include_str!("page/assets/index.html")),
    ("/page.css", CSS, include_str!("page/assets/page.css")),
    ("/page.js", SCRIPT, include_str!("page/assets/page.js")),
    ("/format.js", SCRIPT, include_str!("page/assets/format.js")),
    ("/tables.js", SCRIPT, include_str!("page/assets/tables.js")),
    ("/treemap.js", SCRIPT, include_str!("page/assets/treemap.js")),
    ("/uPlot.iife.min.js", SCRIPT, include_str!("page/assets/uPlot.iife.min.js")),
    ("/uPlot.min.css", CSS, include_str!("page/assets/uPlot.min.css")),
    ("/uPlot.LICENSE", TEXT, include_str!("page/assets/uPlot.LICENSE")),
];

/// Returns a file of the page. `None`: it has no such file.
pub fn file(path: &str) -> Option<Response<ReplyBody>> {
    let (_, kind, text) = FILES.iter().find(|(name, ..)| *name == path)?;
    let mut response = Response::new(ReplyBody::from(Bytes::from_static(text.as_bytes())));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    // After an upgrade, the old script would not understand the new data.
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    Some(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The most bytes of the whole page.
    const PAGE_BYTES: usize = 300 << 10;

    #[test]
    fn the_page_is_small_and_names_no_other_host() {
        let bytes: usize = FILES.iter().map(|(.., text)| text.len()).sum();
        println!("{bytes} bytes");
        assert!(bytes <= PAGE_BYTES, "{bytes}");
        for (name, kind, text) in FILES {
            // uPlot names its home page in a comment, and the namespaces of SVG are names.
            let is_own = !name.starts_with("/uPlot");
            let urls = text.matches("://").count() - text.matches("http://www.w3.org/").count();
            assert!(!is_own || urls == 0, "{name} names another host");
            assert!(kind != HTML || !text.contains("<script>"), "an inline script would not run");
        }
    }

    #[test]
    fn a_file_is_found_by_its_whole_path() {
        assert_eq!(file("/").unwrap().headers()[CONTENT_TYPE], HTML);
        assert!(file("/page.js").is_some() && file("/page.rs").is_none() && file("").is_none());
    }
}
