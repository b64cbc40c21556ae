//! Manual pages and completions, made from the command line's own description.

use std::path::Path;

use clap::CommandFactory;
use forebay_overlay::control::Failure;

use crate::args::Cli;
use crate::exit::{self, Exit};

pub fn man(dir: &Path) -> Result<Exit, Failure> {
    let command = Cli::command().after_long_help(exit::table());
    std::fs::create_dir_all(dir)
        .and_then(|()| clap_mangen::generate_to(command, dir))
        .map_err(|e| Failure::io(format!("manual pages in {}", dir.display()), &e))?;
    Ok(Exit::Done)
}

pub fn completions(shell: clap_complete::Shell) -> Result<Exit, Failure> {
    clap_complete::generate(shell, &mut Cli::command(), "forebay", &mut std::io::stdout());
    Ok(Exit::Done)
}
