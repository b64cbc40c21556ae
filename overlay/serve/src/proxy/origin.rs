//! Requests to the origin.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures::{Stream, stream};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode, Version, response};
use url::Url;

use super::head::end_to_end;

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(5);
/// How long the origin may send nothing.
const SILENCE: Duration = Duration::from_secs(60);
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

/// Headers that may make an origin answer for another host or path than those of the request, which a response is kept by.
const MISLEADING: [&str; 7] = [
    "forwarded",
    "x-forwarded-host",
    "x-forwarded-port",
    "x-forwarded-prefix",
    "x-forwarded-proto",
    "x-original-url",
    "x-rewrite-url",
];

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
    body: reqwest::Response,
}

/// The server whose responses are kept.
pub struct Origin {
    base: Url,
    /// How this node is named in `Via`.
    via: String,
    client: reqwest::Client,
}

impl Origin {
    /// # Errors
    /// The URL is not one of a web server's root, or the system's certificates cannot be read.
    pub fn new(url: &str, node: &str) -> Result<Self, String> {
        let base = check_origin(url)?;
        let client = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT)
            .read_timeout(SILENCE)
            .build()
            .map_err(|e| format!("{url}: {e}"))?;
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
        for name in MISLEADING {
            forwarded.remove(name);
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
        let mut asking = self.client.request(request.method, url).headers(request.headers);
        if !request.content.is_empty() {
            asking = asking.body(request.content);
        }
        let body = asking.send().await.map_err(|error| no_answer(&error))?;
        let (mut head, ()) = http::Response::new(()).into_parts();
        (head.status, head.headers) = (body.status(), body.headers().clone());
        Ok(OriginResponse { head, length: body.content_length(), asked, body })
    }
}

/// Whether a path reaches the origin as it is: a URL with dot segments, or with backslashes, stands for another one.
pub fn is_plain(path: &str) -> bool {
    let dots = |part: &str| matches!(&*part.to_ascii_lowercase().replace("%2e", "."), "." | "..");
    path.starts_with('/') && !path.contains('\\') && !path.split('/').any(dots)
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
            match self.body.chunk().await {
                Ok(Some(piece)) if piece.is_empty() => {}
                Ok(piece) => return Ok(piece),
                Err(error) => return Err(no_answer(&error)),
            }
        }
    }

    pub fn into_pieces(self) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
        stream::try_unfold(self, |mut response| async move {
            let piece = response.piece().await.map_err(|why| io::Error::other(why.reason()))?;
            Ok(piece.map(|piece| (piece, response)))
        })
    }
}

#[cfg(test)]
mod tests {
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
        for path in ["/a/../b", "/.", "/a/%2E%2e/b", "/a/.%2e", "/a/..\\b", "*", ""] {
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
    fn headers_that_are_not_part_of_the_key_do_not_name_another_page() {
        let origin = Origin::new("http://host", "n").unwrap();
        let mut headers = HeaderMap::new();
        for name in ["x-forwarded-host", "x-original-url", "forwarded"] {
            headers.insert(name, HeaderValue::from_static("evil"));
        }
        headers.append(header::COOKIE, HeaderValue::from_static("a=1"));
        headers.append(header::COOKIE, HeaderValue::from_static("b=2"));
        let forwarded = origin.forwarded(&headers, Version::HTTP_2, IpAddr::from([127, 0, 0, 1]), true);
        assert!(forwarded.values().all(|value| value != "evil"));
        assert_eq!(
            (&forwarded[header::COOKIE], &forwarded[FORWARDED_PROTO]),
            (&HeaderValue::from_static("a=1; b=2"), &HeaderValue::from_static("https"))
        );
    }

    #[test]
    fn a_request_that_comes_back_is_seen() {
        let origin = Origin::new("http://host", "n").unwrap();
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, HeaderValue::from_static("me"));
        headers.insert(header::CONNECTION, HeaderValue::from_static("x"));
        headers.insert("x", HeaderValue::from_static("1"));
        assert!(!origin.is_loop(&headers));
        let forwarded = origin.forwarded(&headers, Version::HTTP_11, IpAddr::from([127, 0, 0, 1]), false);
        assert!(origin.is_loop(&forwarded));
        assert!(!forwarded.contains_key(header::HOST) && !forwarded.contains_key("x"));
        assert_eq!(forwarded["x-forwarded-for"], "127.0.0.1");
        assert!(!Origin::new("http://host", "m").unwrap().is_loop(&forwarded));
    }
}
