//! Parses the content of a directory from WebDAV answers and index pages.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::{Stream, StreamExt, TryStreamExt, stream};
use html5gum::{IoReader, Token, Tokenizer};
use percent_encoding::percent_decode_str;
use quick_xml::events::Event;
use tokio::sync::mpsc;
use tokio_util::io::{StreamReader, SyncIoBridge};
use url::Url;

use crate::{ErrorKind, is_file_name};

use super::super::bounds::{
    WEB_DEPTH, WEB_LINK_BYTES, WEB_NAMES, WEB_PAGE_BYTES, WEB_RESOURCE_BYTES, WEB_TITLE_BYTES, WEB_TOKEN_BYTES,
};
use super::super::client::{self, Body, StoreRefusal};
use super::super::requests::garbled;
use super::NO_NAMES;

/// Names in one page.
const PAGE_NAMES: usize = 1_000;
/// Pages that wait for the reader of the listing.
const PAGES_AHEAD: usize = 2;

/// The format of a server's listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// WebDAV's answer to PROPFIND.
    MultiStatus,
    /// A page with links.
    Html,
}

/// A name in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PageEntry {
    pub(super) name: Vec<u8>,
    /// The server marks it as a directory.
    pub(super) collection: bool,
}

/// The names in an answer, each once, in pages, as they arrive. `base` is the URL of the directory, with a slash at
/// its end.
pub(super) fn names(
    body: Body,
    format: Format,
    base: Url,
) -> impl Stream<Item = Result<Vec<PageEntry>, StoreRefusal>> + Send {
    let (pages, waiting) = mpsc::channel(PAGES_AHEAD);
    // The request ends with its listing: the parser does not wait for the rest of the answer.
    let given_up = {
        let pages: mpsc::Sender<_> = pages.clone();
        async move { pages.closed().await }
    };
    let whole = body.map_err(|refusal| io::Error::other(refusal.message)).take_until(Box::pin(given_up));
    let (reader, piece) = Bounded::new(SyncIoBridge::new(StreamReader::new(whole)));
    let parser = tokio::task::spawn_blocking(move || {
        let mut found = Names { base, page: Vec::new(), seen: HashSet::new(), pages: pages.clone() };
        let read = match format {
            Format::MultiStatus => multi_status(reader, &piece, |href, collection| found.take(href, Some(collection))),
            Format::Html => html(reader, &piece, &mut found),
        };
        let last = read.map(|()| std::mem::take(&mut found.page));
        // The reader of the listing may be gone.
        let _ = pages.blocking_send(last);
    });
    stream::unfold((waiting, Some(parser)), |(mut waiting, parser)| async move {
        match waiting.recv().await {
            Some(page) => Some((page, (waiting, parser))),
            // A parser that panicked has not sent all names.
            None => Some((Err(garbled(parser?.await.err()?)), (waiting, None))),
        }
    })
}

/// Whether the answer to PROPFIND of one path says that it is a directory.
pub(super) async fn is_collection(body: Body) -> Result<bool, StoreRefusal> {
    let answer = client::short(body, WEB_RESOURCE_BYTES).await?;
    let (reader, piece) = Bounded::new(&answer[..]);
    let mut first = None;
    multi_status(reader, &piece, |_, collection| {
        first.get_or_insert(collection);
        Ok(true)
    })?;
    first.ok_or_else(|| garbled("no resource in WebDAV's answer"))
}

/// The bytes of a page, within bounds: parsers keep the current token in memory, whatever its length.
struct Bounded<R> {
    inner: R,
    left_bytes: u64,
    /// Bytes read since the last complete token.
    piece: Arc<AtomicU64>,
}

