//! A FIFO queue of contents with the sum of their sizes, from which any key can be removed in constant time.

use std::collections::HashMap;

/// The end of the list. A queue holds fewer than `u32::MAX` entries.
const NIL: u32 = u32::MAX;

/// An entry of a queue: one content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct QueueEntry {
    pub key: u64,
    pub bytes: u64,
    /// Uses since it entered the queue, saturating at the policy's maximum.
    pub frequency: u8,
}

#[derive(Debug)]
struct QueueNode {
    entry: QueueEntry,
    /// The neighbour that entered later.
    newer: u32,
    /// The neighbour that entered earlier.
    older: u32,
}

/// A doubly linked list in a slab, with an index. It keeps the memory of its largest size.
#[derive(Debug)]
pub(super) struct EvictionQueue {
    slots: HashMap<u64, u32>,
    nodes: Vec<QueueNode>,
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
    /// Wider than the sizes, so that no sum of them overflows.
    bytes: u128,
}

impl Default for EvictionQueue {
    fn default() -> Self {
        Self::new()
    }
}

impl EvictionQueue {
    pub fn new() -> Self {
        Self { slots: HashMap::new(), nodes: Vec::new(), free: Vec::new(), newest: NIL, oldest: NIL, bytes: 0 }
    }

    pub fn len(&self) -> usize {
        self.slots.len()
    }

    pub fn bytes(&self) -> u128 {
        self.bytes
    }

    pub fn contains(&self, key: u64) -> bool {
        self.slots.contains_key(&key)
    }

    /// Adds an entry as the newest. Its key must not be in the queue.
    pub fn push(&mut self, entry: QueueEntry) {
        assert!(!self.contains(entry.key), "content {} is queued twice", entry.key);
        let slot = self.slot_for(QueueNode { entry, newer: NIL, older: NIL });
        self.slots.insert(entry.key, slot);
        self.bytes += u128::from(entry.bytes);
        self.link_newest(slot);
    }

    pub fn oldest(&self) -> Option<QueueEntry> {
        (self.oldest != NIL).then(|| self.node(self.oldest).entry)
    }

    pub fn pop_oldest(&mut self) -> Option<QueueEntry> {
        self.oldest().and_then(|entry| self.remove(entry.key))
    }

    /// Makes the oldest entry the newest.
    pub fn rotate(&mut self) {
        if self.oldest != NIL {
            let slot = self.oldest;
            self.unlink(slot);
            self.link_newest(slot);
        }
    }

    /// Makes an entry the newest; false if it is not in the queue.
    pub fn renew(&mut self, key: u64) -> bool {
        let Some(&slot) = self.slots.get(&key) else { return false };
        self.unlink(slot);
        self.link_newest(slot);
        true
    }

    pub fn newest(&self) -> Option<QueueEntry> {
        (self.newest != NIL).then(|| self.node(self.newest).entry)
    }

    /// Returns the entry that was added right after this one.
    pub fn newer_than(&self, key: u64) -> Option<QueueEntry> {
        let newer = self.node(*self.slots.get(&key)?).newer;
        (newer != NIL).then(|| self.node(newer).entry)
    }

    /// Returns the entry that was added right before this one.
    pub fn older_than(&self, key: u64) -> Option<QueueEntry> {
        let older = self.node(*self.slots.get(&key)?).older;
        (older != NIL).then(|| self.node(older).entry)
    }

    pub fn remove(&mut self, key: u64) -> Option<QueueEntry> {
        let slot = self.slots.remove(&key)?;
        self.unlink(slot);
        self.free.push(slot);
        let entry = self.node(slot).entry;
        self.bytes -= u128::from(entry.bytes);
        Some(entry)
    }

    /// Changes the size of an entry in place; false if it is not in the queue.
    pub fn resize(&mut self, key: u64, bytes: u64) -> bool {
        let Some(&slot) = self.slots.get(&key) else { return false };
        let entry = &mut self.node_mut(slot).entry;
        let before = std::mem::replace(&mut entry.bytes, bytes);
        self.bytes = self.bytes - u128::from(before) + u128::from(bytes);
        true
    }

    pub fn frequency_mut(&mut self, key: u64) -> Option<&mut u8> {
        let &slot = self.slots.get(&key)?;
        Some(&mut self.node_mut(slot).entry.frequency)
    }

    fn slot_for(&mut self, node: QueueNode) -> u32 {
        if let Some(slot) = self.free.pop() {
            *self.node_mut(slot) = node;
            return slot;
        }
        assert!(self.nodes.len() < NIL as usize, "a queue holds fewer than {NIL} contents");
        self.nodes.push(node);
        (self.nodes.len() - 1) as u32
    }

    fn link_newest(&mut self, slot: u32) {
        let before = std::mem::replace(&mut self.newest, slot);
        let node = self.node_mut(slot);
        node.newer = NIL;
        node.older = before;
        match before {
            NIL => self.oldest = slot,
            _ => self.node_mut(before).newer = slot,
        }
    }

    fn unlink(&mut self, slot: u32) {
        let (newer, older) = (self.node(slot).newer, self.node(slot).older);
        match newer {
            NIL => self.newest = older,
            _ => self.node_mut(newer).older = older,
        }
        match older {
            NIL => self.oldest = newer,
            _ => self.node_mut(older).newer = newer,
        }
    }

    #[cfg(test)]
    pub fn nodes_allocated(&self) -> usize {
        self.nodes.len()
    }

    fn node(&self, slot: u32) -> &QueueNode {
        &self.nodes[slot as usize]
    }

    fn node_mut(&mut self, slot: u32) -> &mut QueueNode {
        &mut self.nodes[slot as usize]
    }
}
