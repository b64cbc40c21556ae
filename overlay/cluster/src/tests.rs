//! Properties of the decisions.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;

use super::*;

fn id(number: u32) -> NodeId {
    NodeId::new(&format!("node-{number}")).unwrap()
}

fn roster(numbers: impl IntoIterator<Item = u32>) -> Roster {
    let mut list = MemberList::default();
    for number in numbers {
        let address = format!("192.0.2.1:{number}");
        list.join(MemberSource::Static, Member { id: id(number), address, role: Role::Compute });
    }
    list.roster()
}

/// A data set: many small files, and some that have many ranges.
fn files(small: u64, big: &[u64]) -> Vec<(FileKey, u64)> {
    let small = (0..small).map(|at| (FileKey::of("s3://pool", format!("small/{at}").as_bytes()), 1));
    let big = big.iter().enumerate().map(|(at, n)| (FileKey::of("s3://pool", format!("big/{at}").as_bytes()), *n));
    small.chain(big).collect()
}

/// Returns the first owner of each range.
fn first_owners(roster: &Roster, files: &[(FileKey, u64)]) -> Vec<NodeId> {
    let eligible = Placing::default().eligible(roster);
    let mut first = Vec::new();
    for (file, ranges) in files {
        let owners = FileOwners::of(roster, eligible.clone(), *file, *ranges);
        first.extend((0..*ranges).map(|index| roster.member(owners.ranked(roster, index)[0]).id.clone()));
    }
    first
}

