//! Conditional requests, in the order of RFC 9110, section 13.2.2.

use std::time::SystemTime;

use headers::{ETag, Header, HeaderMapExt, IfMatch, IfModifiedSince, IfNoneMatch, IfRange, IfUnmodifiedSince};
use http::{HeaderMap, HeaderValue};

/// A condition that every version meets.
const ANY: &str = "*";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// 412
    Failed,
    /// 304
    NotModified,
    /// The file, or ranges of it if `ranges`.
    Send { ranges: bool },
}

/// What tells versions of a file apart.
#[derive(Debug, Clone, Copy)]
pub struct Validators<'a> {
    pub etag: Option<&'a ETag>,
    /// When it was changed last, in whole seconds.
    pub modified: Option<SystemTime>,
}

/// Decides for a GET or HEAD request and the version with these validators. A condition that is malformed, or about a
/// validator that there is not, counts as absent, except for `If-Match`: that is never met then, since it protects against
/// acting on another version.
pub fn decide(request: &HeaderMap, version: Validators<'_>) -> Decision {
    let Validators { etag, modified } = version;
    if let Some(value) = request.get(IfMatch::name()) {
        let met = match etag {
            Some(etag) => request.typed_get::<IfMatch>().is_some_and(|condition| condition.precondition_passes(etag)),
            None => value == ANY,
        };
        if !met {
            return Decision::Failed;
        }
    } else if let (Some(condition), Some(modified)) = (request.typed_get::<IfUnmodifiedSince>(), modified)
        && !condition.precondition_passes(modified)
    {
        return Decision::Failed;
    }
    if let Some(value) = request.get(IfNoneMatch::name()) {
        let met = match etag {
            Some(etag) => {
                request.typed_get::<IfNoneMatch>().is_none_or(|condition| condition.precondition_passes(etag))
            }
            None => value != ANY,
        };
        if !met {
            return Decision::NotModified;
        }
    } else if let (Some(condition), Some(modified)) = (request.typed_get::<IfModifiedSince>(), modified)
        && !condition.is_modified(modified)
    {
        return Decision::NotModified;
    }
    Decision::Send { ranges: request.get(IfRange::name()).is_none_or(|value| has_that(value, version)) }
}

