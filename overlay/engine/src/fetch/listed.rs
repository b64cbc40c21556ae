//! Content that came with a listing.

use std::sync::Arc;

use bytes::Bytes;
use forebay_backends::{FileKind, Result, Version};
use futures::FutureExt;

use super::lost;
use crate::coherence::{Age, CONTENTS_BYTES, ListedContents};
use crate::namespace::Arrivals;
use crate::node::Node;
use crate::{Inner, Ino, MEMORY_UNIT_BYTES};

impl Inner {
    /// Like [`Self::ensure_listed_since`]. If the pool must be asked and sends small files with the listing, they are
    /// kept.
    pub async fn ensure_listed_with_contents(self: &Arc<Self>, dir: Ino, age: Age, arrivals: &Arrivals) -> Result<()> {
        let able = self.pool.capabilities().listed_contents;
        let units = (CONTENTS_BYTES / MEMORY_UNIT_BYTES) as u32;
        let Some(_memory) = able.then(|| self.memory.try_acquire_many(units).ok()).flatten() else {
            return self.ensure_listed_since(dir, age).await;
        };
        let mut contents = ListedContents::new();
        self.ensure_listed_as(dir, age, Some(&mut contents)).await?;
        for (name, version, content) in contents {
            let Some(ino) = self.catalog.name(dir, &name)?.here_ino() else { continue };
            let Ok(node) = self.node(ino) else { continue };
            let bytes = content.len() as u64;
            // Content that does not fit now is fetched in its turn, or fails then.
            if matches!(self.take_in(&node, version, content).await, Ok(true)) {
                *arrivals.0.lock().entry(ino).or_default() += bytes;
            }
        }
        Ok(())
    }

    /// Makes a file whole from bytes that came with a listing, if it has no content yet. Returns whether it is whole
    /// now.
    async fn take_in(self: &Arc<Self>, node: &Arc<Node>, version: Version, content: Bytes) -> Result<bool> {
        let path = self.pool_path(node.ino)?;
        {
            let state = node.state.lock();
            let record = &state.record;
            let is_file = record.kind == FileKind::File && !record.file.is_written_through();
            let fits = is_file && record.size == content.len() as u64;
            if !fits || !state.record.file.is_absent() || state.record.version.as_ref() != Some(&version) {
                return Ok(false);
            }
        }
        let (_, requests) = self.plan(node, 0..content.len() as u64, &path)?;
        for request in requests {
            // If the version changed since that check, or some chunks are already in flight, the bytes are not used.
            let came = request.is_all_of(&version, content.len() as u64).then(|| content.clone());
            let (inner, node) = (self.clone(), node.clone());
            // Readers may wait for these chunks by now, so the task goes on even if the caller is dropped.
            match came {
                Some(content) => {
                    let task = async move { inner.answer_with(&node, request, content).await };
                    tokio::spawn(task.boxed()).await.map_err(|_| lost())?;
                }
                // Not awaited: a request waits for memory, and the caller holds some of it.
                None => drop(tokio::spawn(async move { inner.answer(&node, request).await }.boxed())),
            }
        }
        Ok(node.state.lock().record.file.is_whole())
    }
}
