//! Checks what this machine allows, what a missing feature costs, and which command grants it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::Serialize;

pub mod pool;
mod probes;
pub use probes::{machine, places};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckVerdict {
    Ok,
    /// Forebay works without it, at a cost.
    Missing,
    /// Forebay does not work without it.
    Needed,
}

/// The result of one check of the machine.
#[derive(Debug, Clone, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub verdict: CheckVerdict,
    /// What was found.
    pub found: String,
    /// What it costs that the feature is missing.
    pub costs: Option<&'static str>,
    /// The command that grants it.
    pub remedy: Option<String>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, verdict: CheckVerdict::Ok, found: found.into(), costs: None, remedy: None }
    }

    fn lacking(
        name: &'static str,
        verdict: CheckVerdict,
        found: impl Into<String>,
        costs: &'static str,
        remedy: impl Into<String>,
    ) -> Self {
        Self { name, verdict, found: found.into(), costs: Some(costs), remedy: Some(remedy.into()) }
    }

    fn of(ok: bool, name: &'static str, found: impl Into<String>, costs: &'static str, remedy: &str) -> Self {
        if ok { Self::ok(name, found) } else { Self::lacking(name, CheckVerdict::Missing, found, costs, remedy) }
    }
}

/// Numbers of capabilities, from `linux/capability.h`.
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;

/// Returns whether this process holds a capability now.
fn holds(capability: u32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).is_some_and(|set| set >> capability & 1 == 1)
}

/// Finds a program in the search path. Returns its path, and whether it is set-uid.
fn in_path(name: &str) -> Option<(std::path::PathBuf, bool)> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find_map(|file| {
        let meta = fs::metadata(&file).ok()?;
        meta.is_file().then(|| (file, meta.mode() & 0o4000 != 0))
    })
}

/// Returns the first two numbers of a kernel release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Returns the type of the file system of a path.
pub(super) fn fs_type(path: &Path) -> Option<&'static str> {
    let magic = rustix::fs::statfs(path).ok()?.f_type;
    Some(match u32::try_from(magic).ok()? {
        0xEF53 => "ext4",
        0x5846_5342 => "xfs",
        0x9123_683E => "btrfs",
        0x2FC1_2FC1 => "zfs",
        0x0102_1994 => "tmpfs",
        0x794C_7630 => "overlay",
        0x6969 => "nfs",
        0x1983_0326 => "beegfs",
        0x0BD0_0BD0 => "lustre",
        0x6573_5546 => "fuse",
        0xFF53_4D42 => "cifs",
        _ => "other",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_by_number() {
        assert_eq!(version("6.18.44-fc-v657"), Some((6, 18)));
        assert_eq!(version("5.4"), Some((5, 4)));
        assert_eq!(version("weird"), None);
    }

    #[test]
    fn every_lack_names_its_cost_and_its_remedy() {
        for check in machine() {
            let complete = check.costs.is_some() && check.remedy.is_some();
            assert_eq!(check.verdict != CheckVerdict::Ok, complete, "{check:?}");
        }
    }
}
