//! Requests to the origin.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use forebay_backends::store::no_http_client;
use futures::{Stream, stream};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode, Version, response};
use percent_encoding::percent_decode_str;
use url::Url;

use super::head::end_to_end;
use crate::access::has_signature;
use crate::content::check_escapes;
use crate::send_budget::ResponseBudget;

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(5);
/// How long the origin may send nothing.
const SILENCE: Duration = Duration::from_secs(60);
/// How long a connection waits for another request: shorter than servers do, some of which close it after five seconds.
const IDLE: Duration = Duration::from_secs(4);
/// The least for which there must be room before a piece is passed on to a client as the origin sent it, in bytes.
const UNKNOWN_PIECE_BYTES: u64 = 16 << 10;
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
/// How this program names itself to other servers, and sees its own requests again.
const PSEUDONYM: &str = "forebay";

/// Headers that make a response depend on what a client has, or wants a part of.
const CONDITIONS: [HeaderName; 6] = [
    header::IF_MATCH,
    header::IF_NONE_MATCH,
    header::IF_MODIFIED_SINCE,
    header::IF_UNMODIFIED_SINCE,
    header::IF_RANGE,
    header::RANGE,
];

/// Headers that may make an origin answer for another host, path or method than those that a response is kept by.
const MISLEADING: [&str; 7] = [
    "forwarded",
    "front-end-https",
    "x-host",
    "x-http-host-override",
    "x-method-override",
    "x-url-scheme",
    "x-wap-profile",
];
/// Beginnings of the names of more such headers. Frameworks know `X-HTTP-Method` and `X-HTTP-Method-Override`.
const MISLEADING_PREFIXES: [&str; 5] = ["x-forwarded-", "x-http-method", "x-original-", "x-rewrite-", "x-proxy-"];

/// The origin does not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoAnswer {
    /// It cannot be reached, or breaks off.
    Unreachable,
    Late,
}

impl NoAnswer {
    pub fn status(self) -> StatusCode {
        match self {
            Self::Unreachable => StatusCode::BAD_GATEWAY,
            Self::Late => StatusCode::GATEWAY_TIMEOUT,
        }
    }

    pub fn reason(self) -> &'static str {
        match self {
            Self::Unreachable => "the origin does not answer",
            Self::Late => "the origin did not answer in time",
        }
    }
}

/// A request of a client, for the origin.
pub struct OriginRequest {
    pub method: Method,
    /// Path and query.
    pub target: String,
    pub headers: HeaderMap,
    pub content: Bytes,
}

/// A response whose body is still coming.
pub struct OriginResponse {
    pub head: response::Parts,
    pub length: Option<u64>,
    /// When it was asked for.
    pub asked: SystemTime,
    /// Its end is told, so that a body that breaks off is seen.
    pub is_delimited: bool,
    /// It answers a second request: the connection broke after the first one, which may have taken effect.
    pub is_repeated: bool,
    body: reqwest::Response,
}

/// The server whose responses are kept.
pub struct OriginServer {
    base: Url,
    /// How this node is named in `Via`.
    via: String,
    client: reqwest::Client,
}

