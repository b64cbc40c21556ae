//! Real servers of pools on loopback. Each is started by the test that needs it, on a free port.

pub mod etcd;
pub mod nfs;
pub mod origin;
pub mod s3;
pub mod slurm;
mod started;
pub mod stores;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::tree::{Bucket, Files, Tree};
pub use started::free_port;

/// A pool on a server.
#[derive(Debug, Clone)]
pub struct Remote {
    pub url: String,
    /// The pool's content, read without the mount; without the server, too, if the server keeps plain files.
    pub tree: Arc<dyn Tree>,
    /// The environment variables with a client's credentials.
    pub environment: BTreeMap<String, String>,
}

/// A server that can be killed and started again.
pub trait Server {
    /// `kill -9`
    fn kill(&mut self);

    /// Starts the server on the same ports and data, and waits until it serves.
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
