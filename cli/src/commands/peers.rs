//! `forebay peers`

use std::path::Path;

use forebay_api::peers::{PassOver, PeerMember, PeerState, PeersStatus};
use forebay_daemon::protocol::{Reply, Request};
use forebay_daemon::{Failure, client};

use crate::exit::Exit;
use crate::output::Output;
use crate::targets;
use crate::values::{bytes, counted};

pub fn run(path: Option<&Path>, output: &Output) -> Result<Exit, Failure> {
    targets::each(targets::meant(path)?, output, |place| {
        for reply in client::call(&place.entry, &Request::Peers)? {
            if let Reply::Peers(peers) = reply? {
                match output.json {
                    true => output.json(&peers),
                    false => tell(&peers, output),
                }
            }
        }
        Ok(Exit::Done)
    })
}

fn tell(peers: &PeersStatus, output: &Output) {
    output.line(format!(
        "{} of {}, at {}, placement {}; since the start {} from peers, {} to peers",
        peers.node,
        counted(peers.members.len() as u64, "node"),
        peers.listen,
        peers.placement.as_str(),
        bytes(peers.read_bytes),
        bytes(peers.given_bytes),
    ));
    if peers.announced + peers.announcements_lost > 0 {
        output.line(format!("changes of the pool: {} told, {} lost", peers.announced, peers.announcements_lost));
    }
    if !peers.passed_over.is_empty() {
        output.line(format!("passed over: {}", reasons(&peers.passed_over)));
    }
    let heads = ["node", "address", "from", "state", "owns", "from it", "to it", "passed over"];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    rows.extend(peers.members.iter().map(row));
    output.table(&rows);
}

fn row(member: &PeerMember) -> Vec<String> {
    let state = match (member.state, member.sees_other_members) {
        (PeerState::This, _) => "this node",
        (PeerState::Suspected, _) => "suspected",
        (PeerState::Trusted, true) => "has other members",
        (PeerState::Trusted, false) => "trusted",
    };
    let role = if member.is_cache { " (cache)" } else { "" };
    vec![
        format!("{}{role}", member.node),
        member.address.clone(),
        member.sources.iter().map(|source| source.as_str()).collect::<Vec<_>>().join(", "),
        state.to_owned(),
        format!("{:.1} %", member.share * 100.0),
        bytes(member.read_bytes),
        bytes(member.given_bytes),
        reasons(&member.passed_over),
    ]
}

fn reasons(counts: &[(PassOver, u64)]) -> String {
    let told: Vec<String> = counts.iter().map(|(why, count)| format!("{why} {count}")).collect();
    if told.is_empty() { "-".to_owned() } else { told.join(", ") }
}