impl OriginServer {
    /// # Errors
    /// The URL is not one of a web server's root, or the system's certificates cannot be read.
    pub fn new(url: &str, node: &str) -> Result<Self, String> {
        let base = check_origin(url)?;
        let client = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT)
            .pool_idle_timeout(IDLE)
            .build()
            .map_err(|e| format!("{url}: {}", no_http_client(&e)))?;
        Ok(Self { base, via: format!("{PSEUDONYM}-{node}"), client })
    }

    /// Whether a request has come through this node already.
    pub fn is_loop(&self, headers: &HeaderMap) -> bool {
        let lines = headers.get_all(header::VIA).iter().filter_map(|line| line.to_str().ok());
        lines.flat_map(|line| line.split(',')).any(|hop| hop.split_ascii_whitespace().nth(1) == Some(&*self.via))
    }

    /// Returns a client's headers as they are forwarded.
    pub fn forwarded(&self, headers: &HeaderMap, version: Version, client: IpAddr, tls: bool) -> HeaderMap {
        let mut forwarded = end_to_end(headers);
        for name in [header::HOST, header::CONTENT_LENGTH, header::EXPECT] {
            forwarded.remove(name);
        }
        let addresses = forwarded.get(FORWARDED_FOR).cloned();
        let misleads = |name: &HeaderName| {
            let name = name.as_str();
            // Some servers take `_` for `-`.
            MISLEADING.contains(&name) || MISLEADING_PREFIXES.iter().any(|p| name.starts_with(p)) || name.contains('_')
        };
        let misleading: Vec<HeaderName> = forwarded.keys().filter(|name| misleads(name)).cloned().collect();
        for name in misleading {
            forwarded.remove(name);
        }
        if forwarded.get_all(header::REFERER).iter().any(|value| has_signature(value.as_bytes())) {
            forwarded.remove(header::REFERER);
        }
        if let Some(addresses) = addresses {
            forwarded.insert(FORWARDED_FOR, addresses);
        }
        // HTTP/2 may split it (RFC 9113, section 8.2.3).
        let cookies: Vec<&[u8]> = forwarded.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes).collect();
        if cookies.len() > 1
            && let Ok(joined) = HeaderValue::from_bytes(&cookies.join(&b"; "[..]))
        {
            forwarded.insert(header::COOKIE, joined);
        }
        let version = if version == Version::HTTP_2 { "2.0" } else { "1.1" };
        for (name, value) in [
            (header::VIA, format!("{version} {}", self.via)),
            (FORWARDED_FOR, client.to_canonical().to_string()),
            (FORWARDED_PROTO, if tls { "https" } else { "http" }.to_owned()),
        ] {
            if let Ok(value) = HeaderValue::try_from(value) {
                forwarded.append(name, value);
            }
        }
        forwarded
    }

    /// Clients reach the origin through this node: a URL of the origin becomes a path.
    fn make_relative(&self, headers: &mut HeaderMap, name: &HeaderName) {
        let Some(url) = headers.get(name).and_then(|value| Url::parse(value.to_str().ok()?).ok()) else { return };
        if url.origin() == self.base.origin()
            && let Ok(path) = HeaderValue::try_from(&url[url::Position::BeforePath..])
        {
            headers.insert(name, path);
        }
    }

    /// Sends a request. The content of the response comes by [`OriginResponse::into_pieces`].
    ///
    /// # Errors
    /// The origin does not answer.
    pub async fn send(&self, request: OriginRequest) -> Result<OriginResponse, NoAnswer> {
        let asked = SystemTime::now();
        let mut url = self.base.clone();
        let (path, query) = match request.target.split_once('?') {
            Some((path, query)) => (path, Some(query)),
            None => (&*request.target, None),
        };
        url.set_path(path);
        url.set_query(query);
        let mut asking = self.client.request(request.method.clone(), url).headers(request.headers);
        if !request.content.is_empty() {
            asking = asking.body(request.content);
        }
        let again = asking.try_clone().filter(|_| request.method.is_idempotent());
        let answer = async {
            match (asking.send().await, again) {
                // The origin may have closed a connection that was idle, just as the request went out.
                (Err(error), Some(again)) if !error.is_timeout() && !error.is_connect() => (again.send().await, true),
                (answer, _) => (answer, false),
            }
        };
        let (body, is_repeated) = tokio::time::timeout(SILENCE, answer).await.map_err(|_| silence())?;
        let body = body.map_err(|error| no_answer(&error))?;
        let (mut head, ()) = http::Response::new(()).into_parts();
        (head.status, head.headers) = (body.status(), body.headers().clone());
        for name in [header::LOCATION, header::CONTENT_LOCATION] {
            self.make_relative(&mut head.headers, &name);
        }
        let length = body.content_length();
        let is_delimited = length.is_some() || body.version() == Version::HTTP_2 || ends_chunked(&head.headers);
        if head.headers.contains_key(header::TRANSFER_ENCODING) {
            // Then it does not count (RFC 9112, section 6.3).
            head.headers.remove(header::CONTENT_LENGTH);
        }
        Ok(OriginResponse { head, length, asked, is_delimited, is_repeated, body })
    }
}

/// Whether the last transfer coding is `chunked`. Otherwise a body ends with its connection (RFC 9112, section 6.3).
fn ends_chunked(headers: &HeaderMap) -> bool {
    let last = headers.get_all(header::TRANSFER_ENCODING).iter().next_back().and_then(|line| line.to_str().ok());
    let coding = last.and_then(|line| line.rsplit(',').next());
    coding.is_some_and(|coding| coding.trim().eq_ignore_ascii_case("chunked"))
}

/// Whether a path, in its canonical form, reaches the origin as it is. One with dot segments or backslashes may stand for
/// another path there, also if they are escaped, or have parameters after a semicolon. So may one with an escape that is
/// none: servers differ in what they take it for.
pub fn is_plain(path: &str) -> bool {
    let bad = |part: &str| {
        let decoded: Vec<u8> = percent_decode_str(part).collect();
        let name = decoded.split(|byte| *byte == b';').next().unwrap_or_default();
        matches!(name, b"." | b"..") || decoded.contains(&b'\\') || decoded.contains(&0)
    };
    path.starts_with('/') && check_escapes(path).is_ok() && !path.split('/').any(bad)
}

/// Returns the path of a target.
pub fn path_of(target: &str) -> &str {
    target.split_once('?').map_or(target, |(path, _)| path)
}

