//! Links, removals, renames and changes of attributes.

use std::sync::Arc;

use futures::future::BoxFuture;
use nfs3_client::nfs3_types::nfs3::nfsstat3;

use crate::{ErrorKind, Expected, FileKind, PoolPath, RenameMode, Result, SetAttrs, Stat};

use super::attributes::{AttributeChange, FoundObject};
use super::credentials::Owner;
use super::failure::{NfsCall, NfsFailure, Outcome};
use super::listing::Sweep;
use super::reading::check_kind;
use super::session::{DirectoryName, Session};

impl Session {
    /// A name in its directory, and the object at that name.
    async fn object_in_slot(&self, path: &PoolPath) -> Outcome<(DirectoryName, FoundObject)> {
        let found = |slot: DirectoryName| {
            Box::pin(async move {
                let found = self.look(&slot).await?;
                Ok((slot, found))
            }) as BoxFuture<'_, Outcome<(DirectoryName, FoundObject)>>
        };
        self.in_slot(path, found).await
    }

    pub(super) async fn link(&self, existing: &PoolPath, new: &PoolPath) -> Result<Stat> {
        self.check(NfsCall::new("link", existing))?;
        let call = NfsCall::new("link", new);
        self.check(call)?;
        if !self.can.objects.hard_links {
            return Err(call.error(ErrorKind::Unsupported, "the server's file system has no hard links"));
        }
        if new.is_root() {
            return Err(call.error(ErrorKind::Exists, "it is the pool's root"));
        }
        let fail = |failure| call.failed(failure);
        let found = self.object(existing).await.map_err(fail)?;
        if found.stat.kind == FileKind::Directory {
            return Err(call.error(ErrorKind::NotPermitted, "a directory has one name only"));
        }
        let (handle, owners) = (&found.handle, &[Owner::from(&found.stat)]);
        let linked = self.in_slot(new, |slot| Box::pin(async move { self.link_slot(handle, &slot, owners).await }));
        linked.await.map_err(fail)?;
        self.attributes(handle, owners).await.map_err(fail)
    }

    pub(super) async fn remove(&self, path: &PoolPath, expected: &Expected) -> Result<()> {
        let call = NfsCall::new("remove", path);
        self.check(call)?;
        if path.is_root() {
            return Err(call.error(ErrorKind::IsDirectory, "it is the pool's root"));
        }
        let (slot, found) = match (self.object_in_slot(path).await, expected) {
            (Ok(found), _) => found,
            // Only a missing name was expected, not a missing directory on the way to it.
            (Err(NfsFailure::Status(nfsstat3::NFS3ERR_NOENT)), Expected::Absent) => return Ok(()),
            (Err(failure), _) => return Err(call.failed(failure)),
        };
        let as_expected = match expected {
            Expected::Anything => true,
            Expected::Absent => false,
            Expected::Version(version) | Expected::Name(version) => found.stat.version.same_content(version),
        };
        if !as_expected {
            return Err(call.error(ErrorKind::Conflict, "it was changed by another writer"));
        }
        if found.stat.kind == FileKind::Directory {
            return Err(call.error(ErrorKind::IsDirectory, "remove it as a directory"));
        }
        self.handles.forget_file(&found.stat.version);
        self.remove_slot(&slot, &found).await.map_err(|failure| call.failed(failure))
    }

    pub(super) async fn remove_dir(self: &Arc<Self>, path: &PoolPath) -> Result<()> {
        let call = NfsCall::new("rmdir", path);
        self.check(call)?;
        if path.is_root() {
            return Err(call.error(ErrorKind::Busy, "it is the pool's root"));
        }
        let (slot, found) = self.object_in_slot(path).await.map_err(|failure| call.failed(failure))?;
        if found.stat.kind != FileKind::Directory {
            return Err(call.failed(NfsFailure::Status(nfsstat3::NFS3ERR_NOTDIR)));
        }
        let mut answer = self.remove_slot(&slot, &found).await;
        // A killed writer may have left an unfinished file, which listings do not show.
        if answer.as_ref().is_err_and(|failure| failure.is(nfsstat3::NFS3ERR_NOTEMPTY))
            && self.sweep(path, &[], Sweep::BeforeRemoval).await? > 0
        {
            answer = self.remove_slot(&slot, &found).await;
        }
        self.handles.forget_tree(path);
        answer.map_err(|failure| match failure {
            NfsFailure::Status(nfsstat3::NFS3ERR_NOTEMPTY) => call.error(
                ErrorKind::NotEmpty,
                "it has entries; a listing leaves out unfinished .forebay~put- files, which a sweep removes",
            ),
            other => call.failed(other),
        })
    }

