//! The attributes that the mount shows.

use std::os::unix::fs::MetadataExt;

use forebay_backends::{Error, ErrorKind, Result, Side, Time};
use forebay_cache::Stamp;

use crate::node::{Node, NodeState};
use crate::set_id::{drop_set_id, is_written_since};
use crate::{Attr, Inner, Ino};

impl Inner {
    /// Returns the present attributes of an inode.
    ///
    /// While content is dirty, size and times of the content file are the truth: the daemon does not see passthrough
    /// writes.
    pub fn attr_of(&self, node: &Node) -> Result<Attr> {
        let mut state = node.state.lock();
        let (size, blocks, mtime, ctime) = match state.record.file.is_dirty() {
            true => self.dirty_times(node.ino, &mut state)?,
            false => {
                let r = &state.record;
                (state.growth.shown_bytes.unwrap_or(r.size), r.clean_bytes().div_ceil(512), r.mtime, r.ctime)
            }
        };
        let mut mode = state.record.mode;
        if is_written_since(&state)? {
            drop_set_id(&mut mode);
        }
        let record = &state.record;
        Ok(Attr {
            ino: node.ino,
            kind: record.kind,
            mode,
            uid: record.uid,
            gid: record.gid,
            nlink: record.nlink(),
            rdev: record.rdev,
            size,
            blocks,
            atime: record.atime,
            mtime,
            ctime,
        })
    }

    fn dirty_times(&self, ino: Ino, state: &mut NodeState) -> Result<(u64, u64, Time, Time)> {
        let meta = match (&state.content, state.record.file.content()) {
            (Some(content), _) => content.file.metadata().map_err(crate::contents::failed)?,
            (None, Some(id)) => match self.store.stat(id) {
                Ok(meta) => meta,
                // The content file is missing: `stat`, removal and overwriting of the file still work.
                Err(e) if e.is(ErrorKind::NotFound) => {
                    let r = &state.record;
                    return Ok((r.size, 0, r.mtime, r.ctime));
                }
                Err(e) => return Err(e.context(format!("inode {ino}"))),
            },
            (None, None) => return Err(Error::new(ErrorKind::Corrupt, Side::Cache, format!("inode {ino}"))),
        };
        let stamp = Stamp::from(&meta);
        let unwritten = state.dirty_content.is_unwritten(stamp);
        let ctime = if unwritten { state.record.ctime } else { stamp.ctime.max(state.record.ctime) };
        // What is in parts in the pool is no hole.
        let blocks = if state.record.file.is_spilled() { stamp.size.div_ceil(512) } else { meta.blocks() };
        Ok((stamp.size, blocks, stamp.mtime, ctime))
    }
}
