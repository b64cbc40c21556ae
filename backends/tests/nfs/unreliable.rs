//! Forwards NFS calls, and injects faults into one of them, or into some at random: the call or its answer is lost
//! together with the connection; or the call is dropped silently; or it is answered with an unjustified status; or it
//! is late; or a READ returns less than requested; or an answer is truncated.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use forebay_backends::conformance::troubled::Trouble;
use parking_lot::Mutex;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// Numbers of the protocol's procedures.
pub mod procedure {
    pub const GETATTR: u32 = 1;
    pub const SETATTR: u32 = 2;
    pub const LOOKUP: u32 = 3;
    pub const READ: u32 = 6;
    pub const WRITE: u32 = 7;
    pub const CREATE: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const SYMLINK: u32 = 10;
    pub const REMOVE: u32 = 12;
    pub const RMDIR: u32 = 13;
    pub const RENAME: u32 = 14;
    pub const LINK: u32 = 15;
    pub const READDIRPLUS: u32 = 17;
    pub const COMMIT: u32 = 21;
}

/// The fault that a call meets.
#[derive(Debug, Clone, Copy)]
pub enum Loss {
    /// The call does not reach the server.
    Call,
    /// The server carries out the call; the answer is lost.
    Answer,
    /// The server drops the call without an answer; the connection stays.
    Silence,
    /// The call does not reach the server; it is answered with this status and without attributes.
    Status(u32),
    /// The call reaches the server late.
    Late,
    /// The server is asked for less, and reports that there is more. For READ only.
    Short,
    /// Half of the answer arrives.
    Cut,
}

/// The probability of a fault in a storm.
const ODDS: f64 = 0.05;
/// The probability that a call is dropped, which takes the client seconds to notice.
const SILENCE_ODDS: f64 = 0.001;
/// The other faults in a storm.
const IN_STORMS: [Loss; 14] = [
    Loss::Call,
    Loss::Call,
    Loss::Answer,
    Loss::Answer,
    Loss::Answer,
    Loss::Late,
    Loss::Late,
    Loss::Late,
    Loss::Short,
    Loss::Short,
    Loss::Short,
    Loss::Short,
    Loss::Cut,
    Loss::Cut,
];
const LATENESS: Duration = Duration::from_millis(100);

#[derive(Default)]
struct NfsFaultPlan {
    storm: Mutex<Option<ChaCha8Rng>>,
    happened: AtomicU64,
    next: Mutex<Option<PlannedNfsFault>>,
    lost: AtomicBool,
}

struct PlannedNfsFault {
    procedure: u32,
    loss: Loss,
    /// The number of calls of the procedure before the one that meets the fault.
    before: u32,
}

impl NfsFaultPlan {
    fn for_call_of(&self, procedure: u32) -> Option<Loss> {
        let loss = self.in_storm().or_else(|| self.appointed(procedure));
        let loss = loss.filter(|loss| !matches!(loss, Loss::Short) || procedure == self::procedure::READ);
        self.happened.fetch_add(u64::from(loss.is_some()), Ordering::Relaxed);
        loss
    }

    fn in_storm(&self) -> Option<Loss> {
        let mut storm = self.storm.lock();
        let random = storm.as_mut()?;
        let (happens, which) = (random.random_bool(ODDS), random.random_range(0..IN_STORMS.len()));
        if random.random_bool(SILENCE_ODDS) {
            return Some(Loss::Silence);
        }
        happens.then_some(IN_STORMS[which])
    }

    fn appointed(&self, procedure: u32) -> Option<Loss> {
        let mut next = self.next.lock();
        let planned = next.as_mut().filter(|planned| planned.procedure == procedure)?;
        if let Some(before) = planned.before.checked_sub(1) {
            planned.before = before;
            return None;
        }
        self.lost.store(true, Ordering::SeqCst);
        next.take().map(|planned| planned.loss)
    }
}

