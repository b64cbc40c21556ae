//! Stages on a cluster: what this node stages of a request that all members get.

use std::ops::Range;
use std::sync::Arc;

use forebay_api::operator::StageRequest;
use forebay_api::peers::ClusterShare;
use forebay_backends::{Error, ErrorKind, Result, Side};
use tokio::task::coop::consume_budget;

use super::super::{Inner, Ino, Overlay};
use super::reporter::Reporter;
use super::{StagingTerms, parse_path};
use crate::fetch::FetchPriority;
use crate::node::Node;

/// The largest file of which the owners stage ranges: it has a million ranges of 64 MiB, each with its owner. A sparse file
/// may be larger.
const SHARED_BYTES_MAX: u64 = 64 << 40;

/// What this node stages of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum FileShare {
    All,
    /// The ranges of which this node is the first owner, not all of the file. A lease protects a whole file, so these get
    /// none.
    Ranges(Vec<Range<u64>>),
}

fn refused(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, Side::Application, what.into())
}

impl Overlay {
    /// Checks a request for all members of a cluster, before any of them stages.
    ///
    /// # Errors
    /// `InvalidInput` if its paths are not those of a mount, or if another node cannot know what is to be staged, or who is to
    /// own the leases.
    pub fn check_cluster_stage(&self, request: &StageRequest) -> Result<()> {
        if request.invocation.is_some() {
            return Err(refused("what earlier runs of a command read is known to one node only: name paths"));
        }
        if request.paths.is_empty() {
            return Err(refused("a stage on a cluster needs paths"));
        }
        let (owner, is_jobs) = self.inner.owner(request.job.as_deref(), &request.lease_owner);
        if is_jobs {
            let what =
                format!("job {owner} runs on this node only, so it cannot own leases on others: give --owner NAME");
            return Err(refused(what));
        }
        if owner.is_empty() {
            return Err(refused("leases on other nodes need an owner: give --owner NAME"));
        }
        request.paths.iter().try_for_each(|path| parse_path(path).map(drop))
    }

    /// Fetches the share of this node of a file of which other nodes stage other ranges. Returns the bytes that were not
    /// resident before.
    pub(super) async fn stage_ranges(&self, node: &Arc<Node>, terms: &StagingTerms<'_>) -> Result<u64> {
        let inner = &self.inner;
        let attempt = |size| async move {
            // Of the version that the pool has now.
            let ranges = match inner.share_of(node, terms.cluster)? {
                FileShare::All => std::iter::once(0..size).collect(),
                FileShare::Ranges(ranges) => ranges,
            };
            let mut came = 0;
            for range in ranges {
                let missing = inner.missing_bytes(node, range.clone())?;
                inner.ensure(node, range, FetchPriority::Ahead(terms.rate.as_ref())).await?;
                came += missing;
            }
            Ok(Some(came))
        };
        let staged = inner.fetch_current(node.ino, terms.begun, attempt).await?;
        staged.ok_or_else(|| inner.changes_while_staged(node.ino))
    }
}

impl Inner {
    /// Leaves out the files of which this node stages nothing, and those that are too large, which have failed.
    ///
    /// # Errors
    /// `InvalidInput` if the owners stage, and this node has no peers.
    pub(super) async fn keep_share(
        &self,
        files: &mut Vec<Ino>,
        cluster: Option<ClusterShare>,
        reporter: &Reporter,
    ) -> Result<()> {
        if cluster != Some(ClusterShare::Owners) {
            return Ok(());
        }
        if self.peers.get().is_none() {
            return Err(refused("this node has no peers: mount it with --peers FILE"));
        }
        let mut kept = Vec::new();
        for ino in files.drain(..) {
            consume_budget().await;
            let Some(node) = self.node_unless_gone(ino)? else { continue };
            match self.share_of(&node, cluster) {
                Ok(FileShare::Ranges(ranges)) if ranges.is_empty() => {}
                Ok(_) => kept.push(ino),
                Err(e) if e.is(ErrorKind::NoSpace) => reporter.failed(self.display(ino), &e),
                Err(e) => return Err(e),
            }
        }
        *files = kept;
        Ok(())
    }

    /// Returns what this node stages of a file, by the version that it knows.
    ///
    /// # Errors
    /// `NoSpace` if the file is larger than [`SHARED_BYTES_MAX`].
    pub(super) fn share_of(&self, node: &Node, cluster: Option<ClusterShare>) -> Result<FileShare> {
        let (Some(ClusterShare::Owners), Some(peers)) = (cluster, self.peers.get()) else { return Ok(FileShare::All) };
        // Other nodes do not know a file that is not in the pool yet.
        let Some(version) = node.state.lock().record.version.clone() else { return Ok(FileShare::All) };
        let path = match self.pool_path(node.ino) {
            Err(e) if e.is(ErrorKind::NotFound) => return Ok(FileShare::All),
            path => path?,
        };
        if version.size() > SHARED_BYTES_MAX {
            let what = format!("its {} bytes are more than the owners of ranges stage together", version.size());
            return Err(Error::new(ErrorKind::NoSpace, Side::Application, what));
        }
        let owned = peers.first_owned(&path, &version);
        let is_all = matches!(&owned[..], [range] if *range == (0..version.size()));
        Ok(if is_all { FileShare::All } else { FileShare::Ranges(owned) })
    }

    /// Returns the bytes of a share, and those of them that are not resident.
    pub(super) fn bytes_of_share(&self, node: &Node, share: &FileShare) -> Result<(u64, u64)> {
        match share {
            FileShare::All => {
                let size = self.attr_of(node)?.size;
                Ok((size, size.saturating_sub(self.resident_bytes(node, size)?)))
            }
            FileShare::Ranges(ranges) => {
                let mut absent = 0_u64;
                for range in ranges {
                    absent = absent.saturating_add(self.missing_bytes(node, range.clone())?);
                }
                Ok((ranges.iter().map(|range| range.end - range.start).sum(), absent))
            }
        }
    }

    /// Returns the bytes of the lease that this node's share of a file gets.
    pub(super) fn bytes_to_lease(&self, node: &Node, cluster: Option<ClusterShare>) -> Result<u64> {
        match self.share_of(node, cluster) {
            Ok(FileShare::All) => Ok(self.attr_of(node)?.size),
            Ok(FileShare::Ranges(_)) => Ok(0),
            // It has grown since it was planned. It is not staged.
            Err(e) if e.is(ErrorKind::NoSpace) => Ok(0),
            Err(e) => Err(e),
        }
    }
}
