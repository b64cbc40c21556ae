//! The events of a case, and their frequencies.

use std::fmt;

use proptest::prelude::*;
use serde::{Deserialize, Serialize};

use super::config::{Config, Flushing, Reading, World};

/// A directory and a name in it, by index.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spot {
    pub dir: u8,
    pub name: u8,
}

impl fmt::Debug for Spot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.dir, char::from(b'a' + self.name))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exchange {
    Replace,
    NoReplace,
    Swap,
}

/// `fallocate(2)`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Allocate {
    Grow,
    KeepSize,
    PunchHole,
}

/// A change of the pool by another client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Other {
    /// Replaces the file, as an editor does.
    Put {
        at: Spot,
        len: u32,
    },
    /// Writes in place.
    WriteAt {
        at: Spot,
        offset: u32,
        len: u32,
    },
    /// Writes at the end, as a log grows.
    Append {
        at: Spot,
        len: u32,
    },
    Remove {
        at: Spot,
    },
    Mkdir {
        at: Spot,
    },
    Rename {
        from: Spot,
        to: Spot,
    },
    /// Exchanges two objects, as `mv a c; mv b a; mv c b` does.
    Swap {
        a: Spot,
        b: Spot,
    },
    Chmod {
        at: Spot,
        mode: u32,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    Create {
        at: Spot,
        mode: u32,
        hold: bool,
    },
    Open {
        at: Spot,
        write: bool,
        truncate: bool,
    },
    Close {
        handle: u8,
    },
    /// `direct`: into the content file, as the kernel does by passthrough if the file was resident at open.
    Write {
        handle: u8,
        offset: u32,
        len: u32,
        direct: bool,
    },
    Read {
        handle: u8,
        offset: u32,
        len: u32,
        direct: bool,
    },
    TruncateOpen {
        handle: u8,
        size: u32,
    },
    WriteAt {
        at: Spot,
        offset: u32,
        len: u32,
        direct: bool,
    },
    ReadAll {
        at: Spot,
    },
    /// Checks that ranges without blocks are zeros.
    Holes {
        at: Spot,
    },
    /// Punches a hole or allocates blocks, possibly beyond the end.
    Allocate {
        handle: u8,
        offset: u32,
        len: u32,
        how: Allocate,
    },
    Truncate {
        at: Spot,
        size: u32,
    },
    Rename {
        from: Spot,
        to: Spot,
        how: Exchange,
    },
    Link {
        from: Spot,
        to: Spot,
    },
    Unlink {
        at: Spot,
    },
    Mkdir {
        at: Spot,
    },
    Rmdir {
        at: Spot,
    },
    Symlink {
        at: Spot,
    },
    Chmod {
        at: Spot,
        mode: u32,
    },
    Utimes {
        at: Spot,
        secs: u32,
    },
    SetXattr {
        at: Spot,
        name: u8,
        len: u8,
    },
    RemoveXattr {
        at: Spot,
        name: u8,
    },
    Stat {
        at: Spot,
    },
    List {
        dir: u8,
    },
    /// Reads the next entries of a directory; starts again after the last entry.
    ReadDir {
        dir: u8,
        entries: u8,
    },
    Fsync {
        at: Spot,
    },
    FsyncOpen {
        handle: u8,
    },
    Stage {
        at: Spot,
    },
    Evict {
        all: bool,
        at: Spot,
        release: bool,
    },
    Flush {
        all: bool,
        at: Spot,
        wait: bool,
    },
    /// Another policy is put into force.
    Policy {
        flushing: Flushing,
        reading: Reading,
    },
    Outage {
        down: bool,
    },
    /// The n-th call to the pool from now on fails: before the pool sees it or, with `after`, once it took effect.
    Fail {
        call: u8,
        after: bool,
    },
    Other(Other),
    /// The clock is set to this many hours ahead of the right time.
    Clock {
        hours: i16,
    },
    Crash,
}

/// An object that is in the pool before the first mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Seeded {
    File { at: Spot, len: u32 },
    Dir { at: Spot },
    Link { from: Spot, to: Spot },
    Symlink { at: Spot },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Case {
    pub config: Config,
    pub seeded: Vec<Seeded>,
    pub ops: Vec<Op>,
}

