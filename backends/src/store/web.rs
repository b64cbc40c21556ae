//! Web servers: files by their paths; names by WebDAV, or from the index pages that servers generate for directories.
//!
//! A key is the path as written in a URL, so every name is possible. A path is a directory if WebDAV says so, or if
//! the server redirects to the same path with a slash. Size, time and ETag come from `HEAD`. Files may change in
//! place during a read, so a read is valid only if `HEAD` returns the same afterwards.

mod pages;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt, stream};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, header};
use object_store::client::{HttpClient, HttpRequestBody};
use percent_encoding::{percent_decode_str, percent_encode};
use reqwest::redirect::{Action, Attempt, Policy};
use url::Url;

use crate::{DirEntry, ErrorKind, Listing, ListingSupport, PoolPath, Result, Time};

use super::attach::{self, CONNECT_TIMEOUT, READ_TIMEOUT, StoreOptions, no_http_client, wrong};
use super::client::{Body, Client, PLAIN_IN_QUERY, StoreRefusal, StoreRequest};
use super::dialect::Dialect;
use super::keys::{self, NAME_MAX, ObjectPlace};
use super::listing::ask_each;
use super::metadata::implied_directory;
use super::requests::Same;
use super::{Bucket, StoredObject};

use pages::{Format, PageEntry};

const REDIRECTIONS_MAX: usize = 10;
/// The seconds since 1970 that a date of HTTP can express: until the year 9999.
const HTTP_DATES: Range<i64> = 0..253_402_300_800;
const DEPTH: HeaderName = HeaderName::from_static("depth");
const PROPFIND_BODY: &str =
    r#"<?xml version="1.0" encoding="utf-8"?><propfind xmlns="DAV:"><prop><resourcetype/></prop></propfind>"#;
const NO_NAMES: &str = "the server names no files here, neither by WebDAV nor by an index page; they can be read by \
                        their paths";

/// The names in a directory, in pages.
type Pages = BoxStream<'static, Result<Vec<PageEntry>, StoreRefusal>>;

/// How names on a server are found.
#[derive(Debug, Default)]
pub(crate) struct Web {
    dav: bool,
    /// For the pool's root directory.
    lists_names: bool,
}

/// Requests in the form that browsers use.
#[derive(Debug)]
struct WebDialect;

/// Attaches `http://HOST[:PORT]/PATH` or `https://...`.
pub(super) fn attach(text: &str) -> Result<Bucket> {
    let mut url = Url::parse(text).map_err(|error| wrong(text, error))?;
    attach::without_credentials(&url, "this pool reads only public files")?;
    let mut options = StoreOptions::new();
    for (name, value) in url.query_pairs() {
        let foreign = matches!(name.as_ref(), "endpoint" | "anonymous");
        if foreign || !options.take(text, &name, &value)? {
            return Err(attach::unknown(text, &name, "ca, uid, gid, mode, dir-mode"));
        }
    }
    url.set_query(None);
    url.set_fragment(None);
    let bucket_url = url.as_str().trim_end_matches('/').to_owned();
    let http = connect(text, options.ca.as_deref())?;
    let name = format!("{bucket_url}/");
    let host = url.host_str().unwrap_or_default().to_owned();
    let client = Client::new(http, host, bucket_url, Box::new(WebDialect));
    let mut bucket = Bucket::new(Arc::new(client), name, String::new(), options.defaults);
    bucket.web = Some(Web::default());
    Ok(bucket)
}

fn connect(text: &str, ca: Option<&Path>) -> Result<HttpClient> {
    let mut builder = reqwest::Client::builder()
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(READ_TIMEOUT)
        .redirect(Policy::custom(follow));
    if let Some(ca) = ca {
        builder = builder.tls_certs_merge(attach::certificates(text, ca, reqwest::Certificate::from_pem_bundle)?);
    }
    Ok(HttpClient::new(builder.build().map_err(|error| wrong(text, no_http_client(&error)))?))
}

