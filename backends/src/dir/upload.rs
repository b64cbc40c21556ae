//! Writes the content of a `put` into the temporary file: in batches and, if the file system stripes the file over
//! several servers, several batches at once, each within the bounds of stripes.

use std::ops::ControlFlow;
use std::sync::Arc;

use futures::{FutureExt, StreamExt};
use tokio::task::{JoinError, JoinSet};

use crate::pieces::PieceOrder;
use crate::{Attrs, Error, ErrorKind, Expected, Piece, Pieces, PoolPath, Result, Side, Stat, Stripe};

use super::DirPool;
use super::staging::TempFile;

/// Content is written in batches of about this size.
const BATCH_BYTES: u64 = 1 << 20;
/// The most batches of one object that are written at the same time. No budget counts their bytes.
const MAX_WRITES: usize = 4;

/// Pieces, a batch at a time.
struct PieceBatches<'c> {
    content: Pieces<'c>,
    order: PieceOrder,
    /// The part that was cut off the last piece.
    rest: Option<Piece>,
    /// No batch crosses a multiple of this.
    unit_bytes: Option<u64>,
    ended: bool,
}

impl PieceBatches<'_> {
    async fn piece(&mut self) -> Result<Option<Piece>> {
        if let Some(rest) = self.rest.take() {
            return Ok(Some(rest));
        }
        let Some(piece) = self.content.next().await.transpose()? else {
            self.ended = true;
            return Ok(None);
        };
        self.order.check(&piece)?;
        Ok(Some(piece))
    }

    /// The next pieces, about [`BATCH_BYTES`] of them. Afterwards `ended` tells whether more follow.
    async fn next(&mut self) -> Result<Vec<Piece>> {
        let mut batch = Vec::new();
        let mut bytes = 0;
        while bytes < BATCH_BYTES {
            let Some(mut piece) = self.piece().await? else { break };
            let mut full = false;
            if let Some(unit) = self.unit_bytes {
                let within = unit - piece.offset % unit;
                full = piece.data.len() as u64 >= within;
                if piece.data.len() as u64 > within {
                    let data = piece.data.split_off(usize::try_from(within).unwrap_or(usize::MAX));
                    self.rest = Some(Piece { offset: piece.offset + within, data });
                }
            }
            bytes += piece.data.len() as u64;
            batch.push(piece);
            if full {
                break;
            }
        }
        Ok(batch)
    }
}

/// The largest multiple of the chunk size within a batch; of a bigger chunk, each batch has a part.
fn unit_bytes(stripe: Stripe) -> u64 {
    match BATCH_BYTES / stripe.chunk_bytes.max(1) {
        0 => BATCH_BYTES,
        chunks => chunks * stripe.chunk_bytes,
    }
}

impl DirPool {
    pub(super) async fn upload(
        &self,
        path: &PoolPath,
        size: u64,
        content: Pieces<'_>,
        attrs: &Attrs,
        expected: &Expected,
    ) -> Result<Stat> {
        let expected = self.shared.inward_expected(expected);
        let order = PieceOrder::new(size);
        let mut batches = PieceBatches { content, order, rest: None, unit_bytes: None, ended: false };
        let first = batches.next().await?;
        let (at, attributes, wanted, last) = (path.clone(), attrs.clone(), expected.clone(), batches.ended);
        // A small object needs only one trip to a blocking thread.
        let begun = self.publishing(vec![path.clone()], move |pool, change| {
            let call = pool.root.call("put", &at);
            pool.check_new(call, &attributes)?;
            let staging = TempFile::create(&pool.root, call, !pool.abilities.public.local)?;
            staging.write(call, &first)?;
            if last {
                let stat = pool.publish(staging, &at, size, &attributes, &wanted, change)?;
                return Ok(ControlFlow::Break(pool.outward(stat)));
            }
            let stripe = pool.stripes.stripe_of(&staging.file);
            Ok(ControlFlow::Continue((staging, stripe)))
        });
        let (staging, stripe) = match begun.await? {
            ControlFlow::Break(stat) => return Ok(stat),
            ControlFlow::Continue(begun) => begun,
        };
        batches.unit_bytes = stripe.map(unit_bytes);
        let staging = Arc::new(staging);
        let width = stripe.map_or(1, |stripe| (stripe.targets as usize).clamp(1, MAX_WRITES));
        self.write_rest(path, &staging, batches, width).await?;
        let Some(staging) = Arc::into_inner(staging) else {
            return Err(Error::new(ErrorKind::Os(libc::EIO), Side::Pool, format!("put {path}: a write has not ended")));
        };
        let (path, attrs) = (path.clone(), attrs.clone());
        self.publishing(vec![path.clone()], move |pool, change| {
            pool.publish(staging, &path, size, &attrs, &expected, change).map(|stat| pool.outward(stat))
        })
        .await
    }

