//! How the paths of one template move from run to run: which of their fields follow a parameter, or change by steps.

use super::field::NumberRole;
use super::field::{Field, Joined, Numbers, part_of};
use super::history::{Reference, RunHistory};
use super::masks::Masks;
use super::{RUNS_MAX, weight};
use crate::signature::Unit;
use crate::signature::calendar::{Date, days_in, month_of};

/// The most candidates for the movement of one field: a job may have more parameters, and the first ones are tested.
const CANDIDATES_MAX: usize = 16;

/// How much better than the simpler explanation another one must predict the runs.
const MARGIN: f64 = 0.01;

/// An explanation with a smaller score is rejected.
const SCORE_MIN: f64 = 0.05;

/// With this score, the paths of a template count as predicted, and no other reading is tried.
const SCORE_GOOD: f64 = 0.98;

/// The most pairs of a path and a run on which an explanation is tested: of more, a sample by hash.
const TESTED_MAX: usize = 1 << 16;

/// The same for the values of one field, on which every candidate is tested.
const FIELD_TESTED_MAX: usize = 1 << 14;

/// The trust in a next step that no run has tested yet. `STEP_TRUST` is for steps of time, small steps, and steps that
/// divide the counter; `LEAP_TRUST` is for other steps, since two unrelated numbers differ by some step, too.
const STEP_TRUST: f64 = 0.9;
const LEAP_TRUST: f64 = 0.3;
const STEP_MAX: i64 = 100;

const SHORTEST_MONTH_DAYS: i64 = 28;

/// The weight of that trust, in tests of the step on the newest run.
const STEP_TRUST_TESTS: f64 = 0.3;

/// How a field follows from another field with the same meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tie {
    /// The same moment in the unit of this field.
    Same,
    /// Year, month or day of a date.
    Part(NumberRole),
    Apart(i64),
}

/// The fields of a template, and their values: a row for each path.
pub(super) struct Fields {
    pub fields: Vec<Field>,
    pub values: Vec<i64>,
    /// For each field, the field that it follows from.
    pub ties: Vec<Option<(usize, Tie)>>,
    /// Paths that are written differently from the rest.
    pub odd: Vec<bool>,
}

/// One field's movement.
#[derive(Debug, Clone)]
pub(super) struct Motion {
    /// Such as `argument 2` or `date, +1 day`.
    pub by: String,
    pub reference: Reference,
    /// The probability that `reference.now` is right, 0 to 1.
    pub trust: f64,
}

/// The movement of the paths of a template, with all fields together.
#[derive(Debug, Clone, Default)]
pub(super) struct Motions {
    /// For each field; `None` if it does not move, or is tied.
    pub of_fields: Vec<Option<Motion>>,
    /// Paths that were used in every run stay, and only the other paths move.
    pub mixed: bool,
    /// See `Masks::score`.
    pub score: f64,
}

impl Motions {
    /// Returns the movement in which none of `fields` fields moves.
    pub fn none(fields: usize) -> Self {
        Self { of_fields: vec![None; fields], ..Self::default() }
    }

    pub fn moves(&self) -> bool {
        self.of_fields.iter().any(Option::is_some)
    }

    pub fn trust(&self) -> f64 {
        self.of_fields.iter().flatten().map(|motion| motion.trust).product()
    }

    pub fn label(&self) -> String {
        let labels: Vec<&str> = self.of_fields.iter().flatten().map(|motion| motion.by.as_str()).collect();
        labels.join(" and ")
    }
}

impl Fields {
    pub fn new(numbers: &Numbers<'_>, joined: Joined) -> Self {
        let fields = numbers.fields(joined);
        let odd: Vec<bool> = (0..numbers.rows()).map(|row| numbers.is_odd(&fields, row)).collect();
        let mut values = Vec::with_capacity(numbers.rows() * fields.len());
        for row in 0..numbers.rows() {
            values.extend(fields.iter().map(|field| field.read(numbers.row(row)).unwrap_or_default()));
        }
        let mut out = Self { ties: vec![None; fields.len()], fields, values, odd };
        for field in 0..out.fields.len() {
            out.ties[field] = (0..out.fields.len()).find_map(|of| Some((of, out.tie(field, of)?)));
        }
        out
    }

    pub fn row(&self, row: usize) -> &[i64] {
        &self.values[row * self.fields.len()..(row + 1) * self.fields.len()]
    }

    fn rows(&self) -> impl Iterator<Item = (usize, &[i64])> {
        self.values.chunks_exact(self.fields.len()).enumerate().filter(|(row, _)| !self.odd[*row])
    }

