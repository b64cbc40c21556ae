//! Views: trees of the mount that programs read without the daemon, while it lasts: as plain directories with hard links
//! to content files, mounted read-only over their own path.
//!
//! A view is begun, its files are staged with leases in its name, its tree is laid (`lay`), and its client mounts it. It
//! ends on request, with its job, when its time is over, or if its client ends before it has laid and mounted the tree.
//! Then the daemon takes the mounts away that it can see, and removes the tree in the background.
//!
//! The tree shows the versions that were staged. So content in a view is not changed in place: `leave` gives the file
//! another content file first. Content that the mount gives up stays in the tree.
//!
//! While a view lasts, the kernel may cache the names above it and their attributes for as long as it wants (`mount/pinned`):
//! a name that the kernel has to look up again, and does not find, would take the mount below it away. The daemon looks
//! at these names itself, and tells the kernel what changed. So the mount of a view outlives the daemon.

mod compare;
mod lay;
mod leave;
mod names_above;
mod owners;
mod rights;

use std::collections::{BTreeMap, HashSet};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forebay_api::operator::TypedPath;
use forebay_api::views::{View, ViewChanges, ViewPhase, ViewRequest};
use forebay_backends::{Error, ErrorKind, FileKind, Result, Side};
use forebay_cache::ContentNumbers;
use forebay_cache::views::TOP;
use forebay_system::clock::unix_now;
use forebay_system::process::{Process, is_ending};
use forebay_system::{bind, mounts};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use super::namespace::Ask;
use super::{Inner, Ino, Overlay, blocking, parse_path, to_its_end};

/// The key of the records in the catalog.
const KEY: &str = "views";
/// The most views of a mount.
const VIEWS_MAX: usize = 1_000;
/// How often the daemon looks at the names above views, at most, and whether one is over.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// What the names of views begin with.
const PREFIX: &str = "view-";

/// The record of a view in the catalog.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ViewRecord {
    phase: ViewPhase,
    /// The client that stages and mounts it; `None` if it is not known, or has done so. The next daemon ends what is not
    /// laid.
    #[serde(skip)]
    maker: Option<Process>,
    path: TypedPath,
    ino: u64,
    device: usize,
    job: Option<String>,
    expires_unix: Option<u64>,
    for_job: bool,
    created_unix: u64,
    files: u64,
    directories: u64,
    bytes: u64,
    copied_bytes: u64,
}

impl ViewRecord {
    /// Lets the view end if its time is over, or if its client has ended too early.
    fn note_end(&mut self, now_unix: u64) {
        // A process whose parent has not waited for it still exists.
        let has_ended = |maker: Process| !maker.is_alive() || is_ending(maker.pid);
        if self.maker.is_some_and(has_ended) || self.expires_unix.is_some_and(|at| at <= now_unix) {
            self.phase = ViewPhase::Ending;
        }
    }
}

/// The views of a mount.
#[derive(Debug, Default)]
pub(crate) struct Views {
    known: Mutex<BTreeMap<String, ViewRecord>>,
    /// Views whose tree is being laid.
    laying: Mutex<HashSet<String>>,
    /// Notified when there is something to look at, to end or to remove.
    bell: Notify,
}

/// A view whose tree is being laid.
struct Laying {
    inner: Arc<Inner>,
    id: String,
}

impl Drop for Laying {
    fn drop(&mut self) {
        self.inner.views.laying.lock().remove(&self.id);
        // Perhaps it was ended meanwhile.
        self.inner.views.bell.notify_one();
    }
}

