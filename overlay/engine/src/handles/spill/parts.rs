//! Which parts are on their way, and which are no longer used: these are removed from the pool.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use forebay_backends::{Error, Result};
use futures::{StreamExt, stream};
use parking_lot::Mutex;

use super::super::super::{Inner, blocking};
use super::PARTS_AT_ONCE;

/// How many parts are removed with one change of the catalog.
const REMOVED_AT_ONCE: usize = 100;
/// How long the removal of parts waits after a failure.
const REMOVE_AGAIN: Duration = Duration::from_secs(60);

/// The names of parts that are just being sent: they are listed as leaving, and must stay.
#[derive(Debug, Default)]
pub(crate) struct PartsUnderWay(Mutex<HashSet<String>>);

/// Parts that one caller sends.
pub(super) struct UnderWay<'a> {
    inner: &'a Inner,
    names: Vec<String>,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut names = self.inner.parts_under_way.0.lock();
        self.names.iter().for_each(|name| _ = names.remove(name));
        drop(names);
        // Those that no range uses now leave.
        self.inner.catalog.announce_leaving_parts();
    }
}

impl Inner {
    /// Lists parts as leaving: if the daemon is killed before a range uses them, they are removed.
    pub(super) async fn note_under_way(&self, parts: &[(String, Range<u64>)]) -> Result<UnderWay<'_>> {
        let names: Vec<String> = parts.iter().map(|(name, _)| name.clone()).collect();
        self.parts_under_way.0.lock().extend(names.iter().cloned());
        let under_way = UnderWay { inner: self, names };
        let mut batch = self.catalog.batch();
        under_way.names.iter().for_each(|name| batch.put_leaving_part(name));
        self.catalog.write(batch)?;
        let catalog = self.catalog.clone();
        blocking(move || catalog.sync()).await?;
        Ok(under_way)
    }

    /// Removes parts that no file uses any more from the pool. Runs as long as the mount.
    pub(crate) async fn part_loop(self: Arc<Self>) {
        if self.spillable_bytes().is_none() {
            return std::future::pending().await;
        }
        loop {
            if let Err(error) = self.remove_leaving_parts().await {
                tracing::debug!(%error, "parts that no file uses are not removed yet");
                tokio::time::sleep(REMOVE_AGAIN).await;
            } else {
                self.catalog.until_parts_leave().await;
            }
        }
    }

    /// Removes the parts that leave now. Those that the pool does not remove keep no later ones.
    pub(crate) async fn remove_leaving_parts(&self) -> Result<()> {
        let (mut after, mut failure) = (String::new(), None);
        loop {
            let names = {
                // Held during the scan: a part that a range uses by the end of it was listed and under way before.
                let under_way = self.parts_under_way.0.lock();
                let mut names = self.catalog.leaving_parts(&after, REMOVED_AT_ONCE)?;
                let Some(last) = names.last() else { break };
                after.clone_from(last);
                names.retain(|name| !under_way.contains(name));
                names
            };
            // After a power cut, no range may use a part that was removed.
            let catalog = self.catalog.clone();
            blocking(move || catalog.sync()).await?;
            let removals = names.into_iter().map(|name| async move {
                let removed = self.ask(self.pool.remove_part(&name)).await;
                (name, removed)
            });
            let removed: Vec<_> = stream::iter(removals).buffer_unordered(PARTS_AT_ONCE).collect().await;
            let mut batch = self.catalog.batch();
            for (name, removed) in removed {
                match removed {
                    Ok(()) => batch.delete_leaving_part(&name),
                    Err(error) => failure = Some(error),
                }
            }
            self.catalog.write(batch)?;
            if failure.as_ref().is_some_and(Error::is_unreachable) {
                break;
            }
        }
        failure.map_or(Ok(()), Err)
    }
}
