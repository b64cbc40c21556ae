//! The parameters of a run: every number and date among its arguments, and its array index.

use serde::{Deserialize, Serialize};

use super::calendar::{Date, Unit, is_year};
use super::digits::{DigitRun, each_run};

/// The most parameters that are remembered of one run: those of its first arguments.
pub const PARAMETERS_MAX: usize = 32;

/// The place of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ParameterPlace {
    ArrayIndex,
    /// The n-th word after the program, from 1; a script counts as a word.
    Argument(u16),
}

impl std::fmt::Display for ParameterPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::ArrayIndex => f.write_str("array index"),
            Self::Argument(number) => write!(f, "argument {number}"),
        }
    }
}

/// One number or date. A date of three numbers is a parameter in addition to the three.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Parameter {
    pub place: ParameterPlace,
    /// The index of the number in the argument, from 0; for a date, of its first number.
    pub number: u16,
    pub unit: Unit,
    pub value: i64,
    /// Number of digits as written: the more digits, the less an equal number in a path is a coincidence.
    pub width: u8,
}

/// The parameters of one run, at most [`PARAMETERS_MAX`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Parameters(Vec<Parameter>);

impl Parameters {
    /// Returns the parameters of a command line. `words` begin with the program.
    pub(super) fn of(words: &[String], array_index: Option<u64>) -> Self {
        let mut found = Vec::new();
        if let Some(value) = array_index.and_then(|index| i64::try_from(index).ok()) {
            let width = value.checked_ilog10().map_or(1, |tens| tens as u8 + 1);
            found.push(Parameter { place: ParameterPlace::ArrayIndex, number: 0, unit: Unit::Count, value, width });
        }
        for (number, word) in (1..=u16::MAX).zip(words.iter().skip(1)) {
            if found.len() >= PARAMETERS_MAX {
                break;
            }
            of_word(word, ParameterPlace::Argument(number), &mut found);
        }
        found.truncate(PARAMETERS_MAX);
        Self(found)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Parameter> {
        self.0.iter()
    }

    /// Returns the value of the parameter `like` in this run.
    pub fn at(&self, like: &Parameter) -> Option<i64> {
        let same = |p: &&Parameter| p.place == like.place && p.number == like.number && p.unit == like.unit;
        self.0.iter().find(same).map(|p| p.value)
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn from_vec(mut parameters: Vec<Parameter>) -> Self {
        parameters.truncate(PARAMETERS_MAX);
        Self(parameters)
    }
}

fn of_word(word: &str, place: ParameterPlace, found: &mut Vec<Parameter>) {
    let is_fraction = word.parse::<f64>().is_ok() && !word.bytes().all(|b| b.is_ascii_digit());
    if is_fraction {
        return;
    }
    let mut runs: Vec<DigitRun> = Vec::new();
    each_run(word, |run| {
        if runs.len() < PARAMETERS_MAX {
            runs.push(run);
        }
    });
    for (number, run) in (0..=u16::MAX).zip(&runs) {
        let mut add = |unit, value| {
            found.push(Parameter { place, number, unit, value, width: run.width() as u8 });
        };
        let at = usize::from(number);
        if let Some((unit, value)) = moment(word, &runs[at..]) {
            add(unit, value);
        }
        add(Unit::Count, run.value);
    }
}

/// Returns the date or time that begins with the first of the numbers, alone or with the following ones.
fn moment(word: &str, runs: &[DigitRun]) -> Option<(Unit, i64)> {
    let [first, rest @ ..] = runs else { return None };
    let value = first.value;
    match first.width() {
        14 => compact(value, 1_000_000, Unit::Second),
        12 => compact(value, 10_000, Unit::Minute),
        10 => compact(value, 100, Unit::Hour),
        8 => compact(value, 1, Unit::Day),
        6 => Date::new(value / 100, value % 100, 1).map(|_| (Unit::Month, value / 100 * 12 + value % 100 - 1)),
        4 if is_year(value) => {
            let month = rest.first().filter(|m| m.width() == 2 && word[first.end..m.start].len() == 1)?;
            Date::new(value, month.value, 1)?;
            let in_day = |d: &&DigitRun| d.width() == 2 && word[month.end..d.start] == word[first.end..month.start];
            let day = rest.get(1).filter(in_day).and_then(|day| Date::new(value, month.value, day.value));
            Some(match day {
                Some(date) => (Unit::Day, date.to_days()),
                None => (Unit::Month, value * 12 + month.value - 1),
            })
        }
        _ => None,
    }
}

/// Parses a date and time of day in one number. `below` is the power of ten of the digits for the time of day.
pub(crate) fn compact(value: i64, below: i64, unit: Unit) -> Option<(Unit, i64)> {
    let (day, time) = (value / below, value % below);
    let days = Date::new(day / 10_000, day / 100 % 100, day % 100)?.to_days();
    let value = match unit {
        Unit::Day => days,
        Unit::Hour if time < 24 => days * 24 + time,
        Unit::Minute if time / 100 < 24 && time % 100 < 60 => days * 1_440 + time / 100 * 60 + time % 100,
        Unit::Second => {
            let (hour, minute, second) = (time / 10_000, time / 100 % 100, time % 100);
            if hour >= 24 || minute >= 60 || second >= 60 {
                return None;
            }
            days * 86_400 + hour * 3_600 + minute * 60 + second
        }
        _ => return None,
    };
    Some((unit, value))
}
