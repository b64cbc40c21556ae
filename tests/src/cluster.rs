//! Nodes of a cluster: mounts of one pool on this machine, each with a fast pool and an address of its own.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use forebay_api::peers::PeersStatus;

use crate::mount::{Mount, Options, Place};
use crate::servers::free_port;

/// The shared secret of the members.
pub const TOKEN: &str = "a token of the test's cluster";

/// A member: its name, and where it answers.
#[derive(Debug, Clone)]
pub struct NodeAddress {
    pub name: String,
    pub host: String,
    pub port: u16,
}

impl NodeAddress {
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), host: "127.0.0.1".into(), port: free_port() }
    }
}

/// Names members `n0`, `n1`, ...
pub fn addresses(count: usize) -> Vec<NodeAddress> {
    (0..count).map(|at| NodeAddress::new(format!("n{at}"))).collect()
}

/// Writes the peers file of a node, and returns its path.
pub fn peers_file(dir: &Path, this: &NodeAddress, members: &[NodeAddress], more: &str) -> PathBuf {
    let token = dir.join("token");
    fs::write(&token, TOKEN.replace(' ', "-")).unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
    let mut text =
        format!("node = \"{}\"\nlisten = \"{}:{}\"\ntoken-file = \"token\"\n{more}\n", this.name, this.host, this.port);
    for NodeAddress { name, host, port } in members {
        text += &format!("[[member]]\nnode = \"{name}\"\naddress = \"{host}:{port}\"\n");
    }
    let (file, new) = (dir.join("peers.toml"), dir.join("peers.new"));
    fs::write(&new, text).unwrap();
    fs::rename(new, &file).unwrap();
    file
}

/// Mounts one node of a cluster.
#[track_caller]
pub fn node(this: &NodeAddress, members: &[NodeAddress], options: Options) -> Mount {
    node_with(this, members, "", options)
}

/// The same with further lines in the peers file, before the list of members.
#[track_caller]
pub fn node_with(this: &NodeAddress, members: &[NodeAddress], lines: &str, options: Options) -> Mount {
    let place = Place::new();
    let file = peers_file(&place.at(""), this, members, lines);
    let more = [options.more.clone(), vec!["--peers".into(), file.display().to_string()]].concat();
    Mount::on(place, Options { more, ..options })
}

/// Mounts all members.
#[track_caller]
pub fn nodes(members: &[NodeAddress], options: &Options) -> Vec<Mount> {
    members.iter().map(|this| node(this, members, options.clone())).collect()
}

/// Returns what `forebay peers` says.
#[track_caller]
pub fn peers(mount: &Mount) -> PeersStatus {
    let answer = mount.forebay(["--json", "peers"], &[&mount.place.mnt()]).ok();
    serde_json::from_str(&answer.out).expect("JSON")
}

/// Returns how often members were passed over for a reason.
#[track_caller]
pub fn passed_over(mount: &Mount, why: &str) -> u64 {
    peers(mount).passed_over.iter().filter(|(name, _)| name.as_str() == why).map(|(_, count)| count).sum()
}