/// One line for each operation.
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:?}", self.config)?;
        for seeded in &self.seeded {
            writeln!(f, "  in the pool: {seeded:?}")?;
        }
        for (number, op) in self.ops.iter().enumerate() {
            writeln!(f, "  {number}: {op:?}")?;
        }
        writeln!(f, "{REPLAY}{}", serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

/// The start of the line of a report that [`Case::reported`] reads.
const REPLAY: &str = "replay: ";

impl Case {
    /// Returns the cases that failed, from the output of their test run.
    pub fn reported(output: &str) -> serde_json::Result<Vec<Self>> {
        output.lines().filter_map(|line| line.strip_prefix(REPLAY)).map(serde_json::from_str).collect()
    }
}

fn spot() -> impl Strategy<Value = Spot> {
    (0..4u8, 0..4u8).prop_map(|(dir, name)| Spot { dir, name })
}

/// Sizes: mostly within a page or three, rarely about the size of a chunk.
fn size() -> impl Strategy<Value = u32> {
    prop_oneof![
        30 => 0..200u32,
        20 => 0..12_300u32,
        8 => prop::sample::select(vec![4095u32, 4096, 4097, 8192, 12_288]),
        1 => (1 << 20) - 5000..(1 << 20) + 5000u32,
    ]
}

fn mode() -> impl Strategy<Value = u32> {
    prop::sample::select(vec![0o644u32, 0o600, 0o755, 0o400, 0o664])
}

fn how() -> impl Strategy<Value = Exchange> {
    prop_oneof![6 => Just(Exchange::Replace), 1 => Just(Exchange::NoReplace), 2 => Just(Exchange::Swap)]
}

fn allocate() -> impl Strategy<Value = Allocate> {
    prop_oneof![1 => Just(Allocate::Grow), 1 => Just(Allocate::KeepSize), 3 => Just(Allocate::PunchHole)]
}

fn content_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (spot(), mode(), any::<bool>()).prop_map(|(at, mode, hold)| Op::Create { at, mode, hold }),
        4 => (spot(), any::<bool>(), prop::bool::weighted(0.2))
            .prop_map(|(at, write, truncate)| Op::Open { at, write, truncate }),
        3 => (0..4u8).prop_map(|handle| Op::Close { handle }),
        4 => (0..4u8, size(), size(), any::<bool>())
            .prop_map(|(handle, offset, len, direct)| Op::Write { handle, offset, len, direct }),
        3 => (0..4u8, size(), size(), any::<bool>())
            .prop_map(|(handle, offset, len, direct)| Op::Read { handle, offset, len, direct }),
        1 => (0..4u8, size()).prop_map(|(handle, size)| Op::TruncateOpen { handle, size }),
        8 => (spot(), size(), size(), any::<bool>())
            .prop_map(|(at, offset, len, direct)| Op::WriteAt { at, offset, len, direct }),
        5 => spot().prop_map(|at| Op::ReadAll { at }),
        2 => spot().prop_map(|at| Op::Holes { at }),
        2 => (0..4u8, size(), size(), allocate())
            .prop_map(|(handle, offset, len, how)| Op::Allocate { handle, offset, len, how }),
        2 => (spot(), prop_oneof![Just(0), size()]).prop_map(|(at, size)| Op::Truncate { at, size }),
        2 => spot().prop_map(|at| Op::Fsync { at }),
        1 => (0..4u8).prop_map(|handle| Op::FsyncOpen { handle }),
    ]
}

fn name_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (spot(), spot(), how()).prop_map(|(from, to, how)| Op::Rename { from, to, how }),
        3 => (spot(), spot()).prop_map(|(from, to)| Op::Link { from, to }),
        4 => spot().prop_map(|at| Op::Unlink { at }),
        4 => spot().prop_map(|at| Op::Mkdir { at }),
        2 => spot().prop_map(|at| Op::Rmdir { at }),
        1 => spot().prop_map(|at| Op::Symlink { at }),
        2 => (spot(), mode()).prop_map(|(at, mode)| Op::Chmod { at, mode }),
        1 => (spot(), any::<u32>()).prop_map(|(at, secs)| Op::Utimes { at, secs }),
        2 => (spot(), 0..2u8, 0..40u8).prop_map(|(at, name, len)| Op::SetXattr { at, name, len }),
        1 => (spot(), 0..2u8).prop_map(|(at, name)| Op::RemoveXattr { at, name }),
        2 => spot().prop_map(|at| Op::Stat { at }),
        2 => (0..4u8).prop_map(|dir| Op::List { dir }),
        6 => (0..4u8, 1..4u8).prop_map(|(dir, entries)| Op::ReadDir { dir, entries }),
    ]
}

fn operator_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        1 => spot().prop_map(|at| Op::Stage { at }),
        2 => (any::<bool>(), spot(), any::<bool>()).prop_map(|(all, at, release)| Op::Evict { all, at, release }),
        5 => (any::<bool>(), spot(), any::<bool>()).prop_map(|(all, at, wait)| Op::Flush { all, at, wait }),
    ]
}

