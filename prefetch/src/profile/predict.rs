//! Predicts the next run from what previous runs read.
//!
//! Paths with the same text around their numbers form a template. For each template, `motion` finds the movement of its
//! numbers that predicts each of the last runs best from the runs before it, and the paths are moved accordingly. Paths
//! that do not move are expected as often as they were used.
//!
//! The hypotheses for a template: the same paths again; a number that is a parameter, with an offset; a date or a
//! counter that moves with each run. The hypothesis that would have predicted the past runs best is used.

use std::collections::HashMap;

use super::expected::{ExpectedRead, Reason};
use super::field::{Joined, Numbers};
use super::history::{FOLLOWS_WEAKLY, ParameterHistory, Reference, RunHistory};
use super::masks::{Masks, compressed};
use super::motion::{ExplanationTrial, Fields, Motion, Motions};
use super::{Profile, RememberedFile, all};
use crate::signature::digits::each_run;
use crate::signature::{Invocation, Unit};

/// The most numbers in a path that may move. A path with more does not move.
const NUMBERS_MAX: usize = 12;

/// The most values of a counter in one run for which an equal parameter is taken to be no coincidence.
const VALUES_OF_PARAMETER_MAX: usize = 4;

/// Less probable paths are not returned.
const PROBABILITY_MIN: f64 = 0.01;

/// The paths of a template stay as they are if their score without movement is at least this.
const STAYS_SCORE_MIN: f64 = 0.999;

pub(super) fn predict(profile: &Profile, invocation: &Invocation, now_unix: Option<u64>) -> Vec<ExpectedRead> {
    if profile.runs.is_empty() {
        return Vec::new();
    }
    let mut all_masks = masks(profile);
    let whole;
    let profile = match all_masks.broken_off() {
        Some(run) => {
            whole = profile.without(run);
            all_masks = masks(&whole);
            &whole
        }
        None => profile,
    };
    let history = RunHistory::new(profile, invocation, now_unix);
    let learnt = all_masks.probability(all_masks.frequency());
    let literal = std::array::from_fn(|mask| history.explained(mask as u8).unwrap_or_else(|| learnt(mask as u8)));
    let mut templates: Vec<(u64, u32)> =
        (0..).zip(&profile.files).map(|(at, file)| (template(&file.path), at)).collect();
    templates.sort_unstable();
    let mut of_templates = Masks::new(profile.runs.len());
    for same in templates.chunk_by(|a, b| a.0 == b.0) {
        of_templates.add(same.iter().fold(0, |used, (_, file)| used | profile.files[*file as usize].used));
    }
    let learnt = of_templates.probability(of_templates.frequency());
    let template = std::array::from_fn(|mask| history.explained(mask as u8).unwrap_or_else(|| learnt(mask as u8)));
    let forecast = Forecast { profile, history, literal, template };
    let mut out = Vec::with_capacity(profile.files.len());
    let mut files = Vec::new();
    for same in templates.chunk_by(|a, b| a.0 == b.0) {
        files.clear();
        files.extend(same.iter().map(|(_, file)| *file as usize));
        forecast.template(same[0].0 == NO_NUMBERS, &files, &mut out);
    }
    out.sort_by_cached_key(|expected| expected.rank);
    out
}

fn masks(profile: &Profile) -> Masks {
    let mut masks = Masks::new(profile.runs.len());
    profile.files.iter().for_each(|file| masks.add(file.used));
    masks
}

/// The template of all paths without numbers that may move.
const NO_NUMBERS: u64 = 0;

/// Returns the same number for paths that differ only in their numbers (FNV-1a, 64 bits). Two templates with the same
/// hash are treated as one: each path keeps its own text.
fn template(path: &str) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |byte: u8| hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let (mut kept, mut numbers) = (0, 0);
    each_run(path, |run| {
        path.as_bytes()[kept..run.start].iter().for_each(|byte| add(*byte));
        // A byte that does not occur in UTF-8 text.
        add(0xff);
        kept = run.end;
        numbers += 1;
    });
    if numbers == 0 || numbers > NUMBERS_MAX {
        return NO_NUMBERS;
    }
    path.as_bytes()[kept..].iter().for_each(|byte| add(*byte));
    hash.max(NO_NUMBERS + 1)
}

/// The state of a prediction.
struct Forecast<'a> {
    profile: &'a Profile,
    history: RunHistory,
    /// The probability of a path that stays, for every mask of its runs.
    literal: [f64; 256],
    /// The probability that a template whose paths move is used at all, for every mask of the runs that used it.
    template: [f64; 256],
}

