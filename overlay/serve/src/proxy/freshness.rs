//! Whether a response may be kept, and how long it may be used: RFC 9111, and RFC 5861 for what is stale.
//!
//! The rules are those of `http-cache-semantics`. It reads headers loosely and knows few status codes. So it gets a response
//! whose headers this module has read: only those that the rules are about, in their strictest reading.

use std::time::{Duration, SystemTime};

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_cache_semantics::{BeforeRequest, CacheOptions, CachePolicy};

use super::directives::{Directives, SECONDS_MAX, list_items, seconds};
use super::head::{ResponseHead, date, vary_of};

/// Status codes whose meaning for a cache is known: those that the crate keeps, without 206.
const UNDERSTOOD: [u16; 14] = [200, 203, 204, 300, 301, 302, 303, 307, 308, 404, 405, 410, 414, 501];
/// Those that say that there is nothing.
const NEGATIVE: [u16; 4] = [404, 405, 410, 414];
/// The share of the time since its last change for which a response counts as fresh if nothing else is said (RFC 9111,
/// section 4.2.2).
const HEURISTIC_SHARE: f32 = 0.1;

/// What the operator allows beyond what a response says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FreshnessOptions {
    /// How long a stale response is used while the origin is asked.
    pub stale_while_revalidate: Duration,
    /// How long a stale response is used if the origin fails.
    pub stale_if_error: Duration,
    /// How long it is believed that there is nothing, if a response says so without a time.
    pub negative: Duration,
    /// How long another response is fresh that says nothing about it, not even when it was changed.
    pub unspecified: Duration,
}

/// The rules as they apply to one response.
#[derive(Debug)]
pub struct Freshness {
    policy: CachePolicy,
    /// Until then it is fresh.
    until: SystemTime,
    stale_while_revalidate: Duration,
    stale_if_error: Duration,
    /// No client gets it stale, even if it asks for that.
    never_stale: bool,
    /// It is for all clients, and there is something to ask the origin with, or a time in which it is of use without.
    is_useful: bool,
}

/// How a stored response may be used for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    Fresh,
    /// At once, while the origin is asked.
    WhileAsking,
    /// Only after the origin has confirmed it.
    Confirm,
}

impl Freshness {
    pub fn of(head: &ResponseHead, options: &FreshnessOptions) -> Self {
        let said = Directives::of(&head.headers);
        let explicit =
            ["max-age", "s-maxage"].iter().any(|name| said.has(name)) || head.headers.contains_key(header::EXPIRES);
        let code = head.status.as_u16();
        let operators = match NEGATIVE.contains(&code) {
            true => options.negative,
            false if head.headers.contains_key(header::LAST_MODIFIED) => Duration::ZERO,
            false => options.unspecified,
        };
        // From HTTP/1.0 servers (RFC 9111, section 5.4).
        let pragma = Directives::in_header(&head.headers, &header::PRAGMA);
        let forbids = said.has("no-cache") || pragma.has("no-cache");
        let is_open = !explicit && UNDERSTOOD.contains(&code) && !forbids && !operators.is_zero();
        let rule = Response::builder().status(shown_status(head, &said, explicit)).body(());
        let mut response = rule.unwrap_or_default();
        *response.headers_mut() = shown_headers(head, &said);
        // A redirection that is not permanent is kept only if it says how long.
        let is_passing = matches!(code, 302 | 303 | 307);
        if is_open && !is_passing {
            let said = number(format!("max-age={}", operators.as_secs()));
            response.headers_mut().append(header::CACHE_CONTROL, said);
        }
        let mut request = Request::new(());
        if head.authorized {
            request.headers_mut().insert(header::AUTHORIZATION, HeaderValue::from_static("-"));
        }
        let rules = CacheOptions {
            shared: true,
            cache_heuristic: HEURISTIC_SHARE,
            immutable_min_time_to_live: Duration::ZERO,
            ignore_cargo_cult: false,
        };
        let policy = CachePolicy::new_options(&request, &response, head.received, rules);
        let lifetime = policy.time_to_live(head.received);
        // RFC 9111, section 4.2.4, and 5.2.2.10 for s-maxage.
        let never_stale =
            ["must-revalidate", "proxy-revalidate", "no-cache", "s-maxage"].iter().any(|name| said.has(name));
        let allowed = |name: &str, least: Duration| match never_stale {
            true => Duration::ZERO,
            // The operator's times are for what was fresh once: the rest may be different for each client.
            false => {
                let least = if lifetime.is_zero() { Duration::ZERO } else { least };
                said.seconds(name).map_or(least, |given| least.max(Duration::from_secs(given)))
            }
        };
        let stale_while_revalidate = allowed("stale-while-revalidate", options.stale_while_revalidate);
        let stale_if_error = allowed("stale-if-error", options.stale_if_error);
        let validator = [header::ETAG, header::LAST_MODIFIED].iter().any(|name| head.headers.contains_key(name));
        Self {
            policy,
            until: head.received.checked_add(lifetime).unwrap_or(head.received),
            stale_while_revalidate,
            stale_if_error,
            never_stale,
            is_useful: !ResponseHead::is_for_one(&head.headers)
                && (validator || !(lifetime + stale_while_revalidate + stale_if_error).is_zero()),
        }
    }

