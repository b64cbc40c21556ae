//! Uploads of content: in one request, or in parts.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt, TryStreamExt, stream};

use crate::pieces::PieceOrder;
use crate::store::conditions::Conditional;
use crate::{Attrs, Error, ErrorKind, Expected, FileKind, Part, Piece, Pieces, Result, Stat, Time};

use super::api::{ChecksumOf, Condition, UploadedPart};
use super::client::{Client, StoreRefusal};
use super::metadata::{Meta, Object};
use super::parts::{Cut, refused_copy};
use super::probe::TargetCondition;
use super::{Bucket, StoreCall, StoredObject};

/// Content up to this size is sent in one request.
pub(super) const PART_BYTES: u64 = 8 << 20;
/// The most parts of an upload, by the S3 API reference.
pub(super) const PARTS_MAX: u64 = 10_000;
/// Parts that are sent concurrently, at most: fewer, if they are large.
pub(super) const PARTS_AT_ONCE: usize = 4;
/// The most bytes that one request can copy, by the S3 API reference: 5 GiB.
const COPY_MAX_BYTES: u64 = 5 << 30;
pub(super) const COPY_PART_BYTES: u64 = 1 << 30;

/// The size of each part but the last of an upload of `size` bytes in `most` parts.
pub(super) fn part_bytes(size: u64, most: u64) -> u64 {
    PART_BYTES.max(size.div_ceil(most).next_multiple_of(1 << 20))
}

/// An upload that is aborted unless it is completed, so that the server does not keep its parts.
pub(super) struct MultipartUpload {
    client: Arc<Client>,
    key: String,
    id: String,
    completed: bool,
}

impl MultipartUpload {
    pub(super) async fn begin(
        client: &Arc<Client>,
        key: &str,
        meta: &Meta,
        checksum: ChecksumOf,
    ) -> Result<Self, StoreRefusal> {
        let id = client.begin_upload(key, meta, checksum).await?;
        Ok(Self { client: Arc::clone(client), key: key.to_owned(), id, completed: false })
    }

    pub(super) async fn complete(
        mut self,
        mut parts: Vec<UploadedPart>,
        meta: &Meta,
        on: Condition<'_>,
    ) -> Result<String, StoreRefusal> {
        parts.sort_by_key(|part| part.number);
        let etag = self.client.complete_upload(&self.key, &self.id, &parts, meta, on).await?;
        self.completed = true;
        Ok(etag)
    }
}

impl Drop for MultipartUpload {
    fn drop(&mut self) {
        let (false, Ok(runtime)) = (self.completed, tokio::runtime::Handle::try_current()) else { return };
        let (client, key, id) = (Arc::clone(&self.client), std::mem::take(&mut self.key), std::mem::take(&mut self.id));
        let task = async move {
            if let Err(refusal) = client.abort_upload(&key, &id).await
                && !refusal.is(ErrorKind::NotFound)
            {
                let error = refusal.into_error(format!("abort the upload of s3://{}/{key}", client.bucket));
                tracing::warn!(%error, "parts stay on the server until its rules for unfinished uploads remove them");
            }
        };
        runtime.spawn(task.boxed());
    }
}

/// Cuts a stream of pieces with holes into parts without holes.
pub(super) struct UploadParts<'a> {
    pieces: Pieces<'a>,
    order: PieceOrder,
    size: u64,
    /// The offset of the next part.
    at: u64,
    rest: Option<Piece>,
}

impl<'a> UploadParts<'a> {
    pub(super) fn new(pieces: Pieces<'a>, size: u64) -> Self {
        Self { pieces, order: PieceOrder::new(size), size, at: 0, rest: None }
    }

