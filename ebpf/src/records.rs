//! Operations on records.

use crate::layout::{Count, Record, Slot, Way};

impl Slot {
    /// Whether the slot holds counts, all of one key.
    pub fn is_whole(&self) -> bool {
        self.inode != 0 && self.shift != 0 && self.changes == self.changes_end
    }
}

impl Record {
    /// Adds counts that a CPU has not added yet.
    pub fn add(&mut self, slot: &Slot) {
        for (to, from) in self.ways.iter_mut().zip(&slot.ways) {
            to.calls += from.calls;
            to.bytes += from.bytes;
        }
        self.read.iter_mut().zip(&slot.read).for_each(|(to, from)| *to |= from);
        self.written.iter_mut().zip(&slot.written).for_each(|(to, from)| *to |= from);
        if slot.last_jiffies > self.last_jiffies {
            self.last_jiffies = slot.last_jiffies;
        }
    }

    pub fn way(&self, way: Way) -> Count {
        self.ways[way as usize]
    }

    /// Bytes that were read, in every way.
    pub fn read_bytes(&self) -> u64 {
        self.way(Way::Read).bytes + self.way(Way::Map).bytes + self.way(Way::DirectRead).bytes
    }

    /// Bytes that were written, in every way.
    pub fn written_bytes(&self) -> u64 {
        self.way(Way::Write).bytes + self.way(Way::DirectWrite).bytes
    }
}
