//! The files that one job uses, in the order of their first uses.
//!
//! The order is that of the monotonic clock: the kernel stamps first touches with it, and the front end stamps opens
//! with it.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use forebay_api::jobs::{JobFile, Traffic, UsedParts};
use forebay_api::operator::TypedPath;
use forebay_ebpf::layout::{FINEST_SHIFT, MAP_WORDS};
use forebay_engine::{FileOfJob, Ino};

/// Files of one job that are reported. Each takes some 300 bytes and its path: ten megabytes for a job that reads
/// everything.
pub const FILES_MAX: usize = 32_768;
/// A file with a longer path, encoded, is counted, and not reported: profiles have no longer ones, either.
pub const PATH_BYTES_MAX: usize = forebay_prefetch::profile::PATH_BYTES_MAX;
/// Bytes of the paths of all files of one job that are reported.
pub const PATHS_BYTES_MAX: usize = FILES_MAX * 256;
/// Files that are not reported, and are counted, at most: thirteen megabytes.
const OMITTED_MAX: usize = 262_144;
/// Files that a job is known to use, at most.
#[cfg(test)]
pub const FILES_KNOWN: usize = FILES_MAX + OMITTED_MAX;

/// A file that a job uses.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum FileId {
    Overlay(Ino),
    /// A file that the job uses in the pool's own directory, by its path there.
    Pool(TypedPath),
}

/// Which parts of a file were used, at a grain that may become coarser.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PartMap {
    /// A part has `1 << shift` bytes. 0: nothing is known.
    shift: u32,
    read: [u64; MAP_WORDS],
    written: [u64; MAP_WORDS],
}

const BITS: usize = MAP_WORDS * 64;

/// A file that a job used, as reported when the job has ended.
#[derive(Debug, Clone)]
pub struct UsedFile {
    pub id: FileId,
    pub shown: JobFile,
    pub parts: PartMap,
}

impl UsedFile {
    pub fn is_read(&self) -> bool {
        self.shown.traffic.read_bytes > 0
    }

    /// Returns whether the job read something that it had not written itself, as far as is known.
    pub fn reads_unwritten(&self) -> bool {
        self.is_read() && (self.shown.traffic.written_bytes == 0 || self.parts.reads_unwritten())
    }
}

impl PartMap {
    fn reads_unwritten(&self) -> bool {
        self.shift > 0 && self.read.iter().zip(self.written).any(|(read, written)| read & !written != 0)
    }

    /// Returns the bytes of a part, and which parts were read. `None`: that is not known.
    pub fn read_parts(&self) -> Option<(u64, [u64; MAP_WORDS])> {
        (self.shift > 0).then(|| (1 << self.shift, self.read))
    }

    pub fn new(shift: u32, read: [u64; MAP_WORDS], written: [u64; MAP_WORDS]) -> Self {
        Self { shift, read, written }
    }

    /// Returns the parts that these bytes lie in, at the finest possible grain.
    pub fn of_read(bytes: Range<u64>) -> Self {
        let (shift, read) = of_bytes(bytes);
        Self::new(shift, read, [0; MAP_WORDS])
    }

    pub fn of_write(bytes: Range<u64>) -> Self {
        let (shift, written) = of_bytes(bytes);
        Self::new(shift, [0; MAP_WORDS], written)
    }

    pub fn add(&mut self, other: &Self) {
        if other.shift == 0 {
            return;
        }
        if self.shift == 0 {
            *self = *other;
            return;
        }
        let shift = self.shift.max(other.shift);
        let (mine, theirs) = (self.at(shift), other.at(shift));
        *self = mine;
        self.read.iter_mut().zip(theirs.read).for_each(|(to, from)| *to |= from);
        self.written.iter_mut().zip(theirs.written).for_each(|(to, from)| *to |= from);
    }

    /// Returns the same map at a coarser grain.
    fn at(&self, shift: u32) -> Self {
        let coarse = |words: &[u64; MAP_WORDS]| {
            let mut out = [0; MAP_WORDS];
            for part in (0..BITS).filter(|part| is_set(words, *part)) {
                let to = part >> (shift - self.shift);
                out[to / 64] |= 1 << (to % 64);
            }
            out
        };
        if shift == self.shift { *self } else { Self::new(shift, coarse(&self.read), coarse(&self.written)) }
    }

    pub fn parts(&self) -> Option<UsedParts> {
        (self.shift > 0).then(|| UsedParts {
            part_bytes: 1 << self.shift,
            read: ranges(&self.read),
            written: ranges(&self.written),
        })
    }
}

