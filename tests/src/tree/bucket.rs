//! A bucket, read by a client other than Forebay's.

use std::collections::BTreeSet;
use std::fmt::{self, Display, Formatter};
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use futures::TryStreamExt;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path as Key;
use object_store::{ClientOptions, Error, ObjectMeta, ObjectStore, ObjectStoreExt, Result, RetryConfig};
use tokio::runtime::{self, Runtime};

use super::Tree;
use crate::servers::s3::{ACCESS_KEY, BUCKET, SECRET_KEY};

/// A killed server serves again within this time, which is less than a restart may hold up a writer of the sweep.
const AWAY_AT_MOST: Duration = Duration::from_secs(20);
/// The time limit of one request.
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);

/// The keys of the bucket below a prefix. The server may be killed and started again meanwhile: a failed request is
/// sent again. No answer is cached.
#[derive(Debug, Clone)]
pub struct Bucket {
    store: Arc<AmazonS3>,
    runtime: Arc<Runtime>,
    prefix: Key,
}

impl Bucket {
    /// Returns all of [`BUCKET`] on the server at a port.
    pub fn at(port: u16) -> Self {
        let store = AmazonS3Builder::new()
            .with_endpoint(format!("http://127.0.0.1:{port}"))
            .with_client_options(ClientOptions::new().with_allow_http(true).with_timeout(ANSWERS_WITHIN))
            .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() })
            .with_bucket_name(BUCKET)
            .with_access_key_id(ACCESS_KEY)
            .with_secret_access_key(SECRET_KEY)
            .build()
            .unwrap();
        let runtime = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        Self { store: Arc::new(store), runtime: Arc::new(runtime), prefix: Key::default() }
    }

    fn ask<T>(&self, question: impl AsyncFn() -> Result<T>) -> io::Result<T> {
        let since = Instant::now();
        loop {
            match self.runtime.block_on(question()) {
                Err(error) if !matches!(error, Error::NotFound { .. }) && since.elapsed() < AWAY_AT_MOST => {
                    thread::sleep(PAUSE);
                }
                answer => return Ok(answer?),
            }
        }
    }
}

impl Display for Bucket {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "s3://{BUCKET}/{}", self.prefix)
    }
}

impl Tree for Bucket {
    fn below(&self, name: &str) -> Arc<dyn Tree> {
        Arc::new(Self { prefix: self.prefix.clone().join(name), ..self.clone() })
    }

    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let key = self.prefix.clone().join(name);
        self.ask(async || Ok(self.store.get(&key).await?.bytes().await?.to_vec()))
    }

    /// Lists all keys, not the server's common prefixes. If Ceph's gateway was killed while it worked on a prefix, it
    /// lists that prefix for minutes although no key has it.
    fn names(&self) -> io::Result<Vec<String>> {
        let keys: Vec<ObjectMeta> = self.ask(async || self.store.list(Some(&self.prefix)).try_collect().await)?;
        // The key that marks the directory itself has nothing after the prefix.
        let first_part = |key: &Key| Some(key.prefix_match(&self.prefix)?.next()?.as_ref().to_owned());
        let names: BTreeSet<_> = keys.iter().filter_map(|object| first_part(&object.location)).collect();
        Ok(names.into_iter().collect())
    }

    fn links(&self, name: &str) -> io::Result<u64> {
        if self.names()?.iter().any(|there| there == name) { Ok(1) } else { Err(io::ErrorKind::NotFound.into()) }
    }
}
