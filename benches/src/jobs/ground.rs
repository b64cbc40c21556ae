//! One pool, and two mounts of it: one stages ahead of jobs, the other does not.

use std::collections::HashMap;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use forebay_benches::mount::{Mount, program};
use forebay_benches::{Result, caches};
use serde_json::Value;

use super::programs::{Program, SCRIPTS};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// When a run begins, the files that it is predicted to read are staged.
    Ahead,
    Plain,
}

/// A file that a run read.
#[derive(Debug, Clone)]
pub struct Read {
    pub path: String,
    pub bytes: u64,
    /// The place in the order of first uses, from 1.
    pub rank: u32,
}

#[derive(Debug, Clone)]
pub struct Ran {
    pub seconds: f64,
    pub ended_unix: u64,
    pub read: Vec<Read>,
    ahead: Value,
}

impl Ran {
    fn share(&self, part: &str, of: &str) -> f64 {
        let number = |name: &str| self.ahead[name].as_f64().unwrap_or(0.0);
        if number(of) > 0.0 { number(part) / number(of) } else { f64::NAN }
    }

    /// Returns the share of the read bytes that was predicted.
    pub fn coverage(&self) -> f64 {
        self.share("covered_bytes", "wanted_bytes")
    }

    /// Returns the share of the staged bytes that the run used.
    pub fn accuracy(&self) -> f64 {
        self.share("used_bytes", "bytes")
    }
}

/// A directory; it is removed when this value is dropped.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub struct Ground {
    pub dir: PathBuf,
    limit: &'static str,
    /// The throttle of the present mounts; empty before the first mount.
    throttle: &'static str,
    ahead: Option<Mount>,
    plain: Option<Mount>,
    runs: usize,
    _scratch: Scratch,
}

impl Ground {
    pub fn make(program: &Program) -> Result<Self> {
        let dir = PathBuf::from(format!("/var/tmp/forebay-bench-jobs-{}", std::process::id()));
        fs::create_dir(&dir)?;
        let scratch = Scratch(dir.clone());
        for (name, text) in SCRIPTS {
            fs::write(dir.join(name), text)?;
        }
        fs::write(dir.join("plain.toml"), "[prefetch]\njobs = false\nonline = false\n")?;
        fs::create_dir(dir.join("pool"))?;
        (program.make)(&dir)?;
        Ok(Self { dir, limit: program.limit, throttle: "", ahead: None, plain: None, runs: 0, _scratch: scratch })
    }

    /// Mounts the pool twice with this throttle, unless the present mounts have it.
    pub fn slow_down(&mut self, throttle: &'static str) -> Result<()> {
        if self.throttle == throttle {
            return Ok(());
        }
        (self.ahead, self.plain) = (None, None);
        let options = ["--throttle", throttle, "--limit", self.limit];
        let mount = |name: &str, more: &[&str]| {
            let options = [&options, more].concat();
            Mount::start(&self.dir.join("pool"), &self.dir.join(name), &self.dir.join(format!("fast-{name}")), &options)
        };
        let policy = self.dir.join("plain.toml").display().to_string();
        (self.ahead, self.plain) = (Some(mount("ahead", &[])?), Some(mount("plain", &["--policy", &policy])?));
        self.throttle = throttle;
        Ok(())
    }

    fn point(&self, mode: Mode) -> Result<&Path> {
        let mount = if mode == Mode::Ahead { &self.ahead } else { &self.plain };
        Ok(mount.as_ref().ok_or("not mounted")?.path())
    }

    /// Evicts everything from the fast pool, and drops the kernel's caches.
    pub fn empty(&self, mode: Mode) -> Result<()> {
        let point = self.point(mode)?;
        forebay(Command::new(program()?).args(["evict", "--release-leases"]).arg(point))?;
        caches::drop_caches(&self.dir, caches::Drop::All)
    }

    /// Stages the files that a command is predicted to read, as the prolog of a batch system does.
    pub fn stage(&self, words: &[String]) -> Result<()> {
        let point = self.point(Mode::Ahead)?;
        forebay(Command::new(program()?).arg("stage").arg("--mount").arg(point).arg("--").args(words)).map(drop)
    }

    pub fn run(&mut self, mode: Mode, words: &[String]) -> Result<Ran> {
        self.runs += 1;
        let job = format!("run-{}", self.runs);
        let point = self.point(mode)?;
        let mut command = Command::new(program()?);
        command.args(["run", "--job", &job, "--mount"]).arg(point).arg("--").args(words).current_dir(point);
        let begun = Instant::now();
        forebay(&mut command)?;
        let seconds = begun.elapsed().as_secs_f64();
        let report = forebay(Command::new(program()?).args(["--json", "job", "show", &job, "--mount"]).arg(point))?;
        let report: Value = serde_json::from_str(&report)?;
        let mut read = Vec::new();
        for file in report["files"].as_array().ok_or("a report without files")? {
            let Some(path) = file["path"].as_str().filter(|_| file["bytes"].as_u64() > Some(0)) else { continue };
            let Ok(meta) = fs::metadata(self.dir.join("pool").join(path)) else { continue };
            let rank = file["first_use_rank"].as_u64().and_then(|rank| rank.try_into().ok()).unwrap_or(u32::MAX);
            read.push(Read { path: path.to_owned(), bytes: meta.len(), rank });
        }
        let ended_unix = report["ended_unix"].as_u64().unwrap_or_default();
        Ok(Ran { seconds, ended_unix, read, ahead: report["ahead"].clone() })
    }

    /// Returns the files below a directory of the pool, and their bytes.
    pub fn below(&self, directory: &str) -> Result<HashMap<String, u64>> {
        let pool = self.dir.join("pool");
        let (mut found, mut left) = (HashMap::new(), vec![pool.join(directory)]);
        while let Some(dir) = left.pop() {
            for entry in fs::read_dir(dir)? {
                let (path, meta) = entry.and_then(|entry| Ok((entry.path(), entry.metadata()?)))?;
                if meta.is_dir() {
                    left.push(path);
                } else if let Ok(below) = path.strip_prefix(&pool) {
                    // If `directory` is `.`, the paths contain this component.
                    let below: PathBuf = below.components().filter(|part| *part != Component::CurDir).collect();
                    found.insert(below.display().to_string(), meta.len());
                }
            }
        }
        Ok(found)
    }
}

fn forebay(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output()?;
    if !output.status.success() {
        return Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(String::from_utf8(output.stdout)?)
}
