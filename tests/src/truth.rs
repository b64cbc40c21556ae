//! Random plans of reads, and what the observer must report of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use rand::Rng;
use rand::seq::IndexedRandom;

use crate::reading::{BLOCK, How, PAGE, PIPE, Step};

/// What the observer must report of one job and one file.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Truth {
    pub opens: u64,
    pub read_bytes: u64,
    pub direct_bytes: u64,
    pub direct_calls: u64,
    pub is_mapped: bool,
    /// Ranges of whole pages, within the file.
    ranges: Vec<(u64, u64)>,
}

impl Truth {
    /// Returns the numbers of the parts of `1 << shift` bytes that were touched.
    pub fn parts(&self, shift: u32) -> BTreeSet<u64> {
        self.ranges.iter().flat_map(|(from, until)| from >> shift..=(until - 1) >> shift).collect()
    }
}

/// Makes files of random bytes.
pub fn files(dir: &Path, rng: &mut impl Rng, sizes: &[u64]) -> Vec<(PathBuf, u64)> {
    std::fs::create_dir_all(dir).unwrap();
    let one = |(number, size): (usize, &u64)| {
        let path = dir.join(format!("file-{number}"));
        let mut block = vec![0u8; *size as usize];
        rng.fill_bytes(&mut block);
        File::create(&path).unwrap().write_all(&block).unwrap();
        (path, *size)
    };
    let made = sizes.iter().enumerate().map(one).collect();
    rustix::fs::syncfs(File::open(dir).unwrap()).unwrap();
    made
}

/// Files, ways to read them, and whether the same bytes may be read twice.
pub struct Set<'a> {
    pub files: &'a [(PathBuf, u64)],
    pub ways: &'a [How],
    /// Nothing is read twice: each page that is not in memory is read into memory by exactly one read.
    pub once: bool,
}

/// Makes plans for sets of files and interleaves them. Each plan keeps its order.
pub fn plans(rng: &mut impl Rng, sets: &[(Set<'_>, usize)]) -> Vec<Step> {
    let mut all = Vec::new();
    for (set, steps) in sets {
        let mut at = 0;
        for step in plan(rng, set, *steps) {
            at = rng.random_range(at..=all.len());
            all.insert(at, step);
            at += 1;
        }
    }
    all
}

/// Makes a plan of accesses within the files. A read beyond the end of a file would be no touch.
fn plan<R: Rng>(rng: &mut R, set: &Set<'_>, steps: usize) -> Vec<Step> {
    let (files, ways) = (set.files, set.ways);
    // The pages that one step reads into memory must not be next to those of another step.
    let near = |a: &Step, b: &Step| {
        a.file == b.file && a.from < b.from + b.len + 2 * PAGE && b.from < a.from + a.len + 2 * PAGE
    };
    let one = |rng: &mut R| {
        let (file, size) = files.choose(rng).unwrap();
        let how = *ways.choose(rng).unwrap();
        // These ways move pieces of whole pages, or cannot begin in the middle of a block.
        let aligned = !matches!(how, How::Read | How::Pread | How::Readv | How::IoUring);
        let unit = if aligned { BLOCK } else { 1 };
        let from = rng.random_range(0..size / unit) * unit;
        let len = rng.random_range(1..=(400_000.min(size - from) / unit).max(1)) * unit;
        Step { file: file.clone(), how, from, len: len.min(size - from) }
    };
    let ends = |step: &Step| -> Vec<(PathBuf, u64)> {
        let end = step.from + step.len;
        let pipes = matches!(step.how, How::Sendfile | How::CopyFileRange).then_some(step.from..end);
        let inner = pipes.into_iter().flat_map(|range| range.step_by(PIPE as usize).skip(1));
        std::iter::once(end).chain(inner).map(|end| (step.file.clone(), end.div_ceil(PAGE))).collect()
    };
    let mut plan: Vec<Step> = Vec::new();
    // If nothing may be read twice, there may be no room for another step: the attempts are limited.
    for _ in 0..steps * 20 {
        if plan.len() == steps {
            break;
        }
        let step = one(rng);
        if set.once && plan.iter().any(|other| near(other, &step)) {
            continue;
        }
        // The kernel does not count io_uring and splice as read calls. If such a read ends where the previous read of
        // the same file ended, the observer takes it for the rest of that one. sendfile and copy_file_range splice
        // piece by piece, and each piece has an end.
        let last = plan.iter().rev().find(|last| !matches!(last.how, How::Mmap | How::Direct));
        if last.is_none_or(|last| !ends(&step).contains(&ends(last)[0])) {
            plan.push(step);
        }
    }
    plan
}

/// Returns what the observer must report, and the files in the order of their first touches.
pub fn truth(plan: &[Step], sizes: &HashMap<PathBuf, u64>) -> (BTreeMap<PathBuf, Truth>, Vec<PathBuf>) {
    let (mut all, mut order) = (BTreeMap::<PathBuf, Truth>::new(), Vec::new());
    for step in plan {
        let of_file = all.entry(step.file.clone()).or_insert_with(|| {
            order.push(step.file.clone());
            Truth::default()
        });
        let pages = step.pages(sizes[&step.file]);
        of_file.opens += 1;
        of_file.ranges.push((pages.start, pages.end));
        match step.how {
            How::Mmap => of_file.is_mapped = true,
            How::Direct => {
                of_file.direct_bytes += step.len;
                of_file.direct_calls += 1;
            }
            _ => of_file.read_bytes += pages.end - pages.start,
        }
    }
    (all, order)
}
