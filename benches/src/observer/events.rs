//! The cost of one event: the processor time of the thread that causes it, with the observer and without.

use std::fs::File;
use std::hint::black_box;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use forebay_benches::Result;
use forebay_benches::args::Args;
use forebay_ebpf::{Observer, ObserverOptions, WatchedPlace};

use crate::{FILE_BYTES, Observed, Samples, make_file};

const JOB: u32 = 1;
const PAGE: u64 = 4096;
const READS: u64 = 100_000;
const FILES: usize = 5000;
/// The most that one fault maps.
const AROUND: usize = 64 << 10;

type Work<'a> = &'a dyn Fn() -> Result<u64>;

pub fn rows(args: &Args) -> Result<()> {
    let dir = tempfile::tempdir_in(&args.dir)?;
    let elsewhere = tempfile::tempdir_in("/dev/shm")?;
    let watched = dir.path().join("watched");
    std::fs::create_dir(&watched)?;
    let (known, beside) = (watched.join("file"), dir.path().join("file"));
    for file in [&known, &beside] {
        make_file(file)?;
    }
    let small: Vec<PathBuf> = (0..FILES).map(|number| watched.join(format!("small-{number}"))).collect();
    for file in &small {
        std::fs::write(file, [7; PAGE as usize])?;
    }
    println!("\n| event | without | with | added | spread |");
    println!("|---|---|---|---|---|");
    let rows: [(&str, &Path, Work<'_>); 5] = [
        ("pread of 4 KiB, known file", &watched, &|| read(&known)),
        ("pread of 4 KiB, unwatched file on the same file system", &watched, &|| read(&beside)),
        ("pread of 4 KiB, file on another file system", elsewhere.path(), &|| read(&beside)),
        ("page fault, known file", &watched, &|| map(&known)),
        ("open, first read of 4 KiB, close", &watched, &|| open(&small)),
    ];
    for (name, place, work) in rows {
        work()?;
        let samples = Samples::take(args.pairs, |observed| {
            let observer = match observed {
                Observed::No => None,
                Observed::Yes => Some(observer(place)?),
            };
            let start = cpu_time();
            let events = work()?;
            let took = cpu_time() - start;
            drop(observer);
            Ok(took / events as f64 * 1e9)
        })?;
        let [off, on, more] =
            [samples.spread(|off, _| off), samples.spread(|_, on| on), samples.spread(|off, on| on - off)];
        println!(
            "| {name} | {:.0} ns | {:.0} ns | {:.0} ns | {:.0}–{:.0} ns |",
            off.median, on.median, more.median, more.min, more.max,
        );
    }
    Ok(())
}

fn observer(dir: &Path) -> Result<Observer> {
    let options = ObserverOptions {
        places: vec![WatchedPlace::below(dir, true)?],
        ignored: 0,
        scratch: None,
        masked: Vec::new(),
    };
    let observer = Observer::start(&options)?;
    observer.add_process(std::process::id(), JOB)?;
    Ok(observer)
}

fn read(file: &Path) -> Result<u64> {
    let file = File::open(file)?;
    let mut buffer = [0; PAGE as usize];
    // Xorshift: Marsaglia, 2003.
    let mut at = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..READS {
        at ^= at << 13;
        at ^= at >> 7;
        at ^= at << 17;
        file.read_exact_at(&mut buffer, at % (FILE_BYTES / PAGE) * PAGE)?;
    }
    Ok(READS)
}

fn map(file: &Path) -> Result<u64> {
    const ROUNDS: u64 = 10;
    let file = File::open(file)?;
    let len = FILE_BYTES as usize;
    for _ in 0..ROUNDS {
        // SAFETY: a new mapping that nothing else refers to; checked below.
        let map =
            unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if map == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        for at in (0..len).step_by(AROUND) {
            // SAFETY: within the mapping, and the file does not shrink.
            black_box(unsafe { map.cast::<u8>().add(at).read_volatile() });
        }
        // SAFETY: the mapping that was made above.
        unsafe { libc::munmap(map, len) };
    }
    Ok(ROUNDS * (FILE_BYTES / AROUND as u64))
}

fn open(files: &[PathBuf]) -> Result<u64> {
    let mut buffer = [0; PAGE as usize];
    for file in files {
        File::open(file)?.read_exact_at(&mut buffer, 0)?;
    }
    Ok(files.len() as u64)
}

/// Returns the processor time of this thread, in seconds.
fn cpu_time() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
