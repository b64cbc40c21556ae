//! Which contents ever were, and which must not be lost.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::content::{Content, describe};
use super::tree::Tree;

#[derive(Debug, Default)]
pub struct Effects {
    /// Everything that a file of anybody held as a whole at some moment.
    known: HashSet<u64>,
    /// What somebody wrote and nobody who knew of it gave up.
    owed: Vec<Content>,
}

impl Effects {
    pub fn seen(&mut self, content: &Content) {
        self.known.insert(digest(content));
    }

    pub fn is_known(&self, content: &Content) -> bool {
        self.known.contains(&digest(content))
    }

    /// All files of a tree.
    pub fn take_all(&mut self, tree: &Tree) {
        for content in tree.nodes.values().filter_map(|n| n.content()) {
            self.seen(content);
        }
    }

    /// Somebody made `new` of `old`, knowing it.
    pub fn replaced(&mut self, old: &Content, new: &Content) {
        self.given_up(old);
        self.seen(new);
        // Zeros say nothing of who wrote them.
        if new.iter().any(|b| *b != 0) {
            self.owed.push(new.clone());
        }
    }

    pub fn given_up(&mut self, content: &Content) {
        self.owed.retain(|owed| owed != content);
    }

    /// Everything that is owed must be in one of the files of a tree.
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