    /// Whether the response may be kept for other requests, and is of any use then.
    pub fn is_storable(&self) -> bool {
        self.policy.is_storable() && self.is_useful
    }

    pub fn for_request(&self, request: &HeaderMap, now: SystemTime) -> Use {
        if !request.contains_key(header::CACHE_CONTROL) && !request.contains_key(header::PRAGMA) {
            return match self.stale_for(now) {
                None => Use::Fresh,
                Some(stale) if stale < self.stale_while_revalidate => Use::WhileAsking,
                Some(_) => Use::Confirm,
            };
        }
        let asked = Directives::of(request);
        let mut shown = Request::new(());
        let names = ["no-cache", "max-age", "min-fresh", "max-stale"];
        let lines = names.iter().filter(|name| asked.has(name) && !(self.never_stale && **name == "max-stale"));
        let said: Vec<String> = lines
            .map(|name| match asked.value(name) {
                None => (*name).to_owned(),
                Some(_) => format!("{name}={}", asked.seconds(name).unwrap_or(0)),
            })
            .collect();
        if !said.is_empty() {
            shown.headers_mut().insert(header::CACHE_CONTROL, number(said.join(", ")));
        } else if let Some(pragma) =
            request.get(header::PRAGMA).filter(|_| !request.contains_key(header::CACHE_CONTROL))
        {
            shown.headers_mut().insert(header::PRAGMA, pragma.clone());
        }
        *shown.method_mut() = Method::GET;
        if matches!(self.policy.before_request(&shown, now), BeforeRequest::Fresh(_)) {
            return Use::Fresh;
        }
        // A client that asks for a response of a certain age gets one.
        let demands = !said.is_empty() || shown.headers().contains_key(header::PRAGMA);
        match !demands && self.stale_for(now).is_some_and(|stale| stale < self.stale_while_revalidate) {
            true => Use::WhileAsking,
            false => Use::Confirm,
        }
    }

    /// Whether the response may be used although the origin fails.
    pub fn may_stand_in(&self, now: SystemTime) -> bool {
        self.stale_for(now).is_none_or(|stale| stale < self.stale_if_error)
    }

    /// How long it has been stale; `None` while it is fresh.
    fn stale_for(&self, now: SystemTime) -> Option<Duration> {
        now.duration_since(self.until).ok().filter(|_| now >= self.until)
    }

    /// Seconds for which it is fresh; negative if it is stale.
    pub fn seconds_left(&self, now: SystemTime) -> i64 {
        match self.until.duration_since(now) {
            Ok(left) => left.as_secs() as i64,
            Err(over) => -(over.duration().as_secs() as i64),
        }
    }

    pub fn age(&self, now: SystemTime) -> Duration {
        self.policy.age(now)
    }
}

fn number(text: String) -> HeaderValue {
    HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static(""))
}

/// Returns the status code for the rules. A final response with another code may be kept, too, if it says how long
/// (RFC 9111, section 3): for the rules it is like 200 then.
fn shown_status(head: &ResponseHead, said: &Directives, explicit: bool) -> StatusCode {
    let code = head.status.as_u16();
    let partial = matches!(head.status, StatusCode::PARTIAL_CONTENT | StatusCode::NOT_MODIFIED);
    let may = (explicit || said.has("public")) && !partial && code >= 200 && !said.has("must-understand");
    match UNDERSTOOD.contains(&code) {
        false if may => StatusCode::OK,
        _ => head.status,
    }
}

