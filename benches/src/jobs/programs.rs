//! The programs: their files in the pool, and their command lines.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use forebay_benches::Result;
use rand::seq::SliceRandom;
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::POOL;

/// The result that is required of a program.
#[derive(Debug, Clone, Copy)]
pub enum Target {
    /// Twice as fast. Nearly all that the program reads is predicted, and little else.
    Repeat,
    /// Twice as fast, and most reads are predicted, although each run reads files that no earlier run has read.
    Next,
    /// Nothing can be predicted, or not enough: staging must not make the program slower.
    NoSlower,
}

pub struct Program {
    pub name: &'static str,
    pub target: Target,
    /// Makes the files in the pool, `DIR/pool`.
    pub make: fn(dir: &Path) -> Result<()>,
    /// Is called before each run; runs are numbered from 0.
    pub before: fn(dir: &Path, run: usize) -> Result<()>,
    pub words: fn(dir: &Path, run: usize) -> Vec<String>,
    /// The directory of the pool that a user would have staged by hand.
    pub declared: &'static str,
    pub throttle: fn(run: usize) -> &'static str,
    pub limit: &'static str,
}

const ANY: Program = Program {
    name: "",
    target: Target::NoSlower,
    make: |_| Ok(()),
    before: |_, _| Ok(()),
    words: |dir, _| script(dir, "reader.py", [path(&list(dir))]),
    declared: ".",
    throttle: |_| POOL,
    limit: "8GiB",
};

pub const SCRIPTS: [(&str, &str); 4] = [
    ("arrays.py", include_str!("scripts/arrays.py")),
    ("loader.py", include_str!("scripts/loader.py")),
    ("daily.py", include_str!("scripts/daily.py")),
    ("reader.py", include_str!("scripts/reader.py")),
];

const DAYS: usize = 28;
/// More than the default number of runs, including those that are staged before they begin.
const TREES: usize = 10;

pub fn all() -> [Program; 10] {
    [
        Program {
            name: "compile of zstd, make -j2",
            target: Target::Repeat,
            make: |dir| {
                let tree = dir.join("pool/zstd");
                fs::create_dir_all(&tree)?;
                let copied = Command::new("cp").arg("-r").arg(zstd()?.join(".")).arg(&tree).status()?;
                if !copied.success() {
                    return Err("cp of zstd's sources failed".into());
                }
                Ok(fs::write(tree.join("Makefile"), include_str!("scripts/Makefile"))?)
            },
            before: |dir, _| match fs::remove_dir_all(dir.join("out")) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e.into()),
                _ => Ok(()),
            },
            words: |dir, _| {
                ["make", "-s", "-j2", "-C", "zstd"]
                    .map(str::to_owned)
                    .into_iter()
                    .chain([format!("OUT={}/out", path(dir))])
                    .collect()
            },
            declared: "zstd",
            ..ANY
        },
        Program {
            name: "statistics of 2 GB of arrays",
            target: Target::Repeat,
            make: |dir| make_files(&dir.join("pool/arrays"), 16, 128 << 20, |n| format!("a{n:02}.f32")),
            words: |dir, _| script(dir, "arrays.py", (0..16).map(|n| format!("arrays/a{n:02}.f32"))),
            declared: "arrays",
            ..ANY
        },
        Program {
            name: "loader of 20,000 files, shuffled",
            target: Target::Repeat,
            make: |dir| {
                make_files(&dir.join("pool/images"), 20_000, 20_000, |n| format!("class{:02}/{n:05}.jpg", n % 100))
            },
            words: |dir, _| script(dir, "loader.py", ["images".to_owned()]),
            declared: "images",
            ..ANY
        },
        Program {
            name: "one day of a daily sequence",
            target: Target::Next,
            make: |dir| {
                make_files(&dir.join("pool/constants"), 20, 200_000, |n| format!("table-{n}.bin"))?;
                make_files(&dir.join("pool/daily/2026/02"), DAYS * 200, 100_000, |n| {
                    format!("{:02}/station-{:03}.nc", n / 200 + 1, n % 200)
                })
            },
            words: |dir, run| script(dir, "daily.py", [format!("2026-02-{:02}", run % DAYS + 1)]),
            ..ANY
        },
        Program {
            name: "grep -r of a tree not read before",
            make: |dir| {
                make_files(&dir.join("pool/trees"), TREES * 2000, 10_000, |n| {
                    format!("{}/{:03}/{:02}.txt", object(n / 2000), n / 20 % 100, n % 20)
                })
            },
            words: |_, run| vec!["grep".into(), "-rac".into(), String::new(), format!("trees/{}", object(run % TREES))],
            ..ANY
        },
        Program {
            name: "half of the inputs are new in each run",
            make: |dir| flat(dir, 4000),
            before: |dir, run| {
                let kept = (0..200).map(|n| n * 20);
                let new = (0..200).map(|n| (n * 20 + 1 + run) % 4000);
                names(dir, kept.zip(new).flat_map(|(kept, new)| [kept, new]))
            },
            ..ANY
        },
        Program {
            name: "two jobs with the same command line",
            make: |dir| flat(dir, 800),
            before: |dir, run| names(dir, (0..400).map(|n| n * 2 + run % 2)),
            ..ANY
        },
        Program {
            name: "random files in each run",
            make: |dir| flat(dir, 4000),
            before: |dir, run| {
                let mut random = ChaCha8Rng::seed_from_u64(run as u64);
                let mut all: Vec<usize> = (0..4000).collect();
                all.shuffle(&mut random);
                names(dir, all.into_iter().take(400))
            },
            ..ANY
        },
        Program {
            name: "fast pool fits a third of the files",
            make: |dir| flat(dir, 600),
            before: |dir, _| names(dir, 0..600),
            limit: "20MiB",
            ..ANY
        },
        Program {
            name: "pool slower than when learned",
            make: |dir| flat(dir, 200),
            before: |dir, _| names(dir, 0..200),
            throttle: |run| if run < 2 { POOL } else { "10MB/s,10ms" },
            ..ANY
        },
    ]
}