fn flushing() -> impl Strategy<Value = Flushing> {
    prop::sample::select(vec![Flushing::Manual, Flushing::Idle, Flushing::OnClose])
}

fn reading() -> impl Strategy<Value = Reading> {
    prop::sample::select(vec![Reading::Cache, Reading::Bypass, Reading::Pin])
}

fn trouble() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (flushing(), reading()).prop_map(|(flushing, reading)| Op::Policy { flushing, reading }),
        2 => any::<bool>().prop_map(|down| Op::Outage { down }),
        4 => (1..8u8, any::<bool>()).prop_map(|(call, after)| Op::Fail { call, after }),
        1 => prop_oneof![-30_000..30_000i16, -2..2i16].prop_map(|hours| Op::Clock { hours }),
    ]
}

fn other() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (spot(), size()).prop_map(|(at, len)| Other::Put { at, len }),
        2 => (spot(), size(), size()).prop_map(|(at, offset, len)| Other::WriteAt { at, offset, len }),
        3 => (spot(), size()).prop_map(|(at, len)| Other::Append { at, len }),
        3 => spot().prop_map(|at| Other::Remove { at }),
        1 => spot().prop_map(|at| Other::Mkdir { at }),
        2 => (spot(), spot()).prop_map(|(from, to)| Other::Rename { from, to }),
        2 => (spot(), spot()).prop_map(|(a, b)| Other::Swap { a, b }),
        1 => (spot(), mode()).prop_map(|(at, mode)| Other::Chmod { at, mode }),
    ]
    .prop_map(Op::Other)
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        16 => content_op(),
        14 => name_op(),
        6 => operator_op(),
        2 => trouble(),
        1 => Just(Op::Crash),
        // Left out if no other client changes the pool.
        5 => other(),
    ]
}

fn config() -> impl Strategy<Value = Config> {
    let world = prop_oneof![
        5 => Just(World::Quiet),
        3 => Just(World::Shared),
        2 => Just(World::PowerCuts),
    ];
    let whole = prop::sample::select(vec![4u64 << 20, 4 << 20, 4096, 0]);
    let limit = prop_oneof![4 => Just(None), 1 => Just(Some(96u64 << 10)), 1 => Just(Some(2u64 << 20))];
    let few_descriptors = prop::bool::weighted(0.25);
    let arrives = prop::bool::weighted(0.04);
    let memory_tier = prop::bool::weighted(0.25);
    (world, (flushing(), reading()), any::<bool>(), whole, limit, few_descriptors, arrives, memory_tier).prop_map(
        |(world, (flushing, reading), fresh, whole_file_bytes, limit_bytes, few_descriptors, arrives, memory_tier)| {
            // After a power cut the remaining content is compared with the acknowledged content: no limit, so less
            // happens.
            let limit_bytes = limit_bytes.filter(|_| world == World::Quiet);
            // If other clients change the pool, only a view that is revalidated at each use is certain.
            let fresh = fresh || world == World::Shared;
            let arrives = arrives && world == World::Quiet && flushing == Flushing::Idle;
            Config {
                world,
                flushing,
                reading,
                fresh,
                whole_file_bytes,
                limit_bytes,
                few_descriptors,
                arrives,
                memory_tier,
            }
        },
    )
}

fn seeded() -> impl Strategy<Value = Vec<Seeded>> {
    let one = prop_oneof![
        4 => (spot(), size()).prop_map(|(at, len)| Seeded::File { at, len }),
        3 => spot().prop_map(|at| Seeded::Dir { at }),
        1 => (spot(), spot()).prop_map(|(from, to)| Seeded::Link { from, to }),
        1 => spot().prop_map(|at| Seeded::Symlink { at }),
    ];
    prop::collection::vec(one, 0..10)
}

/// A case of 5 to 40 operations.
pub fn case() -> impl Strategy<Value = Case> {
    (config(), seeded(), prop::collection::vec(op(), 5..40)).prop_map(|(config, seeded, mut ops)| {
        ops.retain(|op| config.world == World::Shared || !matches!(op, Op::Other(_)));
        Case { config, seeded, ops }
    })
}

#[cfg(test)]
mod tests {
    use proptest::strategy::ValueTree as _;
    use proptest::test_runner::TestRunner;

    use super::*;

    #[test]
    fn a_case_is_found_again_in_the_report_of_its_failure() {
        let case = super::case().new_tree(&mut TestRunner::default()).unwrap().current();
        let found = Case::reported(&format!("it failed\n{case}\nand so on")).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].to_string(), case.to_string());
    }
}
