//! How a cache node answered a request: for the client (RFC 9211), and for the counts.

use std::sync::atomic::{AtomicU64, Ordering};

use http::header::{HeaderName, HeaderValue};
use http::{Response, StatusCode};

use crate::body::ReplyBody;

pub const CACHE_STATUS: HeaderName = HeaderName::from_static("cache-status");

/// Where the content of a response came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheResult {
    /// The fast pool; no origin was asked.
    Hit,
    /// The fast pool; the pool or the origin was asked whether the content is current.
    Confirmed,
    /// The fast pool, though the content is not fresh.
    Stale,
    /// It came from the pool or the origin, and is kept.
    Miss,
    /// It came for another client at the same time.
    Collapsed,
    /// It came from the origin, and is not kept.
    Passed,
}

impl CacheResult {
    pub const ALL: [Self; 6] = [Self::Hit, Self::Confirmed, Self::Stale, Self::Miss, Self::Collapsed, Self::Passed];

    pub fn name(self) -> &'static str {
        match self {
            Self::Hit => "hit",
            Self::Confirmed => "confirmed",
            Self::Stale => "stale",
            Self::Miss => "miss",
            Self::Collapsed => "collapsed",
            Self::Passed => "passed",
        }
    }
}

/// The result for one request, as the client is told.
#[derive(Debug, Clone)]
pub struct CacheStatus {
    result: CacheResult,
    text: HeaderValue,
}

impl CacheStatus {
    pub const HIT: Self = Self::new(CacheResult::Hit, "forebay; hit");
    pub const CONFIRMED: Self = Self::new(CacheResult::Confirmed, "forebay; hit; detail=CONFIRMED");
    /// The pool or the origin is being asked.
    pub const STALE: Self = Self::new(CacheResult::Stale, "forebay; hit; detail=STALE");
    /// The pool was asked, and does not answer.
    pub const POOL_FAILS: Self = Self::new(CacheResult::Stale, "forebay; hit; detail=POOL-FAILS");
    pub const MISS: Self = Self::new(CacheResult::Miss, "forebay; fwd=miss");

    pub const fn new(result: CacheResult, text: &'static str) -> Self {
        Self { result, text: HeaderValue::from_static(text) }
    }

    /// The fast pool has it, and it is fresh for some more seconds, or not any more.
    pub fn fresh_for(seconds: i64) -> Self {
        let text = HeaderValue::try_from(format!("forebay; hit; ttl={seconds}"));
        Self { result: CacheResult::Hit, text: text.unwrap_or(HeaderValue::from_static("forebay; hit")) }
    }

    /// Sets the status of a response.
    pub fn set(self, response: &mut Response<ReplyBody>) {
        response.headers_mut().insert(CACHE_STATUS, self.text);
        response.extensions_mut().insert(self.result);
    }

    /// Adds it after the status of the caches before this one.
    pub fn append(self, response: &mut Response<ReplyBody>) {
        response.headers_mut().append(CACHE_STATUS, self.text);
        response.extensions_mut().insert(self.result);
    }
}

/// Returns what a client was told by this node; `None` if the response is about no content.
pub fn told(response: &Response<ReplyBody>) -> Option<&str> {
    response.extensions().get::<CacheResult>()?;
    response.headers().get_all(CACHE_STATUS).iter().next_back()?.to_str().ok()
}

const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];
/// Those of [`CacheResult::ALL`], and responses about no content.
const RESULTS: usize = CacheResult::ALL.len() + 1;

/// The responses of a cache node.
#[derive(Debug, Default)]
pub struct ResponseCounters {
    responses: [[AtomicU64; CLASSES.len()]; RESULTS],
    sent_bytes: [AtomicU64; RESULTS],
}

/// The counts of one kind of responses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ResponseKind(usize);

impl ResponseCounters {
    pub(crate) fn count(&self, response: &Response<ReplyBody>) -> ResponseKind {
        let result = response.extensions().get::<CacheResult>().map_or(RESULTS - 1, |result| *result as usize);
        self.responses[result][class(response.status())].fetch_add(1, Ordering::Relaxed);
        ResponseKind(result)
    }

    pub(crate) fn count_bytes(&self, kind: ResponseKind, bytes: u64) {
        self.sent_bytes[kind.0].fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns cache result, class of the status, and number of responses, without those that there were none of.
    pub(crate) fn responses(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
        names().zip(&self.responses).flat_map(|(name, classes)| {
            let counts = CLASSES.iter().zip(classes).map(move |(class, count)| (name, *class, count));
            counts
                .map(|(name, class, count)| (name, class, count.load(Ordering::Relaxed)))
                .filter(|(.., count)| *count > 0)
        })
    }

    /// Returns cache result and bytes of content that were sent.
    pub(crate) fn sent_bytes(&self) -> impl Iterator<Item = (&'static str, u64)> {
        names().zip(self.sent_bytes.iter().map(|bytes| bytes.load(Ordering::Relaxed)))
    }
}

fn names() -> impl Iterator<Item = &'static str> {
    CacheResult::ALL.into_iter().map(CacheResult::name).chain(["none"])
}

fn class(status: StatusCode) -> usize {
    (usize::from(status.as_u16()) / 100).clamp(1, CLASSES.len()) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_result_is_counted_by_its_name() {
        let counters = ResponseCounters::default();
        for result in CacheResult::ALL {
            let mut response = Response::new(ReplyBody::empty());
            response.headers_mut().insert(CACHE_STATUS, HeaderValue::from_static("other; fwd=miss"));
            assert_eq!(told(&response), None);
            CacheStatus::new(result, "forebay; x").append(&mut response);
            assert_eq!(told(&response), Some("forebay; x"));
            let kind = counters.count(&response);
            counters.count_bytes(kind, 10);
        }
        let mut refused = Response::new(ReplyBody::empty());
        *refused.status_mut() = StatusCode::NOT_FOUND;
        counters.count(&refused);
        let mut counted: Vec<_> = counters.responses().collect();
        assert_eq!(counted.pop(), Some(("none", "4xx", 1)));
        assert_eq!(counted, CacheResult::ALL.map(|result| (result.name(), "2xx", 1)));
        assert_eq!(counters.sent_bytes().last(), Some(("none", 0)));
        assert_eq!(counters.sent_bytes().map(|(_, bytes)| bytes).sum::<u64>(), 60);
    }
}
