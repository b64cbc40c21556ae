//! Access rights that other clients changed in the pool.
//!
//! The kernel checks permissions by the attributes that it has cached, and then sends the request. If the answer shows
//! content that is newer than those attributes, the kernel must check again. So the request fails with `Stale`: the VFS
//! then looks up every part of the path anew, checks again, and repeats the request once.
//!
//! A thread makes one request after the other. So the kernel checks a thread's next request by the attributes that the
//! thread got after the change. Nothing is known of other threads, since their requests may have been sent before.

mod news;

use forebay_backends::{Error, ErrorKind, Result, Side};

pub(crate) use self::news::RightsNews;
use super::{Attr, Inner, Ino, Overlay};
use crate::acl;

/// How many threads are remembered as informed. A forgotten thread is informed again.
const TOLD_MAX: usize = 4096;

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
