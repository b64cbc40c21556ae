//! Changes in place.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::{Ground, Held, Slot, Writer, difference};
use crate::mount::content;
use crate::tree::Tree;

/// Overwrites blocks of one file in place.
pub struct Blocks {
    ground: Ground,
    file: Option<File>,
    slots: Vec<Slot>,
    count: u64,
}

impl Blocks {
    const BLOCK: usize = 4096;
    const NAME: &str = "blocks";

    pub fn new(ground: Ground) -> Self {
        Self { ground, file: None, slots: vec![Slot::default(); 256], count: 0 }
    }

    fn open(&self) -> io::Result<File> {
        let path = self.ground.name(Self::NAME);
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
    }

    fn read(&self, dir: &dyn Tree) -> Result<Vec<Held>, String> {
        let name = Self::NAME;
        let bytes = match dir.read(name) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound && self.slots.iter().all(|s| s.now.is_none()) => Vec::new(),
            Err(e) => return Err(format!("{dir}/{name}: {e}")),
        };
        let mut found = vec![None; self.slots.len()];
        for (at, block) in bytes.chunks(Self::BLOCK).enumerate() {
            let tag = block.first_chunk().map_or(0, |head| u64::from_le_bytes(*head));
            if block.iter().all(|b| *b == 0) {
                continue;
            }
            if let Some(why) = difference(&content(tag, Self::BLOCK), block) {
                return Err(format!("{dir}/{name} block {at} is none of ours: tag {tag:x}, {why}"));
            }
            match found.get_mut(at) {
                Some(slot) => *slot = Some(tag),
                None => return Err(format!("{dir}/{name} has {} bytes", bytes.len())),
            }
        }
        Ok(found)
    }
}

impl Writer for Blocks {
    fn step(&mut self, rng: &mut ChaCha8Rng) -> io::Result<()> {
        let file = match self.file.take() {
            Some(file) if !rng.random_ratio(1, 32) => file,
            _ => self.open()?,
        };
        for _ in 0..8 {
            self.count += 1;
            let tag = self.ground.tag | self.count;
            let at = rng.random_range(0..self.slots.len());
            self.slots[at].begin(Some(tag));
            file.write_all_at(&content(tag, Self::BLOCK), (at * Self::BLOCK) as u64)?;
            self.slots[at].done();
        }
        if rng.random_ratio(1, 2) {
            file.sync_all()?;
        }
        self.file = Some(file);
        Ok(())
    }

    fn settle(&mut self) -> Vec<String> {
        if self.slots.iter().any(|s| s.maybe.is_some()) {
            self.file = None;
        }
        match self.read(&self.ground.here) {
            Err(why) => vec![why],
            Ok(found) => {
                let slots = self.slots.iter_mut().zip(found).enumerate();
                slots.filter_map(|(at, (slot, found))| slot.settle(&format!("block {at}"), found)).collect()
            }
        }
    }

    fn forget_open_files(&mut self) {
        self.file = None;
    }

    fn check_pool(&self) -> Vec<String> {
        match self.read(&*self.ground.pool) {
            Err(why) => vec![why],
            Ok(found) if found.iter().eq(self.slots.iter().map(|s| &s.now)) => Vec::new(),
            Ok(_) => vec![format!("{}/{} is not what was written", self.ground.pool, Self::NAME)],
        }
    }
}