fn of_bytes(bytes: Range<u64>) -> (u32, [u64; MAP_WORDS]) {
    let mut words = [0; MAP_WORDS];
    if bytes.is_empty() {
        return (0, words);
    }
    let mut shift = FINEST_SHIFT;
    while shift < 63 && bytes.end > (BITS as u64) << shift {
        shift += 1;
    }
    for part in bytes.start >> shift..=(bytes.end - 1) >> shift {
        words[(part / 64) as usize] |= 1 << (part % 64);
    }
    (shift, words)
}

fn is_set(words: &[u64; MAP_WORDS], part: usize) -> bool {
    words[part / 64] >> (part % 64) & 1 == 1
}

fn ranges(words: &[u64; MAP_WORDS]) -> String {
    let mut out = Vec::new();
    let mut part = 0;
    while part < BITS {
        let first = part;
        while part < BITS && is_set(words, part) {
            part += 1;
        }
        match part - first {
            0 => part += 1,
            1 => out.push(first.to_string()),
            _ => out.push(format!("{first}-{}", part - 1)),
        }
    }
    out.join(",")
}

/// A job's use of one file.
#[derive(Debug)]
pub struct JobFileUse {
    /// Monotonic clock, ns.
    pub first_ns: u64,
    /// The path of the file at that time.
    pub path: TypedPath,
    pub traffic: Traffic,
    pub parts: PartMap,
    /// The job made it, or wrote to it.
    pub is_changed: bool,
}

/// The uses of one job.
#[derive(Debug, Default)]
pub struct Accounting {
    files: HashMap<FileId, JobFileUse>,
    /// The bytes of their paths.
    path_bytes: usize,
    /// Files beyond the limits, and whether the job changed them.
    omitted: HashMap<OmittedFile, bool>,
    /// Files that never go to the pool and that the job used when another daemon counted, or whose removal another job
    /// left to it; and whether this job may remove them as if it had changed them.
    local: HashMap<Ino, bool>,
    sum: Traffic,
}

/// A file that is counted and not reported: 16 bytes, however long its path is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum OmittedFile {
    Overlay(Ino),
    /// The hash of its path in the pool's own directory.
    Pool(u64),
}

impl OmittedFile {
    fn of(file: &FileId) -> Self {
        match file {
            FileId::Overlay(ino) => Self::Overlay(*ino),
            FileId::Pool(path) => {
                let mut hasher = DefaultHasher::new();
                path.hash(&mut hasher);
                Self::Pool(hasher.finish())
            }
        }
    }
}

impl Accounting {
    /// The uses of a job that goes on after the death of a daemon, whose counts are lost. `local`: the files that never
    /// go to the pool and that the job used before.
    pub fn continued(local: Vec<FileOfJob>) -> Self {
        Self { local: local.into_iter().map(|file| (file.ino, file.is_changed)).collect(), ..Self::default() }
    }

    /// Returns whether `count` needs the path of this file.
    pub fn needs_path(&self, file: &FileId) -> bool {
        let has_room = self.files.len() < FILES_MAX && self.path_bytes < PATHS_BYTES_MAX;
        has_room && !self.files.contains_key(file) && !self.omitted.contains_key(&OmittedFile::of(file))
    }

    /// Returns the bytes that the path of a file takes here.
    fn bytes_of(file: &FileId, path: &TypedPath) -> usize {
        match file {
            FileId::Overlay(_) => path.len(),
            FileId::Pool(id) => path.len() + id.len(),
        }
    }

    /// Returns whether the next use of this file is the first one, and can be counted.
    pub fn counts_as_new(&self, file: &FileId) -> bool {
        !self.has_used(file) && self.omitted.len() < OMITTED_MAX
    }

    /// Returns whether the next change of this file by the job is the first one, and the file is known.
    pub fn counts_as_changed(&self, file: &FileId) -> bool {
        self.change_of(file) == Some(false)
    }

    /// Returns whether the job used this file. Beyond `FILES_MAX` and `OMITTED_MAX` files that is not known, and the
    /// answer is no.
    pub fn has_used(&self, file: &FileId) -> bool {
        self.change_of(file).is_some()
    }

    /// Like [`Self::has_used`], but where that is not known, the answer is yes.
    pub fn may_have_used(&self, file: &FileId) -> bool {
        self.omitted.len() >= OMITTED_MAX || self.has_used(file)
    }

    /// Returns whether the job changed a file. `None`: it has not used it, as far as is known.
    fn change_of(&self, file: &FileId) -> Option<bool> {
        let before = match file {
            FileId::Overlay(ino) => self.local.get(ino).copied(),
            FileId::Pool(_) => None,
        };
        let reported = || self.files.get(file).map(|used| used.is_changed);
        let counted = reported().or_else(|| self.omitted.get(&OmittedFile::of(file)).copied());
        before.max(counted)
    }

