//! Plain clients, which only transfer bytes, with the same parallelism as the mount: they show what a pool delivers.

use std::sync::Arc;
use std::time::Instant;

use futures::stream::{self, StreamExt, TryStreamExt};
use nfs3_client::Nfs3ConnectionBuilder;
use nfs3_client::nfs3_types::nfs3::{LOOKUP3args, READ3args, diropargs3};
use nfs3_client::nfs3_types::rpc::{auth_unix, opaque_auth};
use nfs3_client::nfs3_types::xdr_codec::Opaque;
use nfs3_client::tokio::TokioConnector;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{ClientOptions, MultipartUpload, ObjectStore, ObjectStoreExt, PutPayload};
use tokio::runtime::Runtime;

use forebay_benches::Result;

/// The length of a ranged GET that most object stores advise.
const GET_BYTES: u64 = 8 << 20;
/// Requests that the mount has in flight for one file.
const GETS_AT_ONCE: usize = 16;
/// The size of the mount's parts of an upload.
const PART_BYTES: usize = 8 << 20;
const PARTS_AT_ONCE: usize = 4;
/// Small objects that are made concurrently.
const PUTS_AT_ONCE: usize = 32;
/// The mount's connections to an NFS server, and the length of one READ.
const CONNECTIONS: usize = 8;
const READ_BYTES: u32 = 1 << 20;

/// An S3 client.
pub struct Plain {
    runtime: Runtime,
    store: Arc<AmazonS3>,
}

impl Plain {
    /// # Errors
    /// The client cannot be built, for example because the endpoint is invalid.
    pub fn s3(endpoint: &str, bucket: &str, key: &str, secret: &str) -> Result<Self> {
        let store = AmazonS3Builder::new()
            .with_endpoint(endpoint)
            .with_bucket_name(bucket)
            .with_region("us-east-1")
            .with_access_key_id(key)
            .with_secret_access_key(secret)
            .with_client_options(ClientOptions::new().with_allow_http(true).with_timeout_disabled())
            .build()?;
        Ok(Self { runtime: Runtime::new()?, store: Arc::new(store) })
    }

    /// Reads an object by ranged GETs. Bytes per second.
    pub fn read(&self, name: &str, bytes: u64) -> Result<f64> {
        let path = Path::from(name);
        let begin = Instant::now();
        let total = self.runtime.block_on(async {
            let ranges = (0..bytes).step_by(GET_BYTES as usize).map(|at| at..bytes.min(at + GET_BYTES));
            stream::iter(ranges)
                .map(|range| {
                    let (store, path) = (Arc::clone(&self.store), path.clone());
                    // Each piece is discarded when it arrives: a plain client stores nothing.
                    tokio::spawn(async move {
                        let options = object_store::GetOptions { range: Some(range.into()), ..Default::default() };
                        let mut body = store.get_opts(&path, options).await?.into_stream();
                        let mut length = 0;
                        while let Some(piece) = body.try_next().await? {
                            length += piece.len() as u64;
                        }
                        Ok::<_, object_store::Error>(length)
                    })
                })
                .buffer_unordered(GETS_AT_ONCE)
                .map(|answer| -> Result<u64> { Ok(answer??) })
                .try_fold(0, |sum, length| async move { Ok(sum + length) })
                .await
        })?;
        if total != bytes {
            return Err(format!("{name}: {total} of {bytes} bytes").into());
        }
        Ok(bytes as f64 / begin.elapsed().as_secs_f64())
    }

    /// Reads objects whole, one after the other. Objects per second.
    pub fn read_serially(&self, names: &[String]) -> Result<f64> {
        let begin = Instant::now();
        self.runtime.block_on(async {
            for name in names {
                self.store.get(&Path::from(name.as_str())).await?.bytes().await?;
            }
            Ok::<_, object_store::Error>(())
        })?;
        Ok(names.len() as f64 / begin.elapsed().as_secs_f64())
    }

    /// Makes an object by a multipart upload. Bytes per second.
    pub fn upload(&self, name: &str, content: &bytes::Bytes) -> Result<f64> {
        let begin = Instant::now();
        self.runtime.block_on(async {
            let mut upload = self.store.put_multipart(&Path::from(name)).await?;
            let mut parts = Vec::new();
            for at in (0..content.len()).step_by(PART_BYTES) {
                let part = content.slice(at..content.len().min(at + PART_BYTES));
                parts.push(upload.put_part(PutPayload::from(part)));
            }
            stream::iter(parts).buffer_unordered(PARTS_AT_ONCE).try_collect::<Vec<()>>().await?;
            upload.complete().await
        })?;
        Ok(content.len() as f64 / begin.elapsed().as_secs_f64())
    }

    /// Makes small objects, `PUTS_AT_ONCE` concurrently.
    pub fn make(&self, names: &[String], content: &bytes::Bytes) -> Result<()> {
        self.runtime.block_on(async {
            stream::iter(names)
                .map(|name| async move {
                    self.store.put(&Path::from(name.as_str()), PutPayload::from(content.clone())).await
                })
                .buffer_unordered(PUTS_AT_ONCE)
                .try_for_each(|_| async { Ok(()) })
                .await
        })?;
        Ok(())
    }

    /// # Errors
    /// The object cannot be removed.
    pub fn remove(&self, name: &str) -> Result<()> {
        Ok(self.runtime.block_on(self.store.delete(&Path::from(name)))?)
    }
}

/// Reads a file of an export over several connections. Bytes per second.
pub fn read_nfs(nfs_port: u16, mount_port: u16, export: &str, name: &str, bytes: u64) -> Result<f64> {
    let runtime = Runtime::new()?;
    let begin = Instant::now();
    let total: u64 = runtime.block_on(async {
        let share = bytes.div_ceil(CONNECTIONS as u64).next_multiple_of(u64::from(READ_BYTES));
        let readers = (0..CONNECTIONS as u64).map(|n| async move {
            let mut client = Nfs3ConnectionBuilder::new(TokioConnector, "127.0.0.1", export)
                .mount_port(mount_port)
                .nfs3_port(nfs_port)
                .credential(opaque_auth::auth_unix(&auth_unix {
                    stamp: 0,
                    machinename: Opaque::borrowed(b"bench"),
                    uid: 0,
                    gid: 0,
                    gids: Vec::new(),
                }))
                .mount()
                .await
                .map_err(|error| error.to_string())?;
            let dir = client.root_nfs_fh3();
            let what = diropargs3 { dir, name: name.as_bytes().into() };
            let found = client.lookup(&LOOKUP3args { what }).await.map_err(|error| error.to_string())?;
            let file = found.unwrap().object;
            let mut length = 0;
            for offset in (n * share..bytes.min((n + 1) * share)).step_by(READ_BYTES as usize) {
                let args = READ3args { file: file.clone(), offset, count: READ_BYTES };
                length += client.read(&args).await.map_err(|error| error.to_string())?.unwrap().data.len() as u64;
            }
            Ok::<u64, String>(length)
        });
        let tasks: Vec<_> = readers.collect();
        let lengths = futures::future::try_join_all(tasks).await?;
        Ok::<u64, String>(lengths.iter().sum())
    })?;
    if total != bytes {
        return Err(format!("{name}: {total} of {bytes} bytes").into());
    }
    Ok(bytes as f64 / begin.elapsed().as_secs_f64())
}
