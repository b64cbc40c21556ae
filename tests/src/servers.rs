//! Real servers that tests start for themselves on loopback, and end.

pub mod nfs;
