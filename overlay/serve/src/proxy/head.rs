//! The head of a response as it is kept: what clients get again, and what it was an answer to.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{StatusCode, response};
use serde::{Deserialize, Serialize};

use super::directives::{Directives, list_items};

/// Headers about one connection (RFC 9110, section 7.6.1, and those of RFC 9111, section 3.1, about a proxy).
const HOP_BY_HOP: [&str; 11] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authentication-info",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "http2-settings",
];
/// Headers that describe the stored body: a 304 cannot change them (RFC 9111, section 3.2).
const OF_THE_BODY: [&str; 6] =
    ["content-encoding", "content-length", "content-md5", "content-range", "etag", "transfer-encoding"];
/// Makes room for a head that grows when it is confirmed.
const HEAD_ROOM: usize = 512;
const MAGIC: &[u8; 8] = b"FBHEAD01";
/// After the head: its length, the length of the body, the magic.
const FOOT_BYTES: u64 = 4 + 8 + 8;
/// The most bytes of a head.
const HEAD_MAX: u64 = 256 << 10;

/// The head of a stored response.
#[derive(Debug, Clone, PartialEq)]
pub struct ResponseHead {
    pub status: StatusCode,
    pub headers: HeaderMap,
    /// Headers of the request that `Vary` names, with what they said.
    pub varied: Vec<(HeaderName, Option<String>)>,
    /// The request was authorized.
    pub authorized: bool,
    /// When the response came. In whole milliseconds.
    pub received: SystemTime,
    /// How long it took to come: it may be older by that much.
    pub delay: Duration,
    /// XXH3 of the body.
    pub sum: u64,
    /// The boot in which it was written.
    pub boot: String,
    /// It only tells which headers of a request the responses vary by, and when they began to: see `store`.
    pub marks: Option<u64>,
}

#[derive(Serialize, Deserialize)]
struct HeadRecord {
    status: u16,
    /// Each byte of a value as one character.
    headers: Vec<(String, String)>,
    varied: Vec<(String, Option<String>)>,
    authorized: bool,
    received_ms: u64,
    delay_ms: u64,
    sum: u64,
    boot: String,
    marks: Option<u64>,
}

fn text(value: &[u8]) -> String {
    value.iter().map(|byte| char::from(*byte)).collect()
}

fn bytes(text: &str) -> Option<Vec<u8>> {
    text.chars().map(|c| u8::try_from(u32::from(c)).ok()).collect()
}

impl ResponseHead {
    /// The head of a response that comes now.
    pub fn new(parts: &response::Parts, varied: Vec<(HeaderName, Option<String>)>, asked: SystemTime) -> Self {
        let now = SystemTime::now();
        let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut headers = end_to_end(&parts.headers);
        headers.remove(header::CONTENT_LENGTH);
        headers.entry(header::DATE).or_insert_with(|| date(now));
        Self {
            status: parts.status,
            headers,
            varied,
            authorized: false,
            received: UNIX_EPOCH + Duration::from_millis(since.as_millis() as u64),
            delay: now.duration_since(asked).unwrap_or_default(),
            sum: 0,
            boot: boot_id(),
            marks: None,
        }
    }

    /// Whether the response sets a cookie, which is for one client unless the response says that it is for all.
    pub fn is_for_one(headers: &HeaderMap) -> bool {
        headers.contains_key(header::SET_COOKIE) && !Directives::of(headers).has("public")
    }

    /// The head after a 304 has confirmed it; `None` if the 304 is about another response, or for one client alone.
    /// `authorized`: the request was. Then the 304 says nothing about clients that are not, and only the response itself can
    /// say that it is for them, too.
    pub fn confirmed(&self, parts: &response::Parts, asked: SystemTime, authorized: bool) -> Option<Self> {
        let weak = |value: &HeaderValue| text(value.as_bytes()).trim_start_matches("W/").to_owned();
        if let Some(tag) = parts.headers.get(header::ETAG)
            && self.headers.get(header::ETAG).map(weak) != Some(weak(tag))
        {
            return None;
        }
        if Self::is_for_one(&parts.headers) {
            return None;
        }
        let fresh = Self::new(parts, self.varied.clone(), asked);
        let mut headers = self.headers.clone();
        for name in fresh.headers.keys().filter(|name| !OF_THE_BODY.contains(&name.as_str())) {
            headers.remove(name);
            for value in fresh.headers.get_all(name) {
                headers.append(name, value.clone());
            }
        }
        // A 304 tells anew how old the response is.
        if !fresh.headers.contains_key(header::AGE) {
            headers.remove(header::AGE);
        }
        // What varies differently now is not in the right place.
        let by: Vec<&HeaderName> = self.varied.iter().map(|(name, _)| name).collect();
        if !vary_of(&headers)?.iter().all(|name| by.contains(&name)) {
            return None;
        }
        let authorized = self.authorized || authorized;
        Some(Self { headers, received: fresh.received, delay: fresh.delay, authorized, ..self.clone() })
    }

