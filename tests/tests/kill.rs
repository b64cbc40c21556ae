//! The kill sweep over a directory pool. `pools.rs` has the sweeps over other pools.

use forebay_tests::mount::{Mount, Options, alone};
use forebay_tests::sweep::{POLICY, sweep};

/// `make nightly` kills more.
const KILLS: u64 = 60;

/// SEMANTICS 1: "Changes that `fsync` acknowledged survive `kill -9` of every process of Forebay."
/// SEMANTICS 2: "Where the policy says `on-close`, changes that `close` acknowledged are in the pool."
/// SEMANTICS 3: "Changes that were made before `forebay flush --wait` began are in the pool when it returns 0."
/// SEMANTICS 11: "If a worker dies, another one replaces it. Operations wait for the new worker and do not fail."
#[test]
fn nothing_is_lost_or_invented_by_kill_9_at_random_points() {
    let _alone = alone();
    sweep(&Mount::new(Options::policy(POLICY)), KILLS, true, None);
}
