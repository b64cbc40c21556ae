//! Compares the catalog with the content files.
//!
//! The mount is in use meanwhile. So each problem is checked again under the namespace lock, and counts only if it was
//! not caused by a change that was under way.

use std::os::unix::fs::MetadataExt;

use forebay_api::operator::FsckReport;
use forebay_backends::{FileKind, Result};
use forebay_cache::{CHUNK_BYTES, ContentId};
use forebay_catalog::InodeRecord;

use super::{Inner, Ino, Overlay};
use crate::counters::ChosenBy;

impl Overlay {
    /// Checks that names, inodes and content files agree, and that clean content has the bytes that were fetched. With
    /// `repair`, damaged clean content is given up, so that it is fetched again. Dirty content is never changed.
    pub async fn fsck(&self, repair: bool) -> Result<FsckReport> {
        let inner = self.inner.clone();
        let mut report = super::blocking(move || inner.fsck_now(repair)).await?;
        self.inner.check_unfinished(repair && !self.inner.mount.read_only, &mut report).await?;
        Ok(report)
    }
}

impl Inner {
    fn fsck_now(&self, repair: bool) -> Result<FsckReport> {
        let mut report = FsckReport::default();
        let mut inodes = Vec::new();
        self.catalog.inodes(|ino, record| {
            inodes.push((ino, record));
            Ok(true)
        })?;
        for (ino, record) in &inodes {
            self.check_links(*ino, record, &mut report)?;
            if record.kind == FileKind::File {
                report.checked_files += 1;
                if let Some(content) = record.file.content() {
                    self.check_content(*ino, record, content, repair, &mut report)?;
                }
            }
        }
        let mut dangling = Vec::new();
        self.catalog.contents(|id, record| {
            if !self.owns(record.ino, id)? {
                dangling.push((id, record.bytes));
            }
            Ok(true)
        })?;
        for (id, bytes) in dangling {
            let _namespace = self.names.changes.lock();
            if !self.is_dangling(id)? {
                continue;
            }
            if repair {
                let mut batch = self.catalog.batch();
                batch.delete_content(id);
                self.catalog.write(batch)?;
                self.trash.discard(id, bytes);
            }
            report.add(format!("content {:x} belongs to no file", id.0), repair);
        }
        if repair {
            report.orphans_removed = self.sweep_contents()?;
            self.trash.drain();
        }
        Ok(report)
    }

    /// Finds what daemons that ended long ago, on this node or other nodes, left in the known directories of the pool.
    /// Stops if the pool does not answer.
    async fn check_unfinished(&self, remove: bool, report: &mut FsckReport) -> Result<()> {
        let mut dirs = Vec::new();
        self.catalog.inodes(|ino, record| {
            if record.kind == FileKind::Directory && (record.in_pool() || ino == Ino::ROOT) {
                dirs.push(ino);
            }
            Ok(true)
        })?;
        for dir in dirs {
            let Ok(path) = self.pool_path(dir) else { continue };
            match self.ask(self.pool.abandoned(&path, remove)).await {
                Ok(0) => {}
                Ok(files) => {
                    let what = "unfinished uploads of daemons that ended more than a day ago";
                    report.add(format!("{path}: {files} {what}"), remove);
                }
                Err(e) if e.is_unreachable() => break,
                // Removed by another client, or not readable for this user.
                Err(error) => tracing::debug!(%path, %error, "unfinished uploads are not looked for"),
            }
        }
        Ok(())
    }

    fn owns(&self, ino: Ino, id: ContentId) -> Result<bool> {
        Ok(self.catalog.inode(ino)?.is_some_and(|r| r.file.content() == Some(id)))
    }

    fn is_dangling(&self, id: ContentId) -> Result<bool> {
        Ok(match self.catalog.content(id)? {
            Some(record) => !self.owns(record.ino, id)?,
            None => false,
        })
    }

    fn check_links(&self, ino: Ino, record: &InodeRecord, report: &mut FsckReport) -> Result<()> {
        if self.broken_links(ino, record)?.is_empty() {
            return Ok(());
        }
        let _namespace = self.names.changes.lock();
        if let Some(record) = self.catalog.inode(ino)? {
            self.broken_links(ino, &record)?.into_iter().for_each(|problem| report.add(problem, false));
        }
        Ok(())
    }

    fn broken_links(&self, ino: Ino, record: &InodeRecord) -> Result<Vec<String>> {
        let mut broken = Vec::new();
        for (parent, name) in &record.links {
            if self.catalog.name(*parent, name)?.here_ino() != Some(ino) {
                broken.push(format!("{}: inode {ino} names it, the name does not", name.escape_ascii()));
            }
        }
        for (parent, name) in &record.pool_links {
            if self.catalog.name(*parent, name)?.pool != Some(ino) {
                broken.push(format!("{}: inode {ino} is not what the pool has there", name.escape_ascii()));
            }
        }
        Ok(broken)
    }

    fn check_content(
        &self,
        ino: Ino,
        record: &InodeRecord,
        id: ContentId,
        repair: bool,
        report: &mut FsckReport,
    ) -> Result<()> {
        let Some(problem) = self.content_problem(record, id, report)? else { return Ok(()) };
        {
            let _namespace = self.names.changes.lock();
            let same = |now: InodeRecord| (now.file, now.version) == (record.file, record.version.clone());
            if !self.catalog.inode(ino)?.is_some_and(same) {
                return Ok(());
            }
        }
        let problem = format!("{}: {problem}", self.display(ino));
        let is_repaired =
            repair && !record.file.is_dirty() && matches!(self.evict_inode(ino, ChosenBy::Repair), Ok(Ok(_)));
        report.add(problem, is_repaired);
        Ok(())
    }

    fn content_problem(&self, record: &InodeRecord, id: ContentId, report: &mut FsckReport) -> Result<Option<String>> {
        let Ok(content) = self.store.open_content(id) else {
            return Ok(Some(format!("content file {:x} is missing", id.0)));
        };
        let size = content.file.metadata().map_or(0, |m| m.size());
        if record.file.is_dirty() {
            report.checked_bytes = report.checked_bytes.saturating_add(size);
            return Ok(None);
        }
        // Bytes behind the end were appended by a daemon that was killed, or are being appended: they are cut off
        // before use.
        if record.file.is_whole() && size < record.size {
            return Ok(Some(format!("content file {:x} has {size} bytes instead of {}", id.0, record.size)));
        }
        let Some(residency) = self.catalog.content(id)? else {
            return Ok(Some(format!("content file {:x} has no record", id.0)));
        };
        let mut buffer = vec![0; CHUNK_BYTES as usize];
        for (chunk, checksum) in self.catalog.checksums(id, &residency)? {
            let start = u64::from(chunk) * CHUNK_BYTES;
            let len = CHUNK_BYTES.min(record.size.saturating_sub(start)) as usize;
            let read = std::os::unix::fs::FileExt::read_exact_at(&*content.file, &mut buffer[..len], start);
            report.checked_bytes = report.checked_bytes.saturating_add(len as u64);
            if read.is_err() || crc32c::crc32c(&buffer[..len]) != checksum {
                return Ok(Some(format!("chunk {chunk} of content file {:x} is damaged", id.0)));
            }
        }
        Ok(None)
    }
}