    /// Whether the response is one to a request with these headers.
    pub fn is_for(&self, request: &HeaderMap) -> bool {
        self.varied.iter().all(|(name, said)| said_of(request, name) == *said)
    }

    /// Returns what follows the body in the file: at least `room` bytes.
    pub fn tail(&self, body: u64, room: u64) -> Vec<u8> {
        let since = self.received.duration_since(UNIX_EPOCH).unwrap_or_default();
        let record = HeadRecord {
            status: self.status.as_u16(),
            headers: self.headers.iter().map(|(n, v)| (n.to_string(), text(v.as_bytes()))).collect(),
            varied: self.varied.iter().map(|(n, v)| (n.to_string(), v.clone())).collect(),
            authorized: self.authorized,
            received_ms: since.as_millis() as u64,
            delay_ms: self.delay.as_millis() as u64,
            sum: self.sum,
            boot: self.boot.clone(),
            marks: self.marks,
        };
        let mut tail = serde_json::to_vec(&record).unwrap_or_default();
        let least = (room.saturating_sub(FOOT_BYTES) as usize).max(tail.len().next_multiple_of(HEAD_ROOM));
        tail.resize(least, b' ');
        let length = tail.len() as u32;
        tail.extend(length.to_le_bytes());
        tail.extend(body.to_le_bytes());
        tail.extend(MAGIC);
        tail
    }

    /// Returns the range of a file in which its foot is.
    pub fn foot(size: u64) -> std::ops::Range<u64> {
        size.saturating_sub(FOOT_BYTES)..size
    }

    /// Reads a foot. Returns the range of the head, which begins where the body ends; `None` if it is none.
    pub fn of_foot(foot: &[u8], size: u64) -> Option<std::ops::Range<u64>> {
        let (length, rest) = foot.split_first_chunk::<4>()?;
        let (body, magic) = rest.split_first_chunk::<8>()?;
        let length = u64::from(u32::from_le_bytes(*length));
        let body = u64::from_le_bytes(*body);
        let whole = body.checked_add(length)?.checked_add(FOOT_BYTES)? == size;
        (magic == MAGIC && whole && length <= HEAD_MAX).then_some(body..body + length)
    }

    /// Reads a head; `None` if it is damaged.
    pub fn parse(json: &[u8]) -> Option<Self> {
        let record: HeadRecord = serde_json::from_slice(json).ok()?;
        let mut headers = HeaderMap::new();
        for (name, value) in &record.headers {
            headers.append(HeaderName::try_from(name).ok()?, HeaderValue::from_bytes(&bytes(value)?).ok()?);
        }
        let varied: Option<_> =
            record.varied.into_iter().map(|(name, said)| Some((HeaderName::try_from(name).ok()?, said))).collect();
        Some(Self {
            status: StatusCode::from_u16(record.status).ok()?,
            headers,
            varied: varied?,
            authorized: record.authorized,
            received: UNIX_EPOCH.checked_add(Duration::from_millis(record.received_ms))?,
            delay: Duration::from_millis(record.delay_ms),
            sum: record.sum,
            boot: record.boot,
            marks: record.marks,
        })
    }
}

/// Returns the headers that are not about a connection.
pub fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let named: Vec<String> = headers
        .get_all(header::CONNECTION)
        .iter()
        .flat_map(|line| list_items(&String::from_utf8_lossy(line.as_bytes())))
        .map(|name| name.to_ascii_lowercase())
        .collect();
    let goes = |name: &HeaderName| HOP_BY_HOP.contains(&name.as_str()) || named.iter().any(|n| n == name.as_str());
    headers.iter().filter(|(name, _)| !goes(name)).map(|(n, v)| (n.clone(), v.clone())).collect()
}

/// Returns what a request says in all lines of a header; spaces around commas do not count.
pub fn said_of(request: &HeaderMap, name: &HeaderName) -> Option<String> {
    let lines: Vec<String> = request
        .get_all(name)
        .iter()
        .flat_map(|line| text(line.as_bytes()).split(',').map(|item| item.trim().to_owned()).collect::<Vec<_>>())
        .collect();
    request.contains_key(name).then(|| lines.join(","))
}

