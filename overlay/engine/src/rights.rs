//! Access rights that other clients changed in the pool.
//!
//! The kernel checks permissions by the attributes that it has cached, and then sends the request. If the answer shows
//! content that is newer than those attributes, the kernel must check again. So the request fails with `Stale`: the VFS
//! then looks up every part of the path anew, checks again, and repeats the request once.
//!
//! A thread makes one request after the other. So the kernel checks a thread's next request by the attributes that the
//! thread got after the change. Nothing is known of other threads, since their requests may have been sent before.

use std::time::{Duration, Instant};

use forebay_backends::{Error, ErrorKind, Result, Side, Stat};
use forebay_catalog::InodeRecord;

use super::{Attr, Inner, Ino, Overlay, Txn};
use crate::acl;

/// How long after a change a request may arrive that the kernel checked by older attributes.
const IN_FLIGHT_MAX: Duration = Duration::from_secs(60);
/// How many threads are remembered as informed. A forgotten thread is informed again.
const TOLD_MAX: usize = 4096;

/// Changes of an inode's access rights that the kernel may not know yet.
#[derive(Debug, Default)]
pub(crate) struct RightsNews {
    /// When the pool was last found to have other rights than before.
    changed: Option<Instant>,
    /// The access ACL that the kernel got, while it is unknown whether this ACL still holds.
    acl_before: Option<Option<Box<[u8]>>>,
    /// The threads that got the present rights since.
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

    /// Returns whether a request of this thread may have been checked by rights that do not hold any more.
    fn concern(&mut self, thread: u32) -> bool {
        if self.changed.is_some_and(|at| at.elapsed() > IN_FLIGHT_MAX) {
            self.changed = None;
            self.told = Vec::new();
        }
        self.changed.is_some() && !self.is_told(thread)
    }
}

impl Txn<'_> {
    /// Takes over attributes that the pool has by now, and notes if they change access rights.
    pub(super) fn take_attrs(&mut self, ino: Ino, stat: &Stat) -> Result<()> {
        self.take_rights(ino, |record| record.take_attrs(stat))
    }

    /// Like [`Self::take_attrs`], for mode and owner alone.
    pub(super) fn take_access(&mut self, ino: Ino, stat: &Stat) -> Result<()> {
        self.take_rights(ino, |record| record.take_access(stat))
    }

    fn take_rights(&mut self, ino: Ino, take: impl FnOnce(&mut InodeRecord)) -> Result<()> {
        let record = self.record(ino)?;
        let rights = (record.mode, record.uid, record.gid);
        take(record);
        let same = rights == (record.mode, record.uid, record.gid);
        // The kernel caches an ACL, or that there is none, only after it has requested it.
        let acl = record.xattrs.as_ref().map(|xattrs| {
            let acl = xattrs.iter().find(|(name, _)| **name == *acl::ACCESS);
            acl.map(|(_, value)| value.clone())
        });
        let news = &mut self.state_at_once(ino)?.rights;
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
    /// Notes that an answer gives these attributes to a thread.
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

    /// Checks that a thread may see the content of a directory: its request was checked by the present rights.
    ///
    /// # Errors
    /// `Stale` if the request may have been checked by older rights.
    pub async fn check_rights(&self, ino: Ino, thread: u32) -> Result<()> {
        self.inner.check_rights(ino, thread).await
    }
}

impl Inner {
    /// Checks that a request for an inode was checked by the present rights.
    ///
    /// # Errors
    /// `Stale` if it may have been checked by older rights. The kernel then has no attributes cached.
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
            // If two requests compare at the same time, the first request clears the old ACL.
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
        if let Some(kernel) = self.mount.kernel() {
            kernel.invalidate_attributes_now(ino);
        }
        let what = format!("{}: another client changed its permissions", self.display(ino));
        Err(Error::new(ErrorKind::Stale, Side::Pool, what))
    }
}
