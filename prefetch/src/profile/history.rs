//! The parameters of the runs, a row for each parameter: what the movement of paths may follow.

use super::field::{NumberRole, part_of};
use super::{Profile, RUNS_MAX};
use crate::signature::digits::each_run;
use crate::signature::{Invocation, Parameter, Parameters, Unit};

/// The probability that a path follows a parameter that had only one value so far. A one-digit number occurs in many
/// paths; a longer number or a date is no coincidence. The path as it was keeps the remaining probability.
const FOLLOWS_STRONGLY: f64 = 0.8;
pub(super) const FOLLOWS_WEAKLY: f64 = 0.4;

/// The probability of a file that all runs with one value of a parameter used, and runs with other values did not; the
/// smaller one if no value occurred twice.
const EXPLAINED: f64 = 0.95;
const EXPLAINED_ONCE: f64 = 0.8;

/// A date begins with its year.
const SHORTEST_DATE_DIGITS: usize = 4;

/// One parameter over the runs.
pub(super) struct ParameterHistory {
    /// Such as `argument 2`.
    pub label: String,
    pub unit: Unit,
    /// The newest run first.
    values: [Option<i64>; RUNS_MAX],
    now: i64,
    /// See `FOLLOWS_STRONGLY`.
    pub follows: f64,
    /// The parameter is the day of the run, which a date may follow at a distance.
    pub is_clock: bool,
}

/// The values that a field with the unit `unit` is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reference {
    /// The newest run first; 0 beyond the last run.
    pub runs: [i64; RUNS_MAX],
    pub now: i64,
}

impl ParameterHistory {
    /// Returns the row for a field of `unit`, restricted to the runs of `active`.
    pub fn read(&self, unit: Unit, active: u8) -> Option<Reference> {
        self.reference(active, |value| self.unit.convert(value, unit))
    }

    /// Returns day, month and year of a date, for a field that is a plain number. Any row of consecutive days is a row
    /// of numbers that grow by one, so these count only if they are equal to the field.
    pub fn read_parts(&self, active: u8) -> Vec<Reference> {
        if self.unit == Unit::Count {
            return Vec::new();
        }
        let parts = [NumberRole::Day, NumberRole::Month, NumberRole::Year]
            .map(|part| self.reference(active, |value| part_of(self.unit, value, part)));
        parts.into_iter().flatten().collect()
    }

    fn reference(&self, active: u8, read: impl Fn(i64) -> Option<i64>) -> Option<Reference> {
        let mut runs = [0; RUNS_MAX];
        let values = (0..RUNS_MAX).filter(|run| active >> run & 1 == 1).map(|run| self.values[run]);
        for (to, value) in runs.iter_mut().zip(values) {
            *to = read(value?)?;
        }
        Some(Reference { runs, now: read(self.now)? })
    }
}

impl Reference {
    pub fn varies(&self, runs: usize) -> bool {
        self.runs[..runs].iter().any(|value| *value != self.runs[0])
    }
}

/// The masks of the runs that had the same value of one parameter, one for each value.
struct Classes {
    masks: Vec<u8>,
    /// The runs with the current value.
    now: u8,
}

/// The runs, as seen from a job that starts.
pub(super) struct RunHistory {
    pub rows: Vec<ParameterHistory>,
    classes: Vec<Classes>,
    news: NewValues,
}

/// The parameters that had one value in all runs, and have another one now.
#[derive(Default)]
struct NewValues {
    /// Their previous values, and days, months and years of them.
    numbers: Vec<i64>,
    /// Some of them are dates.
    has_dates: bool,
}

impl NewValues {
    fn add(&mut self, row: &ParameterHistory) {
        let Some(was) = row.values[0].filter(|was| *was != row.now) else { return };
        if row.unit == Unit::Count {
            self.numbers.push(was);
        } else {
            self.has_dates = true;
            self.numbers.extend(
                [NumberRole::Day, NumberRole::Month, NumberRole::Year]
                    .iter()
                    .filter_map(|p| part_of(row.unit, was, *p)),
            );
        }
    }
}

