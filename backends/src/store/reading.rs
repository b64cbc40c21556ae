//! Downloads of content: passed on as they arrive, and resumed after a broken connection.

use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures::{StreamExt, TryStreamExt, stream};

use crate::{Content, Error, ErrorKind, FileKind, Result, Version};

use super::client::{Body, StoreRefusal, few_pauses};
use super::metadata::Object;
use super::requests::Same;
use super::{Bucket, StoreCall, StoredObject};

/// A stream that has received so many bytes since it last broke counts as working.
const WORKING_BYTES: u64 = 1 << 20;

/// A range of one version during a read.
struct RangeRead {
    bucket: Arc<Bucket>,
    key: String,
    /// The object that is read: that of the version, or a copy of it.
    object: Object,
    version: Version,
    /// The range that is still to be read.
    rest: Range<u64>,
    body: Body,
    pauses: backon::ExponentialBackoff,
    since_break_bytes: u64,
    /// Names the object, for errors.
    what: String,
}

impl StoreCall<'_> {
    /// Reads a range of one version.
    pub(crate) async fn read(&self, version: &Version, range: Range<u64>) -> Result<Bytes> {
        let length = range.end.min(version.size()).saturating_sub(range.start);
        let mut stream = self.stream(version, range).await?;
        let Some(first) = stream.try_next().await? else { return Ok(Bytes::new()) };
        let mut data = BytesMut::new();
        // The end of the stream also tells whether it was one version.
        while let Some(piece) = stream.try_next().await? {
            if data.is_empty() {
                data.reserve(length as usize);
                data.extend_from_slice(&first);
            }
            data.extend_from_slice(&piece);
        }
        Ok(if data.is_empty() { first } else { data.freeze() })
    }

    /// Like [`Self::read`], piece by piece.
    pub(crate) async fn stream(&self, version: &Version, range: Range<u64>) -> Result<Content> {
        if range.start > range.end {
            return Err(self.error(ErrorKind::InvalidInput));
        }
        let Version::Tag { etag, size, mtime, .. } = version else { return Err(self.error(ErrorKind::Stale)) };
        let range = range.start..range.end.min(*size);
        if range.start >= range.end {
            // There is nothing to request; only check that it is a file.
            return match self.find().await? {
                StoredObject::Directory(_) => Err(self.error(ErrorKind::IsDirectory)),
                found => self.readable(self.stat(&found).map(|stat| stat.kind)).map(|()| stream::empty().boxed()),
            };
        }
        let same = Same { etag, modified: *mtime };
        let (object, body) = match self.bucket.client.get_stream(&self.place.key, &same, range.clone()).await {
            Ok((told, body)) => {
                let stat = told.stat(false, &self.bucket.defaults);
                self.readable(Some(stat.kind))?;
                // Not every server checks the condition and reads the bytes in one step.
                if !stat.version.same_content(version) {
                    return Err(self.error(ErrorKind::Stale));
                }
                (told, body)
            }
            Err(refusal) if refusal.is(ErrorKind::Conflict) => self.copy(version, range.clone()).await?,
            Err(refusal) if refusal.is_behind_the_end() => return Err(self.error(ErrorKind::Stale)),
            Err(refusal) if refusal.is(ErrorKind::NotFound) || refusal.is_to_directory() => {
                return Err(self.gone().await);
            }
            Err(refusal) => return Err(self.refused(refusal)),
        };
        let reading = RangeRead {
            bucket: Arc::clone(self.bucket),
            key: self.place.key.clone(),
            object,
            version: version.clone(),
            rest: range,
            body,
            pauses: few_pauses(),
            since_break_bytes: 0,
            what: self.context(),
        };
        let next = |mut reading: RangeRead| async move { Ok(reading.next().await?.map(|piece| (piece, reading))) };
        Ok(stream::try_unfold(reading, next).boxed())
    }

    /// Opens a stream if the ETag differs: the object may be a copy with the same content.
    async fn copy(&self, version: &Version, range: Range<u64>) -> Result<(Object, Body)> {
        let stale = || self.error(ErrorKind::Stale);
        let client = &self.bucket.client;
        let found = client.head(&self.place.key).await.map_err(|refusal| self.refused(refusal))?;
        let Some(object) = found else { return Err(self.gone().await) };
        if !self.bucket.is_version(&object, version) {
            return Err(stale());
        }
        match client.get_stream(&self.place.key, &object.same(), range).await {
            Ok((told, body)) if self.bucket.is_version(&told, version) => Ok((told, body)),
            Ok(_) => Err(stale()),
            Err(refusal) if refusal.is(ErrorKind::Conflict) || refusal.is(ErrorKind::NotFound) => Err(stale()),
            Err(refusal) => Err(self.refused(refusal)),
        }
    }

    /// The error when there is no object of a version.
    async fn gone(&self) -> Error {
        match self.find().await {
            Ok(StoredObject::Directory(_)) => self.error(ErrorKind::IsDirectory),
            Ok(_) => self.error(ErrorKind::Stale),
            Err(error) => error,
        }
    }

    /// Reads the whole of a small object.
    pub(crate) async fn content(&self, object: &Object) -> Result<Bytes> {
        if object.size == 0 {
            return Ok(Bytes::new());
        }
        let answer = self.bucket.client.get(&self.place.key, &object.etag, 0..object.size).await;
        let (told, data) = answer.map_err(|refusal| match refusal.is(ErrorKind::Conflict) {
            true => self.error(ErrorKind::Stale),
            false => self.refused(refusal),
        })?;
        if told.etag == object.etag { Ok(data) } else { Err(self.error(ErrorKind::Stale)) }
    }

    fn readable(&self, kind: Option<FileKind>) -> Result<()> {
        if kind == Some(FileKind::File) { Ok(()) } else { Err(self.error(ErrorKind::InvalidInput)) }
    }
}

