//! Reports of jobs equal what the jobs used: compared with plans of random reads, and with `strace`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use forebay_api::jobs::{JobFile, Traffic};
use forebay_tests::mount::{COMMAND, Mount, Options, alone};
use forebay_tests::process::{forebay, need, run, sh, sources, wait};
use forebay_tests::reading::{CALLS_TO_READ, How, Step};
use forebay_tests::settings::seed;
use forebay_tests::strace::{self, Used};
use forebay_tests::truth::{Set, files, plans, truth};
use rand::SeedableRng;
use serde_json::Value;

/// `forebay run` in a directory of the mount.
fn job(mount: &Mount, id: &str, dir: &Path) -> Command {
    let mut command = Command::new(forebay());
    command.args(["run", "--job", id, "--mount"]).arg(mount.place.mnt()).arg("--").current_dir(dir);
    command
}

fn report(mount: &Mount, id: &str) -> Vec<JobFile> {
    let answer = mount.forebay(["--json", "job", "show", id, "--mount"], &[&mount.place.mnt()]).ok();
    let mut report: Value = serde_json::from_str(&answer.out).unwrap_or_else(|e| panic!("{e}: {answer}"));
    assert_eq!((&report["observer"], &report["missing"]), (&"ebpf".into(), &serde_json::json!([])), "{report}");
    serde_json::from_value(report["files"].take()).unwrap()
}

fn nothing_was_dropped(mount: &Mount) {
    let observer = mount.status().observer;
    assert_eq!((observer.dropped_uses, observer.dropped_paths, observer.dropped_processes), (0, 0, 0));
}

/// Returns the numbers in a list such as `0-3,7`.
fn numbers(ranges: &str) -> BTreeSet<u64> {
    let range = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        first.parse::<u64>().unwrap()..=last.parse().unwrap()
    };
    ranges.split(',').filter(|part| !part.is_empty()).flat_map(range).collect()
}

/// What one job reads: resident files that all jobs share; files of its own, resident or absent; and files of its own
/// that it reads in the pool.
struct Plan {
    id: String,
    steps: Vec<Step>,
    child: Child,
}

fn check(mount: &Mount, plan: &Plan, sizes: &HashMap<PathBuf, u64>) {
    let id = &plan.id;
    let (truth, order) = truth(&plan.steps, sizes);
    let mut told = report(mount, id);
    // The files that the job copied to do not count.
    told.retain(|file| !file.path.starts_with(".tmp"));
    let path = |file: &JobFile| if file.in_pool { mount.pool(&file.path) } else { mount.path(&file.path) };
    assert_eq!(told.iter().map(path).collect::<Vec<_>>(), order, "files of {id}, in the order of first uses");
    for file in &told {
        let truth = &truth[&path(file)];
        let bytes = truth.read_bytes + truth.direct_bytes;
        let Traffic { read_bytes, opens, .. } = file.traffic;
        if truth.is_mapped {
            assert!(read_bytes > 0, "{id}: {file:?}");
        } else {
            assert_eq!(read_bytes, bytes, "bytes of {id}: {file:?} {truth:?}");
        }
        assert_eq!(opens, if file.in_pool { 0 } else { truth.opens }, "{id}: {file:?}");
        let parts = file.parts.as_ref().unwrap_or_else(|| panic!("no parts of {id}: {file:?}"));
        let shift = parts.part_bytes.trailing_zeros();
        assert_eq!(numbers(&parts.read), truth.parts(shift), "parts of {id}: {file:?}");
    }
}

