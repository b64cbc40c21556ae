//! Changes of names.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::{Ground, Held, Slot, Writer};
use crate::tree::Tree;

/// Creates, renames and removes directories, and creates and removes hard links.
pub struct Names {
    ground: Ground,
    /// For each directory: 1 if it has the name `a-N`, 2 if it has `b-N`.
    dirs: Vec<Slot>,
    links: Vec<Slot>,
}

impl Names {
    pub fn new(ground: Ground, hard_links: bool) -> Self {
        Self { ground, dirs: vec![Slot::default(); 8], links: vec![Slot::default(); if hard_links { 8 } else { 0 }] }
    }

    fn dir(&self, side: u64, at: usize) -> PathBuf {
        self.ground.name(&format!("{}-{at}", if side == 1 { "a" } else { "b" }))
    }

    fn turn_dir(&mut self, at: usize) -> io::Result<()> {
        let (from, to) = match self.dirs[at].now {
            None => (None, Some(1)),
            Some(1) => (Some(1), Some(2)),
            held => (held, None),
        };
        self.dirs[at].begin(to);
        let done = match (from, to) {
            (None, Some(to)) => fs::create_dir(self.dir(to, at)),
            (Some(from), Some(to)) => fs::rename(self.dir(from, at), self.dir(to, at)),
            (Some(from), None) => fs::remove_dir(self.dir(from, at)),
            (None, None) => Ok(()),
        };
        done.map_err(|e| io::Error::new(e.kind(), format!("directory {at} from {from:?} to {to:?}: {e}")))?;
        self.dirs[at].done();
        Ok(())
    }

    fn turn_link(&mut self, at: usize) -> io::Result<()> {
        let (base, link) = (self.ground.name("base"), self.ground.name(&format!("link-{at}")));
        let failed = |what: &str, e: io::Error| io::Error::new(e.kind(), format!("{what} {at}: {e}"));
        if !base.exists() {
            File::create(&base).map_err(|e| failed("the file of link", e))?;
        }
        let there = self.links[at].now.is_some();
        self.links[at].begin((!there).then_some(1));
        match there {
            true => fs::remove_file(link).map_err(|e| failed("the removal of link", e))?,
            false => fs::hard_link(base, link).map_err(|e| failed("link", e))?,
        }
        self.links[at].done();
        Ok(())
    }

    fn found(&self, dir: &dyn Tree) -> (Vec<Held>, Vec<Held>, Vec<String>) {
        let there = |name: String| dir.links(&name).is_ok();
        let dirs = (0..self.dirs.len()).map(|at| match (there(format!("a-{at}")), there(format!("b-{at}"))) {
            (false, false) => None,
            (true, false) => Some(1),
            (false, true) => Some(2),
            (true, true) => Some(3),
        });
        let links = (0..self.links.len()).map(|at| there(format!("link-{at}")).then_some(1));
        let (dirs, links): (Vec<Held>, Vec<Held>) = (dirs.collect(), links.collect());
        let mut wrong = Vec::new();
        if let Ok(found) = dir.links("base") {
            let expected = 1 + links.iter().flatten().count() as u64;
            if found != expected {
                wrong.push(format!("{dir}/base has {found} links, not {expected}"));
            }
        }
        (dirs, links, wrong)
    }
}

impl Writer for Names {
    fn step(&mut self, rng: &mut ChaCha8Rng) -> io::Result<()> {
        let at = rng.random_range(0..self.dirs.len());
        if self.links.is_empty() || rng.random_ratio(1, 2) { self.turn_dir(at) } else { self.turn_link(at) }
    }

    fn settle(&mut self) -> Vec<String> {
        let (dirs, links, mut wrong) = self.found(&self.ground.here);
        let dirs = self.dirs.iter_mut().zip(dirs).enumerate();
        wrong.extend(dirs.filter_map(|(at, (slot, found))| slot.settle(&format!("directory {at}"), found)));
        let links = self.links.iter_mut().zip(links).enumerate();
        wrong.extend(links.filter_map(|(at, (slot, found))| slot.settle(&format!("link {at}"), found)));
        wrong
    }

    fn check_pool(&self) -> Vec<String> {
        let (dirs, links, mut wrong) = self.found(&*self.ground.pool);
        if !dirs.iter().eq(self.dirs.iter().map(|s| &s.now)) || !links.iter().eq(self.links.iter().map(|s| &s.now)) {
            wrong.push(format!("{}: {dirs:?} {links:?} are not {self:?}", self.ground.pool));
        }
        wrong
    }
}

impl std::fmt::Debug for Names {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let held = |slots: &[Slot]| slots.iter().map(|s| s.now).collect::<Vec<_>>();
        write!(f, "{:?} {:?}", held(&self.dirs), held(&self.links))
    }
}
