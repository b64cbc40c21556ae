//! Parts of responses.

use http::header::{self, HeaderName, HeaderValue};
use http::{Response, StatusCode};

use crate::body::ReplyBody;

/// RFC 9211.
pub const CACHE_STATUS: HeaderName = HeaderName::from_static("cache-status");
/// The bytes were here, and nobody was asked.
pub const HIT: HeaderValue = HeaderValue::from_static("forebay; hit");
/// The bytes were here, and the pool was asked whether they are current.
pub const CONFIRMED: HeaderValue = HeaderValue::from_static("forebay; hit; detail=CONFIRMED");
/// The bytes were here and are not fresh; the pool is being asked.
pub const STALE: HeaderValue = HeaderValue::from_static("forebay; hit; detail=STALE");
/// Bytes came from the pool.
pub const MISS: HeaderValue = HeaderValue::from_static("forebay; fwd=miss");

/// Returns a response with one line of text.
pub fn text(status: StatusCode, line: &str) -> Response<ReplyBody> {
    let mut response = Response::new(ReplyBody::from(format!("{line}\n")));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Returns a header of text that this program made from numbers and escaped names.
pub fn value(text: String) -> HeaderValue {
    HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static(""))
}
