//! Leases: the promise to an owner that eviction spares a file.
//!
//! Each owner, a job or a user, has its own lease on a file. The file stays while at least one lease holds. A lease
//! ends when it expires, by `forebay release`, when the job that is its owner ends, when the file loses its last name,
//! and when its staging stops before the file is whole. In the last case the owner's earlier lease holds again. After
//! the last lease, the content stays until its space is needed.
//!
//! `forebay run` leases for its job if the job runs at the mount. Several commands in one Slurm job do not end each
//! other's leases; `observe --slurm-job` and `release` do. If a daemon dies, the next one ends the leases of the jobs
//! that ended meanwhile.

use forebay_api::operator::{Progress, ReleaseRequest};
use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_catalog::{LeaseRecord, Leases};
use forebay_system::clock::unix_now;
use futures::Stream;
use tokio::task::coop::consume_budget;

use super::super::namespace::Ask;
use super::super::{Inner, Ino, Overlay};
use super::reporter::{Reporter, reported};
use crate::inode_change::InodeChange;
use crate::node::{Node, NodeState};

/// The stagings of one file by one owner that are in progress.
#[derive(Debug)]
pub(crate) struct Stagings {
    owner: String,
    count: u32,
    /// The lease that the owner had before the first of them.
    before: Option<LeaseRecord>,
}

/// A file that is being staged, with its lease. The lease is granted first, so that eviction spares fetched ranges
/// while the rest is fetched. If the staging ends before the file is whole, and no other staging of its owner goes on,
/// the earlier lease of its owner holds again.
pub(crate) struct Staging<'a> {
    inner: &'a Inner,
    node: &'a Node,
    owner: &'a str,
    /// The owner is a job, which must be running.
    is_jobs: bool,
}

impl<'a> Staging<'a> {
    pub fn begin(inner: &'a Inner, node: &'a Node, owner: &'a str, is_jobs: bool) -> Self {
        let mut state = node.state.lock();
        match state.stagings.iter_mut().find(|known| known.owner == owner) {
            Some(known) => known.count += 1,
            None => {
                let before = state.leases.of(owner, unix_now()).cloned();
                state.stagings.push(Stagings { owner: owner.into(), count: 1, before });
            }
        }
        Self { inner, node, owner, is_jobs }
    }

    /// Grants the lease. It replaces an earlier lease of the owner.
    ///
    /// # Errors
    /// `NotFound` if the file or the job is gone.
    pub fn lease(&self, bytes: u64, expires_unix: Option<u64>) -> Result<()> {
        let gone = |what| Err(Error::new(ErrorKind::NotFound, Side::Application, what));
        let lease = LeaseRecord { owner: self.owner.into(), expires_unix, bytes };
        {
            let mut state = self.node.state.lock();
            if state.is_deleted() || state.is_unlinked(self.node.ino) {
                return gone("it was removed");
            }
            if state.leases.of(self.owner, 0) != Some(&lease) {
                self.inner.change_leases(self.node.ino, &mut state, |leases| leases.grant(lease, unix_now()))?;
            }
        }
        // If the job is gone, the end of its leases may have missed this one.
        if self.is_jobs && !self.inner.advisor().is_running(self.owner) {
            self.inner.end_lease(self.node.ino, Some(self.owner))?;
            return gone("the job that it is staged for has ended");
        }
        if !self.is_jobs && self.inner.is_view_over(self.owner) {
            self.inner.end_lease(self.node.ino, Some(self.owner))?;
            return gone("the view that it is staged for has ended");
        }
        Ok(())
    }
}

impl Drop for Staging<'_> {
    fn drop(&mut self) {
        let mut state = self.node.state.lock();
        let Some(at) = state.stagings.iter().position(|known| known.owner == self.owner) else { return };
        state.stagings[at].count -= 1;
        if state.stagings[at].count > 0 {
            return;
        }
        let before = state.stagings.swap_remove(at).before;
        // A lease that was ended meanwhile stays ended.
        if state.is_deleted() || state.record.file.is_whole() || state.leases.of(self.owner, 0).is_none() {
            return;
        }
        let taken_back = self.inner.change_leases(self.node.ino, &mut state, |leases| {
            leases.end(self.owner);
            before.into_iter().for_each(|before| leases.grant(before, unix_now()));
        });
        if let Err(error) = taken_back {
            tracing::warn!(%error, "the lease of an incomplete stage could not be removed");
        }
    }
}

