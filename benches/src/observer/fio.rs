//! Random reads of fio from the page cache, measured by fio's processor time.

use std::path::Path;

use forebay_benches::Result;
use forebay_benches::args::Args;
use forebay_benches::fio::{self, Job};
use forebay_benches::mount::Mount;

use crate::{Observed, Samples, make_file};

/// Options of a mount whose observer uses no hooks.
const BLIND: &[&str] = &["-o", "mask_hooks=all"];

/// Name, least ratio, file, KiB of a read, and the function that mounts.
type Row<'a> = (&'a str, f64, &'a Path, u32, &'a dyn Fn(&[&str]) -> Result<Mount>);

pub fn rows(args: &Args) -> Result<()> {
    let dir = tempfile::tempdir_in(&args.dir)?;
    let elsewhere = tempfile::tempdir_in("/dev/shm")?;
    let [pool, fast, point] = ["pool", "fast", "mount"].map(|name| dir.path().join(name));
    let [other_pool, other_fast, other_point] = ["pool", "fast", "mount"].map(|name| elsewhere.path().join(name));
    let (known, beside) = (point.join("file"), dir.path().join("file"));
    std::fs::create_dir(&pool)?;
    for file in [&pool.join("file"), &beside] {
        make_file(file)?;
    }
    Mount::start(&pool, &point, &fast, &[])?.stage(&known)?;
    // No job runs, so by default the observer would not be attached.
    let policy = dir.path().join("policy.toml");
    std::fs::write(&policy, "[observer]\nat-work = \"always\"\n")?;
    let observing = ["--policy", policy.to_str().ok_or("a directory whose name is not UTF-8")?];
    let near = |options: &[&str]| Mount::start(&pool, &point, &fast, options);
    let far = |options: &[&str]| Mount::start(&other_pool, &other_point, &other_fast, options);
    println!("\n| fio, random reads from the page cache | target | | ratio | spread | off | on |");
    println!("|---|---|---|---|---|---|---|");
    let rows: [Row<'_>; 4] = [
        ("4 KiB, known file of the mount", 0.93, &known, 4, &near),
        ("128 KiB, known file of the mount", 0.99, &known, 128, &near),
        ("4 KiB, file on another file system", 0.98, &beside, 4, &far),
        ("4 KiB, file beside the fast pool, on its file system", 0.93, &beside, 4, &near),
    ];
    for (name, least, file, block_kib, mount) in rows {
        let job = Job { write: false, block_kib, direct: false, jobs: 1, depth: 1, secs: 1 };
        let samples = Samples::take(args.pairs, |observed| {
            let mount = mount(if observed == Observed::Yes { &observing } else { BLIND })?;
            // After this read the pages are cached, and the observer knows the file.
            std::io::copy(&mut std::fs::File::open(file)?, &mut std::io::sink())?;
            let rate = fio::run_by_cpu(file, job)?;
            drop(mount);
            Ok(1e9 / rate)
        })?;
        let ratio = samples.spread(|off, on| off / on);
        let verdict = if (ratio.median * 100.0).round() / 100.0 >= least { "pass" } else { "**miss**" };
        let [off, on] = [samples.spread(|off, _| off), samples.spread(|_, on| on)];
        println!(
            "| {name} | ≥ {least:.2} | {verdict} | {:.3} | {:.3}–{:.3} | {:.0} ns | {:.0} ns |",
            ratio.median, ratio.min, ratio.max, off.median, on.median,
        );
    }
    Ok(())
}
