//! How fast the flush may send: limits of bytes and of requests, and other limits at times of the day.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use crate::document::size;

/// Minutes of a day.
const DAY: u32 = 24 * 60;
/// Bytes per second. If uploads are slower, the pool counts as not answering.
const SLOWEST: u64 = 1 << 20;
/// Spelling of no limit.
const UNLIMITED: &str = "unlimited";

/// What may be sent to the pool in a second; `None`: no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SendLimits {
    pub bytes: Option<u64>,
    /// Files sent, names changed, and attributes changed.
    pub requests: Option<u64>,
}

/// Limits of what the flush sends to the pool, and when writers are slowed because it is behind.
#[derive(Debug, Clone, PartialEq)]
pub struct WriteBack {
    pub limits: SendLimits,
    /// Where two overlap, the later one holds.
    pub schedule: Vec<SendWindow>,
    /// Writers are slowed while less than this part of the room may still become dirty, from 0 (never) to 1.
    pub pace_below: f64,
    /// Writers are slowed while a change that is due has waited longer than half of this.
    pub max_lag: Option<Duration>,
}

impl Default for WriteBack {
    fn default() -> Self {
        Self { limits: SendLimits::default(), schedule: Vec::new(), pace_below: 0.1, max_lag: None }
    }
}

/// Limits at a time of each day.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SendWindow {
    /// Minutes of the day, by the node's clock. If the end is not after the begin, it goes over midnight.
    minutes: Range<u32>,
    bytes: Option<u64>,
    /// `None`: those of the rest of the day.
    requests: Option<Option<u64>>,
}

impl WriteBack {
    /// Returns what may be sent at a minute of the day, from 0 to 1439.
    pub fn limits_at(&self, minute: u32) -> SendLimits {
        let in_force = self.schedule.iter().rev().find(|window| window.holds_at(minute));
        in_force.map_or(self.limits, |window| self.limits_in(window))
    }

    fn limits_in(&self, window: &SendWindow) -> SendLimits {
        SendLimits { bytes: window.bytes, requests: window.requests.unwrap_or(self.limits.requests) }
    }
}

impl SendWindow {
    /// Reads `08:00-18:00 50MiB`, `08:00-18:00 50MiB 100/s`, or `22:00-06:00 unlimited`, which lifts both limits.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let form = || "must be like \"22:00-06:00 unlimited\" or \"08:00-18:00 50MiB 100/s\"".to_owned();
        let words: Vec<&str> = text.split_whitespace().collect();
        let (times, bytes, requests) = match words.as_slice() {
            [times, bytes] => (*times, *bytes, None),
            [times, bytes, requests] => (*times, *bytes, Some(*requests)),
            _ => return Err(form()),
        };
        let (from, until) = times.split_once('-').ok_or_else(form)?;
        let minute = |text: &str| {
            let (hours, minutes) = text.split_once(':')?;
            let (hours, minutes) = (hours.parse::<u32>().ok()?, minutes.parse::<u32>().ok()?);
            Some(hours * 60 + minutes).filter(|at| minutes < 60 && *at <= DAY)
        };
        let (Some(from), Some(until)) = (minute(from), minute(until)) else { return Err(form()) };
        if from == until || from == DAY {
            return Err("the time is empty".into());
        }
        let bytes = rate(bytes)?;
        let requests = match requests {
            Some(text) => Some(request_rate(text)?),
            None => bytes.is_none().then_some(None),
        };
        Ok(Self { minutes: from..until, bytes, requests })
    }

    fn holds_at(&self, minute: u32) -> bool {
        let Range { start, end } = self.minutes;
        if start < end { (start..end).contains(&minute) } else { minute >= start || minute < end }
    }
}

/// Reads a rate: `unlimited`, or a size per second, at least 1 MiB.
pub(crate) fn rate(text: &str) -> Result<Option<u64>, String> {
    match text {
        UNLIMITED => Ok(None),
        _ => match size(text)? {
            bytes if bytes < SLOWEST => Err("must be at least 1MiB; to send nothing, use flush = \"manual\"".into()),
            bytes => Ok(Some(bytes)),
        },
    }
}