impl Overlay {
    /// Ends leases of one owner. The content stays until its space is needed.
    pub fn release_leases(&self, request: ReleaseRequest) -> impl Stream<Item = Progress> + Send + 'static {
        let overlay = self.clone();
        reported(|reporter| async move { overlay.release_each(&request, &reporter).await })
    }

    async fn release_each(&self, request: &ReleaseRequest, reporter: &Reporter) -> Result<()> {
        let inner = &self.inner;
        let (owner, _) = inner.owner(request.job.as_deref(), &request.owner);
        if inner.is_view(owner) {
            let what = format!("the leases of {owner} end with it: forebay view end {owner}");
            return Err(Error::new(ErrorKind::InvalidInput, Side::Application, what));
        }
        let files = match request.paths.is_empty() {
            true => {
                let (inner, owner) = (inner.clone(), owner.to_owned());
                super::super::blocking(move || inner.leased_by(&owner)).await?
            }
            false => self.files_of(&request.paths, Ask::Nothing, None, reporter).await?,
        };
        for ino in files {
            consume_budget().await;
            let held = match request.dry_run {
                true => inner.node_unless_gone(ino)?.and_then(|node| {
                    let state = node.state.lock();
                    state.leases.of(owner, unix_now()).map(|lease| lease.bytes)
                }),
                false => inner.end_lease(ino, Some(owner))?,
            };
            held.into_iter().for_each(|bytes| reporter.advanced(bytes));
        }
        // The end of the leases is durable before a caller relies on it.
        let again = inner.clone();
        super::super::blocking(move || again.catalog.sync()).await?;
        reporter.done(None);
        Ok(())
    }
}

impl Inner {
    /// Returns the owner of a lease that is requested in a job: the job if it runs at this mount, else `otherwise`.
    /// Also returns whether the owner is the job.
    pub(crate) fn owner<'a>(&self, job: Option<&'a str>, otherwise: &'a str) -> (&'a str, bool) {
        job.filter(|job| self.advisor().is_running(job)).map_or((otherwise, false), |job| (job, true))
    }

    fn change_leases<T>(&self, ino: Ino, state: &mut NodeState, change: impl FnOnce(&mut Leases) -> T) -> Result<T> {
        let mut leases = state.leases.clone();
        let changed = change(&mut leases);
        let mut of_inode = InodeChange::begin(&self.catalog, ino, state);
        of_inode.set_leases(leases);
        of_inode.commit()?;
        Ok(changed)
    }

    /// Ends the lease of one owner on a file, or all leases on it. Returns the bytes that were leased, if a lease held.
    pub(crate) fn end_lease(&self, ino: Ino, owner: Option<&str>) -> Result<Option<u64>> {
        let Some(node) = self.node_unless_gone(ino)? else { return Ok(None) };
        let now = unix_now();
        let mut state = node.state.lock();
        let has_none = owner.map_or(state.leases.is_empty(), |owner| state.leases.of(owner, 0).is_none());
        if state.is_deleted() || has_none {
            return Ok(None);
        }
        self.change_leases(ino, &mut state, |leases| match owner {
            Some(owner) => {
                let held = leases.of(owner, now).map(|lease| lease.bytes);
                leases.end(owner);
                held
            }
            None => {
                let ended = std::mem::take(leases);
                // A view ends as a whole, by `forebay view end`.
                let of_views = ended.holding(now).filter(|lease| self.is_view(&lease.owner));
                of_views.for_each(|lease| leases.grant(lease.clone(), now));
                ended.bytes(now)
            }
        })
    }

    /// Ends all leases of an owner, as far as possible. Returns the first error.
    pub(crate) fn end_leases_of(&self, owner: &str) -> Result<()> {
        let ended = self.leased_by(owner)?.into_iter().map(|ino| self.end_lease(ino, Some(owner)).map(drop));
        ended.fold(Ok(()), Result::and)
    }

    fn leased_by(&self, owner: &str) -> Result<Vec<Ino>> {
        let mut files = Vec::new();
        self.catalog.leases(|ino, leases| {
            files.extend(leases.of(owner, 0).map(|_| ino));
            Ok(true)
        })?;
        Ok(files)
    }

    /// Returns the bytes that eviction spares because of leases.
    pub(crate) fn leased_bytes(&self) -> Result<u64> {
        Ok(self.leased()?.1)
    }

    /// Returns how many files eviction spares because of leases, and their leased bytes.
    pub(crate) fn leased(&self) -> Result<(u64, u64)> {
        let (mut files, mut sum, now) = (0, 0_u64, unix_now());
        self.catalog.leases(|_, leases| {
            let bytes = leases.bytes(now);
            files += u64::from(bytes.is_some());
            sum = sum.saturating_add(bytes.unwrap_or(0));
            Ok(true)
        })?;
        Ok((files, sum))
    }
}