impl Bucket {
    fn is_version(&self, object: &Object, version: &Version) -> bool {
        object.stat(false, &self.defaults).version.same_content(version)
    }
}

impl RangeRead {
    /// The next piece; `None` at the end of the range.
    async fn next(&mut self) -> Result<Option<Bytes>> {
        while !self.rest.is_empty() {
            let came = match self.body.next().await {
                Some(Ok(piece)) if piece.len() as u64 > self.rest.end - self.rest.start => {
                    return Err(self.error(ErrorKind::Corrupt, "the server sent more bytes than were requested"));
                }
                Some(Ok(piece)) if piece.is_empty() => continue,
                Some(Ok(piece)) => {
                    self.rest.start += piece.len() as u64;
                    self.since_break_bytes += piece.len() as u64;
                    return Ok(Some(piece));
                }
                Some(Err(refusal)) => refusal,
                None => StoreRefusal::local(ErrorKind::Unavailable, "the answer ended before its end".to_owned()),
            };
            self.go_on(came).await?;
        }
        self.end().await?;
        Ok(None)
    }

    /// If objects may change in place, checks that the object was still the same at the end.
    async fn end(&mut self) -> Result<()> {
        let client = &self.bucket.client;
        if client.dialect.replaces_whole_objects() {
            return Ok(());
        }
        match client.head(&self.key).await {
            Ok(Some(object)) if self.bucket.is_version(&object, &self.version) => Ok(()),
            Ok(_) => Err(self.error(ErrorKind::Stale, "it was replaced while it was read")),
            Err(refusal) => Err(refusal.into_error(self.what.clone())),
        }
    }

    /// Requests the rest, a bounded number of times in a row.
    async fn go_on(&mut self, broke: StoreRefusal) -> Result<()> {
        if self.since_break_bytes >= WORKING_BYTES {
            self.pauses = few_pauses();
        }
        self.since_break_bytes = 0;
        let Some(pause) = self.pauses.next() else { return Err(broke.into_error(self.what.clone())) };
        self.bucket.client.note_retry(&self.key, pause, &broke);
        tokio::time::sleep(pause).await;
        match self.bucket.client.get_stream(&self.key, &self.object.same(), self.rest.clone()).await {
            Ok((told, body)) if self.bucket.is_version(&told, &self.version) => {
                self.body = body;
                Ok(())
            }
            Ok(_) => Err(self.error(ErrorKind::Stale, "it was replaced while it was read")),
            Err(refusal) if refusal.is(ErrorKind::Conflict) || refusal.is(ErrorKind::NotFound) => {
                Err(self.error(ErrorKind::Stale, "it was replaced while it was read"))
            }
            Err(refusal) => Err(refusal.into_error(self.what.clone())),
        }
    }

    fn error(&self, kind: ErrorKind, why: &str) -> Error {
        Error::new(kind, crate::Side::Pool, format!("{}: {why}", self.what))
    }
}
