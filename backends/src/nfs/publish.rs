//! Gives a staged file its name, on the caller's condition.
//!
//! `Absent` is enforced by LINK, which never replaces. A version is checked right before RENAME: the protocol has no
//! operation that does both, so a writer on another node goes unnoticed in between. Writers of this process are
//! serialized.

use std::sync::Arc;

use bytes::Bytes;
use nfs3_client::nfs3_types::nfs3::{FSSTAT3args, nfsstat3};
use tokio::sync::OwnedMutexGuard;

use crate::abandoned::ChangeWork;
use crate::narrowed::narrowed_mode;
use crate::{Attrs, ErrorKind, Expected, FileKind, Piece, PoolPath, Result, Stat, Version};

use super::attributes::{AttributeChange, FoundObject};
use super::credentials::Owner;
use super::failure::{NfsCall, NfsFailure, Outcome};
use super::session::{DirectoryName, Session};
use super::staging::NfsTempFile;
use super::upload::NfsUpload;

/// The publication of one staged file.
pub(super) struct Publication {
    pub(super) path: PoolPath,
    pub(super) size: u64,
    pub(super) attrs: Attrs,
    pub(super) expected: Expected,
    /// The version of the staged file when it was complete.
    pub(super) finished: Version,
    /// The change of the name.
    pub(super) change: ChangeWork,
}

impl Publication {
    /// Gives the completed file its name. `turn` is the lock of the path: a later `put` of this process waits for it,
    /// even if the caller of this one is gone.
    pub(super) async fn run(self, mut staging: NfsTempFile, turn: OwnedMutexGuard<()>) -> Result<Stat> {
        let call = NfsCall::new("put", &self.path);
        let answer = async {
            let target = self.publish(call, &mut staging).await?;
            if let Some(target) = target {
                let stat = self.rewrite(call, &staging, &target).await?;
                staging.discard().await?;
                return Ok(stat);
            }
            // By the file: the name may belong to another writer by now, whose version must not be reported as ours.
            // Content that another writer has written into the file since it has a name is not ours either.
            let stat = staging.stat().await?;
            if !stat.version.same_content(&self.finished) {
                return Err(call.refused(ErrorKind::Conflict, "another writer changed it as soon as it had its name"));
            }
            Ok(stat)
        };
        let answer = answer.await.map_err(|failure| call.failed(failure));
        if let Err(error) = &answer
            && !error.is_unreachable()
        {
            // The caller gets the first error. A file that is left is removed when `staging` is dropped.
            let _ = staging.discard().await;
        }
        drop(turn);
        answer
    }

    /// Gives the file its name. If the object at that name has other names that must keep its content, it is returned
    /// instead, to be rewritten.
    async fn publish(&self, call: NfsCall<'_>, staging: &mut NfsTempFile) -> Outcome<Option<FoundObject>> {
        self.check_wanted(call)?;
        let name = self.path.name().unwrap_or_default().to_vec();
        let target = DirectoryName { dir: Arc::clone(&staging.temp.dir), name };
        if self.expected == Expected::Absent && self.create(call, staging, &target).await? {
            return Ok(None);
        }
        let found = match staging.session.look(&target).await {
            Ok(found) => Some(found),
            Err(NfsFailure::Status(nfsstat3::NFS3ERR_NOENT)) => None,
            Err(failure) => return Err(failure),
        };
        self.check(call, found.as_ref().map(|found| &found.stat))?;
        let together = !matches!(self.expected, Expected::Name(_));
        self.check_wanted(call)?;
        if together && let Some(found) = found.filter(|f| f.stat.kind == FileKind::File && f.stat.nlink > 1) {
            return Ok(Some(found));
        }
        staging.session.rename_slot(&staging.temp, &target, &staging.file, &[staging.owner]).await?;
        staging.owned = false;
        Ok(None)
    }

    /// Fails if the caller has given up: a later call may have written another version by now.
    fn check_wanted(&self, call: NfsCall<'_>) -> Outcome<()> {
        match self.change.is_abandoned() {
            true => Err(call.refused(ErrorKind::Conflict, "it was given up before it had its name")),
            false => Ok(()),
        }
    }

    /// Checks that the object that has the name now may be replaced.
    fn check(&self, call: NfsCall<'_>, target: Option<&Stat>) -> Outcome<()> {
        let conflict = |why| Err(call.refused(ErrorKind::Conflict, why));
        let same = |version: &Version| target.is_some_and(|target| target.version.same_content(version));
        match (&self.expected, target) {
            (Expected::Absent, Some(_)) => conflict("it exists already"),
            (Expected::Version(_) | Expected::Name(_), None) => conflict("it was removed by another writer"),
            (Expected::Version(version) | Expected::Name(version), _) if !same(version) => {
                conflict("it was changed by another writer")
            }
            (_, Some(Stat { kind: FileKind::Directory, .. })) => {
                Err(call.refused(ErrorKind::IsDirectory, "a file cannot take its place"))
            }
            _ => Ok(()),
        }
    }

