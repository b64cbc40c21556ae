//! The machine that was measured.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::Result;

/// Returns facts about the machine, each as a line of text.
pub fn facts(place: &Path) -> Result<Vec<String>> {
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let os = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let os =
        os.lines().find_map(|line| line.strip_prefix("PRETTY_NAME=")).unwrap_or("Linux").trim_matches('"').to_owned();
    let cpus = std::thread::available_parallelism()?;
    let info = fs::read_to_string("/proc/cpuinfo")?;
    let model = info.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(": "));
    let model = model.map_or(std::env::consts::ARCH, |(_, name)| name);
    let load = fs::read_to_string("/proc/loadavg")?;
    let load: Vec<&str> = load.split(' ').take(3).collect();
    Ok(vec![
        format!("{os}, Linux {}", kernel.trim()),
        format!("{cpus} CPUs ({model}), {} GiB of memory", memory_bytes()?.div_ceil(1 << 30)),
        format!("native directory, fast pools and pools on one {}", file_system(place)?),
        format!("load average when it began: {}", load.join(" ")),
    ])
}

pub fn today() -> Result<String> {
    let output = Command::new("date").args(["-u", "+%F"]).output()?;
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

fn memory_bytes() -> Result<u64> {
    let info = fs::read_to_string("/proc/meminfo")?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemTotal:")).ok_or("no MemTotal")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
}

/// Returns type and options of the file system that holds `place`.
fn file_system(place: &Path) -> Result<String> {
    let place = place.canonicalize()?;
    let mut best = (0, String::from("file system"));
    for line in fs::read_to_string("/proc/self/mountinfo")?.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let (Some(point), Some(kind)) = (left.split(' ').nth(4), right.split(' ').next()) else { continue };
        if place.starts_with(point) && point.len() >= best.0 {
            let options = right.split(' ').nth(2).unwrap_or_default();
            best = (point.len(), format!("{kind} ({options})"));
        }
    }
    Ok(best.1)
}
