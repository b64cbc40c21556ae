//! Real servers of pools, each started by the test that needs it, on loopback and on a port that was free.

pub mod nfs;
pub mod s3;
