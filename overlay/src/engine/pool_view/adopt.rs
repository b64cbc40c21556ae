//! Changes that others made in the pool, one object at a time.

use std::time::Instant;

use forebay_backends::{Error, ErrorKind, FileKind, Result, Side, Stat, Version};

use super::super::{Inner, Ino, Txn};
use super::Asked;
use crate::catalog::{InodeRecord, Link, NameRecord};

impl Inner {
    /// Takes over an object of the pool under a name that the catalog does not have. `None` where the answer
    /// came too late to be believed: ask again.
    pub(super) fn adopt(&self, parent: Ino, name: &[u8], stat: &Stat, asked: Asked) -> Result<Option<Ino>> {
        let mut txn = Txn::begin(self);
        let was = txn.name(parent, name)?;
        if !was.is_empty() {
            return Ok(was.here_ino());
        }
        if !txn.believes(parent, asked)? {
            return Ok(None);
        }
        let ino = self.adopt_in(&mut txn, parent, name, &was, stat)?;
        txn.commit()?;
        if let Ok(node) = self.node(ino) {
            node.state.lock().validated = Some(Instant::now());
        }
        Ok(Some(ino))
    }

    /// The same inside a larger change. `was` has nothing here.
    pub(super) fn adopt_in(
        &self,
        txn: &mut Txn<'_>,
        parent: Ino,
        name: &[u8],
        was: &NameRecord,
        stat: &Stat,
    ) -> Result<Ino> {
        let link = (parent, Box::from(name));
        // What the kernel has cached of the listing lacks this name.
        txn.state(parent)?.page_cache_stale = true;
        let identity = hard_link_identity(stat);
        if let Some(known) = identity.as_ref().map(|id| self.catalog.object(id)).transpose()?.flatten()
            && self.catalog.inode(known)?.is_some()
        {
            let record = txn.record(known)?;
            let same = record.version.as_ref().is_some_and(|v| v.same_content(&stat.version));
            if same && (record.in_pool() || !record.links.is_empty()) {
                record.links.push(link.clone());
                record.pool_links.push(link);
                txn.set_name(parent, name, was, &NameRecord::clean(known, stat.kind));
                return Ok(known);
            }
        }
        if let Some(ino) = identity.as_ref().and_then(|id| txn.link_new(id, &link)) {
            txn.set_name(parent, name, was, &NameRecord::clean(ino, stat.kind));
            return Ok(ino);
        }
        let ino = txn.create(InodeRecord::from_pool(stat, Some(link)))?;
        if let Some(identity) = identity {
            txn.put_object(identity, ino);
        }
        txn.set_name(parent, name, was, &NameRecord::clean(ino, stat.kind));
        Ok(ino)
    }

    /// The pool's copy of an inode became another version, seen under `link`.
    ///
    /// # Errors
    /// `Stale` where the name now stands for another inode.
    pub(super) fn changed(&self, ino: Ino, link: Option<&Link>, stat: &Stat, asked: Asked) -> Result<()> {
        let mut txn = Txn::begin(self);
        if !txn.believes(ino, asked)? || txn.record(ino)?.file.is_dirty() {
            return Ok(());
        }
        let record = txn.record(ino)?;
        let same_object = record.version.as_ref().is_none_or(|v| v.same_object(&stat.version));
        // Of several names of an object one became another object's.
        let parted = !same_object && record.pool_links.len() > 1;
        let other_kind = record.kind != stat.kind;
        let same_version = record.version.as_ref() == Some(&stat.version);
        let in_use = stat.kind == FileKind::File && !same_version && txn.state(ino)?.is_open();
        if other_kind || parted || in_use {
            drop(txn);
            return self.replaced(ino, link, stat);
        }
        let bytes = self.counted_bytes(txn.state(ino)?);
        let record = txn.record(ino)?;
        let (file, dropped) = record.file.pool_changed()?;
        record.file = file;
        record.take_attrs(stat);
        record.version = Some(stat.version.clone());
        record.xattrs = if record.dirty_xattrs.is_empty() { None } else { record.xattrs.take() };
        record.target = None;
        if let Some(content) = dropped {
            txn.discard(content, bytes);
            self.evictor.lock().remove(ino.0);
        }
        let state = txn.state(ino)?;
        state.validated = Some(Instant::now());
        state.content = None;
        state.residency = None;
        state.page_cache_stale = true;
        state.negative.clear();
        txn.commit()?;
        self.tell_kernel_inode(ino, true);
        Ok(())
    }

