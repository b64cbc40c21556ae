//! Writers with files that describe themselves: each writer records what was acknowledged to it, and reports lost and
//! invented content after a crash.
//!
//! A killed process does not lose the page cache. So every *acknowledged* change must survive, not only synced ones. A
//! change that was in progress when an error came may or may not have taken effect.

mod blocks;
mod names;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::IntoRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_backends::RESERVED_PREFIX;
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::mount::content;
use crate::tree::{Files, Tree};
pub use blocks::Blocks;
pub use names::Names;

/// One thread's work on a directory of its own.
pub trait Writer: Send {
    /// Does one piece of work. Records each acknowledgement before it returns.
    ///
    /// # Errors
    /// Those of the file system: the piece is incomplete.
    fn step(&mut self, rng: &mut ChaCha8Rng) -> io::Result<()>;

    /// Returns every difference between the directory and the acknowledged changes. No step runs meanwhile. Afterwards
    /// an incomplete change counts as made or as not made, as it was found.
    fn settle(&mut self) -> Vec<String>;

    /// Drops the open files, because their mount is gone.
    fn forget_open_files(&mut self) {}

    /// Returns every difference in the pool, after everything was flushed and settled.
    fn check_pool(&self) -> Vec<String>;
}

/// The directory of a writer, seen through the mount and in the pool.
#[derive(Debug, Clone)]
pub struct Ground {
    pub here: Files,
    pub pool: Arc<dyn Tree>,
    /// Makes the contents of this writer differ from those of other writers.
    pub tag: u64,
}

impl Ground {
    fn name(&self, name: &str) -> PathBuf {
        self.here.path(name)
    }
}

/// The state of a name: the tag of its content, or `None` if the name does not exist.
type Held = Option<u64>;

/// The state that a name must have, and the one that it may have instead if the last change was not acknowledged.
#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    now: Held,
    maybe: Option<Held>,
}

impl Slot {
    /// Notes that a change begins. `done` follows after its success.
    fn begin(&mut self, then: Held) {
        self.maybe = Some(then);
    }

    fn done(&mut self) {
        if let Some(then) = self.maybe.take() {
            self.now = then;
        }
    }

    fn settle(&mut self, what: &str, found: Held) -> Option<String> {
        let fits = found == self.now || self.maybe == Some(found);
        let wrong = (!fits).then(|| format!("{what} holds {found:x?}, but {self:x?}"));
        *self = Self { now: found, maybe: None };
        wrong
    }
}

fn length(tag: u64) -> usize {
    16 + (tag.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44) as usize % (96 << 10)
}

fn generate(tag: u64) -> Vec<u8> {
    content(tag, length(tag))
}

/// Returns the tag of a file with content from [`generate`]; any other content is an error.
fn held(dir: &dyn Tree, name: &str) -> Result<Held, String> {
    match dir.read(name) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(format!("{dir}/{name}: {e}")),
        Ok(bytes) => {
            let tag = bytes.first_chunk().map_or(0, |head| u64::from_le_bytes(*head));
            let right = generate(tag);
            match difference(&right, &bytes) {
                None => Ok(Some(tag)),
                Some(why) => Err(format!("{dir}/{name} is no content of ours: tag {tag:x}, {why}")),
            }
        }
    }
}

/// Describes the first difference between two contents.
fn difference(right: &[u8], found: &[u8]) -> Option<String> {
    if right == found {
        return None;
    }
    let at = right.iter().zip(found).position(|(a, b)| a != b).unwrap_or(right.len().min(found.len()));
    let zeros = found[at..].iter().take_while(|b| **b == 0).count();
    Some(format!("{} bytes instead of {}, other from {at} on, {zeros} zeros there", found.len(), right.len()))
}

fn write_new(path: &Path, bytes: &[u8]) -> io::Result<File> {
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    // In pieces, so that a kill can happen between two of them.
    for piece in bytes.chunks(24 << 10) {
        file.write_all(piece)?;
    }
    Ok(file)
}

