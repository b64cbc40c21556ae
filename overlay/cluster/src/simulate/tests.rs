use std::time::Duration;

use super::*;
use crate::pass_over::PassOver;

/// 200 nodes read 16 GiB.
fn settings(scenario: ClusterScenario) -> ClusterSettings {
    ClusterSettings {
        nodes: 200,
        dataset_bytes: 16 << 30,
        scenario,
        affected: 0.05,
        order: ReadOrder::Shuffled,
        placement: Placement::All,
        cache_nodes: 0,
        node_rate: 12_500_000_000,
        node_latency: Duration::from_micros(100),
        pool_rate: 20_000_000_000,
        pool_latency: Duration::from_millis(2),
        pool_calls: 256,
        seed: 1,
    }
}

#[test]
fn each_byte_leaves_the_pool_once_when_all_nodes_start() {
    for order in [ReadOrder::Same, ReadOrder::Shuffled] {
        let outcome = simulate(&ClusterSettings { order, ..settings(ClusterScenario::Storm) }).unwrap();
        assert_eq!((outcome.pool_copies(), outcome.finished), (1.0, 200), "{order:?}");
        let all = outcome.settings.unique_bytes() * 200;
        assert!(outcome.peer_bytes < all && outcome.peer_bytes >= all - outcome.unique_bytes, "{order:?}");
        assert!(outcome.all >= outcome.bound, "nothing is faster than the bound");
        let of_one_node = outcome.most_pool_bytes_of_a_node as f64 / outcome.unique_bytes as f64;
        assert!(of_one_node < 0.05, "{order:?}: one node read {of_one_node} of the data set");
    }
}

#[test]
fn with_a_twentieth_of_the_nodes_lost_the_others_finish_and_the_pool_sends_little_more() {
    let outcome = simulate(&settings(ClusterScenario::Loss)).unwrap();
    assert_eq!(outcome.finished, 190);
    assert!(outcome.pool_copies() <= 1.05, "{}", outcome.pool_copies());
    assert!(outcome.pass_overs.of(PassOver::Gone) > 0, "{:?}", outcome.pass_overs);
}

#[test]
fn slow_nodes_and_restarts_stop_no_job() {
    let slow = simulate(&settings(ClusterScenario::Slow)).unwrap();
    assert_eq!(slow.finished, 200);
    assert!(slow.slow_nodes.unwrap() > slow.all);
    // Long enough for restarts in the middle.
    let slower_network = ClusterSettings { node_rate: 1_000_000_000, ..settings(ClusterScenario::Rolling) };
    let rolling = simulate(&slower_network).unwrap();
    assert_eq!(rolling.finished, 200);
    assert!(rolling.pass_overs.of(PassOver::Gone) > 0, "{:?}", rolling.pass_overs);
}

#[test]
fn the_same_settings_give_the_same_result() {
    let twice = [(); 2].map(|()| simulate(&settings(ClusterScenario::Loss)).unwrap());
    let [one, other] = twice.map(|outcome| {
        let points: Vec<_> = outcome.timeline.points().to_vec();
        (outcome.all, outcome.pool_bytes, outcome.events, outcome.pass_overs, points)
    });
    assert_eq!(one, other);
    let another = simulate(&ClusterSettings { seed: 2, ..settings(ClusterScenario::Loss) }).unwrap();
    assert_ne!(another.all, one.0);
}

#[test]
fn without_peers_each_node_reads_the_pool() {
    let alone = ClusterSettings { placement: Placement::Pool, nodes: 20, ..settings(ClusterScenario::Storm) };
    let outcome = simulate(&alone).unwrap();
    assert_eq!((outcome.pool_copies(), outcome.peer_bytes), (20.0, 0));
}

#[test]
fn dedicated_nodes_read_the_pool_for_all() {
    let dedicated = ClusterSettings {
        placement: Placement::Dedicated,
        nodes: 50,
        cache_nodes: 10,
        ..settings(ClusterScenario::Storm)
    };
    let outcome = simulate(&dedicated).unwrap();
    assert_eq!((outcome.pool_copies(), outcome.finished), (1.0, 50));
}

#[test]
fn large_data_sets_have_large_pieces() {
    let large = ClusterSettings { nodes: 1000, dataset_bytes: 1_000_000_000_000, ..settings(ClusterScenario::Storm) };
    assert!(large.pieces() * 1000 <= READS_MAX && large.pieces() > 200, "{}", large.pieces());
    assert!(large.unique_bytes() >= large.dataset_bytes);
    assert_eq!(settings(ClusterScenario::Storm).piece_bytes(), RANGE_BYTES);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let good = settings(ClusterScenario::Storm);
    for bad in [
        ClusterSettings { nodes: 0, ..good.clone() },
        ClusterSettings { dataset_bytes: 0, ..good.clone() },
        ClusterSettings { pool_calls: 0, ..good.clone() },
        ClusterSettings { affected: 1.0, ..good.clone() },
        ClusterSettings { dataset_bytes: u64::MAX, ..good.clone() },
        ClusterSettings { dataset_bytes: 1 << 50, pool_rate: 1, ..good.clone() },
        ClusterSettings { placement: Placement::Dedicated, ..good.clone() },
    ] {
        assert!(simulate(&bad).is_err(), "{bad:?}");
    }
    // The largest that is allowed overflows nothing.
    let largest = ClusterSettings { nodes: 10_000, dataset_bytes: DATASET_BYTES_MAX, ..good };
    assert_eq!(largest.pieces(), 64);
    let small = ClusterSettings { nodes: 100, ..largest };
    assert!(simulate(&small).is_ok());
}
