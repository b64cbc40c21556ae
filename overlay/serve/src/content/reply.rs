//! Parts of responses.

use http::header::{self, HeaderValue};
use http::{Response, StatusCode};

use crate::body::ReplyBody;

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