/// The kernel alone reads resident files, from content files. Other files come from the mount's page cache or from the
/// daemon. A job also reads files directly in the pool.
#[test]
fn what_jobs_read_is_told_exactly_wherever_it_comes_from() {
    let _alone = alone();
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed());
    let mount = Mount::new(Options::default());
    let mut sizes = HashMap::new();
    let mut make = |dir: &str, in_pool: bool, some: &[u64]| {
        let made = files(&mount.pool(dir), &mut rng, some);
        let seen = |(path, size): (PathBuf, u64)| {
            let below = path.strip_prefix(mount.place.pool()).unwrap();
            (if in_pool { path.clone() } else { mount.path(below) }, size)
        };
        let made: Vec<_> = made.into_iter().map(seen).collect();
        sizes.extend(made.iter().cloned());
        made
    };
    let shared = make("shared", false, &[4096, 9000, 65_536, 100_001, 1 << 20, 5_000_000, 17 << 20]);
    let mut each = |name: &str, in_pool: bool, sizes: &[u64]| -> Vec<_> {
        (0..3).map(|job| make(&format!("{name}-{job}"), in_pool, sizes)).collect()
    };
    let mapped = each("mapped", false, &[9000, 1 << 20, 17 << 20]);
    // Too large to be fetched whole at an open.
    let absent = each("absent", false, &[9_000_001, 17 << 20, 40_000_003]);
    // The calling thread begins these reads, and another thread continues them.
    let absent_asked = each("absent-asked", false, &[40_000_003, 40_000_003]);
    let absent_mapped = each("absent-mapped", false, &[9_000_001, 17 << 20]);
    let direct = each("direct", true, &[4096, 100_001, 5_000_000]);
    let staged: Vec<PathBuf> =
        (0..3).map(|job| mount.path(format!("mapped-{job}"))).chain([mount.path("shared")]).collect();
    mount.forebay(["stage"], &staged.iter().map(PathBuf::as_path).collect::<Vec<_>>()).ok();
    for (path, _) in shared.iter().chain(direct.iter().flatten()) {
        std::io::copy(&mut fs::File::open(path).unwrap(), &mut std::io::sink()).unwrap();
    }
    let begin = |number: usize| {
        let set = |files, ways, once| Set { files, ways, once };
        let sets = [
            (set(&shared, &CALLS_TO_READ, false), 150),
            (set(&direct[number], &CALLS_TO_READ, false), 100),
            (set(&absent[number], &CALLS_TO_READ, true), 150),
            (set(&mapped[number], &[How::Mmap], false), 30),
            (set(&absent_asked[number], &[How::IoUring], true), 80),
            (set(&absent_mapped[number], &[How::Mmap], true), 30),
        ];
        let (id, steps) = (format!("job-{number}"), plans(&mut rng, &sets));
        let mut command = job(&mount, &id, &mount.place.mnt());
        command.args([env!("CARGO_BIN_EXE_observed"), "read"]).stdin(Stdio::piped());
        Plan { id, steps, child: command.spawn().unwrap() }
    };
    let mut plans: Vec<Plan> = (0..3).map(begin).collect();
    for plan in &mut plans {
        plan.child.stdin.take().unwrap().write_all(&serde_json::to_vec(&plan.steps).unwrap()).unwrap();
    }
    for plan in &mut plans {
        let status = wait(&mut plan.child, COMMAND).unwrap_or_else(|| panic!("{} does not end", plan.id));
        assert!(status.success(), "{}: {status}", plan.id);
    }
    plans.iter().for_each(|plan| check(&mount, plan, &sizes));
    nothing_was_dropped(&mount);
}

/// The calling thread begins a read of pages that were read ahead, and another thread continues it.
#[test]
fn what_io_uring_reads_in_order_counts_once() {
    let _alone = alone();
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed());
    let mount = Mount::new(Options::default());
    let made = files(&mount.pool("in-order"), &mut rng, &[20_000_003; 8]);
    let seen = |(path, size): (PathBuf, u64)| (mount.path(path.strip_prefix(mount.place.pool()).unwrap()), size);
    let sizes: HashMap<PathBuf, u64> = made.into_iter().map(seen).collect();
    let pieces = |(file, size): (&PathBuf, &u64)| -> Vec<Step> {
        let piece = |from: u64| Step { file: file.clone(), how: How::IoUringAhead, from, len: PIECE.min(size - from) };
        (0..*size).step_by(PIECE as usize).map(piece).collect()
    };
    const PIECE: u64 = 64 << 10;
    let steps: Vec<Step> = sizes.iter().flat_map(pieces).collect();
    let mut command = job(&mount, "in-order", &mount.place.mnt());
    command.args([env!("CARGO_BIN_EXE_observed"), "read"]).stdin(Stdio::piped());
    let mut plan = Plan { id: "in-order".into(), steps, child: command.spawn().unwrap() };
    plan.child.stdin.take().unwrap().write_all(&serde_json::to_vec(&plan.steps).unwrap()).unwrap();
    assert!(wait(&mut plan.child, COMMAND).unwrap().success());
    check(&mount, &plan, &sizes);
    nothing_was_dropped(&mount);
}

