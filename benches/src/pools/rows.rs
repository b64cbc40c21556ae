//! The rows: pools on real servers on loopback, compared with plain clients and with other programs.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytes::Bytes;

use forebay_benches::caches::{self, Drop};
use forebay_benches::mount::Mount;
use forebay_benches::pairs::{self, Side};
use forebay_benches::report::{Outcome, Row, Target, Unit};
use forebay_benches::{Result, work};

use crate::link::{self, Slowness};
use crate::nfs_server::{NfsServer, Squash};
use crate::others::{Bucket, Other, Program};
use crate::plain::{self, Plain};
use crate::s3_server::{ACCESS_KEY, BUCKET, SECRET_KEY, Versitygw};

const BIG_BYTES: u64 = 1 << 30;
const SMALL_FILES: usize = 10_000;
const SMALL_BYTES: usize = 4096;
/// The plain client reads this many of them one after the other, to measure the serial rate.
const SERIAL_FILES: usize = 1_000;
/// In the comparison with other programs, one reader reads this many of them, without `stage`.
const FEW_FILES: usize = 1_000;
/// Files of one directory that are renamed, as git does with refs.
const REFS: usize = 3_000;
/// A line of 1 Gbit/s with a round trip of 1 ms.
const GIGABIT: Slowness = Slowness { latency: Duration::from_micros(500), bytes_per_sec: 125_000_000 };
/// A line with a round trip of 2 ms and no limit of bandwidth.
const TWO_MS: Slowness = Slowness { latency: Duration::from_millis(1), bytes_per_sec: 0 };
/// Bytes that samples may leave: more than all samples of small files leave, less than one large file.
const LEFT_BYTES: u64 = 900 << 20;
const LIMIT: &str = "8GiB";

/// Servers with data, and the rows that were measured.
pub struct Bench {
    pub rows: Vec<Row>,
    pairs: usize,
    root: PathBuf,
    policy: String,
    s3: Versitygw,
    nfs: NfsServer,
    /// Fast pools and mount points made so far.
    made: usize,
    /// How many of these, from the first, were removed again.
    cleared: usize,
}

impl Bench {
    /// Starts the servers and makes the data.
    pub fn prepare(dir: &Path, pairs: usize) -> Result<Self> {
        let root = dir.join(format!("forebay-bench-{}", std::process::id()));
        fs::create_dir(&root)?;
        let policy = root.join("manual.toml");
        fs::write(&policy, "[default]\nflush = \"manual\"\n")?;
        let policy = policy.to_str().ok_or("a directory whose name is not UTF-8")?.to_owned();
        let (s3, nfs) = (Versitygw::start(), NfsServer::start(dir, Squash::None));
        let bench = Self { rows: Vec::new(), pairs, root, policy, s3, nfs, made: 0, cleared: 0 };
        work::write_sequentially(&bench.content(), BIG_BYTES as usize)?;
        fs::copy(bench.content(), bench.nfs.export().join("big"))?;
        let plain = bench.plain(bench.s3.port())?;
        plain.upload("big", &Bytes::from(fs::read(bench.content())?))?;
        plain.make(&small_names(), &Bytes::from(vec![7; SMALL_BYTES]))?;
        Ok(bench)
    }

    fn content(&self) -> PathBuf {
        self.root.join("content")
    }

    fn plain(&self, port: u16) -> Result<Plain> {
        Plain::s3(&format!("http://127.0.0.1:{port}"), BUCKET, ACCESS_KEY, SECRET_KEY)
    }

    fn fresh(&mut self) -> PathBuf {
        self.made += 1;
        self.root.join(format!("{}", self.made))
    }

    /// Removes what samples have left, once it is [`LEFT_BYTES`] or more. Many small files are not removed after each
    /// sample: ext4 without a journal is slow to reuse an inode that was deleted less than a minute ago, and this would
    /// slow down the next sample.
    fn clear(&mut self) -> Result<()> {
        let left: Vec<PathBuf> = (self.cleared + 1..=self.made).map(|n| self.root.join(n.to_string())).collect();
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        for dir in &left {
            if mounts.lines().filter_map(|line| line.split(' ').nth(1)).any(|point| Path::new(point).starts_with(dir)) {
                return Err(format!("{}: something is still mounted there", dir.display()).into());
            }
        }
        let mut bytes = 0;
        for dir in &left {
            bytes += work::disk_use(dir)?;
        }
        if bytes >= LEFT_BYTES {
            for dir in left.iter().filter(|dir| dir.exists()) {
                fs::remove_dir_all(dir)?;
            }
            self.cleared = self.made;
        }
        Ok(())
    }

