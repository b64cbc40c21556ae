//! A program that reads a directory in parts, while names in it change.

use std::collections::BTreeSet;

use forebay_engine::Ino;

use super::Failure;
use super::op::Spot;
use super::run::Run;

type Names = BTreeSet<Vec<u8>>;

/// The progress of such a program.
pub struct Reading {
    dir: Ino,
    /// The cookie of the last entry that was read; 0 at the beginning.
    at: u64,
    seen: Names,
    /// The names that existed at every moment since the beginning.
    always: Names,
    /// The names that existed at some moment since the beginning.
    ever: Names,
}

impl Run {
    /// Reads the next entries of the directory that is being read, or begins with another one.
    pub fn read_dir_part(&mut self, dir: u8, entries: u8) -> Result<(), Failure> {
        if self.reading.is_none() {
            let Some(place) = self.place(Spot { dir, name: 0 })? else { return Ok(()) };
            let names: Names = self.model.entries(place.dir).keys().cloned().collect();
            let (always, ever) = (names.clone(), names);
            self.reading = Some(Reading { dir: place.dir_ino, at: 0, seen: Names::new(), always, ever });
        }
        self.note_names();
        let Some(mut reading) = self.reading.take() else { return Ok(()) };
        let overlay = self.overlay();
        let got = self.machine.run(overlay.dir_order(reading.dir, |_| None));
        let Some(order) = self.judge(got, Ok(()))? else { return Ok(()) };
        let mut part = order.after(reading.at).take(usize::from(entries)).peekable();
        if part.peek().is_some() {
            for placed in part {
                let name = placed.name.escape_ascii();
                if !reading.ever.contains(placed.name) {
                    return Err(format!("{name} was read, and was never there"));
                }
                if !reading.seen.insert(placed.name.to_vec()) {
                    return Err(format!("{name} was read twice"));
                }
                reading.at = placed.cookie;
            }
            self.reading = Some(reading);
            return Ok(());
        }
        match reading.always.difference(&reading.seen).next() {
            Some(name) => Err(format!("{} was there all the time, and was not read", name.escape_ascii())),
            None => Ok(()),
        }
    }

    /// Notes the current names of the directory that is being read. Ends the reading if the directory is gone.
    pub fn note_names(&mut self) {
        let Some(reading) = &mut self.reading else { return };
        let dir = self.model.dirs().into_iter().find(|(id, _)| self.model.node(*id).ino == Some(reading.dir));
        let Some((dir, _)) = dir else {
            self.reading = None;
            return;
        };
        let names: Names = self.model.entries(dir).keys().cloned().collect();
        reading.always.retain(|name| names.contains(name));
        reading.ever.extend(names);
    }
}
