//! Pools behind servers: what comes through the mount, to what plain clients and other programs get.

pub mod link;
#[path = "../../tests/src/servers/nfs.rs"]
#[allow(dead_code, reason = "some calls are for tests alone")]
mod nfs_server;
pub mod others;
pub mod plain;
pub mod rows;
#[path = "../../tests/src/servers/s3.rs"]
#[allow(dead_code, reason = "some calls are for tests alone")]
mod s3_server;
