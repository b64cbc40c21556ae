//! The operations of S3 that the pool is made of, key by key.

use std::ops::Range;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, Method, header};
use percent_encoding::{percent_decode_str, utf8_percent_encode};
use serde::{Deserialize, Serialize};

use crate::{ErrorKind, Time};

use super::client::{Answer, Body, Call, Client, PLAIN_IN_PATH, Refusal};
use super::metadata::{Meta, Object};

const VERSION_ID: HeaderName = HeaderName::from_static("x-amz-version-id");
const COPY_SOURCE: HeaderName = HeaderName::from_static("x-amz-copy-source");
const COPY_SOURCE_RANGE: HeaderName = HeaderName::from_static("x-amz-copy-source-range");
const COPY_SOURCE_IF_MATCH: HeaderName = HeaderName::from_static("x-amz-copy-source-if-match");
const METADATA_DIRECTIVE: HeaderName = HeaderName::from_static("x-amz-metadata-directive");
const CHECKSUM: HeaderName = HeaderName::from_static("x-amz-checksum-crc32c");
const CHECKSUM_ALGORITHM: HeaderName = HeaderName::from_static("x-amz-checksum-algorithm");

/// What must hold of a key for a change to be made.
#[derive(Debug, Clone, Copy)]
pub(super) enum Condition<'a> {
    None,
    Absent,
    Etag(&'a str),
    /// Nothing is sent: this is what was seen there. Where the answer is lost it must still be there for the request to
    /// be sent again.
    Seen(Option<&'a Object>),
}

impl Condition<'_> {
    /// Whether the server looks at it.
    pub(super) fn is_sent(&self) -> bool {
        matches!(self, Self::Absent | Self::Etag(_))
    }
}

/// One page of a listing, in the order of the keys' bytes.
#[derive(Debug, Default)]
pub(super) struct Page {
    pub(super) objects: Vec<Listed>,
    /// With the slash at their end.
    pub(super) prefixes: Vec<String>,
    /// The token of the next page.
    pub(super) next: Option<String>,
}

#[derive(Debug)]
pub(super) struct Listed {
    pub(super) key: String,
    pub(super) etag: String,
    pub(super) size: u64,
    pub(super) last_modified: Time,
}