/// Reads a rate of requests: `unlimited`, or a number per second, at least `1/s`.
pub(crate) fn request_rate(text: &str) -> Result<Option<u64>, String> {
    if text == UNLIMITED {
        return Ok(None);
    }
    match text.strip_suffix("/s").map(str::parse) {
        Some(Ok(0)) => Err("must be at least 1/s; to send nothing, use flush = \"manual\"".into()),
        Some(Ok(requests)) => Ok(Some(requests)),
        _ => Err("must be a number of requests per second, like \"100/s\", or \"unlimited\"".into()),
    }
}

impl fmt::Display for SendLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bytes {
            Some(bytes) => write!(f, "{bytes}B")?,
            None => f.write_str(UNLIMITED)?,
        }
        self.requests.map_or(Ok(()), |requests| write!(f, " {requests}/s"))
    }
}

impl fmt::Display for WriteBack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.limits.fmt(f)?;
        for window in &self.schedule {
            let time = |minute: u32| format!("{:02}:{:02}", minute / 60, minute % 60);
            let Range { start, end } = window.minutes;
            write!(f, ", {}-{} {}", time(start), time(end), self.limits_in(window))?;
        }
        write!(f, "; pace-below {}", self.pace_below)?;
        match self.max_lag {
            Some(lag) => write!(f, ", max-lag {}", humantime::format_duration(lag)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_later_window_holds_and_windows_may_go_over_midnight() {
        let windows =
            ["08:00-18:00 50MiB", "22:00-06:00 unlimited", "12:00-13:00 1MiB 20/s", "13:00-14:00 unlimited 5/s"];
        let schedule = windows.map(|text| SendWindow::parse(text).unwrap()).into();
        let limits =
            WriteBack { limits: SendLimits { bytes: Some(7), requests: Some(9) }, schedule, ..WriteBack::default() };
        let at = |hour: u32, minute: u32| {
            let SendLimits { bytes, requests } = limits.limits_at(hour * 60 + minute);
            (bytes, requests)
        };
        assert_eq!([at(8, 0), at(17, 59)], [(Some(50 << 20), Some(9)); 2], "requests as in the rest of the day");
        assert_eq!([at(12, 30), at(13, 30)], [(Some(1 << 20), Some(20)), (None, Some(5))]);
        assert_eq!([at(22, 0), at(0, 0), at(5, 59)], [(None, None); 3], "unlimited lifts both");
        assert_eq!([at(6, 0), at(7, 59), at(18, 0), at(21, 59)], [(Some(7), Some(9)); 4]);
        let shown = limits.to_string();
        let shown: Vec<&str> = shown.split(", ").collect();
        assert_eq!((shown[0], shown[2], shown[3]), ("7B 9/s", "22:00-06:00 unlimited", "12:00-13:00 1048576B 20/s"));
        assert_eq!(shown[4], "13:00-14:00 unlimited 5/s; pace-below 0.1");
        let late = WriteBack { max_lag: Some(Duration::from_secs(90)), ..WriteBack::default() };
        assert_eq!(late.to_string(), "unlimited; pace-below 0.1, max-lag 1m 30s");
    }

    #[test]
    fn wrong_windows_are_refused() {
        for text in [
            "",
            "22:00-06:00",
            "22-06 unlimited",
            "22:00-25:00 1MiB",
            "08:60-09:00 1MiB",
            "08:00-08:00 1MiB",
            "08:00-09:00 0B",
            "08:00-09:00 fast",
            "08:00-09:00 1MiB fast",
            "08:00-09:00 1MiB 0/s",
            "08:00-09:00 1MiB 5/s 5/s",
        ] {
            assert!(SendWindow::parse(text).is_err(), "{text}");
        }
        for text in ["", "5", "0/s", "-1/s", "5/m"] {
            assert!(request_rate(text).is_err(), "{text}");
        }
    }
}