/// A template whose paths may move.
struct Template<'a> {
    files: &'a [usize],
    /// For each path, the mask of its uses among the runs that used the template.
    used: Vec<u8>,
    runs: usize,
    fields: Fields,
    motions: Motions,
    follows: Vec<Follows<'a>>,
    /// The probability that the template is used at all.
    probability: f64,
}

/// A field that may follow a parameter which had one value in all runs, and has another one now.
struct Follows<'a> {
    field: usize,
    by: &'a str,
    /// Only paths with this value; `None`: all paths.
    only: Option<i64>,
    distance: i64,
    probability: f64,
}

/// A path of a template after its movement.
struct Moved {
    row: usize,
    /// The new values of its fields.
    values: Vec<i64>,
    probability: f64,
    bytes: u64,
    used: u32,
}

impl Forecast<'_> {
    /// Adds what is expected of the files of one template.
    fn template(&self, no_numbers: bool, files: &[usize], out: &mut Vec<ExpectedRead>) {
        let active = files.iter().fold(0, |active, file| active | self.profile.files[*file].used);
        // The common case: a template whose files were always used together, or once only.
        let together = files.iter().all(|file| self.profile.files[*file].used == active);
        let has_news = self.history.has_news()
            && files.iter().any(|file| self.history.may_follow(&self.profile.files[*file].path));
        if no_numbers || (together && !has_news) {
            files.iter().for_each(|file| self.stays(*file, 1.0, out));
            return;
        }
        let runs = active.count_ones() as usize;
        let used: Vec<u8> = files.iter().map(|file| compressed(self.profile.files[*file].used, active)).collect();
        let mut masks = Masks::new(runs);
        used.iter().for_each(|used| masks.add(*used));
        let stays = masks.score().is_none_or(|score| score >= STAYS_SCORE_MIN);
        let numbers = if stays && !has_news { None } else { self.numbers(files) };
        let Some(numbers) = numbers else {
            files.iter().for_each(|file| self.stays(*file, 1.0, out));
            return;
        };
        let history = &self.history;
        let trial = ExplanationTrial { history, active, runs, used: &used };
        let (mut fields, motions) = trial.explain(&numbers);
        let mut news = follows(history, active, &fields, &motions);
        if has_news && !motions.moves() {
            for joined in [Joined::Dates, Joined::Nothing] {
                let other = Fields::new(&numbers, joined);
                let found = follows(history, active, &other, &Motions::none(other.fields.len()));
                if found.len() > news.len() {
                    (fields, news) = (other, found);
                }
            }
        }
        let motions = if motions.moves() { motions } else { Motions::none(fields.fields.len()) };
        let probability = self.template[usize::from(active)];
        let template = Template { files, used, runs, fields, motions, follows: news, probability };
        self.moves(&template, &numbers, out);
    }

    /// Returns the numbers of the paths; `None` if two templates with different counts of numbers have the same hash.
    fn numbers(&self, files: &[usize]) -> Option<Numbers<'_>> {
        let mut numbers = Numbers { columns: 0, values: Vec::new(), widths: Vec::new(), gaps: Vec::new() };
        let mut before = None;
        let first = &*self.profile.files[*files.first()?].path;
        each_run(first, |run| {
            numbers.gaps.extend(before.map(|end| &first[end..run.start]));
            before = Some(run.end);
            numbers.columns += 1;
        });
        for file in files {
            each_run(&self.profile.files[*file].path, |run| {
                numbers.values.push(run.value);
                numbers.widths.push(run.width() as u8);
            });
        }
        (numbers.columns > 0 && numbers.values.len() == numbers.columns * files.len()).then_some(numbers)
    }

    fn stays(&self, file: usize, share: f64, out: &mut Vec<ExpectedRead>) {
        let RememberedFile { used, .. } = self.profile.files[file];
        let probability = self.literal[usize::from(used)] * share;
        let why = Reason::Replayed { used: used.count_ones(), seen: self.profile.runs.len() as u32 };
        self.push(&self.profile.files[file], None, probability, None, why, out);
    }

    fn push(
        &self,
        file: &RememberedFile,
        path: Option<String>,
        probability: f64,
        bytes: Option<u64>,
        why: Reason,
        out: &mut Vec<ExpectedRead>,
    ) {
        if probability >= PROBABILITY_MIN {
            out.push(ExpectedRead {
                path: path.unwrap_or_else(|| file.path.to_string()),
                bytes: bytes.unwrap_or(file.size_bytes),
                rank: file.rank,
                probability: probability.min(1.0),
                parts: file.parts.as_deref().copied(),
                why,
            });
        }
    }

    /// Adds the paths of a template, moved and unmoved, each once.
    fn moves(&self, template: &Template<'_>, numbers: &Numbers<'_>, out: &mut Vec<ExpectedRead>) {
        let begin = out.len();
        let all_used = all(template.runs);
        let mut moving = Vec::new();
        for (row, &file) in template.files.iter().enumerate() {
            if template.fields.odd[row] {
                self.stays(file, 1.0, out);
            } else if !template.motions.moves() || (template.motions.mixed && template.used[row] == all_used) {
                let RememberedFile { used, size_bytes: bytes, .. } = self.profile.files[file];
                let probability = self.literal[usize::from(used)];
                let values = template.fields.row(row).to_vec();
                let still = Moved { row, values, probability, bytes, used: used.count_ones() };
                let (share, moved) = self.follow(template, &still);
                self.stays(file, share, out);
                moved.iter().for_each(|(moved, by)| self.push_moved(template, numbers, moved, by, out));
            } else {
                moving.push(row);
            }
        }
        let by = template.motions.label();
        for mut moved in self.moved(template, &moving) {
            let (share, other) = self.follow(template, &moved);
            other.iter().for_each(|(other, by)| self.push_moved(template, numbers, other, by, out));
            moved.probability *= share;
            self.push_moved(template, numbers, &moved, &by, out);
        }
        let doubt = 1.0 - template.motions.trust();
        if doubt > 0.0 {
            moving.iter().for_each(|row| self.stays(template.files[*row], doubt, out));
        }
        let some_stay = template.motions.mixed || template.fields.odd.contains(&true);
        if doubt > 0.0 || some_stay || !template.follows.is_empty() {
            once(out, begin);
        }
    }

    /// Returns the path moved by a new parameter, if one of its fields may follow it, and the share of the probability
    /// that stays with the unmoved path.
    fn follow(&self, template: &Template<'_>, moved: &Moved) -> (f64, Option<(Moved, String)>) {
        let mut values = moved.values.clone();
        let (mut share, mut by) = (0.0_f64, "");
        for follows in &template.follows {
            if follows.only.is_none_or(|only| only == values[follows.field]) {
                values[follows.field] = values[follows.field].wrapping_add(follows.distance);
                if follows.probability > share {
                    (share, by) = (follows.probability, follows.by);
                }
            }
        }
        if share == 0.0 {
            return (1.0, None);
        }
        let before = template.motions.label();
        let by = if before.is_empty() { by.to_owned() } else { format!("{before} and {by}") };
        (1.0 - share, Some((Moved { values, probability: moved.probability * share, ..*moved }, by)))
    }

    /// Returns the paths of these rows, one for each key, moved to the next run.
    fn moved(&self, template: &Template<'_>, rows: &[usize]) -> Vec<Moved> {
        let Template { fields, motions, .. } = template;
        let mut keys: Vec<(u64, u8, u32)> = Vec::new();
        for &row in rows {
            let used = template.used[row];
            for run in (0..template.runs).filter(|run| used >> run & 1 == 1) {
                keys.push((fields.key(row, &motions.of_fields, run), run as u8, row as u32));
            }
        }
        keys.sort_unstable();
        let mut masks = Masks::new(template.runs);
        let mask = |same: &[(u64, u8, u32)]| same.iter().fold(0, |mask, (_, run, _)| mask | 1 << run);
        keys.chunk_by(|a, b| a.0 == b.0).for_each(|same| masks.add(mask(same)));
        let probability = masks.probability(masks.frequency());
        let scale = template.probability * motions.trust();
        let mut out = Vec::new();
        for same in keys.chunk_by(|a, b| a.0 == b.0) {
            let (_, run, row) = same[0];
            let mut values = fields.row(row as usize).to_vec();
            for (value, motion) in values.iter_mut().zip(&motions.of_fields) {
                let Some(Motion { reference: Reference { runs, now }, .. }) = motion else { continue };
                *value = value.wrapping_sub(runs[usize::from(run)]).wrapping_add(*now);
            }
            let mut sizes: Vec<u64> =
                same.iter().map(|(_, _, row)| self.profile.files[template.files[*row as usize]].size_bytes).collect();
            sizes.sort_unstable();
            let used = mask(same);
            let probability = probability(used) * scale;
            let (row, bytes) = (row as usize, sizes[sizes.len() / 2]);
            out.push(Moved { row, values, probability, bytes, used: used.count_ones() });
        }
        out
    }

    fn push_moved(
        &self,
        template: &Template<'_>,
        numbers: &Numbers<'_>,
        moved: &Moved,
        by: &str,
        out: &mut Vec<ExpectedRead>,
    ) {
        let Some(path) = self.path(template, numbers, moved) else { return };
        let file = &self.profile.files[template.files[moved.row]];
        let (used, seen) = (moved.used, self.profile.runs.len() as u32);
        let why = if path == *file.path {
            Reason::Replayed { used, seen }
        } else {
            Reason::Moved { from: file.path.to_string(), by: by.to_owned(), used, seen }
        };
        self.push(file, Some(path), moved.probability, Some(moved.bytes), why, out);
    }

    /// Returns the path with these fields; `None` if they cannot be written.
    fn path(&self, template: &Template<'_>, numbers: &Numbers<'_>, moved: &Moved) -> Option<String> {
        let mut values = moved.values.clone();
        if !template.fields.follow_ties(&mut values) {
            return None;
        }
        let mut texts = vec![None; numbers.columns];
        let before = template.fields.row(moved.row);
        for ((field, value), before) in template.fields.fields.iter().zip(&values).zip(before) {
            if value != before && !field.write(*value, &mut texts) {
                return None;
            }
        }
        let path = &self.profile.files[template.files[moved.row]].path;
        let mut out = String::with_capacity(path.len() + 1);
        let (mut kept, mut column) = (0, 0);
        each_run(path, |run| {
            if let Some(Some(text)) = texts.get(column) {
                out.push_str(&path[kept..run.start]);
                out.push_str(text);
                kept = run.end;
            }
            column += 1;
        });
        out.push_str(&path[kept..]);
        Some(out)
    }
}

