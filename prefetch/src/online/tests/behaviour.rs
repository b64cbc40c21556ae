//! Single promises, one by one.

use std::time::Duration;

use super::super::*;
use super::play::{Play, Tree, check_bounds, reader_of, who};

fn tree() -> Tree {
    Tree::default().with(1, 0, 1000)
}

#[test]
fn three_steps_in_the_order_of_names_show_the_next() {
    let mut play = Play::on(tree());
    for file in 0..3 {
        assert!(play.open((9, 1, file)).is_empty());
    }
    let next = play.open((9, 1, 3));
    assert_eq!(next.iter().map(|next| next.file).collect::<Vec<_>>(), [4, 5]);
    assert_eq!(next[0].why.to_string(), "the 1st after it in the order of the directory");
}

#[test]
fn the_window_grows_with_use_up_to_its_bound_and_shrinks_with_waste() {
    let mut play = Play::on(tree());
    let mut ahead = Vec::new();
    for file in 0..400 {
        play.open((9, 1, file));
        ahead.push(play.suggested.keys().filter(|next| **next > file).count());
    }
    assert_eq!((ahead[3], ahead[399]), (2, 64));
    assert!(ahead[3..300].is_sorted(), "{ahead:?}");
    (400..440).for_each(|file| play.online.wasted(file));
    (464..500).for_each(|file| drop(play.open((9, 1, file))));
    let beyond = play.suggested.keys().filter(|next| **next > 499).count();
    assert!(beyond < 64, "{beyond}");
}

#[test]
fn numbers_of_different_width_are_in_order_and_back_and_by_strides() {
    let orders: [Vec<u64>; 3] = [(95..105).collect(), (95..105).rev().collect(), (70..110).step_by(8).collect()];
    for order in orders {
        let mut play = Play::on(tree());
        for (at, file) in order.iter().enumerate() {
            let next = play.open((9, 1, *file));
            assert_eq!(next.is_empty(), at < 3, "{file} of {order:?}: {next:?}");
        }
        let step = order[1].abs_diff(order[0]);
        assert!(play.suggested.keys().all(|next| next.abs_diff(order[0]) % step == 0));
        assert_eq!(play.score.covered, order.len() - 4);
    }
}

#[test]
fn a_file_left_out_or_out_of_turn_does_not_end_a_sequence() {
    let order = [0, 1, 2, 3, 4, 6, 7, 5, 8, 9, 12, 13, 14, 15];
    let mut play = Play::on(tree()).all(order.map(|file| (9, 1, file)));
    assert_eq!(play.score.covered, order.len() - 4);
    assert!(play.files((9, 1, 16)).iter().all(|next| *next > 16));
}

#[test]
fn readers_do_not_disturb_each_other() {
    let opens = (0..100).flat_map(|at| [(1, 1, at), (2, 1, 900 - 3 * at), (3, 1, 400 + at)]);
    let play = Play::on(tree()).all(opens);
    assert!(play.score.coverage() > 0.95 && play.score.accuracy() > 0.3, "{}", play.score);
    assert_eq!(play.score.listings, 1, "one listing for all of them");
}

#[test]
fn new_files_are_found_by_listing_again_and_not_for_each() {
    let mut play = Play::on(Tree::default().with(1, 0, 10)).all((0..10).map(|file| (9, 1, file)));
    play.tree = std::mem::take(&mut play.tree).with(1, 0, 500);
    let mut play = play.all((10..300).map(|file| (9, 1, file)));
    assert!(play.score.listings <= 6, "{} listings", play.score.listings);
    let next = play.files((9, 1, 300));
    assert!(!next.is_empty(), "{}", play.score);
}

#[test]
fn files_that_are_gone_are_refused_and_harm_nothing() {
    let mut play = Play::on(tree());
    for file in (0..900).filter(|file| file % 3 != 0) {
        for next in play.open((9, 1, file)) {
            if next.file % 3 == 0 {
                play.online.not_staged(next.file);
            }
        }
    }
    check_bounds(&play.online);
    assert!(play.score.coverage() > 0.95, "{}", play.score);
}

