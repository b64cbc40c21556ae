//! Values of the command line, and their presentation.

use std::time::{Duration, UNIX_EPOCH};

use bytesize::ByteSize;
use forebay_backends::WorkProgress;
use forebay_daemon::config::ThrottleConfig;
use forebay_system::terminal::visible;

/// Parses `100MB/s,2ms`; in mount options, where commas separate the options, `100MB/s:2ms`.
pub fn pace(text: &str) -> Result<ThrottleConfig, String> {
    let (rate, latency) = text.split_once([',', ':']).unwrap_or((text, "0s"));
    let bytes_per_sec = self::rate(rate)?;
    let latency =
        humantime::parse_duration(latency.trim()).map_err(|e| format!("latency `{latency}`, such as 2ms: {e}"))?;
    Ok(ThrottleConfig { bytes_per_sec, latency })
}

/// Parses `100MB/s`, as bytes in a second.
pub fn rate(text: &str) -> Result<u64, String> {
    let rate: ByteSize =
        text.trim().trim_end_matches("/s").parse().map_err(|e| format!("rate `{text}`, such as 100MB/s: {e}"))?;
    if rate.as_u64() == 0 { Err("a rate above zero is needed, such as 100MB/s".into()) } else { Ok(rate.as_u64()) }
}

/// Parses the length of an interval.
pub fn interval(text: &str) -> Result<Duration, String> {
    const SHORTEST: Duration = Duration::from_millis(100);
    let interval = humantime::parse_duration(text).map_err(|e| format!("`{text}`, such as 1s: {e}"))?;
    if interval < SHORTEST { Err("at least 100ms".into()) } else { Ok(interval) }
}

/// Parses a duration. The daemon and the program add it to times, so it has a limit.
pub fn duration(text: &str) -> Result<Duration, String> {
    const LONGEST: Duration = Duration::from_secs(100 * 365 * 86_400);
    let duration = humantime::parse_duration(text).map_err(|e| e.to_string())?;
    if duration > LONGEST { Err("at most 36500d".into()) } else { Ok(duration) }
}

/// Parses a share of a whole: above 0 and up to 1.
pub fn fraction(text: &str) -> Result<f64, String> {
    let fraction: f64 = text.trim().parse().map_err(|e| format!("`{text}`, such as 0.1: {e}"))?;
    match fraction {
        _ if fraction > 0.0 && fraction <= 1.0 => Ok(fraction),
        _ => Err("a share is above 0 and at most 1, such as 0.1".into()),
    }
}

/// Parses the name of an eviction policy.
pub fn evictor(text: &str) -> Result<String, String> {
    use forebay_prefetch::eviction::names;
    match names().any(|name| name == text) {
        true => Ok(text.to_owned()),
        false => Err(format!("there is no such policy; known are {}", names().collect::<Vec<_>>().join(", "))),
    }
}

/// Parses the name of a job.
pub fn job_id(text: &str) -> Result<String, String> {
    forebay_api::jobs::check_id(text).map(|()| text.to_owned())
}

/// Checks the name of a scratch directory.
pub fn scratch_id(text: &str) -> Result<String, String> {
    forebay_api::scratch::check_scratch_id(text).map(|()| text.to_owned())
}

pub fn bytes(count: u64) -> String {
    ByteSize(count).to_string()
}

/// A time, from seconds since 1970. A later one than the year 9999 is shown as the end of that year.
pub fn moment(unix: u64) -> String {
    const LAST: u64 = 253_402_300_799;
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(unix.min(LAST))).to_string()
}

pub fn span(secs: u64) -> String {
    humantime::format_duration(Duration::from_secs(secs)).to_string()
}

/// "1 file", "2 files".
pub fn files(count: u64) -> String {
    counted(count, "file")
}

/// A count with `noun`, which is given in the singular.
pub fn counted(count: u64, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

/// A long operation and its progress.
pub fn under_way(work: &WorkProgress) -> String {
    let of = work.of.map_or(String::new(), |of| format!(" of {of}"));
    format!("{}: {}{of}", shown(&work.what), work.done)
}

/// Prepares a text of the daemon for a terminal: escaped bytes that are UTF-8 become readable, and control characters
/// are escaped.
pub fn shown(text: &str) -> String {
    let readable = String::from_utf8(unescaped(text)).unwrap_or_else(|_| text.to_string());
    visible(&readable)
}

/// Replaces each `\xNN` by its byte.
fn unescaped(text: &str) -> Vec<u8> {
    let mut parts = text.split(r"\x");
    let mut out = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        match part.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                out.extend(&part.as_bytes()[2..]);
            }
            None => {
                out.extend(br"\x");
                out.extend(part.as_bytes());
            }
        }
    }
    out
}

/// A name that can stand in a path.
pub fn name(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    match text.chars().all(plain) && !text.is_empty() && !text.starts_with('.') && text.len() <= 64 {
        true => Ok(text.to_owned()),
        false => Err("up to 64 letters, digits, `-`, `_` and `.`, and no `.` at the beginning".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_is_a_rate_and_a_latency() {
        let expected = ThrottleConfig { bytes_per_sec: 100_000_000, latency: Duration::from_millis(2) };
        assert_eq!(pace("100MB/s,2ms"), Ok(expected));
        assert_eq!(pace("100MB/s:2ms"), Ok(expected));
        assert_eq!(pace("1MiB").unwrap().bytes_per_sec, 1 << 20);
        assert!(pace("fast").is_err() && pace("0/s").is_err() && pace("1M,soon").is_err());
    }

    #[test]
    fn times_and_durations_have_an_end() {
        assert_eq!(duration("12h"), Ok(Duration::from_secs(43_200)));
        assert_eq!(duration("18446744073709551615s"), Err("at most 36500d".into()));
        assert!(duration("soon").is_err());
        assert_eq!(moment(0), "1970-01-01T00:00:00Z");
        assert_eq!([moment(253_402_300_800), moment(u64::MAX)], ["9999-12-31T23:59:59Z"; 2]);
    }

    #[test]
    fn names_cannot_steer_a_terminal() {
        assert_eq!(shown("a\x1b[2Jb\n"), "a\\u{1b}[2Jb\\n");
        assert_eq!(shown(r"a\x1b"), "a\\u{1b}");
    }

    #[test]
    fn escaped_names_are_readable_where_they_are_utf8() {
        assert_eq!(shown(r"gr\xc3\xbcn"), "grün");
        assert_eq!(shown(r"a\xffb"), r"a\xffb");
        assert_eq!(shown(r"a\xq"), r"a\xq");
    }
}
