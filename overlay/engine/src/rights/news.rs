//! What the kernel may not know yet of an inode's access rights.

use std::time::{Duration, Instant};

use forebay_backends::{FileKind, Result, Stat};
use forebay_catalog::InodeRecord;

use crate::{Ino, Txn, acl};

/// How long after a change a request may arrive that the kernel checked by older attributes.
const IN_FLIGHT_MAX: Duration = Duration::from_secs(60);

/// Changes of an inode's access rights that the kernel may not know yet.
#[derive(Debug, Default)]
pub(crate) struct RightsNews {
    /// When the pool was last found to have other rights than before.
    pub(super) changed: Option<Instant>,
    /// The access ACL that the kernel got, while it is unknown whether this ACL still holds.
    pub(super) acl_before: Option<Option<Box<[u8]>>>,
    /// Of a directory: the default ACL that the pool had, for the time in which the pool does not answer.
    pub(crate) default_acl_before: Option<Option<Box<[u8]>>>,
    /// The threads that got the present rights since.
    pub(super) told: Vec<u32>,
}

impl RightsNews {
    pub(super) fn note(&mut self) {
        self.changed = Some(Instant::now());
        self.told.clear();
    }

    pub(super) fn is_told(&self, thread: u32) -> bool {
        self.told.contains(&thread)
    }

    /// Returns whether a request of this thread may have been checked by rights that do not hold any more.
    pub(super) fn concern(&mut self, thread: u32) -> bool {
        if self.changed.is_some_and(|at| at.elapsed() > IN_FLIGHT_MAX) {
            self.changed = None;
            self.told = Vec::new();
        }
        self.changed.is_some() && !self.is_told(thread)
    }
}

impl Txn<'_> {
    /// Takes over attributes that the pool has by now, and notes if they change access rights.
    pub(crate) fn take_attrs(&mut self, ino: Ino, stat: &Stat) -> Result<()> {
        self.take_rights(ino, |record| record.take_attrs(stat))
    }

    /// Like [`Self::take_attrs`], for mode and owner alone.
    pub(crate) fn take_access(&mut self, ino: Ino, stat: &Stat) -> Result<()> {
        self.take_rights(ino, |record| record.take_access(stat))
    }

    fn take_rights(&mut self, ino: Ino, take: impl FnOnce(&mut InodeRecord)) -> Result<()> {
        let record = self.record(ino)?;
        let rights = (record.mode, record.uid, record.gid);
        take(record);
        let same = rights == (record.mode, record.uid, record.gid);
        let has_same_owner = (rights.1, rights.2) == (record.uid, record.gid);
        let known = |wanted: &[u8]| {
            let xattrs = record.xattrs.as_ref()?;
            Some(xattrs.iter().find(|(name, _)| **name == *wanted).map(|(_, value)| value.clone()))
        };
        // The kernel caches an ACL, or that there is none, only after it has requested it.
        let acl = known(acl::ACCESS);
        let default = if record.kind == FileKind::Directory { known(acl::DEFAULT) } else { None };
        let news = &mut self.state_at_once(ino)?.rights;
        if default.is_some() {
            news.default_acl_before = default;
        }
        if !same {
            news.note();
        }
        if news.acl_before.is_none() {
            news.acl_before = acl;
        }
        if !has_same_owner {
            let inner = self.inner();
            self.on_commit(ino, move |_| inner.rules_of_file_may_differ(ino))?;
        }
        Ok(())
    }
}
