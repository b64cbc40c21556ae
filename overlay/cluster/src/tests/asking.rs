//! The reader's and the asked node's side, with any answers in between.

use super::*;

fn key() -> RangeKey {
    RangeKey { file: FileKey::of("pool", b"file"), index: 7 }
}

/// Returns a search of one node, and the ranked members of its range; the first three own it.
fn begin(this: u32, count: u32, unsettled: bool) -> (Asking, Vec<NodeId>) {
    let roster = roster(0..count);
    let owners = FileOwners::of(&roster, Placing::default().eligible(&roster), key().file, 8);
    let seats = owners.ranked(&roster, key().index);
    let ids = seats.iter().map(|seat| roster.member(*seat).id.clone()).collect();
    (Asking::begin(Duration::ZERO, &id(this), key(), &roster, &seats, unsettled, false), ids)
}

fn answer() -> impl Strategy<Value = PeerAnswer> {
    let busy = (prop::collection::vec(0u32..20, 0..4), 0u64..4_000).prop_map(|(holders, ms)| PeerAnswer::Busy {
        holders: holders.into_iter().map(id).collect(),
        retry_after: Duration::from_millis(ms),
    });
    prop_oneof![
        4 => prop::sample::select(PassOver::ALL.to_vec()).prop_map(PeerAnswer::Not),
        3 => busy,
        1 => Just(PeerAnswer::Content),
    ]
}

proptest! {
    /// Whatever members answer: a search ends within its bounds of requests and of time, never asks its own node, asks
    /// for a fetch only of owners before it and of none again that failed, and counts each failure once.
    #[test]
    fn a_search_ends_and_asks_only_whom_it_may(
        this in 0u32..20, unsettled in any::<bool>(), answers in prop::collection::vec((answer(), 0u64..3_000), 1..50),
    ) {
        let (mut asking, ranked) = begin(this, 20, unsettled);
        let before: Vec<NodeId> = ranked[..RANKS].iter().take_while(|owner| **owner != id(this)).cloned().collect();
        let (mut suspicions, mut pass_overs) = (Suspicions::default(), PassOvers::default());
        let mut now = Duration::ZERO;
        let (mut asks, mut refused, mut named) = (0, 0, BTreeSet::new());
        let mut failed = BTreeSet::new();
        let mut has_ended = false;
        for (answer, ms) in answers.into_iter().cycle().take(2_000) {
            match asking.next(now, &PeerPatience::default(), &mut suspicions, &mut pass_overs) {
                AskingStep::Pool => {
                    has_ended = true;
                    break;
                }
                AskingStep::Wait(until) => {
                    prop_assert!(until > now && until <= now + Duration::from_secs(8));
                    now = until;
                }
                AskingStep::Ask(enquiry) => {
                    asks += 1;
                    prop_assert_ne!(&enquiry.peer, &id(this));
                    prop_assert!(now < enquiry.hedge_at && enquiry.hedge_at < enquiry.give_up_at);
                    prop_assert!(enquiry.give_up_at <= now + Duration::from_secs(30));
                    if enquiry.purpose == Purpose::Fetch {
                        prop_assert!(before.contains(&enquiry.peer) && !failed.contains(&enquiry.peer));
                    } else {
                        let is_behind = unsettled && ranked.contains(&enquiry.peer) && !before.contains(&enquiry.peer);
                        prop_assert!(is_behind || named.contains(&enquiry.peer));
                    }
                    now += Duration::from_millis(ms);
                    let of = (&enquiry.peer, enquiry.purpose);
                    asking.answered(now, of, &answer, &mut suspicions, &mut pass_overs);
                    match &answer {
                        PeerAnswer::Content => {
                            has_ended = true;
                            break;
                        }
                        PeerAnswer::Busy { holders, .. } => named.extend(holders.iter().cloned()),
                        PeerAnswer::Not(why) => {
                            refused += u64::from(!matches!(why, PassOver::Suspected | PassOver::Busy));
                            if enquiry.purpose == Purpose::Fetch {
                                failed.insert(enquiry.peer.clone());
                            }
                            prop_assert!(pass_overs.of(*why) > 0, "{why} is counted");
                        }
                    }
                }
            }
        }
        prop_assert!(has_ended && asks <= 256 && now < Duration::from_secs(120 + 3 + 8), "{asks} requests, {now:?}");
        let counted = pass_overs.total() - pass_overs.of(PassOver::Suspected) - pass_overs.of(PassOver::Busy);
        prop_assert_eq!(counted, refused, "{:?}", pass_overs);
    }

    /// Two nodes never wait for each other, also if their views differ: who fetches for another one does so as an owner
    /// behind which the other one is.
    #[test]
    fn an_owner_fetches_only_for_nodes_behind_it(
        order in Just((0u32..6).collect::<Vec<_>>()).prop_shuffle(), from in 0u32..6, fetch in any::<bool>(),
    ) {
        let owners: Vec<NodeId> = order.into_iter().take(RANKS).map(id).collect();
        let mut lender = Lender::new(id(0));
        let purpose = if fetch { Purpose::Fetch } else { Purpose::IfResident };
        let ask = PeerAsk { from: id(from), key: key(), version: "v".into(), purpose, passed: Default::default() };
        let facts = |held| LocalFacts { held, owners: &owners, may_give: true, readers_give: true, has_room: true };
        let place = |of: &NodeId| owners.iter().position(|owner| owner == of);
        let decided = lender.decide(&ask, facts(HeldRange::Absent));
        if matches!(decided, Lend::Fetch) {
            prop_assert!(fetch && from != 0);
            let mine = place(&id(0)).unwrap();
            prop_assert!(place(&id(from)).is_none_or(|of_reader| of_reader > mine));
        } else {
            prop_assert!(matches!(decided, Lend::Answer(PeerAnswer::Not(_))));
        }
        prop_assert_eq!(lender.decide(&ask, facts(HeldRange::Resident)), Lend::Give, "that needs no other node");
        let other = Lend::Answer(PeerAnswer::Not(PassOver::RefusedVersion));
        prop_assert_eq!(lender.decide(&ask, facts(HeldRange::OtherVersion)), other);
    }
}