/// A part of an upload that the server has.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub(super) number: u32,
    pub(super) etag: String,
    pub(super) checksum: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ListAnswer {
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
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ListPrefix {
    prefix: String,
}

/// The answers that hold an ETag: of a copy, of a copied part, of a completed upload. An error may come with the
/// status 200.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Tagged {
    #[serde(rename = "ETag")]
    etag: Option<String>,
    #[serde(rename = "ChecksumCRC32C")]
    checksum: Option<String>,
    code: Option<String>,
    message: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Begun {
    upload_id: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct CompleteMultipartUpload<'a> {
    part: Vec<CompletedPart<'a>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct CompletedPart<'a> {
    part_number: u32,
    #[serde(rename = "ETag")]
    etag: &'a str,
    #[serde(rename = "ChecksumCRC32C", skip_serializing_if = "Option::is_none")]
    checksum: Option<&'a str>,
}

impl Client {
    /// `None` where there is no such key.
    pub(super) async fn head(&self, key: &str) -> Result<Option<Object>, Refusal> {
        match self.send(Call::new(Method::HEAD, key)).await {
            Ok(answer) => object(&answer.headers).map(Some),
            Err(refusal) if refusal.is(ErrorKind::NotFound) && refusal.code != "NoSuchBucket" => Ok(None),
            Err(refusal) => Err(refusal),
        }
    }

    /// A range that lies within the object whose ETag is `etag`, and what the server says of the object; `Conflict` where
    /// it has another one by now.
    pub(super) async fn get(&self, key: &str, etag: &str, range: Range<u64>) -> Result<(Object, Bytes), Refusal> {
        let mut call = ranged(key, etag, &range)?;
        call.answer_bytes = Some(range.end - range.start);
        let answer = self.send(call).await?;
        Ok((object_of_range(&answer.headers, &range)?, answer.body))
    }

    /// The same as it comes. What breaks off is for the caller to go on with.
    pub(super) async fn get_stream(&self, key: &str, etag: &str, range: Range<u64>) -> Result<(Object, Body), Refusal> {
        let (headers, body) = self.send_for_body(ranged(key, etag, &range)?).await?;
        Ok((object_of_range(&headers, &range)?, body))
    }

    /// Keys that begin with `prefix`; those that have a slash behind it are only counted as a prefix where
    /// `delimited`.
    pub(super) async fn list(
        &self,
        prefix: &str,
        delimited: bool,
        token: Option<&str>,
        most: usize,
    ) -> Result<Page, Refusal> {
        let mut call = Call::new(Method::GET, "")
            .query("list-type", "2")
            .query("encoding-type", "url")
            .query("max-keys", most.to_string())
            .query("prefix", prefix);
        if delimited {
            call = call.query("delimiter", "/");
        }
        if let Some(token) = token {
            call = call.query("continuation-token", token);
        }
        let answer = self.send(call).await?;
        let told: ListAnswer = parse(&answer)?;
        let encoded = told.encoding_type.as_deref() == Some("url");
        let decode = |text: String| match encoded {
            true => percent_decode_str(&text.replace('+', " ")).decode_utf8_lossy().into_owned(),
            false => text,
        };
        let objects = told.contents.into_iter().map(|listed| {
            Ok(Listed {
                key: decode(listed.key),
                etag: listed.etag,
                size: listed.size,
                last_modified: parse_iso_time(&listed.last_modified)?,
            })
        });
        Ok(Page {
            objects: objects.collect::<Result<_, Refusal>>()?,
            prefixes: told.common_prefixes.into_iter().map(|prefix| decode(prefix.prefix)).collect(),
            next: told.next_continuation_token.filter(|token| !token.is_empty()),
        })
    }

    /// Makes or replaces an object in one request. Returns its ETag.
    pub(super) async fn put(
        &self,
        key: &str,
        body: Bytes,
        meta: &Meta,
        condition: Condition<'_>,
    ) -> Result<String, Refusal> {
        let checksum = checksum_of(&body);
        let mut call = Call::new(Method::PUT, key).body(body).header(CHECKSUM, &checksum)?;
        meta.write(&mut call.headers);
        let answer = self.send(on(call, condition)?).await;
        self.or_arrived(key, meta, answer.and_then(|answer| Ok((answer.retries, etag_of(&answer.headers)?)))).await
    }

    /// Copies an object of that ETag on the server and gives the copy new metadata. Returns the copy's ETag.
    pub(super) async fn copy(
        &self,
        from: (&str, &str),
        to: &str,
        meta: &Meta,
        condition: Condition<'_>,
    ) -> Result<String, Refusal> {
        let mut call = self.copying(Call::new(Method::PUT, to), from)?.header(METADATA_DIRECTIVE, "REPLACE")?;
        meta.write(&mut call.headers);
        let answer = self.send(on(call, condition)?).await;
        self.or_arrived(to, meta, answer.and_then(|answer| tagged(&answer).map(|tagged| (answer.retries, tagged.0))))
            .await
    }

    /// Removes a key, if it is there. Of an object that is known, no other one is removed where the answer is lost.
    pub(super) async fn delete(&self, key: &str, known: Option<&Object>) -> Result<(), Refusal> {
        let mut call = Call::new(Method::DELETE, key);
        call.over = known.map(Some);
        match self.send(call).await {
            Ok(_) => Ok(()),
            // What was to go is gone.
            Err(refusal) if refusal.is_moved_on() => Ok(()),
            Err(refusal) if refusal.is(ErrorKind::NotFound) && refusal.code != "NoSuchBucket" => Ok(()),
            Err(refusal) => Err(refusal),
        }
    }

    /// Begins an upload in parts. Returns its name.
    pub(super) async fn begin_upload(&self, key: &str, meta: &Meta) -> Result<String, Refusal> {
        let mut call = Call::new(Method::POST, key).query("uploads", "").header(CHECKSUM_ALGORITHM, "CRC32C")?;
        meta.write(&mut call.headers);
        let answer = self.send(call).await?;
        Ok(parse::<Begun>(&answer)?.upload_id)
    }

    pub(super) async fn put_part(&self, key: &str, upload: &str, number: u32, body: Bytes) -> Result<Part, Refusal> {
        let checksum = checksum_of(&body);
        let call = Call::new(Method::PUT, key)
            .query("partNumber", number.to_string())
            .query("uploadId", upload)
            .header(CHECKSUM, &checksum)?
            .body(body);
        let answer = self.send(call).await?;
        let checksum = answer.headers.contains_key(&CHECKSUM).then_some(checksum);
        Ok(Part { number, etag: etag_of(&answer.headers)?, checksum })
    }

    /// Takes a part from an object of that ETag, on the server.
    pub(super) async fn copy_part(
        &self,
        from: (&str, &str),
        range: Range<u64>,
        to: &str,
        upload: &str,
        number: u32,
    ) -> Result<Part, Refusal> {
        let call = Call::new(Method::PUT, to).query("partNumber", number.to_string()).query("uploadId", upload);
        let call =
            self.copying(call, from)?.header(COPY_SOURCE_RANGE, &format!("bytes={}-{}", range.start, range.end - 1))?;
        let (etag, checksum) = tagged(&self.send(call).await?)?;
        Ok(Part { number, etag, checksum })
    }

    /// Makes an object of the parts. Returns its ETag.
    pub(super) async fn complete_upload(
        &self,
        key: &str,
        upload: &str,
        parts: &[Part],
        meta: &Meta,
        condition: Condition<'_>,
    ) -> Result<String, Refusal> {
        let completed = parts.iter().map(|Part { number, etag, checksum }| CompletedPart {
            part_number: *number,
            etag,
            checksum: checksum.as_deref(),
        });
        let list = CompleteMultipartUpload { part: completed.collect() };
        let body = quick_xml::se::to_string(&list)
            .map_err(|error| Refusal::local(ErrorKind::InvalidInput, error.to_string()))?;
        let call = Call::new(Method::POST, key).query("uploadId", upload).body(body.into());
        let answer = self.send(on(call, condition)?).await;
        match answer.and_then(|answer| tagged(&answer).map(|tagged| (answer.retries, tagged.0))) {
            // Of an upload whose completion was cut off, by the death of the server for one, versitygw says that it is
            // complete: only the object itself tells.
            Ok((retries, _)) if retries > 0 => match self.head(key).await? {
                Some(found) if found.meta.write.is_some() && found.meta.write == meta.write => Ok(found.etag),
                _ => Err(Refusal::local(
                    ErrorKind::Unavailable,
                    "the server says that the upload is complete, and it is not there".to_owned(),
                )),
            },
            answer => self.or_arrived(key, meta, answer).await,
        }
    }

    pub(super) async fn abort_upload(&self, key: &str, upload: &str) -> Result<(), Refusal> {
        self.send(Call::new(Method::DELETE, key).query("uploadId", upload)).await.map(drop)
    }

    /// A change that was sent again and refused may have been made by the request whose answer was lost: then the
    /// object carries the number of this write.
    async fn or_arrived(
        &self,
        key: &str,
        meta: &Meta,
        answer: Result<(u64, String), Refusal>,
    ) -> Result<String, Refusal> {
        match answer {
            Ok((_, etag)) => Ok(etag),
            Err(refusal) if refusal.retries > 0 => match self.head(key).await? {
                Some(found) if found.meta.write.is_some() && found.meta.write == meta.write => Ok(found.etag),
                _ => Err(refusal),
            },
            Err(refusal) => Err(refusal),
        }
    }

    /// A copy of the object with that key and ETag.
    fn copying<'a>(&self, call: Call<'a>, (key, etag): (&str, &str)) -> Result<Call<'a>, Refusal> {
        let source = format!("{}/{}", self.bucket, utf8_percent_encode(key, PLAIN_IN_PATH));
        let call = call.header(COPY_SOURCE, &source)?;
        if etag.is_empty() { Ok(call) } else { call.header(COPY_SOURCE_IF_MATCH, etag) }
    }
}

