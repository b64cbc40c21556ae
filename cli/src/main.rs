//! The `forebay` program: parses arguments, sends requests to the daemon, prints.

mod allocator;
mod args;
mod commands;
mod exit;
mod output;
mod progress;
mod registration;
mod restarts;
mod targets;
mod values;

use clap::{CommandFactory, FromArgMatches};

use exit::Exit;
use output::Output;

fn main() {
    let matches = args::Cli::command().after_long_help(exit::table()).get_matches();
    let cli = match args::Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    let output = Output::new(cli.json);
    let exit = match commands::run(cli.command, &output) {
        Ok(exit) => exit,
        Err(failure) => {
            output.failure(&failure);
            Exit::from(failure.kind) as u8
        }
    };
    forebay_daemon::end_process(exit)
}
