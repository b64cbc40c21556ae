//! What was about to get a name in the pool: written down before, deleted with the commit after. A process that is
//! killed in between leaves it, and the next one looks there before anybody can take the name back.

use forebay_backends::{FileKind, Result, Stat, Time};
use serde::{Deserialize, Serialize};

use super::{Batch, Catalog, Link, cf, corrupt, decoded, encode, name_key};
use crate::Ino;

/// Uploads to one name that may have been cut off: older ones are forgotten.
const REMEMBERED: usize = 16;

/// What was to get the name. Of an upload what the pool's object would show: its modification time is set by us, to
/// the nanosecond. Of what has no content both are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sent {
    pub ino: Ino,
    pub size: u64,
    pub mtime: Time,
}

impl Sent {
    /// Something other than new content.
    pub fn name_of(ino: Ino) -> Self {
        Self { ino, size: 0, mtime: Time::default() }
    }

    /// Whether this upload made the object, in a pool that tells times `granularity_ns` apart.
    pub fn made(&self, stat: &Stat, granularity_ns: u32) -> bool {
        let ticks = |time: Time| (time.secs, time.nanos / granularity_ns.clamp(1, 1_000_000_000));
        let content = stat.kind == FileKind::File && self.mtime != Time::default();
        content && stat.size == self.size && ticks(stat.mtime) == ticks(self.mtime)
    }
}

impl Catalog {
    pub fn sent(&self, parent: Ino, name: &[u8]) -> Result<Vec<Sent>> {
        Ok(self.get(cf::SENT, &name_key(parent, name))?.unwrap_or_default())
    }

    /// Every name to which something was sent and not committed: those where a process was killed.
    pub fn all_sent(&self) -> Result<Vec<(Link, Vec<Sent>)>> {
        let mut all = Vec::new();
        self.scan(cf::SENT, b"", |key, value| {
            let (parent, name) = key.split_first_chunk::<8>().ok_or_else(|| corrupt(cf::SENT))?;
            all.push(((Ino(u64::from_be_bytes(*parent)), name.into()), decoded(cf::SENT, value)?));
            Ok(true)
        })?;
        Ok(all)
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
