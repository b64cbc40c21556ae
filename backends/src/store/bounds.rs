//! Every bound on what a server may send, with its unit. A longer answer fails that one call. Contents of files are
//! read in ranges or as streams, and need no bound.

/// Longest error message of a server.
pub(super) const ERROR_BODY_BYTES: u64 = 64 << 10;
/// Longest answer of unknown length: a page of a listing with the longest keys is shorter.
pub(super) const ANSWER_BYTES: u64 = 16 << 20;
/// Keys that may wait for the next page of a listing, because a directory may still appear under their name. In the
/// order of keys, only keys wait that continue the last one's name with a character before `/`.
pub(super) const WAITING_KEYS: usize = 100_000;
/// Successive pages of a listing without an entry.
pub(super) const EMPTY_PAGES: u32 = 1_000;

/// Longest index page, or WebDAV answer about a directory: a million names with their markup take about half.
pub(super) const WEB_PAGE_BYTES: u64 = 256 << 20;
/// Longest WebDAV answer about one path.
pub(super) const WEB_RESOURCE_BYTES: u64 = 1 << 20;
/// Most bytes of a page for one token: a tag with its attributes, or the text between two tags.
pub(super) const WEB_TOKEN_BYTES: u64 = 1 << 20;
/// Longest link: three bytes for each byte of a path of Linux's PATH_MAX, and as much for the prefix before it.
pub(super) const WEB_LINK_BYTES: usize = 24 << 10;
/// Bytes of a page's title that are examined.
pub(super) const WEB_TITLE_BYTES: usize = 256;
/// Names in one directory of a web server.
pub(super) const WEB_NAMES: usize = 4_000_000;
/// Nesting of elements in a WebDAV answer.
pub(super) const WEB_DEPTH: usize = 64;
