//! Opens the pool that a URL names.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;

use crate::dir::{DirPool, Striped};
use crate::hollow::HollowPool;
use crate::nfs::{self, NfsPool};
use crate::s3::{self, S3Pool};
use crate::store::{self, StorePool};
use crate::{Error, ErrorKind, Pool, Result, Side};

const KNOWN: &str = "/path, file:///path, beegfs:///path, lustre:///path, nfs://server/export, s3://bucket/prefix, \
                     gs://bucket/prefix, az://container/prefix, http://host/path, https://host/path";

/// A URL as messages may show it: without credentials and options, where a secret may have been put by mistake.
pub(crate) fn shown(url: &str) -> String {
    let place = url.split(['?', '#']).next().unwrap_or_default();
    match place.split_once("://") {
        Some((scheme, rest)) => {
            let (host, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
            let host = host.rsplit('@').next().unwrap_or_default();
            format!("{scheme}://{host}{path}")
        }
        None => place.to_owned(),
    }
}

/// The kind and place of a pool, parsed from its URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PoolLocation {
    /// `/path` or `file:///path`: a directory; mounted NFS, BeeGFS and Lustre are used this way.
    Directory(PathBuf),
    /// `beegfs:///path` or `lustre:///path`: a directory that is refused if it is on any other file system.
    Striped(Striped, PathBuf),
    /// `nfs://SERVER/EXPORT[?nfsport=N&mountport=N]`
    Nfs(String),
    /// `s3://BUCKET[/PREFIX][?OPTION=VALUE&...]`
    S3(String),
    /// `gs://BUCKET[/PREFIX]`, `az://CONTAINER[/PREFIX]`, `http://HOST[:PORT]/PATH` or `https://...`, with
    /// `[?OPTION=VALUE&...]`: read-only.
    Store(String),
    /// `hollow:///path`: a directory for names of files whose content is on the fast pool alone.
    Hollow(PathBuf),
}

impl PoolLocation {
    /// # Errors
    /// `InvalidInput` if no kind of pool has such a URL, or if a part of it is wrong. No server is contacted.
    pub fn parse(url: &str) -> Result<Self> {
        match url.split_once("://") {
            None => Ok(Self::Directory(PathBuf::from(url))),
            Some(("file", path)) if path.starts_with('/') => Ok(Self::Directory(PathBuf::from(path))),
            Some(("beegfs", path)) if path.starts_with('/') => Ok(Self::Striped(Striped::BeeGfs, PathBuf::from(path))),
            Some(("lustre", path)) if path.starts_with('/') => Ok(Self::Striped(Striped::Lustre, PathBuf::from(path))),
            Some(("hollow", path)) if path.starts_with('/') => Ok(Self::Hollow(PathBuf::from(path))),
            Some(("nfs", _)) => {
                nfs::check(url)?;
                Ok(Self::Nfs(url.to_owned()))
            }
            Some(("s3", _)) => {
                s3::check(url, &s3::environment())?;
                Ok(Self::S3(url.to_owned()))
            }
            Some(("gs" | "az" | "http" | "https", _)) => {
                store::check(url, &store::environment())?;
                Ok(Self::Store(url.to_owned()))
            }
            Some(_) => Err(Error::new(
                ErrorKind::InvalidInput,
                Side::Application,
                format!("no kind of pool is known for `{}`; known: {KNOWN}", shown(url)),
            )),
        }
    }

    /// The directory that the URL names; `None` if it is not a directory of this machine.
    pub fn directory(&self) -> Option<&Path> {
        match self {
            Self::Directory(path) | Self::Striped(_, path) => Some(path),
            Self::Nfs(_) | Self::S3(_) | Self::Store(_) | Self::Hollow(_) => None,
        }
    }

    /// The URL of another directory with the same requirement for its file system; a plain path if there is none.
    pub fn url_of(&self, directory: &str) -> String {
        match self {
            Self::Striped(Striped::BeeGfs, _) => format!("beegfs://{directory}"),
            Self::Striped(Striped::Lustre, _) => format!("lustre://{directory}"),
            _ => directory.to_owned(),
        }
    }

    /// Attaches the pool, whose calls will be given up at a deadline.
    ///
    /// # Errors
    /// Those of the kind of pool.
    pub fn open(&self, deadline: Duration) -> BoxFuture<'_, Result<Arc<dyn Pool>>> {
        async move {
            let pool: Arc<dyn Pool> = match self {
                Self::Directory(path) => Arc::new(DirPool::open(path)?),
                Self::Striped(kind, path) => Arc::new(DirPool::open_striped(path, *kind)?),
                Self::Hollow(path) => Arc::new(HollowPool::open(path)?),
                Self::Nfs(url) => Arc::new(NfsPool::open(url).await?.with_deadline(deadline)),
                Self::S3(url) => Arc::new(S3Pool::attach(url, &s3::environment()).await?.with_deadline(deadline)),
                Self::Store(url) => {
                    Arc::new(StorePool::attach(url, &store::environment()).await?.with_deadline(deadline))
                }
            };
            Ok(pool)
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_pools_or_are_refused() {
        let parse = |url: &str| PoolLocation::parse(url).map_err(|error| error.to_string());
        assert_eq!(parse("/a b"), Ok(PoolLocation::Directory("/a b".into())));
        assert_eq!(parse("file:///a"), Ok(PoolLocation::Directory("/a".into())));
        assert_eq!(parse("s3://bucket/a"), Ok(PoolLocation::S3("s3://bucket/a".into())));
        assert_eq!(parse("beegfs:///a"), Ok(PoolLocation::Striped(Striped::BeeGfs, "/a".into())));
        assert_eq!(PoolLocation::parse("lustre:///a").unwrap().url_of("/b"), "lustre:///b");
        for url in ["file://host/a", "beegfs://host/a", "ftp://host/a"] {
            assert!(parse(url).unwrap_err().contains("no kind of pool is known"), "{url}");
        }
        for url in [
            "nfs://u:hush@host/a",
            "nfs://host/a?token=hush",
            "ftp://u:hush@host/a?sig=hush",
            "s3://u:hush@bucket",
            "s3://bucket?endpoint=https://host/?sig=hush",
            "s3://bucket?endpoint=https://u:hush@host",
            "gs://bucket?endpoint=https://host/?sig=hush",
            "az://box?account=a&endpoint=https://host/?sig=hush",
            "https://u:hush@host/a",
            "https://host/a?sig=hush",
        ] {
            let refused = parse(url).unwrap_err();
            assert!(!refused.contains("hush"), "{refused}");
        }
        assert_eq!(parse("nfs://host/a?nfsport=7"), Ok(PoolLocation::Nfs("nfs://host/a?nfsport=7".into())));
        assert!(parse("nfs:///a").unwrap_err().contains("names no server"));
        assert!(parse("s3://bucket?colour=red").unwrap_err().contains("colour"));
        for url in ["gs://bucket/a?anonymous=true", "az://box?account=a&anonymous=true", "http://host/a", "https://h"] {
            assert_eq!(parse(url), Ok(PoolLocation::Store(url.into())));
        }
    }
}
