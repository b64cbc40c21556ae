//! Content that is sent ahead of its object, and objects that are assembled from it.
//!
//! Each part is an object of its own, below a reserved name in the root: no listing shows it, and no path names it. The
//! server copies the parts into the object.

use std::ops::Range;

use bytes::Bytes;

use crate::pool::{is_part_name, parts_len};
use crate::{Error, ErrorKind, Part, Pieces, RESERVED_PREFIX, Result, SentPart, Side};

use super::Bucket;
use super::api::{ChecksumOf, Condition};
use super::client::{ROOM_BYTES, StoreRefusal};
use super::metadata::Meta;
use super::upload::{COPY_PART_BYTES, MultipartUpload, PART_BYTES, PARTS_AT_ONCE, PARTS_MAX, UploadParts, part_bytes};

/// The least size of a part of an upload that is not the last, by the S3 API reference: 5 MiB.
const LEAST_BYTES: u64 = 5 << 20;

/// How the content of an object is cut into the parts of an upload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) size: u64,
    /// One request has the whole content.
    pub(super) is_whole: bool,
    /// Bytes that are sent, not copied.
    sent_now: u64,
    /// The size of parts that are sent.
    each: u64,
}

impl Cut {
    /// Fails with `InvalidInput` if the content cannot be sent.
    pub(super) fn of(content: &[Part<'_>]) -> Result<Self, StoreRefusal> {
        let wrong = |why: String| StoreRefusal::local(ErrorKind::InvalidInput, why);
        let Some(size) = parts_len(content, PART_BYTES) else {
            return Err(wrong(format!(
                "a part that is not the last has less than {PART_BYTES} bytes, or all are too long"
            )));
        };
        let is_whole = match content {
            [] => true,
            [Part::Here { len, .. }] => *len <= PART_BYTES,
            [Part::Sent(part)] => part.len == 0,
            _ => false,
        };
        let last = content.len().saturating_sub(1);
        let (mut sent_now, mut streams, mut copies) = (0, 0_u64, 0);
        for (n, part) in content.iter().enumerate() {
            match part {
                Part::Here { len, .. } => (sent_now, streams) = (sent_now + len, streams + 1),
                Part::Sent(part) => copies += count(part.len, COPY_PART_BYTES, n == last),
            }
        }
        // Each stream may end with a part that is not full.
        let most = PARTS_MAX.saturating_sub(copies).saturating_sub(streams.saturating_sub(1));
        if most == 0 && streams > 0 || copies > PARTS_MAX {
            return Err(wrong(format!("{} parts: an upload has {PARTS_MAX} at most", copies + streams)));
        }
        Ok(Self { size, is_whole, sent_now, each: part_bytes(sent_now, most.max(1)) })
    }

    /// The ranges of a part of the content that are parts of the upload.
    pub(super) fn ranges(&self, part: &Part<'_>, is_last: bool) -> impl Iterator<Item = Range<u64>> + use<> {
        let each = match part {
            Part::Here { .. } => self.each,
            Part::Sent(_) => COPY_PART_BYTES,
        };
        ranges(part.len(), each, is_last)
    }

    /// Memory for the parts that are sent at the same time.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.sent_now.min(self.each * self.sent_at_once() as u64)
    }

    /// How many parts are sent at the same time: as many as the memory has room for, and at least one.
    pub(super) fn sent_at_once(&self) -> usize {
        (ROOM_BYTES / self.each).clamp(1, PARTS_AT_ONCE as u64) as usize
    }
}

/// How many ranges `len` bytes are cut into. A short rest is joined to the range before it, unless nothing follows.
fn count(len: u64, each: u64, is_last: bool) -> u64 {
    let (full, rest) = (len / each, len % each);
    let is_range = rest >= LEAST_BYTES || full == 0 || is_last;
    full + u64::from(rest > 0 && is_range)
}

fn ranges(len: u64, each: u64, is_last: bool) -> impl Iterator<Item = Range<u64>> {
    let count = count(len, each, is_last);
    (0..count).map(move |n| n * each..if n + 1 == count { len } else { (n + 1) * each })
}