    /// Takes a free name by a link; returns `false` if the file system has no links.
    async fn create(&self, call: NfsCall<'_>, staging: &mut NfsTempFile, target: &DirectoryName) -> Outcome<bool> {
        if !staging.session.can.objects.hard_links {
            return Ok(false);
        }
        match staging.session.link_slot(&staging.file, target, &[staging.owner]).await {
            Ok(()) => {}
            Err(NfsFailure::Status(nfsstat3::NFS3ERR_EXIST)) => {
                return Err(call.refused(ErrorKind::Conflict, "it exists already"));
            }
            Err(NfsFailure::Status(nfsstat3::NFS3ERR_NOTSUPP | nfsstat3::NFS3ERR_PERM | nfsstat3::NFS3ERR_MLINK)) => {
                return Ok(false);
            }
            Err(failure) => return Err(failure),
        }
        staging.discard().await?;
        Ok(true)
    }

    /// The mode of a file while the content is written into it. The protocol shows no ACLs, so there may be one. A process
    /// that is not root on the server writes as the owner, and must remain able to.
    fn narrowed(&self, session: &Session, target: &Stat) -> u32 {
        let of_owner = if session.can.objects.owners { 0 } else { target.mode & 0o700 };
        narrowed_mode(target, &self.attrs, true) | of_owner
    }

    /// Writes the staged content into a file that has other names, so that all of them keep naming one file. Readers
    /// by version get `Stale`, never a mixture. A crash in the middle leaves a torn file; this protocol has no way to
    /// mark it.
    async fn rewrite(&self, call: NfsCall<'_>, staging: &NfsTempFile, target: &FoundObject) -> Outcome<Stat> {
        let told = rewriting(call);
        let session = Arc::clone(&staging.session);
        let owners = vec![Owner::from(&target.stat)];
        // Checks for the space by which the file grows, before anything is changed.
        let root = FSSTAT3args { fsroot: target.handle.clone() };
        let available = session.calls.call(&root, &owners).await.map_err(told)?.abytes;
        if self.size.saturating_sub(target.stat.size) > available {
            return Err(told(NfsFailure::Status(nfsstat3::NFS3ERR_NOSPC)));
        }
        let narrowed = self.narrowed(&session, &target.stat);
        if narrowed != target.stat.mode {
            session.settle(&target.handle, &owners, &AttributeChange::of_mode(narrowed), None).await.map_err(told)?;
        }
        let mut upload = NfsUpload::new(Arc::clone(&session), target.handle.clone(), owners.clone());
        if let Err(failure) = self.transfer(call, staging, target, &mut upload).await {
            if narrowed != target.stat.mode && upload.has_written_nothing().await {
                let before = AttributeChange::of_mode(target.stat.mode);
                if let Err(failure) = session.settle(&target.handle, &owners, &before, None).await {
                    let error = call.failed(failure);
                    tracing::warn!(%error, "the file keeps the narrowed mode of a write that failed");
                }
            }
            return Err(failure);
        }
        let mut wanted = AttributeChange::of_new(&self.attrs, FileKind::File, session.can.objects.owners);
        wanted.size = Some(self.size);
        session.settle(&target.handle, &owners, &wanted, None).await.map_err(told)
    }

    /// Writes the staged content into the target.
    async fn transfer(
        &self,
        call: NfsCall<'_>,
        staging: &NfsTempFile,
        target: &FoundObject,
        upload: &mut NfsUpload,
    ) -> Outcome<()> {
        let told = rewriting(call);
        let session = &staging.session;
        let mut at = 0;
        while at < self.size {
            let length = session.sizes.read_bytes.min(u32::try_from(self.size - at).unwrap_or(u32::MAX));
            let data = session.read_any(call, &staging.file, &[staging.owner], at, length).await.map_err(told)?;
            if data.is_empty() {
                return Err(call.refused(ErrorKind::Corrupt, "the temporary file has become shorter"));
            }
            let next = at + data.len() as u64;
            // A hole beyond the old end stays a hole.
            if at < target.stat.size || !is_zeros(&data) {
                upload.push(call, Piece { offset: at, data }).await?;
            }
            at = next;
        }
        upload.finish(call).await
    }
}

fn rewriting(call: NfsCall<'_>) -> impl Fn(NfsFailure) -> NfsFailure + Copy {
    move |failure| NfsFailure::Told(call.failed(failure).context("rewrite a file with several names in place"))
}

fn is_zeros(data: &Bytes) -> bool {
    data.iter().all(|byte| *byte == 0)
}