/// Closes a file, and returns the result of `close` itself.
fn close(file: File) -> io::Result<()> {
    // SAFETY: the descriptor is ours, and is not used after this.
    if unsafe { libc::close(file.into_raw_fd()) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns all names of a directory, so that invented ones are found.
fn names(dir: &dyn Tree) -> Vec<String> {
    let mut found = match dir.names() {
        // A killed upload leaves an object with a reserved name in the pool. No mount shows it.
        Ok(mut names) => {
            names.retain(|name| !name.as_bytes().starts_with(RESERVED_PREFIX));
            names
        }
        Err(e) => vec![format!("({e})")],
    };
    found.sort();
    found
}

/// Returns the differences between slots and their names, in the mount or in the pool.
fn differences(dir: &dyn Tree, slots: &BTreeMap<String, Slot>) -> Vec<String> {
    let mut wrong = Vec::new();
    let expected: Vec<&String> = slots.iter().filter(|(_, s)| s.now.is_some()).map(|(n, _)| n).collect();
    let found = names(dir);
    if !found.iter().eq(expected.iter().copied()) {
        wrong.push(format!("{dir} lists {found:?}, not {expected:?}"));
    }
    for (name, slot) in slots {
        match held(dir, name) {
            Err(why) => wrong.push(why),
            Ok(found) if found != slot.now => {
                wrong.push(format!("{dir}/{name} holds {found:x?}, not {:x?}", slot.now));
            }
            Ok(_) => {}
        }
    }
    wrong
}

/// Settles slots against a directory. Removes names with `tmp`, for which nothing is promised.
fn settle(dir: &Files, slots: &mut BTreeMap<String, Slot>) -> Vec<String> {
    let mut wrong = Vec::new();
    for name in names(dir).iter().filter(|n| n.starts_with("tmp")) {
        if let Err(e) = fs::remove_file(dir.path(name)) {
            wrong.push(format!("{dir}/{name} cannot be removed: {e}"));
        }
    }
    for (name, slot) in slots.iter_mut() {
        match held(dir, name) {
            Err(why) => wrong.push(why),
            Ok(found) => wrong.extend(slot.settle(&format!("{dir}/{name}"), found)),
        }
    }
    wrong.extend(differences(dir, slots));
    wrong
}

/// Creates, writes and syncs a file, and renames it over the old one. Sometimes unlinks a file.
pub struct Replace {
    ground: Ground,
    slots: BTreeMap<String, Slot>,
    count: u64,
}

impl Replace {
    pub fn new(ground: Ground) -> Self {
        Self { ground, slots: BTreeMap::new(), count: 0 }
    }
}

impl Writer for Replace {
    fn step(&mut self, rng: &mut ChaCha8Rng) -> io::Result<()> {
        self.count += 1;
        let tag = self.ground.tag | self.count;
        let name = format!("f-{}", rng.random_range(0..8));
        let path = self.ground.name(&name);
        let slot = self.slots.entry(name).or_default();
        if slot.now.is_some() && rng.random_ratio(1, 4) {
            slot.begin(None);
            fs::remove_file(path)?;
        } else {
            let part = self.ground.name(&format!("tmp-{}", self.count));
            write_new(&part, &generate(tag))?.sync_all()?;
            slot.begin(Some(tag));
            fs::rename(part, path)?;
        }
        slot.done();
        Ok(())
    }

    fn settle(&mut self) -> Vec<String> {
        settle(&self.ground.here, &mut self.slots)
    }

    fn check_pool(&self) -> Vec<String> {
        differences(&*self.ground.pool, &self.slots)
    }
}

/// Creates, writes and closes files under the policy `on-close`: after a successful close the pool has the content.
pub struct OnClose {
    ground: Ground,
    slots: BTreeMap<String, Slot>,
    count: u64,
    broken: Vec<String>,
}

impl OnClose {
    pub fn new(ground: Ground) -> Self {
        Self { ground, slots: BTreeMap::new(), count: 0, broken: Vec::new() }
    }
}

impl Writer for OnClose {
    fn step(&mut self, rng: &mut ChaCha8Rng) -> io::Result<()> {
        self.count += 1;
        let tag = self.ground.tag | self.count;
        if self.slots.len() >= 8 {
            let at = rng.random_range(0..self.slots.len());
            let name = self.slots.keys().nth(at).expect("it is in range").clone();
            let slot = self.slots.get_mut(&name).expect("it was just there");
            slot.begin(None);
            fs::remove_file(self.ground.name(&name))?;
            self.slots.remove(&name);
        }
        // The prefix means that nothing is promised for this name before close returns.
        let name = format!("tmp-{}", self.count);
        let file = write_new(&self.ground.name(&name), &generate(tag))?;
        close(file)?;
        match held(&*self.ground.pool, &name) {
            Ok(Some(found)) if found == tag => {}
            other => self.broken.push(format!("{name} was closed, but the pool has {other:x?}, not {tag:x}")),
        }
        let kept = format!("c-{}", self.count);
        let slot = self.slots.entry(kept.clone()).or_default();
        slot.begin(Some(tag));
        fs::rename(self.ground.name(&name), self.ground.name(&kept))?;
        slot.done();
        Ok(())
    }

    fn settle(&mut self) -> Vec<String> {
        let mut wrong = std::mem::take(&mut self.broken);
        wrong.extend(settle(&self.ground.here, &mut self.slots));
        self.slots.retain(|_, slot| slot.now.is_some());
        wrong
    }

    fn check_pool(&self) -> Vec<String> {
        differences(&*self.ground.pool, &self.slots)
    }
}

/// Appends to a file that stays open across crashes, and sometimes syncs it.
pub struct Append {
    ground: Ground,
    file: Option<File>,
    number: u64,
    acknowledged: usize,
    attempted: usize,
}

impl Append {
    const FILE_BYTES: usize = 2 << 20;

    pub fn new(ground: Ground) -> Self {
        Self { ground, file: None, number: 0, acknowledged: 0, attempted: 0 }
    }

    fn name(&self) -> String {
        format!("log-{}", self.number)
    }

    fn right(&self) -> Vec<u8> {
        content(self.ground.tag | self.number, self.attempted)
    }

    fn check(&self, dir: &dyn Tree) -> (usize, Vec<String>) {
        let name = self.name();
        let found = match dir.read(&name) {
            Ok(found) => found,
            Err(e) if e.kind() == io::ErrorKind::NotFound && self.acknowledged == 0 => Vec::new(),
            Err(e) => return (0, vec![format!("{dir}/{name}: {e}")]),
        };
        let mut wrong = Vec::new();
        if found.len() < self.acknowledged || found.len() > self.attempted {
            let (min, max) = (self.acknowledged, self.attempted);
            wrong.push(format!("{dir}/{name} has {} bytes, not {min} to {max}", found.len()));
        }
        let common = found.len().min(self.attempted);
        if let Some(why) = difference(&self.right()[..common], &found[..common]) {
            wrong.push(format!("{dir}/{name}: {why}"));
        }
        (found.len(), wrong)
    }
}

impl Writer for Append {
    fn step(&mut self, rng: &mut ChaCha8Rng) -> io::Result<()> {
        if self.acknowledged > Self::FILE_BYTES {
            self.file = None;
            fs::remove_file(self.ground.name(&self.name()))?;
            self.number += 1;
            (self.acknowledged, self.attempted) = (0, 0);
        }
        if rng.random_ratio(1, 16) {
            self.file = None;
        }
        let path = self.ground.name(&self.name());
        let mut file = match self.file.take() {
            Some(file) => file,
            None => OpenOptions::new().append(true).create(true).open(path)?,
        };
        let start = self.acknowledged;
        self.attempted = start + rng.random_range(1..8000);
        let right = self.right();
        file.write_all(&right[start..])?;
        self.acknowledged = self.attempted;
        if rng.random_ratio(1, 4) {
            file.sync_data()?;
        }
        self.file = Some(file);
        Ok(())
    }

    fn settle(&mut self) -> Vec<String> {
        let (len, wrong) = self.check(&self.ground.here);
        if self.acknowledged != self.attempted {
            self.file = None;
        }
        (self.acknowledged, self.attempted) = (len, len);
        wrong
    }

    fn forget_open_files(&mut self) {
        self.file = None;
    }

    fn check_pool(&self) -> Vec<String> {
        self.check(&*self.ground.pool).1
    }
}

/// Flushes a path, and returns whether that succeeded.
pub type FlushPath = Box<dyn Fn(&Path) -> io::Result<bool> + Send>;

/// Writes without any sync, then requests a flush. If the flush succeeds, the pool has the content.
pub struct Flushed {
    ground: Ground,
    slots: BTreeMap<String, Slot>,
    count: u64,
    broken: Vec<String>,
    /// Runs `forebay flush --wait PATH`, and returns whether that succeeded.
    flush: FlushPath,
}

impl Flushed {
    pub fn new(ground: Ground, flush: FlushPath) -> Self {
        Self { ground, slots: BTreeMap::new(), count: 0, broken: Vec::new(), flush }
    }
}

impl Writer for Flushed {
    fn step(&mut self, rng: &mut ChaCha8Rng) -> io::Result<()> {
        self.count += 1;
        let tag = self.ground.tag | self.count;
        let name = format!("g-{}", rng.random_range(0..4));
        let part = self.ground.name(&format!("tmp-{}", self.count));
        let slot = self.slots.entry(name.clone()).or_default();
        drop(write_new(&part, &generate(tag))?);
        slot.begin(Some(tag));
        fs::rename(part, self.ground.name(&name))?;
        slot.done();
        if (self.flush)(&self.ground.here.0)? {
            match held(&*self.ground.pool, &name) {
                Ok(Some(found)) if found == tag => {}
                other => self.broken.push(format!("{name} was flushed, but the pool has {other:x?}, not {tag:x}")),
            }
        }
        Ok(())
    }

    fn settle(&mut self) -> Vec<String> {
        let mut wrong = std::mem::take(&mut self.broken);
        wrong.extend(settle(&self.ground.here, &mut self.slots));
        wrong
    }

    fn check_pool(&self) -> Vec<String> {
        differences(&*self.ground.pool, &self.slots)
    }
}
