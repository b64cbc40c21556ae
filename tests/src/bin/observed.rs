//! The program that the tests of the observer observe: `observed read` carries out the plan on standard input, and
//! `observed observe DIR` observes its own read of `DIR/file`. Exits with 77 if the observer reports `Denied`.

use std::io::Read;
use std::path::PathBuf;

use forebay_ebpf::{Observer, ObserverError, Way};
use forebay_tests::{observed, reading};

fn main() {
    let mut arguments = std::env::args_os().skip(1);
    let command = arguments.next().unwrap();
    match (command.to_str().unwrap(), arguments.next().map(PathBuf::from)) {
        ("read", None) => {
            let mut plan = String::new();
            std::io::stdin().read_to_string(&mut plan).unwrap();
            reading::carry_out(&serde_json::from_str::<Vec<_>>(&plan).unwrap());
        }
        ("observe", Some(dir)) => match Observer::start(&observed::options(&dir, &[])) {
            Ok(observer) => {
                let record = observed::reads(&observer, &dir.join("file"));
                assert_eq!(record.way(Way::Read).bytes, observed::FILE_BYTES);
            }
            Err(ObserverError::Denied) => std::process::exit(77),
            Err(other) => panic!("{other:?}"),
        },
        other => panic!("{other:?}: read, or observe DIR"),
    }
}
