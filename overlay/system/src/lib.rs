//! Facts of the machine: processes and their capabilities, descriptors, mounts, the time of day, terminals.

pub mod bind;
pub mod capabilities;
pub mod clock;
pub mod descriptors;
pub mod identity;
pub mod mounts;
pub mod process;
pub mod tcp_clients;
pub mod terminal;
