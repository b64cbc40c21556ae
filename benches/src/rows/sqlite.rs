//! Rows of SQLite with a write-ahead log.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use super::Bench;
use super::content::{mount, settle};
use crate::Result;
use crate::report::{Target, Unit};

const TRANSACTIONS: usize = 20_000;

pub fn transactions(bench: &mut Bench) -> Result<()> {
    for (name, target, background) in [
        ("sqlite WAL transactions", Target::AtLeast(0.60), false),
        ("sqlite WAL transactions, default policy", Target::Beside, true),
    ] {
        bench.ratio(name, target, Unit::PerSec, |place, side, pair| {
            settle(place, background)?;
            sample(&place.side(side, mount(place, background)).join(format!("base-{background}-{pair}.db")))
        })?;
    }
    Ok(())
}

/// Returns transactions per second; each inserts one row with 200 bytes of text.
fn sample(base: &Path) -> Result<f64> {
    feed(base, "pragma journal_mode=wal; create table t(a integer primary key, b text);\n")?;
    let mut script = String::from("pragma synchronous=normal;\n");
    let text = "x".repeat(200);
    for _ in 0..TRANSACTIONS {
        writeln!(script, "insert into t(b) values('{text}');")?;
    }
    let start = Instant::now();
    feed(base, &script)?;
    let secs = start.elapsed().as_secs_f64();
    let count = feed(base, "pragma integrity_check; select count(*) from t;\n")?;
    if count.split_whitespace().ne(["ok", &TRANSACTIONS.to_string()]) {
        return Err(format!("{}: {count}", base.display()).into());
    }
    Ok(TRANSACTIONS as f64 / secs)
}

fn feed(base: &Path, script: &str) -> Result<String> {
    let mut child = Command::new("sqlite3")
        .arg("-batch")
        .arg(base)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| format!("sqlite3: {e}; apt-get install sqlite3"))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(script.as_bytes())?;
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        return Err(format!("sqlite3 on {} failed", base.display()).into());
    }
    Ok(String::from_utf8(output.stdout)?)
}
