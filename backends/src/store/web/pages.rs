//! What is in a directory, from what a server writes of it: WebDAV's answers and index pages.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, BufReader, Read};

use futures::{Stream, TryStreamExt, stream};
use html5gum::{IoReader, Token, Tokenizer};
use percent_encoding::percent_decode_str;
use quick_xml::events::Event;
use tokio::sync::mpsc;
use tokio_util::io::{StreamReader, SyncIoBridge};
use url::Url;

use crate::ErrorKind;

use super::super::client::{Body, Refusal};
use super::super::requests::garbled;
use super::NO_NAMES;

/// Names in one page.
const PAGE_NAMES: usize = 1_000;
/// Pages that wait for who asked.
const PAGES_AHEAD: usize = 2;

/// How a server says what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// WebDAV's answer to PROPFIND.
    MultiStatus,
    /// A page with links.
    Html,
}

/// A name in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Name {
    pub(super) name: Vec<u8>,
    /// It is said to be a directory.
    pub(super) collection: bool,
}

/// The names in an answer, each once, in pages, as it comes. `base` is the URL of the directory, with a slash at its end.
pub(super) fn names(body: Body, format: Format, base: Url) -> impl Stream<Item = Result<Vec<Name>, Refusal>> + Send {
    let (pages, waiting) = mpsc::channel(PAGES_AHEAD);
    let reader = reader(body);
    // It ends with the body, or when nobody listens any more.
    tokio::task::spawn_blocking(move || {
        let mut found = Names { base, page: Vec::new(), seen: HashSet::new(), pages: pages.clone() };
        let read = match format {
            Format::MultiStatus => multi_status(reader, |href, collection| found.take(href, Some(collection))),
            Format::Html => html(reader, &mut found),
        };
        let last = read.map(|()| std::mem::take(&mut found.page));
        // Nobody may be there any more who wants to know.
        let _ = pages.blocking_send(last);
    });
    stream::unfold(waiting, |mut waiting| async move { Some((waiting.recv().await?, waiting)) })
}

/// Whether the answer to PROPFIND of one path says that it is a directory.
pub(super) async fn is_collection(body: Body) -> Result<bool, Refusal> {
    let reader = reader(body);
    let read = tokio::task::spawn_blocking(move || {
        let mut first = None;
        multi_status(reader, |_, collection| {
            first.get_or_insert(collection);
            true
        })?;
        first.ok_or_else(|| garbled("no resource in WebDAV's answer"))
    });
    read.await.unwrap_or_else(|error| Err(Refusal::local(ErrorKind::Unavailable, error.to_string())))
}

fn reader(body: Body) -> impl Read + Send + 'static {
    SyncIoBridge::new(StreamReader::new(body.map_err(|refusal| io::Error::other(refusal.message))))
}

/// Why it could not be read to its end.
fn broken(error: io::Error) -> Refusal {
    Refusal::local(ErrorKind::Unavailable, error.to_string())
}

/// What was found so far.
struct Names {
    base: Url,
    page: Vec<Name>,
    /// By what they hash to: pages may name one thing more than once.
    seen: HashSet<u64>,
    pages: mpsc::Sender<Result<Vec<Name>, Refusal>>,
}

impl Names {
    /// Takes a link where it is one to a child; `false` where nobody wants more. Without `collection` a slash says it.
    fn take(&mut self, href: &str, collection: Option<bool>) -> bool {
        let Some(mut name) = child(&self.base, href) else { return true };
        name.collection = collection.unwrap_or(name.collection);
        let mut hasher = DefaultHasher::new();
        name.name.hash(&mut hasher);
        if !self.seen.insert(hasher.finish()) {
            return true;
        }
        self.page.push(name);
        self.page.len() < PAGE_NAMES || self.pages.blocking_send(Ok(std::mem::take(&mut self.page))).is_ok()
    }
}

/// The direct child of `base` that a link names, if it does.
fn child(base: &Url, href: &str) -> Option<Name> {
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
    let legal = !name.is_empty() && name != b"." && name != b".." && !name.contains(&b'/') && !name.contains(&0);
    legal.then_some(Name { name, collection: slash })
}

/// What a path has behind that of the directory, which servers may encode in another way.
fn below<'a>(path: &'a str, directory: &str) -> Option<&'a str> {
    if let Some(rest) = path.strip_prefix(directory) {
        return Some(rest);
    }
    let depth = directory.matches('/').count();
    let at = path.match_indices('/').nth(depth.checked_sub(1)?)?.0;
    let same = percent_decode_str(&path[..=at]).eq(percent_decode_str(directory));
    same.then(|| &path[at + 1..])
}

/// Calls `each` with the link and the kind of every resource, until it says `false`.
fn multi_status(reader: impl Read, mut each: impl FnMut(&str, bool) -> bool) -> Result<(), Refusal> {
    let mut xml = quick_xml::Reader::from_reader(BufReader::new(reader));
    let mut buffer = Vec::new();
    let (mut href, mut collection, mut in_href, mut complete) = (String::new(), false, false, false);
    loop {
        buffer.clear();
        let event = match xml.read_event_into(&mut buffer) {
            Ok(event) => event,
            Err(quick_xml::Error::Io(error)) => return Err(Refusal::local(ErrorKind::Unavailable, error.to_string())),
            Err(error) => return Err(garbled(error)),
        };
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
                b"response" if !each(href.trim(), collection) => return Ok(()),
                b"multistatus" => complete = true,
                _ => {}
            },
            Event::Eof if complete => return Ok(()),
            Event::Eof => return Err(garbled("WebDAV's answer has no end")),
            _ => {}
        }
    }
}

/// Takes the links of a page. One without a link to a child counts only where its title says what it is.
fn html(reader: impl Read, found: &mut Names) -> Result<(), Refusal> {
    let (mut title, mut in_title) = (Vec::new(), false);
    for token in Tokenizer::new(IoReader::new(reader)) {
        match token.map_err(broken)? {
            Token::StartTag(tag) if *tag.name == b"a"[..] => {
                let href = tag.attributes.get(&b"href"[..]).map(|href| String::from_utf8_lossy(href));
                if let Some(href) = href
                    && !found.take(&href, None)
                {
                    return Ok(());
                }
            }
            Token::StartTag(tag) => in_title = *tag.name == b"title"[..],
            Token::String(text) if in_title => title.extend_from_slice(&text),
            Token::EndTag(_) => in_title = false,
            _ => {}
        }
    }
    let title = String::from_utf8_lossy(&title).trim().to_ascii_lowercase();
    let is_index = title.starts_with("index of") || title.starts_with("directory listing");
    if found.seen.is_empty() && !is_index {
        return Err(Refusal::local(ErrorKind::Unsupported, NO_NAMES.to_owned()));
    }
    Ok(())
}
