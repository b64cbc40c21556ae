//! Properties that hold for any opens and any outcomes of the suggestions.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::play::{Play, Tree, check_bounds, reader_of, who};

#[derive(Debug, Clone)]
enum Op {
    /// A reader opens a file of a directory.
    Open(u64, u64, u64),
    /// A reader opens several files in a row: reader, directory, first file, step, number.
    Run(u64, u64, u64, i64, u64),
    NotStaged(u64),
    Wasted(u64),
    Ended(u64),
    /// Files are added or removed: directory, new number of files.
    Resize(u64, u64),
}

fn op() -> impl Strategy<Value = Op> {
    let (reader, directory, file) = (0u64..4, 0u64..4, 0u64..120);
    prop_oneof![
        8 => (reader.clone(), directory.clone(), file.clone()).prop_map(|(r, d, f)| Op::Open(r, d, f)),
        4 => (reader.clone(), directory.clone(), file.clone(), -3i64..4, 3u64..60)
            .prop_map(|(r, d, f, step, n)| Op::Run(r, d, f, step, n)),
        2 => (0u64..500).prop_map(Op::NotStaged),
        2 => (0u64..500).prop_map(Op::Wasted),
        1 => reader.prop_map(Op::Ended),
        1 => (directory, 0u64..130).prop_map(|(d, n)| Op::Resize(d, n)),
    ]
}

/// Returns the first inode number of the files of a directory.
fn first(directory: u64) -> u64 {
    directory * 130
}

fn open(play: &mut Play, reader: u64, directory: u64, file: u64) {
    let before: HashSet<u64> = play.online.asked.iter().map(|(file, _)| file).collect();
    let opened = first(directory) + file;
    let suggestions = play.open((reader, directory, opened));
    for suggestion in suggestions {
        assert!(!before.contains(&suggestion.file), "{suggestion:?} is outstanding");
        assert_ne!(suggestion.file, opened);
    }
}

proptest! {
    #[test]
    fn bounds_hold_whatever_is_opened(ops in prop::collection::vec(op(), 1..120)) {
        let tree = (0..3).fold(Tree::default(), |tree, directory| tree.with(directory, first(directory), 120));
        let mut play = Play::on(tree);
        for op in ops {
            match op {
                Op::Open(reader, directory, file) => open(&mut play, reader, directory, file),
                Op::Run(reader, directory, file, step, files) => {
                    for at in 0..files as i64 {
                        open(&mut play, reader, directory, (file as i64 + at * step).rem_euclid(120) as u64);
                    }
                }
                Op::NotStaged(file) => play.online.not_staged(file),
                Op::Wasted(file) => play.online.wasted(file),
                Op::Ended(reader) => play.online.ended(who(reader)),
                Op::Resize(directory, files) => {
                    play.tree = std::mem::take(&mut play.tree).with(directory, first(directory), files);
                }
            }
            check_bounds(&play.online);
        }
        (0..4).for_each(|reader| play.online.ended(who(reader)));
        check_bounds(&play.online);
        prop_assert_eq!(play.online.asked.len(), 0);
    }

    /// A reader that opens nothing twice gets no suggestion of a file that it has opened. An outstanding file is
    /// suggested once. The outstanding suggestions of a directory in no order are in proportion to the files that were
    /// opened there.
    #[test]
    fn what_was_opened_or_suggested_is_not_suggested_again(
        orders in prop::collection::vec(Just((0u64..300).collect::<Vec<u64>>()).prop_shuffle(), 3),
        sorted in 0usize..3,
        opens in prop::collection::vec(0usize..3, 1..600),
    ) {
        let mut orders = orders;
        orders[sorted].sort_unstable();
        let mut play = Play::on(Tree::default().with(0, 0, 300));
        let mut opened: HashMap<usize, HashSet<u64>> = HashMap::new();
        let mut outstanding = HashSet::new();
        for reader in opens {
            let Some(file) = orders[reader].pop() else { continue };
            outstanding.remove(&file);
            let opened = opened.entry(reader).or_default();
            opened.insert(file);
            for suggestion in play.open((reader as u64, 0, file)) {
                prop_assert!(!opened.contains(&suggestion.file));
                prop_assert!(outstanding.insert(suggestion.file), "{} is outstanding", suggestion.file);
            }
            let siblings = play.online.asked.iter().filter(|(_, asked)| {
                (asked.reader, asked.predictor) == (reader_of(reader as u64), super::super::Predictor::Siblings)
            });
            prop_assert!(siblings.count() <= 4 * opened.len());
        }
    }
}
