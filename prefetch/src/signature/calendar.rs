//! Days and months as numbers, for additions: the civil calendar, without time zones.

use serde::{Deserialize, Serialize};

/// The unit of a number in a path or an argument. All but `Count` and `Month` count from the beginning of 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Unit {
    /// A plain number.
    Count,
    /// Months since the year 0.
    Month,
    Day,
    Hour,
    Minute,
    Second,
}

impl Unit {
    /// Returns the length of the units that have a fixed one.
    fn seconds(self) -> Option<i64> {
        match self {
            Self::Count | Self::Month => None,
            Self::Day => Some(86_400),
            Self::Hour => Some(3_600),
            Self::Minute => Some(60),
            Self::Second => Some(1),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Count => "counter",
            Self::Month => "month",
            Self::Day => "date",
            Self::Hour | Self::Minute | Self::Second => "time",
        }
    }

    /// Returns `step` of this unit as text, such as `+1 day`.
    pub(crate) fn steps(self, step: i64) -> String {
        let name = match self {
            Self::Count => return format!("{step:+}"),
            Self::Month => "month",
            Self::Day => "day",
            Self::Hour => "hour",
            Self::Minute => "minute",
            Self::Second => "second",
        };
        format!("{step:+} {name}{}", if step.abs() == 1 { "" } else { "s" })
    }

    /// Returns the same moment in another unit, rounded down; `None` between numbers and times, and if it does not fit.
    pub(crate) fn convert(self, value: i64, to: Self) -> Option<i64> {
        if self == to {
            return Some(value);
        }
        match (self.seconds(), to.seconds()) {
            (Some(from), Some(to)) => value.checked_mul(from).map(|seconds| seconds.div_euclid(to)),
            (Some(from), None) if to == Self::Month => Some(month_of(value.checked_mul(from)?.div_euclid(86_400))),
            (None, Some(to)) if self == Self::Month => first_day(value)?.checked_mul(86_400 / to),
            _ => None,
        }
    }
}

/// A day of the civil calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Date {
    pub year: i64,
    /// 1 to 12.
    pub month: i64,
    /// 1 to 31.
    pub day: i64,
}

/// Four-digit numbers that count as years: the dates that instruments and jobs write. The range is narrower than all
/// valid years, because every counter within it is taken for a date first.
const YEARS: std::ops::RangeInclusive<i64> = 1900..=2099;

pub(crate) fn is_year(year: i64) -> bool {
    YEARS.contains(&year)
}

impl Date {
    /// Returns `None` for an invalid day, or for an unlikely year.
    pub fn new(year: i64, month: i64, day: i64) -> Option<Self> {
        let valid = is_year(year) && (1..=12).contains(&month) && day >= 1 && day <= days_in(year, month);
        valid.then_some(Self { year, month, day })
    }

    /// Returns the days since the beginning of 1970. Hinnant, "chrono-compatible low-level date algorithms",
    /// `days_from_civil`.
    pub fn to_days(self) -> i64 {
        let year = if self.month <= 2 { self.year - 1 } else { self.year };
        let era = year.div_euclid(400);
        let year_of_era = year.rem_euclid(400);
        let day_of_year = (153 * ((self.month + 9) % 12) + 2) / 5 + self.day - 1;
        era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
    }

    /// The inverse: `civil_from_days` of the same source. Days beyond about 10^5 years around 1970 are clamped.
    pub fn of_days(days: i64) -> Self {
        let days = days.clamp(-36_500_000, 36_500_000) + 719_468;
        let era = days.div_euclid(146_097);
        let day_of_era = days.rem_euclid(146_097);
        let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted = (5 * day_of_year + 2) / 153;
        let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        Self { year, month, day: day_of_year - (153 * shifted + 2) / 5 + 1 }
    }
}

pub(crate) fn days_in(year: i64, month: i64) -> i64 {
    match month {
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Returns the month of a day, counted from the year 0.
pub(crate) fn month_of(days: i64) -> i64 {
    let date = Date::of_days(days);
    date.year * 12 + date.month - 1
}

/// Returns the first day of a month that is counted from the year 0; `None` outside the years of dates.
pub(crate) fn first_day(month: i64) -> Option<i64> {
    Date::new(month.div_euclid(12), month.rem_euclid(12) + 1, 1).map(Date::to_days)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_count_through_leap_years_and_back() {
        assert_eq!(Date { year: 1970, month: 1, day: 1 }.to_days(), 0);
        assert_eq!(Date { year: 2024, month: 2, day: 29 }.to_days(), 19_782);
        let mut before = Date::of_days(-30_000);
        for days in -29_999..60_000 {
            let date = Date::of_days(days);
            assert_eq!(date.to_days(), days);
            let next = before.day + 1;
            assert!(date.day == next || (date.day == 1 && next > days_in(before.year, before.month)), "{date:?}");
            before = date;
        }
    }

    #[test]
    fn what_is_no_day_is_no_date() {
        assert_eq!(Date::new(2023, 2, 29), None);
        assert_eq!(Date::new(2023, 13, 1), None);
        assert_eq!(Date::new(2023, 0, 1), None);
        assert_eq!(Date::new(1234, 1, 1), None);
        assert!(Date::new(2024, 2, 29).is_some());
    }

    #[test]
    fn units_convert_where_they_mean_the_same() {
        assert_eq!(Unit::Day.convert(2, Unit::Hour), Some(48));
        assert_eq!(Unit::Hour.convert(47, Unit::Day), Some(1));
        assert_eq!(Unit::Day.convert(31, Unit::Month), Some(1970 * 12 + 1));
        assert_eq!(Unit::Month.convert(1970 * 12 + 1, Unit::Day), Some(31));
        assert_eq!(Unit::Count.convert(5, Unit::Day), None);
        assert_eq!(Unit::Day.convert(5, Unit::Count), None);
    }
}
