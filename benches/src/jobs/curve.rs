//! What is foreseen of a run after k others: each run is left out once, and the k that are nearest in time are learned
//! from, in their order.
//!
//! Waiting is what a reader alone would wait for the pool as it is given: an answer and the bytes of each file that
//! is not here.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use forebay_benches::Result;
use forebay_prefetch::plan::{Candidate, Limits, PoolRate, plan, probability_min};
use forebay_prefetch::profile::{Profile, Use};
use forebay_prefetch::signature::Invocation;
use plotters::prelude::*;

use super::ground::Ran;

/// Runs that are learned from.
const LEARNED: [usize; 4] = [1, 2, 3, 5];
/// What [`super::POOL`] is.
const RATE: PoolRate =
    PoolRate { bytes_per_second: 100e6, latency: std::time::Duration::from_millis(2), concurrency: 16 };
const PIXELS: (u32, u32) = (900, 480);

/// The runs of one program, in their order.
pub struct Record {
    pub runs: Vec<Ran>,
    pub words: Vec<Vec<String>>,
    /// Paths that a user would have named.
    pub declared: HashSet<String>,
    /// Of everything that lies in the pool.
    pub sizes: HashMap<String, u64>,
}

/// Means over the runs that were left out.
#[derive(Debug, Clone, Copy, Default)]
struct Shares {
    coverage: f64,
    accuracy: f64,
    /// Of the waiting without staging.
    waiting: f64,
}

pub fn rows(records: &[(&'static str, Record)], picture: Option<&Path>) -> Result<()> {
    println!(
        "\nEach run foreseen from k others: coverage | accuracy | waiting that is left (shares of the bytes, and of the time).\n"
    );
    let ks: String = LEARNED.iter().map(|k| format!(" k = {k} |")).collect();
    println!("| program | none |{ks} declared | clairvoyant |\n|---|---|{}---|---|", "---|".repeat(LEARNED.len()));
    let mut curves = Vec::new();
    for (name, record) in records {
        let curve: Vec<(usize, Shares)> =
            LEARNED.into_iter().filter(|k| *k < record.runs.len()).map(|k| (k, record.learned(k))).collect();
        let mut cells = vec![show(record.mean(|_| HashSet::new()))];
        cells.extend(LEARNED.iter().map(|k| curve.iter().find(|(at, _)| at == k).map_or("".into(), |(_, s)| show(*s))));
        cells.push(show(record.mean(|_| record.declared.clone())));
        cells.push(show(record.mean(|run| record.runs[run].read.iter().map(|read| read.path.clone()).collect())));
        println!("| {name} | {} |", cells.join(" | "));
        curves.push((*name, curve));
    }
    picture.map_or(Ok(()), |picture| Ok(std::fs::write(picture, draw(&curves)?)?))
}

fn show(shares: Shares) -> String {
    let accuracy = if shares.accuracy.is_nan() { "–".into() } else { format!("{:.2}", shares.accuracy) };
    format!("{:.2} \\| {accuracy} \\| {:.2}", shares.coverage, shares.waiting)
}

impl Record {
    fn learned(&self, k: usize) -> Shares {
        self.mean(|target| {
            let mut others: Vec<usize> = (0..self.runs.len()).filter(|run| *run != target).collect();
            // Of two that are as near the one before.
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
            let of = |read: &super::ground::Read| Use {
                path: read.path.clone(),
                size_bytes: read.bytes,
                rank: read.rank,
                parts: None,
            };
            let ran = &self.runs[run];
            profile.fold(&self.invocation(run), ran.ended_unix, ran.read.iter().map(of).collect());
        }
        let expected = profile.predict(&self.invocation(target));
        let candidates = expected.iter().enumerate().map(|(at, expected)| Candidate {
            file: at as u64,
            bytes: expected.bytes,
            missing_bytes: expected.bytes,
            probability: expected.probability,
            rank: expected.rank,
        });
        let limits = Limits { room_bytes: u64::MAX, time: None, probability_min: probability_min(1.0) };
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
        // What is not there costs a question and no bytes.
        let fetched: f64 = staged.iter().filter_map(|path| self.sizes.get(path)).map(|bytes| *bytes as f64).sum();
        Shares { coverage: covered / all, accuracy: covered / fetched, waiting: left / waiting }
    }
}

type Curve<'a> = (&'a str, Vec<(usize, Shares)>);

/// Coverage by the number of runs that were learned from.
fn draw(curves: &[Curve<'_>]) -> std::result::Result<String, Box<dyn std::error::Error>> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, PIXELS).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .caption("bytes that were foreseen (%), by runs learned from", ("sans-serif", 20))
            .margin(12)
            .margin_right(300)
            .x_label_area_size(40)
            .y_label_area_size(50)
            .build_cartesian_2d(1.0..5.0, 0.0..104.0)?;
        chart.configure_mesh().x_desc("runs").x_labels(5).light_line_style(TRANSPARENT).draw()?;
        for (at, (name, curve)) in curves.iter().enumerate() {
            let style = Palette99::pick(at).stroke_width(2);
            let points: Vec<(f64, f64)> = curve.iter().map(|(k, s)| (*k as f64, s.coverage * 100.0)).collect();
            chart
                .draw_series(LineSeries::new(points, style).point_size(3))?
                .label(*name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], style));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::Coordinate(600, 10))
            .border_style(BLACK)
            .background_style(WHITE)
            .draw()?;
        area.present()?;
    }
    Ok(svg)
}
