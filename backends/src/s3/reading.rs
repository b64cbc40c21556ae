//! Contents on their way from the server: as they come, and gone on with where the line broke.

use std::ops::Range;
use std::sync::Arc;

use backon::BackoffBuilder;
use bytes::{Bytes, BytesMut};
use futures::{StreamExt, TryStreamExt, stream};

use crate::{Content, Error, ErrorKind, FileKind, Result, Version};

use super::client::{Body, Refusal, pauses};
use super::metadata::Object;
use super::{Bucket, Found, Op};

/// A stream that has brought so many bytes since it last broke is one that works.
const WORKING_BYTES: u64 = 1 << 20;

/// A range of one version that is being read.
struct Reading {
    bucket: Arc<Bucket>,
    key: String,
    /// Of the object that is read: the version's own, or that of a copy of it.
    etag: String,
    version: Version,
    /// What is still to come.
    rest: Range<u64>,
    body: Body,
    pauses: backon::ExponentialBackoff,
    since_break_bytes: u64,
    /// What is read, for errors.
    what: String,
}

impl Op<'_> {
    /// A range of one version.
    pub(super) async fn read(&self, version: &Version, range: Range<u64>) -> Result<Bytes> {
        let length = range.end.min(version.size()).saturating_sub(range.start);
        let mut stream = self.stream(version, range).await?;
        let Some(first) = stream.try_next().await? else { return Ok(Bytes::new()) };
        if first.len() as u64 == length {
            return Ok(first);
        }
        let mut data = BytesMut::with_capacity(length as usize);
        data.extend_from_slice(&first);
        while let Some(piece) = stream.try_next().await? {
            data.extend_from_slice(&piece);
        }
        Ok(data.freeze())
    }

    /// The same, piece by piece.
    pub(super) async fn stream(&self, version: &Version, range: Range<u64>) -> Result<Content> {
        if range.start > range.end {
            return Err(self.error(ErrorKind::InvalidInput));
        }
        let Version::Tag { etag, size, .. } = version else { return Err(self.error(ErrorKind::Stale)) };
        let range = range.start..range.end.min(*size);
        if range.start >= range.end {
            // Nothing to ask for, but only of what is a file.
            return match self.find().await? {
                Found::Directory(_) => Err(self.error(ErrorKind::IsDirectory)),
                found => self.readable(self.stat(&found).map(|stat| stat.kind)).map(|()| stream::empty().boxed()),
            };
        }
        let (etag, body) = match self.bucket.client.get_stream(&self.place.key, etag, range.clone()).await {
            Ok((told, body)) => {
                let stat = told.stat(false, &self.bucket.defaults);
                self.readable(Some(stat.kind))?;
                // Not every server looks at the condition and takes the bytes in one step.
                if !stat.version.same_content(version) {
                    return Err(self.error(ErrorKind::Stale));
                }
                (told.etag, body)
            }
            Err(refusal) if refusal.is(ErrorKind::Conflict) => self.copy(version, range.clone()).await?,
            Err(refusal) if refusal.is_out_of_range() => return Err(self.error(ErrorKind::Stale)),
            Err(refusal) if refusal.is(ErrorKind::NotFound) => {
                return match self.find().await? {
                    Found::Directory(_) => Err(self.error(ErrorKind::IsDirectory)),
                    _ => Err(self.error(ErrorKind::Stale)),
                };
            }
            Err(refusal) => return Err(self.refused(refusal)),
        };
        let reading = Reading {
            bucket: Arc::clone(self.bucket),
            key: self.place.key.clone(),
            etag,
            version: version.clone(),
            rest: range,
            body,
            pauses: pauses().build(),
            since_break_bytes: 0,
            what: self.context(),
        };
        let next = |mut reading: Reading| async move { Ok(reading.next().await?.map(|piece| (piece, reading))) };
        Ok(stream::try_unfold(reading, next).boxed())
    }

    /// The same where the ETag is another one: of a copy with the same content.
    async fn copy(&self, version: &Version, range: Range<u64>) -> Result<(String, Body)> {
        let stale = || self.error(ErrorKind::Stale);
        let client = &self.bucket.client;
        let found = client.head(&self.place.key).await.map_err(|refusal| self.refused(refusal))?;
        let object = found.filter(|object| self.bucket.is_version(object, version)).ok_or_else(stale)?;
        match client.get_stream(&self.place.key, &object.etag, range).await {
            Ok((told, body)) if self.bucket.is_version(&told, version) => Ok((told.etag, body)),
            Ok(_) => Err(stale()),
            Err(refusal) if refusal.is(ErrorKind::Conflict) || refusal.is(ErrorKind::NotFound) => Err(stale()),
            Err(refusal) => Err(self.refused(refusal)),
        }
    }

    /// The whole of a small object.
    pub(super) async fn content(&self, object: &Object) -> Result<Bytes> {
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

impl Reading {
    /// The next piece; `None` at the end of the range.
    async fn next(&mut self) -> Result<Option<Bytes>> {
        while !self.rest.is_empty() {
            let came = match self.body.next().await {
                Some(Ok(piece)) if piece.len() as u64 > self.rest.end - self.rest.start => {
                    return Err(self.error(ErrorKind::Corrupt, "the server sends more bytes than it was asked for"));
                }
                Some(Ok(piece)) if piece.is_empty() => continue,
                Some(Ok(piece)) => {
                    self.rest.start += piece.len() as u64;
                    self.since_break_bytes += piece.len() as u64;
                    return Ok(Some(piece));
                }
                Some(Err(refusal)) => refusal,
                None => Refusal::local(ErrorKind::Unavailable, "the answer ended before its end".to_owned()),
            };
            self.go_on(came).await?;
        }
        Ok(None)
    }

    /// Asks for the rest, a bounded number of times in a row.
    async fn go_on(&mut self, broke: Refusal) -> Result<()> {
        if self.since_break_bytes >= WORKING_BYTES {
            self.pauses = pauses().build();
        }
        self.since_break_bytes = 0;
        let Some(pause) = self.pauses.next() else { return Err(broke.into_error(self.what.clone())) };
        self.bucket.client.note_retry(&self.key, pause, &broke);
        tokio::time::sleep(pause).await;
        match self.bucket.client.get_stream(&self.key, &self.etag, self.rest.clone()).await {
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
