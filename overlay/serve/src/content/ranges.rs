//! Ranges of bytes (RFC 9110, section 14).

use std::ops::Range;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};

use super::reply;

/// The most ranges of one request. A request with more is answered with the whole file, as the RFC allows: each range
/// costs a head of its own.
const RANGES_MAX: usize = 64;
const UNIT: &str = "bytes=";
/// The type of content of which nothing else is known.
const OCTETS: HeaderValue = HeaderValue::from_static("application/octet-stream");

/// What a request wants of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    Whole,
    One(Range<u64>),
    Several(Vec<Range<u64>>),
    /// No byte of the file is in the ranges.
    None,
}

/// Reads the header `Range` for a file of `size` bytes. A header that is malformed or in another unit counts as absent,
/// as the RFC says. So does one whose ranges are longer than the file in all: then they overlap, and repeat bytes.
pub fn wanted(header: &HeaderValue, size: u64) -> Wanted {
    let Some(specs) = header.to_str().ok().and_then(without_unit) else { return Wanted::Whole };
    let mut ranges = Vec::new();
    let mut count = 0;
    for spec in specs.split(',').map(|spec| spec.trim_matches([' ', '\t'])) {
        // A list may have empty elements.
        if spec.is_empty() {
            continue;
        }
        count += 1;
        match parse(spec, size) {
            Some(Some(range)) => ranges.push(range),
            Some(None) => {}
            None => return Wanted::Whole,
        }
    }
    let bytes = ranges.iter().fold(0_u64, |sum, range| sum.saturating_add(range.end - range.start));
    match (ranges.len(), count) {
        (_, 0) => Wanted::Whole,
        (0, _) => Wanted::None,
        (1, _) => Wanted::One(ranges.remove(0)),
        (many, _) if many > RANGES_MAX || bytes > size => Wanted::Whole,
        _ => Wanted::Several(ranges),
    }
}

/// Units are compared without case.
fn without_unit(text: &str) -> Option<&str> {
    let unit = text.get(..UNIT.len())?;
    unit.eq_ignore_ascii_case(UNIT).then(|| &text[UNIT.len()..])
}

/// Returns the bytes of one range; `Some(None)` if the file has none of them, `None` if it is malformed.
fn parse(spec: &str, size: u64) -> Option<Option<Range<u64>>> {
    let (first, last) = spec.split_once('-')?;
    match (number(first)?, number(last)?) {
        (None, None) => None,
        (None, Some(suffix)) => {
            let from = size.saturating_sub(suffix);
            Some((from < size).then_some(from..size))
        }
        (Some(first), last) => {
            let last = last.unwrap_or(u64::MAX);
            if last < first {
                return None;
            }
            Some((first < size).then(|| first..size.min(last.saturating_add(1))))
        }
    }
}

/// Returns the number, `Some(None)` for no text, `None` for what is no number. A number that is too large is beyond every
/// file.
fn number(text: &str) -> Option<Option<u64>> {
    if text.is_empty() {
        return Some(None);
    }
    text.bytes().all(|b| b.is_ascii_digit()).then(|| Some(text.parse().unwrap_or(u64::MAX)))
}

/// The part of a file that a response has.
pub struct Selection {
    /// Each with a head.
    pub parts: Vec<(Bytes, Range<u64>)>,
    /// Bytes of all.
    pub length: u64,
}

/// Selects what is wanted of a file, and sets status and headers of the response; `None` if there is no such part.
pub fn select<T>(wanted: Wanted, size: u64, response: &mut Response<T>) -> Option<Selection> {
    let parts = match wanted {
        Wanted::Whole => vec![(Bytes::new(), 0..size)],
        Wanted::None => {
            response.headers_mut().remove(header::CONTENT_TYPE);
            response.headers_mut().insert(header::CONTENT_RANGE, reply::value(format!("bytes */{size}")));
            *response.status_mut() = StatusCode::RANGE_NOT_SATISFIABLE;
            return None;
        }
        Wanted::One(range) => {
            response.headers_mut().insert(header::CONTENT_RANGE, reply::value(content_range(&range, size)));
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            vec![(Bytes::new(), range)]
        }
        Wanted::Several(ranges) => {
            let of_each = response.headers().get(header::CONTENT_TYPE).cloned();
            let (content_type, parts) = multipart(&ranges, size, &of_each.unwrap_or(OCTETS));
            response.headers_mut().insert(header::CONTENT_TYPE, content_type);
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            parts
        }
    };
    let length = parts.iter().map(|(head, range)| head.len() as u64 + (range.end - range.start)).sum::<u64>();
    response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    Some(Selection { parts, length })
}

pub fn content_range(range: &Range<u64>, size: u64) -> String {
    format!("bytes {}-{}/{size}", range.start, range.end - 1)
}

