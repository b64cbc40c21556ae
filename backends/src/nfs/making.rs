//! Makes objects of any kind except a file with content.

use nfs3_client::nfs3_types::nfs3::{
    CREATE3args, MKDIR3args, MKNOD3args, READLINK3args, SYMLINK3args, createhow3, devicedata3, mknoddata3, nfsstat3,
    post_op_attr, post_op_fh3, symlinkdata3,
};

use crate::{Attrs, ErrorKind, FileKind, PoolPath, Result, Stat};

use super::attributes::{AttributeChange, FoundObject, option, specdata};
use super::credentials::Owner;
use super::failure::{Cause, NfsCall, NfsFailure, Outcome};
use super::limits::CHANGE_ATTEMPTS;
use super::session::{DirectoryName, Session};

/// The object to make.
#[derive(Debug)]
pub(super) enum NewObject {
    Directory,
    Symlink(Vec<u8>),
    File,
    Special(FileKind, u64),
}

impl NewObject {
    fn kind(&self) -> FileKind {
        match self {
            Self::Directory => FileKind::Directory,
            Self::Symlink(_) => FileKind::Symlink,
            Self::File => FileKind::File,
            Self::Special(kind, _) => *kind,
        }
    }
}

impl Session {
    /// Makes an object with its attributes. If these cannot be set, the object is removed again.
    pub(super) async fn make(
        &self,
        what: &'static str,
        path: &PoolPath,
        new: &NewObject,
        attrs: &Attrs,
    ) -> Result<Stat> {
        let call = NfsCall::new(what, path);
        self.check(call)?;
        if path.is_root() {
            return Err(call.error(ErrorKind::Exists, "it is the pool's root"));
        }
        let wanted = &AttributeChange::of_new(attrs, new.kind(), self.can.objects.owners);
        let owner = Owner::from(attrs);
        let made = self.in_slot(path, |slot| {
            Box::pin(async move {
                let found = self.make_slot(&slot, new, wanted, owner).await?;
                Ok((slot, found))
            })
        });
        let (slot, found) = made.await.map_err(|failure| call.failed(failure))?;
        let owners = [Owner::from(&found.stat)];
        match self.settle(&found.handle, &owners, wanted, Some(found.stat.clone())).await {
            Ok(stat) => Ok(stat),
            Err(failure) => {
                // The caller gets the first error.
                let _ = self.remove_slot(&slot, &found).await;
                Err(call.failed(failure).context("set the attributes"))
            }
        }
    }

    async fn make_slot(
        &self,
        slot: &DirectoryName,
        new: &NewObject,
        wanted: &AttributeChange,
        owner: Owner,
    ) -> Outcome<FoundObject> {
        let mut patience = self.calls.patience();
        for attempt in 1.. {
            let answer = self.send_new(slot, new, wanted, &[owner, slot.dir.owner]).await;
            let lost = matches!(&answer, Err(NfsFailure::Lost(cause)) if cause.is_passing());
            // An earlier attempt may have been carried out, before or after the check.
            let exists = attempt > 1 && answer.as_ref().is_err_and(|failure| failure.is(nfsstat3::NFS3ERR_EXIST));
            if exists || (lost && attempt < CHANGE_ATTEMPTS && patience.pause().await) {
                match self.look(slot).await {
                    Err(NfsFailure::Status(nfsstat3::NFS3ERR_NOENT)) if lost => continue,
                    Ok(found) if self.is_as_asked(&found, new, wanted).await? => return Ok(found),
                    // A server that was killed may have made the object without its attributes, so its owner is
                    // unknown.
                    Ok(found) if found.stat.kind == new.kind() => {
                        let why = "the answer was lost; the object at this name may be incomplete";
                        return Err(NfsFailure::Lost(Cause::new(ErrorKind::Unavailable, why)));
                    }
                    Ok(_) => return Err(NfsFailure::Status(nfsstat3::NFS3ERR_EXIST)),
                    Err(failure) => return Err(failure),
                }
            }
            return match answer? {
                (Some(handle), Some(raw)) => Ok(FoundObject { handle, stat: self.stat_of(&raw) }),
                _ => self.look(slot).await,
            };
        }
        Err(NfsFailure::Status(nfsstat3::NFS3ERR_IO))
    }

    /// Whether an object is the one requested in a call without an answer. If another client made an equal one, it
    /// serves as well.
    async fn is_as_asked(&self, found: &FoundObject, new: &NewObject, wanted: &AttributeChange) -> Outcome<bool> {
        // Not every server sets the times of symlinks.
        let wanted = if new.kind() == FileKind::Symlink { wanted.clone().without_times() } else { wanted.clone() };
        let same = found.stat.kind == new.kind() && wanted.missing_in(&found.stat).is_nothing();
        Ok(same
            && match new {
                NewObject::Directory => true,
                NewObject::File => found.stat.size == 0,
                NewObject::Special(_, rdev) => found.stat.rdev == *rdev,
                NewObject::Symlink(target) => {
                    let args = READLINK3args { symlink: found.handle.clone() };
                    let is = self.calls.call(&args, &[Owner::from(&found.stat)]).await?;
                    *is.data.0 == **target
                }
            })
    }

    async fn send_new(
        &self,
        slot: &DirectoryName,
        new: &NewObject,
        wanted: &AttributeChange,
        owners: &[Owner],
    ) -> Outcome<(Option<nfs3_client::nfs3_types::nfs3::nfs_fh3>, Option<nfs3_client::nfs3_types::nfs3::fattr3>)> {
        let parts = |handle: post_op_fh3, raw: post_op_attr| (option(handle), option(raw));
        let (where_, attributes) = (slot.args(), wanted.raw());
        match new {
            NewObject::Directory => {
                let made = self.calls.call(&MKDIR3args { where_, attributes }, owners).await?;
                Ok(parts(made.obj, made.obj_attributes))
            }
            NewObject::Symlink(target) => {
                let symlink = symlinkdata3 { symlink_attributes: attributes, symlink_data: target[..].into() };
                let made = self.calls.call(&SYMLINK3args { where_, symlink }, owners).await?;
                Ok(parts(made.obj, made.obj_attributes))
            }
            NewObject::File => {
                let how = createhow3::GUARDED(attributes);
                let made = self.calls.call(&CREATE3args { where_, how }, owners).await?;
                Ok(parts(made.obj, made.obj_attributes))
            }
            NewObject::Special(kind, rdev) => {
                let device = || devicedata3 { dev_attributes: wanted.raw(), spec: specdata(*rdev) };
                let what = match kind {
                    FileKind::CharDevice => mknoddata3::NF3CHR(device()),
                    FileKind::BlockDevice => mknoddata3::NF3BLK(device()),
                    FileKind::Fifo => mknoddata3::NF3FIFO(attributes),
                    FileKind::Socket => mknoddata3::NF3SOCK(attributes),
                    FileKind::File | FileKind::Directory | FileKind::Symlink => {
                        return Err(NfsFailure::Status(nfsstat3::NFS3ERR_INVAL));
                    }
                };
                let made = self.calls.call(&MKNOD3args { where_, what }, owners).await?;
                Ok(parts(made.obj, made.obj_attributes))
            }
        }
    }
}
