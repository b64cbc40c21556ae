//! A proxy that simulates a slow line to a server: all connections share its bandwidth, and every byte is delayed.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use forebay_benches::Result;

/// The size of one read: small, so that connections share the bandwidth instead of queueing for it.
const SLICE_BYTES: usize = 64 << 10;
/// Slices in flight in one direction of a connection: more than bandwidth times latency.
const SLICES_MAX: usize = 64;

/// Latency and bandwidth of the line.
#[derive(Debug, Clone, Copy)]
pub struct Slowness {
    /// One way: a round trip takes twice as long.
    pub latency: Duration,
    /// In each direction; 0 means no limit.
    pub bytes_per_sec: u64,
}

/// One direction of the line.
struct Lane {
    slowness: Slowness,
    free_at: Mutex<Instant>,
}

impl Lane {
    fn new(slowness: Slowness) -> Arc<Self> {
        Arc::new(Self { slowness, free_at: Mutex::new(Instant::now()) })
    }

    /// Returns the time at which bytes that are sent now arrive.
    fn pass(&self, bytes: usize) -> Instant {
        let now = Instant::now();
        if self.slowness.bytes_per_sec == 0 {
            return now + self.slowness.latency;
        }
        let takes = Duration::from_secs_f64(bytes as f64 / self.slowness.bytes_per_sec as f64);
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        *free_at = free_at.max(now) + takes;
        *free_at + self.slowness.latency
    }
}

/// Listens until the program ends. Returns the port whose connections are forwarded to `server_port`.
///
/// # Errors
/// No port is free.
pub fn start(server_port: u16, slowness: Slowness) -> Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let port = listener.local_addr()?.port();
    let lanes = [Lane::new(slowness), Lane::new(slowness)];
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(server) = TcpStream::connect(("127.0.0.1", server_port)) else { continue };
            let ends = [(&client, &server), (&server, &client)];
            for ((from, to), lane) in ends.into_iter().zip(&lanes) {
                if let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) {
                    carry(from, to, Arc::clone(lane));
                }
            }
        }
    });
    Ok(port)
}

/// Forwards all bytes from one end to the other, until the connection ends.
fn carry(mut from: TcpStream, to: TcpStream, lane: Arc<Lane>) {
    let _ = to.set_nodelay(true);
    let (sender, receiver) = sync_channel(SLICES_MAX);
    thread::spawn(move || deliver(&receiver, to));
    thread::spawn(move || {
        loop {
            let mut slice = vec![0; SLICE_BYTES];
            match from.read(&mut slice) {
                Ok(length) if length > 0 => {
                    slice.truncate(length);
                    if sender.send((lane.pass(length), slice)).is_err() {
                        return;
                    }
                }
                _ => return,
            }
        }
    });
}

fn deliver(slices: &Receiver<(Instant, Vec<u8>)>, mut to: TcpStream) {
    for (due, slice) in slices {
        thread::sleep(due.saturating_duration_since(Instant::now()));
        if to.write_all(&slice).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
