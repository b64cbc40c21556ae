//! How much of a run is predicted from k other runs. Each run is left out once; the profile learns the k runs that are
//! nearest to it in time, in their order.
//!
//! The waiting time is calculated for a single reader of a pool with `RATE`: the latency and the transfer of each file
//! that is not staged.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use forebay_benches::Result;
use forebay_prefetch::plan::{PlanLimits, PoolRate, StagingCandidate, plan, probability_min};
use forebay_prefetch::profile::{FileUse, Profile};
use forebay_prefetch::signature::Invocation;
use plotters::prelude::*;

use super::ground::Ran;

/// The numbers of runs from which the profile learns.
const LEARNED: [usize; 4] = [1, 2, 3, 5];
/// The speed of [`super::POOL`].
const RATE: PoolRate =
    PoolRate { bytes_per_second: 100e6, latency: std::time::Duration::from_millis(2), concurrency: 16 };
const PIXELS: (u32, u32) = (960, 480);
/// The vertical distance between two names.
const LABEL_PIXELS: i32 = 16;

/// The runs of one program, in their order.
pub struct Record {
    pub runs: Vec<Ran>,
    pub words: Vec<Vec<String>>,
    /// Paths that a user would have declared.
    pub declared: HashSet<String>,
    /// Bytes of every file in the pool, by path.
    pub sizes: HashMap<String, u64>,
}

/// Means over the runs that were left out; each is a share from 0 to 1.
#[derive(Debug, Clone, Copy, Default)]
struct Shares {
    coverage: f64,
    accuracy: f64,
    /// Of the waiting time without staging, the part that remains.
    waiting: f64,
}