#[test]
fn owners_are_asked_in_their_order_and_then_the_pool() {
    let (mut asking, ranked) = begin(100, 20, false);
    let owners = &ranked[..RANKS];
    let (mut suspicions, mut pass_overs) = (Suspicions::default(), PassOvers::default());
    for (at, owner) in owners.iter().enumerate() {
        let step = asking.next(Duration::ZERO, &PeerPatience::default(), &mut suspicions, &mut pass_overs);
        let AskingStep::Ask(enquiry) = step else { panic!("{step:?}") };
        assert_eq!((&enquiry.peer, enquiry.purpose), (owner, Purpose::Fetch));
        assert_eq!(enquiry.passed[..], owners[..at], "the next owner does not ask those that failed");
        let gone = PeerAnswer::Not(PassOver::Gone);
        asking.answered(Duration::ZERO, (owner, Purpose::Fetch), &gone, &mut suspicions, &mut pass_overs);
    }
    let step = asking.next(Duration::ZERO, &PeerPatience::default(), &mut suspicions, &mut pass_overs);
    assert_eq!((step, pass_overs.of(PassOver::Gone)), (AskingStep::Pool, 3));
    // The next search does not ask them at all.
    let (mut asking, _) = begin(100, 20, false);
    let step = asking.next(Duration::ZERO, &PeerPatience::default(), &mut suspicions, &mut pass_overs);
    assert_eq!((step, pass_overs.of(PassOver::Suspected)), (AskingStep::Pool, 3));
}

#[test]
fn another_version_ends_the_search_at_the_pool() {
    let (mut asking, owners) = begin(100, 20, true);
    let (mut suspicions, mut pass_overs) = (Suspicions::default(), PassOvers::default());
    asking.next(Duration::ZERO, &PeerPatience::default(), &mut suspicions, &mut pass_overs);
    let refused = PeerAnswer::Not(PassOver::RefusedVersion);
    asking.answered(Duration::ZERO, (&owners[0], Purpose::Fetch), &refused, &mut suspicions, &mut pass_overs);
    let step = asking.next(Duration::ZERO, &PeerPatience::default(), &mut suspicions, &mut pass_overs);
    assert_eq!((step, suspicions.trusts_all()), (AskingStep::Pool, true));
}

