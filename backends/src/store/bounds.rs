//! Every bound on what a server may send, with its unit. A longer answer is an error of that one call; contents of files
//! are read in ranges or as streams, and need none.

/// Longest error message of a server that is read.
pub(super) const ERROR_BODY_BYTES: u64 = 64 << 10;
/// Longest answer that is read where the length is not known: a page of a listing with the longest keys has less.
pub(super) const ANSWER_BYTES: u64 = 16 << 20;
/// Keys that may wait for the next page of a listing, because a directory may turn out to have their name. By the order of
/// keys only those wait that continue the last one's name with a character before `/`.
pub(super) const WAITING_KEYS: usize = 100_000;
/// Pages one after the other in which a listing tells nothing that is shown.
pub(super) const EMPTY_PAGES: u32 = 1_000;

/// Longest index page, or answer of WebDAV about a directory: a million names with their markup take about half.
pub(super) const WEB_PAGE_BYTES: u64 = 256 << 20;
/// Longest answer of WebDAV about one path.
pub(super) const WEB_RESOURCE_BYTES: u64 = 1 << 20;
/// Most bytes of a page that are read for one piece of it: a tag with its attributes, or the text between two tags.
pub(super) const WEB_TOKEN_BYTES: u64 = 1 << 20;
/// Longest link: three bytes for each of a path of Linux's PATH_MAX, and as much for what stands before it.
pub(super) const WEB_LINK_BYTES: usize = 24 << 10;
/// Bytes of a page's title that tell what it is.
pub(super) const WEB_TITLE_BYTES: usize = 256;
/// Names in one directory of a web server.
pub(super) const WEB_NAMES: usize = 4_000_000;
/// Elements within elements in an answer of WebDAV.
pub(super) const WEB_DEPTH: usize = 64;