    /// Returns a new mount with an empty fast pool.
    fn cold(&mut self, url: &str) -> Result<Mount> {
        let dir = self.fresh();
        let environment = [("AWS_ACCESS_KEY_ID", ACCESS_KEY), ("AWS_SECRET_ACCESS_KEY", SECRET_KEY)];
        let options = ["--limit", LIMIT, "--policy", &self.policy];
        Mount::start_url(url, &dir.join("mount"), &dir.join("fast"), &options, &environment)
    }

    /// Drops the page cache, then reads the servers' large files: the servers have them in memory, and mount and client
    /// have nothing.
    fn warm_server(&self) -> Result<()> {
        caches::drop_caches(&self.root, Drop::Pages)?;
        for file in [self.s3.files().join("big"), self.nfs.export().join("big")] {
            work::read_sequentially(&file, 1)?;
        }
        Ok(())
    }

    fn add(&mut self, name: &str, target: Target, outcome: Outcome) {
        let row = Row { name: name.into(), target, outcome };
        println!("{}", row.line());
        self.rows.push(row);
    }

    /// Measures one row as a ratio to the plain client or to another program.
    fn ratio(
        &mut self,
        name: &str,
        target: Target,
        unit: Unit,
        mut sample: impl FnMut(&mut Self, Side) -> Result<f64>,
    ) -> Result<()> {
        let series = pairs::alternate(self.pairs, |side, _| {
            let rate = sample(self, side)?;
            self.clear()?;
            Ok(rate)
        })?;
        self.add(name, target, Outcome::Ratio(series, unit));
        Ok(())
    }

    /// Measures all selected rows.
    pub fn run(&mut self, wants: impl Fn(&str) -> bool) -> Result<()> {
        type Group = fn(&mut Bench) -> Result<()>;
        let groups: [(&str, Group); 7] = [
            ("s3-read", s3_read),
            ("s3-small", s3_small),
            ("s3-flush", s3_flush),
            ("s3-rename", s3_rename),
            ("nfs-read", nfs_read),
            ("others-read", others_read),
            ("others-write", others_write),
        ];
        for (name, group) in groups {
            if wants(name) {
                group(self)?;
            }
        }
        Ok(())
    }
}