    /// Returns how `field` follows from `of`, if it does in every path. One path is enough to find month and year of a
    /// date; two equal counters count as tied only once they have changed together.
    fn tie(&self, field: usize, of: usize) -> Option<Tie> {
        if field == of || self.ties[of].is_some() {
            return None;
        }
        let (unit, of_unit) = (self.fields[field].unit, self.fields[of].unit);
        let (_, first) = self.rows().next()?;
        let mut distinct: Vec<i64> = Vec::new();
        for (_, row) in self.rows() {
            if distinct.len() < 3 && !distinct.contains(&row[of]) {
                distinct.push(row[of]);
            }
        }
        let holds = |tie: &Tie| self.rows().all(|(_, row)| tie.follow(of_unit, row[of], unit) == Some(row[field]));
        let finer = unit != of_unit && unit != Unit::Count && of_unit > unit;
        let candidates: &[(Tie, bool)] = &[
            (Tie::Same, finer || (unit == of_unit && distinct.len() >= 2)),
            (Tie::Part(NumberRole::Year), unit == Unit::Count && of_unit != Unit::Count),
            (Tie::Part(NumberRole::Month), unit == Unit::Count && of_unit != Unit::Count),
            (Tie::Part(NumberRole::Day), unit == Unit::Count && of_unit != Unit::Count),
            (Tie::Apart(first[field].wrapping_sub(first[of])), unit == of_unit && distinct.len() >= 3),
        ];
        candidates.iter().filter(|(_, applies)| *applies).map(|(tie, _)| *tie).find(holds)
    }

    /// Completes the values of a moved path: `moved` has the values of the fields that are not tied. False if a value
    /// does not exist.
    pub fn follow_ties(&self, moved: &mut [i64]) -> bool {
        for field in 0..self.fields.len() {
            let Some((of, tie)) = self.ties[field] else { continue };
            match tie.follow(self.fields[of].unit, moved[of], self.fields[field].unit) {
                Some(value) => moved[field] = value,
                None => return false,
            }
        }
        true
    }

    /// Returns the key of a path in one run, by which it is found in another run: its values, minus the references that
    /// they follow.
    pub fn key(&self, row: usize, motions: &[Option<Motion>], run: usize) -> u64 {
        let mut key = 0;
        for (field, value) in self.row(row).iter().enumerate() {
            if self.ties[field].is_none() {
                let from = motions[field].as_ref().map_or(0, |motion| motion.reference.runs[run]);
                key = mix(key, value.wrapping_sub(from));
            }
        }
        key
    }
}

impl Tie {
    fn follow(self, of_unit: Unit, of: i64, unit: Unit) -> Option<i64> {
        match self {
            Self::Same => of_unit.convert(of, unit),
            Self::Part(part) => part_of(of_unit, of, part),
            Self::Apart(distance) => of.checked_add(distance),
        }
    }
}