    /// The name of an inode now stands for another object, or for a version that those who have the old one
    /// open must not see. They keep it.
    fn replaced(&self, ino: Ino, link: Option<&Link>, stat: &Stat) -> Result<()> {
        let Some((_, name)) = link else { return Ok(()) };
        let mut txn = Txn::begin(self);
        let record = txn.record(ino)?;
        let in_place = record.version.as_ref().is_some_and(|v| v.same_object(&stat.version));
        // What was changed in place is changed under all of its names.
        let links = match in_place {
            true => record.pool_links.to_vec(),
            false => link.into_iter().cloned().collect(),
        };
        for (parent, name) in &links {
            self.forget_pool_name(&mut txn, ino, *parent, name)?;
        }
        let kept = txn.record(ino)?.pool_links.iter().any(|l| links.contains(l));
        txn.commit()?;
        if kept {
            // It was moved here: the flush finds out whose it is, and until then it is what it was.
            return Ok(());
        }
        let mut txn = Txn::begin(self);
        for (parent, name) in &links {
            let was = txn.name(*parent, name)?;
            if was.is_empty() {
                self.adopt_in(&mut txn, *parent, name, &was, stat)?;
            }
        }
        txn.commit()?;
        for (parent, name) in &links {
            self.tell_kernel_name(*parent, name);
        }
        Err(Error::new(ErrorKind::Stale, Side::Pool, format!("{}: replaced in the pool", name.escape_ascii())))
    }

    /// The pool no longer has an inode under the name that we know.
    pub(super) fn vanished(&self, ino: Ino, asked: Asked) -> Result<()> {
        let mut txn = Txn::begin(self);
        if !txn.believes(ino, asked)? || ino == Ino::ROOT {
            return Ok(());
        }
        let record = txn.record(ino)?;
        if record.file.is_dirty() || record.links.is_empty() {
            return Ok(());
        }
        let Some((parent, name)) = record.pool_links.first().cloned() else { return Ok(()) };
        self.forget_pool_name(&mut txn, ino, parent, &name)?;
        txn.commit()?;
        self.tell_kernel_name(parent, &name);
        Err(Error::new(ErrorKind::Stale, Side::Pool, format!("{}: removed in the pool", name.escape_ascii())))
    }

    /// Somebody removed a name from the pool: it goes here too, unless something newer is under it.
    pub(super) fn forget_pool_name(&self, txn: &mut Txn<'_>, ino: Ino, parent: Ino, name: &[u8]) -> Result<()> {
        let was = txn.name(parent, name)?;
        if was.pool != Some(ino) {
            return Ok(());
        }
        let record = txn.record(ino)?;
        if was.here_ino() != Some(ino) && !record.links.is_empty() && record.pool_links.len() == 1 {
            // It was moved here and not flushed yet: a look at it, or the flush, finds out where it went.
            return Ok(());
        }
        record.pool_links.retain(|(p, n)| *p != parent || **n != *name);
        let newer_below = record.kind == FileKind::Directory && self.has_newer_below(ino)?;
        let keep = record.file.is_dirty() || newer_below;
        let is_here = was.here_ino() == Some(ino);
        if keep {
            // Ours is newer than the removal: it will be made again.
            let record = txn.record(ino)?;
            record.version = None;
            record.dirty.mode = true;
            record.dirty.owner = true;
        }
        if txn.record(ino)?.kind == FileKind::Directory {
            // What the pool had below went with it.
            let mut below = Vec::new();
            self.catalog.names(ino, |name, record| {
                below.extend(record.pool.map(|child| (child, Box::<[u8]>::from(name))));
                Ok(true)
            })?;
            for (child, name) in below {
                self.forget_pool_name(txn, child, ino, &name)?;
            }
        }
        txn.state(parent)?.page_cache_stale = true;
        let is = NameRecord { here: was.here.filter(|_| keep || !is_here), pool: None };
        txn.set_name(parent, name, &was, &is);
        if is_here && !keep {
            txn.unlink(ino, parent, name)?;
        } else if txn.record(ino)?.links.is_empty() {
            txn.reap(ino)?;
        }
        Ok(())
    }

    /// Whether a directory holds anything, at any depth, that the pool does not have.
    fn has_newer_below(&self, dir: Ino) -> Result<bool> {
        let mut dirs = vec![dir];
        while let Some(dir) = dirs.pop() {
            let mut found = false;
            self.catalog.names(dir, |_, record| {
                if let Some((ino, kind)) = record.here {
                    let dirty = self.catalog.inode(ino)?.is_some_and(|r| r.file.is_dirty());
                    found = record.pool != Some(ino) || dirty;
                    if kind == FileKind::Directory {
                        dirs.push(ino);
                    }
                }
                Ok(!found)
            })?;
            if found {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// The key under which an object with several names is found again.
pub(super) fn hard_link_identity(stat: &Stat) -> Option<Vec<u8>> {
    match &stat.version {
        Version::Inode { dev, ino, .. } if stat.nlink > 1 && stat.kind != FileKind::Directory => {
            Some([dev.to_be_bytes(), ino.to_be_bytes()].concat())
        }
        _ => None,
    }
}