impl<R: Read> Bounded<R> {
    /// Also returns the count of the bytes of the current token, which the consumer of the tokens resets.
    fn new(inner: R) -> (Self, Arc<AtomicU64>) {
        let piece = Arc::new(AtomicU64::new(0));
        (Self { inner, left_bytes: WEB_PAGE_BYTES, piece: Arc::clone(&piece) }, piece)
    }
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let too_long = |what: &str| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        if self.left_bytes == 0 {
            return too_long("what the server says of the directory has no end within 256 MiB");
        }
        if self.piece.load(Ordering::Relaxed) > WEB_TOKEN_BYTES {
            return too_long("a tag or a text on the server's page has no end within 1 MiB");
        }
        let length = self.inner.read(buffer)?;
        self.left_bytes = self.left_bytes.saturating_sub(length as u64);
        self.piece.fetch_add(length as u64, Ordering::Relaxed);
        Ok(length)
    }
}

/// Why the answer could not be read to its end.
fn broken(error: &io::Error) -> StoreRefusal {
    // A retry would be too long again.
    let kind = if error.kind() == io::ErrorKind::InvalidData { ErrorKind::Corrupt } else { ErrorKind::Unavailable };
    StoreRefusal::local(kind, error.to_string())
}

/// The names found so far.
struct Names {
    base: Url,
    page: Vec<PageEntry>,
    /// Hashes of the names: pages may name one thing more than once.
    seen: HashSet<u64>,
    pages: mpsc::Sender<Result<Vec<PageEntry>, StoreRefusal>>,
}

impl Names {
    /// Takes a link if it names a child; returns `false` if no more names are wanted. Without `collection`, a slash
    /// marks a directory.
    fn take(&mut self, href: &str, collection: Option<bool>) -> Result<bool, StoreRefusal> {
        if href.len() > WEB_LINK_BYTES {
            return Ok(true);
        }
        let Some(mut name) = child(&self.base, href) else { return Ok(true) };
        name.collection = collection.unwrap_or(name.collection);
        let mut hasher = DefaultHasher::new();
        name.name.hash(&mut hasher);
        if !self.seen.insert(hasher.finish()) {
            return Ok(true);
        }
        if self.seen.len() > WEB_NAMES {
            return Err(garbled(format!("more than {WEB_NAMES} names in one directory")));
        }
        self.page.push(name);
        Ok(self.page.len() < PAGE_NAMES || self.pages.blocking_send(Ok(std::mem::take(&mut self.page))).is_ok())
    }
}

/// The direct child of `base` that a link names, if there is one.
fn child(base: &Url, href: &str) -> Option<PageEntry> {
    let url = base.join(href).ok()?;
    let same = (url.scheme(), url.host_str(), url.port_or_known_default())
        == (base.scheme(), base.host_str(), base.port_or_known_default());
    if !same || url.query().is_some() {
        return None;
    }
    let name = below(url.path(), base.path())?;
    let (name, slash) = name.strip_suffix('/').map_or((name, false), |name| (name, true));
    if name.contains('/') {
        return None;
    }
    let name: Vec<u8> = percent_decode_str(name).collect();
    is_file_name(&name).then_some(PageEntry { name, collection: slash })
}

/// The part of a path below the directory's path, which servers may encode differently.
fn below<'a>(path: &'a str, directory: &str) -> Option<&'a str> {
    if let Some(rest) = path.strip_prefix(directory) {
        return Some(rest);
    }
    let depth = directory.matches('/').count();
    let at = path.match_indices('/').nth(depth.checked_sub(1)?)?.0;
    let same = percent_decode_str(&path[..=at]).eq(percent_decode_str(directory));
    same.then(|| &path[at + 1..])
}