impl std::ops::Drop for Bench {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

fn small_names() -> Vec<String> {
    (0..SMALL_FILES).map(|n| format!("small/{:02}/{n:05}", n % 100)).collect()
}

fn s3_read(bench: &mut Bench) -> Result<()> {
    let slow = link::start(bench.s3.port(), GIGABIT)?;
    for (what, port) in [("1 Gbit/s, 1 ms round trip", slow), ("loopback", bench.s3.port())] {
        let plain = bench.plain(port)?;
        let url = bench.s3.url_by("", port);
        let name = format!("S3: cold read of 1 GiB, {what}");
        bench.ratio(&name, Target::AtLeast(0.95), Unit::BytesPerSec, |bench, side| {
            bench.warm_server()?;
            match side {
                Side::Native => plain.read("big", BIG_BYTES),
                Side::Mount => {
                    let mount = bench.cold(&url)?;
                    work::read_sequentially(&mount.path().join("big"), 1)
                }
            }
        })?;
        let name = format!("S3: `stage` of 1 GiB, {what}");
        bench.ratio(&name, Target::Beside, Unit::BytesPerSec, |bench, side| {
            bench.warm_server()?;
            match side {
                Side::Native => plain.read("big", BIG_BYTES),
                Side::Mount => {
                    let mount = bench.cold(&url)?;
                    let begin = Instant::now();
                    mount.stage(&mount.path().join("big"))?;
                    Ok(BIG_BYTES as f64 / begin.elapsed().as_secs_f64())
                }
            }
        })?;
    }
    Ok(())
}

fn s3_small(bench: &mut Bench) -> Result<()> {
    let port = link::start(bench.s3.port(), TWO_MS)?;
    let (plain, url, names) = (bench.plain(port)?, bench.s3.url_by("", port), small_names());
    let name = "S3, 2 ms round trip: `stage` and read of 10,000 × 4 KiB, against serial GETs";
    bench.ratio(name, Target::AtLeast(5.0), Unit::PerSec, |bench, side| match side {
        Side::Native => plain.read_serially(&names[..SERIAL_FILES]),
        Side::Mount => {
            let mount = bench.cold(&url)?;
            let begin = Instant::now();
            mount.stage(&mount.path().join("small"))?;
            for name in &names {
                if fs::read(mount.path().join(name))?.len() != SMALL_BYTES {
                    return Err(format!("{name}: not all of it").into());
                }
            }
            Ok(names.len() as f64 / begin.elapsed().as_secs_f64())
        }
    })
}

fn s3_flush(bench: &mut Bench) -> Result<()> {
    let content = Bytes::from(fs::read(bench.content())?);
    let slow = link::start(bench.s3.port(), GIGABIT)?;
    for (what, port) in [("1 Gbit/s, 1 ms round trip", slow), ("loopback", bench.s3.port())] {
        let (plain, url) = (bench.plain(port)?, bench.s3.url_by("", port));
        let name = format!("S3: flush of 1 GiB, {what}");
        bench.ratio(&name, Target::AtLeast(0.9), Unit::BytesPerSec, |bench, side| {
            let rate = match side {
                Side::Native => plain.upload("written", &content),
                Side::Mount => {
                    let mount = bench.cold(&url)?;
                    work::write_sequentially(&mount.path().join("written"), BIG_BYTES as usize)?;
                    let begin = Instant::now();
                    mount.settle()?;
                    Ok(BIG_BYTES as f64 / begin.elapsed().as_secs_f64())
                }
            }?;
            plain.remove("written")?;
            rustix::fs::syncfs(fs::File::open(&bench.root)?)?;
            Ok(rate)
        })?;
    }
    Ok(())
}

/// Measures renames of files while they are flushed.
fn s3_rename(bench: &mut Bench) -> Result<()> {
    let url = bench.s3.url_by("", bench.s3.port());
    let mut taken_ms = Vec::new();
    for round in 0..bench.pairs {
        let mount = bench.cold(&url)?;
        let dir = mount.path().join(format!("refs{round}"));
        let (before, after) = (|n: usize| dir.join(format!("{n}.lock")), |n: usize| dir.join(n.to_string()));
        fs::create_dir(&dir)?;
        for n in 0..REFS {
            fs::write(before(n), "0123456789abcdef\n")?;
        }
        let taken = std::thread::scope(|scope| -> Result<Duration> {
            let flush = scope.spawn(|| mount.settle().map_err(|error| error.to_string()));
            let begin = Instant::now();
            for n in 0..REFS {
                fs::rename(before(n), after(n))?;
            }
            let taken = begin.elapsed();
            flush.join().map_err(|_| "the flush panicked")??;
            Ok(taken)
        })?;
        mount.settle()?;
        let stored = fs::read_dir(bench.s3.files().join(format!("refs{round}")))?.count();
        if stored != REFS {
            return Err(format!("{stored} of {REFS} names are in the bucket").into());
        }
        taken_ms.push(taken.as_secs_f64() * 1000.0);
    }
    let name = "S3, loopback: 3,000 renames in a directory during its flush";
    bench.add(name, Target::AtMost(3_000.0), Outcome::Value(pairs::spread(taken_ms).median, "ms"));
    Ok(())
}

fn nfs_read(bench: &mut Bench) -> Result<()> {
    let slow = link::start(bench.nfs.nfs_port(), GIGABIT)?;
    for (what, port) in [("1 Gbit/s, 1 ms round trip", slow), ("loopback", bench.nfs.nfs_port())] {
        let url = bench.nfs.url_by("/pool", port);
        let name = format!("NFS: cold read of 1 GiB, {what}");
        bench.ratio(&name, Target::AtLeast(0.95), Unit::BytesPerSec, |bench, side| {
            bench.warm_server()?;
            match side {
                Side::Native => plain::read_nfs(port, bench.nfs.mount_port(), "/pool", "big", BIG_BYTES),
                Side::Mount => {
                    let mount = bench.cold(&url)?;
                    work::read_sequentially(&mount.path().join("big"), 1)
                }
            }
        })?;
    }
    Ok(())
}

/// Measures reads against other programs: in each row, another program takes the place of the native directory.
fn others_read(bench: &mut Bench) -> Result<()> {
    let port = link::start(bench.s3.port(), GIGABIT)?;
    let (endpoint, url, names) = (format!("http://127.0.0.1:{port}"), bench.s3.url_by("", port), small_names());
    let bucket = Bucket { endpoint: &endpoint, name: BUCKET, key: ACCESS_KEY, secret: SECRET_KEY };
    for program in Program::ALL {
        let name = program.name();
        for (what, again) in [("cold read of 1 GiB", false), ("second read of 1 GiB, page cache dropped", true)] {
            let title = format!("{what}, against {name}");
            bench.ratio(&title, Target::AtLeast(1.0), Unit::BytesPerSec, |bench, side| {
                bench.warm_server()?;
                let dir = bench.fresh();
                let read = |point: &Path| -> Result<f64> {
                    let first = work::read_sequentially(&point.join("big"), 1)?;
                    if !again {
                        return Ok(first);
                    }
                    caches::drop_caches(&dir, Drop::Pages)?;
                    work::read_sequentially(&point.join("big"), 1)
                };
                fs::create_dir(&dir)?;
                match side {
                    Side::Native => read(Other::start(program, &bucket, &dir)?.path()),
                    Side::Mount => read(bench.cold(&url)?.path()),
                }
            })?;
        }
        let title = format!("cold read of 1,000 × 4 KiB by one reader, against {name}");
        bench.ratio(&title, Target::AtLeast(1.0), Unit::PerSec, |bench, side| {
            let read = |point: &Path| -> Result<f64> {
                let begin = Instant::now();
                for name in names.iter().take(FEW_FILES) {
                    fs::read(point.join(name))?;
                }
                Ok(FEW_FILES as f64 / begin.elapsed().as_secs_f64())
            };
            let dir = bench.fresh();
            match side {
                Side::Native => read(Other::start(program, &bucket, &dir)?.path()),
                Side::Mount => read(bench.cold(&url)?.path()),
            }
        })?;
    }
    Ok(())
}

/// Measures writes against other programs, until the bucket has the content.
fn others_write(bench: &mut Bench) -> Result<()> {
    let port = link::start(bench.s3.port(), GIGABIT)?;
    let (endpoint, url) = (format!("http://127.0.0.1:{port}"), bench.s3.url_by("", port));
    let bucket = Bucket { endpoint: &endpoint, name: BUCKET, key: ACCESS_KEY, secret: SECRET_KEY };
    let plain = bench.plain(bench.s3.port())?;
    for program in Program::ALL {
        let title = format!("write of 1 GiB until the bucket has it, against {}", program.name());
        bench.ratio(&title, Target::AtLeast(1.0), Unit::BytesPerSec, |bench, side| {
            let (dir, stored) = (bench.fresh(), bench.s3.files().join("written"));
            let begin = Instant::now();
            let rate = match side {
                Side::Native => {
                    let other = Other::start(program, &bucket, &dir)?;
                    work::write_sequentially(&other.path().join("written"), BIG_BYTES as usize)?;
                    while fs::metadata(&stored).map_or(0, |meta| meta.len()) != BIG_BYTES {
                        std::thread::sleep(Duration::from_millis(10));
                    }
                    BIG_BYTES as f64 / begin.elapsed().as_secs_f64()
                }
                Side::Mount => {
                    let mount = bench.cold(&url)?;
                    work::write_sequentially(&mount.path().join("written"), BIG_BYTES as usize)?;
                    mount.settle()?;
                    BIG_BYTES as f64 / begin.elapsed().as_secs_f64()
                }
            };
            plain.remove("written")?;
            rustix::fs::syncfs(fs::File::open(&bench.root)?)?;
            Ok(rate)
        })?;
    }
    Ok(())
}