#[test]
fn after_a_change_nodes_ask_those_behind_them_what_they_have() {
    let ranked = begin(100, 20, false).1;
    let first: u32 = ranked[0].as_str().trim_start_matches("node-").parse().unwrap();
    let (mut suspicions, mut pass_overs) = (Suspicions::default(), PassOvers::default());
    let (mut asking, _) = begin(first, 20, false);
    let step = asking.next(Duration::ZERO, &PeerPatience::default(), &mut suspicions, &mut pass_overs);
    assert_eq!(step, AskingStep::Pool);
    let (mut asking, _) = begin(first, 20, true);
    assert_eq!(ranked.len(), RANKED);
    for owner in &ranked[1..] {
        let step = asking.next(Duration::ZERO, &PeerPatience::default(), &mut suspicions, &mut pass_overs);
        let AskingStep::Ask(enquiry) = step else { panic!("{step:?}") };
        assert_eq!((&enquiry.peer, enquiry.purpose), (owner, Purpose::IfResident));
        let none = PeerAnswer::Not(PassOver::NotResident);
        asking.answered(Duration::ZERO, (owner, Purpose::IfResident), &none, &mut suspicions, &mut pass_overs);
    }
    let step = asking.next(Duration::ZERO, &PeerPatience::default(), &mut suspicions, &mut pass_overs);
    assert_eq!(step, AskingStep::Pool);
}

#[test]
fn a_silent_peer_gets_one_second_source_beside_it() {
    let (mut asking, owners) = begin(100, 20, false);
    let (mut suspicions, mut pass_overs) = (Suspicions::default(), PassOvers::default());
    let patience = PeerPatience::default();
    asking.next(Duration::ZERO, &patience, &mut suspicions, &mut pass_overs);
    let second = asking.hedge(Duration::from_secs(1), &owners[0], &patience, &suspicions).unwrap();
    assert_eq!((&second.peer, second.purpose), (&owners[1], Purpose::IfResident), "it must not fetch a second copy");
    assert_eq!(asking.hedge(Duration::from_secs(2), &owners[0], &patience, &suspicions), None);
}

#[test]
fn a_busy_node_names_those_that_have_it() {
    let owners = [id(0)];
    let mut lender = Lender::new(id(0));
    let facts =
        LocalFacts { held: HeldRange::Resident, owners: &owners, may_give: true, readers_give: true, has_room: true };
    let ask = |from| PeerAsk {
        from: id(from),
        key: key(),
        version: "v".into(),
        purpose: Purpose::Fetch,
        passed: Default::default(),
    };
    for reader in 1..=GIVES_OF_ONE_RANGE {
        assert_eq!(lender.decide(&ask(reader), facts), Lend::Give);
    }
    let Lend::Answer(PeerAnswer::Busy { holders, retry_after }) = lender.decide(&ask(9), facts) else { panic!() };
    assert!(holders.is_empty() && !retry_after.is_zero(), "none has it yet");
    lender.ended(key(), &id(1), Duration::from_millis(1), true);
    lender.ended(key(), &id(2), Duration::from_millis(1), false);
    for reader in 9..11 {
        assert_eq!(lender.decide(&ask(reader), facts), Lend::Give);
    }
    let Lend::Answer(PeerAnswer::Busy { holders, .. }) = lender.decide(&ask(12), facts) else { panic!() };
    assert_eq!(holders[..], [id(1)]);
    assert_eq!(lender.active(), GIVES_OF_ONE_RANGE);
    let only_owners = LocalFacts { readers_give: false, ..facts };
    let Lend::Answer(PeerAnswer::Busy { holders, .. }) = lender.decide(&ask(12), only_owners) else { panic!() };
    assert!(holders.is_empty());
}

#[test]
fn room_and_confinement_are_reasons() {
    let owners = [id(0)];
    let mut lender = Lender::new(id(0));
    let ask =
        PeerAsk { from: id(1), key: key(), version: "v".into(), purpose: Purpose::Fetch, passed: Default::default() };
    let facts =
        LocalFacts { held: HeldRange::Absent, owners: &owners, may_give: true, readers_give: true, has_room: false };
    let mut why = |facts| match lender.decide(&ask, facts) {
        Lend::Answer(PeerAnswer::Not(why)) => Some(why),
        _ => None,
    };
    assert_eq!(why(facts), Some(PassOver::NoRoom));
    assert_eq!(why(LocalFacts { may_give: false, ..facts }), Some(PassOver::Confined));
    assert_eq!(why(LocalFacts { owners: &[], ..facts }), Some(PassOver::NotOwner));
    assert_eq!(why(LocalFacts { held: HeldRange::FromPool, ..facts }), None, "its room is reserved");
    let waits = LocalFacts { held: HeldRange::FromPeer, ..facts };
    let decided = lender.decide(&ask, waits);
    assert!(matches!(decided, Lend::Answer(PeerAnswer::Busy { .. })), "who waits makes no other wait: {decided:?}");
}
