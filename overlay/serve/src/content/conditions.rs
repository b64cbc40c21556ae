//! Conditional requests, in the order of RFC 9110, section 13.2.2.

use std::time::SystemTime;

use headers::{ETag, Header, HeaderMapExt, IfMatch, IfModifiedSince, IfNoneMatch, IfRange, IfUnmodifiedSince};
use http::{HeaderMap, HeaderValue};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// 412
    Failed,
    /// 304
    NotModified,
    /// The file, or ranges of it if `ranges`.
    Send { ranges: bool },
}

/// Decides for a GET or HEAD request and the version with this tag, changed at `modified`, in whole seconds. A condition
/// that is malformed counts as absent, except for `If-Match`: that is never met then, since it protects against acting on
/// another version.
pub fn decide(request: &HeaderMap, etag: &ETag, modified: SystemTime) -> Decision {
    if request.contains_key(IfMatch::name()) {
        let met = request.typed_get::<IfMatch>().is_some_and(|condition| condition.precondition_passes(etag));
        if !met {
            return Decision::Failed;
        }
    } else if let Some(condition) = request.typed_get::<IfUnmodifiedSince>()
        && !condition.precondition_passes(modified)
    {
        return Decision::Failed;
    }
    if request.contains_key(IfNoneMatch::name()) {
        let met = request.typed_get::<IfNoneMatch>().is_none_or(|condition| condition.precondition_passes(etag));
        if !met {
            return Decision::NotModified;
        }
    } else if let Some(condition) = request.typed_get::<IfModifiedSince>()
        && !condition.is_modified(modified)
    {
        return Decision::NotModified;
    }
    Decision::Send { ranges: request.get(IfRange::name()).is_none_or(|value| has_that(value, etag, modified)) }
}

/// Whether the client of an `If-Range` has a part of this version. A date must be exactly that of the version.
fn has_that(value: &HeaderValue, etag: &ETag, modified: SystemTime) -> bool {
    let Ok(text) = value.to_str() else { return false };
    match httpdate::parse_http_date(text) {
        Ok(date) => date == modified,
        Err(_) => IfRange::decode(&mut std::iter::once(value)).is_ok_and(|tag| !tag.is_modified(Some(etag), None)),
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
            let got = decide(&map, &etag, UNIX_EPOCH + Duration::from_secs(MODIFIED));
            // A tag with a comma is not split by the plain reading: none of the tested versions has it.
            prop_assert_eq!(got, plain(&request, "a", MODIFIED), "{:?}", request);
        }
    }

    #[test]
    fn a_malformed_condition_that_protects_is_not_met() {
        let mut map = HeaderMap::new();
        map.insert(header::IF_MATCH, HeaderValue::from_static("a"));
        let etag: ETag = "\"a\"".parse().unwrap();
        assert_eq!(decide(&map, &etag, UNIX_EPOCH), Decision::Failed);
    }
}