    /// Notes that the job made a file or wrote to it.
    pub fn note_changed(&mut self, file: &FileId) {
        if let Some(used) = self.files.get_mut(file) {
            used.is_changed = true;
        } else if let Some(is_changed) = self.omitted.get_mut(&OmittedFile::of(file)) {
            *is_changed = true;
        }
        if let FileId::Overlay(ino) = file
            && let Some(is_changed) = self.local.get_mut(ino)
        {
            *is_changed = true;
        }
    }

    /// Takes over the removal of a local file from a job that has ended.
    pub fn take_over(&mut self, ino: Ino) {
        let file = FileId::Overlay(ino);
        if !self.has_used(&file) && self.local.len() < OMITTED_MAX {
            self.local.insert(ino, true);
        }
        self.note_changed(&file);
    }

    /// Returns the files of the overlay that the job used, also those that are not reported. Some may be there twice.
    pub fn overlay_files(&self) -> Vec<FileOfJob> {
        let reported = self.files.iter().filter_map(|(file, used)| match file {
            FileId::Overlay(ino) => Some((*ino, used.is_changed)),
            FileId::Pool(_) => None,
        });
        let omitted = self.omitted.iter().filter_map(|(file, is_changed)| match file {
            OmittedFile::Overlay(ino) => Some((*ino, *is_changed)),
            OmittedFile::Pool(_) => None,
        });
        let local = self.local.iter().map(|(ino, is_changed)| (*ino, *is_changed));
        reported.chain(omitted).chain(local).map(|(ino, is_changed)| FileOfJob { ino, is_changed }).collect()
    }

    /// Replaces the counts `old` of a file by `new`. `path` is the present path of the file, needed if the file may be
    /// new: without it, a new file is counted, and not reported.
    pub fn count(
        &mut self,
        file: &FileId,
        first_ns: u64,
        path: Option<TypedPath>,
        old: &Traffic,
        new: &Traffic,
        parts: &PartMap,
    ) {
        self.sum.replace(old, new);
        if let (true, Some(path)) = (self.needs_path(file), path)
            && self.path_bytes + Self::bytes_of(file, &path) <= PATHS_BYTES_MAX
        {
            self.path_bytes += Self::bytes_of(file, &path);
            let (traffic, parts) = (Traffic::default(), PartMap::default());
            self.files.insert(file.clone(), JobFileUse { first_ns, path, traffic, parts, is_changed: false });
        }
        if let Some(known) = self.files.get_mut(file) {
            known.first_ns = known.first_ns.min(first_ns);
            known.traffic.replace(old, new);
            known.parts.add(parts);
        } else if self.omitted.len() < OMITTED_MAX {
            self.omitted.entry(OmittedFile::of(file)).or_insert(false);
        }
        if new.written_bytes > old.written_bytes {
            self.note_changed(file);
        }
    }

    pub fn sum(&self) -> Traffic {
        self.sum
    }

    pub fn len(&self) -> usize {
        self.files.len()
    }

    pub fn omitted(&self) -> usize {
        self.omitted.len()
    }