impl RunHistory {
    /// `now_unix` is the current time, if it is known, in seconds since 1970.
    pub fn new(profile: &Profile, invocation: &Invocation, now_unix: Option<u64>) -> Self {
        let runs = profile.runs.len();
        let mut rows: Vec<ParameterHistory> = Vec::new();
        for parameter in invocation.parameters().iter() {
            let of_run = |of: &Parameters| of.at(parameter);
            let row = row(profile, parameter, of_run);
            let known =
                |other: &ParameterHistory| (other.unit, other.now, other.values) == (row.unit, row.now, row.values);
            if !rows.iter().any(known) {
                rows.push(row);
            }
        }
        let classes = rows.iter().filter_map(|row| Classes::of(row, runs)).collect();
        if let Some(now) = now_unix {
            rows.push(clock(profile, now));
        }
        let mut news = NewValues::default();
        let is_news = |row: &&ParameterHistory| (0..runs).all(|run| row.values[run] == row.values[0]);
        rows.iter().filter(is_news).for_each(|row| news.add(row));
        Self { rows, classes, news }
    }

    /// Returns whether a parameter that had only one value has another one now.
    pub fn has_news(&self) -> bool {
        !self.news.numbers.is_empty() || self.news.has_dates
    }

    /// Returns whether a path contains a number that may follow such a parameter: few do, and other paths need no
    /// further test.
    pub fn may_follow(&self, path: &str) -> bool {
        let mut may = false;
        each_run(path, |run| {
            let is_date = self.news.has_dates && run.width() >= SHORTEST_DATE_DIGITS;
            may |= is_date || self.news.numbers.contains(&run.value);
        });
        may
    }

    /// Returns the probability of a file with this mask, if a parameter explains when it is used.
    pub fn explained(&self, used: u8) -> Option<f64> {
        let pure = |classes: &&Classes| {
            let mixed = |class: &u8| used & class != 0 && used & class != *class;
            !classes.masks.iter().any(mixed) && classes.masks.iter().any(|class| used & class == 0)
        };
        let of = |classes: &Classes| {
            let twice = classes.masks.iter().any(|class| class.count_ones() > 1);
            let probability = if twice { EXPLAINED } else { EXPLAINED_ONCE };
            if used & classes.now != 0 { probability } else { 1.0 - probability }
        };
        let mut pure = self.classes.iter().filter(pure);
        let first = pure.next()?;
        let best = pure.fold(first, |best, other| {
            let most = |classes: &Classes| classes.masks.iter().map(|class| class.count_ones()).max();
            if most(other) > most(best) { other } else { best }
        });
        Some(of(best))
    }
}

impl Classes {
    /// `None` if the value is the same in all runs, or is new now: in both cases it explains nothing.
    fn of(row: &ParameterHistory, runs: usize) -> Option<Self> {
        let mut masks: Vec<(i64, u8)> = Vec::new();
        for (run, value) in row.values[..runs].iter().enumerate() {
            let value = (*value)?;
            match masks.iter_mut().find(|(of, _)| *of == value) {
                Some((_, mask)) => *mask |= 1 << run,
                None => masks.push((value, 1 << run)),
            }
        }
        let now = masks.iter().find(|(value, _)| *value == row.now)?.1;
        (masks.len() > 1).then(|| Self { masks: masks.into_iter().map(|(_, mask)| mask).collect(), now })
    }
}

fn row(profile: &Profile, parameter: &Parameter, of_run: impl Fn(&Parameters) -> Option<i64>) -> ParameterHistory {
    let mut values = [None; RUNS_MAX];
    values.iter_mut().zip(&profile.runs).for_each(|(to, run)| *to = of_run(&run.parameters));
    let is_strong = parameter.width > 1
        || parameter.unit != Unit::Count
        || parameter.place == crate::signature::ParameterPlace::ArrayIndex;
    ParameterHistory {
        label: parameter.place.to_string(),
        unit: parameter.unit,
        values,
        now: parameter.value,
        follows: if is_strong { FOLLOWS_STRONGLY } else { FOLLOWS_WEAKLY },
        is_clock: false,
    }
}

fn clock(profile: &Profile, now_unix: u64) -> ParameterHistory {
    let day = |unix: u64| (unix / 86_400) as i64;
    let mut values = [None; RUNS_MAX];
    values.iter_mut().zip(&profile.runs).for_each(|(to, run)| *to = Some(day(run.ended_unix)));
    ParameterHistory {
        label: "the day of the run".into(),
        unit: Unit::Day,
        values,
        now: day(now_unix),
        follows: FOLLOWS_STRONGLY,
        is_clock: true,
    }
}
