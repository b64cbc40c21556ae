//! How fast the flush may send: a rate, and other rates at times of the day.

use std::fmt;
use std::ops::Range;

use crate::document::size;

/// Minutes of a day.
const DAY: u32 = 24 * 60;
/// Bytes per second. If uploads are slower, the pool counts as not answering.
const SLOWEST: u64 = 1 << 20;
/// Spelling of no limit.
const UNLIMITED: &str = "unlimited";

/// Limits of what the flush sends to the pool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WriteBack {
    /// Bytes per second; `None`: no limit.
    pub rate: Option<u64>,
    /// Where two overlap, the later one holds.
    pub schedule: Vec<RateWindow>,
}

/// A rate at a time of each day.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RateWindow {
    /// Minutes of the day, by the node's clock. If the end is not after the begin, it goes over midnight.
    minutes: Range<u32>,
    rate: Option<u64>,
}

impl WriteBack {
    /// Returns the bytes per second that may be sent at a minute of the day, from 0 to 1439; `None`: no limit.
    pub fn rate_at(&self, minute: u32) -> Option<u64> {
        self.schedule.iter().rev().find(|window| window.holds_at(minute)).map_or(self.rate, |window| window.rate)
    }
}

impl RateWindow {
    /// Reads `22:00-06:00 unlimited`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let form = || "must be like \"22:00-06:00 unlimited\" or \"08:00-18:00 50MiB\"".to_owned();
        let (times, amount) = text.trim().split_once(' ').ok_or_else(form)?;
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
        Ok(Self { minutes: from..until, rate: rate(amount.trim())? })
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

fn shown(rate: Option<u64>) -> String {
    rate.map_or_else(|| UNLIMITED.into(), |bytes| format!("{bytes}B"))
}

impl fmt::Display for WriteBack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shown(self.rate))?;
        for RateWindow { minutes, rate } in &self.schedule {
            let time = |minute: u32| format!("{:02}:{:02}", minute / 60, minute % 60);
            write!(f, ", {}-{} {}", time(minutes.start), time(minutes.end), shown(*rate))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_later_window_holds_and_windows_may_go_over_midnight() {
        let windows = ["08:00-18:00 50MiB", "22:00-06:00 unlimited", "12:00-13:00 1MiB"];
        let schedule = windows.map(|text| RateWindow::parse(text).unwrap()).into();
        let limits = WriteBack { rate: Some(7), schedule };
        let at = |hour: u32, minute: u32| limits.rate_at(hour * 60 + minute);
        assert_eq!([at(8, 0), at(17, 59), at(12, 30)], [Some(50 << 20), Some(50 << 20), Some(1 << 20)]);
        assert_eq!([at(22, 0), at(0, 0), at(5, 59)], [None; 3]);
        assert_eq!([at(6, 0), at(7, 59), at(18, 0), at(21, 59)], [Some(7); 4]);
        assert_eq!(limits.to_string().split(", ").nth(2), Some("22:00-06:00 unlimited"));
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
        ] {
            assert!(RateWindow::parse(text).is_err(), "{text}");
        }
    }
}