fn on<'a>(call: Call<'a>, condition: Condition<'a>) -> Result<Call<'a>, Refusal> {
    match condition {
        Condition::None => Ok(call),
        Condition::Seen(seen) => Ok(Call { over: Some(seen), ..call }),
        Condition::Absent => call.header(header::IF_NONE_MATCH, "*"),
        Condition::Etag(etag) => call.header(header::IF_MATCH, etag),
    }
}

fn ranged<'a>(key: &'a str, etag: &str, range: &Range<u64>) -> Result<Call<'a>, Refusal> {
    let call =
        Call::new(Method::GET, key).header(header::RANGE, &format!("bytes={}-{}", range.start, range.end - 1))?;
    if etag.is_empty() { Ok(call) } else { call.header(header::IF_MATCH, etag) }
}

/// What the server says of the object that it sends a range of.
fn object_of_range(headers: &HeaderMap, range: &Range<u64>) -> Result<Object, Refusal> {
    let begins = format!("bytes {}-", range.start);
    let told = headers.get(header::CONTENT_RANGE).and_then(|range| range.to_str().ok());
    let object = object(headers)?;
    // Without ranges a server sends all of it: right only where that was asked for.
    match told {
        Some(told) if told.starts_with(&begins) => Ok(object),
        None if *range == (0..object.size) => Ok(object),
        _ => Err(garbled("another range than was asked for")),
    }
}