/// Returns the content type and the parts of a response with several ranges: a head, and the bytes after it. The last
/// part has a head only.
pub fn multipart(
    ranges: &[Range<u64>],
    size: u64,
    content_type: &HeaderValue,
) -> (HeaderValue, Vec<(Bytes, Range<u64>)>) {
    // Long enough that no file contains it by chance.
    let boundary = format!("{:032x}", rand::random::<u128>());
    let content_type = String::from_utf8_lossy(content_type.as_bytes());
    let mut parts = Vec::with_capacity(ranges.len() + 1);
    for (at, range) in ranges.iter().enumerate() {
        let before = if at == 0 { "" } else { "\r\n" };
        let head = format!(
            "{before}--{boundary}\r\nContent-Type: {content_type}\r\nContent-Range: {}\r\n\r\n",
            content_range(range, size)
        );
        parts.push((Bytes::from(head), range.clone()));
    }
    parts.push((Bytes::from(format!("\r\n--{boundary}--\r\n")), 0..0));
    (reply::value(format!("multipart/byteranges; boundary={boundary}")), parts)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Which bytes a list of ranges names, byte by byte. `None`: the header does not count.
    fn plain(header: &str, size: u64) -> Option<Vec<Vec<u64>>> {
        let list = header.to_ascii_lowercase();
        let list = list.strip_prefix("bytes=")?;
        let digits = |text: &str| text.chars().all(|c| c.is_ascii_digit());
        let mut all = Vec::new();
        for spec in list.split(',').map(|s| s.trim_matches([' ', '\t'])).filter(|s| !s.is_empty()) {
            let (first, last) = spec.split_once('-')?;
            if !digits(first) || !digits(last) || (first.is_empty() && last.is_empty()) {
                return None;
            }
            let last_u = last.parse::<u128>().ok();
            let chosen = if first.is_empty() {
                (0..size).filter(|at| u128::from(size - at) <= last_u.unwrap()).collect()
            } else {
                let first = first.parse::<u128>().unwrap();
                if last_u.is_some_and(|last| last < first) {
                    return None;
                }
                (0..size).filter(|at| (first..=last_u.unwrap_or(u128::MAX)).contains(&u128::from(*at))).collect()
            };
            all.push(chosen);
        }
        if all.is_empty() { None } else { Some(all) }
    }

    fn spec() -> impl Strategy<Value = String> {
        let n =
            || prop_oneof![8 => (0_u64..40).prop_map(|n| n.to_string()), 1 => Just("99999999999999999999".to_owned())];
        prop_oneof![
            6 => (n(), n()).prop_map(|(a, b)| format!("{a}-{b}")),
            3 => n().prop_map(|a| format!("{a}-")),
            3 => n().prop_map(|a| format!("-{a}")),
            1 => "[-0-9a ,=]{0,4}",
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60_000, failure_persistence: None, ..ProptestConfig::default() })]

        /// The bytes of each answer are those that a reading of the header, byte by byte, gives.
        #[test]
        fn ranges_are_those_of_a_plain_reading(
            specs in prop::collection::vec(spec(), 0..5),
            unit in prop_oneof![9 => Just("bytes="), 1 => Just("Bytes="), 1 => Just("lines="), 1 => Just("bytes ")],
            separator in prop_oneof![Just(","), Just(", "), Just(" ,\t")],
            size in 0_u64..40,
        ) {
            let header = format!("{unit}{}", specs.join(separator));
            let Ok(value) = HeaderValue::from_str(&header) else { return Ok(()) };
            let got = wanted(&value, size);
            let expected: Option<Vec<Vec<u64>>> = plain(&header, size);
            let Some(expected) = expected else {
                prop_assert_eq!(got, Wanted::Whole, "{}", header);
                return Ok(());
            };
            let expected: Vec<Vec<u64>> = expected.into_iter().filter(|bytes| !bytes.is_empty()).collect();
            let repeated = expected.iter().map(Vec::len).sum::<usize>() as u64 > size;
            let got: Vec<Vec<u64>> = match got {
                Wanted::None => Vec::new(),
                Wanted::One(range) => vec![range.collect()],
                Wanted::Several(ranges) => ranges.into_iter().map(Iterator::collect).collect(),
                Wanted::Whole => {
                    prop_assert!(expected.len() > 1 && repeated, "{}", header);
                    return Ok(());
                }
            };
            prop_assert!(expected.len() < 2 || !repeated, "{}", header);
            prop_assert_eq!(got, expected, "{}", header);
        }
    }

    #[test]
    fn many_ranges_are_the_whole_file() {
        let header = format!("bytes={}", (0..100).map(|at| format!("{0}-{0}", at * 2)).collect::<Vec<_>>().join(","));
        assert_eq!(wanted(&HeaderValue::from_str(&header).unwrap(), 1 << 20), Wanted::Whole);
    }

    #[test]
    fn a_multipart_body_has_a_head_for_each_range() {
        let (content_type, parts) = multipart(&[0..2, 5..6], 10, &HeaderValue::from_static("text/plain"));
        let boundary =
            content_type.to_str().unwrap().strip_prefix("multipart/byteranges; boundary=").unwrap().to_owned();
        let file = b"0123456789";
        let mut body = Vec::new();
        for (head, range) in parts {
            body.extend_from_slice(&head);
            body.extend_from_slice(&file[range.start as usize..range.end as usize]);
        }
        let expected = format!(
            "--{boundary}\r\nContent-Type: text/plain\r\nContent-Range: bytes 0-1/10\r\n\r\n01\r\n\
             --{boundary}\r\nContent-Type: text/plain\r\nContent-Range: bytes 5-5/10\r\n\r\n5\r\n--{boundary}--\r\n"
        );
        assert_eq!(String::from_utf8(body).unwrap(), expected);
    }
}
