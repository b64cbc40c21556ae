//! The contents that existed at some moment, and the contents that must not be lost.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::content::{Content, describe};
use super::tree::Tree;

#[derive(Debug, Default)]
pub struct Effects {
    /// Every content that any file had as a whole at some moment, in the mount or in the pool.
    known: HashSet<u64>,
    /// The contents that a client wrote, except those that a client removed or replaced and knew.
    owed: Vec<Content>,
}

impl Effects {
    pub fn seen(&mut self, content: &Content) {
        self.known.insert(digest(content));
    }

    pub fn is_known(&self, content: &Content) -> bool {
        self.known.contains(&digest(content))
    }

    /// Records the contents of all files of a tree.
    pub fn take_all(&mut self, tree: &Tree) {
        for content in tree.nodes.values().filter_map(|n| n.content()) {
            self.seen(content);
        }
    }

    /// Records that a client replaced `old` with `new`, knowing `old`.
    pub fn replaced(&mut self, old: &Content, new: &Content) {
        self.given_up(old);
        self.seen(new);
        // Zeros do not identify their writer.
        if new.iter().any(|b| *b != 0) {
            self.owed.push(new.clone());
        }
    }

    pub fn given_up(&mut self, content: &Content) {
        self.owed.retain(|owed| owed != content);
    }

    /// Checks that each owed content is in a file of the tree.
    pub fn check(&self, tree: &Tree) -> Result<(), String> {
        let there: HashSet<u64> = tree.nodes.values().filter_map(|n| n.content()).map(digest).collect();
        match self.owed.iter().find(|owed| !there.contains(&digest(owed))) {
            Some(lost) => Err(format!("lost: {}", describe(lost))),
            None => Ok(()),
        }
    }
}

fn digest(content: &Content) -> u64 {
    let mut hasher = DefaultHasher::new();
    content.hash(&mut hasher);
    hasher.finish()
}
