//! Nodes with addresses of their own: network namespaces around a switch, whose cables can be pulled.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::process::sh;

const LIMIT: Duration = Duration::from_secs(120);

/// A switch, at which servers listen, and nodes at its ports. It ends with this value.
pub struct Network {
    /// Begins the names of all namespaces.
    prefix: String,
    nodes: usize,
}

impl Network {
    /// The address of the switch itself.
    pub const SWITCH: &'static str = "10.77.0.254";

    pub fn new(nodes: usize) -> Self {
        let network = Self { prefix: format!("forebay-{}", std::process::id()), nodes };
        let hub = network.name_of(None);
        let mut script = format!(
            "set -e; ip netns add {hub}; ip -n {hub} link set lo up; ip -n {hub} link add switch type bridge
            ip -n {hub} addr add {}/24 dev switch; ip -n {hub} link set switch up\n",
            Self::SWITCH
        );
        for at in 0..nodes {
            let node = network.name_of(Some(at));
            script += &format!(
                "ip netns add {node}; ip -n {node} link set lo up
                ip -n {hub} link add port{at} type veth peer name eth0 netns {node}
                ip -n {hub} link set port{at} master switch up
                ip -n {node} addr add {}/24 dev eth0; ip -n {node} link set eth0 up\n",
                Self::address(at)
            );
        }
        sh(Path::new("/"), &script, LIMIT);
        network
    }

    /// Returns the address of a node.
    pub fn address(node: usize) -> String {
        format!("10.77.0.{}", node + 1)
    }

    /// Moves this thread to the switch, for good. Servers that it starts end with it.
    pub fn enter(&self) {
        enter(&self.name_of(None));
    }

    fn name_of(&self, node: Option<usize>) -> String {
        node.map_or_else(|| format!("{}-switch", self.prefix), |at| format!("{}-{at}", self.prefix))
    }

    /// Runs something at a node. Daemons that it starts stay there.
    pub fn at<T: Send>(&self, node: usize, run: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let entered = scope.spawn(|| {
                enter(&self.name_of(Some(node)));
                run()
            });
            entered.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Pulls the cable of a node, or plugs it in again.
    pub fn connect(&self, node: usize, up: bool) {
        let state = if up { "up" } else { "down" };
        sh(Path::new("/"), &format!("ip -n {} link set port{node} {state}", self.name_of(None)), LIMIT);
    }
}

fn enter(name: &str) {
    let namespace = File::open(Path::new("/run/netns").join(name)).unwrap();
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
}

impl Drop for Network {
    fn drop(&mut self) {
        let names = (0..self.nodes).map(Some).chain([None]).map(|node| self.name_of(node));
        let script: String = names.map(|name| format!("ip netns del {name} 2>/dev/null || true\n")).collect();
        sh(Path::new("/"), &script, LIMIT);
    }
}