/// The multiplications and shifts of SplitMix64: keys are compared by these 64 bits alone.
fn mix(key: u64, value: i64) -> u64 {
    let mut z = (key ^ value as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// Returns the bits of a key that must be 0 to select about `limit` of `total` keys.
fn sample(total: usize, limit: usize) -> u64 {
    (total / limit + 1).next_power_of_two() as u64 - 1
}

/// The data on which explanations of a template's paths are tested.
pub(super) struct ExplanationTrial<'a> {
    pub history: &'a RunHistory,
    /// The profile's runs in which the template was used: all masks in this struct refer to these runs alone.
    pub active: u8,
    pub runs: usize,
    /// The mask of each path.
    pub used: &'a [u8],
}

impl ExplanationTrial<'_> {
    fn full(&self) -> u8 {
        super::all(self.runs)
    }

    /// Returns how the paths move, with the reading of their numbers that predicts the runs best.
    pub fn explain(&self, numbers: &Numbers<'_>) -> (Fields, Motions) {
        let mut best: Option<(Fields, Motions)> = None;
        for joined in [Joined::Times, Joined::Dates, Joined::Nothing] {
            let fields = Fields::new(numbers, joined);
            if best.as_ref().is_some_and(|(before, _)| before.fields == fields.fields) {
                continue;
            }
            let motions = self.motions(&fields);
            let good = motions.score >= SCORE_GOOD || self.runs < 2;
            if best.as_ref().is_none_or(|(_, before)| motions.score > before.score + MARGIN) {
                best = Some((fields, motions));
            }
            if good {
                break;
            }
        }
        best.unwrap_or_else(|| {
            let fields = Fields::new(numbers, Joined::Nothing);
            let motions = Motions::none(fields.fields.len());
            (fields, motions)
        })
    }

    fn motions(&self, fields: &Fields) -> Motions {
        let still = || vec![None; fields.fields.len()];
        let mut best = Motions { of_fields: still(), mixed: false, score: self.literal() };
        if best.score >= SCORE_GOOD || self.runs < 2 {
            return best;
        }
        let plain = self.each_field(fields, false);
        let some_stay = self.used.contains(&self.full());
        let moving = |of: &[Option<Motion>]| of.iter().filter(|motion| motion.is_some()).count();
        let mut joint = vec![(plain.clone(), false)];
        if moving(&plain) > 1 {
            for (at, motion) in plain.iter().enumerate().filter(|(_, motion)| motion.is_some()) {
                let mut single = still();
                single[at] = motion.clone();
                joint.push((single, false));
            }
        }
        if some_stay {
            joint.push((self.each_field(fields, true), true));
        }
        for (of_fields, mixed) in joint.into_iter().filter(|(of, _)| moving(of) > 0) {
            let mut motions = Motions { of_fields, mixed, score: 0.0 };
            motions.score = self.test(fields, &motions) * motions.trust();
            if motions.score > best.score + MARGIN && motions.score >= SCORE_MIN {
                best = motions;
            }
        }
        best
    }

    /// Returns the score with every path staying as it is.
    pub fn literal(&self) -> f64 {
        let mut masks = Masks::new(self.runs);
        self.used.iter().for_each(|used| masks.add(*used));
        masks.score().unwrap_or(0.0)
    }

    fn test(&self, fields: &Fields, motions: &Motions) -> f64 {
        let total: usize = self.used.iter().map(|used| used.count_ones() as usize).sum();
        let sample = sample(total, TESTED_MAX);
        let mut pairs = Vec::with_capacity(total.min(2 * TESTED_MAX));
        for (row, used) in self.used.iter().enumerate() {
            let stays = fields.odd[row] || (motions.mixed && *used == self.full());
            for run in (0..self.runs).filter(|run| used >> run & 1 == 1) {
                let key = if stays { mix(1, row as i64) } else { fields.key(row, &motions.of_fields, run) };
                if key & sample == 0 {
                    pairs.push((key, 1 << run));
                }
            }
        }
        Masks::of_pairs(&mut pairs, self.runs).score().unwrap_or(0.0)
    }

    /// Returns for each field by itself the movement that predicts its values best.
    fn each_field(&self, fields: &Fields, mixed: bool) -> Vec<Option<Motion>> {
        let of_field = |field: usize| {
            if fields.ties[field].is_some() {
                return None;
            }
            let mut values: Vec<(i64, u8)> =
                fields.rows().map(|(row, values)| (values[field], self.used[row])).collect();
            values.sort_unstable_by_key(|(value, _)| *value);
            let together = |same: &[(i64, u8)]| (same[0].0, same.iter().fold(0, |mask, (_, used)| mask | used));
            let values: Vec<(i64, u8)> = values.chunk_by(|a, b| a.0 == b.0).map(together).collect();
            if values.len() < 2 { None } else { self.best_motion(fields.fields[field].unit, &values, mixed) }
        };
        (0..fields.fields.len()).map(of_field).collect()
    }

    fn best_motion(&self, unit: Unit, values: &[(i64, u8)], mixed: bool) -> Option<Motion> {
        let mut masks = Masks::new(self.runs);
        values.iter().for_each(|(_, used)| masks.add(*used));
        let mut score = masks.score().unwrap_or(0.0);
        let mut best = None;
        let sample = sample(values.len() * self.runs, FIELD_TESTED_MAX);
        for motion in self.candidates(unit, values, mixed) {
            let mut pairs = Vec::new();
            for (value, used) in values {
                let stays = mixed && *used == self.full();
                for run in (0..self.runs).filter(|run| used >> run & 1 == 1) {
                    let from = motion.reference.runs[run];
                    let key = if stays { mix(1, *value) } else { mix(0, value.wrapping_sub(from)) };
                    if key & sample == 0 {
                        pairs.push((key, 1 << run));
                    }
                }
            }
            let foreseen = Masks::of_pairs(&mut pairs, self.runs).score().unwrap_or(0.0) * motion.trust;
            if foreseen > score + MARGIN {
                (score, best) = (foreseen, Some(motion));
            }
        }
        best
    }

    /// Returns what a field with these values may follow: parameters that changed, multiples of them, steps.
    fn candidates(&self, unit: Unit, values: &[(i64, u8)], mixed: bool) -> Vec<Motion> {
        let moving = |used: u8| !(mixed && used == self.full());
        let newest = |run: usize| values.iter().rev().find(|(_, used)| used >> run & 1 == 1 && moving(*used));
        let maxima: Option<Vec<i64>> = (0..self.runs).map(|run| Some(newest(run)?.0)).collect();
        let mut out: Vec<Motion> = Vec::new();
        let mut add = |by: String, reference: Reference| {
            let known = out.iter().any(|motion| motion.reference == reference);
            if !known && reference.varies(self.runs) && out.len() < CANDIDATES_MAX {
                out.push(Motion { by, reference, trust: 1.0 });
            }
        };
        for row in &self.history.rows {
            if let Some(reference) = row.read(unit, self.active) {
                add(row.label.clone(), reference);
                let scaled = maxima.as_ref().filter(|_| unit == Unit::Count);
                if let Some((factor, reference)) = scaled.and_then(|maxima| multiple(maxima, &reference)) {
                    add(format!("{factor} x {}", row.label), reference);
                }
            }
            let Some(maxima) = maxima.as_ref().filter(|_| unit == Unit::Count) else { continue };
            let parts = row.read_parts(self.active);
            parts.into_iter().filter(|part| part.runs[..self.runs] == maxima[..]).for_each(|part| {
                add(row.label.clone(), part);
            });
        }
        out.extend(maxima.and_then(|maxima| steps(unit, &maxima)));
        out
    }
}

