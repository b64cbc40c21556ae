//! What caches before a node may do with a response that not every client may read.

use std::time::{Duration, SystemTime};

use http::header::{self, HeaderName, HeaderValue};
use http::{HeaderMap, Response};

use crate::body::ReplyBody;
use crate::content::reply;
use crate::proxy::directives::{list_items, seconds};

/// The end of the names of headers that tell caches of a service provider more than `Cache-Control` does (RFC 9213).
const TARGETED: &str = "cdn-cache-control";
/// What was before it.
const TARGETED_OTHERWISE: [&str; 3] = ["surrogate-control", "edge-control", "x-accel-expires"];
/// What lets a shared cache keep a response, and what `private` takes the place of.
const OF_SHARED_CACHES: [&str; 4] = ["public", "private", "s-maxage", "proxy-revalidate"];
/// What lets a cache use a response for longer than `max-age`.
const BEYOND_MAX_AGE: [&str; 2] = ["stale-while-revalidate", "stale-if-error"];

/// Makes a response one for its client alone. `left`: how long the client may still read it, if that ends.
pub fn restrict(response: &mut Response<ReplyBody>, left: Option<Duration>) {
    let headers = response.headers_mut();
    let is_targeted = |name: &str| name.ends_with(TARGETED) || TARGETED_OTHERWISE.contains(&name);
    let targeted: Vec<HeaderName> = headers.keys().filter(|name| is_targeted(name.as_str())).cloned().collect();
    for name in targeted {
        headers.remove(name);
    }
    let control = control(headers, left);
    headers.insert(header::CACHE_CONTROL, control);
    if left.is_some() {
        // `max-age` says it.
        headers.remove(header::EXPIRES);
    }
}

/// Returns the seconds from the time of a response to its `Expires`. What cannot be read is in the past. Without `Expires`,
/// a cache would guess.
fn seconds_to_expiry(headers: &HeaderMap) -> u64 {
    let time = |name| httpdate::parse_http_date(headers.get(name)?.to_str().ok()?).ok();
    let sent = time(header::DATE).unwrap_or_else(SystemTime::now);
    let lines = headers.get_all(header::EXPIRES).iter().count();
    let expires = time(header::EXPIRES).filter(|_| lines == 1);
    expires.and_then(|expires| expires.duration_since(sent).ok()).map_or(0, |left| left.as_secs())
}

fn control(headers: &HeaderMap, left: Option<Duration>) -> HeaderValue {
    let lines = headers.get_all(header::CACHE_CONTROL).iter();
    let said = lines.flat_map(|line| list_items(&String::from_utf8_lossy(line.as_bytes())));
    let (mut items, mut is_timed) = (vec!["private".to_owned()], false);
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
                is_timed = true;
            }
            _ => {
                // Then it is asked for each time.
                is_timed |= name == "no-cache" && value.is_none();
                items.push(item);
            }
        }
    }
    if let Some(left) = left.filter(|_| !is_timed) {
        items.push(format!("max-age={}", seconds_to_expiry(headers).min(left.as_secs())));
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
            (&["must-revalidate"], Some(60), "private, must-revalidate, max-age=0"),
            (&["no-cache=\"a\""], Some(60), "private, no-cache=\"a\", max-age=0"),
            (&["no-cache"], Some(60), "private, no-cache"),
            (&["public, no-store"], None, "no-store"),
            (&[], None, "private"),
            (&[], Some(60), "private, max-age=0"),
        ] {
            let mut response = Response::new(ReplyBody::empty());
            for line in said {
                response.headers_mut().append(header::CACHE_CONTROL, HeaderValue::from_static(line));
            }
            for name in ["cdn-cache-control", "cloudflare-cdn-cache-control", "surrogate-control", "edge-control"] {
                response.headers_mut().insert(name, HeaderValue::from_static("max-age=60"));
            }
            response.headers_mut().insert("x-accel-expires", HeaderValue::from_static("60"));
            restrict(&mut response, left.map(Duration::from_secs));
            assert_eq!(response.headers()[header::CACHE_CONTROL], expected, "{said:?}");
            assert_eq!(response.headers().len(), 1);
        }
    }

    #[test]
    fn a_response_with_expires_ends_with_its_url() {
        let date = |seconds| httpdate::fmt_http_date(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        for (expires, control, expected) in [
            (&[date(5000)][..], None, "private, max-age=60"),
            (&[date(1030)], None, "private, max-age=30"),
            (&[date(900)], None, "private, max-age=0"),
            (&["0".to_owned()], None, "private, max-age=0"),
            (&[date(5000), date(1030)], None, "private, max-age=0"),
            (&[date(5000)], Some("max-age=20"), "private, max-age=20"),
            (&[date(5000)], Some("no-cache"), "private, no-cache"),
        ] {
            let mut response = Response::new(ReplyBody::empty());
            let headers = response.headers_mut();
            headers.insert(header::DATE, HeaderValue::try_from(date(1000)).unwrap());
            for line in expires {
                headers.append(header::EXPIRES, HeaderValue::try_from(line).unwrap());
            }
            if let Some(control) = control {
                headers.insert(header::CACHE_CONTROL, HeaderValue::from_static(control));
            }
            restrict(&mut response, Some(Duration::from_secs(60)));
            assert_eq!(response.headers()[header::CACHE_CONTROL], expected, "{expires:?} {control:?}");
            assert!(!response.headers().contains_key(header::EXPIRES));
            // For a client whose access does not end, nothing says less.
            let mut response = Response::new(ReplyBody::empty());
            response.headers_mut().insert(header::EXPIRES, HeaderValue::try_from(&expires[0]).unwrap());
            restrict(&mut response, None);
            assert!(response.headers().contains_key(header::EXPIRES));
        }
    }
}
