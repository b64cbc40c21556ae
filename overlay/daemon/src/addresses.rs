//! Network addresses on which a daemon listens beside its control socket.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use forebay_serve::{Door, Listener, ListenerLimits};
use tokio_util::sync::CancellationToken;

use super::{Failure, FailureKind, limits};

/// What an address is for.
pub struct AddressUse {
    /// The name of the address in messages.
    pub name: &'static str,
    /// What is served there, and how, for the log.
    pub serves: &'static str,
    /// The remedy if another program listens there.
    pub if_taken: &'static str,
    /// The remedy if this machine does not have it.
    pub if_foreign: &'static str,
}

impl AddressUse {
    /// Listens on an address.
    ///
    /// # Errors
    /// `Busy` if another program listens there; `Usage` if the address is not of this machine.
    pub fn bind(&self, address: SocketAddr) -> Result<TcpListener, Failure> {
        let what = format!("{} address {address}", self.name);
        TcpListener::bind(address).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => {
                Failure::new(FailureKind::Busy, format!("{what}: another program listens there")).remedy(self.if_taken)
            }
            io::ErrorKind::AddrNotAvailable => {
                Failure::usage(format!("{what}: this machine does not have the address")).remedy(self.if_foreign)
            }
            _ => Failure::io(what, &error),
        })
    }

    /// Answers clients until `stop`. `socket`: that of [`Self::bind`]; `None`: the mount was taken over, so the address is
    /// served as soon as it is free.
    pub async fn serve(
        &self,
        (address, mut socket): (SocketAddr, Option<TcpListener>),
        connections: usize,
        door: Arc<dyn Door>,
        stop: CancellationToken,
    ) {
        let mut is_told = false;
        let socket = loop {
            match socket.take().map_or_else(|| self.bind(address), Ok) {
                Ok(socket) => break socket,
                Err(failure) if is_told => tracing::debug!("{failure}"),
                Err(failure) => {
                    tracing::error!("{failure}; tried again every {} s", limits::ADDRESS_RETRY.as_secs());
                    is_told = true;
                }
            }
            if stop.run_until_cancelled(tokio::time::sleep(limits::ADDRESS_RETRY)).await.is_none() {
                return;
            }
        };
        match Listener::new(socket, None, ListenerLimits { connections, ..ListenerLimits::default() }) {
            Ok(listener) => {
                tracing::info!("{} on {address}", self.serves);
                listener.serve(door, stop).await;
            }
            Err(error) => tracing::error!("{} address {address}: {error}", self.name),
        }
    }
}