impl Overlay {
    /// Begins a view of a file or a directory. If `maker` ends before the tree is laid and, if the client
    /// wants that, mounted, the view ends, too.
    ///
    /// # Errors
    /// `NotPermitted` for a daemon without root's privileges, or if the user does not own what all would see as a view;
    /// `PermissionDenied` if it may not read it; `NotFound`; `Exists` if a view shows a part of this tree;
    /// `Busy` if there are too many.
    pub async fn begin_view(&self, request: ViewRequest, maker: Option<Process>) -> Result<View> {
        let inner = self.inner.clone();
        if !rustix::process::geteuid().is_root() {
            let what = "a view shows files as their owners', and is mounted: both take a mount that root has made";
            return Err(Error::new(ErrorKind::NotPermitted, Side::Application, what));
        }
        let path = parse_path(&request.path)?;
        if path.as_bytes().is_empty() {
            let what = "a view of the whole mount would hide the mount: name directories in it";
            return Err(Error::new(ErrorKind::InvalidInput, Side::Application, what));
        }
        let ino = self.resolve_for(&path, Ask::Nothing, request.user.as_ref()).await?;
        let kind = inner.node(ino)?.state.lock().record.kind;
        if !matches!(kind, FileKind::File | FileKind::Directory) {
            let what = format!("{path}: a view shows a directory or a file");
            return Err(Error::new(ErrorKind::InvalidInput, Side::Application, what));
        }
        if let Some(user) = &request.user {
            inner.check_view_for(user, (ino, kind), request.for_job).await?;
        }
        let job = request.job.filter(|job| inner.advisor().is_running(job));
        if request.for_job && job.is_none() {
            let what = "a view for a job alone needs a job that runs at this mount";
            return Err(Error::new(ErrorKind::NotFound, Side::Application, what));
        }
        let record = ViewRecord {
            phase: ViewPhase::Staging,
            maker,
            path: request.path,
            ino: ino.0,
            device: inner.store.roomiest_device(),
            job,
            expires_unix: request.lease_secs.map(|secs| unix_now().saturating_add(secs)),
            for_job: request.for_job,
            created_unix: unix_now(),
            files: 0,
            directories: 0,
            bytes: 0,
            copied_bytes: 0,
        };
        blocking(move || {
            let mut known = inner.views.known.lock();
            known.values_mut().for_each(|record| record.note_end(unix_now()));
            if known.len() >= VIEWS_MAX {
                let what = format!("there are {VIEWS_MAX} views: `forebay view end` ends one");
                return Err(Error::new(ErrorKind::Busy, Side::Application, what));
            }
            for (other, at) in known.iter().filter(|(_, at)| at.phase != ViewPhase::Ending) {
                let shown = parse_path(&at.path)?;
                let overlaps =
                    shown.as_path().starts_with(path.as_path()) || path.as_path().starts_with(shown.as_path());
                let is_seen = !at.for_job || !record.for_job || at.job == record.job;
                if overlaps && is_seen {
                    let what = format!("{other} shows {} already: `forebay view end {other}`", at.path);
                    return Err(Error::new(ErrorKind::Exists, Side::Application, what));
                }
            }
            let id = format!("{PREFIX}{}", inner.catalog.new_content()?.0);
            known.insert(id.clone(), record.clone());
            inner.save_views(&known)?;
            drop(known);
            inner.catalog.sync()?;
            inner.views.bell.notify_one();
            inner.shown_view(&id, &record)
        })
        .await
    }

    /// Lays the tree of a view whose files are staged. `awaits_mount`: if its client ends before
    /// [`Self::view_is_mounted`] is called, the view ends, too.
    ///
    /// # Errors
    /// The view is ended then. `Busy` if a file is not staged, changes, or is not in the pool yet; `CrossDevice` if a
    /// file cannot be linked.
    pub async fn lay_view(&self, id: &str, allow_copy: bool, awaits_mount: bool) -> Result<View> {
        let (inner, id) = (self.inner.clone(), id.to_owned());
        if !inner.views.laying.lock().insert(id.clone()) {
            return Err(Error::new(ErrorKind::Busy, Side::Application, format!("{id} is being laid")));
        }
        // It is not given up half-way when the client goes away.
        to_its_end(async move {
            let laying = Laying { inner: inner.clone(), id: id.clone() };
            let laid = inner.clone().lay(&id, allow_copy, awaits_mount).await;
            drop(laying);
            if laid.is_err() {
                blocking(move || inner.end_view(&id)).await?;
            }
            laid
        })
        .await
    }

    /// Notes that the client of a view has mounted it.
    ///
    /// # Errors
    /// `Stale` if the view has ended meanwhile: what the client has mounted shows an empty tree.
    pub fn view_is_mounted(&self, id: &str) -> Result<()> {
        let mut known = self.inner.views.known.lock();
        let Some(record) = known.get_mut(id).filter(|record| record.phase == ViewPhase::Laid) else {
            let what = format!("{id} ended while it was being mounted");
            return Err(Error::new(ErrorKind::Stale, Side::Application, what));
        };
        record.maker = None;
        Ok(())
    }

