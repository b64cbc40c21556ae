use super::*;

const MIB: u64 = 1 << 20;
const USER: u32 = 1000;

fn facts() -> PacingFacts {
    PacingFacts {
        sent_bytes: 0,
        is_flushing: true,
        pool_is_down: false,
        room_bytes: 1000 * MIB,
        margin_bytes: 250 * MIB,
        has_backlog: true,
        lag: Duration::ZERO,
        max_lag: None,
    }
}

#[test]
fn writers_may_write_what_the_flush_sends_with_half_of_the_margin_left() {
    let rate = |room: u64| PacingFacts { room_bytes: room * MIB, ..facts() }.rate(20e6);
    assert_eq!(rate(250), None);
    assert_eq!(rate(125), Some(20e6));
    assert!(rate(249).unwrap() > 2e9);
    // Without any room left nothing is allowed, and before that the rate falls with the room.
    assert_eq!(rate(0), Some(0.0));
    assert_eq!(PacingFacts { room_bytes: 0, margin_bytes: 0, ..facts() }.rate(20e6), None);
    let rates: Vec<f64> = (1..250).map(|room| rate(room).unwrap()).collect();
    assert!(rates.windows(2).all(|two| two[0] < two[1]), "{rates:?}");
}

#[test]
fn writers_are_not_slowed_for_changes_that_are_not_to_be_sent() {
    let scarce = PacingFacts { room_bytes: MIB, ..facts() };
    assert!(scarce.rate(20e6).is_some());
    assert_eq!(PacingFacts { has_backlog: false, ..scarce }.rate(20e6), None);
}

#[test]
fn a_flush_that_is_late_slows_writers_however_much_room_there_is() {
    let late = |secs: u64| {
        let (lag, max_lag) = (Duration::from_secs(secs), Some(Duration::from_secs(100)));
        PacingFacts { lag, max_lag, ..facts() }.rate(20e6)
    };
    assert_eq!([late(0), late(50)], [None; 2]);
    assert_eq!(late(75), Some(20e6));
    assert_eq!([late(100), late(1000)], [Some(0.0); 2]);
}

/// The user with the least room decides: of the fast pool, or of its share.
#[test]
fn a_user_whose_share_is_nearly_used_up_is_slowed_alone() {
    let pacer = PacerState { flush_rate: Some(20e6), ..PacerState::default() };
    assert_eq!(pacer.rate_of(None), None);
    assert_eq!(pacer.rate_of(Some(0.5)), Some(20e6));
    let slowed = PacerState { rate: Some(5e6), ..pacer };
    assert_eq!([slowed.rate_of(None), slowed.rate_of(Some(0.5))], [Some(5e6); 2]);
    assert_eq!(slowed.rate_of(Some(0.0)), Some(SLOWEST));
}

/// A pool takes 20 MB/s, and a program writes as fast as it may: the room settles in the margin, and the writes
/// go on at the rate of the pool, none waiting for long.
#[test]
fn the_room_settles_and_no_write_waits_for_long() {
    let (mut pacer, begin) = (PacerState::default(), Instant::now());
    let (mut now, mut sent, mut written) = (begin, 0.0, 0.0);
    let limit = 1000.0 * MIB as f64;
    let (mut longest, mut rates) = (Duration::ZERO, Vec::new());
    while now < begin + Duration::from_secs(120) {
        let room_bytes = (limit - (written - sent)) as u64;
        assert!(room_bytes > 40 * MIB, "after {:?}", now - begin);
        if pacer.is_look_due(now) {
            pacer.look(now, PacingFacts { sent_bytes: sent as u64, room_bytes, ..facts() });
        }
        let pause = pacer.pause(now, USER, MIB, None);
        longest = longest.max(pause);
        // The fast pool takes 500 MB/s.
        let step = pause + Duration::from_millis(2);
        now += step;
        written += MIB as f64;
        sent = f64::min(sent + 20e6 * step.as_secs_f64(), written);
        rates.extend(pacer.rate.filter(|_| now > begin + Duration::from_secs(60)));
    }
    assert!(longest < Duration::from_millis(200), "{longest:?}");
    assert!(rates.iter().all(|rate| (18e6..22e6).contains(rate)), "{rates:?}");
}

