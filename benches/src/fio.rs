//! Random access by fio.

use std::path::Path;
use std::process::Command;

use crate::Result;

/// One job description; 4 KiB blocks at random.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    pub write: bool,
    pub direct: bool,
    pub jobs: u32,
    /// Requests under way at once; more than one needs O_DIRECT.
    pub depth: u32,
    pub secs: u32,
}

/// Operations per second.
pub fn run(file: &Path, job: Job) -> Result<f64> {
    let (mode, key) = if job.write { ("randwrite", "write") } else { ("randread", "read") };
    let engine = if job.depth > 1 { "libaio" } else { "psync" };
    let output = Command::new("fio")
        .args(["--name=random", "--bs=4k", "--norandommap", "--randrepeat=0", "--invalidate=0", "--time_based"])
        .args(["--group_reporting", "--output-format=json", "--allow_file_create=0", "--fallocate=none"])
        .arg(format!("--filename={}", file.display()))
        .arg(format!("--rw={mode}"))
        .arg(format!("--ioengine={engine}"))
        .arg(format!("--iodepth={}", job.depth))
        .arg(format!("--numjobs={}", job.jobs))
        .arg(format!("--direct={}", u8::from(job.direct)))
        .arg(format!("--runtime={}", job.secs))
        .args((!job.write).then_some("--readonly"))
        .output()
        .map_err(|e| format!("fio: {e}; apt-get install fio"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    // Warnings may stand before it.
    let json = text.find('{').map_or("", |at| &text[at..]);
    if !output.status.success() || json.is_empty() {
        return Err(format!("fio on {}: {text}{}", file.display(), String::from_utf8_lossy(&output.stderr)).into());
    }
    let report: serde_json::Value = serde_json::from_str(json)?;
    report["jobs"][0][key]["iops"].as_f64().ok_or_else(|| "fio reports no rate".into())
}