#[test]
fn a_directory_that_is_not_known_leaves_associations() {
    let mut play = Play::default();
    let set = |round: u64| [10, 20, 30].into_iter().chain((0..90).map(move |at| 1000 * (round + 1) + at));
    (0..5).flat_map(set).for_each(|file| drop(play.open((9, 1, file))));
    let next = play.open((9, 1, 10));
    assert_eq!(next.len(), 2, "{next:?}");
    assert_eq!(next[0].why.predictor(), Predictor::Association);
    assert!(play.score.listings < 12, "{} listings of 466 opens", play.score.listings);
}

#[test]
fn empty_files_and_other_kinds_of_files_are_no_siblings() {
    let name = |at: u64| if at.is_multiple_of(2) { format!("{at}.jpg") } else { format!("{at}.json") };
    let sibling = |at: u64| Sibling { name: name(at).into(), file: at, bytes: u64::from(at % 10 != 4) };
    let mut play = Play::default();
    play.tree.directories.insert(1, (0..100).map(sibling).collect());
    let mut suggested = Vec::new();
    for at in 0..40u64 {
        suggested.extend(play.open((9, 1, at * 37 % 50 * 2)));
    }
    let siblings: Vec<&Suggestion> =
        suggested.iter().filter(|next| next.why.predictor() == Predictor::Siblings).collect();
    assert!(siblings.len() > 5, "{suggested:?}");
    assert!(siblings.iter().all(|next| next.file % 2 == 0 && next.file % 10 != 4), "{siblings:?}");
}

#[test]
fn opens_of_the_same_file_in_a_row_are_one() {
    let opens = (0..50).flat_map(|file| [(9, 1, file), (9, 1, file), (9, 1, file)]);
    let play = Play::on(tree()).all(opens);
    assert_eq!(play.score.covered, 46);
}

#[test]
fn a_predictor_that_is_always_wrong_only_probes() {
    let mut play = Play::on(Tree::default().with(1, 0, 100_000));
    let mut late = 0;
    // Four in a row, and then a jump.
    for burst in 0..2000 {
        for at in 0..4 {
            let next = play.open((9, 1, burst * 40 + at));
            late += if burst > 1000 { next.len() } else { 0 };
            next.iter().for_each(|next| play.online.wasted(next.file));
        }
    }
    assert!(late <= 4000 / 64 + 1, "{late} suggestions in 4,000 opens");
    assert!(late > 10, "it is still tried: {late}");
}

#[test]
fn what_is_refused_is_not_asked_for_ever_more() {
    let mut play = Play::on(tree());
    let mut suggested = 0;
    for at in 0..900 {
        let next = play.open((9, 1, at * 373 % 1000));
        suggested += next.len();
        next.iter().for_each(|next| play.online.not_staged(next.file));
    }
    check_bounds(&play.online);
    assert!(suggested <= 3 * 900, "{suggested} suggestions for 900 opens");
}

#[test]
fn a_job_that_ended_leaves_nothing_behind() {
    let mut play = Play::on(tree()).all((0..50).map(|file| (9, 1, file)));
    assert!(play.online.asked.len() > 0);
    play.online.ended(who(9));
    assert_eq!((play.online.asked.len(), play.online.tracks.len(), play.online.logged), (0, 0, 0));
    check_bounds(&play.online);
}

#[test]
fn readers_and_directories_are_forgotten_when_there_are_many() {
    let mut play = Play::default();
    (0..2000).for_each(|reader| {
        (0..5).for_each(|at| drop(play.open((reader, reader * 10 + at % 4, reader * 100 + at))));
    });
    check_bounds(&play.online);
    assert_eq!(play.online.readers.len(), reader::READERS_MAX);
}

#[test]
fn the_same_opens_give_the_same_suggestions() {
    let opens = || (0..3000u64).map(|at| (at % 3, 1, (at * at * 7 + at / 50) % 1000));
    let suggestions = || {
        let mut play = Play::on(tree());
        opens().map(|open| play.open(open)).collect::<Vec<_>>()
    };
    assert_eq!(suggestions(), suggestions());
}

#[test]
fn it_may_be_handed_from_thread_to_thread() {
    fn is_send<T: Send>(_: &T) {}
    is_send(&Online::new());
}

#[test]
fn time_that_goes_back_does_no_harm() {
    let mut online = Online::new();
    for at in (0..100).rev() {
        let touch = OpenEvent { reader: reader_of(1), directory: 1, file: at % 7, at: Duration::from_secs(at) };
        online.touched(&touch, &mut |_| None);
    }
    check_bounds(&online);
}