/// While the pool does not answer, writers may use up the room, ever more slowly.
#[test]
fn without_the_pool_the_room_lasts() {
    let (mut pacer, begin) = (PacerState::default(), Instant::now());
    pacer.look(begin, facts());
    pacer.look(begin + LOOK_EVERY, PacingFacts { sent_bytes: 2 * MIB, ..facts() });
    let (mut now, mut room) = (begin + LOOK_EVERY, 250 * MIB);
    while now < begin + Duration::from_secs(60) {
        if pacer.is_look_due(now) {
            pacer.look(now, PacingFacts { pool_is_down: true, sent_bytes: 2 * MIB, room_bytes: room, ..facts() });
        }
        now += pacer.pause(now, USER, MIB / 8, None) + Duration::from_micros(100);
        room = room.checked_sub(MIB / 8).unwrap();
    }
    assert!(room > 20 * MIB, "{room}");
    assert!(pacer.rate.is_some(), "an outage is no reason to stop slowing");
}

#[test]
fn writers_are_not_slowed_for_a_flush_that_sends_nothing() {
    let (mut pacer, begin) = (PacerState::default(), Instant::now());
    let scarce = PacingFacts { room_bytes: MIB, ..facts() };
    let mut look = |after: Duration, facts| {
        pacer.look(begin + after, facts);
        pacer.rate
    };
    let every = |from: u32, to: u32| (from..to).map(|at| LOOK_EVERY * at);
    let looks = STALLED_MAX.div_duration_f64(LOOK_EVERY) as u32;
    // How fast it sends is not known at first.
    assert!(every(0, looks).all(|after| look(after, scarce).is_some_and(|rate| rate < 1e6)));
    assert!(every(looks + 2, 2 * looks).all(|after| look(after, scarce).is_none()));
    let sent = PacingFacts { sent_bytes: MIB, ..scarce };
    assert!(look(LOOK_EVERY * 2 * looks, sent).is_some());
    assert!(every(2 * looks + 1, 3 * looks).all(|after| look(after, sent).is_some()));
    assert!(every(3 * looks + 2, 4 * looks).all(|after| look(after, sent).is_none()));
}

#[test]
fn what_the_flush_did_while_nobody_wrote_says_nothing_about_its_rate() {
    let (mut pacer, begin) = (PacerState::default(), Instant::now());
    pacer.look(begin, facts());
    pacer.look(begin + LOOK_EVERY, PacingFacts { sent_bytes: 2 * MIB, ..facts() });
    let known = pacer.flush_rate;
    pacer.look(begin + Duration::from_secs(20), PacingFacts { sent_bytes: 3 * MIB, ..facts() });
    assert!(known.is_some() && pacer.flush_rate == known);
}

#[test]
fn the_writers_of_a_user_wait_for_each_other() {
    let mut pacer = PacerState { rate: Some(10.0 * MIB as f64), flush_rate: Some(1e6), ..PacerState::default() };
    let now = Instant::now();
    let pauses: Vec<u128> = (0..4).map(|_| pacer.pause(now, USER, MIB, None).as_millis()).collect();
    assert_eq!(pauses, [0, 100, 200, 300]);
    assert_eq!(pacer.pause(now, USER + 1, MIB, None), Duration::ZERO, "another user does not wait for them");
    assert_eq!(pacer.pause(now, USER, 100 * MIB, None).as_millis(), 400);
    assert_eq!(pacer.pause(now, USER, MIB, None), PAUSE_MAX);
    // As many users as there may be leave no trace once their turns have come.
    for user in 0..10 * TURNS as u32 {
        let at = now + PAUSE_MAX * (1 + user);
        pacer.pause(at, user, MIB, None);
    }
    assert!(pacer.allowed_until.len() <= TURNS);
}