    /// Returns all views, in the order of their names.
    pub fn views(&self) -> Result<Vec<View>> {
        let known = self.inner.views.known.lock();
        known.iter().map(|(id, record)| self.inner.shown_view(id, record)).collect()
    }

    /// Compares a view with what the pool has now.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if its tree is not laid.
    pub async fn compare_view(&self, id: &str) -> Result<ViewChanges> {
        self.inner.clone().compare(id).await
    }

    /// Ends a view: what is mounted of it in this process's namespace is detached, and its leases end. Its tree is
    /// removed in the background. An unknown view is no error. Blocks.
    pub fn end_view(&self, id: &str) -> Result<()> {
        self.inner.end_view(id)
    }

    /// Returns the inode whose content a view shows, by the path of its name in the view from the directory `content`.
    pub fn file_in_view(&self, path: &Path) -> Option<Ino> {
        let mut parts = path.strip_prefix("views").ok()?.iter();
        let id = parts.next()?.to_str()?;
        let root = Ino(self.inner.views.known.lock().get(id)?.ino);
        parts.next().filter(|top| *top == TOP)?;
        parts.try_fold(root, |dir, name| self.inner.catalog.name(dir, name.as_bytes()).ok()?.here_ino())
    }

    /// Ends the views of a job.
    pub fn end_views_of(&self, job: &str) -> Result<()> {
        let known = self.inner.views.known.lock();
        let of_job = known.iter().filter(|(_, record)| record.job.as_deref() == Some(job));
        let ids: Vec<String> = of_job.map(|(id, _)| id.clone()).collect();
        drop(known);
        ids.iter().map(|id| self.inner.end_view(id)).fold(Ok(()), Result::and)
    }
}

impl Inner {
    fn shown_view(&self, id: &str, record: &ViewRecord) -> Result<View> {
        let record = record.clone();
        Ok(View {
            id: id.to_owned(),
            phase: record.phase,
            path: record.path,
            ino: record.ino,
            tree: self.store.view_path(record.device, id)?.join(TOP).display().to_string(),
            job: record.job,
            expires_unix: record.expires_unix,
            for_job: record.for_job,
            created_unix: record.created_unix,
            files: record.files,
            directories: record.directories,
            bytes: record.bytes,
            copied_bytes: record.copied_bytes,
        })
    }

    fn save_views(&self, known: &BTreeMap<String, ViewRecord>) -> Result<()> {
        self.catalog.set_meta(KEY, known)
    }

    /// Returns a view whose tree is laid.
    fn laid_view(&self, id: &str) -> Result<ViewRecord> {
        match self.views.known.lock().get(id) {
            Some(record) if record.phase == ViewPhase::Laid => Ok(record.clone()),
            Some(_) => Err(Error::new(ErrorKind::Busy, Side::Application, format!("{id} is not laid"))),
            None => Err(unknown(id)),
        }
    }

    fn end_view(self: &Arc<Self>, id: &str) -> Result<()> {
        {
            let mut known = self.views.known.lock();
            let Some(record) = known.get_mut(id) else { return Ok(()) };
            record.phase = ViewPhase::Ending;
            self.save_views(&known)?;
        }
        if self.views.laying.lock().contains(id) {
            // Its laying finds that it is over, and ends it.
            return Ok(());
        }
        self.finish_ending(id)
    }

    /// Removes what is left of a view that is ending.
    fn finish_ending(self: &Arc<Self>, id: &str) -> Result<()> {
        let Some(record) = self.views.known.lock().get(id).cloned() else { return Ok(()) };
        // Its device may not be a part of the fast pool any more.
        let path = self.store.view_path(record.device, id).ok();
        path.iter().for_each(|path| self.take_mounts_away(path));
        self.end_leases_of(id)?;
        if path.is_some() {
            self.store.discard_view(record.device, id, self.catalog.new_content()?.0)?;
        }
        let mut known = self.views.known.lock();
        known.remove(id);
        self.save_views(&known)?;
        drop(known);
        self.unpin_names(id);
        self.views.bell.notify_one();
        Ok(())
    }

