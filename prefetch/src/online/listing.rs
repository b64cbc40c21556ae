//! The files of directories, in the orders in which programs go through them, as far as the detection of patterns needs
//! them.

use std::collections::HashMap;
use std::sync::Arc;

use lru::LruCache;

use super::{OpenedKind, Sibling, natural};

/// Directories whose listings are kept.
pub(super) const DIRECTORIES_MAX: usize = 256;

/// The most files in all listings together, 34 bytes each and as many again for unused capacity: 34 MiB at most. A
/// larger directory is treated as unknown: requesting and sorting its names takes a second.
pub(super) const LISTED_MAX: usize = 1 << 19;

/// Opens of missing files in a directory before its listing is requested again; at least one in `AGAIN_ONE_IN` of its
/// files, so that sorting again costs an open little: a directory that is written while it is read must not be sorted
/// for every new file.
const AGAIN_TOUCHES: u64 = 64;
/// Half of the opens before the first retry if the listing was unavailable, since it may be available by then; the
/// number doubles each time.
const UNKNOWN_TOUCHES: u64 = 2;
const AGAIN_ONE_IN: u64 = 16;

/// The kind of empty files, which are not worth fetching.
pub(super) const NOTHING: u16 = u16::MAX;

/// The orders in which names may be sorted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NameOrder {
    /// Numbers count as numbers: part-9, part-10. Jobs that count read in this order.
    Natural,
    /// Byte by byte: part-10, part-9. Jobs that sort a listing read in this order, and so do jobs that use names as
    /// listed, since the mount lists them in this order.
    Bytes,
}

impl NameOrder {
    pub const ALL: [Self; 2] = [Self::Natural, Self::Bytes];

    pub fn index(self) -> usize {
        self as usize
    }
}

/// The files of one directory.
#[derive(Debug)]
pub(super) struct DirectoryListing {
    /// In natural order of their names.
    files: Vec<u64>,
    /// Files with the same ending are of one kind.
    kinds: Vec<u16>,
    of_kind: Vec<u32>,
    /// Sorted by file.
    positions: Vec<(u64, u32)>,
    /// `by_bytes`: positions in natural order, by position in the order of bytes; `to_bytes`: the reverse. Both are
    /// empty if the orders are the same.
    by_bytes: Vec<u32>,
    to_bytes: Vec<u32>,
    /// A different number for every listing.
    pub version: u64,
}

impl DirectoryListing {
    fn new(mut siblings: Vec<Sibling>, version: u64) -> Self {
        siblings.sort_by_cached_key(|sibling| natural::key(&sibling.name));
        let mut numbers: HashMap<String, u16> = HashMap::new();
        let mut of_kind = Vec::new();
        let mut kinds = Vec::with_capacity(siblings.len());
        for sibling in &siblings {
            if sibling.bytes == 0 {
                kinds.push(NOTHING);
                continue;
            }
            let next = (numbers.len() as u16).min(NOTHING - 1);
            let ending = ending(&sibling.name);
            let kind = match numbers.get(ending) {
                Some(kind) => *kind,
                None if next == NOTHING - 1 => next,
                None => *numbers.entry(ending.to_owned()).or_insert(next),
            };
            if of_kind.len() <= usize::from(kind) {
                of_kind.resize(usize::from(kind) + 1, 0);
            }
            of_kind[usize::from(kind)] += 1;
            kinds.push(kind);
        }
        let (by_bytes, to_bytes) = by_bytes(&siblings);
        let files: Vec<u64> = siblings.into_iter().map(|sibling| sibling.file).collect();
        let mut positions: Vec<(u64, u32)> = files.iter().copied().zip(0..).collect();
        positions.sort_unstable();
        positions.dedup_by_key(|(file, _)| *file);
        Self { files, kinds, of_kind, positions, by_bytes, to_bytes, version }
    }

    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Returns the orders that differ.
    pub fn orders(&self) -> &'static [NameOrder] {
        if self.by_bytes.is_empty() { &NameOrder::ALL[..1] } else { &NameOrder::ALL }
    }

    /// Returns the position of a file in an order.
    pub fn place(&self, file: u64, order: NameOrder) -> Option<i64> {
        let natural = self.position(file)?;
        match order {
            NameOrder::Bytes if !self.to_bytes.is_empty() => Some(i64::from(self.to_bytes[natural as usize])),
            _ => Some(natural),
        }
    }

    /// Returns the file at a position in an order.
    pub fn at(&self, place: i64, order: NameOrder) -> Option<u64> {
        let natural = match order {
            NameOrder::Bytes if !self.by_bytes.is_empty() => {
                i64::from(*self.by_bytes.get(usize::try_from(place).ok()?)?)
            }
            _ => place,
        };
        Some(self.get(natural)?.0)
    }

    /// Returns the file at a position in natural order, and its kind.
    pub fn get(&self, position: i64) -> Option<(u64, u16)> {
        let position = usize::try_from(position).ok()?;
        Some((*self.files.get(position)?, *self.kinds.get(position)?))
    }

    /// Returns the file's position in natural order.
    pub fn position(&self, file: u64) -> Option<i64> {
        let at = self.positions.binary_search_by_key(&file, |(file, _)| *file).ok()?;
        Some(i64::from(self.positions[at].1))
    }

    pub fn kind(&self, file: u64) -> Option<u16> {
        Some(self.get(self.position(file)?)?.1)
    }

    /// Returns the number of files of a kind.
    pub fn of_kind(&self, kind: u16) -> usize {
        self.of_kind.get(usize::from(kind)).map_or(0, |files| *files as usize)
    }
}