/// Returns a target with escapes in their one form (RFC 3986, section 6.2.2): all such targets are the same. The canonical
/// form of a canonical target is the target itself.
pub fn canonical(target: &str) -> String {
    let mut canonical = String::with_capacity(target.len());
    let mut rest = target;
    while let Some(at) = rest.find('%') {
        canonical.push_str(&rest[..at]);
        let digits = rest.get(at + 1..at + 3).filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
        let escape = digits.and_then(|digits| Some((digits, u8::from_str_radix(digits, 16).ok()?)));
        let Some((digits, byte)) = escape else {
            canonical.push('%');
            rest = &rest[at + 1..];
            continue;
        };
        // Right after a percent sign that begins no escape, a decoded digit would make it begin one. An escape that is whole
        // ends in two digits.
        let would_escape = canonical.bytes().rev().take(2).any(|before| before == b'%');
        if !would_escape && (byte.is_ascii_alphanumeric() || b"-._~".contains(&byte)) {
            canonical.push(char::from(byte));
        } else {
            canonical.push('%');
            canonical.push_str(&digits.to_ascii_uppercase());
        }
        rest = &rest[at + 3..];
    }
    canonical.push_str(rest);
    canonical
}

/// # Errors
/// The URL is not one of a web server's root.
pub fn check_origin(url: &str) -> Result<Url, String> {
    let wrong = || "an origin is http://HOST[:PORT] or https://HOST[:PORT], without a path and a user".to_owned();
    let base = Url::parse(url).map_err(|_| wrong())?;
    let plain = base.username().is_empty() && base.password().is_none() && base.query().is_none();
    let is_root = plain && base.has_host() && base.path() == "/" && base.fragment().is_none();
    if matches!(base.scheme(), "http" | "https") && is_root { Ok(base) } else { Err(wrong()) }
}

fn no_answer(error: &reqwest::Error) -> NoAnswer {
    tracing::warn!("the origin does not answer: {}", causes(error));
    if error.is_timeout() { NoAnswer::Late } else { NoAnswer::Unreachable }
}

/// The origin has sent nothing for a long time.
fn silence() -> NoAnswer {
    tracing::warn!("the origin does not answer: it has sent nothing for {} s", SILENCE.as_secs());
    NoAnswer::Late
}

/// Returns the error with its causes, without the URL, in which a query may hold a secret.
fn causes(error: &dyn std::error::Error) -> String {
    let mut last = error;
    while let Some(cause) = last.source() {
        last = cause;
    }
    last.to_string()
}

/// Removes what makes a response depend on what a client has.
pub fn without_conditions(headers: &mut HeaderMap) {
    for name in &CONDITIONS {
        headers.remove(name);
    }
}

/// Whether a request is for a part, or depends on what the client has.
pub fn has_conditions(headers: &HeaderMap) -> bool {
    CONDITIONS.iter().any(|name| headers.contains_key(name))
}

impl OriginResponse {
    /// Returns the next piece of the body; `None` at its end.
    ///
    /// # Errors
    /// The origin breaks off.
    pub async fn piece(&mut self) -> Result<Option<Bytes>, NoAnswer> {
        loop {
            // Only the time counts in which it is asked for more: a client may take long for what has come.
            match tokio::time::timeout(SILENCE, self.body.chunk()).await {
                Err(_) => return Err(silence()),
                Ok(Ok(Some(piece))) if piece.is_empty() => {}
                Ok(Ok(piece)) => return Ok(piece),
                Ok(Err(error)) => return Err(no_answer(&error)),
            }
        }
    }

    /// Whether the request has certainly changed nothing. An error of the origin may come after a part of the work. So may the
    /// refusal of a repeated request: its first one may be the reason.
    pub fn has_changed_nothing(&self) -> bool {
        self.head.status.is_client_error() && !self.is_repeated
    }

