//! Which inode a pool object with several names is: the column family `objects`. An entry lasts as long as the inode has
//! this object. Object numbers are used again, so an older entry would lead the name of another object to the inode.

use std::collections::HashMap;

use forebay_backends::{FileKind, Result, Stat, Version};
use forebay_catalog::{InodeRecord, Link};

use super::Txn;
use super::collected::Edit;
use crate::{Inner, Ino};

/// Returns the key under which an object with several names is found again.
pub(crate) fn identity(stat: &Stat) -> Option<Vec<u8>> {
    key(stat.kind, &stat.version)
}

fn key(kind: FileKind, version: &Version) -> Option<Vec<u8>> {
    match version {
        Version::Inode { dev, ino, .. } if kind != FileKind::Directory => {
            Some([dev.to_be_bytes(), ino.to_be_bytes()].concat())
        }
        _ => None,
    }
}

fn key_of(record: &InodeRecord) -> Option<Vec<u8>> {
    key(record.kind, record.version.as_ref()?)
}

/// Returns the key of the object that an inode had before a change and does not have afterwards.
pub(super) fn given_up(edit: &Edit<'_>) -> Option<Vec<u8>> {
    let had = key_of(&edit.guard.record)?;
    let keeps = !edit.gone && key_of(&edit.record).as_ref() == Some(&had);
    (!keeps).then_some(had)
}

/// Returns whether an object leads to an inode. `changed`: what the change that is being written records.
pub(super) fn leads_to(inner: &Inner, changed: &HashMap<Vec<u8>, Ino>, object: &[u8], ino: Ino) -> Result<bool> {
    let known = match changed.get(object) {
        Some(known) => Some(*known),
        None => inner.catalog.object(object)?,
    };
    Ok(known == Some(ino))
}