    /// The next `most` bytes, or the rest.
    pub(super) async fn next(&mut self, most: u64) -> Result<Bytes> {
        let end = self.at.saturating_add(most).min(self.size);
        let mut part = BytesMut::new();
        while let Some(mut piece) = self.piece().await? {
            if piece.offset >= end {
                self.rest = Some(piece);
                break;
            }
            let fits = (end - piece.offset).min(piece.data.len() as u64) as usize;
            let left = piece.data.split_off(fits);
            let behind = piece.offset + fits as u64;
            if piece.offset == self.at && behind == end {
                // A piece that fills a whole part is not copied.
                part = BytesMut::from(piece.data);
            } else {
                if part.capacity() == 0 {
                    part.reserve((end - self.at) as usize);
                }
                part.resize((piece.offset - self.at) as usize, 0);
                part.extend_from_slice(&piece.data);
            }
            if !left.is_empty() {
                self.rest = Some(Piece { offset: behind, data: left });
                break;
            }
        }
        part.resize((end - self.at) as usize, 0);
        self.at = end;
        Ok(part.freeze())
    }

    async fn piece(&mut self) -> Result<Option<Piece>> {
        if let Some(piece) = self.rest.take() {
            return Ok(Some(piece));
        }
        let Some(piece) = self.pieces.next().await.transpose()? else { return Ok(None) };
        self.order.check(&piece)?;
        Ok(Some(piece))
    }

    /// Reads the rest of the stream after the last part. It may contain an error, but no more content.
    pub(super) async fn finish(&mut self) -> Result<()> {
        while self.piece().await?.is_some() {}
        Ok(())
    }
}

impl MultipartUpload {
    /// Sends the parts of an upload, several at a time. `refused` makes an error of the server's answer.
    pub(super) async fn send(
        &self,
        bucket: &Bucket,
        content: Vec<Part<'_>>,
        cut: &Cut,
        refused: &(dyn Fn(StoreRefusal) -> Error + Sync),
    ) -> Result<Vec<UploadedPart>> {
        let (client, key, id) = (&self.client, &self.key, &self.id);
        let mut on_their_way = PartsOnTheirWay { begun: FuturesUnordered::new(), sent: Vec::new() };
        let (last, mut number) = (content.len().saturating_sub(1), 0);
        for (n, part) in content.into_iter().enumerate() {
            let ranges = cut.ranges(&part, n == last);
            match part {
                Part::Here { len, content } => {
                    let mut content = UploadParts::new(content, len);
                    for range in ranges {
                        let body = content.next(range.end - range.start).await?;
                        number += 1;
                        let part = async move { client.put_part(key, id, number, body).await.map_err(refused) };
                        on_their_way.begin(part.boxed(), cut.sent_at_once()).await?;
                    }
                    content.finish().await?;
                }
                Part::Sent(part) if part.len == 0 => bucket.expect_part(&part).await?,
                Part::Sent(part) => {
                    for range in ranges {
                        let (from, part) = (bucket.part_key(&part.name), part.clone());
                        number += 1;
                        let copied = async move {
                            let copied = client.copy_part((&from, &part.tag), range, key, id, number).await;
                            let copied = copied.map_err(|refusal| refused_copy(refusal, &from, refused))?;
                            // Ceph's gateway copies from any object that is there.
                            bucket.expect_part(&part).await?;
                            Ok(copied)
                        };
                        on_their_way.begin(copied.boxed(), PARTS_AT_ONCE).await?;
                    }
                }
            }
        }
        on_their_way.all().await
    }
}

/// Parts that are sent at the same time.
struct PartsOnTheirWay<'a> {
    begun: FuturesUnordered<BoxFuture<'a, Result<UploadedPart>>>,
    sent: Vec<UploadedPart>,
}

impl<'a> PartsOnTheirWay<'a> {
    /// Adds a part. Waits while `most` or more are on their way: then there is room for one that is being read.
    async fn begin(&mut self, part: BoxFuture<'a, Result<UploadedPart>>, most: usize) -> Result<()> {
        self.begun.push(part);
        while self.begun.len() >= most
            && let Some(part) = self.begun.next().await
        {
            self.sent.push(part?);
        }
        Ok(())
    }

    async fn all(mut self) -> Result<Vec<UploadedPart>> {
        while let Some(part) = self.begun.next().await {
            self.sent.push(part?);
        }
        Ok(self.sent)
    }
}