/// An unreliable connection to a server. It ends when this value is dropped.
pub struct NfsFaultProxy {
    port: u16,
    plan: Arc<NfsFaultPlan>,
    _tasks: JoinSet<()>,
}

impl NfsFaultProxy {
    pub async fn start(server_port: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let plan = Arc::new(NfsFaultPlan::default());
        let mut tasks = JoinSet::new();
        tasks.spawn({
            let plan = Arc::clone(&plan);
            async move {
                let mut connections = JoinSet::new();
                while let Ok((client, _)) = listener.accept().await {
                    let plan = Arc::clone(&plan);
                    // A connection ends with an error.
                    connections.spawn(async move { pass_on(client, server_port, &plan).await.err() });
                }
            }
        });
        Self { port, plan, _tasks: tasks }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Injects a fault into the next call of this procedure.
    pub fn lose(&self, procedure: u32, loss: Loss) {
        self.lose_after(0, procedure, loss);
    }

    /// Injects a fault into a call of this procedure, the one after the next `before`.
    pub fn lose_after(&self, before: u32, procedure: u32, loss: Loss) {
        *self.plan.next.lock() = Some(PlannedNfsFault { procedure, loss, before });
    }

    /// Whether the planned fault has happened.
    pub fn has_lost(&self) -> bool {
        self.plan.lost.load(Ordering::SeqCst)
    }
}

impl Trouble for NfsFaultProxy {
    fn begin(&self, seed: u64) {
        *self.plan.storm.lock() = Some(ChaCha8Rng::seed_from_u64(seed));
    }

    fn end(&self) {
        *self.plan.storm.lock() = None;
    }

    fn happened(&self) -> u64 {
        self.plan.happened.load(Ordering::Relaxed)
    }
}

/// Halves the number of bytes that a READ requests: its last argument.
fn shorten(call: &mut [u8]) {
    let at = call.len() - 4;
    let count = u32::from_be_bytes(call[at..].try_into().unwrap());
    call[at..].copy_from_slice(&count.div_ceil(2).to_be_bytes());
}

async fn pass_on(mut client: TcpStream, server_port: u16, plan: &NfsFaultPlan) -> io::Result<()> {
    let mut server = TcpStream::connect(("127.0.0.1", server_port)).await?;
    loop {
        let mut call = record(&mut client).await?;
        // After the length: number of the call, direction, versions, program, its version, procedure.
        let procedure = u32::from_be_bytes(call[24..28].try_into().unwrap());
        let loss = plan.for_call_of(procedure);
        if let Some(Loss::Call) = loss {
            return Ok(());
        }
        if let Some(Loss::Silence) = loss {
            continue;
        }
        if let Some(Loss::Status(status)) = loss {
            // Number of the call, reply, accepted, no verifier, success, status, no attributes.
            let number = u32::from_be_bytes(call[4..8].try_into().unwrap());
            let words = [0x8000_0000 | 32, number, 1, 0, 0, 0, 0, status, 0];
            client.write_all(&words.map(u32::to_be_bytes).concat()).await?;
            continue;
        }
        match loss {
            Some(Loss::Late) => tokio::time::sleep(LATENESS).await,
            Some(Loss::Short) => shorten(&mut call),
            _ => {}
        }
        server.write_all(&call).await?;
        let answer = record(&mut server).await?;
        if let Some(Loss::Answer) = loss {
            return Ok(());
        }
        if let Some(Loss::Cut) = loss {
            return client.write_all(&answer[..answer.len() / 2]).await;
        }
        client.write_all(&answer).await?;
    }
}

/// One message with its length in front.
async fn record(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let header = stream.read_u32().await?;
    let mut record = vec![0; 4 + (header & 0x7fff_ffff) as usize];
    record[..4].copy_from_slice(&header.to_be_bytes());
    stream.read_exact(&mut record[4..]).await?;
    Ok(record)
}
