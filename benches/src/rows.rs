//! The rows of the table in docs/BENCHMARKS.md, in its order.

mod checkpoints;
mod content;
mod daemon;
mod libfuse;
mod names;
mod scratch;
mod small;
mod sqlite;
mod views;

use crate::Result;
use crate::args::Args;
use crate::pairs::{self, Series, Side};
use crate::place::Place;
use crate::report::{Outcome, Row, Target, Unit};

/// A run: its arguments, its directories and mounts, and its results.
pub struct Bench {
    pub args: Args,
    pub place: Place,
    pub rows: Vec<Row>,
}

impl Bench {
    pub fn prepare(args: Args) -> Result<Self> {
        let place = Place::make(&args.dir)?;
        Ok(Self { args, place, rows: Vec::new() })
    }

    /// Measures all selected groups. Groups that remove files or kill the worker are last, so that they do not disturb
    /// the other groups.
    pub fn run(&mut self) -> Result<()> {
        type Group = fn(&mut Bench) -> Result<()>;
        let groups: [(&str, Group); 20] = [
            ("read", content::read),
            ("random", content::random),
            ("write", content::write),
            ("small", small::hot),
            ("small-dropped", small::dropped),
            ("libfuse", libfuse::hot),
            ("names", names::known),
            ("sqlite", sqlite::transactions),
            ("daemon-cpu", daemon::cpu),
            ("create", names::create_and_unlink),
            ("libfuse-create", libfuse::create),
            ("checkpoints", checkpoints::absorb),
            ("scratch", scratch::speed),
            ("scratch-commit", scratch::commit),
            ("view", views::speed),
            ("view-laying", views::laying),
            ("view-laying-million", views::laying_a_million),
            ("scandir-change", names::scandir_and_change),
            ("daemon-memory", daemon::memory),
            ("daemon-death", daemon::death),
        ];
        for (name, group) in groups {
            if self.args.wants(name) {
                group(self)?;
            }
        }
        Ok(())
    }

    /// Measures one row as a ratio.
    fn ratio(
        &mut self,
        name: &str,
        target: Target,
        unit: Unit,
        mut sample: impl FnMut(&Place, Side, usize) -> Result<f64>,
    ) -> Result<()> {
        let place = &self.place;
        let series = pairs::alternate(self.args.pairs, |side, pair| sample(place, side, pair))?;
        self.add_series(name, target, series, unit);
        Ok(())
    }

    fn add_series(&mut self, name: &str, target: Target, series: Series, unit: Unit) {
        self.add(name, target, Outcome::Ratio(series, unit));
    }

    fn add(&mut self, name: &str, target: Target, outcome: Outcome) {
        let row = Row { name: name.into(), target, outcome };
        println!("{}", row.line());
        self.rows.push(row);
    }

    fn fio_secs(&self) -> u32 {
        if self.args.quick { 1 } else { 3 }
    }
}