impl Txn<'_> {
    /// Records the inode of a pool object with several names, so that each of its other names leads to the same inode.
    pub fn note_object(&mut self, ino: Ino, stat: &Stat) {
        if let (Some(identity), true) = (identity(stat), stat.nlink > 1) {
            self.put_object(identity, ino);
        }
    }

    /// Records which pool object an inode stands for, so that the object's other names lead to the same inode.
    pub fn put_object(&mut self, identity: Vec<u8>, ino: Ino) {
        self.batch.put_object(&identity, ino);
        self.objects.insert(identity, ino);
    }

    /// Adds another name of a pool object to the inode, if this change created the inode.
    pub fn link_new(&mut self, identity: &[u8], link: &Link, stat: &Stat) -> Option<Ino> {
        let ino = *self.objects.get(identity)?;
        let (_, record) = self.new.iter_mut().rev().find(|(new, _)| *new == ino)?;
        record.links.push(link.clone());
        record.pool_links.push(link.clone());
        record.count_links(stat);
        self.batch.put_inode(ino, record, false);
        Some(ino)
    }

    /// Returns whether the catalog's record of an inode is of the object with this key.
    pub fn has_object(&mut self, ino: Ino, identity: &[u8]) -> Result<bool> {
        Ok(key_of(self.record(ino)?).is_some_and(|known| known == identity))
    }

    /// Forgets an entry that leads to an inode with another object.
    pub fn forget_object(&mut self, identity: &[u8]) {
        // What this change has recorded is newer.
        if !self.objects.contains_key(identity) {
            self.batch.delete_object(identity);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use forebay_api::operator::FlushRequest;
    use forebay_backends::memory::MemoryPool;
    use forebay_backends::{Attrs, Expected, Piece, Pool, PoolPath, Time};
    use futures::stream;

    use super::*;
    use crate::{Lookup, Options, Overlay, TestOptions, content_io, summary};

    fn path(name: &str) -> PoolPath {
        PoolPath::parse(name).unwrap()
    }

    async fn put(pool: &MemoryPool, name: &str) {
        let time = Time { secs: 1, nanos: 0 };
        let attrs = Attrs { mode: 0o644, uid: 0, gid: 0, atime: time, mtime: time, xattrs: Vec::new() };
        let data = Piece { offset: 0, data: Bytes::from_static(b"content") };
        pool.put(&path(name), 7, Box::pin(stream::iter([Ok(data)])), &attrs, &Expected::Absent).await.unwrap();
    }

    async fn key_in(pool: &MemoryPool, name: &str) -> Vec<u8> {
        identity(&pool.stat(&path(name)).await.unwrap()).unwrap()
    }

    async fn find(overlay: &Overlay, name: &str) -> Ino {
        match overlay.lookup(Ino::ROOT, name.as_bytes()).await.unwrap() {
            Lookup::Found(entry) => entry.attr.ino,
            Lookup::Negative { .. } => panic!("{name} is not there"),
        }
    }

    async fn flush(overlay: &Overlay) {
        let (done, failed) = summary(overlay.flush(FlushRequest { wait: true, ..Default::default() })).await;
        assert_eq!((done.failed, failed), (0, Vec::new()));
    }

    async fn opened() -> (Arc<MemoryPool>, Overlay, tempfile::TempDir) {
        let (pool, fast) = (Arc::new(MemoryPool::new()), tempfile::tempdir_in("/var/tmp").unwrap());
        let options = Options {
            pool: pool.clone(),
            fast: vec![fast.path().to_owned()],
            limit_bytes: Some(1 << 28),
            policy: forebay_policy::Policy::parse("[default]\nflush = \"manual\"\nmetadata-ttl = \"0s\"\n").unwrap(),
            memory_bytes: 16 << 20,
            content_io: content_io::Choice::Plain,
            read_only: false,
            node: "here".into(),
            reattached: false,
            other_root: Default::default(),
            for_tests: TestOptions::default(),
        };
        (pool, Overlay::open(options).await.unwrap(), fast)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_entry_of_an_object_goes_with_the_object() {
        let (pool, overlay, _fast) = opened().await;
        let catalog = overlay.inner.catalog.clone();
        for is_written in [false, true] {
            put(&pool, "a").await;
            pool.link(&path("a"), &path("b")).await.unwrap();
            let key = key_in(&pool, "a").await;
            let ino = find(&overlay, "a").await;
            assert_eq!(find(&overlay, "b").await, ino);
            assert_eq!(catalog.object(&key).unwrap(), Some(ino));
            overlay.unlink(Ino::ROOT, b"b").await.unwrap();
            flush(&overlay).await;
            if is_written {
                // The flush puts another object under the name.
                overlay.open_file(ino, libc::O_RDWR).await.unwrap();
                overlay.write(ino, 0, Bytes::from_static(b"new")).await.unwrap();
                overlay.close(ino, true).await.unwrap();
                overlay.release(ino, libc::O_RDWR);
                flush(&overlay).await;
                assert_ne!(key_in(&pool, "a").await, key);
                assert_eq!(catalog.object(&key).unwrap(), None, "the file has another object");
            }
            overlay.unlink(Ino::ROOT, b"a").await.unwrap();
            flush(&overlay).await;
            assert_eq!(catalog.object(&key).unwrap(), None, "the file was removed");
        }
        overlay.shutdown().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_entry_that_is_too_old_changes_nothing_of_the_inode() {
        let (pool, overlay, _fast) = opened().await;
        put(&pool, "a").await;
        pool.link(&path("a"), &path("unseen")).await.unwrap();
        let ino = find(&overlay, "a").await;
        let names = || overlay.inner.record_of(ino).unwrap().nlink();
        assert_eq!(names(), 2);
        put(&pool, "later").await;
        // As if the number of an earlier object of the inode had been used again.
        let (key, later) = (key_in(&pool, "a").await, key_in(&pool, "later").await);
        let mut txn = Txn::begin(&overlay.inner);
        txn.put_object(later.clone(), ino);
        txn.commit().unwrap();
        assert_ne!(find(&overlay, "later").await, ino);
        assert_eq!(names(), 2, "the name that was never looked up still counts");
        let catalog = &overlay.inner.catalog;
        assert_eq!((catalog.object(&later).unwrap(), catalog.object(&key).unwrap()), (None, Some(ino)));
        assert_eq!(find(&overlay, "unseen").await, ino);
        overlay.shutdown().await.unwrap();
    }
}
