//! Values of the command line, and how values are shown.

use std::time::{Duration, UNIX_EPOCH};

use bytesize::ByteSize;
use forebay_overlay::control::config::Pace;

/// Reads `100MB/s,2ms`; in mount options, where commas part the options, `100MB/s:2ms`.
pub fn pace(text: &str) -> Result<Pace, String> {
    let (rate, latency) = text.split_once([',', ':']).unwrap_or((text, "0s"));
    let rate: ByteSize =
        rate.trim().trim_end_matches("/s").parse().map_err(|e| format!("rate `{rate}`, such as 100MB/s: {e}"))?;
    if rate.as_u64() == 0 {
        return Err("a pool needs a rate above zero".into());
    }
    let latency =
        humantime::parse_duration(latency.trim()).map_err(|e| format!("latency `{latency}`, such as 2ms: {e}"))?;
    Ok(Pace { bytes_per_sec: rate.as_u64(), latency })
}

pub fn bytes(count: u64) -> String {
    ByteSize(count).to_string()
}

/// A moment, from seconds since 1970.
pub fn moment(unix: u64) -> String {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(unix)).to_string()
}

pub fn span(secs: u64) -> String {
    humantime::format_duration(Duration::from_secs(secs)).to_string()
}

/// "1 file", "2 files".
pub fn files(count: u64) -> String {
    if count == 1 { "1 file".into() } else { format!("{count} files") }
}

/// A name without what a terminal would obey.
pub fn shown(name: &str) -> String {
    name.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_is_a_rate_and_a_latency() {
        let expected = Pace { bytes_per_sec: 100_000_000, latency: Duration::from_millis(2) };
        assert_eq!(pace("100MB/s,2ms"), Ok(expected));
        assert_eq!(pace("100MB/s:2ms"), Ok(expected));
        assert_eq!(pace("1MiB").unwrap().bytes_per_sec, 1 << 20);
        assert!(pace("fast").is_err() && pace("0/s").is_err() && pace("1M,soon").is_err());
    }

    #[test]
    fn names_cannot_steer_a_terminal() {
        assert_eq!(shown("a\x1b[2Jb\n"), "a\\u{1b}[2Jb\\n");
    }
}
