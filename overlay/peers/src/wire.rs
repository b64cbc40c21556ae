//! Requests between nodes: HTTP/1.1, `GET /peer/v1/content/PATH`, `POST /peer/v1/changed` with a path in each line, and
//! `POST /peer/v1/stage`, whose content and answer are lines as those of the control socket: a request to stage, and replies.
//!
//! Content comes in frames: its length and its CRC-32C, each 4 bytes with the highest first, and then the bytes of one chunk. A
//! frame of length 0 has no bytes: with checksum 0 it says that the node is still waiting for the pool, and with a higher one
//! that no more comes, and why ([`PassOver`] by its place, from 1).

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use forebay_backends::{PoolPath, Time, Version, is_file_name};
use forebay_cluster::{NodeId, PassOver, Purpose, range_of};
use forebay_engine::Loan;
use forebay_serve::REQUEST_HEAD_BYTES;
use http::HeaderMap;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode, percent_decode_str, percent_encode};
use smallvec::SmallVec;

/// Where requests begin.
pub const PREFIX: &str = "/peer/v1/content/";

pub const NODE: &str = "forebay-node";
pub const MEMBERS: &str = "forebay-members";
pub const PURPOSE: &str = "forebay-purpose";
/// Owners that could not answer, separated by commas.
pub const PASSED: &str = "forebay-passed";
/// Why a node refuses.
pub const PASSED_OVER: &str = "forebay-passed-over";
/// Nodes that have the range, separated by commas.
pub const HOLDERS: &str = "forebay-holders";
/// When to ask again, in milliseconds: `Retry-After` has no fractions of a second.
pub const RETRY_AFTER_MS: &str = "forebay-retry-after-ms";

const FETCH: &str = "fetch";
const IF_RESIDENT: &str = "if-resident";

/// What need not be escaped in a path or in a header.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'/').remove(b'-').remove(b'_').remove(b'.');

/// Bytes of the head of a request beside the path, the version and the token: names of five nodes at most, an address, numbers
/// and the names of the headers.
const REST_OF_HEAD_BYTES: usize = 4 << 10;

/// The length of the head of a frame.
const HEAD_BYTES: usize = 8;

/// Where announcements go.
pub const ANNOUNCE_PATH: &str = "/peer/v1/changed";
/// The most bytes of one announcement.
pub const ANNOUNCED_BYTES: usize = 64 << 10;

/// Where requests to stage go.
pub const STAGE_PATH: &str = "/peer/v1/stage";
/// The most bytes of a request to stage: room for some ten thousand paths.
pub const STAGE_BYTES: usize = 8 << 20;
/// A node that stages says something at least so often.
pub const STAGE_ALIVE_EVERY: Duration = Duration::from_secs(2);
/// A node that stages and says nothing for so long is given up.
pub const STAGE_SILENCE: Duration = Duration::from_secs(15);
/// The most bytes of a line of its answer: a path, escaped, and the reason why it is not staged.
pub const STAGE_LINE_BYTES: usize = 256 << 10;

/// Returns the line of a path in an announcement.
pub fn announcement(path: &PoolPath) -> String {
    format!("{}\n", percent_encode(path.as_bytes(), ESCAPED))
}

/// Returns the paths of an announcement, without those that no file can have.
pub fn announced(body: &[u8]) -> Vec<PoolPath> {
    let lines = body.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let paths = lines.filter_map(|line| PoolPath::parse(percent_decode(line).collect::<Vec<u8>>()));
    let can_be = |path: &PoolPath| !path.is_root() && !path.is_reserved() && path.components().all(is_file_name);
    paths.filter(can_be).collect()
}

/// Returns the path of a request for a file.
pub fn target(path: &PoolPath) -> String {
    format!("{PREFIX}{}", percent_encode(path.as_bytes(), ESCAPED))
}

/// Returns whether the door of another node takes the head of a request for a file. The escaped path of a file in deep
/// directories may be longer than a whole head.
pub fn fits_in_head(path: &PoolPath, version: &Version, token: &str) -> bool {
    let escaped: usize = percent_encode(path.as_bytes(), ESCAPED).map(str::len).sum();
    PREFIX.len() + escaped + tag_of(version).len() + token.len() <= REQUEST_HEAD_BYTES - REST_OF_HEAD_BYTES
}

/// Returns the file for which the path of a request asks.
pub fn file_of(target: &str) -> Option<PoolPath> {
    let path: Vec<u8> = percent_decode_str(target.strip_prefix(PREFIX)?).collect();
    PoolPath::parse(path).filter(|path| !path.is_root() && !path.is_reserved())
}

