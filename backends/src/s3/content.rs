//! Reading contents, and changing attributes: the size too.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

use crate::{Attrs, ErrorKind, FileKind, Result, SetAttrs, Stat, Time, Version};

use super::api::Condition;
use super::client::Refusal;
use super::metadata::{Meta, Object};
use super::probe::Wanted;
use super::{Found, Op, directory_meta, upload};

/// The largest object whose size is changed by reading it and writing it anew; larger ones are put together on the
/// server.
const REWRITTEN_BYTES: u64 = 16 << 20;

impl Op<'_> {
    /// A range of one version.
    pub(super) async fn read(&self, version: &Version, range: Range<u64>) -> Result<Bytes> {
        if range.start > range.end {
            return Err(self.error(ErrorKind::InvalidInput));
        }
        let Version::Tag { etag, size, .. } = version else { return Err(self.error(ErrorKind::Stale)) };
        let range = range.start..range.end.min(*size);
        if range.start >= range.end {
            // Nothing to ask for, but only of what is a file.
            return match self.find().await? {
                Found::Directory(_) => Err(self.error(ErrorKind::IsDirectory)),
                found => self.readable(self.stat(&found).map(|stat| stat.kind)).map(|()| Bytes::new()),
            };
        }
        match self.get(etag, range.clone()).await {
            Ok((told, data)) => {
                let stat = told.stat(false, &self.bucket.defaults);
                self.readable(Some(stat.kind))?;
                // Not every server looks at the condition and takes the bytes in one step.
                if stat.version.same_content(version) { Ok(data) } else { Err(self.error(ErrorKind::Stale)) }
            }
            Err(refusal) if refusal.is(ErrorKind::Conflict) => self.read_copy(version, range).await,
            Err(refusal) if refusal.code == "InvalidRange" => Err(self.error(ErrorKind::Stale)),
            Err(refusal) if refusal.is(ErrorKind::NotFound) => match self.find().await? {
                Found::Directory(_) => Err(self.error(ErrorKind::IsDirectory)),
                _ => Err(self.error(ErrorKind::Stale)),
            },
            Err(refusal) => Err(self.refused(refusal)),
        }
    }

    /// The same where the ETag is another one: of a copy with the same content.
    async fn read_copy(&self, version: &Version, range: Range<u64>) -> Result<Bytes> {
        let stale = || self.error(ErrorKind::Stale);
        let found = self.bucket.client.head(&self.place.key).await.map_err(|refusal| self.refused(refusal))?;
        let same = |object: &Object| object.stat(false, &self.bucket.defaults).version.same_content(version);
        let object = found.filter(same).ok_or_else(stale)?;
        match self.get(&object.etag, range).await {
            Ok((told, data)) if same(&told) => Ok(data),
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
        let answer = self.get(&object.etag, 0..object.size).await;
        let (told, data) = answer.map_err(|refusal| match refusal.is(ErrorKind::Conflict) {
            true => self.error(ErrorKind::Stale),
            false => self.refused(refusal),
        })?;
        if told.etag == object.etag { Ok(data) } else { Err(self.error(ErrorKind::Stale)) }
    }

    async fn get(&self, etag: &str, range: Range<u64>) -> Result<(Object, Bytes), Refusal> {
        self.bucket.client.get(&self.place.key, etag, range).await
    }

    fn readable(&self, kind: Option<FileKind>) -> Result<()> {
        if kind == Some(FileKind::File) { Ok(()) } else { Err(self.error(ErrorKind::InvalidInput)) }
    }

    pub(super) async fn set_attrs(&self, changes: &SetAttrs) -> Result<Stat> {
        let found = self.find().await?;
        let before = self.stat(&found).ok_or_else(|| self.error(ErrorKind::NotFound))?;
        match (changes.size, changes.mode, before.kind) {
            (Some(_), _, FileKind::Directory) => return Err(self.error(ErrorKind::IsDirectory)),
            (Some(_), _, kind) if kind != FileKind::File => return Err(self.error(ErrorKind::InvalidInput)),
            (_, Some(_), FileKind::Symlink) => return Err(self.error(ErrorKind::Unsupported)),
            _ => {}
        }
        let now = Time::now();
        let changed = |meta: &mut Meta| {
            let resized = changes.size.map(|_| now);
            let mode = changes.mode.unwrap_or(before.mode) & 0o7777;
            meta.mode = Some(before.kind.mode_bits() | mode);
            meta.uid = Some(changes.uid.unwrap_or(before.uid));
            meta.gid = Some(changes.gid.unwrap_or(before.gid));
            meta.atime = Some(changes.atime.unwrap_or(before.atime));
            meta.mtime = Some(changes.mtime.or(resized).unwrap_or(before.mtime));
            meta.touch(now);
        };
        let refused = |refusal: Refusal| match refusal.is(ErrorKind::Conflict) {
            // Somebody was faster: the same call will find what is there now.
            true => self.error(ErrorKind::Busy),
            false => self.refused(refusal),
        };
        let client = &self.bucket.client;
        let (object, directory) = match found {
            Found::Directory(Some(marker)) => {
                let mut meta = marker.copied();
                changed(&mut meta);
                let key = self.place.marker();
                let onto = upload::Target { key: &key, meta: &meta, conditional: &self.bucket.conditional };
                let etag = onto.copy(client, &key, &marker, Wanted::Same(&marker)).await.map_err(refused)?;
                (Object { etag, meta, ..marker }, true)
            }
            Found::Directory(None) => {
                let mut meta = directory_meta(&Attrs {
                    mode: before.mode,
                    uid: before.uid,
                    gid: before.gid,
                    atime: before.atime,
                    mtime: before.mtime,
                    xattrs: Vec::new(),
                });
                changed(&mut meta);
                let key = self.place.marker();
                let etag = client.put(&key, Bytes::new(), &meta, Condition::None).await.map_err(refused)?;
                (Object::written_now(etag, 0, meta), true)
            }
            Found::Object(object) => {
                let mut meta = object.copied();
                changed(&mut meta);
                let key = self.place.key.as_str();
                let (etag, size) = match changes.size {
                    None => {
                        let onto = upload::Target { key, meta: &meta, conditional: &self.bucket.conditional };
                        (onto.copy(client, key, &object, Wanted::Same(&object)).await.map_err(refused)?, object.size)
                    }
                    Some(size) => {
                        meta.copied = None;
                        (self.resize(&object, &meta, size).await.map_err(refused)?, size)
                    }
                };
                (Object { etag, size, meta, ..object }, false)
            }
            Found::Nothing => return Err(self.error(ErrorKind::NotFound)),
        };
        let key = if directory { self.place.marker() } else { self.place.key.clone() };
        self.made(&key, object, directory).await
    }

    /// Cuts an object or adds zeros at its end. Returns its new ETag.
    async fn resize(&self, object: &Object, meta: &Meta, size: u64) -> Result<String, Refusal> {
        let (client, key) = (&self.bucket.client, self.place.key.as_str());
        let kept = object.size.min(size);
        let onto = upload::Target { key, meta, conditional: &self.bucket.conditional };
        if size > REWRITTEN_BYTES {
            return onto.resize(client, object, kept, size).await;
        }
        let mut content = BytesMut::new();
        if kept > 0 {
            content.extend_from_slice(&self.get(&object.etag, 0..kept).await?.1);
        }
        content.resize(size as usize, 0);
        let condition = Wanted::Same(object).heeded(self.bucket.conditional.put);
        client.put(key, content.freeze(), meta, condition).await
    }
}
