//! `forebay simulate cluster`

mod plot;

use std::collections::BTreeMap;
use std::time::Duration;

use forebay_cluster::simulate::{ClusterOutcome, ClusterScenario, ClusterSettings, ReadOrder, simulate};
use forebay_daemon::{Failure, FailureKind};
use serde_json::json;

use crate::args::SimulateClusterArgs;
use crate::exit::Exit;
use crate::output::Output;
use crate::values::bytes;

pub fn run(args: &SimulateClusterArgs, output: &Output) -> Result<Exit, Failure> {
    let scenarios = match args.scenario.is_empty() {
        true => ClusterScenario::ALL.to_vec(),
        false => args.scenario.clone(),
    };
    let all: Vec<ClusterSettings> = scenarios.into_iter().map(|scenario| settings(args, scenario)).collect();
    // Each scenario is independent of the others.
    let outcomes: Option<Result<Vec<ClusterOutcome>, String>> = std::thread::scope(|scope| {
        let threads: Vec<_> = all.iter().map(|settings| scope.spawn(move || simulate(settings))).collect();
        threads.into_iter().map(|thread| thread.join().ok()).collect()
    });
    let outcomes = outcomes.unwrap_or_else(|| Err("the simulation failed".into()));
    let outcomes = outcomes.map_err(|why| Failure::new(FailureKind::Usage, why))?;
    match output.json {
        true => outcomes.iter().for_each(|outcome| show_json(outcome, output)),
        false => show(&outcomes, output),
    }
    if let Some(file) = &args.plot {
        super::write_plot(file, plot::draw(&outcomes))?;
    }
    Ok(Exit::Done)
}

fn settings(args: &SimulateClusterArgs, scenario: ClusterScenario) -> ClusterSettings {
    ClusterSettings {
        nodes: args.nodes,
        dataset_bytes: args.bytes.as_u64(),
        scenario,
        affected: args.affected,
        order: args.order.into(),
        placement: args.placement.into(),
        cache_nodes: args.cache_nodes,
        node_rate: args.network.bytes_per_sec,
        node_latency: args.network.latency,
        pool_rate: args.pool.bytes_per_sec,
        pool_latency: args.pool.latency,
        pool_calls: args.pool_calls,
        seed: args.seed,
    }
}

fn show_json(outcome: &ClusterOutcome, output: &Output) {
    let settings = &outcome.settings;
    let pass_overs: BTreeMap<&str, u64> = outcome.pass_overs.iter().map(|(why, count)| (why.as_str(), count)).collect();
    output.json(&json!({
        "scenario": settings.scenario,
        "nodes": settings.nodes,
        "affected": settings.affected,
        "order": settings.order,
        "placement": settings.placement,
        "seed": settings.seed,
        "piece_bytes": settings.piece_bytes(),
        "unique_bytes": outcome.unique_bytes,
        "pool_bytes": outcome.pool_bytes,
        "pool_copies": outcome.pool_copies(),
        "peer_bytes": outcome.peer_bytes,
        "jobs_finished": outcome.finished,
        "seconds": {
            "half": outcome.half.as_secs_f64(),
            "most": outcome.most.as_secs_f64(),
            "all": outcome.all.as_secs_f64(),
            "slow_nodes": outcome.slow_nodes.map(|time| time.as_secs_f64()),
            "bound": outcome.bound.as_secs_f64(),
        },
        "of_bound": outcome.of_bound(),
        "most_pool_bytes_of_a_node": outcome.most_pool_bytes_of_a_node,
        "passed_over": pass_overs,
        "hedges": outcome.hedges,
        "events": outcome.events,
    }));
}

fn show(outcomes: &[ClusterOutcome], output: &Output) {
    let Some(first) = outcomes.first() else { return };
    let settings = &first.settings;
    output.line(format!(
        "{} nodes read {} each, in {} order, placement {}; each node has {}/s, the pool {}/s for all",
        settings.nodes,
        bytes(first.unique_bytes),
        if settings.order == ReadOrder::Same { "the same" } else { "its own" },
        settings.placement.as_str(),
        bytes(settings.node_rate),
        bytes(settings.pool_rate),
    ));
    let head =
        ["scenario", "pool sent", "copies", "half done", "95 %", "all", "bound", "of bound", "jobs", "passed over"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for outcome in outcomes {
        let seconds = |time: Duration| format!("{:.2} s", time.as_secs_f64());
        let mut why: Vec<String> = outcome.pass_overs.iter().map(|(why, count)| format!("{why} {count}")).collect();
        if let Some(slow) = outcome.slow_nodes {
            why.insert(0, format!("slow nodes done in {}", seconds(slow)));
        }
        rows.push(vec![
            outcome.settings.scenario.as_str().to_owned(),
            bytes(outcome.pool_bytes),
            format!("{:.4}", outcome.pool_copies()),
            seconds(outcome.half),
            seconds(outcome.most),
            seconds(outcome.all),
            seconds(outcome.bound),
            format!("{:.2}", outcome.of_bound()),
            outcome.finished.to_string(),
            why.join(", "),
        ]);
    }
    output.table(&rows);
}