    /// Detaches what is mounted of a view in this process's namespace. Programs keep what they have open.
    fn take_mounts_away(&self, view: &Path) {
        let Ok(all) = mounts::list() else { return };
        for at in mounts::that_show(&all, &tree_of(view)) {
            if let Err(error) = bind::detach(at, true) {
                tracing::warn!("{}: a view stays mounted: {error}", at.mountpoint.display());
            }
        }
    }

    /// Takes up the views of the last daemon. Runs before any content file is removed.
    pub(crate) fn take_up_views(&self) -> Result<()> {
        let mut known: BTreeMap<String, ViewRecord> = self.catalog.meta(KEY)?.unwrap_or_default();
        let there = self.store.views();
        // Also without any view: the last daemon may have been removing one.
        if let Err(error) = self.store.count_outlived() {
            tracing::error!(%error, "not all files that only views have names for count as used");
        }
        if there.is_empty() && known.is_empty() {
            return Ok(());
        }
        for (id, record) in &mut known {
            let is_there = there.contains(&(record.device, id.clone()));
            // The loop ends it: perhaps it is mounted, and a mount cannot be taken away before this daemon serves.
            if record.phase == ViewPhase::Laid && is_there {
                self.pin_names(id, Ino(record.ino));
            } else {
                record.phase = ViewPhase::Ending;
            }
        }
        for (device, id) in there.into_iter().filter(|(_, id)| !known.contains_key(id)) {
            tracing::warn!("{id} has no record, and is removed");
            self.store.discard_view(device, &id, self.catalog.new_content()?.0)?;
        }
        self.save_views(&known)?;
        *self.views.known.lock() = known;
        self.views.bell.notify_one();
        Ok(())
    }

    /// Ends views whose time is over, looks at the names above the others, and removes what was discarded.
    pub(crate) async fn view_loop(self: Arc<Self>) {
        loop {
            let inner = self.clone();
            let ended = blocking(move || {
                let ended = inner.views_to_end().into_iter().map(|id| inner.finish_ending(&id));
                // One that cannot be ended does not keep the others.
                let ended = ended.fold(Ok(()), Result::and);
                ended.and(inner.store.remove_discarded_views())
            })
            .await;
            if let Err(error) = ended {
                tracing::error!(%error, "a view that is over is not removed yet");
            }
            if self.views.known.lock().is_empty() {
                self.views.bell.notified().await;
                continue;
            }
            self.look_at_pinned_names().await;
            // Its client may end at any moment.
            let is_made = self.views.known.lock().values().any(|record| record.maker.is_some());
            let ttl = self.node(Ino::ROOT).map_or(LOOK_EVERY, |root| self.policy_of(&root).metadata_ttl);
            let look_every = if is_made { LOOK_EVERY } else { LOOK_EVERY.max(ttl) };
            tokio::select! {
                () = tokio::time::sleep(look_every.min(self.next_end())) => {}
                () = self.views.bell.notified() => {}
            }
        }
    }

    /// Returns how long it takes until the time of a view is over.
    fn next_end(&self) -> Duration {
        let next = self.views.known.lock().values().filter_map(|record| record.expires_unix).min();
        next.map_or(Duration::MAX, |at| LOOK_EVERY.max(Duration::from_secs(at.saturating_sub(unix_now()))))
    }

    /// Returns the views whose time is over, or whose end was begun.
    fn views_to_end(&self) -> Vec<String> {
        let now = unix_now();
        let laying = self.views.laying.lock().clone();
        let mut known = self.views.known.lock();
        known.values_mut().for_each(|record| record.note_end(now));
        let over = known.iter().filter(|(id, record)| record.phase == ViewPhase::Ending && !laying.contains(*id));
        over.map(|(id, _)| id.clone()).collect()
    }
}

/// Returns the path of the tree of a view.
fn tree_of(view: &Path) -> PathBuf {
    view.join(TOP)
}

fn unknown(id: &str) -> Error {
    let what = format!("there is no view {id}: `forebay view list` shows those that exist");
    Error::new(ErrorKind::NotFound, Side::Application, what)
}
