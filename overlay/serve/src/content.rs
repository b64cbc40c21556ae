//! The pool's files for any HTTP client: read-only, in the versions that the engine has.

mod conditions;
mod directory;
mod open_files;
mod path;
pub(crate) mod ranges;
pub(crate) mod reply;

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use forebay_backends::{Error, ErrorKind};
use forebay_engine::{Overlay, ServedFile, UserGroups};
use futures::{StreamExt, stream};
use http::header::{self, HeaderValue};
use http::{HeaderMap, Method, Response, StatusCode};

use self::conditions::Decision;
pub(crate) use self::conditions::Validators;
use self::open_files::{AnswerOrigin, Found, OpenFile, ServedFiles};
pub(crate) use self::path::check_escapes;
pub use self::path::{RequestPath, parse};
pub(crate) use self::ranges::{Selection, Wanted};
use crate::body::ReplyBody;
use crate::cache_status::CacheStatus;
use crate::send_budget::ResponseBudget;
use crate::transport::{Mapped, MappedOwner, Windows};

/// The methods that are answered.
pub(crate) const METHODS: &str = "GET, HEAD, OPTIONS";
/// Bodies up to this length are one read and one write: a copy of so few bytes costs less than `sendfile`.
const COPIED_BYTES: u64 = 32 << 10;
/// What a client may keep of a file that never changes: RFC 9111 suggests no more than a year.
const IMMUTABLE: &str = "public, max-age=31536000, immutable";
/// When a client may try again if the pool does not answer, in seconds.
const RETRY_SECONDS: u32 = 5;

/// How content is served.
#[derive(Debug, Clone)]
pub struct ContentOptions {
    /// Clients may read what this user may read.
    pub user: UserGroups,
    /// Whether directories are listed.
    pub listings: bool,
    /// How long a file is still served after its time is over, while the pool is asked (RFC 5861).
    pub stale_while_revalidate: Duration,
}

/// The files of one pool.
pub struct PoolContent {
    files: ServedFiles,
    overlay: Overlay,
    options: ContentOptions,
}

/// A GET or HEAD request for a path.
pub(crate) struct GetRequest<'a> {
    pub method: &'a Method,
    pub path: &'a str,
    pub query: Option<&'a str>,
    pub headers: &'a HeaderMap,
    /// Where a body may be lent to.
    pub windows: Option<&'a Windows>,
    /// The room for pieces that are read.
    pub budget: &'a ResponseBudget,
}

impl PoolContent {
    /// Needs a tokio runtime.
    pub fn new(overlay: Overlay, options: ContentOptions) -> Self {
        let files = ServedFiles::new(overlay.clone(), options.user.clone(), options.stale_while_revalidate);
        Self { files, overlay, options }
    }

    pub(crate) async fn answer(&self, parsed: RequestPath, wish: GetRequest<'_>) -> Response<ReplyBody> {
        let found = match self.files.open(&parsed.path).await {
            Ok(found) => found,
            Err(error) => return failed(&error),
        };
        match found {
            Found::File { .. } if parsed.is_directory => reply::text(StatusCode::NOT_FOUND, "no such file"),
            Found::File { file, origin, confirmed } => self.file(&file, (origin, confirmed), &wish).await,
            Found::Directory(_) if !self.options.listings => {
                reply::text(StatusCode::FORBIDDEN, "this is a directory, and directories are not listed")
            }
            Found::Directory(_) if !parsed.is_directory => path::with_slash(wish.path, wish.query),
            Found::Directory(dir) => match self.overlay.list_served(dir, &self.options.user).await {
                Ok(entries) => directory::page(wish.path, wish.query, wish.headers, &entries),
                Err(error) => failed(&error),
            },
        }
    }

    /// Closes files that were not used for a while.
    pub(crate) fn tidy(&self) {
        self.files.tidy(Instant::now());
    }

    /// Closes all files: the engine is asked again about them, and their content can be evicted.
    pub(crate) fn forget_all(&self) {
        self.files.forget_all();
    }

