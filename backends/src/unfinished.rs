//! Names of files that are being written; a name identifies the writer.

use std::sync::OnceLock;

use rand::Rng;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

const PREFIX: &str = ".forebay~put-";

/// `.forebay~put-<boot>-<pid>-<process><file>`. `boot` distinguishes this machine's processes from those of other
/// nodes, which may reach the same file system over another mount. `process`, eight random digits shared by all names
/// of one process, distinguishes processes with the same number in different containers.
pub(crate) fn unique_name() -> Vec<u8> {
    format!("{PREFIX}{}{:08x}", this_writer(), rand::rng().random::<u32>()).into_bytes()
}

/// The prefix of the names of this process's unfinished files, which no other process uses.
pub fn this_writer() -> &'static str {
    static WRITER: OnceLock<String> = OnceLock::new();
    WRITER.get_or_init(|| format!("{}-{}-{:08x}", boot_id(), std::process::id(), rand::rng().random::<u32>()))
}

/// Whether a name belongs to an unfinished file of one of these writers.
pub(crate) fn is_of(name: &[u8], writers: &[String]) -> bool {
    let Some(rest) = name.strip_prefix(PREFIX.as_bytes()) else { return false };
    writers.iter().any(|writer| rest.starts_with(writer.as_bytes()))
}

/// Boot and process of the writer that a file name belongs to; `None` for other names.
pub(crate) fn writer(name: &[u8]) -> Option<(&str, i32)> {
    let mut parts = std::str::from_utf8(name.strip_prefix(PREFIX.as_bytes())?).ok()?.split('-');
    Some((parts.next()?, parts.next()?.parse().ok()?))
}

/// The first eight digits of the id that Linux draws at each boot.
pub(crate) fn boot_id() -> &'static str {
    static ID: OnceLock<String> = OnceLock::new();
    ID.get_or_init(|| {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let id: String = id.chars().filter(char::is_ascii_hexdigit).take(8).collect();
        if id.is_empty() { "0".to_owned() } else { id }
    })
}

/// Whether a process of this machine is alive. A zombie is not.
pub(crate) fn is_alive(process: i32) -> bool {
    let there = Pid::from_raw(process).is_some_and(|process| test_kill_process(process) != Err(Errno::SRCH));
    // `PID (NAME) STATE ...`, where the name may contain any character.
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().and_then(|rest| rest.trim_start().chars().next());
    there && !matches!(state, Some('Z' | 'X'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_its_writer() {
        let name = unique_name();
        assert_eq!(writer(&name), Some((boot_id(), std::process::id().cast_signed())));
        assert_ne!(name, unique_name());
        assert_eq!(writer(b".forebay~rename-1"), None);
        assert!(is_of(&name, &["other".into(), this_writer().into()]));
        assert!(!is_of(&name, &[format!("{}-{}-", boot_id(), u32::MAX)]) && !is_of(b"file", &[String::new()]));
    }

    #[test]
    fn a_zombie_process_counts_as_dead() {
        assert!(is_alive(std::process::id().cast_signed()) && !is_alive(0));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        while is_alive(child.id().cast_signed()) {
            std::thread::yield_now();
        }
        child.wait().unwrap();
    }
}
