//! Content from other nodes before the pool, and for them. The decisions are in `cluster`; here are the file that names the
//! members, the requests, and the bytes.
//!
//! | module | does |
//! |---|---|
//! | `settings` | the file with this node, the members, the token |
//! | `etcd` | members that come and go |
//! | `wire` | requests and answers as HTTP, versions as text, content as frames with checksums |
//! | `peers` | what this node knows of the others, and its counters |
//! | `client` | asks other nodes for a range |
//! | `door` | answers other nodes |
//! | `cluster_stage` | stages on all members; `door/stage` is the other side |
//! | `signed` | records of members in etcd |
//! | `announcements` | tells other nodes what this one has changed in the pool |

mod announcements;
mod client;
mod cluster_stage;
mod door;
mod etcd;
mod peers;
mod settings;
mod signed;
mod wire;

pub use client::PeerClient;
pub use door::PeerDoor;
pub use etcd::{EtcdMembers, EtcdSettings};
pub use peers::Peers;
pub use settings::PeerSettings;
