//! What was about to be put under a name of the pool: written down before, deleted with the commit after. A
//! process that is killed in between leaves it, and the next one knows its own object again.

use forebay_backends::{FileKind, Result, Stat, Time};
use serde::{Deserialize, Serialize};

use super::{Batch, Catalog, cf, encode, name_key};
use crate::Ino;

/// Uploads to one name that may have been cut off: older ones are forgotten.
const REMEMBERED: usize = 16;

/// An upload, as the pool's object would show it. Modification times are set by us, to the nanosecond.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sent {
    pub size: u64,
    pub mtime: Time,
}

impl Sent {
    /// Whether this upload made the object, in a pool that tells times `granularity_ns` apart.
    pub fn made(&self, stat: &Stat, granularity_ns: u32) -> bool {
        let ticks = |time: Time| (time.secs, time.nanos / granularity_ns.clamp(1, 1_000_000_000));
        stat.kind == FileKind::File && stat.size == self.size && ticks(stat.mtime) == ticks(self.mtime)
    }
}

impl Catalog {
    pub fn sent(&self, parent: Ino, name: &[u8]) -> Result<Vec<Sent>> {
        Ok(self.get(cf::SENT, &name_key(parent, name))?.unwrap_or_default())
    }

    /// Survives the process when this returns. The caller sees to it that nobody else sends to this name.
    pub fn add_sent(&self, parent: Ino, name: &[u8], sent: Sent) -> Result<()> {
        let mut all = self.sent(parent, name)?;
        if all.contains(&sent) {
            return Ok(());
        }
        if all.len() >= REMEMBERED {
            all.remove(0);
        }
        all.push(sent);
        let mut batch = self.batch();
        batch.put_raw(cf::SENT, &name_key(parent, name), &encode(&all));
        self.write(batch)
    }
}

impl Batch<'_> {
    /// The catalog knows again what the pool has under a name.
    pub fn delete_sent(&mut self, parent: Ino, name: &[u8]) {
        self.delete_raw(cf::SENT, &name_key(parent, name));
    }
}