pub fn rows(records: &[(&'static str, Record)], picture: Option<&Path>) -> Result<()> {
    println!(
        "\nEach run predicted from k other runs: coverage | accuracy | remaining waiting time (shares of the bytes, \
         and of the time).\n"
    );
    let ks: String = LEARNED.iter().map(|k| format!(" k = {k} |")).collect();
    println!("| program | none |{ks} declared | clairvoyant |\n|---|---|{}---|---|", "---|".repeat(LEARNED.len()));
    let mut curves = Vec::new();
    for (name, record) in records {
        let mut columns = vec![Some(record.mean(|_| HashSet::new()))];
        columns.extend(LEARNED.map(|k| (k < record.runs.len()).then(|| record.learned(k))));
        columns.push(Some(record.mean(|_| record.declared.clone())));
        columns.push(Some(record.mean(|run| record.runs[run].read.iter().map(|read| read.path.clone()).collect())));
        let cells: Vec<String> = columns.iter().map(|shares| shares.map_or(String::new(), show)).collect();
        println!("| {name} | {} |", cells.join(" | "));
        let waiting = columns.iter().map(|shares| shares.map(|shares| shares.waiting * 100.0)).collect();
        curves.push(Curve { names: vec![name], waiting });
    }
    picture.map_or(Ok(()), |picture| Ok(std::fs::write(picture, draw(curves)?)?))
}

fn show(shares: Shares) -> String {
    let accuracy = if shares.accuracy.is_nan() { "–".into() } else { format!("{:.2}", shares.accuracy) };
    format!("{:.2} \\| {accuracy} \\| {:.2}", shares.coverage, shares.waiting)
}

impl Record {
    fn learned(&self, k: usize) -> Shares {
        self.mean(|target| {
            let mut others: Vec<usize> = (0..self.runs.len()).filter(|run| *run != target).collect();
            // Of two runs at the same distance, the earlier one is first.
            others.sort_by_key(|run| (run.abs_diff(target), *run));
            others.truncate(k);
            others.sort_unstable();
            self.foreseen(target, &others)
        })
    }

    fn invocation(&self, run: usize) -> Invocation {
        Invocation { words: self.words[run].clone(), ..Invocation::default() }
    }

    fn foreseen(&self, target: usize, others: &[usize]) -> HashSet<String> {
        let mut profile = Profile::new(&self.invocation(target));
        for &run in others {
            let of = |read: &super::ground::Read| FileUse {
                path: read.path.clone(),
                size_bytes: read.bytes,
                rank: read.rank,
                parts: None,
            };
            let ran = &self.runs[run];
            profile.fold(&self.invocation(run), ran.ended_unix, ran.read.iter().map(of).collect());
        }
        let expected = profile.predict(&self.invocation(target));
        let candidates = expected.iter().enumerate().map(|(at, expected)| StagingCandidate {
            file: at as u64,
            bytes: expected.bytes,
            missing_bytes: expected.bytes,
            probability: expected.probability,
            rank: expected.rank,
        });
        let limits = PlanLimits { room_bytes: u64::MAX, time: None, probability_min: probability_min(1.0) };
        let plan = plan(candidates.collect(), &RATE, &limits);
        plan.chosen.iter().map(|candidate| expected[candidate.file as usize].path.clone()).collect()
    }

    fn mean(&self, staged: impl Fn(usize) -> HashSet<String>) -> Shares {
        let all: Vec<Shares> = (0..self.runs.len()).map(|run| self.shares(run, &staged(run))).collect();
        let mean = |of: fn(&Shares) -> f64| all.iter().map(of).sum::<f64>() / all.len() as f64;
        Shares { coverage: mean(|s| s.coverage), accuracy: mean(|s| s.accuracy), waiting: mean(|s| s.waiting) }
    }

    fn shares(&self, run: usize, staged: &HashSet<String>) -> Shares {
        let (mut all, mut covered, mut waiting, mut left) = (0.0, 0.0, 0.0, 0.0);
        for read in &self.runs[run].read {
            let wait = RATE.latency.as_secs_f64() + read.bytes as f64 / RATE.bytes_per_second;
            all += read.bytes as f64;
            waiting += wait;
            match staged.contains(&read.path) {
                true => covered += read.bytes as f64,
                false => left += wait,
            }
        }
        // A staged path that is not in the pool costs a request but no bytes.
        let fetched: f64 = staged.iter().filter_map(|path| self.sizes.get(path)).map(|bytes| *bytes as f64).sum();
        Shares { coverage: covered / all, accuracy: covered / fetched, waiting: left / waiting }
    }
}

/// Programs whose remaining waiting times differ by less than one percentage point in every column of the table, and
/// these times in %, one for each column.
struct Curve {
    names: Vec<&'static str>,
    waiting: Vec<Option<f64>>,
}

/// Returns a chart of the remaining waiting time by the source of the prediction. A line ends at the largest number of
/// runs from which the profile could learn. Single points show the paths that a user would have declared, and the
/// clairvoyant bound.
fn draw(all: Vec<Curve>) -> std::result::Result<String, Box<dyn std::error::Error>> {
    let mut curves: Vec<Curve> = Vec::new();
    for curve in all {
        let near = |a: &Option<f64>, b: &Option<f64>| a.unwrap_or(-1.0) - b.unwrap_or(-1.0);
        let is_same =
            |other: &&mut Curve| other.waiting.iter().zip(&curve.waiting).all(|(a, b)| near(a, b).abs() < 1.0);
        match curves.iter_mut().find(is_same) {
            Some(same) => same.names.extend(curve.names),
            None => curves.push(curve),
        }
    }
    let columns = LEARNED.len() + 3;
    let mut titles = vec!["no run".to_owned()];
    titles.extend(LEARNED.map(|k| if k == 1 { "1 run".to_owned() } else { format!("{k} runs") }));
    titles.extend(["declared".to_owned(), "clairvoyant".to_owned()]);
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, PIXELS).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .caption("remaining waiting time for the pool (%), by source of the prediction", ("sans-serif", 20))
            .margin(12)
            .margin_right(270)
            .x_label_area_size(30)
            .y_label_area_size(50)
            .build_cartesian_2d(-0.2..columns as f64 - 0.8, -3.0..104.0)?;
        chart
            .configure_mesh()
            .x_labels(columns)
            .x_label_formatter(&|x| titles.get(x.round() as usize).cloned().unwrap_or_default())
            .y_labels(6)
            .y_label_formatter(&|y| format!("{y:.0}"))
            .light_line_style(TRANSPARENT)
            .draw()?;
        let mut labels = Vec::new();
        for (at, Curve { names, waiting }) in curves.iter().enumerate() {
            let style = Palette99::pick(at).stroke_width(2);
            let points = waiting.iter().enumerate().filter_map(|(x, y)| Some((x as f64, (*y)?)));
            let (line, beside): (Vec<_>, Vec<_>) = points.partition(|(x, _)| *x < (columns - 2) as f64);
            let end = line.last().copied().unwrap_or_default();
            labels.push((chart.as_coord_spec().translate(&end).1, at, names));
            chart.draw_series(LineSeries::new(line, style).point_size(3))?;
            chart.draw_series(beside.into_iter().map(|point| Circle::new(point, 3, style)))?;
        }
        // A name is drawn at the height of its line's end. Names that are too near are moved down; the last one stays
        // above the lower edge.
        labels.sort_unstable();
        let lines: usize = labels.iter().map(|(_, _, names)| names.len()).sum();
        let (mut y, x, mut left) = (0, PIXELS.0 as i32 - 260, lines as i32);
        for (end, at, names) in labels {
            let font = ("sans-serif", 13).into_font().color(&Palette99::pick(at));
            y = y.max(end - 6).min(PIXELS.1 as i32 - 30 - left * LABEL_PIXELS);
            for name in names {
                area.draw(&Text::new(*name, (x, y), font.clone()))?;
                y += LABEL_PIXELS;
                left -= 1;
            }
        }
        area.present()?;
    }
    Ok(svg)
}
