//! `forebay top`: a dashboard on a terminal, and plain lines everywhere else.

mod dashboard;
mod mount_sample;
mod panels;
mod plain;
mod screen;
mod table;

use std::io::IsTerminal;
use std::path::Path;
use std::time::Duration;

use forebay_daemon::Failure;

use crate::exit::Exit;
use crate::output::Output;

pub fn run(path: Option<&Path>, interval: Duration, count: Option<u32>, output: &Output) -> Result<Exit, Failure> {
    let is_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    match is_terminal && !output.json && count.is_none() {
        true => dashboard::run(path, interval),
        false => plain::run(path, interval, count, output),
    }
}
