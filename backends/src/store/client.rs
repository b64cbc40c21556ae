//! Signed requests to one bucket, retried where that can help.
//!
//! Credentials, signatures and HTTP are those of `object_store`. Its own operations are not used: its paths cannot
//! name `dir/` or `a//b`, one such key fails a whole listing, an interrupted body cannot be resumed, completing an
//! upload takes no condition, and copying takes no metadata.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder, Retryable};
use bytes::{Bytes, BytesMut};
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, header};
use object_store::client::{HttpClient, HttpError, HttpErrorKind, HttpRequestBody};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::outage::OutageLimit;
use crate::{Error, ErrorKind, Side};

use super::attach::causes;
use super::bounds::{ANSWER_BYTES, ERROR_BODY_BYTES};
use super::dialect::Dialect;
use super::keys::is_unspeakable;
use super::metadata::Object;
use super::requests;

/// The characters of a key that stay unescaped in a URL, by AWS's rules for signatures.
pub(crate) const PLAIN_IN_QUERY: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
pub(crate) const PLAIN_IN_PATH: &AsciiSet = &PLAIN_IN_QUERY.remove(b'/');

/// Retries of a request that the server may have received.
const RETRIES: u64 = 6;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// The body of an answer.
pub(crate) type Body = BoxStream<'static, Result<Bytes, StoreRefusal>>;

/// A bucket and the credentials for it.
#[derive(Debug)]
pub(crate) struct Client {
    http: HttpClient,
    pub(crate) bucket: String,
    /// `https://HOST/BUCKET` or `https://BUCKET.HOST`.
    pub(crate) bucket_url: String,
    pub(crate) dialect: Box<dyn Dialect>,
    /// Requests that were retried.
    pub(crate) retried: AtomicU64,
    /// Memory for content that is being sent, in units of [`ROOM_UNIT_BYTES`].
    room: Semaphore,
    pub(crate) outage: OutageLimit,
}

const ROOM_UNIT_BYTES: u64 = 64 << 10;
/// Memory for all content that is being sent: 32 MiB. A single part may be larger, and then has all of it.
pub(crate) const ROOM_BYTES: u64 = 32 << 20;
const ROOM_UNITS: usize = (ROOM_BYTES / ROOM_UNIT_BYTES) as usize;

/// One request.
#[derive(Debug, Clone)]
pub(crate) struct StoreRequest<'a> {
    pub(crate) method: Method,
    pub(crate) key: &'a str,
    pub(crate) query: Vec<(&'static str, String)>,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// The number of bytes of the answer, if known.
    pub(crate) answer_bytes: Option<u64>,
    /// For a change without a condition: the object, or none, that was seen at the key. The change is sent again only
    /// while the same object is still there. `None`: the call may be sent again without a look at the key.
    pub(crate) over: Option<Option<&'a Object>>,
}

impl<'a> StoreRequest<'a> {
    pub(crate) fn new(method: Method, key: &'a str) -> Self {
        let (query, headers) = (Vec::new(), HeaderMap::new());
        Self { method, key, query, headers, body: Bytes::new(), answer_bytes: None, over: None }
    }

    pub(crate) fn query(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.query.push((name, value.into()));
        self
    }

    pub(crate) fn header(mut self, name: http::HeaderName, value: &str) -> Result<Self, StoreRefusal> {
        let value = HeaderValue::from_bytes(value.as_bytes())
            .map_err(|_| StoreRefusal::local(ErrorKind::InvalidInput, format!("{name} cannot be {value:?}")))?;
        self.headers.insert(name, value);
        Ok(self)
    }

    pub(crate) fn body(mut self, body: Bytes) -> Self {
        self.body = body;
        self
    }
}

/// A successful answer.
#[derive(Debug)]
pub(crate) struct StoreAnswer {
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// The number of failed tries before this answer: an earlier try may already have made the change.
    pub(crate) retries: u64,
}

/// The reason for a failed request.
#[derive(Debug)]
pub(crate) struct StoreRefusal {
    /// S3's error code, or ours.
    pub(crate) code: String,
    pub(crate) message: String,
    pub(crate) retries: u64,
    kind: ErrorKind,
    again: bool,
    /// No connection was made.
    unreached: bool,
    /// There is no such bucket: of no key is it known whether it exists.
    lacks_store: bool,
    /// The server redirected to a path with a slash at its end, and the redirection was not followed.
    to_directory: bool,
}