/// The error of a copy from a part that was sent before.
pub(super) fn refused_copy(refusal: StoreRefusal, from: &str, refused: &dyn Fn(StoreRefusal) -> Error) -> Error {
    let kind = match &refusal {
        refusal if refusal.is(ErrorKind::NotFound) && refusal.code != "NoSuchUpload" => ErrorKind::NotFound,
        refusal if refusal.is(ErrorKind::Conflict) || refusal.is_behind_the_end() => ErrorKind::Stale,
        _ => return refused(refusal),
    };
    Error::new(kind, Side::Pool, format!("copy the part {from}: {}", refused(refusal)))
}

impl Bucket {
    /// The key of a part that is sent ahead.
    pub(super) fn part_key(&self, name: &str) -> String {
        format!("{}{}parts/{name}", self.root, String::from_utf8_lossy(RESERVED_PREFIX))
    }

    fn part_error(&self, what: &str, name: &str, kind: ErrorKind) -> Error {
        Error::new(kind, Side::Pool, self.part_context(what, name))
    }

    fn part_context(&self, what: &str, name: &str) -> String {
        format!("{what} {name} in {}", self.name)
    }

    /// The key of a part that a caller named.
    fn named_part(&self, what: &str, name: &str) -> Result<String> {
        match is_part_name(name) {
            true => Ok(self.part_key(name)),
            false => Err(self.part_error(what, name, ErrorKind::InvalidInput)),
        }
    }

    /// Content that one request can have.
    pub(super) async fn whole(&self, content: Vec<Part<'_>>) -> Result<Bytes> {
        let mut body = Bytes::new();
        for part in content {
            match part {
                Part::Here { len, content } => {
                    let mut content = UploadParts::new(content, len);
                    body = content.next(len).await?;
                    content.finish().await?;
                }
                Part::Sent(part) => self.expect_part(&part).await?,
            }
        }
        Ok(body)
    }

    pub(super) async fn send_part(&self, name: &str, len: u64, content: Pieces<'_>) -> Result<SentPart> {
        let what = "send part";
        let key = self.named_part(what, name)?;
        let refused = |refusal: StoreRefusal| refusal.into_error(self.part_context(what, name));
        let content = vec![Part::Here { len, content }];
        let cut = Cut::of(&content).map_err(refused)?;
        let _room = self.client.room(cut.memory_bytes()).await;
        let meta = Meta::scratch();
        let tag = if cut.is_whole {
            let body = self.whole(content).await?;
            self.client.put(&key, body, &meta, Condition::None).await.map_err(refused)?
        } else {
            // Versitygw copies the checksum of an object with its content, and takes only one of the content for a part.
            let upload = MultipartUpload::begin(&self.client, &key, &meta, ChecksumOf::Content).await;
            let upload = upload.map_err(refused)?;
            let sent = upload.send(self, content, &cut, &refused).await?;
            let etag = upload.complete(sent, &meta, Condition::None).await.map_err(refused)?;
            // Some servers write it in another way in the answer to a completed upload.
            let found = self.client.head(&key).await.map_err(refused)?;
            found.filter(|found| found.meta.write == meta.write).map_or(etag, |found| found.etag)
        };
        Ok(SentPart { name: name.to_owned(), len, tag })
    }

    pub(super) async fn read_part(&self, part: &SentPart, range: Range<u64>) -> Result<Bytes> {
        let what = "read part";
        let key = self.named_part(what, &part.name)?;
        if range.start > range.end {
            return Err(self.part_error(what, &part.name, ErrorKind::InvalidInput));
        }
        let range = range.start..range.end.min(part.len);
        if range.start >= range.end {
            return self.expect_part(part).await.map(|()| Bytes::new());
        }
        match self.client.get(&key, &part.tag, range).await {
            // Not every server checks the condition.
            Ok((found, data)) if (&found.etag, found.size) == (&part.tag, part.len) => Ok(data),
            Ok(_) => Err(self.part_error(what, &part.name, ErrorKind::Stale)),
            Err(refusal) if refusal.is(ErrorKind::Conflict) || refusal.is_behind_the_end() => {
                Err(self.part_error(what, &part.name, ErrorKind::Stale))
            }
            Err(refusal) => Err(refusal.into_error(self.part_context(what, &part.name))),
        }
    }