/// The headers that a response varies by; `None` if by more than headers.
pub fn vary_of(headers: &HeaderMap) -> Option<Vec<HeaderName>> {
    let mut names = Vec::new();
    for line in headers.get_all(header::VARY) {
        for name in list_items(&text(line.as_bytes())) {
            names.push(HeaderName::try_from(name).ok().filter(|name| name != "*")?);
        }
    }
    names.sort_by(|a, b| a.as_str().cmp(b.as_str()));
    names.dedup();
    Some(names)
}

pub fn date(time: SystemTime) -> HeaderValue {
    HeaderValue::try_from(httpdate::fmt_http_date(time)).unwrap_or(HeaderValue::from_static(""))
}

/// The name of this boot of the machine.
pub fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use http::Response;

    use super::*;

    fn parts(headers: &[(&str, &[u8])]) -> response::Parts {
        let mut response = Response::new(());
        for (name, value) in headers {
            let (name, value) = (HeaderName::try_from(*name).unwrap(), HeaderValue::from_bytes(value).unwrap());
            response.headers_mut().append(name, value);
        }
        response.into_parts().0
    }

    #[test]
    fn a_head_is_read_as_it_was_written() {
        let varied = vec![(header::ACCEPT, Some("a,b".to_owned())), (header::COOKIE, None)];
        let mut head = ResponseHead::new(
            &parts(&[("set-cookie", b"a"), ("set-cookie", b"\xe9"), ("x", b"")]),
            varied,
            SystemTime::now(),
        );
        (head.sum, head.marks, head.delay) = (u64::MAX, Some(7), Duration::from_millis(3));
        let body = 1000;
        let tail = head.tail(body, 0);
        let size = body + tail.len() as u64;
        let foot = ResponseHead::foot(size);
        let range = ResponseHead::of_foot(&tail[(foot.start - body) as usize..], size).unwrap();
        assert_eq!(range.start, body);
        assert_eq!(ResponseHead::parse(&tail[..(range.end - body) as usize]).unwrap(), head);
        assert_eq!(head.tail(body, 5000).len(), 5000, "a later head takes the place of a longer one");
    }

    #[test]
    fn a_file_that_was_cut_or_that_grew_has_no_head() {
        let tail = ResponseHead::new(&parts(&[]), Vec::new(), SystemTime::now()).tail(10, 0);
        let size = 10 + tail.len() as u64;
        let foot = &tail[tail.len() - FOOT_BYTES as usize..];
        assert!(ResponseHead::of_foot(foot, size).is_some());
        assert!(ResponseHead::of_foot(foot, size + 1).is_none());
        assert!(ResponseHead::of_foot(&foot[..19], size).is_none());
        assert!(ResponseHead::of_foot(&[0xff; 20], size).is_none());
    }

    #[test]
    fn headers_of_a_connection_are_not_kept() {
        let kept =
            end_to_end(&parts(&[("connection", b"A, b"), ("a", b"1"), ("B", b"2"), ("te", b"x"), ("c", b"3")]).headers);
        assert_eq!(kept.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["c"]);
    }

    #[test]
    fn a_304_changes_what_is_not_about_the_body() {
        let head = ResponseHead::new(
            &parts(&[("etag", b"\"a\""), ("x", b"1"), ("x", b"2"), ("content-encoding", b"gzip"), ("y", b"1")]),
            Vec::new(),
            SystemTime::now(),
        );
        let asked = SystemTime::now();
        let confirmed =
            head.confirmed(&parts(&[("etag", b"W/\"a\""), ("x", b"3"), ("content-encoding", b"br")]), asked, false);
        let confirmed = confirmed.unwrap();
        let all = |name: &str| confirmed.headers.get_all(name).iter().map(|v| text(v.as_bytes())).collect::<Vec<_>>();
        assert_eq!(
            (all("x"), all("y"), all("content-encoding")),
            (vec!["3".into()], vec!["1".into()], vec!["gzip".into()])
        );
        assert_eq!(all("etag"), ["\"a\""]);
        assert!(head.confirmed(&parts(&[("etag", b"\"b\"")]), asked, false).is_none());
        assert!(head.confirmed(&parts(&[("set-cookie", b"a=b")]), asked, false).is_none());
        assert!(!confirmed.authorized && head.confirmed(&parts(&[]), asked, true).is_some_and(|head| head.authorized));
    }
}
