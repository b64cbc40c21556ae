//! The command line.

use std::path::PathBuf;

use crate::Result;

pub const USAGE: &str = "usage: cargo bench -p forebay-benches -- [--quick] [--pairs N] [--only WORD[,WORD]] [--dir DIR] \
[--passthrough-hp PROGRAM] [--document FILE]";

/// Pairs of a full run; a figure needs the median of at least 5.
const PAIRS: usize = 7;
const PAIRS_QUICK: usize = 3;

/// The arguments of a run.
#[derive(Debug, Clone)]
pub struct Args {
    pub pairs: usize,
    pub quick: bool,
    /// Selects the groups whose name contains one of these words; empty selects all.
    pub only: Vec<String>,
    /// The directory in which native directory, fast pools and pools are made, all on one file system.
    pub dir: PathBuf,
    /// libfuse's example `passthrough_hp`, for comparison.
    pub passthrough_hp: Option<PathBuf>,
    /// The document whose table is replaced after a full run.
    pub document: PathBuf,
    /// The arguments as typed, for the document.
    pub typed: Vec<String>,
}

impl Args {
    /// # Errors
    /// An argument is unknown or lacks its value; the error names it.
    pub fn parse(args: impl Iterator<Item = String>) -> Result<Self> {
        // `cargo bench` adds `--bench`.
        let typed: Vec<String> = args.filter(|arg| arg != "--bench").collect();
        let mut parsed = Self {
            pairs: 0,
            quick: false,
            only: Vec::new(),
            dir: PathBuf::from("/var/tmp"),
            passthrough_hp: std::env::var_os("FOREBAY_PASSTHROUGH_HP").filter(|p| !p.is_empty()).map(PathBuf::from),
            document: PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/BENCHMARKS.md")),
            typed: typed.clone(),
        };
        let mut rest = typed.into_iter();
        while let Some(arg) = rest.next() {
            let mut value = || rest.next().ok_or_else(|| format!("{arg} needs a value\n{USAGE}"));
            match arg.as_str() {
                "--quick" => parsed.quick = true,
                "--pairs" => parsed.pairs = value()?.parse()?,
                "--only" => parsed.only = value()?.split(',').map(str::to_owned).collect(),
                "--dir" => parsed.dir = value()?.into(),
                "--passthrough-hp" => parsed.passthrough_hp = Some(value()?.into()),
                "--document" => parsed.document = value()?.into(),
                _ => return Err(format!("{arg}: not known\n{USAGE}").into()),
            }
        }
        if parsed.pairs == 0 {
            parsed.pairs = if parsed.quick { PAIRS_QUICK } else { PAIRS };
        }
        Ok(parsed)
    }

    /// Returns whether a group of rows is selected.
    pub fn wants(&self, group: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|word| group.contains(word.as_str()))
    }

    /// Returns whether this run measures every row of the document's table.
    pub fn is_full(&self) -> bool {
        !self.quick && self.only.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Args> {
        Args::parse(args.iter().map(|s| (*s).to_owned()))
    }

    #[test]
    fn pairs_that_are_asked_for_win_over_quick() {
        assert_eq!(parse(&["--bench"]).unwrap().pairs, PAIRS);
        assert_eq!(parse(&["--quick"]).unwrap().pairs, PAIRS_QUICK);
        assert_eq!(parse(&["--quick", "--pairs", "9"]).unwrap().pairs, 9);
    }

    #[test]
    fn what_is_not_known_is_named() {
        assert!(parse(&["--fast"]).unwrap_err().to_string().contains("--fast"));
        assert!(parse(&["--dir"]).unwrap_err().to_string().contains("--dir"));
    }
}
