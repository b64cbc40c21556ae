//! Properties that every policy must keep, tested by random operations against a model; and the purpose of S3-FIFO.

use std::collections::{HashMap, HashSet, VecDeque};

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Op {
    Insert(u64, u64),
    Access(u64),
    Resize(u64, u64),
    Remove(u64),
    Protect(u64),
    Release(u64),
    Evict,
}

fn op() -> impl Strategy<Value = Op> {
    // Few keys, so that they collide; but more than the refusals after which S3-FIFO changes the queue.
    let key = 0u64..200;
    let bytes = prop_oneof![4 => 0u64..50, 2 => 50u64..500, 1 => Just(5000u64)];
    prop_oneof![
        6 => (key.clone(), bytes.clone()).prop_map(|(k, b)| Op::Insert(k, b)),
        4 => key.clone().prop_map(Op::Access),
        1 => (key.clone(), bytes).prop_map(|(k, b)| Op::Resize(k, b)),
        1 => key.clone().prop_map(Op::Remove),
        3 => key.clone().prop_map(Op::Protect),
        1 => key.prop_map(Op::Release),
        4 => Just(Op::Evict),
    ]
}

/// The resident contents with their sizes, and those that must stay.
#[derive(Default)]
struct Model {
    sizes: HashMap<u64, u64>,
    protected: HashSet<u64>,
}

impl Model {
    fn apply(&mut self, policy: &mut dyn Evictor, op: Op) {
        match op {
            Op::Insert(key, bytes) => {
                policy.insert(key, bytes);
                self.sizes.insert(key, bytes);
            }
            Op::Access(key) => policy.access(key),
            Op::Resize(key, bytes) => {
                policy.resize(key, bytes);
                self.sizes.entry(key).and_modify(|size| *size = bytes);
            }
            Op::Remove(key) => {
                policy.remove(key);
                self.sizes.remove(&key);
            }
            Op::Protect(key) => drop(self.protected.insert(key)),
            Op::Release(key) => drop(self.protected.remove(&key)),
            Op::Evict => self.evict(policy),
        }
        assert_eq!(policy.len(), self.sizes.len());
        assert_eq!(policy.bytes(), self.sizes.values().sum::<u64>());
        assert_eq!(policy.is_empty(), self.sizes.is_empty());
    }

    fn evict(&mut self, policy: &mut dyn Evictor) {
        let mut allowed = None;
        let mut asked = 0;
        let victim = policy.evict(&mut |key| {
            asked += 1;
            assert!(self.sizes.contains_key(&key), "{key} is not here");
            assert_eq!(allowed, None, "asked on after a yes");
            if !self.protected.contains(&key) {
                allowed = Some(key);
            }
            allowed.is_some()
        });
        assert_eq!(victim, allowed, "the key that was allowed is the victim");
        assert!(asked <= 10 * self.sizes.len(), "{asked} questions about {} contents", self.sizes.len());
        match victim {
            Some(key) => drop(self.sizes.remove(&key)),
            None => assert!(self.sizes.keys().all(|key| self.protected.contains(key)), "something could have gone"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_policy_keeps_its_books_and_finds_what_may_go(
        capacity in prop_oneof![Just(0u64), 1u64..10_000],
        ops in prop::collection::vec(op(), 0..800),
    ) {
        for name in names() {
            let mut policy = by_name(name, capacity).expect("a listed policy");
            let mut model = Model::default();
            for op in ops.clone() {
                model.apply(policy.as_mut(), op);
            }
            model.protected.clear();
            while !model.sizes.is_empty() {
                model.evict(policy.as_mut());
            }
            prop_assert_eq!((policy.len(), policy.bytes()), (0, 0));
        }
    }
}

#[test]
fn unknown_names_give_no_policy() {
    assert!(by_name("clairvoyant", 1).is_none());
}

#[test]
fn nothing_is_evicted_from_an_empty_policy() {
    for name in names() {
        assert_eq!(by_name(name, 100).and_then(|mut policy| policy.evict(&mut |_| true)), None);
    }
}

/// The baseline: first in, first out.
#[derive(Default)]
struct Fifo {
    order: VecDeque<u64>,
    sizes: HashMap<u64, u64>,
}

impl Evictor for Fifo {
    fn insert(&mut self, key: u64, bytes: u64) {
        if self.sizes.insert(key, bytes).is_none() {
            self.order.push_back(key);
        }
    }
    fn access(&mut self, _key: u64) {}
    fn resize(&mut self, key: u64, bytes: u64) {
        self.sizes.entry(key).and_modify(|size| *size = bytes);
    }
    fn remove(&mut self, key: u64) {
        self.sizes.remove(&key);
        self.order.retain(|queued| *queued != key);
    }
    fn evict(&mut self, may_evict: &mut dyn FnMut(u64) -> bool) -> Option<u64> {
        let at = self.order.iter().position(|key| may_evict(*key))?;
        let key = self.order.remove(at)?;
        self.sizes.remove(&key);
        Some(key)
    }
    fn len(&self) -> usize {
        self.sizes.len()
    }
    fn bytes(&self) -> u64 {
        self.sizes.values().sum()
    }
}

const CAPACITY: u64 = 1000;

/// A set of 600 contents of one byte, read over and over. After each of its reads follows a content that is read once.
fn loop_with_scan() -> impl Iterator<Item = u64> {
    (0..60_000u64).flat_map(|step| [step % 600, 1_000_000 + step])
}

/// Returns the share of requests that hit.
fn hit_ratio(policy: &mut dyn Evictor, trace: impl Iterator<Item = u64>) -> f64 {
    let (mut present, mut hits, mut reads) = (HashSet::new(), 0u32, 0u32);
    for key in trace {
        reads += 1;
        if present.contains(&key) {
            hits += 1;
            policy.access(key);
            continue;
        }
        while present.len() as u64 >= CAPACITY {
            let victim = policy.evict(&mut |_| true).expect("a full cache has a victim");
            assert!(present.remove(&victim));
        }
        present.insert(key);
        policy.insert(key, 1);
    }
    f64::from(hits) / f64::from(reads)
}

#[test]
fn a_scan_does_not_push_a_loop_out_of_s3fifo_as_it_does_out_of_fifo() {
    let fifo = hit_ratio(&mut Fifo::default(), loop_with_scan());
    let s3fifo = hit_ratio(&mut S3Fifo::new(CAPACITY), loop_with_scan());
    // At most half of the reads can hit.
    assert!(s3fifo > 0.45 && fifo < 0.30, "S3-FIFO {s3fifo}, FIFO {fifo}");
}

/// If most of the fast pool is leased, the policy does not walk through all leased contents for each victim.
#[test]
fn what_must_stay_is_not_asked_again_for_every_victim() {
    const LEASED: u64 = 20_000;
    const VICTIMS: u64 = 500;
    let mut policy = by_name(DEFAULT, LEASED * 100).expect("the default is listed");
    (0..LEASED + VICTIMS).for_each(|key| policy.insert(key, 100));
    let mut asked = 0;
    for _ in 0..VICTIMS {
        let victim = policy.evict(&mut |key| {
            asked += 1;
            key >= LEASED
        });
        assert!(victim.is_some_and(|key| key >= LEASED));
    }
    assert!(asked <= VICTIMS * 100 + 2 * LEASED, "{asked} questions for {VICTIMS} victims");
}