    pub(super) async fn rename(&self, from: &PoolPath, to: &PoolPath, mode: RenameMode) -> Result<Stat> {
        let call = NfsCall::new("rename", from);
        let there = NfsCall::new("rename to", to);
        self.check(call)?;
        self.check(there)?;
        let refuse = |kind, why| call.error(kind, why).context(format!("rename to {to}"));
        let fail = |failure| call.failed(failure).context(format!("rename to {to}"));
        if mode == RenameMode::Exchange {
            return Err(refuse(ErrorKind::Unsupported, "NFS version 3 cannot exchange names"));
        }
        if from.is_root() || to.is_root() {
            return Err(refuse(ErrorKind::Busy, "the pool's root cannot be renamed"));
        }
        let (from_slot, object) = self.object_in_slot(from).await.map_err(fail)?;
        let is_dir = object.stat.kind == FileKind::Directory;
        if is_dir && to != from && to.starts_with(from) {
            return Err(refuse(ErrorKind::InvalidInput, "a directory cannot be moved into itself"));
        }
        let target = |slot: DirectoryName| {
            Box::pin(async move {
                match self.look(&slot).await {
                    Ok(found) => Ok((slot, Some(found))),
                    Err(NfsFailure::Status(nfsstat3::NFS3ERR_NOENT)) => Ok((slot, None)),
                    Err(failure) => Err(failure),
                }
            }) as BoxFuture<'_, Outcome<(DirectoryName, Option<FoundObject>)>>
        };
        let (to_slot, target) = self.in_slot(to, target).await.map_err(fail)?;
        if let Some(target) = &target {
            let target_is_dir = target.stat.kind == FileKind::Directory;
            match mode {
                RenameMode::NoReplace => return Err(refuse(ErrorKind::Exists, "the new name exists")),
                _ if from != to && from.starts_with(to) => {
                    return Err(refuse(ErrorKind::NotEmpty, "it would replace a directory that holds it"));
                }
                _ if is_dir && !target_is_dir => {
                    return Err(refuse(ErrorKind::NotDirectory, "a directory cannot replace it"));
                }
                _ if !is_dir && target_is_dir => {
                    return Err(refuse(ErrorKind::IsDirectory, "only a directory can replace it"));
                }
                _ => {}
            }
        }
        let mut owners = vec![Owner::from(&object.stat)];
        owners.extend(target.as_ref().map(|target| Owner::from(&target.stat)));
        let same = target.as_ref().is_some_and(|target| target.stat.version.same_object(&object.stat.version));
        if !same {
            let renamed = self.rename_slot(&from_slot, &to_slot, &object.handle, &owners).await;
            if is_dir {
                self.handles.forget_tree(from);
                self.handles.forget_tree(to);
            }
            renamed.map_err(|failure| match failure {
                // POSIX allows both errors for a directory that is not empty.
                NfsFailure::Status(nfsstat3::NFS3ERR_EXIST) => fail(NfsFailure::Status(nfsstat3::NFS3ERR_NOTEMPTY)),
                other => fail(other),
            })?;
        }
        self.attributes(&object.handle, &owners).await.map_err(fail)
    }

    pub(super) async fn set_attrs(&self, path: &PoolPath, changes: &SetAttrs) -> Result<Stat> {
        let call = NfsCall::new("set attributes of", path);
        self.check(call)?;
        let fail = |failure| call.failed(failure);
        let found = self.object(path).await.map_err(fail)?;
        if !changes.applies_to(&found.stat.version) {
            return Err(call.error(ErrorKind::Busy, "another client writes it"));
        }
        if changes.mode.is_some() && found.stat.kind == FileKind::Symlink {
            return Err(call.error(ErrorKind::Unsupported, "a symlink has no mode"));
        }
        if let Some(size) = changes.size {
            check_kind(call, &found.stat)?;
            if size > self.sizes.file_bytes {
                return Err(call.error(ErrorKind::TooLarge, "the server has no files of that size"));
            }
        }
        let mut wanted = AttributeChange::from(changes);
        let owners = [Owner::from(&found.stat)];
        if !self.can.objects.owners && (wanted.uid.is_some() || wanted.gid.is_some()) {
            // A user other than root may give a file of theirs to a group of theirs. Otherwise the owner stays.
            let owner = SetAttrs { uid: changes.uid, gid: changes.gid, ..SetAttrs::default() };
            match self.settle(&found.handle, &owners, &AttributeChange::from(&owner), None).await {
                Err(failure) if !failure.is_denied() => return Err(fail(failure)),
                _ => wanted = wanted.without_owner(),
            }
        }
        self.settle(&found.handle, &owners, &wanted, None).await.map_err(fail)
    }
}
