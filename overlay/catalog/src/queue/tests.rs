use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::{Durability, Ino, NameRecord};
use forebay_backends::FileKind;

const PARENT: Ino = Ino(1);

fn differing(user: u32) -> NameRecord {
    NameRecord { here: Some((Ino(u64::from(user) + 10), FileKind::File)), pool: None, pending: Vec::new() }
}

fn mark(catalog: &Catalog, name: u8, user: u32, was: bool, is: bool) {
    let record = |differs| if differs { differing(user) } else { NameRecord::default() };
    let mut batch = catalog.batch();
    batch.put_name(PARENT, &[b'a' + name], &record(was), &record(is), user);
    catalog.write(batch).unwrap();
}

fn all_of(catalog: &Catalog, user: u32, lane: Lane) -> Vec<Intent> {
    let taken = catalog.queue_take(user, lane, 0, u64::MAX, 1000).unwrap();
    assert!(taken.is_sorted_by_key(|entry| entry.slot.at_us));
    taken.into_iter().map(|entry| entry.intent).collect()
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Differ { name: u8, user: u32 },
    Equal { name: u8 },
    Fail { name: u8 },
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0u8..6, 0u32..3).prop_map(|(name, user)| Step::Differ { name, user }),
        3 => (0u8..6).prop_map(|name| Step::Equal { name }),
        3 => (0u8..6).prop_map(|name| Step::Fail { name }),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Compares the queue with a plain list for each user and lane: every intent waits in one slot, in the order of
    /// time.
    #[test]
    fn every_intent_waits_once_in_order(steps in prop::collection::vec(step(), 1..50)) {
        let dir = tempfile::tempdir().unwrap();
        let mut catalog = Catalog::open(&dir.path().join("catalog"), Durability::Process).unwrap();
        let mut model: BTreeMap<(u32, Lane), Vec<u8>> = BTreeMap::new();
        let mut user_of: BTreeMap<u8, u32> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Differ { name, user } if !user_of.contains_key(&name) => {
                    mark(&catalog, name, user, false, true);
                    model.entry((user, Lane::Fresh)).or_default().push(name);
                    user_of.insert(name, user);
                }
                Step::Equal { name } => if let Some(user) = user_of.remove(&name) {
                    mark(&catalog, name, user, true, false);
                    model.values_mut().for_each(|names| names.retain(|n| *n != name));
                },
                Step::Fail { name } => if let Some(user) = user_of.get(&name) {
                    let intent = Intent::Name(PARENT, [b'a' + name].as_slice().into());
                    let entry = catalog.queued_as(&intent).unwrap().unwrap();
                    let slot = QueueSlot { user: *user, lane: Lane::Later, at_us: catalog.queue_unique() };
                    let failures = entry.wait.failures + 1;
                    let mut batch = catalog.batch();
                    batch.requeue(&entry, slot, Wait { failures, ..entry.wait }).unwrap();
                    catalog.write(batch).unwrap();
                    prop_assert!(!catalog.is_queued_as(&entry).unwrap());
                    prop_assert_eq!(catalog.queued_as(&intent).unwrap().unwrap().wait.failures, failures);
                    model.values_mut().for_each(|names| names.retain(|n| *n != name));
                    model.entry((*user, Lane::Later)).or_default().push(name);
                },
                Step::Restart => {
                    drop(catalog);
                    catalog = Catalog::open(&dir.path().join("catalog"), Durability::Process).unwrap();
                }
                Step::Differ { .. } => {}
            }
            for user in 0..3 {
                for lane in [Lane::Fresh, Lane::Later, Lane::Manual] {
                    let want = model.get(&(user, lane)).cloned().unwrap_or_default();
                    let want: Vec<Intent> =
                        want.iter().map(|n| Intent::Name(PARENT, [b'a' + n].as_slice().into())).collect();
                    prop_assert_eq!(all_of(&catalog, user, lane), want);
                }
            }
            let heads = catalog.queue_heads(|_, _| 0).unwrap();
            prop_assert!(heads.is_complete);
            let heads: Vec<(u32, Lane)> = heads.slots.iter().map(|slot| (slot.user, slot.lane)).collect();
            let want: Vec<(u32, Lane)> =
                model.iter().filter(|(_, names)| !names.is_empty()).map(|(lane, _)| *lane).collect();
            prop_assert_eq!(heads, want);
        }
    }
}

