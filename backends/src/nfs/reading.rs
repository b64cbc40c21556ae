//! Reads a version of a file.
//!
//! Each answer to a READ contains the attributes after it. The bytes are valid only if these are still those of the
//! version.

use std::ops::Range;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use nfs3_client::nfs3_types::nfs3::{READ3args, READLINK3args, nfs_fh3, nfsstat3};

use crate::{ErrorKind, FileKind, PoolPath, Result, Stat, Version};

use super::attributes::option;
use super::credentials::Owner;
use super::failure::{NfsCall, NfsFailure, Outcome};
use super::handles::File;
use super::limits::{MAX_PARALLEL_TRANSFERS, MAX_PARTS, MAX_TARGET_BYTES};
use super::session::Session;

/// Fails if the object has no content.
pub(super) fn check_kind(call: NfsCall<'_>, stat: &Stat) -> Result<()> {
    match stat.kind {
        FileKind::File => Ok(()),
        FileKind::Directory => Err(call.error(ErrorKind::IsDirectory, "it has no content")),
        _ => Err(call.error(ErrorKind::InvalidInput, "it is not a regular file")),
    }
}

impl Session {
    pub(super) async fn read(&self, path: &PoolPath, version: &Version, range: Range<u64>) -> Result<Bytes> {
        let call = NfsCall::new("read", path);
        self.check(call)?;
        if range.start > range.end {
            return Err(call.error(ErrorKind::InvalidInput, "the range ends before it starts"));
        }
        let range = range.start.min(version.size())..range.end.min(version.size());
        if let Some(file) = self.handles.file(version) {
            // The file may have lost its name or got another one since; its bytes are still those of the version.
            match self.read_version(call, &file, version, range.clone()).await {
                Ok(Some(data)) => return Ok(data),
                Err(failure) if !failure.is_stale() => return Err(call.failed(failure)),
                Ok(None) | Err(_) => self.handles.forget_file(version),
            }
        }
        let found = self.object(path).await.map_err(|failure| call.failed(failure))?;
        check_kind(call, &found.stat)?;
        let changed = || call.error(ErrorKind::Stale, "it was changed by another writer");
        if found.stat.version != *version {
            return Err(changed());
        }
        let file = (found.handle, Owner::from(&found.stat));
        let data = match self.read_version(call, &file, version, range).await {
            Err(failure) if failure.is_stale() => None,
            answer => answer.map_err(|failure| call.failed(failure))?,
        };
        let data = data.ok_or_else(changed)?;
        self.handles.keep_file(version.clone(), file);
        Ok(data)
    }

    /// The bytes of `range`, which ends within the file; `None` if the file is of another version by now.
    async fn read_version(
        &self,
        call: NfsCall<'_>,
        file: &File,
        version: &Version,
        range: Range<u64>,
    ) -> Outcome<Option<Bytes>> {
        let (handle, owner) = file;
        if range.is_empty() {
            let now = self.attributes(handle, &[*owner]).await?.version;
            return Ok((now == *version).then(Bytes::new));
        }
        let chunk_bytes = u64::from(self.sizes.read_bytes);
        if range.end - range.start <= chunk_bytes {
            return self.read_chunk(call, file, version, range).await;
        }
        let too_long = |_| call.refused(ErrorKind::TooLarge, "the range is too long");
        let length = usize::try_from(range.end - range.start).map_err(too_long)?;
        let mut data = Vec::new();
        if data.try_reserve_exact(length).is_err() {
            return Err(call.refused(ErrorKind::Os(libc::ENOMEM), "there is no memory for the range"));
        }
        let count = (range.end - range.start).div_ceil(chunk_bytes);
        let chunk = |n: u64| {
            let start = range.start + n * chunk_bytes;
            self.read_chunk(call, file, version, start..range.end.min(start.saturating_add(chunk_bytes)))
        };
        let mut chunks = stream::iter((0..count).map(chunk)).buffered(MAX_PARALLEL_TRANSFERS);
        while let Some(chunk) = chunks.try_next().await? {
            let Some(chunk) = chunk else { return Ok(None) };
            data.extend_from_slice(&chunk);
        }
        Ok(Some(data.into()))
    }

    /// Like [`Self::read_version`], for a range that fits into one READ. The server may still return less in one
    /// answer.
    async fn read_chunk(
        &self,
        call: NfsCall<'_>,
        (handle, owner): &File,
        version: &Version,
        range: Range<u64>,
    ) -> Outcome<Option<Bytes>> {
        let length = (range.end - range.start) as usize;
        let mut data = Vec::new();
        let mut parts = 0;
        while data.len() < length {
            parts += 1;
            if parts > MAX_PARTS {
                return Err(self.wrong(call, "the server gives a few bytes at a time"));
            }
            let missing = length - data.len();
            let offset = range.start + data.len() as u64;
            let args = READ3args { file: handle.clone(), offset, count: missing as u32 };
            let got = self.calls.call(&args, &[*owner]).await?;
            let after = match option(got.file_attributes) {
                Some(raw) => self.stat_of(&raw),
                None => self.attributes(handle, &[*owner]).await?,
            };
            // An end of the file before the end of the range does not fit the version.
            if after.version != *version || got.data.is_empty() {
                return Ok(None);
            }
            if got.data.len() > missing {
                return Err(self.wrong(call, "the server sent more bytes than were requested"));
            }
            if data.is_empty() {
                data = got.data.into_owned();
            } else {
                data.extend_from_slice(&got.data);
            }
        }
        Ok(Some(data.into()))
    }

    /// Reads a range of the file, whichever version it is; returns less at its end.
    pub(super) async fn read_any(
        &self,
        call: NfsCall<'_>,
        handle: &nfs_fh3,
        owners: &[Owner],
        offset: u64,
        length: u32,
    ) -> Outcome<Bytes> {
        let got = self.calls.call(&READ3args { file: handle.clone(), offset, count: length }, owners).await?;
        if got.data.len() > length as usize {
            return Err(self.wrong(call, "the server sent more bytes than were requested"));
        }
        Ok(got.data.into_owned().into())
    }

    pub(super) async fn readlink(&self, path: &PoolPath) -> Result<Vec<u8>> {
        let call = NfsCall::new("readlink", path);
        self.check(call)?;
        let found = self.object(path).await.map_err(|failure| call.failed(failure))?;
        if found.stat.kind != FileKind::Symlink {
            return Err(call.error(ErrorKind::InvalidInput, "it is not a symlink"));
        }
        let args = READLINK3args { symlink: found.handle };
        let target = self.calls.call(&args, &[Owner::from(&found.stat)]).await.map_err(|failure| match failure {
            NfsFailure::Status(nfsstat3::NFS3ERR_STALE) => call.error(ErrorKind::NotFound, "it was removed meanwhile"),
            other => call.failed(other),
        })?;
        let target = target.data.0.into_owned();
        if !(1..=MAX_TARGET_BYTES).contains(&target.len()) || target.contains(&0) {
            let sent = target.len();
            let why =
                format!("a target has 1 to {MAX_TARGET_BYTES} bytes, none of them NUL; the server sent {sent} bytes");
            return Err(call.failed(self.wrong(call, &why)));
        }
        Ok(target)
    }
}
