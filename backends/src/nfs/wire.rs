//! One TCP connection, with the interface that the protocol library needs.

use std::io::{Error, ErrorKind, Result};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use nfs3_client::io::{AsyncRead, AsyncWrite};
use rand::Rng;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use super::limits::{CONNECT_TIMEOUT, MAX_REPLY_BYTES};
use super::reply::{self, RpcProcedure};

/// Many servers accept calls only from these ports, as a sign that the caller is root.
const PRIVILEGED_PORTS: std::ops::Range<u16> = 512..1024;
/// So many of these ports are tried before an ordinary one is taken.
const PORT_ATTEMPTS: usize = 64;

/// A connection. If a call is dropped half way, its connection must be dropped, too: the answer may still arrive.
#[derive(Debug)]
pub(super) struct Wire {
    stream: TcpStream,
    /// A whole request has been sent since [`Wire::begin`]: the server may act on it.
    sent: bool,
    /// The last request.
    asked: RpcProcedure,
    /// The length of the answer has been read, and the answer follows.
    announced: bool,
}

impl Wire {
    /// Connects within [`CONNECT_TIMEOUT`]; from a privileged port if that is wanted and one is free.
    pub(super) async fn connect(host: &str, port: u16, privileged: bool) -> Result<Self> {
        let connecting = async {
            let mut failure = Error::new(ErrorKind::NotFound, "the name has no address");
            for address in tokio::net::lookup_host((host, port)).await? {
                match connect_to(address, privileged).await {
                    Ok(stream) => {
                        stream.set_nodelay(true)?;
                        return Ok(Self { stream, sent: false, asked: RpcProcedure::default(), announced: false });
                    }
                    Err(error) => failure = error,
                }
            }
            Err(failure)
        };
        within(CONNECT_TIMEOUT, connecting).await
    }

    /// Must be called before a request.
    pub(super) fn begin(&mut self) {
        self.sent = false;
    }

    /// Whether the server may have received the whole request.
    pub(super) fn was_sent(&self) -> bool {
        self.sent
    }

    /// Whether nothing has arrived since the last answer, neither bytes nor the end of the connection.
    pub(super) fn is_quiet(&self) -> bool {
        matches!(recv(&self.stream, &mut [0_u8; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT), Err(Errno::AGAIN))
    }
}

async fn within<T>(limit: Duration, work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(limit, work).await.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()))
}

async fn connect_to(address: SocketAddr, privileged: bool) -> Result<TcpStream> {
    if privileged {
        let first = rand::rng().random_range(PRIVILEGED_PORTS);
        for port in (first..PRIVILEGED_PORTS.end).chain(PRIVILEGED_PORTS.start..first).take(PORT_ATTEMPTS) {
            match connect_from(address, port).await {
                Err(error) if matches!(error.kind(), ErrorKind::AddrInUse | ErrorKind::AddrNotAvailable) => {}
                Err(error) if error.kind() == ErrorKind::PermissionDenied => break,
                answer => return answer,
            }
        }
    }
    TcpStream::connect(address).await
}

async fn connect_from(address: SocketAddr, port: u16) -> Result<TcpStream> {
    let (socket, local) = match address {
        SocketAddr::V4(_) => (TcpSocket::new_v4()?, IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
        SocketAddr::V6(_) => (TcpSocket::new_v6()?, IpAddr::V6(Ipv6Addr::UNSPECIFIED)),
    };
    // The port of a connection that was just closed can be used again.
    socket.set_reuseaddr(true)?;
    socket.bind(SocketAddr::new(local, port))?;
    socket.connect(address).await
}

fn nonsense(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidData, what.into())
}

impl AsyncRead for &mut Wire {
    /// Never returns 0: the library would take the end of the connection for a read that must be retried.
    async fn async_read(&mut self, buf: &mut [u8]) -> Result<usize> {
        match self.stream.read(buf).await? {
            0 => Err(ErrorKind::UnexpectedEof.into()),
            read => Ok(read),
        }
    }

    /// The library reads an answer by two calls of this: its length, and the rest. It allocates memory for every
    /// length that an answer claims, so each length is checked before.
    async fn async_read_exact(&mut self, buf: &mut [u8]) -> Result<()> {
        self.stream.read_exact(buf).await?;
        if self.announced {
            self.announced = false;
            return reply::check(self.asked, buf).map_err(nonsense);
        }
        if let Ok(header) = <[u8; 4]>::try_from(&*buf) {
            // The highest bit says that no other fragment follows.
            let length = (u32::from_be_bytes(header) & 0x7fff_ffff) as usize;
            if length > MAX_REPLY_BYTES {
                return Err(nonsense(format!("an answer of {length} bytes is announced")));
            }
            self.announced = true;
        }
        Ok(())
    }
}

impl AsyncWrite for &mut Wire {
    async fn async_write(&mut self, buf: &[u8]) -> Result<usize> {
        self.stream.write(buf).await
    }

    /// The library sends a request by one call of this. No server acts on a request that the kernel did not take
    /// completely.
    async fn async_write_all(&mut self, buf: &[u8]) -> Result<()> {
        (self.asked, self.announced) = (RpcProcedure::of(buf), false);
        self.stream.write_all(buf).await?;
        self.sent = true;
        Ok(())
    }
}
