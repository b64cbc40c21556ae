//! S3's requests that change a key.

use std::ops::Range;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{HeaderName, Method, header};
use percent_encoding::utf8_percent_encode;
use serde::{Deserialize, Serialize};

use crate::ErrorKind;

use super::client::{Client, PLAIN_IN_PATH, StoreAnswer, StoreRefusal, StoreRequest};
use super::metadata::{Meta, Object};
use super::requests::{etag_of, parse};

const COPY_SOURCE: HeaderName = HeaderName::from_static("x-amz-copy-source");
const COPY_SOURCE_RANGE: HeaderName = HeaderName::from_static("x-amz-copy-source-range");
const COPY_SOURCE_IF_MATCH: HeaderName = HeaderName::from_static("x-amz-copy-source-if-match");
const METADATA_DIRECTIVE: HeaderName = HeaderName::from_static("x-amz-metadata-directive");
const CHECKSUM: HeaderName = HeaderName::from_static("x-amz-checksum-crc32c");
const CHECKSUM_ALGORITHM: HeaderName = HeaderName::from_static("x-amz-checksum-algorithm");
const CHECKSUM_TYPE: HeaderName = HeaderName::from_static("x-amz-checksum-type");

/// The condition on a key under which a change is made.
#[derive(Debug, Clone, Copy)]
pub(super) enum Condition<'a> {
    None,
    Absent,
    Etag(&'a str),
    /// No condition is sent: this object, or none, was seen at the key. If the answer is lost, the request is sent
    /// again only while the same object is still there.
    Seen(Option<&'a Object>),
}

impl Object {
    /// The condition that the object is still this one.
    pub(super) fn condition(&self) -> Condition<'_> {
        if self.etag.is_empty() { Condition::Seen(Some(self)) } else { Condition::Etag(&self.etag) }
    }
}

impl Condition<'_> {
    /// Whether the condition is sent to the server.
    pub(super) fn is_sent(&self) -> bool {
        matches!(self, Self::Absent | Self::Etag(_))
    }
}

/// What the checksum of an object that is uploaded in parts is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChecksumOf {
    /// The checksums of the parts: the server's default.
    Parts,
    /// The content.
    Content,
}

/// A part of an upload that the server has received.
#[derive(Debug, Clone)]
pub(super) struct UploadedPart {
    pub(super) number: u32,
    pub(super) etag: String,
    pub(super) checksum: Option<String>,
}

