//! Writers whose files describe themselves: each knows what it was promised, and can tell what is lost and what is
//! invented after a crash.
//!
//! A killed process loses nothing of the page cache, so that what was *acknowledged* must be there again, not only
//! what was synced. What was under way when an error came may be there or not.

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
    /// One piece of work. What it has been told is remembered before it returns.
    ///
    /// # Errors
    /// Those of the file system: the piece is half done.
    fn step(&mut self, rng: &mut ChaCha8Rng) -> io::Result<()>;

    /// Every difference between what is there and what was promised. Nothing is under way meanwhile; what was half
    /// done counts as decided after this.
    fn settle(&mut self) -> Vec<String>;

    /// The mount that open files belonged to is gone.
    fn forget_open_files(&mut self) {}

    /// Every difference in the pool, after all was flushed and settled.
    fn check_pool(&self) -> Vec<String>;
}

/// Where a writer works: the same directory through the mount and in the pool.
#[derive(Debug, Clone)]
pub struct Ground {
    pub here: Files,
    pub pool: Arc<dyn Tree>,
    /// Makes contents differ from those of other writers.
    pub tag: u64,
}

impl Ground {
    fn name(&self, name: &str) -> PathBuf {
        self.here.path(name)
    }
}

/// What a name holds: the tag of its content, if it is there.
type Held = Option<u64>;

/// What a name must hold, and what it may hold instead where the last change was not acknowledged.
#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    now: Held,
    maybe: Option<Held>,
}

impl Slot {
    /// Around a change: `begin` before it, `done` after its success.
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

/// The tag of a file that was written by [`generate`]; whatever else it holds is an invention.
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

/// Where two contents differ first.
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
    // In pieces, so that a kill may come between them.
    for piece in bytes.chunks(24 << 10) {
        file.write_all(piece)?;
    }
    Ok(file)
}

/// The outcome of `close` itself.
fn close(file: File) -> io::Result<()> {
    // SAFETY: the descriptor is ours, and nobody uses it after this.
    if unsafe { libc::close(file.into_raw_fd()) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Every name of a directory, to find invented ones.
fn names(dir: &dyn Tree) -> Vec<String> {
    let mut found = match dir.names() {
        // What a killed upload leaves in the pool has a reserved name, which no mount shows.
        Ok(mut names) => {
            names.retain(|name| !name.as_bytes().starts_with(RESERVED_PREFIX));
            names
        }
        Err(e) => vec![format!("({e})")],
    };
    found.sort();
    found
}

/// Names that slots describe, in the mount or in the pool.
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

/// Settles slots against a directory, in which names with `tmp` are nobody's promise.
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

/// create + write + fsync + rename over the old one, and now and then unlink.
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

/// create + write + close where the policy says `on-close`: what close acknowledged is in the pool.
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
        // The prefix says that nothing is promised of it before close returns.
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

/// Appends to a file that stays open over crashes, and syncs it now and then.
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

/// Flushes a path, and says whether it succeeded.
pub type FlushPath = Box<dyn Fn(&Path) -> io::Result<bool> + Send>;

/// Writes without any sync, then calls for a flush: where that succeeds, the pool has it.
pub struct Flushed {
    ground: Ground,
    slots: BTreeMap<String, Slot>,
    count: u64,
    broken: Vec<String>,
    /// `forebay flush --wait PATH`, and whether it succeeded.
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
