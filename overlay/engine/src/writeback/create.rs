//! Creates in the pool what it does not have.

use std::sync::Arc;

use forebay_backends::{Attrs, Error, ErrorKind, Expected, FileKind, PoolPath, Result, Side};
use forebay_catalog::InodeRecord;

use super::super::{Inner, Ino, Txn};
use super::steps::note_name_flushed;
use super::upload::Uploaded;

impl Inner {
    pub(super) async fn create_at(
        self: &Arc<Self>,
        parent: Ino,
        name: &[u8],
        (ino, record): (Ino, InodeRecord),
        occupant: Option<Ino>,
        path: &PoolPath,
    ) -> Result<()> {
        if let Some(occupant) = occupant {
            self.ready_to_go(occupant).await?;
        }
        if record.kind == FileKind::File {
            return self.create_file(parent, name, ino, occupant, path).await;
        }
        let (attrs, refused) = self.flusher.refused.split(ino, attrs_of(&record));
        let began = std::time::Instant::now();
        let made = match record.kind {
            FileKind::Directory => self.ask(self.pool.mkdir(path, &attrs)).await,
            FileKind::Symlink => {
                let target = record.target.as_deref().unwrap_or_default();
                self.ask(self.pool.symlink(path, target, &attrs)).await
            }
            kind => self.ask(self.pool.mknod(path, kind, record.rdev, &attrs)).await,
        };
        let mut theirs = false;
        let stat = match made {
            Ok(stat) => stat,
            Err(e) if e.is(ErrorKind::Exists) => {
                // If another client created an equal object, both share it.
                let stat = self.ask(self.pool.stat(path)).await.map_err(|e| e.context(path))?;
                if !self.is_as_made(&record, &stat, path).await? {
                    return self.settle_conflict(parent, name, ino, path).await;
                }
                theirs = true;
                stat
            }
            // The next attempt creates it without this attribute.
            Err(e) if self.flusher.refused.note(ino, &e) => return Ok(()),
            Err(e) => return Err(e.context(path)),
        };
        self.sync_names(parent).await?;
        let mut txn = Txn::begin(self);
        txn.pool_has(parent, name, Some(ino))?;
        note_name_flushed(&mut txn, parent)?;
        let now = txn.record(ino)?;
        if theirs {
            // The overlay's object and the other client's are one from now on. The mode is the other client's; extended
            // attributes that the other client's object does not have are still to be sent.
            settle_attrs(now, &InodeRecord { dirty_xattrs: Vec::new(), ..record });
            txn.take_attrs(ino, &stat)?;
            txn.record(ino)?.xattrs = None;
        } else {
            settle_attrs(now, &record);
            still_to_tell(now, &refused);
            if record.kind == FileKind::Directory && !self.pool.capabilities().versions.of_directories {
                // It was created empty: all of its names are known.
                txn.on_commit(ino, move |state| state.names.listed_at = Some(began))?;
            }
        }
        txn.record(ino)?.version = Some(stat.version);
        txn.commit()
    }

    async fn create_file(
        self: &Arc<Self>,
        parent: Ino,
        name: &[u8],
        ino: Ino,
        occupant: Option<Ino>,
        path: &PoolPath,
    ) -> Result<()> {
        let mut expected = match occupant {
            Some(occupant) => {
                self.expect_version_to_move(occupant)?;
                self.record_of(occupant)?.removed_version().map_or(Expected::Absent, Expected::Name)
            }
            None => Expected::Absent,
        };
        for _ in 0..3 {
            match self.upload(ino, &(parent, name.into()), path, &expected).await {
                Ok(None) => return Ok(()),
                Ok(Some(uploaded)) => {
                    self.sync_names(parent).await?;
                    self.commit_created(parent, name, ino, uploaded).await?;
                    return match occupant {
                        Some(occupant) => self.refresh_version(occupant).await,
                        None => Ok(()),
                    };
                }
                Err(e) if e.is(ErrorKind::Conflict) => {}
                Err(e) => return Err(e),
            }
            match self.ask(self.pool.stat(path)).await {
                // Another client removed it: nothing of that client is lost if ours is created.
                Err(e) if e.is(ErrorKind::NotFound) => expected = Expected::Absent,
                Err(e) => return Err(e.context(path)),
                Ok(stat) => match self.same_bytes(ino, path, &stat).await? {
                    Some(uploaded) => {
                        self.sync_names(parent).await?;
                        return self.commit_created(parent, name, ino, uploaded).await;
                    }
                    None if self.replaces_theirs(ino, &stat)? || self.is_late_upload(ino, &stat)? => {
                        expected = Expected::Version(stat.version);
                    }
                    None => return self.settle_conflict(parent, name, ino, path).await,
                },
            }
        }
        Err(Error::new(ErrorKind::Conflict, Side::Pool, format!("{path}: changes all the time")))
    }

    async fn commit_created(&self, parent: Ino, name: &[u8], ino: Ino, uploaded: Uploaded) -> Result<()> {
        let created = |txn: &mut Txn<'_>| {
            txn.pool_has(parent, name, Some(ino))?;
            note_name_flushed(txn, parent)
        };
        self.commit_uploaded(ino, uploaded, &created).await
    }
}

/// Returns the attributes with which an inode is created.
pub(super) fn attrs_of(record: &InodeRecord) -> Attrs {
    // If another client removed the object, only the attributes that were changed in the overlay are known.
    let changed = record.dirty_xattrs.iter().filter_map(|(name, value)| Some((name.clone(), value.clone()?)));
    let xattrs = record.xattrs.clone().unwrap_or_else(|| changed.collect());
    Attrs {
        mode: record.mode,
        uid: record.uid,
        gid: record.gid,
        atime: record.atime,
        mtime: record.mtime,
        xattrs: xattrs.iter().map(|(n, v)| (n.to_vec(), v.to_vec())).collect(),
    }
}

/// Records that the pool has the attributes of `sent`: what changed since is still to be sent.
pub(super) fn settle_attrs(record: &mut InodeRecord, sent: &InodeRecord) {
    record.dirty.mode = record.mode != sent.mode;
    record.dirty.owner = (record.uid, record.gid) != (sent.uid, sent.gid);
    // Names that are created in the directory after this change its times again.
    record.dirty.times = record.kind == FileKind::Directory || (record.atime, record.mtime) != (sent.atime, sent.mtime);
    record.dirty_xattrs.retain(|change| !sent.dirty_xattrs.contains(change));
}

/// Keeps attributes that the pool refused among those to be sent, so that operators see why.
pub(super) fn still_to_tell(record: &mut InodeRecord, refused: &[(Vec<u8>, Vec<u8>)]) {
    for (name, value) in refused {
        if record.dirty_xattrs.iter().all(|(dirty, _)| **dirty != **name) {
            record.dirty_xattrs.push((name.as_slice().into(), Some(value.as_slice().into())));
        }
    }
}
