//! Random reads and writes by fio.

use std::path::Path;
use std::process::Command;

use crate::Result;

/// One job description of fio: blocks in random order.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    pub write: bool,
    pub block_kib: u32,
    pub direct: bool,
    pub jobs: u32,
    /// Requests in flight; more than one needs O_DIRECT.
    pub depth: u32,
    pub secs: u32,
}

/// Returns operations per second.
pub fn run(file: &Path, job: Job) -> Result<f64> {
    Ok(report(file, job)?.0)
}

/// Returns operations per second of fio's processor time.
pub fn run_by_cpu(file: &Path, job: Job) -> Result<f64> {
    let (rate, cpu) = report(file, job)?;
    Ok(rate / cpu)
}

/// Returns operations per second, and the share of one processor that fio used.
fn report(file: &Path, job: Job) -> Result<(f64, f64)> {
    let (mode, key) = if job.write { ("randwrite", "write") } else { ("randread", "read") };
    let engine = if job.depth > 1 { "libaio" } else { "psync" };
    let output = Command::new("fio")
        .args(["--name=random", "--norandommap", "--randrepeat=0", "--invalidate=0", "--time_based"])
        .args(["--group_reporting", "--output-format=json", "--allow_file_create=0", "--fallocate=none"])
        .arg(format!("--filename={}", file.display()))
        .arg(format!("--rw={mode}"))
        .arg(format!("--bs={}k", job.block_kib))
        .arg(format!("--ioengine={engine}"))
        .arg(format!("--iodepth={}", job.depth))
        .arg(format!("--numjobs={}", job.jobs))
        .arg(format!("--direct={}", u8::from(job.direct)))
        .arg(format!("--runtime={}", job.secs))
        .args((!job.write).then_some("--readonly"))
        .output()
        .map_err(|e| format!("fio: {e}; apt-get install fio"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    // fio may print warnings before the JSON.
    let json = text.find('{').map_or("", |at| &text[at..]);
    if !output.status.success() || json.is_empty() {
        return Err(format!("fio on {}: {text}{}", file.display(), String::from_utf8_lossy(&output.stderr)).into());
    }
    let report: serde_json::Value = serde_json::from_str(json)?;
    let job = &report["jobs"][0];
    let number = |value: &serde_json::Value| value.as_f64().ok_or("fio reports no rate, or no processor time");
    Ok((number(&job[key]["iops"])?, (number(&job["usr_cpu"])? + number(&job["sys_cpu"])?) / 100.0))
}