impl StoreCall<'_> {
    /// Creates or replaces an object whose content is the parts, one after the other.
    pub(super) async fn put(&self, content: Vec<Part<'_>>, attrs: &Attrs, expected: &Expected) -> Result<Stat> {
        if self.path.is_root() {
            return Err(self.error(ErrorKind::IsDirectory));
        }
        let cut = Cut::of(&content).map_err(|refusal| self.refused(refusal))?;
        self.parent().await?;
        let _room = self.bucket.client.room(cut.memory_bytes()).await;
        let there = self.bucket.find(&self.place).await.map_err(|refusal| self.refused(refusal))?;
        if matches!(there, StoredObject::Directory(_)) && *expected == Expected::Anything {
            return Err(self.error(ErrorKind::IsDirectory));
        }
        self.check(expected, &there)?;
        if self.place.shadowed && !matches!(there, StoredObject::Object(_)) {
            // The name stands for an object beside a directory of the same name, and there is no such object.
            return Err(self.error(ErrorKind::InvalidInput));
        }
        let there = if let StoredObject::Object(object) = there { Some(object) } else { None };
        let meta = Meta::new(FileKind::File, 0, attrs, Time::now());
        let refused = |refusal: StoreRefusal| match refusal.is(ErrorKind::Conflict) {
            // Any object may be replaced: a retry finds what another client wrote while the answer was lost.
            true if *expected == Expected::Anything => self.error(ErrorKind::Busy),
            true => self.error(ErrorKind::Conflict),
            false => self.refused(refusal),
        };
        let etag = if cut.is_whole {
            let body = self.bucket.whole(content).await?;
            let condition = self.condition(expected, there.as_ref(), self.bucket.conditional.put);
            self.bucket.client.put(&self.place.key, body, &meta, condition).await.map_err(refused)?
        } else {
            let upload = MultipartUpload::begin(&self.bucket.client, &self.place.key, &meta, ChecksumOf::Parts)
                .await
                .map_err(refused)?;
            let sent = upload.send(self.bucket, content, &cut, &|refusal| self.refused(refusal)).await?;
            let condition = self.condition(expected, there.as_ref(), self.bucket.conditional.complete);
            if !condition.is_sent() {
                let now = self.bucket.find(&self.place).await.map_err(|refusal| self.refused(refusal))?;
                self.check(expected, &now)?;
            }
            upload.complete(sent, &meta, condition).await.map_err(refused)?
        };
        self.made(&self.place.key, Object::written_now(etag, cut.size, meta), false).await
    }
}

/// The target of a copy on the server.
pub(super) struct CopyTarget<'a> {
    pub(super) key: &'a str,
    pub(super) meta: &'a Meta,
    pub(super) conditional: &'a Conditional,
}