/// Returns the parameter times a factor: the difference of the greatest values of two runs, per unit of the parameter.
/// For example, task 3 with 100 files per task reads from 300 on.
fn multiple(maxima: &[i64], reference: &Reference) -> Option<(i64, Reference)> {
    let other = (1..maxima.len()).find(|run| reference.runs[*run] != reference.runs[0])?;
    let by = reference.runs[0].checked_sub(reference.runs[other])?;
    let moved = maxima[0].checked_sub(maxima[other])?;
    if moved % by != 0 || matches!(moved / by, 0 | 1) {
        return None;
    }
    let factor = moved / by;
    let mut out = Reference { runs: [0; RUNS_MAX], now: reference.now.checked_mul(factor)? };
    for (to, from) in out.runs.iter_mut().zip(reference.runs) {
        *to = from.checked_mul(factor)?;
    }
    Some((factor, out))
}

/// Returns the movement by steps of the greatest value of each run, the newest first.
fn steps(unit: Unit, maxima: &[i64]) -> Option<Motion> {
    let (next, by) = next(unit, maxima)?;
    if maxima.iter().all(|value| *value == maxima[0]) {
        return None;
    }
    let (mut right, mut tests) = (0.0, 0.0);
    for run in 0..maxima.len().saturating_sub(2) {
        let weight = weight(1 << run);
        let was_right = self::next(unit, &maxima[run + 1..]).is_some_and(|(value, _)| value == maxima[run]);
        right += if was_right { weight } else { 0.0 };
        tests += weight;
    }
    let step = next.saturating_sub(maxima[0]);
    let likely = unit != Unit::Count || step.abs() <= STEP_MAX || next % step == 0;
    let untested = if likely { STEP_TRUST } else { LEAP_TRUST };
    let trust = (right + untested * STEP_TRUST_TESTS) / (tests + STEP_TRUST_TESTS);
    let mut runs = [0; RUNS_MAX];
    runs.iter_mut().zip(maxima).for_each(|(to, value)| *to = *value);
    Some(Motion { by: format!("{}, {by}", unit.name()), reference: Reference { runs, now: next }, trust })
}

/// Returns the value that follows these, the newest first, and the step: the most frequent step, or whole months if all
/// values are the same day of their months, or the last day.
fn next(unit: Unit, values: &[i64]) -> Option<(i64, String)> {
    let (&[last, before], _) = values.split_first_chunk::<2>()?;
    let far = unit == Unit::Day && (last - before).abs() >= SHORTEST_MONTH_DAYS;
    if let Some(next) = if far { next_month(values) } else { None } {
        return Some(next);
    }
    let step = step(values.iter().copied())?;
    Some((last.checked_add(step)?, unit.steps(step)))
}

/// Returns the same day some months later, if these values, the newest first, are the same day or the last day of their
/// months.
fn next_month(values: &[i64]) -> Option<(i64, String)> {
    let months = step(values.iter().map(|day| month_of(*day)))?;
    let dates = || values.iter().map(|day| Date::of_days(*day));
    let newest = dates().next()?;
    let month = month_of(*values.first()?) + months;
    let (year, number) = (month.div_euclid(12), month.rem_euclid(12) + 1);
    let ends = dates().all(|date| date.day == days_in(date.year, date.month));
    let same = dates().all(|date| date.day == newest.day);
    let day = if ends { days_in(year, number) } else { newest.day };
    let date = Date::new(year, number, day).filter(|_| ends || same)?;
    Some((date.to_days(), Unit::Month.steps(months)))
}

/// Returns the most frequent difference; of equally frequent ones, the newest.
fn step(values: impl Iterator<Item = i64> + Clone) -> Option<i64> {
    let differences = || values.clone().zip(values.clone().skip(1)).map(|(new, old)| new - old);
    let count = |step: i64| differences().filter(|other| *other == step).count();
    differences()
        .map(|step| (count(step), step))
        .reduce(|best, other| if other.0 > best.0 { other } else { best })
        .map(|(_, step)| step)
}