    /// Returns all files, ordered by first use.
    pub fn ranked(&self) -> Vec<(&FileId, &JobFileUse)> {
        let mut all: Vec<_> = self.files.iter().collect();
        all.sort_by(|(_, a), (_, b)| (a.first_ns, &a.path).cmp(&(b.first_ns, &b.path)));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(shift: u32, parts: &[usize]) -> PartMap {
        let mut read = [0; MAP_WORDS];
        parts.iter().for_each(|part| read[part / 64] |= 1 << (part % 64));
        PartMap::new(shift, read, [0; MAP_WORDS])
    }

    #[test]
    fn parts_are_shown_as_ranges() {
        let parts = map(16, &[0, 1, 2, 7, 63, 64, 255]).parts().unwrap();
        assert_eq!((parts.part_bytes, parts.read.as_str(), parts.written.as_str()), (65_536, "0-2,7,63-64,255", ""));
        assert_eq!(PartMap::default().parts(), None);
    }

    #[test]
    fn bytes_have_their_parts() {
        assert_eq!(PartMap::of_read(0..1), map(16, &[0]));
        assert_eq!(PartMap::of_read(65_535..65_537), map(16, &[0, 1]));
        assert_eq!(PartMap::of_read((16 << 20) - 1..16 << 20), map(16, &[255]));
        assert_eq!(PartMap::of_read((16 << 20) - 1..(16 << 20) + 1), map(17, &[127, 128]));
        assert_eq!(PartMap::of_read(5..5), PartMap::default());
        assert_eq!(PartMap::of_write(0..1).parts().unwrap().written, "0");
    }

    #[test]
    fn maps_of_two_grains_are_added_at_the_coarser_one() {
        let mut sum = PartMap::default();
        sum.add(&map(16, &[0, 5]));
        sum.add(&map(18, &[3]));
        assert_eq!(sum, map(18, &[0, 1, 3]));
        sum.add(&map(16, &[255]));
        assert_eq!(sum, map(18, &[0, 1, 3, 63]));
    }

    #[test]
    fn files_are_ranked_by_first_use_and_more_than_the_bound_are_only_counted() {
        let mut uses = Accounting::default();
        let read = Traffic { read_bytes: 10, ..Traffic::default() };
        let none = Traffic::default();
        for at in 0..FILES_MAX as u64 + 3 {
            let ino = Ino(1_000_000 - at);
            uses.count(&FileId::Overlay(ino), at + 5, Some(format!("{at}")), &none, &read, &PartMap::default());
        }
        // An earlier use than the one that was counted first.
        uses.count(&FileId::Overlay(Ino(1_000_000 - 7)), 1, None, &none, &none, &PartMap::default());
        let ranked = uses.ranked();
        assert_eq!(ranked.len(), FILES_MAX);
        assert_eq!((ranked[0].1.path.as_str(), ranked[1].1.path.as_str()), ("7", "0"));
        assert_eq!(uses.omitted(), 3);
        assert_eq!(uses.sum().read_bytes, 10 * (FILES_MAX as u64 + 3), "the sum has them all");
        let is_used = |at: u64| uses.has_used(&FileId::Overlay(Ino(1_000_000 - at)));
        assert!(is_used(0) && is_used(FILES_MAX as u64 + 2), "a file that is not reported is used all the same");
        assert!(!is_used(FILES_MAX as u64 + 3), "however many files a job uses, it uses no other file");
        assert_eq!(uses.overlay_files().len(), FILES_MAX + 3);
        assert!(uses.overlay_files().iter().all(|file| !file.is_changed));
        let wrote = Traffic { written_bytes: 1, ..Traffic::default() };
        let changed = [0, FILES_MAX as u64 + 2].map(|at| Ino(1_000_000 - at));
        for ino in changed {
            assert!(uses.counts_as_changed(&FileId::Overlay(ino)));
            uses.count(&FileId::Overlay(ino), 9, None, &none, &wrote, &PartMap::default());
            assert!(!uses.counts_as_changed(&FileId::Overlay(ino)));
        }
        let mut found: Vec<Ino> = uses.overlay_files().iter().filter(|f| f.is_changed).map(|f| f.ino).collect();
        found.sort_unstable_by_key(|ino| std::cmp::Reverse(ino.0));
        assert_eq!(found, changed);
    }

    #[test]
    fn the_paths_of_a_job_take_no_more_than_their_limit() {
        let mut uses = Accounting::default();
        let (none, path) = (Traffic::default(), "x".repeat(PATH_BYTES_MAX));
        let all = 2 * PATHS_BYTES_MAX / PATH_BYTES_MAX;
        for at in 0..all as u64 {
            uses.count(&FileId::Overlay(Ino(at)), at, Some(path.clone()), &none, &none, &PartMap::default());
        }
        uses.count(&FileId::Pool("p".into()), 0, Some("p".into()), &none, &none, &PartMap::default());
        let bytes: usize = uses.ranked().iter().map(|(_, used)| used.path.len()).sum();
        assert!((PATHS_BYTES_MAX - PATH_BYTES_MAX..=PATHS_BYTES_MAX).contains(&bytes), "{bytes}");
        assert_eq!(uses.len() + uses.omitted(), all + 1, "the others are counted");
    }

    #[test]
    fn a_job_that_does_not_know_all_its_files_may_have_used_any() {
        let mut uses = Accounting::default();
        let none = Traffic::default();
        for at in 0..FILES_KNOWN as u64 {
            assert!(!uses.may_have_used(&FileId::Overlay(Ino(9))), "{at}");
            uses.count(&FileId::Overlay(Ino(1_000 + at)), at, Some(String::new()), &none, &none, &PartMap::default());
        }
        assert!(uses.may_have_used(&FileId::Overlay(Ino(9))) && !uses.has_used(&FileId::Overlay(Ino(9))));
        uses.take_over(Ino(9));
        assert!(uses.overlay_files().contains(&FileOfJob { ino: Ino(9), is_changed: true }));
    }
}
