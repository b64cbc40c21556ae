//! The differences between kinds of stores.

use std::fmt;

use async_trait::async_trait;
use http::{HeaderMap, HeaderName, Request, header};
use object_store::client::HttpRequestBody;
use percent_encoding::utf8_percent_encode;

use super::client::{Client, PLAIN_IN_PATH, StoreRefusal, StoreRequest};
use super::requests::{ListRequest, Page, Same, page_of_s3};

/// The requests of one kind of store, as far as they differ from S3's.
#[async_trait]
pub(crate) trait Dialect: fmt::Debug + Send + Sync {
    /// Adds the authorization to a request.
    async fn authorize(&self, request: &mut Request<HttpRequestBody>) -> Result<(), StoreRefusal>;

    /// The URL of a key; for an empty key, that of the bucket.
    fn url(&self, bucket_url: &str, key: &str) -> String {
        match key {
            "" => bucket_url.to_owned(),
            _ => format!("{bucket_url}/{}", utf8_percent_encode(key, PLAIN_IN_PATH)),
        }
    }

    /// Converts the headers of an answer to the names and values of S3.
    fn translate(&self, _headers: &mut HeaderMap) {}

    /// Adds the condition that the object is still this one.
    fn only<'a>(&self, same: &Same<'_>, call: StoreRequest<'a>) -> Result<StoreRequest<'a>, StoreRefusal> {
        if same.etag.is_empty() { Ok(call) } else { call.header(header::IF_MATCH, same.etag) }
    }

    /// Whether objects are only replaced as a whole: the end of a body is then of the same object as its start.
    fn replaces_whole_objects(&self) -> bool {
        true
    }

    /// Whether a listing may contain a prefix without any key. S3 servers do this if they were killed while they made
    /// or removed a key: versitygw until a client makes the directory, Ceph's gateway for two minutes or more.
    fn tells_empty_prefixes(&self) -> bool {
        true
    }

    /// One page of a listing.
    async fn page(&self, client: &Client, asked: &ListRequest<'_>) -> Result<Page, StoreRefusal> {
        page_of_s3(client, asked).await
    }
}

/// Renames the headers that begin with `prefix`, which hold the metadata of objects, to S3's names.
pub(super) fn translate_metadata(headers: &mut HeaderMap, prefix: &str) {
    let found = headers.iter().filter_map(|(name, value)| {
        let ours = format!("x-amz-meta-{}", name.as_str().strip_prefix(prefix)?);
        Some((HeaderName::try_from(ours).ok()?, value.clone()))
    });
    let found: Vec<_> = found.collect();
    headers.extend(found);
}