/// Returns a version as an entity tag.
pub fn tag_of(version: &Version) -> String {
    let text = serde_json::to_vec(version).unwrap_or_default();
    format!("\"{}\"", percent_encode(&text, ESCAPED))
}

/// Returns the version of an entity tag.
pub fn version_of(tag: &str) -> Option<Version> {
    let text: Vec<u8> = percent_decode_str(tag.strip_prefix('"')?.strip_suffix('"')?).collect();
    serde_json::from_slice(&text).ok()
}

/// Returns whether the versions that two nodes know are of the same content. The number of a device differs from node to node;
/// times of an object store may be known to one of them only.
pub fn is_same_version(ours: &Version, theirs: &Version) -> bool {
    match (ours, theirs) {
        (
            Version::Inode { ino, born, mtime, ctime, size, .. },
            Version::Inode { ino: ino2, born: born2, mtime: mtime2, ctime: ctime2, size: size2, .. },
        ) => {
            // Zero: the file system does not tell a node when an object was created.
            let tells = |time: &Time| *time != Time::default();
            let born = born == born2 || !tells(born) || !tells(born2);
            born && (ino, mtime, ctime, size) == (ino2, mtime2, ctime2, size2)
        }
        _ => ours.same_content(theirs),
    }
}

/// A request, as its head says it.
#[derive(Debug, Clone)]
pub struct PeerRequest {
    pub from: NodeId,
    pub version: Version,
    pub range: Range<u64>,
    pub purpose: Purpose,
    pub passed: SmallVec<[NodeId; 3]>,
    /// The fingerprint of the members that the reader sees.
    pub members: u64,
}

impl PeerRequest {
    /// Returns the headers of a request.
    pub fn headers(&self) -> Vec<(&'static str, String)> {
        let purpose = match self.purpose {
            Purpose::Fetch => FETCH,
            Purpose::IfResident => IF_RESIDENT,
        };
        vec![
            (NODE, self.from.to_string()),
            (MEMBERS, format!("{:016x}", self.members)),
            (PURPOSE, purpose.to_owned()),
            (PASSED, names(&self.passed)),
            ("range", format!("bytes={}-{}", self.range.start, self.range.end.saturating_sub(1))),
            ("if-match", tag_of(&self.version)),
        ]
    }

    /// # Errors
    /// What is wrong with the request.
    pub fn parse(headers: &HeaderMap) -> Result<Self, &'static str> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let from = text(NODE).and_then(|name| NodeId::new(name).ok()).ok_or("forebay-node: no identity of a node")?;
        let version = text("if-match").and_then(version_of).ok_or("if-match: no version")?;
        let range = text("range").and_then(range_in).ok_or("range: no range of bytes")?;
        if !range.start.is_multiple_of(Loan::CHUNK_BYTES) || range.end > version.size() {
            return Err("range: it begins at a chunk, and ends in the file");
        }
        if !range.end.is_multiple_of(Loan::CHUNK_BYTES) && range.end != version.size() {
            return Err("range: it ends with a chunk");
        }
        if range_of(range.start) != range_of(range.end - 1) {
            return Err("range: it lies in one range with owners of its own");
        }
        let purpose = match text(PURPOSE) {
            Some(FETCH) => Purpose::Fetch,
            Some(IF_RESIDENT) => Purpose::IfResident,
            _ => return Err("forebay-purpose: fetch or if-resident"),
        };
        let members = text(MEMBERS).and_then(|text| u64::from_str_radix(text, 16).ok()).unwrap_or_default();
        let passed = nodes_in(text(PASSED).unwrap_or_default()).into_iter().collect();
        Ok(Self { from, version, range, purpose, passed, members })
    }

    /// The version as a key for equal versions.
    pub fn version_key(&self) -> Arc<str> {
        tag_of(&self.version).into()
    }
}

fn range_in(text: &str) -> Option<Range<u64>> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    (first <= last).then_some(first..last.checked_add(1)?)
}

/// Returns identities, separated by commas.
pub fn names(nodes: &[NodeId]) -> String {
    nodes.iter().map(NodeId::as_str).collect::<Vec<_>>().join(",")
}

/// Returns the identities in a list; the most that a node names.
pub fn nodes_in(text: &str) -> Vec<NodeId> {
    text.split(',').take(forebay_cluster::HOLDERS_NAMED).filter_map(|name| NodeId::new(name.trim()).ok()).collect()
}

/// Returns the reason of this name.
pub fn reason_in(text: &str) -> Option<PassOver> {
    PassOver::ALL.into_iter().find(|why| why.as_str() == text)
}