/// Runs a program in a resident directory of the mount, and compares its report with its trace.
fn compare(mount: &Mount, id: &str, program: &[&str]) -> BTreeMap<PathBuf, Used> {
    let dir = mount.path(id);
    mount.forebay(["stage"], &[&dir]).ok();
    sh(&dir, "find . -type f -exec cat {} + >/dev/null", COMMAND);
    let traces = tempfile::tempdir_in("/var/tmp").unwrap();
    let mut command = job(mount, id, &dir);
    // The processes read a file one after the other, and Python reads no modules of another installation.
    command
        .args(strace::words(traces.path()))
        .args(program)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env_remove("PYTHONPATH");
    run(&mut command, Duration::from_secs(180)).ok();
    let used = strace::used(traces.path(), &dir);
    let told = report(mount, id);
    let told: BTreeMap<PathBuf, Traffic> = told
        .into_iter()
        .filter(|file| !file.in_pool)
        .map(|file| (Path::new(&file.path).strip_prefix(id).unwrap().to_owned(), file.traffic))
        .collect();
    for path in told.keys().chain(used.keys()) {
        let (told, used) = (told.get(path).copied().unwrap_or_default(), used.get(path).cloned().unwrap_or_default());
        let seen = (told.opens, told.read_bytes, told.written_bytes > 0);
        if used.is_mapped {
            // `execve` opens the file, too.
            assert!(seen.0 >= used.opens && seen.1 >= used.read_bytes.max(1), "{id}: {path:?}: {told:?} {used:?}");
        } else {
            assert_eq!(
                seen,
                (used.opens, used.read_bytes, used.written_bytes > 0),
                "{id}: {path:?}: {told:?} {used:?}"
            );
        }
    }
    nothing_was_dropped(mount);
    let (files, bytes) = (used.len(), used.values().map(|used| used.read_bytes).sum::<u64>());
    println!("{id}: {files} files, {bytes} bytes read");
    used
}

#[test]
fn a_compile_an_import_storm_and_queries_use_what_strace_says() {
    need(&["strace", "make", "gcc", "python3", "sqlite3"]);
    let _alone = alone();
    let mount = Mount::new(Options::default());
    let pool = mount.place.pool();
    let lz4 = sources("lz4-sys").join("liblz4/lib");
    let make = "CFLAGS = -O1 -DXXH_NAMESPACE=LZ4_\ncheck: main.o lz4.o lz4hc.o lz4frame.o xxhash.o\n\t$(CC) -o $@ $^\n\t./check\n";
    let main = "#include \"lz4frame.h\"\nint main(void) { return LZ4F_getVersion() == 0; }\n";
    for dir in ["compile", "import", "query"] {
        fs::create_dir(pool.join(dir)).unwrap();
    }
    fs::write(pool.join("compile/Makefile"), make).unwrap();
    fs::write(pool.join("compile/main.c"), main).unwrap();
    sh(&pool, &format!("cp {}/*.[ch] compile/", lz4.display()), COMMAND);
    let stdlib = sh(&pool, "python3 -c 'import sysconfig; print(sysconfig.get_path(\"stdlib\"))'", COMMAND).out;
    let copy = format!(
        "cd {} && find . -name '*.py' -not -path '*/test/*' | tar -cT - | tar -xC {}/import",
        stdlib.trim(),
        pool.display()
    );
    sh(&pool, &copy, COMMAND);
    let rows = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200000)
                INSERT INTO t SELECT i, i * 7919 % 1000003, hex(randomblob(20)) FROM n;";
    let create =
        format!("sqlite3 query/db 'CREATE TABLE t(a INTEGER PRIMARY KEY, b, c); {rows} CREATE INDEX tb ON t(b);'");
    sh(&pool, &create, COMMAND);

    let compiled = compare(&mount, "compile", &["make", "-s", "check"]);
    assert!(
        compiled["lz4.c".as_ref() as &Path].read_bytes > 0 && compiled["lz4.o".as_ref() as &Path].written_bytes > 0
    );
    let modules = "import sys; sys.path.insert(0, '.')
import asyncio, concurrent.futures, csv, ctypes, dataclasses, decimal, difflib, doctest, email.mime.text, fractions
import http.server, imaplib, json, logging.handlers, multiprocessing.pool, pdb, pydoc, smtplib, sqlite3, statistics
import tarfile, tomllib, unittest.mock, urllib.request, wsgiref.simple_server, xml.dom.minidom, xmlrpc.server, zipfile";
    let imported = compare(&mount, "import", &["python3", "-S", "-c", modules]);
    assert!(imported.values().filter(|used| used.read_bytes > 0).count() > 150, "{imported:?}");
    let queries =
        "SELECT count(*), sum(b) FROM t; SELECT a FROM t WHERE b = 4711; SELECT c FROM t WHERE a IN (5, 199999);";
    let queried = compare(&mount, "query", &["sqlite3", "db", queries]);
    assert!(queried["db".as_ref() as &Path].read_bytes > 4096 * 500, "{queried:?}");
}
