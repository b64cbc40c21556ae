//! Suspicions, against a model that remembers all that happened.

use super::*;

/// What happens to one member.
#[derive(Debug, Clone, Copy)]
enum Happening {
    Asked,
    Answered,
    PassedOver(PassOver),
}

fn happening() -> impl Strategy<Value = (u64, Happening)> {
    let what = prop_oneof![
        3 => Just(Happening::Asked),
        1 => Just(Happening::Answered),
        4 => prop::sample::select(PassOver::ALL.to_vec()).prop_map(Happening::PassedOver),
    ];
    (prop_oneof![0u64..300, 0u64..70_000], what)
}

proptest! {
    /// A member that is gone, or slow three times in a row, is not asked for 1 s. Then one request decides: each further failure
    /// doubles the time, up to 60 s; any answer ends it.
    #[test]
    fn suspicions_follow_the_rules_that_operators_are_told(happenings in prop::collection::vec(happening(), 1..80)) {
        let (member, other) = (id(1), id(2));
        let mut suspicions = Suspicions::default();
        let (mut slow, mut length, mut until, mut is_probed) = (0, 0u64, 0u64, false);
        let mut now = 0;
        for (later, what) in happenings {
            now += later;
            let at = Duration::from_millis(now);
            match what {
                Happening::Asked => {
                    let expected = now >= until;
                    if expected && length > 0 {
                        (until, is_probed) = (now + length, true);
                    }
                    prop_assert_eq!(suspicions.admits(at, &member), expected, "at {}", now);
                }
                Happening::Answered => {
                    suspicions.answered(&member);
                    (slow, length, until, is_probed) = (0, 0, 0, false);
                }
                Happening::PassedOver(why) => {
                    suspicions.passed_over(at, &member, why);
                    let fails = match why {
                        PassOver::Suspected => continue,
                        PassOver::Gone | PassOver::Damaged => true,
                        PassOver::Slow => {
                            slow += 1;
                            length > 0 || slow >= 3
                        }
                        _ => {
                            (slow, length, until, is_probed) = (0, 0, 0, false);
                            false
                        }
                    };
                    // Requests that failed together with the one that made it suspected change nothing.
                    if fails && (length == 0 || is_probed || now >= until) {
                        length = if length == 0 { 1_000 } else { (length * 2).min(60_000) };
                        (until, is_probed) = (now + length, false);
                    }
                }
            }
            prop_assert_eq!(suspicions.is_suspected(&member), length > 0);
            prop_assert!(suspicions.admits(at, &other), "members are suspected one by one");
        }
    }
}

#[test]
fn a_member_that_left_is_forgotten() {
    let mut suspicions = Suspicions::default();
    suspicions.passed_over(Duration::ZERO, &id(1), PassOver::Gone);
    assert!(suspicions.is_suspected(&id(1)) && !suspicions.trusts_all());
    suspicions.retain(|member| *member != id(1));
    assert!(suspicions.trusts_all());
}