/// Calls `each` with the link and the kind of every resource, until it returns `false`.
fn multi_status(
    reader: impl Read,
    piece: &AtomicU64,
    mut each: impl FnMut(&str, bool) -> Result<bool, StoreRefusal>,
) -> Result<(), StoreRefusal> {
    let mut xml = quick_xml::Reader::from_reader(BufReader::new(reader));
    let mut buffer = Vec::new();
    let (mut href, mut collection, mut in_href, mut complete) = (String::new(), false, false, false);
    let mut depth = 0_usize;
    loop {
        buffer.clear();
        piece.store(0, Ordering::Relaxed);
        let event = match xml.read_event_into(&mut buffer) {
            Ok(event) => event,
            Err(quick_xml::Error::Io(error)) => return Err(broken(&error)),
            Err(error) => return Err(garbled(error)),
        };
        match &event {
            Event::Start(_) => depth += 1,
            Event::End(_) => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > WEB_DEPTH || href.len() > WEB_LINK_BYTES {
            return Err(garbled("elements without an end in WebDAV's answer"));
        }
        match event {
            Event::Start(tag) | Event::Empty(tag) if tag.local_name().as_ref() == b"collection" => collection = true,
            Event::Start(tag) => match tag.local_name().as_ref() {
                b"response" => (href, collection) = (String::new(), false),
                b"href" => in_href = href.is_empty(),
                _ => {}
            },
            Event::Text(text) if in_href => href.push_str(&text.decode().map_err(garbled)?),
            Event::GeneralRef(entity) if in_href => {
                let text = match entity.resolve_char_ref().map_err(garbled)? {
                    Some(character) => character.to_string(),
                    None => {
                        let name = entity.decode().map_err(garbled)?;
                        quick_xml::escape::resolve_xml_entity(&name).unwrap_or_default().to_owned()
                    }
                };
                href.push_str(&text);
            }
            Event::End(tag) => match tag.local_name().as_ref() {
                b"href" => in_href = false,
                b"response" if !each(href.trim(), collection)? => return Ok(()),
                b"multistatus" => complete = true,
                _ => {}
            },
            Event::Eof if complete => return Ok(()),
            Event::Eof => return Err(garbled("WebDAV's answer has no end")),
            _ => {}
        }
    }
}

/// Takes the links of a page. A page without a link to a child is valid only if its title is that of an index.
fn html(reader: impl Read, piece: &AtomicU64, found: &mut Names) -> Result<(), StoreRefusal> {
    let (mut title, mut in_title) = (Vec::new(), false);
    for token in Tokenizer::new(IoReader::new(reader)) {
        piece.store(0, Ordering::Relaxed);
        match token.map_err(|error| broken(&error))? {
            Token::StartTag(tag) if *tag.name == b"a"[..] => {
                let href = tag.attributes.get(&b"href"[..]).map(|href| String::from_utf8_lossy(href));
                if let Some(href) = href
                    && !found.take(&href, None)?
                {
                    return Ok(());
                }
            }
            Token::StartTag(tag) => in_title = *tag.name == b"title"[..],
            Token::String(text) if in_title => {
                let room = WEB_TITLE_BYTES.saturating_sub(title.len()).min(text.len());
                title.extend_from_slice(&text[..room]);
            }
            Token::EndTag(_) => in_title = false,
            _ => {}
        }
    }
    let title = String::from_utf8_lossy(&title).trim().to_ascii_lowercase();
    let is_index = title.starts_with("index of") || title.starts_with("directory listing");
    if found.seen.is_empty() && !is_index {
        return Err(StoreRefusal::local(ErrorKind::Unsupported, NO_NAMES.to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_listing_whose_parser_panics_is_an_error_and_not_an_end() {
        let mut pieces = vec!["<html><title>Index of /</title><a href=\"f\">f</a>"].into_iter();
        let body = stream::poll_fn(move |_| match pieces.next() {
            Some(piece) => std::task::Poll::Ready(Some(Ok(bytes::Bytes::from_static(piece.as_bytes())))),
            None => panic!("as a parser would"),
        });
        let base = Url::parse("http://localhost/").unwrap();
        let read: Result<Vec<_>, _> = names(body.boxed(), Format::Html, base).try_collect().await;
        assert!(read.unwrap_err().is(ErrorKind::Corrupt));
    }
}
