//! The meaning of the numbers in a path: counters, dates written in one number or several, times. A field consists of
//! the numbers that move together.

use crate::signature::Unit;
use crate::signature::calendar::{Date, is_year};

/// What one number of a path is a part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NumberRole {
    Count,
    YearMonth,
    YearToDay,
    YearToHour,
    YearToMinute,
    YearToSecond,
    Year,
    Month,
    Day,
    Hour,
    Minute,
    Second,
    HourMinute,
    HourToSecond,
}

/// How far numbers are joined to dates and times. A number that looks like a time may be a shard, and one that looks
/// like a date may be a version: if the path is predicted better without joining, it is neither.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Joined {
    Times,
    Dates,
    Nothing,
}

/// A value that moves as one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Field {
    /// The index of its first number.
    pub first: usize,
    /// The part of each of its numbers, and the number of digits to which it is padded with zeros.
    pub parts: Vec<(NumberRole, usize)>,
    pub unit: Unit,
}

/// A point in time, by its parts.
#[derive(Debug, Clone, Copy)]
struct CalendarTime {
    year: i64,
    month: i64,
    day: i64,
    hour: i64,
    minute: i64,
    second: i64,
}

impl CalendarTime {
    const BEGIN: Self = Self { year: 1970, month: 1, day: 1, hour: 0, minute: 0, second: 0 };

    fn set(&mut self, part: NumberRole, n: i64) {
        match part {
            NumberRole::Count => {}
            NumberRole::YearMonth => (self.year, self.month) = (n / 100, n % 100),
            NumberRole::YearToDay => (self.year, self.month, self.day) = (n / 10_000, n / 100 % 100, n % 100),
            NumberRole::YearToHour => {
                self.set(NumberRole::YearToDay, n / 100);
                self.hour = n % 100;
            }
            NumberRole::YearToMinute => {
                self.set(NumberRole::YearToDay, n / 10_000);
                self.set(NumberRole::HourMinute, n % 10_000);
            }
            NumberRole::YearToSecond => {
                self.set(NumberRole::YearToDay, n / 1_000_000);
                self.set(NumberRole::HourToSecond, n % 1_000_000);
            }
            NumberRole::Year => self.year = n,
            NumberRole::Month => self.month = n,
            NumberRole::Day => self.day = n,
            NumberRole::Hour => self.hour = n,
            NumberRole::Minute => self.minute = n,
            NumberRole::Second => self.second = n,
            NumberRole::HourMinute => (self.hour, self.minute) = (n / 100, n % 100),
            NumberRole::HourToSecond => (self.hour, self.minute, self.second) = (n / 10_000, n / 100 % 100, n % 100),
        }
    }

    fn get(&self, part: NumberRole) -> i64 {
        let date = (self.year * 100 + self.month) * 100 + self.day;
        let time = self.hour * 100 + self.minute;
        match part {
            NumberRole::Count => 0,
            NumberRole::YearMonth => self.year * 100 + self.month,
            NumberRole::YearToDay => date,
            NumberRole::YearToHour => date * 100 + self.hour,
            NumberRole::YearToMinute => date * 10_000 + time,
            NumberRole::YearToSecond => (date * 10_000 + time) * 100 + self.second,
            NumberRole::Year => self.year,
            NumberRole::Month => self.month,
            NumberRole::Day => self.day,
            NumberRole::Hour => self.hour,
            NumberRole::Minute => self.minute,
            NumberRole::Second => self.second,
            NumberRole::HourMinute => time,
            NumberRole::HourToSecond => time * 100 + self.second,
        }
    }

    /// Returns the value in `unit`; `None` if the parts are no valid time.
    fn to(self, unit: Unit) -> Option<i64> {
        let days = Date::new(self.year, self.month, self.day)?.to_days();
        if self.hour >= 24 || self.minute >= 60 || self.second >= 60 {
            return None;
        }
        let seconds = days * 86_400 + self.hour * 3_600 + self.minute * 60 + self.second;
        Unit::Second.convert(seconds, unit)
    }

