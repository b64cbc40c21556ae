//! The observer records of mapped files what the kernel maps, with folios of every order. Needs root, and a kernel with
//! BTF.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use forebay_ebpf::{Observer, Record, Way};
use forebay_tests::observed::{options, records};
use forebay_tests::reading::PAGE;

const JOB: u32 = 7;
/// The largest order is one below that of a whole page table. The kernel may map a whole page table as one huge page,
/// and does not report that.
const ORDERS: std::ops::RangeInclusive<u32> = 0..=8;
const FOLIOS: u64 = 6;

/// Makes a file whose folios are in memory. They have `1 << order` pages each, as far as the file system makes such
/// folios.
fn file_of_folios(path: &Path, order: u32, more: u64) -> File {
    let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
    let folio = PAGE << order;
    for number in 0..FOLIOS {
        file.write_all_at(&vec![1; folio as usize], number * folio).unwrap();
    }
    file.write_all_at(&vec![1; more as usize], FOLIOS * folio).unwrap();
    file.sync_all().unwrap();
    file
}

/// Maps part of a file and touches pages. Returns the pages of the file that the kernel has mapped then.
fn mapped(file: &File, from: u64, len: u64, pages: impl IntoIterator<Item = u64>) -> BTreeSet<u64> {
    let (flags, map_flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
    let count = len.div_ceil(PAGE) as usize;
    let mut entries = vec![0u8; count * 8];
    // SAFETY: a new mapping, which nothing else uses, of a file that is not truncated.
    unsafe {
        let start = rustix::mm::mmap(std::ptr::null_mut(), len as usize, flags, map_flags, file, from).unwrap();
        for page in pages {
            std::ptr::read_volatile(start.cast::<u8>().add(((page * PAGE) - from) as usize));
        }
        let told = File::open("/proc/self/pagemap").unwrap();
        told.read_exact_at(&mut entries, start as u64 / PAGE * 8).unwrap();
        rustix::mm::munmap(start, len as usize).unwrap();
    }
    // The highest bit says that the page is in memory.
    let is_mapped = |page: &usize| entries[page * 8 + 7] >> 7 == 1;
    (0..count).filter(is_mapped).map(|page| from / PAGE + page as u64).collect()
}

fn parts(record: &Record) -> BTreeSet<u64> {
    (0..256).filter(|part| record.read[part / 64] >> (part % 64) & 1 == 1).map(|part| part as u64).collect()
}

/// Returns the record of the one file below the directory that this process used.
fn told(observer: &Observer) -> Record {
    let all = records(observer);
    assert_eq!(all.len(), 1, "{all:?}");
    *all.values().next().unwrap()
}

/// How often a use is measured that counted too much.
const ATTEMPTS: u32 = 4;

/// Compares the record of a use with the pages that it mapped. `twice` is the number of pages that may count twice.
///
/// While another thread of the kernel has a folio locked, a fault may map the pages around it first, and then the whole
/// folio: these pages count twice. That is seen on a busy machine, now and then, so a count that is too high is measured
/// again.
fn check(order: u32, more: u64, twice: u64, what: &str, use_it: impl Fn(&File, u64) -> BTreeSet<u64>) {
    let is_too_high = |attempt| measure(order, more, twice, what, &use_it, attempt == ATTEMPTS);
    assert!((1..=ATTEMPTS).any(|attempt| !is_too_high(attempt)));
}

/// Measures a use once. Returns whether more was counted than was mapped, unless that `must_hold`.
fn measure(
    order: u32,
    more: u64,
    twice: u64,
    what: &str,
    use_it: impl Fn(&File, u64) -> BTreeSet<u64>,
    must_hold: bool,
) -> bool {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let file = file_of_folios(&dir.path().join("file"), order, more);
    let size = file.metadata().unwrap().len();
    let observer = Observer::start(&options(dir.path(), &[])).unwrap();
    let lacking: Vec<_> = observer.hooks().iter().filter(|state| state.lacking.is_some()).collect();
    assert!(lacking.is_empty(), "{lacking:#?}");
    observer.add_process(std::process::id(), JOB).unwrap();
    let pages = use_it(&file, size);
    let record = told(&observer);
    let truth: u64 = pages.iter().map(|page| (size - page * PAGE).min(PAGE)).sum();
    let context = format!("{what}, folios of {} bytes, a file of {size}: {record:?}", PAGE << order);
    let told = record.way(Way::Map).bytes;
    if told > truth + twice * PAGE && !must_hold {
        eprintln!("{told} and not {truth} bytes of {context}");
        return true;
    }
    assert!((truth..=truth + twice * PAGE).contains(&told), "{told} and not {truth} bytes of {context}");
    let truth: BTreeSet<u64> = pages.iter().map(|page| (page * PAGE) >> record.shift).collect();
    assert_eq!(parts(&record), truth, "parts of {context}");
    false
}

#[test]
fn mapped_bytes_are_those_that_the_kernel_maps_whatever_the_order_of_folios() {
    for order in ORDERS {
        for more in [0, 5000] {
            let all = |size: u64| 0..size.div_ceil(PAGE);
            check(order, more, 0, "every page", |file, size| {
                let pages = mapped(file, 0, size, all(size));
                assert_eq!(pages.len() as u64, size.div_ceil(PAGE));
                pages
            });
            check(order, more, 0, "one page", |file, size| mapped(file, 0, size, [size / PAGE / 2]));
            check(order, more, 0, "a page of each folio", |file, size| {
                mapped(file, 0, size, all(size).step_by(1 << order))
            });
            // The mapping ends within folios.
            let inside = |size: u64| (PAGE..size - PAGE, 1..size.div_ceil(PAGE) - 2);
            check(order, more, 0, "a part", |file, size| {
                let (bytes, pages) = inside(size);
                mapped(file, bytes.start, bytes.end - bytes.start, pages)
            });
        }
    }
}

/// The file has forty other mappings meanwhile.
#[test]
fn a_file_that_is_mapped_several_times_counts_whole() {
    let all = |file: &File, size: u64| {
        let (flags, map_flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
        // SAFETY: new mappings, which are not read.
        let others: Vec<_> = (0..40)
            .map(|number| unsafe {
                let len = (size - number % 8 * PAGE) as usize;
                (rustix::mm::mmap(std::ptr::null_mut(), len, flags, map_flags, file, number % 5 * PAGE).unwrap(), len)
            })
            .collect();
        let pages = mapped(file, 0, size, 0..size.div_ceil(PAGE));
        // SAFETY: as above.
        others.into_iter().for_each(|(start, len)| unsafe { rustix::mm::munmap(start, len).unwrap() });
        pages
    };
    check(6, 5000, 0, "every page, beside other mappings", all);
}

/// The kernel reports twice the pages that are read into memory first, and the observer counts them once. The exception
/// is the page that a fault waits for: it may be mapped by itself, and again with its folio.
#[test]
fn mapped_bytes_that_were_not_in_memory_count_once() {
    check(4, 5000, FOLIOS + 1, "every page, cold", |file, size| {
        rustix::fs::fadvise(file.as_fd(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
        mapped(file, 0, size, 0..size.div_ceil(PAGE))
    });
}
