//! Rows as text: on the terminal when each is measured, and in the document.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::pairs::{Series, spread};
use crate::{Result, machine};

/// What a row must reach.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Target {
    AtLeast(f64),
    AtMost(f64),
    /// No target: the row is for comparison with another one.
    Beside,
}

#[derive(Debug, Clone)]
pub enum Outcome {
    /// The rates whose ratio to native is shown, and their unit.
    Ratio(Series, Unit),
    /// One figure.
    Value(f64, &'static str),
    /// The row was not measured; the text says why.
    Missing(String),
}

/// The unit of a rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    BytesPerSec,
    PerSec,
}

#[derive(Debug, Clone)]
pub struct Row {
    pub name: String,
    pub target: Target,
    pub outcome: Outcome,
}

impl Unit {
    fn show(self, rate: f64) -> String {
        match self {
            Self::BytesPerSec => format!("{:.0} MiB/s", rate / 1_048_576.0),
            Self::PerSec if rate < 10_000.0 => format!("{rate:.0}/s"),
            Self::PerSec => format!("{:.1} k/s", rate / 1000.0),
        }
    }
}

/// Rounds a ratio to two decimals, as the targets have, before it is compared.
fn rounded(ratio: f64) -> f64 {
    (ratio * 100.0).round() / 100.0
}

impl Row {
    /// Returns `None` if the row has no target or was not measured.
    pub fn passes(&self) -> Option<bool> {
        let value = match &self.outcome {
            Outcome::Ratio(series, _) => rounded(series.ratio().median),
            Outcome::Value(value, _) => *value,
            Outcome::Missing(_) => return None,
        };
        match self.target {
            Target::AtLeast(least) => Some(value >= least),
            Target::AtMost(most) => Some(value <= most),
            Target::Beside => None,
        }
    }

    /// Returns name, target, verdict, figure, spread, native, mount.
    fn cells(&self) -> [String; 7] {
        let unit = match &self.outcome {
            Outcome::Value(_, unit) => format!(" {unit}"),
            _ => String::new(),
        };
        let target = match self.target {
            Target::AtLeast(value) => format!("≥ {value:.2}"),
            Target::AtMost(value) => format!("≤ {value}{unit}"),
            Target::Beside => String::new(),
        };
        let verdict = match (self.passes(), &self.outcome, self.target) {
            (Some(true), ..) => "pass",
            (Some(false), ..) => "**miss**",
            (None, Outcome::Missing(_), Target::AtLeast(_) | Target::AtMost(_)) => "not run",
            _ => "",
        };
        let [figure, range, native, mount] = match &self.outcome {
            Outcome::Ratio(series, unit) => {
                let ratio = series.ratio();
                [
                    format!("{:.2}", ratio.median),
                    format!("{:.2}–{:.2}", ratio.min, ratio.max),
                    unit.show(spread(series.native.clone()).median),
                    unit.show(spread(series.mount.clone()).median),
                ]
            }
            Outcome::Value(value, unit) => {
                let text = if *value < 1.0 { format!("{value:.4} {unit}") } else { format!("{value:.0} {unit}") };
                [text, String::new(), String::new(), String::new()]
            }
            Outcome::Missing(why) => [why.clone(), String::new(), String::new(), String::new()],
        };
        [self.name.clone(), target, verdict.into(), figure, range, native, mount]
    }

    /// Returns the row as a line for the terminal.
    pub fn line(&self) -> String {
        let [name, target, verdict, figure, range, native, mount] = self.cells();
        let verdict = verdict.replace('*', "");
        let line = format!("{name:<58} {figure:>9} {range:>11}  {target:<10} {verdict:<7} {native:>12} {mount:>12}");
        line.trim_end().to_owned()
    }
}

/// Returns the header of the lines.
pub fn head() -> String {
    format!(
        "{:<58} {:>9} {:>11}  {:<10} {:<7} {:>12} {:>12}",
        "workload", "ratio", "spread", "target", "", "native", "mount"
    )
}

/// Returns the lines that enclose the table in the document; `target` is the command that writes it, such as
/// `make bench`.
fn marks(target: &str) -> [String; 2] {
    ["begin", "end"].map(|which| format!("<!-- {which}: written by `{target}` -->"))
}

/// Returns the document's section about one run, including the lines that enclose it.
pub fn section(target: &str, rows: &[Row], command: &str, pairs: usize, facts: &[String]) -> Result<String> {
    let [begin, end] = marks(target);
    let mut text = format!("{begin}\n\nMeasured on {} by `{command}`:\n\n", machine::today()?);
    for fact in facts {
        writeln!(text, "* {fact}")?;
    }
    writeln!(text, "\nMedian and spread of {pairs} pairs.\n")?;
    text += "| workload | target | | ratio | spread | native | mount |\n|---|---|---|---|---|---|---|\n";
    for row in rows {
        writeln!(text, "| {} |", row.cells().join(" | "))?;
    }
    write!(text, "\n{end}")?;
    Ok(text)
}

/// Replaces the section that an earlier run wrote. The text around it is written by hand and stays.
pub fn write(document: &Path, target: &str, section: &str) -> Result<()> {
    let [begin, end] = marks(target);
    let old = fs::read_to_string(document).unwrap_or_else(|_| format!("# Benchmarks\n\n{begin}\n{end}\n"));
    let found = old.find(&begin).zip(old.find(&end));
    let Some((from, to)) = found.filter(|(from, to)| from < to) else {
        return Err(format!("{}: the marks of the table are gone", document.display()).into());
    };
    Ok(fs::write(document, format!("{}{section}{}", &old[..from], &old[to + end.len()..]))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(ratio: f64) -> Row {
        let series = Series { native: vec![100.0], mount: vec![ratio * 100.0] };
        Row { name: "x".into(), target: Target::AtLeast(0.95), outcome: Outcome::Ratio(series, Unit::PerSec) }
    }

    #[test]
    fn a_ratio_passes_as_it_is_shown() {
        assert_eq!(row(0.946).passes(), Some(true));
        assert_eq!(row(0.944).passes(), Some(false));
    }

    #[test]
    fn a_row_that_was_not_measured_does_not_pass() {
        let missing = Row { outcome: Outcome::Missing("no root".into()), ..row(1.0) };
        assert_eq!(missing.passes(), None);
        assert!(missing.line().contains("not run"));
    }

    #[test]
    fn only_the_marked_part_of_the_document_is_replaced() {
        let path = std::env::temp_dir().join(format!("forebay-report-{}", std::process::id()));
        let [begin, end] = marks("make x");
        fs::write(&path, format!("before\n{begin}\nold\n{end}\nafter\n")).unwrap();
        write(&path, "make x", &format!("{begin}\nnew\n{end}")).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(text, format!("before\n{begin}\nnew\n{end}\nafter\n"));
    }
}
