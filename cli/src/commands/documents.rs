//! Manual pages and completions, generated from the description of the command line.

use std::io::Write;
use std::path::Path;

use clap::CommandFactory;
use forebay_daemon::Failure;

use crate::args::Cli;
use crate::exit::{self, Exit};

pub fn man(dir: &Path) -> Result<Exit, Failure> {
    let command = Cli::command().after_long_help(exit::table());
    let main_page = dir.join("forebay.1");
    std::fs::create_dir_all(dir)
        .and_then(|()| clap_mangen::generate_to(command, dir))
        .and_then(|()| std::fs::read_to_string(&main_page))
        // The generator has no section name for the text after the help.
        .and_then(|page| std::fs::write(&main_page, page.replace(".SH EXTRA", ".SH \"EXIT STATUS\"\n.nf")))
        .map_err(|e| Failure::io(format!("manual pages in {}", dir.display()), &e))?;
    Ok(Exit::Done)
}

pub fn completions(shell: clap_complete::Shell) -> Result<Exit, Failure> {
    let mut out = std::io::stdout();
    clap_complete::generate(shell, &mut Cli::command(), "forebay", &mut out);
    out.flush().map_err(|e| Failure::io("standard output", &e))?;
    Ok(Exit::Done)
}
