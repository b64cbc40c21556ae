//! `forebay simulate`

mod cluster;
mod eviction;

use std::path::Path;

use forebay_daemon::{Failure, FailureKind};

use crate::args::SimulateCommand;
use crate::exit::Exit;
use crate::output::Output;

pub fn run(command: &SimulateCommand, output: &Output) -> Result<Exit, Failure> {
    match command {
        SimulateCommand::Eviction(args) => eviction::run(args, output),
        SimulateCommand::Cluster(args) => cluster::run(args, output),
    }
}

/// Writes a picture into a file.
fn write_plot(file: &Path, drawn: Result<String, Box<dyn std::error::Error>>) -> Result<(), Failure> {
    let failed = |why: String| Failure::new(FailureKind::Other, why);
    let svg = drawn.map_err(|why| failed(format!("no plot: {why}")))?;
    std::fs::write(file, svg).map_err(|error| failed(format!("{}: {error}", file.display())))
}