    fn of(unit: Unit, value: i64) -> Option<Self> {
        let seconds = unit.convert(value, Unit::Second)?;
        let date = Date::of_days(seconds.div_euclid(86_400));
        let rest = seconds.rem_euclid(86_400);
        let (hour, minute, second) = (rest / 3_600, rest / 60 % 60, rest % 60);
        let Date { year, month, day } = date;
        is_year(year).then_some(Self { year, month, day, hour, minute, second })
    }
}

/// Returns a part of a date or time, which a counter may follow.
pub(super) fn part_of(unit: Unit, value: i64, part: NumberRole) -> Option<i64> {
    CalendarTime::of(unit, value).map(|moment| moment.get(part))
}

impl Field {
    /// Returns the value, from the numbers of a path; `None` if they are no valid time.
    pub fn read(&self, numbers: &[i64]) -> Option<i64> {
        if self.unit == Unit::Count {
            return Some(numbers[self.first]);
        }
        let mut moment = CalendarTime::BEGIN;
        self.parts.iter().zip(&numbers[self.first..]).for_each(|((part, _), n)| moment.set(*part, *n));
        moment.to(self.unit)
    }

    /// Writes the numbers of a value, as texts; false if the value cannot be written.
    pub fn write(&self, value: i64, out: &mut [Option<String>]) -> bool {
        let moment = if self.unit == Unit::Count { None } else { CalendarTime::of(self.unit, value) };
        for (at, (part, digits)) in self.parts.iter().enumerate() {
            let number = match (part, &moment) {
                (NumberRole::Count, _) if value >= 0 => value,
                (NumberRole::Count, _) | (_, None) => return false,
                (part, Some(moment)) => moment.get(*part),
            };
            out[self.first + at] = Some(format!("{number:0digits$}"));
        }
        true
    }
}

/// The numbers of the paths of one template, a row for each path.
pub(super) struct Numbers<'a> {
    pub columns: usize,
    pub values: Vec<i64>,
    pub widths: Vec<u8>,
    /// The texts between the numbers.
    pub gaps: Vec<&'a str>,
}

