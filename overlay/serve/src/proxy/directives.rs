//! The directives of Cache-Control (RFC 9111, section 5.2).

use http::{HeaderMap, HeaderName, header};

/// The most seconds that a directive can mean (RFC 9111, section 1.2.2).
pub const SECONDS_MAX: u64 = 1 << 31;

/// The directives of all lines of a header.
#[derive(Debug, Default)]
pub struct Directives(Vec<(String, Option<String>)>);

impl Directives {
    pub fn of(headers: &HeaderMap) -> Self {
        Self::in_header(headers, &header::CACHE_CONTROL)
    }

    pub fn in_header(headers: &HeaderMap, name: &HeaderName) -> Self {
        let mut all = Vec::new();
        for line in headers.get_all(name) {
            for item in list_items(&String::from_utf8_lossy(line.as_bytes())) {
                let (name, value) = match item.split_once('=') {
                    // With spaces around the sign, the value is none that can be believed.
                    Some((name, value)) => (name, Some(if name.ends_with(' ') { "" } else { value })),
                    None => (item.as_str(), None),
                };
                all.push((name.trim_end().to_ascii_lowercase(), value.map(unquoted)));
            }
        }
        Self(all)
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(n, _)| n == name)
    }

    /// Returns the seconds of a directive. Of several, the fewest; what is no number of seconds means none.
    pub fn seconds(&self, name: &str) -> Option<u64> {
        let named = self.0.iter().filter(|(n, _)| n == name);
        named.map(|(_, value)| value.as_deref().and_then(seconds).unwrap_or(0)).min()
    }

    /// The same, but `None` for a directive without a value.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(n, _)| n == name)?.1.as_deref()
    }
}

/// Returns a number of seconds. A number that is too large is the largest.
pub fn seconds(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().unwrap_or(SECONDS_MAX).min(SECONDS_MAX))
}

/// Returns the non-empty items of a list. A comma inside a quoted string does not end an item.
pub fn list_items(text: &str) -> Vec<String> {
    let (mut items, mut item) = (Vec::new(), String::new());
    let (mut quoted, mut escaped) = (false, false);
    for c in text.chars() {
        match c {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            ',' if !quoted => {
                items.push(std::mem::take(&mut item));
                continue;
            }
            _ => {}
        }
        item.push(c);
    }
    items.push(item);
    items.iter().map(|item| item.trim().to_owned()).filter(|item| !item.is_empty()).collect()
}

/// Returns the text of a quoted string, or the same text if it is none.
fn unquoted(text: &str) -> String {
    let Some(inner) = text.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) else { return text.to_owned() };
    let mut escaped = false;
    inner
        .chars()
        .filter(|c| {
            escaped = *c == '\\' && !escaped;
            !escaped
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn of(lines: &[&'static str]) -> Directives {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(header::CACHE_CONTROL, HeaderValue::from_static(line));
        }
        Directives::of(&headers)
    }

    #[test]
    fn names_have_no_case_and_values_may_be_quoted() {
        let all = of(&["Max-Age=\"60\" , No-Cache", ", private=\"a, b\""]);
        assert_eq!(all.seconds("max-age"), Some(60));
        assert!(all.has("no-cache") && all.has("private") && !all.has("b\""));
        assert_eq!(all.value("private"), Some("a, b"));
    }

    #[test]
    fn what_is_no_number_of_seconds_means_none_at_all() {
        for value in [
            "max-age='60'",
            "max-age=60.0",
            "max-age=-1",
            "max-age",
            "max-age=",
            "max-age=1a",
            "max-age =60",
            "max-age= 60",
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::CACHE_CONTROL, HeaderValue::from_str(value).unwrap());
            assert_eq!(Directives::of(&headers).seconds("max-age"), Some(0), "{value}");
        }
        assert_eq!(of(&["max-age=003600"]).seconds("max-age"), Some(3600));
        assert_eq!(of(&["max-age=99999999999999999999999"]).seconds("max-age"), Some(SECONDS_MAX));
        assert_eq!(of(&["x=\"max-age=60\""]).seconds("max-age"), None);
        assert_eq!(of(&["max-age=60", "max-age=1"]).seconds("max-age"), Some(1));
    }

    #[test]
    fn an_escaped_quote_does_not_end_a_string() {
        assert_eq!(of(&["x=\"a\\\", max-age=60\", max-age=1"]).seconds("max-age"), Some(1));
        assert_eq!(of(&["x=\"a\\\\\", max-age=7"]).value("x"), Some("a\\"));
    }
}