impl CopyTarget<'_> {
    /// Copies the object that `from` names, in parts if it is too large for one request. Returns the copy's ETag.
    pub(super) async fn copy(
        &self,
        client: &Arc<Client>,
        from: &str,
        object: &Object,
        wanted: TargetCondition<'_>,
    ) -> Result<String, StoreRefusal> {
        if object.size == 0 {
            // There is nothing to copy; some servers cannot copy an object whose key ends with a slash.
            return client.put(self.key, Bytes::new(), self.meta, wanted.heeded(self.conditional.put)).await;
        }
        let source = (from, object.etag.as_str());
        if object.size <= COPY_MAX_BYTES {
            return client.copy(source, self.key, self.meta, wanted.heeded(self.conditional.copy)).await;
        }
        let upload = MultipartUpload::begin(client, self.key, self.meta, ChecksumOf::Parts).await?;
        let parts = copy_parts(&upload, source, object.size, COPY_PART_BYTES).await?;
        self.complete(upload, parts, (from, object), wanted).await
    }

    /// Makes an object of the first `kept` bytes of the present one and zeros up to `size`.
    pub(super) async fn resize(
        &self,
        client: &Arc<Client>,
        object: &Object,
        kept: u64,
        size: u64,
    ) -> Result<String, StoreRefusal> {
        let upload = MultipartUpload::begin(client, self.key, self.meta, ChecksumOf::Parts).await?;
        // All parts but the last have at least 5 MiB. A remainder smaller than a part is read, and written together
        // with what follows.
        let whole = kept / PART_BYTES * PART_BYTES;
        let source = (self.key, object.etag.as_str());
        let each = part_bytes(size, PARTS_MAX);
        let _room = client.room(each).await;
        let mut parts = copy_parts(&upload, source, whole, COPY_PART_BYTES.max(each)).await?;
        let (mut number, mut at) = (parts.len() as u32, whole);
        while at < size {
            let end = (at + each).min(size);
            let mut body = BytesMut::new();
            if at < kept {
                body.extend_from_slice(&client.get(source.0, source.1, at..kept.min(end)).await?.1);
            }
            body.resize((end - at) as usize, 0);
            number += 1;
            parts.push(client.put_part(&upload.key, &upload.id, number, body.freeze()).await?);
            at = end;
        }
        self.complete(upload, parts, (self.key, object), TargetCondition::Same(object)).await
    }

    /// Completes an upload of parts that were copied from an object.
    ///
    /// # Errors
    /// `Conflict` if the object was changed since it was looked up, so that the parts may be of different versions; or if
    /// the target is not as wanted, also where the server does not check that.
    async fn complete(
        &self,
        upload: MultipartUpload,
        parts: Vec<UploadedPart>,
        (from, object): (&str, &Object),
        wanted: TargetCondition<'_>,
    ) -> Result<String, StoreRefusal> {
        let changed = |key: &str| Err(StoreRefusal::local(ErrorKind::Conflict, format!("{key} was changed meanwhile")));
        if !upload.client.head(from).await?.is_some_and(|now| now.is(object)) {
            return changed(from);
        }
        let condition = wanted.heeded(self.conditional.complete);
        if !condition.is_sent() {
            let there = upload.client.head(self.key).await?;
            let is_as_wanted = match (wanted, &there) {
                (TargetCondition::Anything, _) | (TargetCondition::Absent, None) => true,
                (TargetCondition::Same(same), Some(there)) => there.is(same),
                _ => false,
            };
            if !is_as_wanted {
                return changed(self.key);
            }
        }
        upload.complete(parts, self.meta, condition).await
    }
}

/// Copies the first `size` bytes of an object as the first parts of an upload.
async fn copy_parts(
    upload: &MultipartUpload,
    from: (&str, &str),
    size: u64,
    part_bytes: u64,
) -> Result<Vec<UploadedPart>, StoreRefusal> {
    let ranges = (0..size).step_by(part_bytes as usize).map(|at| at..(at + part_bytes).min(size));
    stream::iter(ranges.zip(1_u32..))
        .map(|(range, number)| upload.client.copy_part(from, range, &upload.key, &upload.id, number))
        .buffer_unordered(PARTS_AT_ONCE)
        .try_collect()
        .await
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn uploads_never_have_too_many_parts() {
        for size in [1, PART_BYTES, 80 << 30, (80 << 30) + 1, 5 << 40] {
            let part = part_bytes(size, PARTS_MAX);
            assert!(size.div_ceil(part) <= PARTS_MAX && part >= PART_BYTES && part.is_multiple_of(1 << 20), "{size}");
        }
    }

    proptest! {
        #[test]
        fn parts_are_the_content(lengths in prop::collection::vec((0..30_u64, 0..40_usize), 0..12), end in 0..50_u64, most in 1..60_u64) {
            let mut content = Vec::new();
            let mut pieces = Vec::new();
            for (n, (hole, length)) in lengths.iter().enumerate() {
                content.resize(content.len() + *hole as usize, 0);
                let data = vec![n as u8 + 1; *length];
                pieces.push(Ok(Piece { offset: content.len() as u64, data: data.clone().into() }));
                content.extend(data);
            }
            content.resize(content.len() + end as usize, 0);
            let found = futures::executor::block_on(async {
                let mut parts = UploadParts::new(stream::iter(pieces).boxed(), content.len() as u64);
                let mut found = Vec::new();
                while parts.at < parts.size {
                    let part = parts.next(most).await.unwrap();
                    assert!(part.len() as u64 == most || parts.at == parts.size);
                    found.extend_from_slice(&part);
                }
                parts.finish().await.unwrap();
                found
            });
            prop_assert_eq!(found, content);
        }
    }
}