#[test]
fn all_that_waited_is_due_after_a_restart_and_the_clock_never_goes_back() {
    let dir = tempfile::tempdir().unwrap();
    let catalog = Catalog::open(&dir.path().join("catalog"), Durability::Process).unwrap();
    catalog.set_queue_delay(Duration::from_secs(3600));
    mark(&catalog, 0, 7, false, true);
    let now = catalog.queue_now();
    assert!(catalog.queue_take(7, Lane::Fresh, 0, now, 10).unwrap().is_empty());
    drop(catalog);
    let catalog = Catalog::open(&dir.path().join("catalog"), Durability::Process).unwrap();
    assert!(catalog.queue_now() > now);
    assert_eq!(catalog.queue_take(7, Lane::Fresh, 0, catalog.queue_now(), 10).unwrap().len(), 1);
}

/// A daemon may have stored times near the end of the clock: they were taken from the policy without a limit.
#[test]
fn a_time_that_never_comes_does_not_stop_the_clock_and_its_entry_is_due_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Catalog::open(&dir.path().join("catalog"), Durability::Process).unwrap();
    let catalog = open();
    let times = [u64::MAX, u64::MAX - 1, NEVER_US, NEVER_US + 1, 3_600_000_000];
    let intents: Vec<Intent> =
        (0..times.len() as u8).map(|name| Intent::Name(PARENT, [b'a' + name].as_slice().into())).collect();
    for (name, at_us) in times.into_iter().enumerate() {
        mark(&catalog, name as u8, 7, false, true);
        let entry = catalog.queued_as(&intents[name]).unwrap().unwrap();
        let mut batch = catalog.batch();
        let slot = QueueSlot { user: 7, lane: Lane::Later, at_us };
        batch.requeue(&entry, slot, Wait { since_us: at_us, failures: 3 }).unwrap();
        catalog.write(batch).unwrap();
    }
    drop(catalog);
    for _ in 0..2 {
        let catalog = open();
        assert!((times[4]..times[4] + 1_000_000_000_000).contains(&catalog.queue_now()), "{}", catalog.queue_now());
        let due = catalog.queue_take(7, Lane::Later, 0, catalog.queue_unique(), 10).unwrap();
        assert_eq!(due.len(), intents.len(), "{due:?}");
        assert!(due.iter().all(|entry| entry.wait.failures == 3 && entry.wait.since_us <= entry.slot.at_us), "{due:?}");
        assert!(intents.iter().all(|intent| due.iter().any(|entry| entry.intent == *intent)), "{due:?}");
        mark(&catalog, 20, 7, false, true);
        mark(&catalog, 20, 7, true, false);
    }
}

/// A large change gets its entries when it begins, and is written later.
#[test]
fn an_entry_that_is_written_later_than_its_time_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let catalog = Catalog::open(&dir.path().join("catalog"), Durability::Process).unwrap();
    mark(&catalog, 0, 7, false, true);
    let heads = catalog.queue_heads(|_, _| catalog.queue_now() + 1).unwrap();
    assert_eq!(heads, QueueHeads { slots: Vec::new(), is_complete: false });
    let heads = catalog.queue_heads(|_, _| 0).unwrap();
    assert_eq!((heads.slots.len(), heads.is_complete), (1, true));
    mark(&catalog, 0, 7, true, false);
    catalog.queue_take(7, Lane::Fresh, 0, u64::MAX, 10).unwrap();
    for _ in 0..2 {
        assert_eq!(catalog.queue_heads(|_, _| 0).unwrap(), QueueHeads { slots: Vec::new(), is_complete: true });
    }
    assert!(catalog.queue.users.lock().is_empty(), "each look would scan for a user who has nothing");
}

#[test]
fn the_longest_wait_is_a_hundred_years() {
    let years = |years: u64| Duration::from_secs(years * 365 * 86_400);
    assert_eq!(Catalog::queue_after(5, Duration::from_secs(1)), 1_000_005);
    assert_eq!(Catalog::queue_after(5, years(1000)), Catalog::queue_after(5, years(100)));
    assert_eq!(Catalog::queue_after(5, Duration::MAX), Catalog::queue_after(5, years(100)));
    assert_eq!(Catalog::queue_after(u64::MAX - 1, Duration::MAX), u64::MAX);
}
