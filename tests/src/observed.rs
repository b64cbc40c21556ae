//! A process that observes its own reads.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use forebay_ebpf::{Key, Observer, ObserverOptions, Record, WatchedPlace};

pub const FILE_BYTES: u64 = 1 << 20;
const JOB: u32 = 7;

/// Returns the options to observe the files of a directory, without the hooks in `masked`.
pub fn options(dir: &Path, masked: &[&str]) -> ObserverOptions {
    let masked = masked.iter().map(|name| (*name).to_owned()).collect();
    ObserverOptions {
        places: vec![WatchedPlace::below(dir, false).unwrap()],
        ignored: 0,
        scratch: Some(dir.to_owned()),
        masked,
    }
}

/// Reads a file that is not in the page cache, and returns the observer's record of that.
pub fn reads(observer: &Observer, path: &Path) -> Record {
    observer.add_process(std::process::id(), JOB).unwrap();
    let mut bytes = Vec::new();
    File::open(path).unwrap().read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes.len() as u64, FILE_BYTES);
    let touches = observer.first_touches();
    let touch = touches.iter().find(|touch| touch.key.job == JOB).expect("a first touch");
    assert_eq!(touch.path, Path::new("file"));
    records(observer)[&touch.key]
}

pub fn records(observer: &Observer) -> HashMap<Key, Record> {
    let mut all = HashMap::new();
    observer.records(|key, record| assert!(all.insert(*key, *record).is_none(), "{key:?} is told twice")).unwrap();
    all
}
