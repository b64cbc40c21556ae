//! Calls to the server: over which connection, with whose identity, with which time limit and how many retries.
//!
//! A call that can be repeated without harm is repeated on a new connection if the old one broke. A call that cannot
//! (a change of names) is sent once; if its answer was lost, the caller checks whether the change was made.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nfs3_client::nfs3_types::nfs3::{self, Nfs3Result, nfsstat3};
use nfs3_client::nfs3_types::rpc::opaque_auth;
use nfs3_client::{Nfs3Client, RpcError};
use tokio::time::{sleep, timeout};

use crate::outage::OutageLimit;

use super::connections::Connections;
use super::credentials::{Credentials, Owner};
use super::failure::{Cause, NfsFailure, Outcome};
use super::limits::{NONSENSE_ATTEMPTS, RESEND_AFTER, RETRY_PAUSE_MAX, RETRY_PAUSE_MIN, RPC_TIMEOUT};
use super::wire::Wire;

pub(super) type Client<'a> = Nfs3Client<&'a mut Wire>;

/// When a request may be sent again without a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Resend {
    /// Never: repeating the change has another effect.
    Never,
    /// After the connection broke: repeating the change has no other effect, unless another change came in between.
    Change,
    /// Also after a timeout: the request changes nothing.
    Look,
}

/// A procedure with its arguments.
pub(super) trait Procedure: Send + Sync {
    type Answer: Send;
    const RESEND: Resend;
    fn send(
        &self,
        client: &mut Client<'_>,
    ) -> impl Future<Output = Result<Result<Self::Answer, nfsstat3>, RpcError>> + Send;
}

macro_rules! procedures {
    ($($args:ident $(<$life:lifetime>)? $method:ident $answer:ident $(<$borrowed:lifetime>)? $resend:ident;)*) => {$(
        impl Procedure for nfs3::$args $(<$life>)? {
            type Answer = nfs3::$answer $(<$borrowed>)?;
            const RESEND: Resend = Resend::$resend;
            async fn send(&self, client: &mut Client<'_>) -> Result<Result<Self::Answer, nfsstat3>, RpcError> {
                Ok(match client.$method(self).await? {
                    Nfs3Result::Ok(answer) => Ok(answer),
                    Nfs3Result::Err((status, _)) => Err(status),
                })
            }
        }
    )*};
}

procedures! {
    GETATTR3args getattr GETATTR3resok Look;
    SETATTR3args setattr SETATTR3resok Change;
    LOOKUP3args<'_> lookup LOOKUP3resok Look;
    READLINK3args readlink READLINK3resok<'static> Look;
    READ3args read READ3resok<'static> Look;
    WRITE3args<'_> write WRITE3resok Change;
    COMMIT3args commit COMMIT3resok Change;
    CREATE3args<'_> create CREATE3resok Never;
    MKDIR3args<'_> mkdir MKDIR3resok Never;
    SYMLINK3args<'_> symlink SYMLINK3resok Never;
    MKNOD3args<'_> mknod MKNOD3resok Never;
    REMOVE3args<'_> remove REMOVE3resok Never;
    RMDIR3args<'_> rmdir RMDIR3resok Never;
    LINK3args<'_> link LINK3resok Never;
    READDIR3args readdir READDIR3resok<'static> Look;
    READDIRPLUS3args readdirplus READDIRPLUS3resok<'static> Look;
    FSSTAT3args fsstat FSSTAT3resok Look;
    FSINFO3args fsinfo FSINFO3resok Look;
    PATHCONF3args pathconf PATHCONF3resok Look;
}

impl Procedure for nfs3::RENAME3args<'_, '_> {
    type Answer = nfs3::RENAME3resok;
    const RESEND: Resend = Resend::Never;
    async fn send(&self, client: &mut Client<'_>) -> Result<Result<Self::Answer, nfsstat3>, RpcError> {
        Ok(match client.rename(self).await? {
            Nfs3Result::Ok(answer) => Ok(answer),
            Nfs3Result::Err((status, _)) => Err(status),
        })
    }
}

/// The connections and the identity for calls to the server.
#[derive(Debug)]
pub(super) struct RpcClient {
    /// The pool's URL, for errors.
    pool: String,
    connections: Connections,
    credentials: Credentials,
    /// The server maps root to the user `nobody`.
    squashed: AtomicBool,
    retries: AtomicU64,
    outage: OutageLimit,
}

impl RpcClient {
    pub(super) fn new(pool: String, connections: Connections, credentials: Credentials) -> Self {
        let (squashed, retries) = (AtomicBool::new(false), AtomicU64::new(0));
        Self { pool, connections, credentials, squashed, retries, outage: OutageLimit::default() }
    }

    pub(super) fn outage(&self) -> &OutageLimit {
        &self.outage
    }