const AZURE_ERROR_CODE: HeaderName = HeaderName::from_static("x-ms-error-code");
/// Our code for a lost answer, when the key now has neither the request's object nor the one before it.
const MOVED_ON: &str = "MovedOn";
/// Our code for a redirection that leads in a circle, or to where no request is sent.
const NOT_FOLLOWED: &str = "Redirection";

/// The body of an error.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ErrorBody {
    #[serde(default)]
    code: String,
    #[serde(default)]
    message: String,
}

impl fmt::Display for StoreRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.code.as_str(), self.message.as_str()) {
            ("", message) => f.write_str(message),
            (code, "") => write!(f, "the server says {code}"),
            (code, message) => write!(f, "the server says {code}: {message}"),
        }
    }
}

impl StoreRefusal {
    pub(crate) fn local(kind: ErrorKind, message: String) -> Self {
        let again = matches!(kind, ErrorKind::Unavailable | ErrorKind::Timeout);
        Self {
            code: String::new(),
            message,
            retries: 0,
            kind,
            again,
            unreached: false,
            lacks_store: false,
            to_directory: false,
        }
    }

    /// A request without an answer.
    fn unanswered(error: &HttpError) -> Self {
        let message = without_secrets(&causes(error));
        if is_not_followed(error) {
            return Self { code: NOT_FOLLOWED.to_owned(), ..Self::local(ErrorKind::InvalidInput, message) };
        }
        let kind = if error.kind() == HttpErrorKind::Timeout { ErrorKind::Timeout } else { ErrorKind::Unavailable };
        Self { unreached: error.kind() == HttpErrorKind::Connect, ..Self::local(kind, message) }
    }

    /// The same, and the request is not sent again.
    pub(crate) fn at_once(self) -> Self {
        Self { again: false, ..self }
    }

    fn of(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Self {
        let mut told: ErrorBody = quick_xml::de::from_reader(body).unwrap_or_default();
        // An answer to HEAD has no body.
        if let Some(code) = headers.get(AZURE_ERROR_CODE).filter(|_| told.code.is_empty()) {
            told.code = code.to_str().unwrap_or_default().to_owned();
        }
        let location = headers.get(header::LOCATION).map(HeaderValue::as_bytes).unwrap_or_default();
        let location = location.split(|byte| matches!(byte, b'?' | b'#')).next().unwrap_or_default();
        let redirects = matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308);
        Self { to_directory: redirects && location.ends_with(b"/"), ..Self::told(status, told) }
    }

    fn told(status: StatusCode, told: ErrorBody) -> Self {
        let code = if told.code.is_empty() { status.as_str().to_owned() } else { told.code };
        let lacks_store = matches!(code.as_str(), "NoSuchBucket" | "ContainerNotFound");
        let kind = match (status.as_u16(), code.as_str()) {
            _ if lacks_store => ErrorKind::Unavailable,
            (_, "KeyTooLongError") => ErrorKind::NameTooLong,
            (_, "EntityTooLarge") => ErrorKind::TooLarge,
            (_, "QuotaExceeded" | "XMinioStorageFull") | (507, _) => ErrorKind::Quota,
            (_, "RequestTimeout" | "SlowDown" | "InternalError" | "ServiceUnavailable") => ErrorKind::Unavailable,
            (_, "BadDigest" | "XAmzContentSHA256Mismatch") => ErrorKind::Corrupt,
            (_, "PreconditionFailed" | "ConditionalRequestConflict") => ErrorKind::Conflict,
            (_, "NoSuchKey" | "NoSuchUpload") => ErrorKind::NotFound,
            // From servers that store keys as files: an object is at a place where the key needs a directory.
            (_, "ObjectParentIsFile" | "XMinioParentIsObject") => ErrorKind::NotDirectory,
            (404 | 410, _) => ErrorKind::NotFound,
            (401 | 403, _) | (_, "PublicAccessNotPermitted") => ErrorKind::PermissionDenied,
            (412, _) => ErrorKind::Conflict,
            (405 | 501, _) => ErrorKind::Unsupported,
            (408 | 425 | 429, _) | (500..=599, _) => ErrorKind::Unavailable,
            (300..=399, _) => ErrorKind::InvalidInput,
            _ => ErrorKind::Os(libc::EIO),
        };
        let again =
            matches!(kind, ErrorKind::Unavailable | ErrorKind::Corrupt) && !lacks_store || code == "OperationAborted";
        // Azure's store adds lines for its own support after the first.
        let message = told.message.lines().next().unwrap_or_default().to_owned();
        Self { code, message, retries: 0, kind, again, unreached: false, lacks_store, to_directory: false }
    }