/// Returns the positions of files in natural order by position in the order of bytes, and the reverse. Both are empty
/// if the orders are the same, as they are if all numbers have the same width.
fn by_bytes(natural: &[Sibling]) -> (Vec<u32>, Vec<u32>) {
    if natural.is_sorted_by(|a, b| a.name <= b.name) {
        return (Vec::new(), Vec::new());
    }
    let mut by_bytes: Vec<u32> = (0..natural.len() as u32).collect();
    by_bytes.sort_by_key(|at| &natural[*at as usize].name);
    let mut to_bytes = vec![0; natural.len()];
    by_bytes.iter().zip(0..).for_each(|(natural, place)| to_bytes[*natural as usize] = place);
    (by_bytes, to_bytes)
}

/// Returns the text after the last dot; empty for names without a dot, and for names that end in a number (`log.17`).
fn ending(name: &str) -> &str {
    let ending = name.rsplit_once('.').map_or("", |(_, ending)| ending);
    if ending.bytes().all(|byte| byte.is_ascii_digit()) { "" } else { ending }
}

/// The result of the last request for a directory's listing.
#[derive(Debug)]
struct KnownListing {
    listing: Option<Arc<DirectoryListing>>,
    /// Opens in the directory since then.
    touches: u64,
    /// Consecutive requests that returned nothing.
    in_vain: u32,
}

/// The kept listings.
#[derive(Debug)]
pub(super) struct ListingCache {
    /// By directory, and by whether its files or its subdirectories are listed.
    known: LruCache<(u64, OpenedKind), KnownListing>,
    /// Files in all listings together.
    listed: usize,
    version: u64,
}

impl ListingCache {
    pub fn new() -> Self {
        Self { known: LruCache::unbounded(), listed: 0, version: 0 }
    }

    /// Returns the listing of a directory in which `file` was opened. Requests it if it is unknown or lacks the file.
    pub fn get(
        &mut self,
        directory: (u64, OpenedKind),
        file: u64,
        ask: &mut dyn FnMut(u64) -> Option<Vec<Sibling>>,
    ) -> Option<Arc<DirectoryListing>> {
        if let Some(known) = self.known.get_mut(&directory) {
            known.touches += 1;
            let files = known.listing.as_ref().map_or(0, |listing| listing.len() as u64);
            let lacks = known.listing.as_ref().is_none_or(|listing| listing.position(file).is_none());
            let again = match known.in_vain {
                0 => AGAIN_TOUCHES.max(files / AGAIN_ONE_IN),
                times => (UNKNOWN_TOUCHES << times.min(8)).min(AGAIN_TOUCHES),
            };
            if !lacks || known.touches < again {
                return known.listing.clone();
            }
        }
        self.version += 1;
        let siblings = ask(directory.0).filter(|siblings| siblings.len() <= LISTED_MAX);
        let listing = siblings.map(|siblings| Arc::new(DirectoryListing::new(siblings, self.version)));
        let in_vain = match &listing {
            Some(_) => 0,
            None => 1 + self.known.peek(&directory).map_or(0, |known| known.in_vain),
        };
        self.keep(directory, KnownListing { listing: listing.clone(), touches: 0, in_vain });
        listing
    }

