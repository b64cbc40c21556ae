//! Content that was sent ahead of its object. It is beside the tree, and does not count against the capacity.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;

use crate::pool::{is_part_name, parts_len};
use crate::{Error, ErrorKind, Part, Piece, Pieces, PoolPath, Result, SentPart, Side};

use super::content::MemoryContent;
use super::tree::Outcome;
use super::{MemoryPool, arrived};

/// The parts that exist, by name.
#[derive(Debug, Default)]
pub(super) struct MemoryParts {
    parts: BTreeMap<String, MemoryPart>,
    /// Parts that were sent since the start.
    sent: u64,
}

#[derive(Debug)]
struct MemoryPart {
    content: MemoryContent,
    tag: String,
}

impl MemoryParts {
    fn find(&self, part: &SentPart) -> Outcome<&MemoryContent> {
        let found = self.parts.get(&part.name).ok_or(ErrorKind::NotFound)?;
        if (found.tag.as_str(), found.content.size()) != (part.tag.as_str(), part.len) {
            return Err(ErrorKind::Stale);
        }
        Ok(&found.content)
    }
}

impl MemoryPool {
    /// The names of the parts that were sent and not removed, sorted.
    pub fn parts(&self) -> Vec<String> {
        self.parts.lock().parts.keys().cloned().collect()
    }

    pub(super) async fn keep_part(&self, name: &str, len: u64, content: Pieces<'_>) -> Result<SentPart> {
        self.require_parts("send a part to")?;
        let pieces = arrived(len, content).await?;
        self.change_parts("send part", name, |kept| {
            kept.sent += 1;
            let tag = kept.sent.to_string();
            let part = MemoryPart { content: MemoryContent::from_pieces(len, pieces), tag: tag.clone() };
            kept.parts.insert(name.to_owned(), part);
            SentPart { name: name.to_owned(), len, tag }
        })
    }

    pub(super) fn read_kept_part(&self, part: &SentPart, range: Range<u64>) -> Result<Bytes> {
        self.require_parts("read a part from")?;
        if range.start > range.end {
            return Err(part_error("read part", &part.name, ErrorKind::InvalidInput));
        }
        let kept = self.parts.lock();
        let content = kept.find(part).map_err(|kind| part_error("read part", &part.name, kind))?;
        Ok(content.read(range))
    }

    pub(super) fn forget_part(&self, name: &str) -> Result<()> {
        self.require_parts("remove a part from")?;
        self.change_parts("remove part", name, |kept| {
            kept.parts.remove(name);
        })
    }

    /// The content that the parts are together.
    pub(super) async fn joined(&self, path: &PoolPath, parts: Vec<Part<'_>>) -> Result<(u64, Vec<Piece>)> {
        self.require(self.capabilities.parts_ahead.is_some(), "put parts of", path)?;
        let size = parts_len(&parts, self.capabilities.parts_ahead.unwrap_or(0)).ok_or_else(|| {
            let what = format!("put {path} in memory: a part that is not the last is too short, or all are too long");
            Error::new(ErrorKind::InvalidInput, Side::Pool, what)
        })?;
        let (mut all, mut at) = (Vec::new(), 0);
        for part in parts {
            let len = part.len();
            let pieces: Vec<Piece> = match part {
                Part::Sent(part) => {
                    let kept = self.parts.lock();
                    let content = kept.find(&part).map_err(|kind| part_error("put part", &part.name, kind))?;
                    content.pieces().collect()
                }
                Part::Here { len, content } => arrived(len, content).await?,
            };
            all.extend(pieces.into_iter().map(|piece| Piece { offset: at + piece.offset, ..piece }));
            at += len;
        }
        Ok((size, all))
    }

    fn require_parts(&self, what: &str) -> Result<()> {
        self.require(self.capabilities.parts_ahead.is_some(), what, &PoolPath::root())
    }

    fn change_parts<T>(&self, what: &str, name: &str, work: impl FnOnce(&mut MemoryParts) -> T) -> Result<T> {
        if self.capabilities.read_only {
            return Err(part_error(what, name, ErrorKind::ReadOnly));
        }
        if !is_part_name(name) {
            return Err(part_error(what, name, ErrorKind::InvalidInput));
        }
        Ok(work(&mut self.parts.lock()))
    }
}

fn part_error(what: &str, name: &str, kind: ErrorKind) -> Error {
    Error::new(kind, Side::Pool, format!("{what} {name} in memory"))
}