    /// The refusal of a listing. A listing of no keys is empty, so `NotFound` means that there is no such bucket.
    pub(crate) fn of_listing(self) -> Self {
        let lacks_store = self.lacks_store || self.is(ErrorKind::NotFound);
        let kind = if lacks_store { ErrorKind::Unavailable } else { self.kind };
        Self { kind, lacks_store, ..self }
    }

    /// The refusal of an attach: a bucket that is missing then is a mistake in the URL. One that is missing later may come
    /// back, and its files count as unreachable, not as removed.
    pub(crate) fn of_attach(self) -> Self {
        let kind = if self.lacks_store { ErrorKind::NotFound } else { self.kind };
        Self { kind, ..self }
    }

    /// An error in an answer with a success status.
    pub(crate) fn late(code: String, message: String, retries: u64) -> Self {
        let body = ErrorBody { code, message };
        Self { retries, ..Self::told(StatusCode::INTERNAL_SERVER_ERROR, body) }
    }

    pub(crate) fn is(&self, kind: ErrorKind) -> bool {
        self.kind == kind
    }

    /// Whether the same request is refused until someone changes the object, the rights or the store.
    pub(crate) fn is_final(&self) -> bool {
        let may_pass = [ErrorKind::Unavailable, ErrorKind::Timeout, ErrorKind::Corrupt, ErrorKind::Conflict];
        !self.again && !may_pass.contains(&self.kind)
    }

    /// Whether the server refused the request.
    pub(crate) fn is_servers(&self) -> bool {
        !self.code.is_empty()
    }

    /// Whether the server redirected in a circle, or to where no request is sent.
    pub(crate) fn is_not_followed(&self) -> bool {
        self.code == NOT_FOLLOWED
    }

    /// The same, as a failure of the whole server.
    pub(crate) fn of_server(self) -> Self {
        Self { kind: ErrorKind::Unavailable, ..self }
    }

    /// Whether the server redirected to a path with a slash at its end, and the redirection was not followed. A client of a
    /// web server does not follow those to the same path with a slash, and follows or fails at all others.
    pub(crate) fn is_to_directory(&self) -> bool {
        self.to_directory
    }

    /// Whether the requested range lies beyond the end.
    pub(crate) fn is_behind_the_end(&self) -> bool {
        matches!(self.code.as_str(), "InvalidRange" | "416")
    }

    fn moved_on() -> Self {
        let message = "the answer was lost, and by now there is something else".to_owned();
        Self { code: MOVED_ON.to_owned(), ..Self::local(ErrorKind::Conflict, message) }
    }

    /// Whether a request was not retried because of the object that is now at the key.
    pub(crate) fn is_moved_on(&self) -> bool {
        self.code == MOVED_ON
    }

    /// The error that the pool returns; `what` names the operation and the path.
    pub(crate) fn into_error(self, what: impl Into<String>) -> Error {
        let mut context = what.into();
        if let Some(remedy) = self.remedy() {
            context = format!("{context}: {remedy}");
        }
        match self.to_string() {
            said if said.is_empty() => Error::new(self.kind, Side::Pool, context),
            said => Error::new(self.kind, Side::Pool, format!("{context}: {said}")),
        }
    }

    fn remedy(&self) -> Option<&'static str> {
        Some(match self.code.as_str() {
            "NoSuchBucket" => "there is no such bucket: check the URL, or make it",
            "ContainerNotFound" => "there is no such container: check the URL and the account, or make it",
            "AuthenticationFailed" | "AuthorizationFailure" => {
                "check AZURE_STORAGE_ACCOUNT_NAME and the key or the token that belongs to it"
            }
            "NoAuthenticationInformation" | "PublicAccessNotPermitted" => {
                "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN"
            }
            "AuthenticationRequired" => "set GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT",
            "InvalidAccessKeyId" | "SignatureDoesNotMatch" => {
                "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile"
            }
            "ExpiredToken" => "the credentials have expired: get new ones",
            "RequestTimeTooSkewed" => "this machine's clock is wrong: set it",
            "PermanentRedirect" | "AuthorizationHeaderMalformed" => "the bucket is in another region: set AWS_REGION",
            "TemporaryRedirect" | "301" | "302" | "307" | "308" => {
                "the server names another place, to which signed requests are not sent: check the endpoint and the region"
            }
            _ => return None,
        })
    }
}