/// Of paths that are expected twice since `begin`, keeps the more probable one.
fn once(out: &mut Vec<ExpectedRead>, begin: usize) {
    let mut known: HashMap<String, usize> = HashMap::new();
    let mut kept: Vec<ExpectedRead> = Vec::with_capacity(out.len() - begin);
    for expected in out.drain(begin..) {
        match known.get(&expected.path) {
            Some(&at) if kept[at].probability < expected.probability => kept[at] = expected,
            Some(_) => {}
            None => {
                known.insert(expected.path.clone(), kept.len());
                kept.push(expected);
            }
        }
    }
    out.append(&mut kept);
}

/// Returns the fields that may follow parameters with a new value, with the first such parameter for each field.
fn follows<'a>(history: &'a RunHistory, active: u8, fields: &Fields, motions: &Motions) -> Vec<Follows<'a>> {
    let free = |field: &usize| fields.ties[*field].is_none() && motions.of_fields[*field].is_none();
    let candidates = (0..fields.fields.len()).filter(free).filter(|_| history.has_news());
    // A date that equals a parameter does not follow the clock, even if the parameter did not change.
    let first = |field| {
        let mut found = history.rows.iter().filter_map(move |row| follow(row, active, fields, field));
        let first = found.next()?;
        if first.distance != 0 || first.only.is_none() { Some(first) } else { found.find(|other| other.distance != 0) }
    };
    candidates.filter_map(first).filter(|follows| follows.distance != 0).collect()
}