fn shown_headers(head: &ResponseHead, said: &Directives) -> HeaderMap {
    let mut shown = HeaderMap::new();
    let understood = said.has("must-understand") && UNDERSTOOD.contains(&head.status.as_u16());
    // `must-understand` takes the place of `no-store` where the status code is understood (RFC 9111, section 5.2.2.3).
    // What `no-cache` and `private` say of single headers is taken for all of the response. The crate counts
    // `proxy-revalidate` as `no-cache`; what it forbids is in `Freshness::of`.
    let kept = ["no-store", "no-cache", "private", "public", "must-revalidate", "immutable"];
    let mut list: Vec<String> = kept
        .iter()
        .filter(|name| said.has(name) && !(understood && **name == "no-store"))
        .map(|name| (*name).to_owned())
        .collect();
    for name in ["max-age", "s-maxage"] {
        list.extend(said.seconds(name).map(|seconds| format!("{name}={seconds}")));
    }
    if !list.is_empty() {
        shown.insert(header::CACHE_CONTROL, number(list.join(", ")));
    }
    let time = |name: &HeaderName| {
        let mut lines = head.headers.get_all(name).iter();
        let (first, more) = (lines.next()?, lines.next());
        let text = first.to_str().ok().filter(|_| more.is_none())?;
        httpdate::parse_http_date(text).ok()
    };
    let sent = time(&header::DATE).unwrap_or(head.received);
    shown.insert(header::DATE, date(sent));
    if head.headers.contains_key(header::EXPIRES) {
        // What cannot be read is in the past.
        shown.insert(header::EXPIRES, date(time(&header::EXPIRES).unwrap_or(sent)));
    }
    if let Some(modified) = time(&header::LAST_MODIFIED) {
        shown.insert(header::LAST_MODIFIED, date(modified));
    }
    shown.insert(header::AGE, number(age(head, sent).to_string()));
    for name in [header::SET_COOKIE, header::PRAGMA] {
        if let Some(value) = head.headers.get(&name) {
            shown.insert(name, value.clone());
        }
    }
    if vary_of(&head.headers).is_none() {
        shown.insert(header::VARY, HeaderValue::from_static("*"));
    }
    shown
}

