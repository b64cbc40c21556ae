//! The loop of the dashboard. Each mount has a thread that takes its samples, so that a silent daemon delays neither keys
//! nor the samples of other mounts.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forebay_daemon::registry::RegisteredMount;
use forebay_daemon::signals::Held;
use forebay_daemon::{Failure, FailureKind};
use ratatui::DefaultTerminal;
use ratatui::crossterm::Command as _;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use ratatui::crossterm::terminal::{LeaveAlternateScreen, disable_raw_mode};
use rustix::fs::OFlags;

use super::mount_sample::{Details, MountSampler};
use super::screen::{Screen, Update};
use crate::exit::Exit;
use crate::registration;

/// How long news may wait.
const TICK: Duration = Duration::from_millis(50);
/// Rates are differences. The second sample comes early, so that the screen does not stay empty.
const FIRST_INTERVAL: Duration = Duration::from_millis(250);

/// The mount whose details are shown.
type Watched = Arc<Mutex<(PathBuf, Details)>>;

pub fn run(path: Option<&Path>, interval: Duration) -> Result<Exit, Failure> {
    // If there is no mount, the command fails as it does without a terminal.
    registration::mounts(path)?;
    let signals = Held::new(&Held::ASK_TO_END).map_err(|e| Failure::io("cannot wait for signals", &e))?;
    // A terminal that is gone, or that was stopped, blocks the thread that draws.
    start("signals", move || {
        if signals.wait(None).is_some() {
            restore_without_waiting();
            forebay_daemon::end_process(0);
        }
    })?;
    let (tell, news) = mpsc::channel();
    let watched = Watched::default();
    let (path, asked) = (path.map(Path::to_path_buf), watched.clone());
    start("mounts", move || look_for_mounts(path.as_deref(), interval, &asked, &tell))?;
    let mut terminal = ratatui::try_init().map_err(|e| {
        // It may have got half way.
        ratatui::restore();
        Failure::io("cannot draw on this terminal", &e)
    })?;
    let shown = show(&mut terminal, &news, &watched);
    ratatui::restore();
    shown.map(|()| Exit::Done)
}

/// Restores the terminal as far as that is possible at once: the thread that draws may hold the lock of the output.
fn restore_without_waiting() {
    let _ = disable_raw_mode();
    let terminal = fs::File::options().write(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open("/dev/tty");
    if let Ok(mut terminal) = terminal {
        let mut codes = String::new();
        let _ = LeaveAlternateScreen.write_ansi(&mut codes).and_then(|()| Show.write_ansi(&mut codes));
        let _ = terminal.write_all(codes.as_bytes());
    }
}

fn start(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Failure> {
    let started = thread::Builder::new().name(name.to_owned()).spawn(work);
    started.map_err(|e| Failure::io("cannot start a thread", &e))
}

/// Keeps a thread for each mount, until nobody receives the news.
fn look_for_mounts(path: Option<&Path>, interval: Duration, watched: &Watched, tell: &Sender<Update>) {
    let mut samplers: HashMap<PathBuf, JoinHandle<()>> = HashMap::new();
    loop {
        // The daemons may all be gone now, and be back later.
        let entries = registration::mounts(path).unwrap_or_default();
        let is_gone = |mountpoint: &Path| entries.iter().all(|entry| entry.mountpoint() != mountpoint);
        for mountpoint in samplers.keys().filter(|mountpoint| is_gone(mountpoint)).cloned() {
            let sample = Err("it is not mounted any more".to_owned());
            if tell.send(Update { mountpoint, sample }).is_err() {
                return;
            }
        }
        // All mounts are known, in their order, before the first sample of one of them comes.
        for entry in entries.iter().filter(|entry| !samplers.contains_key(entry.mountpoint())) {
            let known = Update { mountpoint: entry.mountpoint().to_path_buf(), sample: Ok(None) };
            if tell.send(known).is_err() {
                return;
            }
        }
        for entry in entries {
            if samplers.get(entry.mountpoint()).is_none_or(JoinHandle::is_finished) {
                let mountpoint = entry.mountpoint().to_path_buf();
                let (asked, told) = (watched.clone(), tell.clone());
                match start("samples", move || sample(&entry, interval, &asked, &told)) {
                    Ok(sampler) => _ = samplers.insert(mountpoint, sampler),
                    Err(failure) => _ = tell.send(Update { mountpoint, sample: Err(failure.to_string()) }),
                }
            }
        }
        thread::sleep(interval);
    }
}

/// Samples a mount until it fails, or nobody receives the news.
fn sample(entry: &RegisteredMount, interval: Duration, watched: &Watched, tell: &Sender<Update>) {
    let mut sampler = MountSampler::default();
    let mut wait = interval.min(FIRST_INTERVAL);
    loop {
        let (mount, details) = watched.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let details = if mount == entry.mountpoint() { details } else { Details::None };
        let sample = sampler.sample(entry, interval, &details).map_err(|failure| failure.to_string());
        let has_failed = sample.is_err();
        let is_over = tell.send(Update { mountpoint: entry.mountpoint().to_path_buf(), sample }).is_err();
        // Another daemon may serve the mount now: a new thread looks it up.
        if is_over || has_failed {
            return;
        }
        thread::sleep(wait);
        wait = interval;
    }
}

/// Draws news, and what keys change, until a key ends that.
fn show(terminal: &mut DefaultTerminal, news: &Receiver<Update>, watched: &Watched) -> Result<(), Failure> {
    let mut screen = Screen::new();
    let mut is_changed = true;
    let failed = |e: io::Error| Failure::io("the terminal is gone", &e);
    loop {
        loop {
            match news.try_recv() {
                Ok(update) => {
                    screen.take(update);
                    is_changed = true;
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    return Err(Failure::new(FailureKind::Other, "the thread that looks for mounts has ended"));
                }
            }
        }
        if std::mem::take(&mut is_changed) {
            terminal.draw(|frame| screen.draw(frame)).map_err(failed)?;
        }
        if event::poll(TICK).map_err(failed)? {
            // A new size of the terminal is an event, too.
            is_changed = true;
            if let Event::Key(key) = event::read().map_err(failed)?
                && key.kind == KeyEventKind::Press
                && !screen.press(key)
            {
                return Ok(());
            }
            *watched.lock().unwrap_or_else(PoisonError::into_inner) = screen.watched();
        }
    }
}