    /// Writes the remaining batches, `width` at a time.
    async fn write_rest(
        &self,
        path: &PoolPath,
        staging: &Arc<TempFile>,
        mut batches: PieceBatches<'_>,
        width: usize,
    ) -> Result<()> {
        let mut writes = JoinSet::new();
        while !batches.ended {
            if writes.len() >= width {
                ended(writes.join_next().await)?;
            }
            let batch = batches.next().await?;
            let (pool, path, staging) = (self.handle(), path.clone(), Arc::clone(staging));
            let task =
                async move { pool.blocking(move |pool| staging.write(pool.root.call("put", &path), &batch)).await };
            writes.spawn(task.boxed());
        }
        while !writes.is_empty() {
            ended(writes.join_next().await)?;
        }
        Ok(())
    }
}

fn ended(write: Option<Result<Result<()>, JoinError>>) -> Result<()> {
    match write {
        Some(Err(failure)) => {
            let what = "put: a thread that writes ended early";
            Err(Error::new(ErrorKind::Unavailable, Side::Pool, what).with_source(failure))
        }
        Some(Ok(written)) => written,
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use futures::stream;

    async fn batched(pieces: &[(u64, usize)], unit_bytes: Option<u64>) -> Vec<Vec<(u64, usize)>> {
        let size = pieces.last().map_or(0, |(offset, length)| offset + *length as u64);
        let content: Vec<_> = pieces
            .iter()
            .map(|(offset, length)| Ok(Piece { offset: *offset, data: Bytes::from(vec![7; *length]) }))
            .collect();
        let content = stream::iter(content).boxed();
        let mut batches = PieceBatches { content, order: PieceOrder::new(size), rest: None, unit_bytes, ended: false };
        let mut all = Vec::new();
        while !batches.ended {
            let batch = batches.next().await.unwrap();
            all.push(batch.iter().map(|piece| (piece.offset, piece.data.len())).collect::<Vec<_>>());
        }
        all.retain(|batch| !batch.is_empty());
        all
    }

    #[tokio::test]
    async fn batches_end_where_stripes_do() {
        const K: usize = 1 << 10;
        let k = |kib: u64| kib << 10;
        let unit = unit_bytes(Stripe { chunk_bytes: k(512), targets: 4 });
        assert_eq!(unit, k(1024));
        let pieces = [(k(300), 1024 * K), (k(1324), 1024 * K)];
        let all = batched(&pieces, Some(unit)).await;
        let expected =
            [vec![(k(300), 724 * K)], vec![(k(1024), 300 * K), (k(1324), 724 * K)], vec![(k(2048), 300 * K)]];
        assert_eq!(all, expected);
        assert_eq!(batched(&pieces, None).await, [vec![pieces[0]], vec![pieces[1]]]);
        assert_eq!(unit_bytes(Stripe { chunk_bytes: k(384), targets: 4 }), k(768));
        assert_eq!(unit_bytes(Stripe { chunk_bytes: k(16 << 10), targets: 4 }), k(1024));
    }
}
