//! Real servers of pools, each started by the test that needs it, on loopback and on a port that was free.

pub mod nfs;
pub mod s3;
mod started;
pub mod stores;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::tree::{Bucket, Files, Tree};

/// A pool behind a server of its own.
#[derive(Debug, Clone)]
pub struct Remote {
    pub url: String,
    /// What is in it, past us; behind the server's back where that keeps plain files.
    pub tree: Arc<dyn Tree>,
    /// What a client needs to be let in.
    pub environment: BTreeMap<String, String>,
}

/// What can die and come back.
pub trait Server {
    /// `kill -9`
    fn kill(&mut self);

    /// On the same ports and data; returns when it serves.
    fn start_again(&mut self);

    fn remote(&self) -> Remote;
}

impl Server for s3::Versitygw {
    fn kill(&mut self) {
        self.kill();
    }

    fn start_again(&mut self) {
        self.mend();
        self.resume();
    }

    fn remote(&self) -> Remote {
        Remote { url: self.url(""), tree: Arc::new(Files(self.files())), environment: s3::environment() }
    }
}

impl Server for s3::Rgw {
    fn kill(&mut self) {
        self.kill();
    }

    fn start_again(&mut self) {
        self.resume();
    }

    fn remote(&self) -> Remote {
        Remote { url: self.url(""), tree: Arc::new(Bucket::at(self.port())), environment: s3::environment() }
    }
}

impl Server for nfs::NfsServer {
    fn kill(&mut self) {
        self.kill();
    }

    fn start_again(&mut self) {
        self.start_again();
    }

    fn remote(&self) -> Remote {
        Remote { url: self.url(), tree: Arc::new(Files(self.export())), environment: BTreeMap::new() }
    }
}