/// Follows redirections, except those that mark a path as a directory, and never from https to http. An error is a refusal
/// of the path, not of the whole server.
fn follow(attempt: Attempt<'_>) -> Action {
    let Some(from) = attempt.previous().last() else { return attempt.follow() };
    let to = attempt.url();
    let decoded = |path: &str| percent_decode_str(path).collect::<Vec<_>>();
    if decoded(to.path()) == decoded(&format!("{}/", from.path())) {
        return attempt.stop();
    }
    if from.scheme() == "https" && to.scheme() != "https" {
        return attempt.error("a redirection from https to another protocol");
    }
    if attempt.previous().len() > REDIRECTIONS_MAX {
        return attempt.error("too many redirections");
    }
    attempt.follow()
}

/// # Errors
/// `InvalidInput` for reserved names; `NameTooLong`.
pub(super) fn place_of(path: &PoolPath) -> Result<ObjectPlace, ErrorKind> {
    if path.is_reserved() {
        return Err(ErrorKind::InvalidInput);
    }
    if path.components().any(|name| name.len() > NAME_MAX) {
        return Err(ErrorKind::NameTooLong);
    }
    let key = path.components().map(encoded).collect::<Vec<_>>().join("/");
    Ok(ObjectPlace { key, shadowed: false, is_root: path.is_root() })
}

fn encoded(name: &[u8]) -> String {
    percent_encode(name, PLAIN_IN_QUERY).to_string()
}

#[async_trait]
impl Dialect for WebDialect {
    async fn authorize(&self, request: &mut Request<HttpRequestBody>) -> Result<(), StoreRefusal> {
        // Sizes and ranges are those of the file, not of a compressed transfer.
        request.headers_mut().insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        Ok(())
    }

    fn url(&self, bucket_url: &str, key: &str) -> String {
        format!("{bucket_url}/{key}")
    }

    fn translate(&self, headers: &mut HeaderMap) {
        // A web server does not store attributes for us. What it says there, another client may have written.
        let ours = headers.keys().filter(|name| name.as_str().starts_with("x-amz-meta-"));
        let ours: Vec<_> = ours.cloned().collect();
        for name in ours {
            headers.remove(name);
        }
    }

    fn only<'a>(&self, same: &Same<'_>, call: StoreRequest<'a>) -> Result<StoreRequest<'a>, StoreRefusal> {
        if is_strong(same.etag) {
            return call.header(header::IF_MATCH, same.etag);
        }
        if same.modified == Time::default() || !HTTP_DATES.contains(&same.modified.secs) {
            return Ok(call);
        }
        call.header(header::IF_UNMODIFIED_SINCE, &httpdate::fmt_http_date(same.modified.into()))
    }

    fn replaces_whole_objects(&self) -> bool {
        false
    }
}

/// Whether an ETag can be used in a condition: a weak one cannot.
fn is_strong(etag: &str) -> bool {
    etag.starts_with('"')
}

impl Web {
    /// Probes how names on the server are found.
    pub(super) async fn probe(&mut self, client: &Client) -> Result<(), StoreRefusal> {
        self.dav = answered(is_collection(client, "").await)?.is_some();
        self.lists_names = self.dav || {
            let whole = async { self.names(client, "").await?.try_for_each(|_| async { Ok(()) }).await };
            match whole.await {
                // A redirection of the root in a circle tells nothing of its names.
                Err(refusal) if refusal.is_not_followed() => return Err(refusal.of_server()),
                Err(refusal) if refusal.is(ErrorKind::Unavailable) => return Err(refusal),
                read => answered(read)?.is_some(),
            }
        };
        Ok(())
    }

    pub(super) fn listings(&self) -> ListingSupport {
        match (self.dav, self.lists_names) {
            (true, _) => ListingSupport::HideRefused,
            (false, true) => ListingSupport::MayOmit,
            (false, false) => ListingSupport::Unable,
        }
    }

