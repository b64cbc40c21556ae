//! A bounded number of connections to one server. The library makes one call at a time on a connection, so concurrent
//! calls need as many connections.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use crate::ErrorKind;

use super::failure::Cause;
use super::limits::{MAX_CONNECTIONS, RPC_TIMEOUT};
use super::wire::Wire;

/// The connections to one port of a server.
#[derive(Debug)]
pub(super) struct Connections {
    host: String,
    port: u16,
    privileged: bool,
    permits: Semaphore,
    /// Connections that no call uses.
    idle: Mutex<Vec<Wire>>,
    breaks: AtomicU64,
}

/// A connection for one call. It is closed when this is dropped, unless it is kept.
pub(super) struct Lease<'a> {
    pub(super) wire: Wire,
    home: &'a Connections,
    _permit: SemaphorePermit<'a>,
}

impl Lease<'_> {
    /// Keeps the connection for the next call: the answer to this one has been read to its end.
    pub(super) fn keep(self) {
        self.home.idle.lock().push(self.wire);
    }

    /// Closes the connection, which is unusable.
    pub(super) fn broken(self) {
        self.home.breaks.fetch_add(1, Ordering::SeqCst);
    }
}

impl Connections {
    pub(super) fn new(host: String, port: u16, privileged: bool) -> Self {
        let permits = Semaphore::new(MAX_CONNECTIONS);
        Self { host, port, privileged, permits, idle: Mutex::new(Vec::new()), breaks: AtomicU64::new(0) }
    }

    /// Connections that broke, or could not be made.
    pub(super) fn breaks(&self) -> u64 {
        self.breaks.load(Ordering::SeqCst)
    }

    /// A connection: an idle one, or else a new one.
    pub(super) async fn lease(&self) -> Result<Lease<'_>, Cause> {
        let busy = || Cause::new(ErrorKind::Timeout, format!("no connection to {} became free", self.host));
        let permit = timeout(RPC_TIMEOUT, self.permits.acquire()).await.map_err(|_| busy())?.map_err(|_| busy())?;
        loop {
            let Some(wire) = self.idle.lock().pop() else { break };
            if wire.is_quiet() {
                return Ok(Lease { wire, home: self, _permit: permit });
            }
            self.breaks.fetch_add(1, Ordering::SeqCst);
        }
        let connected = Wire::connect(&self.host, self.port, self.privileged).await;
        let wire = connected.map_err(|error| {
            self.breaks.fetch_add(1, Ordering::SeqCst);
            unreachable(&self.host, self.port, &error)
        })?;
        Ok(Lease { wire, home: self, _permit: permit })
    }
}

/// Why there is no connection, and what to check.
pub(super) fn unreachable(host: &str, port: u16, error: &io::Error) -> Cause {
    let why = format!("connect to {host} port {port}: {error}; check that the server runs and is reachable");
    Cause::new(ErrorKind::Unavailable, why)
}
