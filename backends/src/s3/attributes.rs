//! Changes of attributes, including the size.

use bytes::{Bytes, BytesMut};

use crate::{Attrs, ErrorKind, FileKind, Result, SetAttrs, Stat, Time};

use super::api::Condition;
use super::client::StoreRefusal;
use super::metadata::{Meta, Object};
use super::probe::TargetCondition;
use super::{StoreCall, StoredObject, directory_meta, upload};

/// The largest object whose size is changed by reading and rewriting it; a larger one is assembled on the server.
const REWRITTEN_BYTES: u64 = 16 << 20;

impl StoreCall<'_> {
    pub(super) async fn set_attrs(&self, changes: &SetAttrs) -> Result<Stat> {
        let found = self.find().await?;
        let before = self.stat(&found).ok_or_else(|| self.error(ErrorKind::NotFound))?;
        if !changes.applies_to(&before.version) {
            return Err(self.error(ErrorKind::Busy));
        }
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
        let refused = |refusal: StoreRefusal| match refusal.is(ErrorKind::Conflict) {
            // Another client was faster: a retry will find the current object.
            true => self.error(ErrorKind::Busy),
            false => self.refused(refusal),
        };
        let client = &self.bucket.client;
        let (object, directory) = match found {
            StoredObject::Directory(Some(marker)) => {
                let mut meta = marker.copied();
                changed(&mut meta);
                let key = self.place.marker();
                let onto = upload::CopyTarget { key: &key, meta: &meta, conditional: &self.bucket.conditional };
                let etag = onto.copy(client, &key, &marker, TargetCondition::Same(&marker)).await.map_err(refused)?;
                (Object { etag, meta, ..marker }, true)
            }
            StoredObject::Directory(None) => {
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
                let etag = client.put(&key, Bytes::new(), &meta, Condition::Seen(None)).await.map_err(refused)?;
                (Object::written_now(etag, 0, meta), true)
            }
            StoredObject::Object(object) => {
                let mut meta = object.copied();
                changed(&mut meta);
                let key = self.place.key.as_str();
                let (etag, size) = match changes.size {
                    None => {
                        let onto = upload::CopyTarget { key, meta: &meta, conditional: &self.bucket.conditional };
                        (
                            onto.copy(client, key, &object, TargetCondition::Same(&object)).await.map_err(refused)?,
                            object.size,
                        )
                    }
                    Some(size) => {
                        meta.copied = None;
                        (self.resize(&object, &meta, size).await.map_err(refused)?, size)
                    }
                };
                (Object { etag, size, meta, ..object }, false)
            }
            StoredObject::Nothing => return Err(self.error(ErrorKind::NotFound)),
        };
        let key = if directory { self.place.marker() } else { self.place.key.clone() };
        self.made(&key, object, directory).await
    }

    /// Truncates an object or appends zeros. Returns its new ETag.
    async fn resize(&self, object: &Object, meta: &Meta, size: u64) -> Result<String, StoreRefusal> {
        let (client, key) = (&self.bucket.client, self.place.key.as_str());
        let kept = object.size.min(size);
        let onto = upload::CopyTarget { key, meta, conditional: &self.bucket.conditional };
        if size > REWRITTEN_BYTES {
            return onto.resize(client, object, kept, size).await;
        }
        let _room = client.room(size).await;
        let mut content = BytesMut::new();
        if kept > 0 {
            content.extend_from_slice(&client.get(key, &object.etag, 0..kept).await?.1);
        }
        content.resize(size as usize, 0);
        let condition = TargetCondition::Same(object).heeded(self.bucket.conditional.put);
        client.put(key, content.freeze(), meta, condition).await
    }
}