impl Client {
    pub(crate) fn new(http: HttpClient, bucket: String, bucket_url: String, dialect: Box<dyn Dialect>) -> Self {
        let (retried, room) = (AtomicU64::new(0), Semaphore::new(ROOM_UNITS));
        Self { http, bucket, bucket_url, dialect, retried, room, outage: OutageLimit::default() }
    }

    /// Waits for memory for content, at most for all of it.
    pub(crate) async fn room(&self, bytes: u64) -> Option<SemaphorePermit<'_>> {
        let units = bytes.div_ceil(ROOM_UNIT_BYTES).clamp(1, ROOM_UNITS as u64) as u32;
        // The semaphore is never closed.
        self.room.acquire_many(units).await.ok()
    }

    /// Sends a request and retries it with growing, jittered pauses for the time of [`OutageLimit`]: while the server cannot
    /// be reached, any number of times, and after other faults of the server or the network at most [`RETRIES`] times. A
    /// change that may already have been made is not made again over a later change.
    pub(crate) async fn send(&self, call: StoreRequest<'_>) -> Result<StoreAnswer, StoreRefusal> {
        let retries = AtomicU64::new(0);
        let answer = self.until_answered(call.key, &retries, || self.send_safely(&call, &retries)).await;
        let retries = retries.into_inner();
        match answer {
            Ok(answer) => Ok(StoreAnswer { retries, ..answer }),
            Err(refusal) => Err(StoreRefusal { retries, ..refusal }),
        }
    }

    /// Like [`Self::send`], but returns when the answer begins.
    pub(crate) async fn send_for_body(&self, call: StoreRequest<'_>) -> Result<(HeaderMap, Body), StoreRefusal> {
        self.until_answered(call.key, &AtomicU64::new(0), || self.begin(&call)).await
    }

    async fn until_answered<T, F>(
        &self,
        key: &str,
        retries: &AtomicU64,
        once: impl FnMut() -> F,
    ) -> Result<T, StoreRefusal>
    where
        F: Future<Output = Result<T, StoreRefusal>>,
    {
        once.retry(pauses().with_total_delay(Some(self.outage.get())))
            .when(|refusal: &StoreRefusal| {
                refusal.again && (refusal.unreached || retries.load(Ordering::Relaxed) < RETRIES)
            })
            .notify(|refusal, pause| {
                retries.fetch_add(1, Ordering::Relaxed);
                self.note_retry(key, pause, refusal);
            })
            .await
    }

    /// Counts and logs a retry after `pause`.
    pub(crate) fn note_retry(&self, key: &str, pause: Duration, refusal: &StoreRefusal) {
        self.retried.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(key, ?pause, code = refusal.code, why = refusal.message, "a request is sent again");
    }

    /// Sends a change; retries it only if no other client has made a change since.
    async fn send_safely(&self, call: &StoreRequest<'_>, retries: &AtomicU64) -> Result<StoreAnswer, StoreRefusal> {
        if let Some(seen) = call.over
            && retries.load(Ordering::Relaxed) > 0
            && !self.is_still(call.key, seen).await?
        {
            return Err(StoreRefusal::moved_on());
        }
        self.send_once(call).await
    }

    /// Whether the object at a key is the one that was seen.
    async fn is_still(&self, key: &str, seen: Option<&Object>) -> Result<bool, StoreRefusal> {
        match self.send_once(&StoreRequest::new(Method::HEAD, key)).await {
            Ok(answer) => Ok(seen.is_some_and(|seen| requests::object(&answer.headers).is_ok_and(|now| now.is(seen)))),
            Err(refusal) if refusal.is(ErrorKind::NotFound) => Ok(seen.is_none()),
            Err(refusal) => Err(refusal),
        }
    }

    async fn send_once(&self, call: &StoreRequest<'_>) -> Result<StoreAnswer, StoreRefusal> {
        let (headers, body) = self.begin(call).await?;
        let (pieces, length) = collect(body, call.answer_bytes.unwrap_or(ANSWER_BYTES)).await?;
        if let Some(expected) = call.answer_bytes
            && expected != length as u64
        {
            // More bytes than requested are no broken connection: a retry would get them again.
            let kind = if length as u64 > expected { ErrorKind::Corrupt } else { ErrorKind::Unavailable };
            let refusal = StoreRefusal::local(kind, format!("{length} bytes came instead of {expected}"));
            return Err(StoreRefusal { again: kind == ErrorKind::Unavailable, ..refusal });
        }
        Ok(StoreAnswer { headers, body: join(pieces, length), retries: 0 })
    }

    /// Sends a request once. The caller reads the body of a successful answer.
    async fn begin(&self, call: &StoreRequest<'_>) -> Result<(HeaderMap, Body), StoreRefusal> {
        let request = self.request(call).await?;
        let response = self.http.execute(request).await.map_err(|error| StoreRefusal::unanswered(&error))?;
        let (mut parts, body) = response.into_parts();
        let broken = |error| StoreRefusal::local(ErrorKind::Unavailable, without_secrets(&causes(&error)));
        let body = body.bytes_stream().map_err(broken).boxed();
        if parts.status.is_success() {
            self.dialect.translate(&mut parts.headers);
            return Ok((parts.headers, body));
        }
        let (pieces, length) = collect(body, ERROR_BODY_BYTES).await?;
        Err(StoreRefusal::of(parts.status, &parts.headers, &join(pieces, length)))
    }

    async fn request(&self, call: &StoreRequest<'_>) -> Result<Request<HttpRequestBody>, StoreRefusal> {
        let wrong = |why: String| StoreRefusal::local(ErrorKind::InvalidInput, why);
        if is_unspeakable(call.key) {
            return Err(wrong("a key with a part that is `.` or `..` cannot be sent in a URL: rename it".to_owned()));
        }
        let mut url = self.dialect.url(&self.bucket_url, call.key);
        for (n, (name, value)) in call.query.iter().enumerate() {
            url.push(if n == 0 { '?' } else { '&' });
            url.push_str(name);
            url.push('=');
            url.extend(utf8_percent_encode(value, PLAIN_IN_QUERY));
        }
        let mut request = Request::builder()
            .method(call.method.clone())
            .uri(url)
            .body(HttpRequestBody::from(call.body.clone()))
            .map_err(|error| wrong(error.to_string()))?;
        *request.headers_mut() = call.headers.clone();
        if matches!(call.method, Method::PUT | Method::POST) {
            request.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(call.body.len()));
        }
        self.dialect.authorize(&mut request).await?;
        Ok(request)
    }
}