    /// Fails with `NotFound` or `Stale` unless the part is there.
    pub(super) async fn expect_part(&self, part: &SentPart) -> Result<()> {
        let what = "find part";
        let key = self.named_part(what, &part.name)?;
        let found = self.client.head(&key).await;
        match found.map_err(|refusal| refusal.into_error(self.part_context(what, &part.name)))? {
            Some(found) if (&found.etag, found.size) == (&part.tag, part.len) => Ok(()),
            Some(_) => Err(self.part_error(what, &part.name, ErrorKind::Stale)),
            None => {
                // An answer to HEAD does not say whether it is the bucket that is missing.
                let listed = self.client.list(&key, false, None, 1).await;
                listed.map_err(|refusal| refusal.into_error(self.part_context(what, &part.name)))?;
                Err(self.part_error(what, &part.name, ErrorKind::NotFound))
            }
        }
    }

    pub(super) async fn remove_part(&self, name: &str) -> Result<()> {
        let what = "remove part";
        let key = self.named_part(what, name)?;
        let removed = self.client.delete(&key, Condition::None).await;
        removed.map_err(|refusal| refusal.into_error(self.part_context(what, name)))
    }
}

#[cfg(test)]
mod tests {
    use futures::{StreamExt, stream};
    use proptest::prelude::*;

    use super::*;

    fn sent(len: u64) -> Part<'static> {
        Part::Sent(SentPart { name: "a".into(), len, tag: "b".into() })
    }

    fn here(len: u64) -> Part<'static> {
        Part::Here { len, content: stream::empty().boxed() }
    }

    #[test]
    fn content_that_an_upload_cannot_have_is_refused() {
        for wrong in [vec![sent(PART_BYTES - 1), here(1)], vec![here(1), here(0)], vec![here(u64::MAX), here(1)]] {
            assert!(Cut::of(&wrong).unwrap_err().is(ErrorKind::InvalidInput));
        }
        let many = |n: usize| (0..n).map(|_| sent(PART_BYTES)).chain([here(1 << 30)]).collect::<Vec<_>>();
        assert!(Cut::of(&many(10_000)).unwrap_err().is(ErrorKind::InvalidInput));
        assert_eq!(Cut::of(&many(9_999)).unwrap().each, 1 << 30);
        assert_eq!(Cut::of(&many(2)).unwrap().each, PART_BYTES);
    }

    #[test]
    fn parts_that_are_sent_at_once_fit_into_the_memory_for_them() {
        for (size, at_once) in [(1 << 30, 4), (100 << 30, 2), (200 << 30, 1), (5 << 40, 1)] {
            let cut = Cut::of(&[here(size)]).unwrap();
            assert_eq!(cut.sent_at_once(), at_once, "{size}");
            assert!(cut.memory_bytes() <= ROOM_BYTES.max(cut.each), "{size}");
        }
    }

    #[test]
    fn small_content_goes_in_one_request() {
        assert!(Cut::of(&[]).unwrap().is_whole && Cut::of(&[here(PART_BYTES)]).unwrap().is_whole);
        assert!(!Cut::of(&[here(PART_BYTES + 1)]).unwrap().is_whole && !Cut::of(&[sent(1)]).unwrap().is_whole);
    }

    proptest! {
        #[test]
        fn uploads_have_neither_too_many_nor_too_small_parts(
            parts in prop::collection::vec((any::<bool>(), PART_BYTES..8 << 30), 1..40),
            end in 1..PART_BYTES,
        ) {
            let lengths = parts.into_iter().chain([(true, end)]);
            let parts: Vec<_> = lengths.map(|(is_here, len)| if is_here { here(len) } else { sent(len) }).collect();
            let cut = Cut::of(&parts).unwrap();
            let mut uploaded = Vec::new();
            for (n, part) in parts.iter().enumerate() {
                let mut at = 0;
                for range in cut.ranges(part, n + 1 == parts.len()) {
                    prop_assert!(range.start == at && range.end > at, "{range:?} at {at}");
                    uploaded.push(range.end - range.start);
                    at = range.end;
                }
                prop_assert_eq!(at, part.len());
            }
            prop_assert!(uploaded.len() as u64 <= PARTS_MAX);
            uploaded.pop();
            prop_assert!(uploaded.into_iter().all(|bytes| (LEAST_BYTES..5 << 30).contains(&bytes)));
        }
    }
}