    pub fn into_pieces(self, budget: ResponseBudget) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
        stream::try_unfold((self, budget, UNKNOWN_PIECE_BYTES), |(mut response, budget, likely)| async move {
            // How long the piece will be is not known: probably like the last one.
            let room = budget.room(likely).await;
            let piece = response.piece().await.map_err(|why| io::Error::other(why.reason()))?;
            Ok(piece.map(|piece| {
                let likely = UNKNOWN_PIECE_BYTES.max(piece.len() as u64);
                (room.hold(piece), (response, budget, likely))
            }))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_origin_is_the_root_of_a_web_server() {
        for url in ["http://host", "https://host:8443/", "http://127.0.0.1:80"] {
            assert!(check_origin(url).is_ok(), "{url}");
        }
        for url in ["s3://x", "http://host/a", "http://u:hush@host", "http://host?x=hush", "/dir", "ftp://host"] {
            let refused = check_origin(url).unwrap_err();
            assert!(!refused.contains("hush"), "{refused}");
        }
    }

    #[test]
    fn a_path_that_stands_for_another_one_is_not_forwarded() {
        for path in [
            "/a/../b",
            "/.",
            "/a/%2E%2e/b",
            "/a/.%2e",
            "/a/..\\b",
            "/a/..;/b",
            "/a/.%2e;x/b",
            "/..%5cb",
            "/a%00",
            "/a/%",
            "/a/%zz",
            "/a/%+f",
            "/a/%%32e%%32e/b",
            "*",
            "",
        ] {
            assert!(!is_plain(path), "{path}");
        }
        for path in ["/", "/a//b", "/.well-known/x", "/a%2fb", "/...", "/a/%20"] {
            assert!(is_plain(path), "{path}");
            let mut url = Url::parse("http://host").unwrap();
            url.set_path(path);
            assert_eq!(url.path(), path);
        }
    }

    #[test]
    fn escapes_have_one_form() {
        for (target, expected) in
            [("/%61%2fb?%c3%A9=%7e", "/a%2Fb?%C3%A9=~"), ("/%", "/%"), ("/%zz%4", "/%zz%4"), ("/100%é", "/100%é")]
        {
            assert_eq!(canonical(target), expected);
        }
        assert_ne!(canonical("/%+f"), canonical("/%+F"));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_canonical_target_has_no_other_form(
            parts in prop::collection::vec(
                prop_oneof![
                    4 => Just("%".to_owned()),
                    2 => "[0-9a-gA-G+]",
                    2 => any::<u8>().prop_map(|byte| format!("%{byte:02x}")),
                    2 => (b'0'..=b'9').prop_map(|digit| format!("%{digit:02X}")),
                    1 => Just("é".to_owned()),
                    1 => Just("/.".to_owned()),
                ],
                0..12,
            ),
        ) {
            let target = parts.concat();
            let once = canonical(&target);
            prop_assert_eq!(canonical(&once), once.clone(), "{}", target);
            // A path that is plain is the same path for a server, however it reads escapes.
            let path = format!("/{once}");
            if is_plain(&path) {
                let mut url = Url::parse("http://host").unwrap();
                url.set_path(&path);
                prop_assert_eq!(url.path().split('/').count(), path.split('/').count(), "{}", target);
            }
        }
    }

    #[test]
    fn a_location_at_the_origin_is_one_at_the_node() {
        let origin = OriginServer::new("http://host:81", "n").unwrap();
        for (said, expected) in [
            ("http://host:81/d/?x#y", "/d/?x#y"),
            ("http://host/d/", "http://host/d/"),
            ("https://host:81/d/", "https://host:81/d/"),
            ("../d", "../d"),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::LOCATION, HeaderValue::from_str(said).unwrap());
            origin.make_relative(&mut headers, &header::LOCATION);
            assert_eq!(headers[header::LOCATION], expected);
        }
    }

    #[test]
    fn headers_that_are_not_part_of_the_key_do_not_name_another_page() {
        let origin = OriginServer::new("http://host", "n").unwrap();
        let mut headers = HeaderMap::new();
        headers.insert(header::REFERER, HeaderValue::from_static("http://me/a?expires=1&signature=evil"));
        for name in [
            "x-forwarded-host",
            "x-forwarded-scheme",
            "x-original-url",
            "forwarded",
            "x_forwarded_host",
            "x-http-method",
            "x-http-method-override",
            "x-method-override",
        ] {
            headers.insert(name, HeaderValue::from_static("evil"));
        }
        headers.append(header::COOKIE, HeaderValue::from_static("a=1"));
        headers.append(header::COOKIE, HeaderValue::from_static("b=2"));
        let forwarded = origin.forwarded(&headers, Version::HTTP_2, IpAddr::from([127, 0, 0, 1]), true);
        assert!(forwarded.values().all(|value| !value.to_str().unwrap().contains("evil")), "{forwarded:?}");
        assert_eq!(
            (&forwarded[header::COOKIE], &forwarded[FORWARDED_PROTO]),
            (&HeaderValue::from_static("a=1; b=2"), &HeaderValue::from_static("https"))
        );
    }

    #[test]
    fn a_request_that_comes_back_is_seen() {
        let origin = OriginServer::new("http://host", "n").unwrap();
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, HeaderValue::from_static("me"));
        headers.insert(header::CONNECTION, HeaderValue::from_static("x"));
        headers.insert("x", HeaderValue::from_static("1"));
        assert!(!origin.is_loop(&headers));
        let forwarded = origin.forwarded(&headers, Version::HTTP_11, IpAddr::from([127, 0, 0, 1]), false);
        assert!(origin.is_loop(&forwarded));
        assert!(!forwarded.contains_key(header::HOST) && !forwarded.contains_key("x"));
        assert_eq!(forwarded["x-forwarded-for"], "127.0.0.1");
        assert!(!OriginServer::new("http://host", "m").unwrap().is_loop(&forwarded));
    }
}