    pub(super) fn patience(&self) -> Patience {
        Patience { since: None, within: self.outage.get(), pause: RETRY_PAUSE_MIN }
    }

    pub(super) fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    pub(super) fn is_squashed(&self) -> bool {
        self.squashed.load(Ordering::Relaxed)
    }

    pub(super) fn set_squashed(&self) {
        self.squashed.store(true, Ordering::Relaxed);
    }

    /// Calls that were retried since the pool was opened.
    pub(super) fn retries(&self) -> u64 {
        self.retries.load(Ordering::Relaxed)
    }

    /// Connections that were found broken since the pool was opened.
    pub(super) fn breaks(&self) -> u64 {
        self.connections.breaks()
    }

    /// Makes a call as this process and, if that is denied and this process may, as each of `owners` in turn. If the
    /// server maps root to the user `nobody`, the owners are tried first.
    pub(super) async fn call<P: Procedure>(&self, args: &P, owners: &[Owner]) -> Outcome<P::Answer> {
        let mut denied = None;
        for identity in self.credentials.in_turn(owners, self.is_squashed()) {
            match self.call_as(args, &identity).await {
                Err(failure) if failure.is_denied() => drop(denied.get_or_insert(failure)),
                answer => return answer,
            }
        }
        Err(denied.unwrap_or(NfsFailure::Status(nfsstat3::NFS3ERR_ACCES)))
    }

    /// Makes a call with one identity.
    async fn call_as<P: Procedure>(&self, args: &P, identity: &opaque_auth<'static>) -> Outcome<P::Answer> {
        let mut patience = self.patience();
        // A server may drop a request silently (nfs-ganesha does if a file is replaced during a READ, Linux's server
        // if it has no memory), and the client must send it again.
        let mut limit = if P::RESEND == Resend::Look { RESEND_AFTER } else { RPC_TIMEOUT };
        let mut nonsense = 0;
        loop {
            let again = match self.attempt(args, identity, limit).await {
                Err(NfsFailure::Lost(cause)) if cause.is_silence() && limit < RPC_TIMEOUT => {
                    limit = (limit * 2).min(RPC_TIMEOUT);
                    self.retries.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                // The server is busy with a long operation and requests a retry; nothing was done.
                Err(NfsFailure::Status(nfsstat3::NFS3ERR_JUKEBOX)) => NfsFailure::Status(nfsstat3::NFS3ERR_JUKEBOX),
                Err(NfsFailure::Unsent(cause)) if cause.is_passing() => NfsFailure::Unsent(cause),
                Err(NfsFailure::Lost(cause)) if cause.is_passing() && P::RESEND != Resend::Never => {
                    nonsense += u32::from(cause.is_nonsense());
                    if nonsense == NONSENSE_ATTEMPTS {
                        return Err(NfsFailure::Lost(cause));
                    }
                    NfsFailure::Lost(cause)
                }
                answer => return answer,
            };
            if !patience.pause().await {
                return Err(again);
            }
            self.retries.fetch_add(1, Ordering::Relaxed);
        }
    }

    async fn attempt<P: Procedure>(
        &self,
        args: &P,
        identity: &opaque_auth<'static>,
        limit: Duration,
    ) -> Outcome<P::Answer> {
        let mut lease = self.connections.lease().await.map_err(|cause| NfsFailure::Unsent(cause.at(&self.pool)))?;
        lease.wire.begin();
        let mut client = Nfs3Client::new_with_auth(&mut lease.wire, identity.clone(), opaque_auth::default());
        let answer = timeout(limit, args.send(&mut client)).await;
        drop(client);
        let cause = match answer {
            Ok(Ok(answer)) => {
                lease.keep();
                return answer.map_err(NfsFailure::Status);
            }
            // After a malformed answer the next one may be malformed too, so the connection is closed.
            Ok(Err(error)) => Cause::from(&error),
            Err(_) => Cause::silence(limit),
        };
        let cause = cause.at(&self.pool);
        let sent = lease.wire.was_sent();
        lease.broken();
        Err(if sent { NfsFailure::Lost(cause) } else { NfsFailure::Unsent(cause) })
    }
}

/// The pauses between attempts, which grow, and their end.
pub(super) struct Patience {
    since: Option<Instant>,
    /// How long after the first failure a call may still be retried.
    within: Duration,
    pause: Duration,
}

impl Patience {
    /// Waits for the next pause; returns `false` at once if the time for retries is over.
    pub(super) async fn pause(&mut self) -> bool {
        if self.since.get_or_insert_with(Instant::now).elapsed() >= self.within {
            return false;
        }
        sleep(self.pause).await;
        self.pause = (self.pause * 2).min(RETRY_PAUSE_MAX);
        true
    }
}
