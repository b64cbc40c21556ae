//! The loop of the dashboard. A thread takes the samples, so that keys are answered even if a daemon is silent.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use forebay_daemon::{Failure, FailureKind};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};

use super::mount_sample::{Details, MountSampler};
use super::screen::{Screen, Update};
use crate::exit::Exit;
use crate::registration;

/// How long a key may wait for its answer.
const TICK: Duration = Duration::from_millis(50);
/// Rates are differences. The second sample comes early, so that the screen does not stay empty.
const FIRST_INTERVAL: Duration = Duration::from_millis(250);

/// The mount whose details are shown.
type Watched = Arc<Mutex<(PathBuf, Details)>>;

pub fn run(path: Option<&Path>, interval: Duration) -> Result<Exit, Failure> {
    // If there is no mount, the command fails as it does without a terminal.
    registration::mounts(path)?;
    let (tell, news) = mpsc::channel();
    let watched = Watched::default();
    let (path, asked) = (path.map(Path::to_path_buf), watched.clone());
    thread::Builder::new()
        .name("samples".into())
        .spawn(move || sample(path.as_deref(), interval, &asked, &tell))
        .map_err(|e| Failure::io("cannot start a thread", &e))?;
    let mut terminal = ratatui::try_init().map_err(|e| {
        // It may have got half way.
        ratatui::restore();
        Failure::io("cannot draw on this terminal", &e)
    })?;
    let shown = show(&mut terminal, &news, &watched);
    ratatui::restore();
    shown.map(|()| Exit::Done)
}

/// Samples all mounts until nobody receives the news.
fn sample(path: Option<&Path>, interval: Duration, watched: &Watched, tell: &Sender<Update>) {
    let mut sampler = MountSampler::default();
    let mut wait = interval.min(FIRST_INTERVAL);
    let mut known = BTreeSet::new();
    loop {
        // The daemons may all be gone now, and be back later.
        let entries = registration::mounts(path).unwrap_or_default();
        let mounted: BTreeSet<PathBuf> = entries.iter().map(|entry| entry.mountpoint().to_path_buf()).collect();
        for mountpoint in known.difference(&mounted).cloned() {
            let sample = Err("it is not mounted any more".to_owned());
            if tell.send(Update { mountpoint, sample }).is_err() {
                return;
            }
        }
        known.extend(mounted);
        for entry in entries {
            let (mount, details) = watched.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let details = if mount == entry.mountpoint() { details } else { Details::None };
            let sample = sampler.sample(&entry, interval, &details).map_err(|failure| failure.to_string());
            if tell.send(Update { mountpoint: entry.mountpoint().to_path_buf(), sample }).is_err() {
                return;
            }
        }
        thread::sleep(wait);
        wait = interval;
    }
}

fn show(terminal: &mut DefaultTerminal, news: &Receiver<Update>, watched: &Watched) -> Result<(), Failure> {
    let mut screen = Screen::new();
    let failed = |e: io::Error| Failure::io("the terminal is gone", &e);
    loop {
        loop {
            match news.try_recv() {
                Ok(update) => screen.take(update),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    return Err(Failure::new(FailureKind::Other, "the thread that takes the samples has ended"));
                }
            }
        }
        terminal.draw(|frame| screen.draw(frame)).map_err(failed)?;
        if event::poll(TICK).map_err(failed)?
            && let Event::Key(key) = event::read().map_err(failed)?
            && key.kind == KeyEventKind::Press
            && !screen.press(key)
        {
            return Ok(());
        }
        *watched.lock().unwrap_or_else(PoisonError::into_inner) = screen.watched();
    }
}
