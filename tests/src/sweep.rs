//! The kill sweep: whichever process is killed at whichever moment, nothing acknowledged is lost, and nothing is
//! invented.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::load::{Append, Blocks, Flushed, Ground, Names, OnClose, Replace, Writer};
use crate::mount::Mount;
use crate::process;
use crate::servers::Server;
use crate::settings;
use crate::tree::Files;

/// The policy of a mount under the sweep.
pub const POLICY: &str = "
[default]
flush = \"idle:1s\"
[[rule]]
paths = [\"on-close/**\"]
flush = \"on-close\"
";
/// The interval, in rounds, at which the supervisor is killed, too. Few workers die in between, so no restart is
/// delayed for long.
const BOTH_EVERY: u64 = 5;
/// The interval, in rounds, at which a round ends with a flush of everything and a comparison with the pool.
const POOL_EVERY: u64 = 10;
/// The interval, in rounds, at which a round begins with a kill of the pool's server.
const SERVER_EVERY: u64 = 4;
/// The longest time that a restart may hold up a writer.
const HELD_UP: Duration = Duration::from_secs(120);

fn writers(mount: &Mount, hard_links: bool) -> Vec<Box<dyn Writer>> {
    let ground = |name: &str, tag: u64| {
        std::fs::create_dir(mount.path(name)).expect("a directory for a writer");
        Ground { here: Files(mount.path(name)), pool: mount.tree().below(name), tag: tag << 56 }
    };
    let flush = |path: &Path| -> io::Result<bool> {
        let mut command = Command::new(process::forebay());
        command.args(["flush", "--wait"]).arg(path).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(process::wait(&mut process::spawn(&mut command)?, Duration::from_secs(60)).is_some_and(|s| s.success()))
    };
    vec![
        Box::new(Replace::new(ground("replace", 1))),
        Box::new(OnClose::new(ground("on-close", 2))),
        Box::new(Append::new(ground("append", 3))),
        Box::new(Blocks::new(ground("blocks", 4))),
        Box::new(Names::new(ground("names", 5), hard_links)),
        Box::new(Flushed::new(ground("flushed", 6), Box::new(flush))),
    ]
}

/// A writer that stopped, the number of its steps, and the error that stopped it, if any.
type Ended = (Box<dyn Writer>, u64, Option<io::Error>);

struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Ended>>,
}

impl Load {
    fn start(writers: Vec<Box<dyn Writer>>, rng: &mut ChaCha8Rng) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let run = |mut writer: Box<dyn Writer>| {
            let (stop, mut rng) = (stop.clone(), ChaCha8Rng::from_rng(rng));
            thread::spawn(move || {
                let mut steps = 0;
                while !stop.load(Ordering::Relaxed) {
                    if let Err(error) = writer.step(&mut rng) {
                        return (writer, steps, Some(error));
                    }
                    steps += 1;
                }
                (writer, steps, None)
            })
        };
        Self { threads: writers.into_iter().map(run).collect(), stop }
    }

    /// Returns the writers, the total number of their steps, and the errors that stopped some of them.
    fn end(self) -> (Vec<Box<dyn Writer>>, u64, Vec<String>) {
        self.stop.store(true, Ordering::Relaxed);
        let deadline = Instant::now() + HELD_UP;
        let (mut writers, mut total, mut errors) = (Vec::new(), 0, Vec::new());
        for (at, thread) in self.threads.into_iter().enumerate() {
            while !thread.is_finished() {
                assert!(Instant::now() < deadline, "writer {at} hangs for {HELD_UP:?}");
                thread::sleep(Duration::from_millis(1));
            }
            let (writer, steps, error) = thread.join().expect("a writer panicked");
            writers.push(writer);
            total += steps;
            errors.extend(error.map(|e| format!("writer {at}: {e}")));
        }
        (writers, total, errors)
    }
}

/// Kills processes of a mount under write load: `kills` times, or `FOREBAY_KILLS` times if that is set. Sometimes kills
/// the server of its pool, too. Checks after each kill everything that was acknowledged.
///
/// # Panics
/// If something is lost or invented. The message has the seed.
pub fn sweep(mount: &Mount, kills: u64, hard_links: bool, mut server: Option<&mut dyn Server>) {
    let seed = settings::seed();
    let kills = settings::number("FOREBAY_KILLS").unwrap_or(kills);
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut writers = writers(mount, hard_links);
    let (mut steps, mut held_up) = (0, Duration::ZERO);
    for round in 1..=kills {
        let both = round % BOTH_EVERY == 0;
        let load = Load::start(writers, &mut rng);
        thread::sleep(Duration::from_micros(rng.random_range(2_000..300_000)));
        if let Some(server) = server.as_deref_mut().filter(|_| round % SERVER_EVERY == 0) {
            server.kill();
            thread::sleep(Duration::from_millis(rng.random_range(1..300)));
            server.start_again();
        }
        let killed = Instant::now();
        let (done, errors);
        if both {
            mount.kill_all();
            (writers, done, _) = load.end();
            writers.iter_mut().for_each(|w| w.forget_open_files());
            mount.mount();
            errors = Vec::new();
        } else {
            let old = mount.worker();
            mount.kill_worker();
            mount.wait_for_other_worker(old);
            held_up = held_up.max(killed.elapsed());
            thread::sleep(Duration::from_millis(30));
            (writers, done, errors) = load.end();
        }
        steps += done;
        let mut wrong = errors;
        wrong.extend(writers.iter_mut().flat_map(|w| w.settle()));
        if wrong.is_empty() && round % POOL_EVERY == 0 {
            mount.flush();
            wrong.extend(writers.iter().flat_map(|w| w.check_pool()));
        }
        let what = if both { "supervisor and worker" } else { "the worker" };
        assert!(wrong.is_empty(), "seed {seed}, kill {round} of {what}:\n{}\n{}", wrong.join("\n"), mount.log());
    }
    mount.flush();
    let left: Vec<String> = writers.iter().flat_map(|w| w.check_pool()).collect();
    assert!(left.is_empty(), "in the pool at the end:\n{}", left.join("\n"));
    drop(writers);
    mount.forebay(["fsck"], &[&mount.place.mnt()]).ok();
    println!("{kills} kills, {steps} steps of writers, at most {held_up:?} without a worker: 0 lost, 0 invented");
}
