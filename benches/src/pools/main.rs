//! Measures every row of the table of pools in docs/BENCHMARKS.md.

mod link;
#[path = "../../../tests/src/servers/nfs.rs"]
#[allow(dead_code, reason = "some calls are for tests alone")]
mod nfs_server;
mod others;
mod plain;
mod rows;
#[path = "../../../tests/src/servers/s3.rs"]
#[allow(dead_code, reason = "some calls are for tests alone")]
mod s3_server;
#[path = "../../../tests/src/servers/started.rs"]
mod started;

use std::process::ExitCode;

use forebay_benches::args::Args;
use forebay_benches::{Result, interrupt, machine, report};
use rows::Bench;

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
    println!("\nstarting servers, making the data ...");
    let mut bench = Bench::prepare(&args.dir, args.pairs)?;
    println!("\n{}", report::head());
    bench.run(|group| args.wants(group))?;
    if args.is_full() {
        let section = report::section("make bench-pools", &bench.rows, "make bench-pools", args.pairs, &facts)?;
        report::write(&args.document, "make bench-pools", &section)?;
        println!("\n{}", args.document.display());
    }
    Ok(())
}
