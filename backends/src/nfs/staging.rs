//! The temporary file that receives a new object's content before the object takes its name.

use std::sync::Arc;

use futures::FutureExt;
use nfs3_client::nfs3_types::nfs3::{CREATE3args, Nfs3Option, REMOVE3args, createhow3, nfs_fh3, nfsstat3, sattr3};

use crate::unfinished::unique_name;
use crate::{Attrs, PoolPath, Result, Stat};

use super::attributes::{AttributeChange, FoundObject, option};
use super::credentials::Owner;
use super::failure::{NfsCall, NfsFailure, Outcome};
use super::limits::{CHANGE_ATTEMPTS, NAME_ATTEMPTS, NONSENSE_ATTEMPTS};
use super::session::{DirectoryName, Session};
use super::upload::NfsUpload;

/// A file without a public name. It is removed when this is dropped, unless it was given a name.
pub(super) struct NfsTempFile {
    pub(super) session: Arc<Session>,
    /// The temporary name.
    pub(super) temp: DirectoryName,
    pub(super) file: nfs_fh3,
    pub(super) owner: Owner,
    pub(super) upload: NfsUpload,
    /// The temporary name may still exist.
    pub(super) owned: bool,
}

impl Drop for NfsTempFile {
    fn drop(&mut self) {
        // A file that cannot be removed now is left to a sweep.
        if let (true, Ok(runtime)) = (self.owned, tokio::runtime::Handle::try_current()) {
            let (session, temp, owner) = (Arc::clone(&self.session), self.temp.clone(), self.owner);
            runtime.spawn(async move { session.remove_temporary(&temp, owner).await }.boxed());
        }
    }
}

impl NfsTempFile {
    /// Creates an empty temporary file in the directory that will hold `path`, with the given owner if the server
    /// allows that.
    pub(super) async fn create(session: Arc<Session>, path: PoolPath, owner: Owner) -> Result<Self> {
        let maker = &session;
        let made =
            maker.in_slot(&path, |slot| Box::pin(async move { maker.create_temporary(slot, owner).await })).await;
        let (temp, found) = made.map_err(|failure| NfsCall::new("put", &path).failed(failure))?;
        let owner = Owner::from(&found.stat);
        let upload = NfsUpload::new(Arc::clone(&session), found.handle.clone(), vec![owner]);
        Ok(Self { session, temp, file: found.handle, owner, upload, owned: true })
    }

    /// Makes content and attributes durable. Afterwards only the name is missing.
    pub(super) async fn finish(&mut self, call: NfsCall<'_>, size: u64, attrs: &Attrs) -> Outcome<Stat> {
        self.upload.finish(call).await?;
        let mut wanted = AttributeChange::of_new(attrs, crate::FileKind::File, self.session.can.objects.owners);
        wanted.size = Some(size);
        let told = |failure| NfsFailure::Told(call.failed(failure).context("set the attributes"));
        let stat = self.session.settle(&self.file, &[self.owner], &wanted, None).await.map_err(told)?;
        // A change of the owner also changes the identity with which the file is accessed.
        self.owner = Owner::from(&stat);
        if stat.size != size {
            let why = format!("the server has {} of {size} bytes", stat.size);
            return Err(call.refused(crate::ErrorKind::Corrupt, &why));
        }
        Ok(stat)
    }

    /// Removes the temporary name.
    pub(super) async fn discard(&mut self) -> Outcome<()> {
        let temporary = FoundObject { handle: self.file.clone(), stat: self.stat().await? };
        self.session.remove_slot(&self.temp, &temporary).await?;
        self.owned = false;
        Ok(())
    }

    /// The attributes of the file, whatever its names.
    pub(super) async fn stat(&self) -> Outcome<Stat> {
        self.session.attributes(&self.file, &[self.owner]).await
    }
}

impl Session {
    /// Removes a name that no other file uses; tries once more if the answer is lost.
    async fn remove_temporary(&self, temp: &DirectoryName, owner: Owner) {
        let mut patience = self.calls.patience();
        let mut nonsense = 0;
        loop {
            match self.calls.call(&REMOVE3args { object: temp.args() }, &[owner, temp.dir.owner]).await {
                Err(NfsFailure::Lost(cause) | NfsFailure::Unsent(cause)) if cause.is_passing() => {
                    nonsense += u32::from(cause.is_nonsense());
                }
                _ => return,
            }
            if nonsense == NONSENSE_ATTEMPTS || !patience.pause().await {
                return;
            }
        }
    }

    /// Creates an empty file in the directory of `place`.
    async fn create_temporary(&self, place: DirectoryName, owner: Owner) -> Outcome<(DirectoryName, FoundObject)> {
        let attributes = sattr3 { mode: Nfs3Option::Some(0o600), ..sattr3::default() };
        let mut last = NfsFailure::Status(nfsstat3::NFS3ERR_EXIST);
        let mut lost = 0;
        for _ in 0..NAME_ATTEMPTS {
            let temp = DirectoryName { dir: Arc::clone(&place.dir), name: unique_name() };
            let args = CREATE3args { where_: temp.args(), how: createhow3::GUARDED(attributes.clone()) };
            let made = match self.calls.call(&args, &[owner, place.dir.owner]).await {
                Ok(made) => made,
                // Another name is tried. If the file was made, no other writer uses its name.
                Err(NfsFailure::Lost(cause)) if cause.is_passing() => {
                    self.remove_temporary(&temp, owner).await;
                    lost += 1;
                    if lost == CHANGE_ATTEMPTS {
                        return Err(NfsFailure::Lost(cause));
                    }
                    last = NfsFailure::Lost(cause);
                    continue;
                }
                Err(failure) if failure.is(nfsstat3::NFS3ERR_EXIST) => continue,
                Err(failure) => return Err(failure),
            };
            let found = match (option(made.obj), option(made.obj_attributes)) {
                (Some(handle), Some(raw)) => FoundObject { handle, stat: self.stat_of(&raw) },
                _ => self.look(&temp).await?,
            };
            return Ok((temp, found));
        }
        Err(last)
    }
}
