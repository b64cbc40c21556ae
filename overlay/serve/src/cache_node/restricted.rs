//! What caches before a node may do with a response that not every client may read.

use std::time::Duration;

use http::header::{self, HeaderName, HeaderValue};
use http::{HeaderMap, Response};

use crate::body::ReplyBody;
use crate::content::reply;
use crate::proxy::directives::{list_items, seconds};

/// Headers that tell caches of a service provider more than `Cache-Control` does (RFC 9213, and what was before it).
const TARGETED: [HeaderName; 2] =
    [HeaderName::from_static("cdn-cache-control"), HeaderName::from_static("surrogate-control")];
/// What lets a shared cache keep a response, and what `private` takes the place of.
const OF_SHARED_CACHES: [&str; 4] = ["public", "private", "s-maxage", "proxy-revalidate"];
/// What lets a cache use a response for longer than `max-age`.
const BEYOND_MAX_AGE: [&str; 2] = ["stale-while-revalidate", "stale-if-error"];

/// Makes a response one for its client alone. `left`: how long the client may still read it, if that ends.
pub fn restrict(response: &mut Response<ReplyBody>, left: Option<Duration>) {
    let headers = response.headers_mut();
    for name in TARGETED {
        headers.remove(name);
    }
    let control = control(headers, left);
    headers.insert(header::CACHE_CONTROL, control);
}

fn control(headers: &HeaderMap, left: Option<Duration>) -> HeaderValue {
    let lines = headers.get_all(header::CACHE_CONTROL).iter();
    let said = lines.flat_map(|line| list_items(&String::from_utf8_lossy(line.as_bytes())));
    let mut items = vec!["private".to_owned()];
    for item in said {
        let (name, value) = item.split_once('=').map_or((&*item, None), |(name, value)| (name, Some(value)));
        let name = name.trim().to_ascii_lowercase();
        let goes = |names: &[&str]| names.contains(&&*name);
        match left.map(|left| left.as_secs()) {
            _ if name == "no-store" => return HeaderValue::from_static("no-store"),
            _ if goes(&OF_SHARED_CACHES) => {}
            Some(_) if goes(&BEYOND_MAX_AGE) => {}
            Some(left) if name == "max-age" => {
                // What is no number of seconds means none.
                let said = value.and_then(|value| seconds(value.trim_matches('"'))).unwrap_or(0);
                items.push(format!("max-age={}", said.min(left)));
            }
            _ => items.push(item),
        }
    }
    reply::value(items.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restricted_response_is_for_no_shared_cache() {
        for (said, left, expected) in [
            (&["public, max-age=31536000, immutable"][..], None, "private, max-age=31536000, immutable"),
            (&["public, max-age=31536000, immutable"], Some(60), "private, max-age=60, immutable"),
            (&["max-age=30"], Some(60), "private, max-age=30"),
            (&["Public", "s-maxage=9, Max-Age=\"90\", stale-if-error=5"], Some(60), "private, max-age=60"),
            (&["max-age=x"], Some(60), "private, max-age=0"),
            (&["private=\"a, b\", must-revalidate"], None, "private, must-revalidate"),
            (&["no-cache"], Some(60), "private, no-cache"),
            (&["public, no-store"], None, "no-store"),
            (&[], None, "private"),
        ] {
            let mut response = Response::new(ReplyBody::empty());
            for line in said {
                response.headers_mut().append(header::CACHE_CONTROL, HeaderValue::from_static(line));
            }
            response.headers_mut().insert("cdn-cache-control", HeaderValue::from_static("max-age=60"));
            restrict(&mut response, left.map(Duration::from_secs));
            assert_eq!(response.headers()[header::CACHE_CONTROL], expected, "{said:?}");
            assert_eq!(response.headers().len(), 1);
        }
    }
}