fn checksum_of(body: &[u8]) -> String {
    STANDARD.encode(crc32c::crc32c(body).to_be_bytes())
}

fn garbled(what: impl std::fmt::Display) -> Refusal {
    Refusal::local(ErrorKind::Corrupt, format!("the server's answer makes no sense: {what}"))
}

fn parse<T: for<'de> Deserialize<'de>>(answer: &Answer) -> Result<T, Refusal> {
    quick_xml::de::from_reader(&answer.body[..]).map_err(garbled)
}

/// The ETag in an answer's body, and a checksum.
fn tagged(answer: &Answer) -> Result<(String, Option<String>), Refusal> {
    let tagged: Tagged = parse(answer)?;
    match (tagged.etag, tagged.code) {
        (Some(etag), None) => Ok((etag, tagged.checksum)),
        (_, Some(code)) => Err(Refusal::late(code, tagged.message.unwrap_or_default(), answer.retries)),
        (None, None) => Err(garbled("no ETag")),
    }
}

fn etag_of(headers: &HeaderMap) -> Result<String, Refusal> {
    let etag = headers.get(header::ETAG).and_then(|etag| etag.to_str().ok());
    etag.map(str::to_owned).ok_or_else(|| garbled("no ETag"))
}

pub(super) fn object(headers: &HeaderMap) -> Result<Object, Refusal> {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let length = match text(header::CONTENT_RANGE) {
        // `bytes FROM-TO/SIZE`
        Some(range) => range.rsplit('/').next(),
        None => text(header::CONTENT_LENGTH),
    };
    let size = length.and_then(|text| text.parse().ok());
    let date = text(header::DATE).and_then(|text| httpdate::parse_http_date(text).ok());
    let modified = text(header::LAST_MODIFIED).and_then(|text| httpdate::parse_http_date(text).ok());
    Ok(Object {
        etag: etag_of(headers).unwrap_or_default(),
        // What was there before the bucket kept versions is `null`.
        version_id: text(VERSION_ID).filter(|id| *id != "null").unwrap_or_default().to_owned(),
        size: size.ok_or_else(|| garbled("no Content-Length"))?,
        last_modified: modified.ok_or_else(|| garbled("no Last-Modified"))?.into(),
        asked_at_secs: date.map_or(0, |date| Time::from(date).secs),
        meta: Meta::read(headers),
    })
}

/// To the second, as the header of an object has it.
fn parse_iso_time(text: &str) -> Result<Time, Refusal> {
    let time = humantime::parse_rfc3339(text).map_err(garbled)?;
    Ok(Time { nanos: 0, ..time.into() })
}
