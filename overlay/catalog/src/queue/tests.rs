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
            let heads: Vec<(u32, Lane)> = heads.iter().map(|slot| (slot.user, slot.lane)).collect();
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