    pub(super) async fn find(&self, client: &Client, place: &ObjectPlace) -> Result<StoredObject, StoreRefusal> {
        if place.is_root {
            // The root is always a directory, but whether the server answers is known only by a request.
            return self.ask_for_root(client).await.map(|_| StoredObject::Directory(None));
        }
        if self.dav {
            match is_collection(client, &place.key).await {
                Ok(true) => return Ok(StoredObject::Directory(None)),
                Ok(false) => {}
                Err(refusal) if refusal.is_to_directory() => return Ok(StoredObject::Directory(None)),
                Err(refusal) if refusal.is(ErrorKind::NotFound) => {
                    return self.expect_root(client).await.map(|()| StoredObject::Nothing);
                }
                Err(refusal) => return Err(self.of_path(client, refusal).await),
            }
        }
        match client.head(&place.key).await {
            Ok(Some(object)) => Ok(StoredObject::Object(object)),
            Ok(None) => self.expect_root(client).await.map(|()| StoredObject::Nothing),
            Err(refusal) if refusal.is_to_directory() => Ok(StoredObject::Directory(None)),
            Err(refusal) => Err(self.of_path(client, refusal).await),
        }
    }

    /// Returns what the refusal of a path means. A redirection that is not followed is a failure of the whole server if its
    /// root is refused as well.
    async fn of_path(&self, client: &Client, refusal: StoreRefusal) -> StoreRefusal {
        if !refusal.is_not_followed() {
            return refusal;
        }
        self.expect_root(client).await.err().unwrap_or(refusal)
    }

    /// Fails with `Unavailable` if the server named files at the attach, and does not even have the pool's root now: what
    /// it says of one file then says nothing of that file.
    async fn expect_root(&self, client: &Client) -> Result<(), StoreRefusal> {
        if self.lists_names { self.ask_for_root(client).await } else { Ok(()) }
    }

    /// Fails with `Unavailable` or `Timeout` if the server does not answer, or named files at the attach and does not have
    /// the pool's root now.
    async fn ask_for_root(&self, client: &Client) -> Result<(), StoreRefusal> {
        let answer = match (self.lists_names, self.dav) {
            (_, true) => is_collection(client, "").await.map(drop),
            (lists_names, false) => match client.head("").await {
                // Not every server answers a HEAD for an index page, or answers it well.
                Ok(None) if lists_names => get_root(client).await,
                Err(refusal) if lists_names && refusal.is_servers() => get_root(client).await,
                // Any status shows that it answers.
                Err(refusal) if refusal.is_servers() => Ok(()),
                answer => answer.map(drop),
            },
        };
        match answer {
            Err(refusal) if refusal.is(ErrorKind::NotFound) && self.lists_names => Err(refusal.of_listing()),
            Err(refusal) if refusal.is_not_followed() && self.lists_names => Err(refusal.of_server()),
            Err(refusal) if refusal.is(ErrorKind::Unavailable) || refusal.is(ErrorKind::Timeout) => Err(refusal),
            _ => Ok(()),
        }
    }

    /// The names in a directory, in pages. `directory` is empty or ends with a slash.
    async fn names(&self, client: &Client, directory: &str) -> Result<Pages, StoreRefusal> {
        let (format, (headers, body)) = match self.dav {
            true => (Format::MultiStatus, propfind(client, directory, "1").await?),
            false => (Format::Html, client.send_for_body(StoreRequest::new(Method::GET, directory)).await?),
        };
        if format == Format::Html && !is_html(&headers) {
            return Err(StoreRefusal::local(ErrorKind::Unsupported, NO_NAMES.to_owned()));
        }
        let base = Url::parse(&format!("{}/{directory}", client.bucket_url))
            .map_err(|error| StoreRefusal::local(ErrorKind::InvalidInput, error.to_string()))?;
        Ok(pages::names(body, format, base).boxed())
    }
}