impl Numbers<'_> {
    pub fn rows(&self) -> usize {
        self.values.len() / self.columns
    }

    pub fn row(&self, row: usize) -> &[i64] {
        &self.values[row * self.columns..(row + 1) * self.columns]
    }

    fn column(&self, column: usize) -> impl Iterator<Item = (i64, u8)> {
        self.values.iter().copied().zip(self.widths.iter().copied()).skip(column).step_by(self.columns)
    }

    /// Returns the number of digits of a column; 0 if its numbers differ in it.
    fn width(&self, column: usize) -> usize {
        let mut widths = self.column(column).map(|(_, width)| usize::from(width));
        let first = widths.next().unwrap_or(0);
        if widths.all(|width| width == first) { first } else { 0 }
    }

    /// Returns the padding of a column: the digits of its longest number that begins with a zero.
    fn padding(&self, column: usize) -> usize {
        let padded = self.column(column).filter(|(value, width)| digits(*value) < usize::from(*width));
        padded.map(|(_, width)| usize::from(width)).max().unwrap_or(0)
    }

    /// Returns whether a path has a counter that is written differently from the other paths: `7` among `007` and
    /// `008`.
    pub fn is_odd(&self, fields: &[Field], row: usize) -> bool {
        fields.iter().any(|field| match field.parts[..] {
            [(NumberRole::Count, padding)] => {
                let at = row * self.columns + field.first;
                usize::from(self.widths[at]) != padding.max(digits(self.values[at]))
            }
            _ => false,
        })
    }

    /// Returns the fields that the numbers form.
    pub fn fields(&self, joined: Joined) -> Vec<Field> {
        let mut out = Vec::new();
        let mut at = 0;
        while at < self.columns {
            let date = if joined == Joined::Nothing { None } else { self.date(at, joined == Joined::Times) };
            let counter = || Field { first: at, parts: vec![(NumberRole::Count, self.padding(at))], unit: Unit::Count };
            let field = date.unwrap_or_else(counter);
            at += field.parts.len();
            out.push(field);
        }
        out
    }

    /// Returns the date, with the time if requested, that begins at a column in every path.
    fn date(&self, first: usize, with_time: bool) -> Option<Field> {
        let one = |part, unit| (vec![(part, self.width(first))], unit);
        let (mut parts, mut unit) = match self.width(first) {
            14 => one(NumberRole::YearToSecond, Unit::Second),
            12 => one(NumberRole::YearToMinute, Unit::Minute),
            10 => one(NumberRole::YearToHour, Unit::Hour),
            8 => one(NumberRole::YearToDay, Unit::Day),
            6 => one(NumberRole::YearMonth, Unit::Month),
            4 => one(NumberRole::Year, Unit::Month),
            _ => return None,
        };
        let valid = |parts: &[(NumberRole, usize)], unit| {
            let field = Field { first, parts: parts.to_vec(), unit };
            (0..self.rows()).all(|row| field.read(self.row(row)).is_some()).then_some(field)
        };
        if parts[0].0 == NumberRole::Year {
            parts.push((NumberRole::Month, self.follows(first, None, "month")?));
            if let Some(digits) = self.follows(first + 1, Some(self.gaps[first]), "day") {
                parts.push((NumberRole::Day, digits));
                if valid(&parts, Unit::Day).is_some() {
                    unit = Unit::Day;
                } else {
                    parts.pop();
                }
            }
        }
        // If one part is written without a zero, the other parts are written without one, too.
        if parts.iter().any(|(_, digits)| *digits == 0) {
            parts[1..].iter_mut().for_each(|(_, digits)| *digits = 0);
        }
        let mut best = valid(&parts, unit)?;
        if with_time && unit == Unit::Day {
            for (part, width, unit) in [
                (NumberRole::Hour, 2, Unit::Hour),
                (NumberRole::Minute, 2, Unit::Minute),
                (NumberRole::Second, 2, Unit::Second),
                (NumberRole::HourMinute, 4, Unit::Minute),
                (NumberRole::HourToSecond, 6, Unit::Second),
            ] {
                let of_day = matches!(best.unit, Unit::Day);
                let in_turn = match part {
                    NumberRole::Minute => best.unit == Unit::Hour,
                    NumberRole::Second => best.unit == Unit::Minute && best.parts.len() > 1,
                    _ => of_day,
                };
                let at = first + best.parts.len();
                let near = |gap: &&str| gap.chars().count() == 1 || gap.contains("hour");
                let follows = at < self.columns && self.gaps.get(at - 1).is_some_and(near);
                if in_turn && follows && self.width(at) == width {
                    let mut parts = best.parts.clone();
                    parts.push((part, width));
                    best = valid(&parts, unit).unwrap_or(best);
                }
            }
        }
        Some(best)
    }

    /// Checks whether the number after a column is the next part of a date. The text between must be one character, the
    /// same in the whole date, or the name of the part (`/month=`). Returns the number of digits to which the number is
    /// padded.
    fn follows(&self, column: usize, gap_before: Option<&str>, name: &str) -> Option<usize> {
        let gap = *self.gaps.get(column)?;
        let named = gap.contains(name) || gap.ends_with(&format!("{}=", &name[..1]));
        let plain = gap.chars().count() == 1 && gap_before.is_none_or(|before| before == gap);
        let at = column + 1;
        if at >= self.columns || !(named || plain) {
            return None;
        }
        match (self.width(at), self.padding(at)) {
            (2, _) => Some(2),
            (_, 0) if named => Some(0),
            _ => None,
        }
    }
}

fn digits(value: i64) -> usize {
    value.checked_ilog10().map_or(1, |tens| tens as usize + 1)
}