/// The answers that contain an ETag: of a copy, of a copied part, of a completed upload. An error may come with the
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
    /// Makes or replaces an object in one request. Returns its ETag.
    pub(super) async fn put(
        &self,
        key: &str,
        body: Bytes,
        meta: &Meta,
        condition: Condition<'_>,
    ) -> Result<String, StoreRefusal> {
        let checksum = checksum_of(&body);
        let mut call = StoreRequest::new(Method::PUT, key).body(body).header(CHECKSUM, &checksum)?;
        meta.write(&mut call.headers);
        let answer = self.send(on(call, condition)?).await;
        self.or_arrived(key, meta, answer.and_then(|answer| Ok((answer.retries, etag_of(&answer.headers)?)))).await
    }

    /// Copies an object with that ETag on the server and gives the copy new metadata. Returns the copy's ETag.
    pub(super) async fn copy(
        &self,
        from: (&str, &str),
        to: &str,
        meta: &Meta,
        condition: Condition<'_>,
    ) -> Result<String, StoreRefusal> {
        let mut call = self.copying(StoreRequest::new(Method::PUT, to), from)?.header(METADATA_DIRECTIVE, "REPLACE")?;
        meta.write(&mut call.headers);
        let answer = self.send(on(call, condition)?).await;
        self.or_arrived(to, meta, answer.and_then(|answer| tagged(&answer).map(|tagged| (answer.retries, tagged.0))))
            .await
    }

    /// Removes a key, if it exists. With `Condition::Seen`, a retry after a lost answer does not remove another
    /// object. With a condition that is sent, no other object is ever removed: the call fails with `Conflict`.
    pub(super) async fn delete(&self, key: &str, condition: Condition<'_>) -> Result<(), StoreRefusal> {
        match self.send(on(StoreRequest::new(Method::DELETE, key), condition)?).await {
            Ok(_) => Ok(()),
            // The object that was to be removed is gone.
            Err(refusal) if refusal.is_moved_on() => Ok(()),
            Err(refusal) if refusal.retries > 0 && refusal.is(ErrorKind::Conflict) => Ok(()),
            Err(refusal) if refusal.is(ErrorKind::NotFound) => Ok(()),
            Err(refusal) => Err(refusal),
        }
    }

    /// Begins an upload in parts. Returns its id.
    pub(super) async fn begin_upload(
        &self,
        key: &str,
        meta: &Meta,
        checksum: ChecksumOf,
    ) -> Result<String, StoreRefusal> {
        let mut call =
            StoreRequest::new(Method::POST, key).query("uploads", "").header(CHECKSUM_ALGORITHM, "CRC32C")?;
        if checksum == ChecksumOf::Content {
            call = call.header(CHECKSUM_TYPE, "FULL_OBJECT")?;
        }
        meta.write(&mut call.headers);
        let answer = self.send(call).await?;
        Ok(parse::<Begun>(&answer)?.upload_id)
    }

    pub(super) async fn put_part(
        &self,
        key: &str,
        upload: &str,
        number: u32,
        body: Bytes,
    ) -> Result<UploadedPart, StoreRefusal> {
        let checksum = checksum_of(&body);
        let call = StoreRequest::new(Method::PUT, key)
            .query("partNumber", number.to_string())
            .query("uploadId", upload)
            .header(CHECKSUM, &checksum)?
            .body(body);
        let answer = self.send(call).await?;
        let checksum = answer.headers.contains_key(&CHECKSUM).then_some(checksum);
        Ok(UploadedPart { number, etag: etag_of(&answer.headers)?, checksum })
    }

    /// Copies a part from an object with that ETag, on the server.
    pub(super) async fn copy_part(
        &self,
        from: (&str, &str),
        range: Range<u64>,
        to: &str,
        upload: &str,
        number: u32,
    ) -> Result<UploadedPart, StoreRefusal> {
        let call = StoreRequest::new(Method::PUT, to).query("partNumber", number.to_string()).query("uploadId", upload);
        let call =
            self.copying(call, from)?.header(COPY_SOURCE_RANGE, &format!("bytes={}-{}", range.start, range.end - 1))?;
        let (etag, checksum) = tagged(&self.send(call).await?)?;
        Ok(UploadedPart { number, etag, checksum })
    }

    /// Makes an object from the parts. Returns its ETag.
    pub(super) async fn complete_upload(
        &self,
        key: &str,
        upload: &str,
        parts: &[UploadedPart],
        meta: &Meta,
        condition: Condition<'_>,
    ) -> Result<String, StoreRefusal> {
        let completed = parts.iter().map(|UploadedPart { number, etag, checksum }| CompletedPart {
            part_number: *number,
            etag,
            checksum: checksum.as_deref(),
        });
        let list = CompleteMultipartUpload { part: completed.collect() };
        let body = quick_xml::se::to_string(&list)
            .map_err(|error| StoreRefusal::local(ErrorKind::InvalidInput, error.to_string()))?;
        let call = StoreRequest::new(Method::POST, key).query("uploadId", upload).body(body.into());
        let answer = self.send(on(call, condition)?).await;
        match answer.and_then(|answer| tagged(&answer).map(|tagged| (answer.retries, tagged.0))) {
            // If a completion was interrupted, for example by the death of the server, versitygw reports the upload
            // as complete. Only the object itself tells whether it is.
            Ok((retries, _)) if retries > 0 => match self.head(key).await? {
                Some(found) if found.meta.write.is_some() && found.meta.write == meta.write => Ok(found.etag),
                _ => Err(StoreRefusal::local(
                    ErrorKind::Unavailable,
                    "the server says that the upload is complete, and it is not there".to_owned(),
                )),
            },
            answer => self.or_arrived(key, meta, answer).await,
        }
    }

    pub(super) async fn abort_upload(&self, key: &str, upload: &str) -> Result<(), StoreRefusal> {
        self.send(StoreRequest::new(Method::DELETE, key).query("uploadId", upload)).await.map(drop)
    }

    /// If a change was sent again and refused, the first request may have made it and only its answer was lost. The
    /// object then carries the write number of this call.
    async fn or_arrived(
        &self,
        key: &str,
        meta: &Meta,
        answer: Result<(u64, String), StoreRefusal>,
    ) -> Result<String, StoreRefusal> {
        match answer {
            Ok((_, etag)) => Ok(etag),
            Err(refusal) if refusal.retries > 0 => match self.head(key).await? {
                Some(found) if found.meta.write.is_some() && found.meta.write == meta.write => Ok(found.etag),
                _ => Err(refusal),
            },
            Err(refusal) => Err(refusal),
        }
    }

    /// Adds the headers that copy the object with that key and ETag.
    fn copying<'a>(&self, call: StoreRequest<'a>, (key, etag): (&str, &str)) -> Result<StoreRequest<'a>, StoreRefusal> {
        let source = format!("{}/{}", self.bucket, utf8_percent_encode(key, PLAIN_IN_PATH));
        let call = call.header(COPY_SOURCE, &source)?;
        if etag.is_empty() { Ok(call) } else { call.header(COPY_SOURCE_IF_MATCH, etag) }
    }
}

fn on<'a>(call: StoreRequest<'a>, condition: Condition<'a>) -> Result<StoreRequest<'a>, StoreRefusal> {
    match condition {
        Condition::None => Ok(call),
        Condition::Seen(seen) => Ok(StoreRequest { over: Some(seen), ..call }),
        Condition::Absent => call.header(header::IF_NONE_MATCH, "*"),
        Condition::Etag(etag) => call.header(header::IF_MATCH, etag),
    }
}

fn checksum_of(body: &[u8]) -> String {
    STANDARD.encode(crc32c::crc32c(body).to_be_bytes())
}

/// The ETag and a checksum from an answer's body.
fn tagged(answer: &StoreAnswer) -> Result<(String, Option<String>), StoreRefusal> {
    let tagged: Tagged = parse(answer)?;
    match (tagged.etag, tagged.code) {
        (Some(etag), None) => Ok((etag, tagged.checksum)),
        (_, Some(code)) => Err(StoreRefusal::late(code, tagged.message.unwrap_or_default(), answer.retries)),
        (None, None) => Err(super::requests::garbled("no ETag")),
    }
}
