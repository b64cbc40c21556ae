//! Measures every row of the table in docs/BENCHMARKS.md.

use std::process::ExitCode;

use forebay_benches::args::Args;
use forebay_benches::rows::Bench;
use forebay_benches::{Result, interrupt, machine, report};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let args = Args::parse(std::env::args().skip(1))?;
    interrupt::watch();
    let facts = machine::facts(&args.dir)?;
    for fact in &facts {
        println!("{fact}");
    }
    println!("\nmaking the data ...");
    let mut bench = Bench::prepare(args.clone())?;
    println!("\n{}", report::head());
    bench.run()?;
    if args.is_full() {
        let typed = if args.typed.is_empty() { String::new() } else { format!(" {}", shown(&args.typed)) };
        let command = if typed.is_empty() {
            "make bench".to_owned()
        } else {
            format!("cargo bench -p forebay-benches --{typed}")
        };
        let section = report::section("make bench", &bench.rows, &command, args.pairs, &facts)?;
        report::write(&args.document, "make bench", &section)?;
        println!("\n{}", args.document.display());
    }
    Ok(())
}

/// Returns the arguments, with `…` for paths of this machine.
fn shown(typed: &[String]) -> String {
    let words = typed.iter().map(|word| if word.contains('/') { "…" } else { word.as_str() });
    words.collect::<Vec<_>>().join(" ")
}