    async fn file(
        &self,
        file: &Arc<OpenFile>,
        (origin, confirmed): (AnswerOrigin, Option<Instant>),
        wish: &GetRequest<'_>,
    ) -> Response<ReplyBody> {
        let size = file.served.size;
        let mut response = Response::new(ReplyBody::empty());
        describe(file, (origin, confirmed), &mut response);
        let version = Validators { etag: Some(&file.etag), modified: Some(file.modified) };
        let wanted = match wanted(wish.method, wish.headers, version, size) {
            Ok(wanted) => wanted,
            Err(status) => {
                *response.status_mut() = status;
                return response;
            }
        };
        response.headers_mut().insert(header::CONTENT_TYPE, file.content_type.clone());
        let Some(Selection { parts, length }) = ranges::select(wanted, size, &mut response) else { return response };
        if !matches!(origin, AnswerOrigin::Fresh | AnswerOrigin::Stale) {
            let mut wanted = parts.iter().map(|(_, range)| range.clone()).filter(|range| !range.is_empty());
            let hit = origin != AnswerOrigin::Fetched && wanted.all(|range| file.served.has(range));
            match (hit, origin) {
                (false, _) => CacheStatus::MISS.set(&mut response),
                (true, AnswerOrigin::Pool) => CacheStatus::CONFIRMED.set(&mut response),
                (true, _) => {}
            }
        }
        if *wish.method == Method::HEAD || length == 0 {
            return response;
        }
        match body(file, parts, length, (wish.windows, wish.budget)).await {
            Ok(body) => *response.body_mut() = body,
            Err(error) => return failed(&error),
        }
        response
    }
}

/// Sets the headers that describe a version, in all responses about it.
fn describe(file: &OpenFile, (origin, confirmed): (AnswerOrigin, Option<Instant>), response: &mut Response<ReplyBody>) {
    let headers = response.headers_mut();
    headers.insert(header::ETAG, file.etag_value.clone());
    headers.insert(header::LAST_MODIFIED, file.last_modified.clone());
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    let age = confirmed.map(|at| at.elapsed().as_secs());
    let status = match (file.served.fresh_for, origin) {
        (None, _) => {
            headers.insert(header::CACHE_CONTROL, HeaderValue::from_static(IMMUTABLE));
            CacheStatus::HIT
        }
        (Some(Duration::ZERO), _) => {
            headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
            if origin == AnswerOrigin::Unconfirmed { CacheStatus::POOL_FAILS } else { CacheStatus::CONFIRMED }
        }
        (Some(ttl), origin) => {
            // A cache that keeps what is not confirmed must ask before the next use.
            let control = match origin {
                AnswerOrigin::Unconfirmed => HeaderValue::from_static("no-cache"),
                _ => reply::value(format!("max-age={}", ttl.as_secs())),
            };
            headers.insert(header::CACHE_CONTROL, control);
            if let Some(age) = age {
                headers.insert(header::AGE, HeaderValue::from(age));
            }
            match origin {
                AnswerOrigin::Stale => CacheStatus::STALE,
                AnswerOrigin::Unconfirmed => CacheStatus::POOL_FAILS,
                _ => CacheStatus::fresh_for(ttl.as_secs().saturating_sub(age.unwrap_or(0)).cast_signed()),
            }
        }
    };
    status.set(response);
}

/// Returns what a GET or HEAD request wants of a version, or the status of a response without content.
pub(crate) fn wanted(
    method: &Method,
    headers: &HeaderMap,
    version: Validators<'_>,
    size: u64,
) -> Result<Wanted, StatusCode> {
    let range = match conditions::decide(headers, version) {
        Decision::Failed => return Err(StatusCode::PRECONDITION_FAILED),
        Decision::NotModified => return Err(StatusCode::NOT_MODIFIED),
        Decision::Send { ranges } => ranges.then(|| headers.get(header::RANGE)).flatten(),
    };
    Ok(range.filter(|_| method == Method::GET).map_or(Wanted::Whole, |range| ranges::wanted(range, size)))
}

/// An open file of which responses have a part.
pub(crate) trait BodySource: MappedOwner {
    fn served(&self) -> &ServedFile;
}

impl BodySource for OpenFile {
    fn served(&self) -> &ServedFile {
        &self.served
    }
}

/// Returns the mapping of a file, if all of it is resident.
pub(crate) fn lendable(file: &ServedFile) -> Option<Mapped> {
    let content = file.resident()?;
    match Mapped::new(content.file.clone()) {
        Ok(mapped) if mapped.len() >= file.size => Some(mapped),
        Ok(_) => None,
        Err(error) => {
            tracing::warn!("a content file cannot be mapped, and is read instead: {error}");
            None
        }
    }
}

