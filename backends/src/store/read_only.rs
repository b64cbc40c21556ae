//! The pool over read-only stores.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::{
    Attrs, Capabilities, ConditionalPut, Content, ErrorKind, Expected, FileKind, Listing, ListingSupport, Objects,
    Pieces, Pool, PoolPath, RenameMode, Renames, Result, SetAttrs, Space, Stat, Version, Versions,
};

use super::attach::Environment;
use super::web::Web;
use super::{Bucket, StoreCall, azure, google, keys, web};

/// A bucket of Google's store, a container of Azure's, or a part of a web server; read-only.
pub struct StorePool {
    bucket: Arc<Bucket>,
    capabilities: Capabilities,
    url: String,
}

fn reach(url: &str, environment: &Environment) -> Result<Bucket> {
    match url.split("://").next() {
        Some("gs") => google::attach(url, environment),
        Some("az") => azure::attach(url, environment),
        _ => web::attach(url),
    }
}

/// Checks that a URL can name a pool, without contacting a server.
///
/// # Errors
/// `InvalidInput`, with the reason.
pub fn check(url: &str, environment: &Environment) -> Result<()> {
    reach(url, environment).map(drop)
}

impl StorePool {
    /// Attaches `gs://BUCKET[/PREFIX]`, `az://CONTAINER[/PREFIX]`, `http://HOST[:PORT]/PATH` or `https://...`, with
    /// options as `store/attach.rs` lists them.
    ///
    /// # Errors
    /// `InvalidInput` for a mistake in the URL or the environment; `NotFound` and `PermissionDenied` as the server
    /// reports; `Unavailable` if it does not answer. A web server that lists no names is no error.
    pub async fn attach(url: &str, environment: &Environment) -> Result<Self> {
        let mut bucket = reach(url, environment)?;
        // Objects of other writers do not decide about users of this node.
        bucket.defaults.believed = false;
        let tried = match &mut bucket.web {
            Some(web) => web.probe(&bucket.client).await,
            // Checks that the bucket exists and may be listed.
            None => bucket.client.list(&bucket.root, false, None, 1).await.map(drop),
        };
        tried.map_err(|refusal| refusal.of_attach().into_error(format!("attach {}", bucket.name)))?;
        let listings = bucket.web.as_ref().map_or(ListingSupport::AskEach, Web::listings);
        if !listings.exist() {
            tracing::warn!(url, "this server lists no names: files can be read by their paths alone");
        }
        let capabilities = Capabilities {
            local: false,
            read_only: true,
            objects: Objects {
                symlinks: false,
                symlink_times: false,
                hard_links: false,
                special_files: false,
                xattrs: false,
                owners: false,
                sparse: false,
            },
            renames: Renames::Unable,
            listings,
            listed_contents: false,
            versions: Versions {
                confirmed_by_reads: false,
                alone: bucket.web.is_none(),
                of_directories: false,
                outlive_mounts: false,
            },
            streams: true,
            ranged_write: false,
            parts_ahead: None,
            conditional_put: ConditionalPut::Checked,
            layouts: false,
            time_granularity_ns: 1_000_000_000,
            name_max: keys::NAME_MAX as u32,
            path_max: None,
        };
        Ok(Self { bucket: Arc::new(bucket), capabilities, url: url.to_owned() })
    }

    /// The same pool, whose calls will be given up at a deadline: while the server cannot be reached, they are retried for
    /// most of that time.
    #[must_use]
    pub fn with_deadline(self, deadline: Duration) -> Self {
        self.bucket.client.outage.set_for(deadline);
        self
    }

    fn op<'a>(&'a self, what: &'a str, path: &'a PoolPath) -> Result<StoreCall<'a>> {
        StoreCall::new(&self.bucket, what, path)
    }

    fn refuse<T>(&self, what: &str, path: &PoolPath) -> Result<T> {
        Err(self.op(what, path)?.error(ErrorKind::ReadOnly))
    }
}

impl fmt::Debug for StorePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StorePool").field("url", &self.url).finish_non_exhaustive()
    }
}

#[async_trait]
impl Pool for StorePool {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn url(&self) -> String {
        self.url.clone()
    }

    fn retried_requests(&self) -> u64 {
        self.bucket.client.retried.load(Ordering::Relaxed)
    }

    async fn stat(&self, path: &PoolPath) -> Result<Stat> {
        self.op("stat", path)?.look().await
    }

    async fn still_has(&self, path: &PoolPath, version: &Version) -> Result<bool> {
        self.op("stat", path)?.still_is(version).await
    }

    async fn list(&self, path: &PoolPath) -> Result<Listing> {
        self.op("list", path)?.entries(0).await
    }

    async fn read(&self, path: &PoolPath, version: &Version, range: Range<u64>) -> Result<Bytes> {
        self.op("read", path)?.read(version, range).await
    }

    async fn stream(&self, path: &PoolPath, version: &Version, range: Range<u64>) -> Result<Content> {
        self.op("read", path)?.stream(version, range).await
    }

    async fn readlink(&self, path: &PoolPath) -> Result<Vec<u8>> {
        self.op("readlink", path)?.target().await
    }

    async fn put(&self, path: &PoolPath, _: u64, _: Pieces<'_>, _: &Attrs, _: &Expected) -> Result<Stat> {
        self.refuse("put", path)
    }

    async fn write_at(&self, path: &PoolPath, _: u64, _: Bytes) -> Result<Stat> {
        self.refuse("write", path)
    }

    async fn mkdir(&self, path: &PoolPath, _: &Attrs) -> Result<Stat> {
        self.refuse("mkdir", path)
    }

    async fn symlink(&self, path: &PoolPath, _: &[u8], _: &Attrs) -> Result<Stat> {
        self.refuse("symlink", path)
    }

    async fn mknod(&self, path: &PoolPath, _: FileKind, _: u64, _: &Attrs) -> Result<Stat> {
        self.refuse("mknod", path)
    }

    async fn link(&self, _: &PoolPath, new: &PoolPath) -> Result<Stat> {
        self.refuse("link", new)
    }

    async fn remove(&self, path: &PoolPath, _: &Expected) -> Result<()> {
        self.refuse("remove", path)
    }

    async fn remove_dir(&self, path: &PoolPath) -> Result<()> {
        self.refuse("rmdir", path)
    }

    async fn rename(&self, from: &PoolPath, _: &PoolPath, _: RenameMode) -> Result<Stat> {
        self.refuse("rename", from)
    }

    async fn set_attrs(&self, path: &PoolPath, _: &SetAttrs) -> Result<Stat> {
        self.refuse("set attributes of", path)
    }

    async fn xattrs(&self, path: &PoolPath) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        Err(self.op("list extended attributes of", path)?.error(ErrorKind::Unsupported))
    }

    async fn set_xattr(&self, path: &PoolPath, _: &[u8], _: &[u8]) -> Result<()> {
        self.refuse("set an extended attribute of", path)
    }

    async fn remove_xattr(&self, path: &PoolPath, _: &[u8]) -> Result<()> {
        self.refuse("remove an extended attribute of", path)
    }

    async fn sync_dir(&self, path: &PoolPath) -> Result<()> {
        self.op("sync", path)?.sync().await
    }

    async fn space(&self) -> Result<Space> {
        Ok(super::space())
    }
}
