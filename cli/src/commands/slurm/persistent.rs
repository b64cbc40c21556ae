//! Directories that outlive their jobs, on this node: scratch directories that no allocation owns.

use std::fs::{File, Metadata};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use forebay_daemon::registry::RegisteredMount;
use forebay_daemon::{Failure, FailureKind};
use forebay_slurm::directives::{DirectoryAccess, PersistentDir};
use forebay_slurm::exchange::{get, gone};
use rustix::fs::FlockOperation;

use super::staging::{NodeRecord, StagedJob, names_of};
use crate::commands::scratch;

/// Returns the name of a directory among the scratch directories of a mount. Names of users do not collide.
fn scratch_id(uid: u32, name: &str) -> String {
    format!("persistent-{uid}-{name}")
}

/// Returns what the links of a job to its directories begin with.
pub fn link_prefix(job: &str) -> String {
    format!("{job}.persistent.")
}

/// Returns the mount that has a directory of this user, and its path.
fn found(uid: u32, name: &str, entries: &[RegisteredMount]) -> Result<Option<(RegisteredMount, PathBuf)>, Failure> {
    for entry in entries {
        if let Some(path) = scratch::find(entry, &scratch_id(uid, name), uid)? {
            return Ok(Some((entry.clone(), path)));
        }
    }
    Ok(None)
}

/// Excludes other jobs of one user on this node while a job opens or destroys directories.
#[derive(Debug)]
pub(super) struct UserExclusion {
    path: PathBuf,
    /// Has the lock until it is closed.
    _file: File,
}

impl UserExclusion {
    /// Waits for the other jobs. A hook that waits too long is ended by its time limit.
    pub(super) fn wait(records: &Path, uid: u32) -> Result<Self, Failure> {
        let path = records.join(format!("persistent-{uid}.lock"));
        let failed = |e: std::io::Error| Failure::io(path.display(), &e);
        let id = |file: Metadata| (file.dev(), file.ino());
        loop {
            let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(&path);
            let file = file.map_err(failed)?;
            rustix::fs::flock(&file, FlockOperation::LockExclusive).map_err(|e| failed(e.into()))?;
            let locked = id(file.metadata().map_err(failed)?);
            // The job that had the lock has removed its file.
            if std::fs::symlink_metadata(&path).is_ok_and(|present| id(present) == locked) {
                return Ok(Self { path, _file: file });
            }
        }
    }
}

impl Drop for UserExclusion {
    fn drop(&mut self) {
        // While the lock is held. What stays is locked by the next job.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl StagedJob {
    /// Creates the directories that a job asks for, and finds those that it uses. Its record is stored before: from then
    /// on, no other job destroys what it asks for.
    pub fn open_persistent(&self, entry: &RegisteredMount, entries: &[RegisteredMount]) -> Result<(), Failure> {
        let asked = &self.record.request.staging.persistent;
        if !asked.is_needed() {
            return Ok(());
        }
        let _alone = UserExclusion::wait(&self.records, self.job.uid)?;
        for PersistentDir { name, bytes, access } in &asked.create {
            if *access == DirectoryAccess::Striped && self.node.nodes > 1 {
                let what = format!(
                    "create_persistent name={name}: the job has {} nodes, and each has a fast pool of its own: no \
                     directory can be striped over them. access_mode=private gives each node its own",
                    self.node.nodes
                );
                return Err(Failure::new(FailureKind::Usage, what));
            }
            if found(self.job.uid, name, entries)?.is_none() {
                scratch::create_for(entry, scratch_id(self.job.uid, name), self.job.uid, *bytes)?;
            }
        }
        let all: Vec<&String> = asked.create.iter().map(|dir| &dir.name).chain(&asked.uses).collect();
        for name in all {
            let Some((_, path)) = found(self.job.uid, name, entries)? else {
                let what = format!(
                    "persistentdw name={name}: node {} has no such directory of user {}: it is on the nodes of the job \
                     that created it (--nodelist)",
                    self.node.name, self.job.uid
                );
                return Err(Failure::new(FailureKind::Missing, what));
            };
            let link = self.records.join(format!("{}{name}", link_prefix(&self.job.id)));
            let linked = gone(std::fs::remove_file(&link)).and_then(|()| symlink(&path, &link));
            linked.map_err(|e| Failure::io(link.display(), &e))?;
        }
        Ok(())
    }

    /// Removes the directories that a job wants removed at its end. Returns why some stay.
    pub fn destroy_persistent(&self, entries: &[RegisteredMount]) -> Vec<String> {
        if !self.record.is_staged || self.job.requeues > self.record.requeues {
            return Vec::new();
        }
        let destroyed = |name: &String| -> Result<(), Failure> {
            let _alone = UserExclusion::wait(&self.records, self.job.uid)?;
            if let Some(user) = self.other_user_of(name)? {
                return Err(Failure::new(FailureKind::Busy, format!("job {user} uses it on node {}", self.node.name)));
            }
            match found(self.job.uid, name, entries)? {
                Some((entry, _)) => scratch::discard_at(&entry, scratch_id(self.job.uid, name)),
                None => Ok(()),
            }
        };
        let names = self.record.request.staging.persistent.destroy.iter();
        names
            .filter_map(|name| Some(format!("destroy_persistent name={name}: {}", destroyed(name).err()?.what)))
            .collect()
    }

    /// Returns another job of the user on this node that uses a directory, or is about to: its prolog may not have ended.
    pub(super) fn other_user_of(&self, name: &String) -> Result<Option<String>, Failure> {
        let owner = rustix::process::geteuid().as_raw();
        for file in names_of(&self.records)? {
            let Some(job) = file.strip_suffix(".json").filter(|job| *job != self.job.id) else { continue };
            let record: Option<NodeRecord> = get(&self.records.join(&file), &[owner])?;
            let asks = |record: NodeRecord| {
                let asked = record.request.staging.persistent;
                record.uid == self.job.uid
                    && (asked.uses.contains(name) || asked.create.iter().any(|dir| dir.name == *name))
            };
            if record.is_some_and(asks) {
                return Ok(Some(job.to_owned()));
            }
        }
        Ok(None)
    }

    /// Removes the links of a job to its directories.
    pub fn unlink_persistent(&self) -> Result<(), Failure> {
        for file in names_of(&self.records)?.iter().filter(|file| file.starts_with(&link_prefix(&self.job.id))) {
            let link = self.records.join(file);
            gone(std::fs::remove_file(&link)).map_err(|e| Failure::io(link.display(), &e))?;
        }
        Ok(())
    }
}

/// Returns the directories of a job with their names. `is_roots` tells whether a path is to be trusted.
pub fn task_dirs(records: &Path, job: &str, is_roots: impl Fn(&Path) -> bool) -> Vec<(String, PathBuf)> {
    let of = |file: String| {
        let (name, link) = (file.strip_prefix(&link_prefix(job))?.to_owned(), records.join(&file));
        is_roots(&link).then(|| Some((name, std::fs::read_link(&link).ok()?))).flatten()
    };
    names_of(records).unwrap_or_default().into_iter().filter_map(of).collect()
}