/// `None` if the server answered, but without the wanted result.
fn answered<T>(answer: Result<T, StoreRefusal>) -> Result<Option<T>, StoreRefusal> {
    match answer {
        Ok(told) => Ok(Some(told)),
        Err(refusal) if refusal.is_servers() && refusal.code != "401" => Ok(None),
        Err(refusal) if refusal.is(ErrorKind::Unsupported) || refusal.is(ErrorKind::Corrupt) => Ok(None),
        Err(refusal) => Err(refusal),
    }
}

fn is_html(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    ["text/html", "application/xhtml+xml"].iter().any(|html| kind.to_ascii_lowercase().starts_with(html))
}

async fn propfind(client: &Client, key: &str, depth: &'static str) -> Result<(HeaderMap, Body), StoreRefusal> {
    let method = Method::from_bytes(b"PROPFIND")
        .map_err(|error| StoreRefusal::local(ErrorKind::InvalidInput, error.to_string()))?;
    let call = StoreRequest::new(method, key)
        .header(DEPTH, depth)?
        .header(header::CONTENT_TYPE, "application/xml")?
        .body(PROPFIND_BODY.into());
    client.send_for_body(call).await
}

/// Asks for the index page of the root.
async fn get_root(client: &Client) -> Result<(), StoreRefusal> {
    client.send_for_body(StoreRequest::new(Method::GET, "")).await.map(drop)
}

async fn is_collection(client: &Client, key: &str) -> Result<bool, StoreRefusal> {
    let (_, body) = propfind(client, key, "0").await?;
    pages::is_collection(body).await
}

/// `context` names the listed directory, for errors.
pub(super) async fn list(bucket: Arc<Bucket>, directory: String, context: String) -> Result<Listing> {
    let Some(web) = &bucket.web else { return Ok(stream::empty().boxed()) };
    let names = web.names(&bucket.client, &directory).await.map_err(|refusal| {
        match refusal.is_servers() && !refusal.is(ErrorKind::Unavailable) {
            true => StoreRefusal::local(ErrorKind::Unsupported, format!("{NO_NAMES}; it says {}", refusal.code)),
            false => refusal,
        }
        .into_error(&context)
    })?;
    let (bucket, directory): (_, Arc<str>) = (Arc::clone(&bucket), directory.into());
    let ask = move |name| {
        let (bucket, directory) = (Arc::clone(&bucket), Arc::clone(&directory));
        async move { entry(&bucket, &directory, name).await }
    };
    Ok(ask_each(names, ask, context))
}

/// `None` if the name vanished meanwhile, or cannot be shown: that does not tell that a known name is absent
/// ([`ListingSupport::may_omit_known`]).
async fn entry(bucket: &Bucket, directory: &str, found: PageEntry) -> Result<Option<DirEntry>, StoreRefusal> {
    let PageEntry { name, collection } = found;
    let implied = |name| Some(DirEntry::new(name, implied_directory(&bucket.defaults)));
    let key = format!("{directory}{}", encoded(&name));
    let hidden = |why: &str| {
        tracing::warn!(url = format!("{}{key}", bucket.name), why, "not shown");
        Ok(None)
    };
    if std::str::from_utf8(&name).is_ok_and(keys::is_reserved) {
        return Ok(None);
    }
    if name.len() > NAME_MAX {
        return hidden("its name is too long");
    }
    if collection {
        return Ok(implied(name));
    }
    match bucket.client.head(&key).await {
        Ok(Some(object)) => Ok(Some(DirEntry::new(name, object.stat(false, &bucket.defaults)))),
        Ok(None) => match &bucket.web {
            Some(web) => web.expect_root(&bucket.client).await.map(|()| None),
            None => Ok(None),
        },
        Err(refusal) if refusal.is_to_directory() => Ok(implied(name)),
        Err(refusal) => {
            let refusal = match &bucket.web {
                Some(web) => web.of_path(&bucket.client, refusal).await,
                None => refusal,
            };
            match refusal.is(ErrorKind::Unavailable) || refusal.is(ErrorKind::Timeout) {
                true => Err(refusal),
                false => hidden(&refusal.message),
            }
        }
    }
}