/// Whether a server answered with a redirection that is not followed: because of the policy for redirections, or because
/// its target is no URL of HTTP.
fn is_not_followed(error: &HttpError) -> bool {
    let causes = std::iter::successors(std::error::Error::source(error), |cause| cause.source());
    let mut causes = causes.filter_map(|cause| cause.downcast_ref::<reqwest::Error>());
    causes.any(|cause| cause.is_redirect() || cause.is_builder())
}

/// Growing, jittered pauses, without an end.
fn pauses() -> ExponentialBuilder {
    ExponentialBuilder::default()
        .with_min_delay(FIRST_PAUSE)
        .with_max_delay(LONGEST_PAUSE)
        .without_max_times()
        .with_jitter()
}

/// Growing, jittered pauses, [`RETRIES`] of them.
pub(crate) fn few_pauses() -> ExponentialBackoff {
    pauses().with_max_times(RETRIES as usize).build()
}

/// Reads a short answer as a whole.
///
/// # Errors
/// `Corrupt` if it has more than `most_bytes`.
pub(crate) async fn short(body: Body, most_bytes: u64) -> Result<Bytes, StoreRefusal> {
    let (pieces, length) = collect(body, most_bytes).await?;
    if length as u64 > most_bytes {
        return Err(requests::garbled(format!("it is longer than {most_bytes} bytes")));
    }
    Ok(join(pieces, length))
}

/// Reads a body, and stops after more than `most_bytes`.
async fn collect(mut body: Body, most_bytes: u64) -> Result<(Vec<Bytes>, usize), StoreRefusal> {
    let (mut pieces, mut length) = (Vec::new(), 0);
    while let Some(piece) = body.try_next().await? {
        length += piece.len();
        pieces.push(piece);
        if length as u64 > most_bytes {
            break;
        }
    }
    Ok((pieces, length))
}

fn join(mut pieces: Vec<Bytes>, length: usize) -> Bytes {
    if pieces.len() == 1 {
        return pieces.remove(0);
    }
    let mut joined = BytesMut::with_capacity(length);
    pieces.iter().for_each(|piece| joined.extend_from_slice(piece));
    joined.freeze()
}

/// Removes secrets: HTTP errors name the whole URL.
pub(crate) fn without_secrets(text: &str) -> String {
    text.split(' ').map(|word| word.split_once('?').map_or(word, |(before, _)| before)).collect::<Vec<_>>().join(" ")
}