/// Makes files of 100 kB with random names, from which nothing can be predicted.
fn flat(dir: &Path, files: usize) -> Result<()> {
    make_files(&dir.join("pool/objects"), files, 100_000, object)
}

fn object(number: usize) -> String {
    let mut random = ChaCha8Rng::seed_from_u64(number as u64);
    format!("{:016x}", random.next_u64())
}

/// Writes the list of the files that `reader.py` reads.
fn names(dir: &Path, numbers: impl Iterator<Item = usize>) -> Result<()> {
    let lines: String = numbers.map(|number| format!("objects/{}\n", object(number))).collect();
    Ok(fs::write(list(dir), lines)?)
}

fn list(dir: &Path) -> PathBuf {
    dir.join("list")
}

fn path(path: &Path) -> String {
    path.display().to_string()
}

/// Returns the command line of a script. It names the distribution's interpreter, for which numpy is installed.
fn script(dir: &Path, name: &str, arguments: impl IntoIterator<Item = String>) -> Vec<String> {
    ["/usr/bin/python3".to_owned(), path(&dir.join(name))].into_iter().chain(arguments).collect()
}

fn make_files(dir: &Path, files: usize, bytes: usize, name: impl Fn(usize) -> String) -> Result<()> {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut content = vec![0; bytes];
    random.fill_bytes(&mut content);
    // As f32, each word is a number from 0.5 to 2, for `arrays.py`.
    content.chunks_exact_mut(4).for_each(|number| number[3] = 0x3f);
    for file in 0..files {
        let path = dir.join(name(file));
        fs::create_dir_all(path.parent().unwrap_or(dir))?;
        fs::write(path, &content)?;
    }
    Ok(())
}

/// Returns the directory of zstd's sources, which the crate `zstd-sys` contains.
fn zstd() -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let output =
        Command::new(cargo).args(["metadata", "--format-version", "1", "--manifest-path", manifest]).output()?;
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let mut packages = metadata["packages"].as_array().into_iter().flatten();
    let package = packages.find(|package| package["name"] == "zstd-sys").and_then(|p| p["manifest_path"].as_str());
    let package = package.ok_or("cargo metadata does not name zstd-sys")?;
    Ok(Path::new(package).with_file_name("zstd").join("lib"))
}