/// Returns how old a response was when it came, in seconds: `corrected_initial_age` of RFC 9111, section 4.2.3. An Age
/// that cannot be read, or that is there twice, makes it as old as can be.
fn age(head: &ResponseHead, sent: SystemTime) -> u64 {
    let lines: Vec<String> = head
        .headers
        .get_all(header::AGE)
        .iter()
        .flat_map(|line| list_items(&String::from_utf8_lossy(line.as_bytes())))
        .collect();
    let told = match &lines[..] {
        [] if !head.headers.contains_key(header::AGE) => 0,
        [one] => seconds(one).unwrap_or(SECONDS_MAX),
        _ => SECONDS_MAX,
    };
    let apparent = head.received.duration_since(sent).unwrap_or_default().as_secs();
    apparent.max(told.saturating_add(head.delay.as_secs()))
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    /// Headers of a response. A value that begins with `now` is a date, so many seconds after now.
    type Said<'a> = &'a [(&'a str, &'a str)];

    const NOW: Duration = Duration::from_secs(1_700_000_000);

    fn now() -> SystemTime {
        UNIX_EPOCH + NOW
    }

    fn head(status: u16, headers: Said<'_>) -> ResponseHead {
        let mut response = Response::new(());
        for (name, value) in headers {
            let value = match value.strip_prefix("now") {
                Some(seconds) => date(
                    UNIX_EPOCH + Duration::from_secs((NOW.as_secs() as i64 + seconds.parse::<i64>().unwrap()) as u64),
                ),
                None => HeaderValue::from_str(value).unwrap(),
            };
            response.headers_mut().append(HeaderName::try_from(*name).unwrap(), value);
        }
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        let mut head = ResponseHead::new(&response.into_parts().0, Vec::new(), SystemTime::now());
        if !headers.iter().any(|(name, _)| *name == "date") {
            head.headers.insert(header::DATE, date(now()));
        }
        (head.received, head.delay) = (now(), Duration::ZERO);
        head
    }

    fn lifetime(freshness: &Freshness) -> Duration {
        freshness.until.duration_since(now()).unwrap()
    }

    /// Seconds for which a response may be used; `None` if it may not be kept.
    fn kept_for(status: u16, headers: Said<'_>) -> Option<u64> {
        let freshness = Freshness::of(&head(status, headers), &FreshnessOptions::default());
        freshness.policy.is_storable().then(|| lifetime(&freshness).as_secs())
    }

    #[test]
    fn freshness_is_what_the_rfc_says() {
        let cc = "cache-control";
        let table: &[(u16, Said<'_>, Option<u64>)] = &[
            (200, &[(cc, "max-age=60")], Some(60)),
            (200, &[(cc, "MAX-AGE=60, no-cache")], Some(0)),
            (200, &[(cc, "max-age=60"), (cc, "s-maxage=5")], Some(5)),
            (200, &[(cc, "max-age=60"), ("age", "50")], Some(10)),
            (200, &[(cc, "max-age=60"), ("age", "0, 0")], Some(0)),
            (200, &[(cc, "max-age=60"), ("age", "x")], Some(0)),
            (200, &[(cc, "max-age=60"), ("date", "now-20")], Some(40)),
            (200, &[(cc, "max-age=60"), ("expires", "0")], Some(60)),
            (200, &[("expires", "now+60")], Some(60)),
            (200, &[("expires", "0")], Some(0)),
            (200, &[("expires", "now-1")], Some(0)),
            (200, &[("last-modified", "now-1000")], Some(100)),
            (200, &[(cc, "proxy-revalidate, max-age=60")], Some(60)),
            (200, &[(cc, "private, max-age=60")], None),
            (200, &[(cc, "nO-StOrE, max-age=60")], None),
            (200, &[(cc, "no-store, must-understand, max-age=60")], Some(60)),
            (599, &[(cc, "must-understand, max-age=60")], None),
            (599, &[(cc, "max-age=60")], Some(60)),
            (599, &[("last-modified", "now-1000")], None),
            (503, &[("last-modified", "now-1000")], None),
            (206, &[(cc, "max-age=60")], None),
            (302, &[], None),
            (302, &[(cc, "max-age=60")], Some(60)),
            (404, &[], Some(0)),
            // A cookie is for one user, unless the response is said to be for all.
            (200, &[(cc, "max-age=60"), ("set-cookie", "a=b")], Some(0)),
            (200, &[(cc, "public, max-age=60"), ("set-cookie", "a=b")], Some(60)),
            (200, &[(cc, "max-age=60"), ("vary", "a, *")], Some(0)),
        ];
        for (status, headers, expected) in table {
            assert_eq!(kept_for(*status, headers), *expected, "{status} {headers:?}");
        }
    }

    #[test]
    fn a_response_with_a_cookie_is_not_kept_even_if_it_could_be_confirmed() {
        for (said, kept) in [("max-age=60", false), ("public, max-age=60", true)] {
            let head = head(200, &[("cache-control", said), ("set-cookie", "a=b"), ("etag", "\"a\"")]);
            assert_eq!(Freshness::of(&head, &FreshnessOptions::default()).is_storable(), kept, "{said}");
        }
    }

    #[test]
    fn an_authorized_response_is_kept_only_if_it_says_so() {
        for (said, kept) in [("max-age=60", false), ("public, max-age=60", true), ("s-maxage=60", true)] {
            let mut head = head(200, &[("cache-control", said)]);
            head.authorized = true;
            assert_eq!(Freshness::of(&head, &FreshnessOptions::default()).is_storable(), kept, "{said}");
        }
    }

    #[test]
    fn stale_responses_are_used_only_where_that_is_allowed() {
        let minute = Duration::from_secs(60);
        let options = FreshnessOptions {
            stale_while_revalidate: minute,
            stale_if_error: minute,
            negative: minute,
            ..FreshnessOptions::default()
        };
        let after = |seconds: u64| now() + Duration::from_secs(seconds);
        for (said, own, both) in [
            ("max-age=10", false, true),
            ("max-age=10, stale-while-revalidate=60, stale-if-error=60", true, true),
            ("max-age=10, stale-while-revalidate=60, must-revalidate", false, false),
            ("s-maxage=10", false, false),
            ("max-age=10, proxy-revalidate", false, false),
        ] {
            let head = head(200, &[("cache-control", said)]);
            for (options, expected) in [(FreshnessOptions::default(), own), (options, both)] {
                let freshness = Freshness::of(&head, &options);
                let none = HeaderMap::new();
                assert_eq!(freshness.for_request(&none, after(5)), Use::Fresh, "{said}");
                assert_eq!(freshness.for_request(&none, after(50)) == Use::WhileAsking, expected, "{said}");
                assert_eq!(freshness.may_stand_in(after(50)), expected, "{said}");
                assert_eq!(freshness.for_request(&none, after(500)), Use::Confirm, "{said}");
                assert!(!freshness.may_stand_in(after(500)), "{said}");
            }
        }
        let etag = Freshness::of(&head(200, &[("etag", "\"a\"")]), &options);
        assert!(etag.is_storable() && !etag.may_stand_in(after(1)), "it may be different for each client");
        assert_eq!(etag.for_request(&HeaderMap::new(), now()), Use::Confirm);
        assert_eq!(lifetime(&Freshness::of(&head(404, &[]), &options)), minute);
        let said = head(404, &[("cache-control", "max-age=1")]);
        assert_eq!(lifetime(&Freshness::of(&said, &options)).as_secs(), 1);
    }

    #[test]
    fn the_operator_says_how_long_a_response_is_fresh_that_does_not() {
        let options = FreshnessOptions { unspecified: Duration::from_secs(60), ..FreshnessOptions::default() };
        let cc = "cache-control";
        let table: &[(u16, Said<'_>, u64)] = &[
            (200, &[], 60),
            (200, &[("etag", "\"a\"")], 60),
            (301, &[], 60),
            (302, &[], 0),
            (404, &[], 0),
            (503, &[], 0),
            (200, &[(cc, "max-age=5")], 5),
            (200, &[(cc, "no-cache")], 0),
            (200, &[("pragma", "No-Cache")], 0),
            (200, &[("pragma", "no-cache"), ("etag", "\"a\"")], 0),
            (200, &[("expires", "0")], 0),
            (200, &[("set-cookie", "a=b")], 0),
            (200, &[("last-modified", "now-1000")], 100),
        ];
        for (status, headers, expected) in table {
            let freshness = Freshness::of(&head(*status, headers), &options);
            assert_eq!(lifetime(&freshness).as_secs(), *expected, "{status} {headers:?}");
            assert!(*expected == 0 || freshness.is_storable(), "{status} {headers:?}");
        }
        assert!(!Freshness::of(&head(200, &[(cc, "private")]), &options).is_storable());
        let authorized = ResponseHead { authorized: true, ..head(200, &[]) };
        assert!(!Freshness::of(&authorized, &options).is_storable());
    }

    #[test]
    fn a_client_may_ask_for_something_fresher() {
        let freshness = Freshness::of(&head(200, &[("cache-control", "max-age=60")]), &FreshnessOptions::default());
        let at = now() + Duration::from_secs(30);
        for (name, said, expected) in [
            ("cache-control", "max-age=40", Use::Fresh),
            ("cache-control", "Max-Age=\"20\"", Use::Confirm),
            ("cache-control", "min-fresh=40", Use::Confirm),
            ("cache-control", "no-cache", Use::Confirm),
            ("pragma", "no-cache", Use::Confirm),
            ("x", "no-cache", Use::Fresh),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(HeaderName::try_from(name).unwrap(), HeaderValue::from_str(said).unwrap());
            assert_eq!(freshness.for_request(&headers, at), expected, "{name}: {said}");
        }
        let mut headers = HeaderMap::new();
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("max-stale=20"));
        assert_eq!(freshness.for_request(&headers, now() + Duration::from_secs(70)), Use::Fresh);
        assert_eq!(freshness.for_request(&headers, now() + Duration::from_secs(90)), Use::Confirm);
        for said in ["no-cache", "max-age=60, proxy-revalidate", "s-maxage=60"] {
            let never = Freshness::of(&head(200, &[("cache-control", said)]), &FreshnessOptions::default());
            assert_eq!(never.for_request(&headers, now() + Duration::from_secs(70)), Use::Confirm, "{said}");
        }
    }
}
