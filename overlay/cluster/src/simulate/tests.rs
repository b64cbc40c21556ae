use std::time::{Duration, Instant};

use super::*;

fn settings(nodes: u32, scenario: ClusterScenario) -> ClusterSettings {
    ClusterSettings {
        nodes,
        dataset_bytes: 64 << 30,
        scenario,
        affected: 0.05,
        order: ReadOrder::Shuffled,
        placement: Placement::All,
        cache_nodes: 0,
        node_rate: 12_500_000_000,
        node_latency: Duration::from_micros(100),
        pool_rate: 50_000_000_000,
        pool_latency: Duration::from_millis(2),
        pool_calls: 256,
        seed: 1,
    }
}

#[test]
fn probe() {
    for scenario in ClusterScenario::ALL {
        for order in [ReadOrder::Same, ReadOrder::Shuffled] {
            let began = Instant::now();
            let mut s = ClusterSettings { order, ..settings(1000, scenario) };
            if std::env::var("BIG").is_ok() { s.dataset_bytes = 1_000_000_000_000; }
            let r = simulate(&s).unwrap();
            eprintln!("{:?} {:?}: copies {:.4} time {:?} bound {:?} ratio {:.3} finished {} events {} hedges {} {:?} slow {:?} wall {:?}", scenario, order, r.pool_copies(), r.all, r.bound, r.of_bound(), r.finished, r.events, r.hedges, r.pass_overs.iter().collect::<Vec<_>>(), r.slow_nodes, began.elapsed());
        }
    }
}