/// Returns the body of parts, each with a head. Reads the first bytes before the response begins, so that an error can
/// still be told.
pub(crate) async fn body<T: BodySource>(
    file: &Arc<T>,
    parts: Vec<(Bytes, std::ops::Range<u64>)>,
    length: u64,
    (windows, budget): (Option<&Windows>, &ResponseBudget),
) -> Result<ReplyBody, Error> {
    if let [(head, range)] = &parts[..]
        && head.is_empty()
    {
        let bytes = range.end - range.start;
        if bytes > COPIED_BYTES
            && let Some(lent) = lend(file, range, windows)
        {
            return Ok(ReplyBody::from(lent));
        }
        let room = budget.room(bytes).await;
        let first = file.served().read(range.start, room.bytes()).await?;
        let rest = range.start + first.len() as u64..range.end;
        let first = room.hold(first);
        if rest.is_empty() {
            return Ok(ReplyBody::from(first));
        }
        let pieces = stream::iter([Ok(first)]).chain(pieces(file.clone(), rest, budget.clone()));
        return Ok(ReplyBody::pieces(pieces, Some(length)));
    }
    let (file, windows, budget) = (file.clone(), windows.cloned(), budget.clone());
    let pieces = stream::iter(parts).flat_map(move |(head, range)| {
        let head = stream::iter((!head.is_empty()).then_some(Ok(head)));
        let content = match lend(&file, &range, windows.as_ref()) {
            Some(lent) => stream::iter([Ok(lent)]).boxed(),
            None => pieces(file.clone(), range, budget.clone()).boxed(),
        };
        head.chain(content)
    });
    Ok(ReplyBody::pieces(pieces, Some(length)))
}

fn lend<T: BodySource>(file: &Arc<T>, range: &std::ops::Range<u64>, windows: Option<&Windows>) -> Option<Bytes> {
    let lent = windows?.lend(file, range.start, range.end - range.start)?;
    file.served().count_sent(range.end - range.start);
    Some(lent)
}

/// Reads a range piece by piece.
fn pieces<T: BodySource>(
    file: Arc<T>,
    range: std::ops::Range<u64>,
    budget: ResponseBudget,
) -> impl futures::Stream<Item = io::Result<Bytes>> + Send + 'static {
    stream::try_unfold((file, range, budget), |(file, range, budget)| async move {
        if range.is_empty() {
            return Ok(None);
        }
        let room = budget.room(range.end - range.start).await;
        let piece = file.served().read(range.start, room.bytes()).await.map_err(|error| {
            tracing::warn!("a response ends early: {error}");
            io::Error::other(error)
        })?;
        if piece.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let rest = range.start + piece.len() as u64..range.end;
        Ok(Some((room.hold(piece), (file, rest, budget))))
    })
}

/// Returns the response for an error. What the pool said stays in the log.
pub(crate) fn failed(error: &Error) -> Response<ReplyBody> {
    let (status, why) = match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotDirectory | ErrorKind::NameTooLong | ErrorKind::InvalidInput => {
            (StatusCode::NOT_FOUND, "no such file")
        }
        ErrorKind::Os(errno) if errno == rustix::io::Errno::LOOP.raw_os_error() => {
            (StatusCode::NOT_FOUND, "no such file")
        }
        ErrorKind::PermissionDenied | ErrorKind::NotPermitted => (StatusCode::FORBIDDEN, "not allowed"),
        ErrorKind::Timeout => (StatusCode::GATEWAY_TIMEOUT, "the pool did not answer in time"),
        ErrorKind::Unavailable => (StatusCode::SERVICE_UNAVAILABLE, "the pool does not answer"),
        ErrorKind::Stale | ErrorKind::Busy => (StatusCode::SERVICE_UNAVAILABLE, "the file changes at this moment"),
        _ => (StatusCode::BAD_GATEWAY, "the pool answered with an error"),
    };
    if status.is_server_error() {
        tracing::warn!("{status}: {error}");
    }
    let mut response = reply::text(status, why);
    if status == StatusCode::SERVICE_UNAVAILABLE || status == StatusCode::GATEWAY_TIMEOUT {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(RETRY_SECONDS));
    }
    response
}