    fn keep(&mut self, directory: (u64, OpenedKind), known: KnownListing) {
        let files = |known: &KnownListing| known.listing.as_ref().map_or(0, |listing| listing.len());
        self.listed += files(&known);
        if let Some(before) = self.known.put(directory, known) {
            self.listed -= files(&before);
        }
        while self.known.len() > DIRECTORIES_MAX || self.listed > LISTED_MAX {
            let Some((_, oldest)) = self.known.pop_lru() else { break };
            self.listed -= files(&oldest);
        }
    }

    /// Returns the numbers of directories and of files in them.
    #[cfg(test)]
    pub fn counts(&self) -> (usize, usize) {
        (self.known.len(), self.listed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> Vec<Sibling> {
        (0..).zip(names).map(|(file, name)| Sibling { name: (*name).into(), file, bytes: 1 }).collect()
    }

    #[test]
    fn files_stand_in_natural_order_by_kind() {
        let listing = DirectoryListing::new(files(&["a10.jpg", "a9.jpg", "a9.txt", "a10.txt", "log.17"]), 1);
        assert_eq!((0..5).filter_map(|at| listing.get(at)).map(|(file, _)| file).collect::<Vec<_>>(), [1, 2, 0, 3, 4]);
        assert_eq!(listing.kind(0), listing.kind(1));
        assert_ne!(listing.kind(1), listing.kind(2));
        assert_eq!(listing.kind(1).map(|kind| listing.of_kind(kind)), Some(2));
        assert_eq!((listing.get(-1), listing.get(5), listing.position(7)), (None, None, None));
    }

    #[test]
    fn files_stand_in_the_order_of_bytes_as_well_where_that_is_another() {
        let listing = DirectoryListing::new(files(&["a2", "a10", "b"]), 1);
        let places = |order| (0..3).filter_map(|file| listing.place(file, order)).collect::<Vec<_>>();
        let files_in = |order| (-1..4).filter_map(|place| listing.at(place, order)).collect::<Vec<_>>();
        assert_eq!((listing.orders(), places(NameOrder::Natural)), (&NameOrder::ALL[..], vec![0, 1, 2]));
        assert_eq!((places(NameOrder::Bytes), files_in(NameOrder::Bytes)), (vec![1, 0, 2], vec![1, 0, 2]));
        let padded = DirectoryListing::new(files(&["a02", "a10", "b"]), 1);
        assert_eq!(padded.orders(), [NameOrder::Natural]);
        assert_eq!((padded.place(1, NameOrder::Bytes), padded.at(1, NameOrder::Bytes)), (Some(1), Some(1)));
    }

    #[test]
    fn a_directory_is_asked_for_again_after_many_opens_of_what_it_lacks() {
        let mut listings = ListingCache::new();
        let mut asked = 0;
        for touch in 0..1000 {
            listings.get((1, OpenedKind::Files), 100 + touch, &mut |_| {
                asked += 1;
                Some(files(&["a", "b"]))
            });
        }
        assert_eq!(asked, 1 + 999 / AGAIN_TOUCHES);
        listings.get((1, OpenedKind::Files), 0, &mut |_| None).expect("what is known is not asked for");
    }

    #[test]
    fn listings_are_forgotten_by_directories_and_by_files() {
        let mut listings = ListingCache::new();
        for directory in 0..1000 {
            listings.get((directory, OpenedKind::Files), 0, &mut |_| Some(files(&["a", "b"])));
        }
        assert_eq!(listings.counts(), (DIRECTORIES_MAX, 2 * DIRECTORIES_MAX));
    }
}
