//! Switches of the mutants of one program: a function that has a mutant asks whether it is on.
//!
//! `FOREBAY_MUTANT=N` turns one on. `FOREBAY_MUTANTS_REACHED=FILE`: a byte of the file for each mutant, which becomes 1 when
//! a process gets to it. The file is mapped, so a process that is killed leaves what it reached.

use std::os::fd::AsRawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

struct Switches {
    on: Option<usize>,
    reached: &'static [AtomicU8],
}

static SWITCHES: OnceLock<Switches> = OnceLock::new();

impl Switches {
    fn of_environment() -> Self {
        let on = std::env::var("FOREBAY_MUTANT").ok().and_then(|number| number.parse().ok());
        let reached = std::env::var_os("FOREBAY_MUTANTS_REACHED").and_then(|path| {
            let file = std::fs::OpenOptions::new().read(true).write(true).open(path).ok()?;
            let size = file.metadata().ok()?.len() as usize;
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a new mapping, which stays as long as the process. The file keeps its size.
            unsafe {
                let start = libc::mmap(std::ptr::null_mut(), size, protection, libc::MAP_SHARED, file.as_raw_fd(), 0);
                (start != libc::MAP_FAILED).then(|| std::slice::from_raw_parts(start.cast(), size))
            }
        });
        Self { on, reached: reached.unwrap_or_default() }
    }
}

/// Whether the mutant with this number is on. Notes that a process got to it.
pub fn active(number: usize) -> bool {
    let switches = SWITCHES.get_or_init(Switches::of_environment);
    if let Some(reached) = switches.reached.get(number) {
        reached.store(1, Ordering::Relaxed);
    }
    switches.on == Some(number)
}