fn moved(before: &[NodeId], after: &[NodeId]) -> f64 {
    before.iter().zip(after).filter(|(before, after)| before != after).count() as f64 / before.len() as f64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The most that may move is the share of one node and a tenth of it. (What a random choice adds for the few ranges of
    /// this test is three deviations of the number that moves.)
    #[test]
    fn a_join_or_a_leave_moves_the_share_of_one_node(count in 4u32..40, left in 0u32..40, salt in 0u32..1_000_000) {
        let left = left % count;
        let files = files(20_000, &[5_000, 1_000, 300]);
        let all = roster((0..count).map(|at| salt + at));
        let fewer = roster((0..count).filter(|at| *at != left).map(|at| salt + at));
        let (with, without) = (first_owners(&all, &files), first_owners(&fewer, &files));
        let keys = with.len() as f64;
        let share = 1.0 / f64::from(count);
        let chance = 3.0 * (keys * share).sqrt() / keys;
        prop_assert!(moved(&with, &without) <= share * 1.1 + chance, "{} of {share}", moved(&with, &without));
    }

    /// Also for the ranges of one file: the bound of load moves some more, and never a tenth of all.
    #[test]
    fn in_one_big_file_at_most_a_tenth_more_moves(count in 3u32..60, left in 0u32..60, ranges in 200u64..4_000) {
        let left = left % count;
        let file = files(0, &[ranges]);
        let with = first_owners(&roster(0..count), &file);
        let without = first_owners(&roster((0..count).filter(|at| *at != left)), &file);
        prop_assert!(moved(&with, &without) <= 1.0 / f64::from(count) + 0.1, "{}", moved(&with, &without));
    }

    #[test]
    fn no_member_owns_more_of_a_file_than_the_bound(count in 1u32..200, ranges in 2u64..3_000, salt in any::<u32>()) {
        let roster = roster(0..count);
        let file = FileKey::of("pool", &salt.to_le_bytes());
        let eligible = Placing::default().eligible(&roster);
        let owners = FileOwners::of(&roster, eligible, file, ranges);
        let mut owned: BTreeMap<Seat, u64> = BTreeMap::new();
        for index in 0..ranges {
            let of_range = owners.ranked(&roster, index);
            prop_assert_eq!(of_range.len(), RANKED.min(count as usize));
            prop_assert_eq!(of_range.iter().collect::<BTreeSet<_>>().len(), of_range.len(), "each owner once");
            *owned.entry(of_range[0]).or_default() += 1;
        }
        let most = (ranges as f64 * 1.25 / f64::from(count)).ceil() as u64;
        prop_assert!(owned.values().all(|number| *number <= most), "{:?} above {most}", owned.values().max());
        prop_assert_eq!(owners.most_owned().unwrap_or(most), most);
    }

    #[test]
    fn nodes_that_know_the_same_members_agree(mut numbers in prop::collection::vec(0u32..1_000, 1..60), seed in any::<u64>()) {
        let file = files(50, &[seed % 500 + 2]);
        let one = roster(numbers.clone());
        numbers.reverse();
        // Another node learned of them in another order, from another source, with other addresses, and of one that left.
        let mut list = MemberList::default();
        list.join(MemberSource::Etcd, Member { id: id(5_000), address: String::new(), role: Role::Compute });
        for number in &numbers {
            list.join(MemberSource::Etcd, Member { id: id(*number), address: "[::1]:1".into(), role: Role::Compute });
        }
        list.leave(MemberSource::Etcd, &id(5_000));
        let other = list.roster();
        prop_assert_eq!(one.fingerprint(), other.fingerprint());
        prop_assert_eq!(first_owners(&one, &file), first_owners(&other, &file));
    }
}

/// A sparse file may have any number of ranges.
#[test]
fn no_more_ranges_are_dealt_out_than_can_be_remembered_and_the_spread_is_even_without() {
    let roster = roster(0..4);
    let owners = |ranges| FileOwners::of(&roster, Placing::default().eligible(&roster), files(0, &[1])[0].0, ranges);
    assert!(owners(DEALT_MAX).most_owned().is_some());
    for ranges in [DEALT_MAX + 1, 1 << 22, u64::MAX >> 26] {
        assert_eq!(owners(ranges).most_owned(), None, "{ranges}");
    }
    let (large, mut owned) = (owners(DEALT_MAX + 1), [0_u64; 4]);
    (0..=DEALT_MAX).for_each(|index| owned[large.ranked(&roster, index)[0] as usize] += 1);
    assert!(owned.iter().all(|count| *count * 4 < DEALT_MAX + DEALT_MAX / 16), "{owned:?}");
}

/// These are what nodes of different releases have to agree on.
#[test]
fn owners_are_the_same_in_every_release() {
    let roster = roster(0..10);
    let owners = first_owners(&roster, &files(6, &[4]));
    let names: Vec<_> = owners.iter().map(|id| id.as_str().trim_start_matches("node-")).collect();
    assert_eq!(names.join(" "), "0 1 3 1 7 1 6 3 0 5");
    assert_eq!(format!("{:x}", roster.fingerprint()), "f128b7f14215df95");
}

#[test]
fn a_member_stays_as_long_as_one_source_names_it() {
    let member = |number| Member { id: id(number), address: String::new(), role: Role::Cache };
    let mut list = MemberList::default();
    assert!(list.join(MemberSource::Static, member(1)));
    assert!(list.join(MemberSource::Etcd, member(1)));
    assert!(!list.join(MemberSource::Etcd, member(1)), "nothing is new");
    assert!(list.replace(MemberSource::Etcd, vec![member(2)]));
    let sources: Vec<_> = list.iter().map(|(member, sources)| (member.id.to_string(), sources)).collect();
    let expected = [("node-1", MemberSource::Static), ("node-2", MemberSource::Etcd)];
    assert_eq!(sources, expected.map(|(id, source)| (id.to_owned(), vec![source])));
    assert!(list.leave(MemberSource::Static, &id(1)) && !list.leave(MemberSource::Static, &id(1)));
    assert_eq!(list.roster().len(), 1);
}

#[test]
fn placement_and_confinement_choose_the_owners() {
    let mut list = MemberList::default();
    for number in 0..4 {
        let role = if number == 3 { Role::Cache } else { Role::Compute };
        list.join(MemberSource::Static, Member { id: id(number), address: String::new(), role });
    }
    let roster = list.roster();
    let chosen = |placement, confine_to: Option<&[u32]>| {
        let confine_to = confine_to
            .map_or_else(Confinement::default, |ids| Confinement::to(ids.iter().map(|number| id(*number)).collect()));
        Placing { placement, confine_to }.eligible(&roster)
    };
    assert_eq!(chosen(Placement::All, None), [0, 1, 2, 3]);
    assert_eq!(chosen(Placement::All, Some(&[1, 3, 9])), [1, 3]);
    assert_eq!(chosen(Placement::Dedicated, None), [3]);
    assert!(chosen(Placement::Dedicated, Some(&[1])).is_empty());
    assert!(chosen(Placement::Pool, None).is_empty() && chosen(Placement::Own, None).is_empty());
    let confined = Placing { placement: Placement::All, confine_to: Confinement::to([id(1), id(2)].into()) };
    let gives = |from, to| confined.gives_to(roster.member(from), &id(to));
    assert!(gives(1, 2) && !gives(1, 3) && !gives(3, 1));
    assert!(confined.asks(&id(1)) && !confined.asks(&id(3)));
}

#[test]
fn identities_are_checked() {
    for bad in ["", "a b", "a/b", "\u{e9}", &"x".repeat(101)] {
        assert!(NodeId::new(bad).is_err(), "{bad}");
    }
    assert!(NodeId::new("node-1.example_2").is_ok());
}

mod asking;
mod suspicion;

#[test]
fn each_byte_of_a_file_is_in_one_of_its_ranges() {
    for (size, ranges) in [(0, 1), (1, 1), (RANGE_BYTES, 1), (RANGE_BYTES + 1, 2), (3 * RANGE_BYTES, 3)] {
        assert_eq!(ranges_of(size), ranges, "{size}");
        let last = size.saturating_sub(1);
        assert_eq!(range_of(last), ranges - 1, "{size}");
    }
}
