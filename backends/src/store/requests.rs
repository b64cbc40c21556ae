//! The requests that read a store, key by key.

use std::ops::Range;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use http::{HeaderMap, HeaderName, Method, header};
use percent_encoding::percent_decode_str;
use serde::Deserialize;

use crate::{ErrorKind, Time};

use super::client::{Body, Client, StoreAnswer, StoreRefusal, StoreRequest};
use super::metadata::{Meta, Object};

/// The largest size of a file that a program can see. Servers may name any number.
pub(crate) const SIZE_MAX: u64 = i64::MAX as u64;
const VERSION_ID: HeaderName = HeaderName::from_static("x-amz-version-id");
/// Google's number of the metadata of one generation, from 1 on.
const METAGENERATION: HeaderName = HeaderName::from_static("x-goog-metageneration");

/// One page of a listing, in the order of the keys' bytes.
#[derive(Debug, Default)]
pub(crate) struct Page {
    pub(crate) objects: Vec<ListedObject>,
    /// Including the slash at the end.
    pub(crate) prefixes: Vec<String>,
    /// The token of the next page.
    pub(crate) next: Option<String>,
}

#[derive(Debug)]
pub(crate) struct ListedObject {
    pub(crate) key: String,
    pub(crate) etag: String,
    pub(crate) size: u64,
    pub(crate) last_modified: Time,
    /// As in [`Object::revision`].
    pub(crate) revision: u32,
    /// The object stands for a directory, though its key does not end with a slash.
    pub(crate) folder: bool,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ListBucketAnswer {
    #[serde(default)]
    contents: Vec<ListContents>,
    #[serde(default)]
    common_prefixes: Vec<ListPrefix>,
    next_continuation_token: Option<String>,
    #[serde(default)]
    encoding_type: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ListContents {
    key: String,
    size: u64,
    last_modified: String,
    #[serde(rename = "ETag", default)]
    etag: String,
    /// Replaces the ETag in Google's store.
    generation: Option<String>,
    meta_generation: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ListPrefix {
    prefix: String,
}

impl Client {
    /// Returns `None` if there is no such key, or no such bucket: an answer to `HEAD` may not say which.
    pub(crate) async fn head(&self, key: &str) -> Result<Option<Object>, StoreRefusal> {
        match self.send(StoreRequest::new(Method::HEAD, key)).await {
            Ok(answer) => object(&answer.headers).map(Some),
            Err(refusal) if refusal.is(ErrorKind::NotFound) => Ok(None),
            Err(refusal) => Err(refusal),
        }
    }

    /// Reads a range that lies within the object whose ETag is `etag`, and the server's metadata of the object;
    /// `Conflict` if the object has another ETag by now.
    pub(crate) async fn get(&self, key: &str, etag: &str, range: Range<u64>) -> Result<(Object, Bytes), StoreRefusal> {
        let mut call = self.ranged(key, &Same { etag, modified: Time::default() }, &range)?;
        call.answer_bytes = Some(range.end - range.start);
        let answer = self.send(call).await?;
        let object = object(&answer.headers)?;
        match sent_range(&answer.headers, &range)? {
            RangeAnswer::All if range != (0..object.size) => Err(garbled("another range than the requested one")),
            _ => Ok((object, answer.body)),
        }
    }

    /// Like [`Self::get`], as a stream. The caller resumes an interrupted stream.
    pub(crate) async fn get_stream(
        &self,
        key: &str,
        same: &Same<'_>,
        range: Range<u64>,
    ) -> Result<(Object, Body), StoreRefusal> {
        let (headers, body) = self.send_for_body(self.ranged(key, same, &range)?).await?;
        let object = object(&headers)?;
        Ok(match sent_range(&headers, &range)? {
            RangeAnswer::All if range != (0..object.size) => (object, part_of(body, range)),
            _ => (object, body),
        })
    }

    fn ranged<'a>(&self, key: &'a str, same: &Same<'_>, range: &Range<u64>) -> Result<StoreRequest<'a>, StoreRefusal> {
        let range = format!("bytes={}-{}", range.start, range.end - 1);
        self.dialect.only(same, StoreRequest::new(Method::GET, key).header(header::RANGE, &range)?)
    }

    /// Lists keys that begin with `prefix`. If `delimited`, keys with a slash after the prefix are only returned as
    /// prefixes.
    ///
    /// # Errors
    /// `Unavailable` if there is no such bucket; `Corrupt` if the server repeats a page.
    pub(crate) async fn list(
        &self,
        prefix: &str,
        delimited: bool,
        token: Option<&str>,
        most: usize,
    ) -> Result<Page, StoreRefusal> {
        let page = self.dialect.page(self, &ListRequest { prefix, delimited, token, most }).await;
        let page = page.map_err(StoreRefusal::of_listing)?;
        match page.next.is_some() && page.next.as_deref() == token {
            true => Err(garbled("the same page of a listing again")),
            false => Ok(page),
        }
    }
}

/// The requested keys.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ListRequest<'a> {
    pub(crate) prefix: &'a str,
    /// Keys with a slash after the prefix are only returned as prefixes.
    pub(crate) delimited: bool,
    /// From the previous page.
    pub(crate) token: Option<&'a str>,
    /// At least 1.
    pub(crate) most: usize,
}

/// The required state of an object, as far as requests can express it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Same<'a> {
    /// Empty if there is none.
    pub(crate) etag: &'a str,
    /// By the server's clock.
    pub(crate) modified: Time,
}

/// A page in the format of S3 and Google's store.
pub(crate) async fn page_of_s3(client: &Client, asked: &ListRequest<'_>) -> Result<Page, StoreRefusal> {
    let mut call = StoreRequest::new(Method::GET, "")
        .query("list-type", "2")
        .query("encoding-type", "url")
        .query("max-keys", asked.most.to_string())
        .query("prefix", asked.prefix);
    if asked.delimited {
        call = call.query("delimiter", "/");
    }
    if let Some(token) = asked.token {
        call = call.query("continuation-token", token);
    }
    let answer = client.send(call).await?;
    let told: ListBucketAnswer = parse(&answer)?;
    let encoded = told.encoding_type.as_deref() == Some("url");
    let decode = |text: String| match encoded {
        true => percent_decode_str(&text.replace('+', " ")).decode_utf8_lossy().into_owned(),
        false => text,
    };
    let objects = told.contents.into_iter().map(|listed| {
        Ok(ListedObject {
            key: decode(listed.key),
            etag: listed.generation.unwrap_or(listed.etag),
            size: listed.size.min(SIZE_MAX),
            last_modified: parse_iso_time(&listed.last_modified)?,
            revision: revision(listed.meta_generation.as_deref()),
            folder: false,
        })
    });
    Ok(Page {
        objects: objects.collect::<Result<_, StoreRefusal>>()?,
        prefixes: told.common_prefixes.into_iter().map(|prefix| decode(prefix.prefix)).collect(),
        next: told.next_continuation_token.filter(|token| !token.is_empty()),
    })
}

/// The content of an answer to a request for a range.
enum RangeAnswer {
    Range,
    /// The whole object: the server does not support ranges, or did not apply the range.
    All,
}

fn sent_range(headers: &HeaderMap, range: &Range<u64>) -> Result<RangeAnswer, StoreRefusal> {
    let begins = format!("bytes {}-", range.start);
    match headers.get(header::CONTENT_RANGE).map(|told| told.to_str().unwrap_or_default()) {
        Some(told) if told.starts_with(&begins) => Ok(RangeAnswer::Range),
        Some(_) => Err(garbled("another range than the requested one")),
        None => Ok(RangeAnswer::All),
    }
}

/// A range of a whole body.
fn part_of(body: Body, range: Range<u64>) -> Body {
    let mut at = 0;
    let cut = move |piece: Bytes| {
        let ends = at + piece.len() as u64;
        let wanted = range.start.clamp(at, ends) - at..range.end.clamp(at, ends) - at;
        at = ends;
        piece.slice(wanted.start as usize..wanted.end as usize)
    };
    body.map_ok(cut).boxed()
}

pub(crate) fn garbled(what: impl std::fmt::Display) -> StoreRefusal {
    StoreRefusal::local(ErrorKind::Corrupt, format!("the server's answer makes no sense: {what}"))
}

pub(crate) fn parse<T: for<'de> Deserialize<'de>>(answer: &StoreAnswer) -> Result<T, StoreRefusal> {
    quick_xml::de::from_reader(&answer.body[..]).map_err(garbled)
}

pub(crate) fn etag_of(headers: &HeaderMap) -> Result<String, StoreRefusal> {
    let etag = headers.get(header::ETAG).and_then(|etag| etag.to_str().ok());
    etag.map(str::to_owned).ok_or_else(|| garbled("no ETag"))
}

pub(crate) fn object(headers: &HeaderMap) -> Result<Object, StoreRefusal> {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let length = match text(header::CONTENT_RANGE) {
        // `bytes FROM-TO/SIZE`
        Some(range) => range.rsplit('/').next(),
        None => text(header::CONTENT_LENGTH),
    };
    let size = length.and_then(|text| text.parse().ok()).map(|size: u64| size.min(SIZE_MAX));
    let date = text(header::DATE).and_then(|text| httpdate::parse_http_date(text).ok());
    let modified = text(header::LAST_MODIFIED).and_then(|text| httpdate::parse_http_date(text).ok());
    let etag = etag_of(headers).unwrap_or_default();
    if etag.is_empty() && modified.is_none() {
        return Err(garbled("neither ETag nor Last-Modified: its versions cannot be distinguished"));
    }
    Ok(Object {
        etag,
        // The version id of objects from before the bucket kept versions is `null`.
        version_id: text(VERSION_ID).filter(|id| *id != "null").unwrap_or_default().to_owned(),
        size: size.ok_or_else(|| garbled("no Content-Length"))?,
        last_modified: modified.map_or_else(Time::default, Time::from),
        asked_at_secs: date.map_or(0, |date| Time::from(date).secs),
        revision: revision(text(METAGENERATION)),
        meta: Meta::read(headers),
    })
}

fn revision(metageneration: Option<&str>) -> u32 {
    metageneration.and_then(|number| number.parse().ok()).map_or(0, |number: u32| number.saturating_sub(1))
}

/// Parses a time to the second, as an object's header has it.
pub(crate) fn parse_iso_time(text: &str) -> Result<Time, StoreRefusal> {
    let time = humantime::parse_rfc3339(text).map_err(garbled)?;
    Ok(Time { nanos: 0, ..time.into() })
}
