//! Runs test binaries beside each other: most of them wait for servers, timers and disks most of the time.
//!
//! `suite FILE [ARGUMENT…]`: FILE is what `cargo test --no-run --message-format=json` printed; each binary is given the
//! arguments. What a binary prints is shown when it ends. Those that took longest in the last run begin first. The exit
//! status is 1 where a binary failed.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde::Deserialize;

/// Binaries that run at the same time, on a machine of two processors.
const AT_ONCE: usize = 2;
/// A binary that takes longer is ended: all its waits have bounds, and their sum is below this.
const BINARY_LIMIT: Duration = Duration::from_secs(3600);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A line of Cargo's, as far as it tells of test binaries.
#[derive(Debug, Deserialize)]
struct Message {
    executable: Option<PathBuf>,
    manifest_path: Option<PathBuf>,
    profile: Option<Profile>,
    target: Option<Target>,
}

#[derive(Debug, Deserialize)]
struct Profile {
    test: bool,
}

#[derive(Debug, Deserialize)]
struct Target {
    name: String,
    src_path: PathBuf,
}

#[derive(Debug)]
struct Binary {
    /// Package and target.
    name: String,
    executable: PathBuf,
    package: PathBuf,
    source: PathBuf,
}

fn binaries(told: &str) -> Vec<Binary> {
    let messages = told.lines().map(|line| serde_json::from_str::<Message>(line).expect("a message of Cargo's"));
    let binary = |message: Message| {
        let (executable, manifest, target) = (message.executable?, message.manifest_path?, message.target?);
        message.profile.filter(|profile| profile.test)?;
        let package = manifest.parent()?.to_owned();
        let source = target.src_path.strip_prefix(&package).unwrap_or(&target.src_path).to_owned();
        let name = format!("{}/{}", package.file_name()?.to_string_lossy(), target.name);
        Some(Binary { name, executable, package, source })
    };
    messages.filter_map(binary).collect()
}

/// Why it failed; `None`: it passed.
fn run(binary: &Binary, arguments: &[String], output: &Path) -> Option<String> {
    let log = fs::File::create(output).expect("a file for the output");
    let mut child = Command::new(&binary.executable)
        .args(arguments)
        // As Cargo does it.
        .current_dir(&binary.package)
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("a descriptor"))
        .stderr(log)
        .spawn()
        .unwrap_or_else(|e| panic!("{}: {e}", binary.executable.display()));
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("a child of ours") {
            return (!status.success()).then(|| status.to_string());
        }
        if begun.elapsed() > BINARY_LIMIT {
            child.kill().and_then(|()| child.wait()).expect("a child of ours");
            return Some(format!("ended after {BINARY_LIMIT:?}"));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let file = PathBuf::from(arguments.next().expect("the file with Cargo's messages"));
    let arguments: Vec<String> = arguments.collect();
    let mut waiting = binaries(&fs::read_to_string(&file).expect("Cargo's messages"));
    assert!(!waiting.is_empty(), "{} names no test binary", file.display());
    let remembered = file.with_extension("seconds");
    let last: BTreeMap<String, f64> =
        fs::read(&remembered).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default();
    let took = |binary: &Binary| last.get(&binary.name).copied().unwrap_or(f64::MAX);
    waiting.sort_by(|a, b| took(b).total_cmp(&took(a)));
    let begun = Instant::now();
    let waiting = Mutex::new(VecDeque::from(waiting));
    let ended = Mutex::new((BTreeMap::new(), Vec::new()));
    let dir = tempfile::tempdir().expect("a directory for output");
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            let (waiting, ended, arguments, dir) = (&waiting, &ended, &arguments, dir.path());
            scope.spawn(move || {
                let next = || waiting.lock().unwrap().pop_front();
                while let Some(binary) = next() {
                    let (since, output) = (Instant::now(), dir.join(binary.name.replace('/', "-")));
                    let failure = run(&binary, arguments, &output);
                    let seconds = since.elapsed().as_secs_f64();
                    let mut ended = ended.lock().unwrap();
                    let mut out = std::io::stdout().lock();
                    let (source, path) = (binary.source.display(), binary.executable.display());
                    writeln!(out, "     Running {source} ({path})").expect("stdout");
                    out.write_all(&fs::read(&output).expect("what it printed")).expect("stdout");
                    let how = failure.as_ref().map_or("passed".to_owned(), |why| format!("FAILED ({why})"));
                    writeln!(out, "     {} {how} in {seconds:.0} s\n", binary.name).expect("stdout");
                    if failure.is_some() {
                        ended.1.push(binary.name.clone());
                    }
                    ended.0.insert(binary.name, seconds);
                }
            });
        }
    });
    let (seconds, failed) = ended.into_inner().unwrap();
    println!("{} test binaries in {} s", seconds.len(), begun.elapsed().as_secs());
    if !failed.is_empty() {
        println!("failed: {}", failed.join(", "));
        return ExitCode::FAILURE;
    }
    fs::write(&remembered, serde_json::to_vec(&seconds).expect("numbers")).expect("the seconds of each binary");
    ExitCode::SUCCESS
}
