//! The kill sweep over a directory pool. Over others it is in `pools.rs`.

use forebay_tests::mount::{Mount, Options, alone};
use forebay_tests::sweep::{POLICY, sweep};

/// SEMANTICS 1: "What `fsync` acknowledged survives `kill -9` of every process of Forebay."
/// SEMANTICS 2: "Where the policy says `on-close`, what `close` acknowledged is in the pool."
/// SEMANTICS 3: "What was written before `forebay flush --wait` began is in the pool when it returns 0."
/// SEMANTICS 11: "A worker that dies is replaced, and operations wait for it: they do not fail."
#[test]
fn nothing_is_lost_or_invented_by_kill_9_at_random_points() {
    let _alone = alone();
    sweep(&Mount::new(Options::policy(POLICY)), 200, true, None);
}