fn follow<'a>(row: &'a ParameterHistory, active: u8, fields: &Fields, field: usize) -> Option<Follows<'a>> {
    let unit = fields.fields[field].unit;
    let runs = active.count_ones() as usize;
    let has = |value: i64| (0..fields.odd.len()).any(|row| fields.row(row)[field] == value);
    let mut distinct = Vec::new();
    for row in 0..fields.odd.len() {
        let value = fields.row(row)[field];
        if !distinct.contains(&value) {
            distinct.push(value);
        }
        if distinct.len() > VALUES_OF_PARAMETER_MAX {
            break;
        }
    }
    let is_date = unit != Unit::Count;
    let mut references: Vec<(Reference, f64)> =
        row.read(unit, active).map(|read| (read, row.follows)).into_iter().collect();
    if !is_date && !row.is_clock {
        // A part of a date is a small number.
        references.extend(row.read_parts(active).into_iter().map(|read| (read, row.follows.min(FOLLOWS_WEAKLY))));
    }
    references.into_iter().find_map(|(reference, follows)| {
        let (was, now) = (reference.runs[0], reference.now);
        // A job often reads what was written on the day before.
        let there = has(was) || (row.is_clock && is_date && has(was - 1));
        if reference.varies(runs) || !there || !(is_date || distinct.len() <= VALUES_OF_PARAMETER_MAX) {
            return None;
        }
        let only = (!is_date).then_some(was);
        let distance = now.checked_sub(was)?;
        // If there are several numbers, an equal one is more often a coincidence.
        let probability = if is_date || distinct.len() == 1 { follows } else { follows.min(FOLLOWS_WEAKLY) };
        Some(Follows { field, by: &row.label, only, distance, probability })
    })
}