/// Whether the client of an `If-Range` has a part of this version. A date must be exactly that of the version.
fn has_that(value: &HeaderValue, version: Validators<'_>) -> bool {
    let Ok(text) = value.to_str() else { return false };
    match httpdate::parse_http_date(text) {
        Ok(date) => version.modified == Some(date),
        Err(_) => {
            let tag = IfRange::decode(&mut std::iter::once(value));
            version.etag.is_some_and(|etag| tag.is_ok_and(|tag| !tag.is_modified(Some(etag), None)))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use http::{HeaderName, header};
    use proptest::prelude::*;

    use super::*;

    const MODIFIED: u64 = 1_700_000_000;

    /// Tags of a list, with whether they are weak.
    fn tags(list: &str) -> Vec<(bool, &str)> {
        list.split(", ").map(|tag| (tag.starts_with("W/"), tag.trim_start_matches("W/").trim_matches('"'))).collect()
    }

    /// The five steps, one after the other. `tag` is strong.
    fn plain(request: &[(HeaderName, String)], tag: &str, modified: u64) -> Decision {
        let get = |name: HeaderName| request.iter().find(|(n, _)| *n == name).map(|(_, v)| v.as_str());
        let date = |text: &str| {
            let time = httpdate::parse_http_date(text).ok()?;
            Some(time.duration_since(UNIX_EPOCH).unwrap().as_secs())
        };
        if let Some(list) = get(header::IF_MATCH) {
            if list != "*" && !tags(list).contains(&(false, tag)) {
                return Decision::Failed;
            }
        } else if let Some(since) = get(header::IF_UNMODIFIED_SINCE).and_then(date)
            && modified > since
        {
            return Decision::Failed;
        }
        if let Some(list) = get(header::IF_NONE_MATCH) {
            if list == "*" || tags(list).iter().any(|(_, t)| *t == tag) {
                return Decision::NotModified;
            }
        } else if let Some(since) = get(header::IF_MODIFIED_SINCE).and_then(date)
            && modified <= since
        {
            return Decision::NotModified;
        }
        let ranges = match get(header::IF_RANGE) {
            None => true,
            Some(text) if text.contains('"') => tags(text) == [(false, tag)],
            Some(text) => date(text) == Some(modified),
        };
        Decision::Send { ranges }
    }

    fn tag_list() -> impl Strategy<Value = String> {
        let tag = || prop_oneof![Just("\"a\""), Just("\"b\""), Just("W/\"a\""), Just("W/\"b\""), Just("\"a,b\"")];
        prop_oneof![1 => Just("*".to_owned()), 6 => prop::collection::vec(tag(), 1..4).prop_map(|tags| tags.join(", "))]
    }

    fn date() -> impl Strategy<Value = String> {
        (MODIFIED - 2..MODIFIED + 3).prop_map(|at| httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(at)))
    }

    fn maybe(name: HeaderName, value: BoxedStrategy<String>) -> BoxedStrategy<Option<(HeaderName, String)>> {
        prop::option::weighted(0.4, value.prop_map(move |value| (name.clone(), value))).boxed()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60_000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn conditions_are_those_of_a_plain_reading(
            fields in (
                maybe(header::IF_MATCH, tag_list().boxed()),
                maybe(header::IF_UNMODIFIED_SINCE, date().boxed()),
                maybe(header::IF_NONE_MATCH, tag_list().boxed()),
                maybe(header::IF_MODIFIED_SINCE, date().boxed()),
                maybe(header::IF_RANGE, prop_oneof![
                    date(),
                    Just("\"a\"".to_owned()),
                    Just("W/\"a\"".to_owned()),
                    Just("\"b\"".to_owned()),
                ].boxed()),
            ),
        ) {
            let request: Vec<_> = [fields.0, fields.1, fields.2, fields.3, fields.4].into_iter().flatten().collect();
            let mut map = HeaderMap::new();
            for (name, value) in &request {
                map.insert(name.clone(), HeaderValue::from_str(value).unwrap());
            }
            let etag: ETag = "\"a\"".parse().unwrap();
            let modified = Some(UNIX_EPOCH + Duration::from_secs(MODIFIED));
            let got = decide(&map, Validators { etag: Some(&etag), modified });
            // A tag with a comma is not split by the plain reading: none of the tested versions has it.
            prop_assert_eq!(got, plain(&request, "a", MODIFIED), "{:?}", request);
        }
    }

    #[test]
    fn a_malformed_condition_that_protects_is_not_met() {
        let mut map = HeaderMap::new();
        map.insert(header::IF_MATCH, HeaderValue::from_static("a"));
        let etag: ETag = "\"a\"".parse().unwrap();
        let modified = Some(UNIX_EPOCH);
        assert_eq!(decide(&map, Validators { etag: Some(&etag), modified }), Decision::Failed);
    }

    #[test]
    fn a_version_without_validators_meets_only_what_every_version_meets() {
        let none = Validators { etag: None, modified: None };
        for (name, value, expected) in [
            (header::IF_MATCH, "*", Decision::Send { ranges: true }),
            (header::IF_MATCH, "\"a\"", Decision::Failed),
            (header::IF_NONE_MATCH, "*", Decision::NotModified),
            (header::IF_NONE_MATCH, "\"a\"", Decision::Send { ranges: true }),
            (header::IF_MODIFIED_SINCE, "Sun, 06 Nov 1994 08:49:37 GMT", Decision::Send { ranges: true }),
            (header::IF_UNMODIFIED_SINCE, "Sun, 06 Nov 1994 08:49:37 GMT", Decision::Send { ranges: true }),
            (header::IF_RANGE, "\"a\"", Decision::Send { ranges: false }),
        ] {
            let map = HeaderMap::from_iter([(name.clone(), HeaderValue::from_static(value))]);
            assert_eq!(decide(&map, none), expected, "{name}: {value}");
        }
    }
}
