//! Changes of single names. The protocol's calls for that cannot simply be repeated: if an answer was lost, these
//! functions look at the names and send again only what was not done.

use nfs3_client::nfs3_types::nfs3::{LINK3args, REMOVE3args, RENAME3args, RMDIR3args, nfs_fh3, nfsstat3};

use crate::FileKind;

use super::attributes::FoundObject;
use super::calls::{Patience, RpcClient};
use super::credentials::Owner;
use super::failure::{NfsFailure, Outcome};
use super::limits::CHANGE_ATTEMPTS;
use super::session::{DirectoryName, Session};

/// The result of a look after a lost answer.
enum Became {
    Done,
    NotDone,
}

/// Attempts at one change.
struct Attempts {
    made: u32,
    patience: Patience,
}

impl Attempts {
    fn new(calls: &RpcClient) -> Self {
        Self { made: 0, patience: calls.patience() }
    }

    /// Whether the answer was lost in a way that allows a look at the names and another attempt.
    async fn lost<T>(&mut self, answer: &Outcome<T>) -> bool {
        let passing = matches!(answer, Err(NfsFailure::Lost(cause)) if cause.is_passing());
        self.made += 1;
        passing && self.made < CHANGE_ATTEMPTS && self.patience.pause().await
    }

    /// Whether an earlier attempt may have been carried out, although its answer was lost, or after the look at the
    /// names.
    fn are_several(&self) -> bool {
        self.made > 1
    }
}

impl Session {
    /// Removes the name of `object`, which was found there.
    pub(super) async fn remove_slot(&self, slot: &DirectoryName, object: &FoundObject) -> Outcome<()> {
        let owners = [slot.dir.owner, Owner::from(&object.stat)];
        let mut attempts = Attempts::new(&self.calls);
        loop {
            let answer = if object.stat.kind == FileKind::Directory {
                self.calls.call(&RMDIR3args { object: slot.args() }, &owners).await.map(drop)
            } else {
                self.calls.call(&REMOVE3args { object: slot.args() }, &owners).await.map(drop)
            };
            if attempts.lost(&answer).await {
                match self.after_removal(slot, object).await? {
                    Became::Done => return Ok(()),
                    Became::NotDone => continue,
                }
            }
            return match answer {
                Err(NfsFailure::Status(nfsstat3::NFS3ERR_NOENT)) if attempts.are_several() => Ok(()),
                // POSIX allows both errors for a directory that is not empty.
                Err(NfsFailure::Status(nfsstat3::NFS3ERR_EXIST)) => Err(NfsFailure::Status(nfsstat3::NFS3ERR_NOTEMPTY)),
                answer => answer,
            };
        }
    }

    async fn after_removal(&self, slot: &DirectoryName, object: &FoundObject) -> Outcome<Became> {
        match self.look(slot).await {
            Ok(found) if found.stat.version.same_object(&object.stat.version) => Ok(Became::NotDone),
            // The present object was made since.
            Ok(_) | Err(NfsFailure::Status(nfsstat3::NFS3ERR_NOENT)) => Ok(Became::Done),
            Err(failure) => Err(failure),
        }
    }

    /// Moves `object` from one name to another and replaces the object at the new name. `owners` are tried in
    /// addition to those of the directories.
    pub(super) async fn rename_slot(
        &self,
        from: &DirectoryName,
        to: &DirectoryName,
        object: &nfs_fh3,
        owners: &[Owner],
    ) -> Outcome<()> {
        let owners = [owners, &[from.dir.owner, to.dir.owner]].concat();
        let mut attempts = Attempts::new(&self.calls);
        loop {
            let answer = self.calls.call(&RENAME3args { from: from.args(), to: to.args() }, &owners).await.map(drop);
            if attempts.lost(&answer).await {
                match self.after_rename(from, object).await? {
                    Became::Done => return Ok(()),
                    Became::NotDone => continue,
                }
            }
            return match answer {
                Err(NfsFailure::Status(nfsstat3::NFS3ERR_NOENT)) if attempts.are_several() => {
                    match self.after_rename(from, object).await? {
                        Became::Done => Ok(()),
                        Became::NotDone => answer,
                    }
                }
                answer => answer,
            };
        }
    }

    /// The object was renamed if it still exists, but no longer at its old name.
    async fn after_rename(&self, from: &DirectoryName, object: &nfs_fh3) -> Outcome<Became> {
        let there = match self.look(from).await {
            Ok(found) => Some(found),
            Err(NfsFailure::Status(nfsstat3::NFS3ERR_NOENT)) => None,
            Err(failure) => return Err(failure),
        };
        let ours = self.attributes(object, &[from.dir.owner]).await?;
        match there {
            Some(found) if found.stat.version.same_object(&ours.version) => Ok(Became::NotDone),
            _ => Ok(Became::Done),
        }
    }

    /// Gives `object` another name, which must be free.
    pub(super) async fn link_slot(&self, object: &nfs_fh3, new: &DirectoryName, owners: &[Owner]) -> Outcome<()> {
        let owners = [owners, &[new.dir.owner]].concat();
        let mut attempts = Attempts::new(&self.calls);
        loop {
            let args = LINK3args { file: object.clone(), link: new.args() };
            let answer = self.calls.call(&args, &owners).await.map(drop);
            let exists = answer.as_ref().is_err_and(|failure| failure.is(nfsstat3::NFS3ERR_EXIST));
            let lost = attempts.lost(&answer).await;
            if lost || (exists && attempts.are_several()) {
                let ours = self.attributes(object, &owners).await?;
                match self.look(new).await {
                    Ok(found) if found.stat.version.same_object(&ours.version) => return Ok(()),
                    Err(NfsFailure::Status(nfsstat3::NFS3ERR_NOENT)) if lost => continue,
                    Err(failure) => return Err(failure),
                    Ok(_) => return Err(NfsFailure::Status(nfsstat3::NFS3ERR_EXIST)),
                }
            }
            return answer;
        }
    }
}
