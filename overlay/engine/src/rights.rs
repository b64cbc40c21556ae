//! Rights that others changed in the pool.
//!
//! The kernel decides by the attributes that it has cached, and asks us afterwards. Where the answer brings content that is
//! newer than those attributes, it must decide again: the request fails with `Stale`, for which the VFS looks up every
//! part of the path anew, checks again, and repeats the request once.
//!
//! A thread makes one request after the other. So what it was told of an inode after the change is what its next request
//! was decided by; of other threads nothing is known, since their request may have been on its way already.

use std::time::{Duration, Instant};

use forebay_backends::{Error, ErrorKind, Result, Side, Stat};
use forebay_catalog::InodeRecord;

use super::{Attr, Inner, Ino, Overlay, Txn};
use crate::acl;

/// A request that was decided by what the kernel had before a change comes within this time after it.
const IN_FLIGHT_MAX: Duration = Duration::from_secs(60);
/// Threads of which it is remembered that they were told. One that is forgotten is told again.
const TOLD_MAX: usize = 4096;

/// What the kernel may not know yet of who may use an inode.
#[derive(Debug, Default)]
pub(crate) struct RightsNews {
    /// When other rights than before were last found in the pool.
    changed: Option<Instant>,
    /// The access ACL that the kernel was told of, while it is not known whether it still holds.
    acl_before: Option<Option<Box<[u8]>>>,
    /// The threads that were told of the present rights since.
    told: Vec<u32>,
}

impl RightsNews {
    fn note(&mut self) {
        self.changed = Some(Instant::now());
        self.told.clear();
    }

    fn is_told(&self, thread: u32) -> bool {
        self.told.contains(&thread)
    }

    /// Whether a request of this thread may have been decided by rights that do not hold any more.
    fn concern(&mut self, thread: u32) -> bool {
        if self.changed.is_some_and(|at| at.elapsed() > IN_FLIGHT_MAX) {
            self.changed = None;
            self.told = Vec::new();
        }
        self.changed.is_some() && !self.is_told(thread)
    }
}

impl Txn<'_> {
    /// Takes over attributes that the pool has by now, and notes where they give other rights.
    pub(super) fn take_attrs(&mut self, ino: Ino, stat: &Stat) -> Result<()> {
        self.take_rights(ino, |record| record.take_attrs(stat))
    }

    /// The same of mode and owner alone.
    pub(super) fn take_access(&mut self, ino: Ino, stat: &Stat) -> Result<()> {
        self.take_rights(ino, |record| record.take_access(stat))
    }

    fn take_rights(&mut self, ino: Ino, take: impl FnOnce(&mut InodeRecord)) -> Result<()> {
        let record = self.record(ino)?;
        let rights = (record.mode, record.uid, record.gid);
        take(record);
        let same = rights == (record.mode, record.uid, record.gid);
        // Only an ACL that was asked for is cached by the kernel, that there is none included.
        let acl = record.xattrs.as_ref().map(|xattrs| {
            let acl = xattrs.iter().find(|(name, _)| **name == *acl::ACCESS);
            acl.map(|(_, value)| value.clone())
        });
        let news = &mut self.state(ino)?.rights;
        if !same {
            news.note();
        }
        if news.acl_before.is_none() {
            news.acl_before = acl;
        }
        Ok(())
    }
}

impl Overlay {
    /// Notes that a thread is being told these attributes.
    pub fn note_told(&self, attr: &Attr, thread: u32) {
        let Some(node) = self.inner.table.peek(attr.ino) else { return };
        let mut state = node.state.lock();
        if state.rights.changed.is_none() || state.rights.is_told(thread) {
            return;
        }
        let record = &state.record;
        if (attr.mode, attr.uid, attr.gid) == (record.mode, record.uid, record.gid) {
            if state.rights.told.len() >= TOLD_MAX {
                state.rights.told.clear();
            }
            state.rights.told.push(thread);
        }
    }

    /// What is in a directory may be shown to a thread: its request was decided by the present rights.
    ///
    /// # Errors
    /// `Stale` where it may have been decided by older ones.
    pub async fn check_rights(&self, ino: Ino, thread: u32) -> Result<()> {
        self.inner.check_rights(ino, thread).await
    }
}

impl Inner {
    /// Whether a request for an inode was decided by its present rights.
    ///
    /// # Errors
    /// `Stale` where it may have been decided by older ones; the kernel has none cached then.
    pub(super) async fn check_rights(&self, ino: Ino, thread: u32) -> Result<()> {
        let Ok(node) = self.node(ino) else { return Ok(()) };
        let before = {
            let state = node.state.lock();
            if state.rights.changed.is_none() && state.rights.acl_before.is_none() {
                return Ok(());
            }
            state.rights.acl_before.clone()
        };
        if let Some(before) = before {
            let now = self.xattr(ino, acl::ACCESS).await?;
            let mut state = node.state.lock();
            // Of two that compare at once the first takes it back.
            if state.rights.acl_before.as_ref() == Some(&before) {
                state.rights.acl_before = None;
                if now != before {
                    state.rights.note();
                }
            }
        }
        if !node.state.lock().rights.concern(thread) {
            return Ok(());
        }
        if let Some(kernel) = self.kernel.get() {
            kernel.invalidate_attributes_now(ino);
        }
        let what = format!("{}: others changed who may use it", self.display(ino));
        Err(Error::new(ErrorKind::Stale, Side::Pool, what))
    }
}