/// A frame without bytes: the node still waits for the pool.
pub fn waiting_frame() -> Bytes {
    head(0, 0)
}

/// The last frame: no more comes.
pub fn refusing_frame(why: PassOver) -> Bytes {
    head(0, why as u32 + 1)
}

/// Returns the head of the frame of a chunk; its bytes follow.
pub fn chunk_frame(bytes: &Bytes, checksum: u32) -> Bytes {
    head(bytes.len() as u32, checksum)
}

fn head(length: u32, checksum: u32) -> Bytes {
    let mut head = BytesMut::with_capacity(HEAD_BYTES);
    head.put_u32(length);
    head.put_u32(checksum);
    head.freeze()
}

/// What a frame says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerFrame {
    Waiting,
    Chunk(Bytes),
    Refused(PassOver),
}

/// What the head of a frame says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameHead {
    Waiting,
    /// The bytes of a chunk follow, with this checksum.
    Chunk(u32),
    Refused(PassOver),
}

/// Cuts what arrives into frames.
#[derive(Debug, Default)]
pub struct FrameReader {
    pending: BytesMut,
}

impl FrameReader {
    pub fn arrived(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    /// Whether all that arrived was taken.
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Returns what the head of the next frame says, as soon as it has come. The frame is not taken. `due`: the length that a
    /// chunk must have now.
    ///
    /// # Errors
    /// `Damaged`: another length.
    pub fn head(&self, due: u64) -> Result<Option<FrameHead>, PassOver> {
        let Some(mut head) = self.pending.get(..HEAD_BYTES) else { return Ok(None) };
        let (length, checksum) = (head.get_u32(), head.get_u32());
        match (length, checksum) {
            (0, 0) => Ok(Some(FrameHead::Waiting)),
            (0, place) => match PassOver::ALL.get(place as usize - 1) {
                Some(why) => Ok(Some(FrameHead::Refused(*why))),
                None => Err(PassOver::Damaged),
            },
            (length, checksum) if u64::from(length) == due => Ok(Some(FrameHead::Chunk(checksum))),
            _ => Err(PassOver::Damaged),
        }
    }

    /// Takes the next frame, if it is complete. `due`: the length that a chunk must have now.
    ///
    /// # Errors
    /// `Damaged`: another length, or another checksum.
    pub fn next(&mut self, due: u64) -> Result<Option<PeerFrame>, PassOver> {
        let checksum = match self.head(due)? {
            None => return Ok(None),
            Some(FrameHead::Chunk(checksum)) => checksum,
            Some(FrameHead::Waiting) => {
                self.pending.advance(HEAD_BYTES);
                return Ok(Some(PeerFrame::Waiting));
            }
            Some(FrameHead::Refused(why)) => {
                self.pending.advance(HEAD_BYTES);
                return Ok(Some(PeerFrame::Refused(why)));
            }
        };
        let (length, whole) = (due as usize, HEAD_BYTES + due as usize);
        if self.pending.len() < whole {
            self.pending.reserve(whole - self.pending.len());
            return Ok(None);
        }
        self.pending.advance(HEAD_BYTES);
        let bytes = self.pending.split_to(length).freeze();
        if crc32c::crc32c(&bytes) != checksum {
            return Err(PassOver::Damaged);
        }
        Ok(Some(PeerFrame::Chunk(bytes)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tag(etag: &str) -> Version {
        Version::Tag { etag: etag.into(), id: String::new(), size: 5 << 20, mtime: Time { secs: 7, nanos: 9 } }
    }

    #[test]
    fn a_request_is_read_as_it_was_sent() {
        let from = NodeId::new("n1").unwrap();
        let passed = [NodeId::new("n2").unwrap()].into_iter().collect();
        let version = tag("\"a, \u{e9}\n\"");
        let range = 1 << 20..5 << 20;
        let sent = PeerRequest { from, version, range, purpose: Purpose::Fetch, passed, members: 77 };
        let headers: HeaderMap = sent
            .headers()
            .into_iter()
            .map(|(name, value)| (name.parse::<http::HeaderName>().unwrap(), value.parse().unwrap()))
            .collect();
        let got = PeerRequest::parse(&headers).unwrap();
        assert_eq!((&got.version, &got.range, got.members), (&sent.version, &sent.range, 77));
        assert_eq!((got.from, got.passed, got.purpose), (sent.from, sent.passed, Purpose::Fetch));
        for (name, value) in
            [("range", "bytes=5-9"), ("range", "bytes=0-9"), ("range", "bytes=1048576-9999999"), ("if-match", "*")]
        {
            let mut bad = headers.clone();
            bad.insert(name, value.parse().unwrap());
            PeerRequest::parse(&bad).unwrap_err();
        }
    }

    #[test]
    fn a_path_is_read_as_it_was_sent_and_reserved_ones_are_refused() {
        let path = PoolPath::parse("a b/\u{e9}%/c?d#e").unwrap();
        assert_eq!(file_of(&target(&path)).unwrap(), path);
        for bad in ["", "/", "..", "a/../b", ".forebay~x", "a%2f..%2f..%2fb"] {
            assert_eq!(file_of(&format!("{PREFIX}{bad}")), None, "{bad}");
        }
    }

    /// The listener counts the whole head.
    #[test]
    fn a_request_that_fits_is_no_longer_than_the_head_that_a_door_takes() {
        let node = NodeId::new(&"n".repeat(100)).unwrap();
        let passed = [(); 3].map(|()| node.clone()).into_iter().collect();
        let (version, token) = (tag(&"\u{e9}".repeat(100)), "t".repeat(64));
        let range = 0..5 << 20;
        let asked = PeerRequest { from: node, version, range, purpose: Purpose::IfResident, passed, members: u64::MAX };
        let mut fits = 0;
        for depth in 1..200 {
            let path = PoolPath::parse(vec!["\u{e9}".repeat(100); depth].join("/").into_bytes()).unwrap();
            if !fits_in_head(&path, &asked.version, &token) {
                break;
            }
            fits = depth;
            let headers: usize = asked.headers().iter().map(|(name, value)| name.len() + value.len() + 4).sum();
            // The lines of the request, the host and the token, and what the client adds of itself.
            let all = target(&path).len() + headers + token.len() + 500;
            assert!(all < REQUEST_HEAD_BYTES, "{all} bytes at depth {depth}");
        }
        assert!((30..100).contains(&fits), "{fits}");
    }

    #[test]
    fn the_head_of_a_frame_is_told_before_its_bytes_come() {
        let bytes = Bytes::from_static(b"content");
        let mut reader = FrameReader::default();
        assert_eq!(reader.head(7), Ok(None));
        reader.arrived(&chunk_frame(&bytes, 5));
        assert_eq!((reader.head(7), reader.head(8)), (Ok(Some(FrameHead::Chunk(5))), Err(PassOver::Damaged)));
        assert_eq!(reader.next(7), Ok(None));
    }

    #[test]
    fn another_device_is_the_same_version_and_another_time_is_not() {
        let time = |secs| Time { secs, nanos: 0 };
        let inode =
            |dev, ctime| Version::Inode { dev, ino: 4, born: time(1), mtime: time(2), ctime: time(ctime), size: 9 };
        assert!(is_same_version(&inode(1, 3), &inode(2, 3)));
        assert!(!is_same_version(&inode(1, 3), &inode(1, 4)));
        assert!(is_same_version(&tag("x"), &tag("x")) && !is_same_version(&tag("x"), &tag("y")));
        assert!(!is_same_version(&tag("x"), &inode(1, 3)));
    }

    #[test]
    fn damage_is_seen() {
        let bytes = Bytes::from_static(b"content");
        let frame = |checksum| [chunk_frame(&bytes, checksum), bytes.clone()].concat();
        let right = crc32c::crc32c(&bytes);
        for (arrived, due, expected) in [
            (frame(right), 7, Ok(Some(PeerFrame::Chunk(bytes.clone())))),
            (frame(right + 1), 7, Err(PassOver::Damaged)),
            (frame(right), 8, Err(PassOver::Damaged)),
            (waiting_frame().to_vec(), 7, Ok(Some(PeerFrame::Waiting))),
            (refusing_frame(PassOver::NoRoom).to_vec(), 7, Ok(Some(PeerFrame::Refused(PassOver::NoRoom)))),
            (head(0, 99).to_vec(), 7, Err(PassOver::Damaged)),
        ] {
            let mut reader = FrameReader::default();
            reader.arrived(&arrived);
            assert_eq!(reader.next(due), expected);
        }
    }

    proptest! {
        /// What a hostile or broken node sends never makes the reader wait for more than it expects, or panic.
        #[test]
        fn any_bytes_are_frames_damage_or_not_complete(bytes: Vec<u8>, due in 1..64_u64) {
            let mut reader = FrameReader::default();
            reader.arrived(&bytes);
            while let Ok(Some(_)) = reader.next(due) {}
            prop_assert!(reader.pending.capacity() <= bytes.len().max(64) * 4 + 256);
        }
    }
}
