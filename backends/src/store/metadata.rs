//! POSIX attributes in the metadata of objects, by the convention of s3fs, which other programs read too: decimal
//! numbers, times in seconds with a fraction, `mode` with its file type.
//!
//! | key | holds |
//! |---|---|
//! | `x-amz-meta-mode` | `st_mode` |
//! | `x-amz-meta-uid`, `x-amz-meta-gid` | the owner |
//! | `x-amz-meta-atime`, `x-amz-meta-mtime`, `x-amz-meta-ctime` | times |
//! | `x-amz-meta-rdev` | `st_rdev` of a device file |
//! | `x-amz-meta-forebay-write` | a number for each write, which shows whether a write with a lost answer was made |
//! | `x-amz-meta-forebay-copied` | of a copy: when the content was written and when it was copied, by the server's clock, and the ETag and version id that it had first |
//!
//! Renames and changes of attributes are copies to the server, which gives the copy another time and may give it
//! another ETag. The record of a copy's origin is valid only if the object's own time is that of the copy: a tool
//! that keeps metadata while it writes other content would make the record wrong.
//!
//! The content of a symlink is its target. An object whose content cannot be one, by its length, is a file. A directory is an empty object whose key ends with a slash.

use http::{HeaderMap, HeaderName, HeaderValue, header};

use crate::{Attrs, FileKind, Stat, Time, Version};

use super::requests::Same;

const MODE: HeaderName = HeaderName::from_static("x-amz-meta-mode");
const UID: HeaderName = HeaderName::from_static("x-amz-meta-uid");
const GID: HeaderName = HeaderName::from_static("x-amz-meta-gid");
const ATIME: HeaderName = HeaderName::from_static("x-amz-meta-atime");
const MTIME: HeaderName = HeaderName::from_static("x-amz-meta-mtime");
const CTIME: HeaderName = HeaderName::from_static("x-amz-meta-ctime");
const RDEV: HeaderName = HeaderName::from_static("x-amz-meta-rdev");
const WRITE: HeaderName = HeaderName::from_static("x-amz-meta-forebay-write");
const FOLDER: HeaderName = HeaderName::from_static("x-amz-meta-hdi_isfolder");
const COPIED: HeaderName = HeaderName::from_static("x-amz-meta-forebay-copied");
/// How long after its start a copy may be completed, in seconds.
const COPIED_WITHIN_SECS: i64 = 300;

/// Longest target of a symlink, in bytes: `PATH_MAX` without its NUL.
pub(crate) const TARGET_BYTES_MAX: u64 = libc::PATH_MAX as u64 - 1;

/// Stands for the ETag of directories, with or without an object of their own.
const DIRECTORY: &str = "directory";

/// The attributes of objects without metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Defaults {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) file_mode: u32,
    pub(crate) dir_mode: u32,
    /// The time of a directory without an object.
    pub(crate) time: Time,
    /// Whether owners, devices and set-id bits in the metadata are trusted: true for a store that we write to.
    pub(crate) believed: bool,
}

/// What the pool knows about one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Object {
    /// Empty if the server has none: for files that were written without the server.
    pub(crate) etag: String,
    /// Empty if the bucket keeps no versions.
    pub(crate) version_id: String,
    pub(crate) size: u64,
    /// By the server's clock, to the second.
    pub(crate) last_modified: Time,
    /// The time of the request, by the server's clock in seconds.
    pub(crate) asked_at_secs: i64,
    /// How often the metadata was changed since the content was written, where the store counts that: then this leaves the
    /// rest of the identity as it is.
    pub(crate) revision: u32,
    pub(crate) meta: Meta,
}

/// The origin of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Copied {
    written_secs: i64,
    copied_secs: i64,
    etag: String,
    version_id: String,
}

/// The content of an object's metadata.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Meta {
    /// Includes the file type.
    pub(crate) mode: Option<u32>,
    pub(crate) uid: Option<u32>,
    pub(crate) gid: Option<u32>,
    pub(crate) atime: Option<Time>,
    pub(crate) mtime: Option<Time>,
    pub(crate) ctime: Option<Time>,
    pub(crate) rdev: u64,
    pub(crate) write: Option<String>,
    pub(crate) copied: Option<Copied>,
    /// Set by other programs on objects of Azure's store that stand for directories, and whose keys do not end with a
    /// slash.
    pub(crate) folder: bool,
    /// The rest, which changes of attributes keep: the content type and the metadata of other programs.
    pub(crate) others: HeaderMap,
}

impl Meta {
    pub(crate) fn new(kind: FileKind, rdev: u64, attrs: &Attrs, now: Time) -> Self {
        Self {
            mode: Some(kind.mode_bits() | attrs.mode & 0o7777),
            uid: Some(attrs.uid),
            gid: Some(attrs.gid),
            atime: Some(attrs.atime),
            mtime: Some(attrs.mtime),
            ctime: Some(now),
            rdev,
            write: Some(number()),
            copied: None,
            folder: false,
            others: HeaderMap::new(),
        }
    }

    /// The metadata of the pool's own objects.
    pub(crate) fn scratch() -> Self {
        let now = Time::now();
        let attrs = Attrs { mode: 0o600, uid: 0, gid: 0, atime: now, mtime: now, xattrs: Vec::new() };
        Self::new(FileKind::File, 0, &attrs, now)
    }

    /// Records a change at `now`.
    pub(crate) fn touch(&mut self, now: Time) {
        self.ctime = Some(now);
        self.write = Some(number());
    }

    pub(crate) fn read(headers: &HeaderMap) -> Self {
        let text = |name: &HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
        let number = |name: &HeaderName| text(name).and_then(|text| text.parse().ok());
        let mut others = HeaderMap::new();
        for (name, value) in headers {
            let ours = [&MODE, &UID, &GID, &ATIME, &MTIME, &CTIME, &RDEV, &WRITE, &COPIED].contains(&name);
            let kept = name.as_str().starts_with("x-amz-meta-")
                || [
                    &header::CONTENT_TYPE,
                    &header::CONTENT_ENCODING,
                    &header::CONTENT_LANGUAGE,
                    &header::CONTENT_DISPOSITION,
                    &header::CACHE_CONTROL,
                    &header::EXPIRES,
                ]
                .contains(&name);
            // Signatures are computed over text.
            if kept && !ours && std::str::from_utf8(value.as_bytes()).is_ok() {
                others.insert(name.clone(), value.clone());
            }
        }
        Self {
            mode: number(&MODE),
            uid: number(&UID),
            gid: number(&GID),
            atime: text(&ATIME).and_then(parse_time),
            mtime: text(&MTIME).and_then(parse_time),
            ctime: text(&CTIME).and_then(parse_time),
            rdev: text(&RDEV).and_then(|text| text.parse().ok()).unwrap_or(0),
            write: text(&WRITE).map(str::to_owned),
            copied: text(&COPIED).and_then(|text| {
                let mut words = text.split(' ');
                let (written_secs, copied_secs) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
                let mut next = || words.next().unwrap_or_default().to_owned();
                let (etag, version_id) = (next(), next());
                Some(Copied { written_secs, copied_secs, etag, version_id })
            }),
            folder: text(&FOLDER) == Some("true"),
            others,
        }
    }

    pub(crate) fn write(&self, headers: &mut HeaderMap) {
        headers.extend(self.others.iter().map(|(name, value)| (name.clone(), value.clone())));
        for (name, value) in [(MODE, self.mode), (UID, self.uid), (GID, self.gid)] {
            if let Some(value) = value {
                headers.insert(name, HeaderValue::from(value));
            }
        }
        let times = [(ATIME, self.atime), (MTIME, self.mtime), (CTIME, self.ctime)];
        let times = times.into_iter().filter_map(|(name, time)| Some((name, format_time(time?))));
        let rdev = (self.rdev != 0).then(|| (RDEV, self.rdev.to_string()));
        let write = self.write.clone().map(|write| (WRITE, write));
        let copied = self.copied.as_ref().map(|Copied { written_secs, copied_secs, etag, version_id }| {
            (COPIED, format!("{written_secs} {copied_secs} {etag} {version_id}").trim_end().to_owned())
        });
        for (name, text) in times.chain(rdev).chain(write).chain(copied) {
            if let Ok(value) = HeaderValue::from_str(&text) {
                headers.insert(name, value);
            }
        }
    }

    /// The kind of file, if the key does not end with a slash.
    fn kind(&self) -> FileKind {
        match self.mode.and_then(FileKind::from_mode) {
            // Old tools mark directories this way without a slash; all other programs see a file in such a key.
            None | Some(FileKind::Directory) => FileKind::File,
            Some(kind) => kind,
        }
    }
}

impl Object {
    /// An object that was just written.
    pub(crate) fn written_now(etag: String, size: u64, meta: Meta) -> Self {
        let now = Time { nanos: 0, ..Time::now() };
        Self { etag, version_id: String::new(), size, last_modified: now, asked_at_secs: now.secs, revision: 0, meta }
    }

    /// The state of the object, as far as requests can express it.
    pub(crate) fn same(&self) -> Same<'_> {
        Same { etag: &self.etag, modified: self.last_modified }
    }

    /// Whether no client has written since.
    pub(crate) fn is(&self, seen: &Self) -> bool {
        let same_id = self.version_id == seen.version_id || seen.version_id.is_empty();
        let told = |object: &Self| (object.etag.clone(), object.size, object.last_modified);
        same_id && told(self) == told(seen) && self.meta.write == seen.meta.write
    }

    /// The time at which it was written, by the server's clock, with the nanoseconds of its writer.
    fn written(&self) -> Time {
        let secs = self.origin().map_or(self.last_modified.secs, |copied| copied.written_secs);
        Time { secs, nanos: self.meta.ctime.map_or(0, |ctime| ctime.nanos) }
    }

    /// The recorded origin, if it is valid.
    fn origin(&self) -> Option<&Copied> {
        let modified = self.last_modified.secs;
        let believed =
            |copied: &&Copied| (0..=COPIED_WITHIN_SECS).contains(&modified.saturating_sub(copied.copied_secs));
        self.meta.copied.as_ref().filter(believed)
    }

    /// The metadata of a copy of it: the same object under another name, until a part of it is changed.
    pub(crate) fn copied(&self) -> Meta {
        let (etag, version_id) = self.identity();
        let (etag, version_id) = (etag.to_owned(), version_id.to_owned());
        let copied = Copied { written_secs: self.written().secs, copied_secs: self.asked_at_secs, etag, version_id };
        Meta { copied: Some(copied), ..self.meta.clone() }
    }

    /// Identifies the content: the ETag and version id that it had first.
    fn identity(&self) -> (&str, &str) {
        let now = (self.etag.as_str(), self.version_id.as_str());
        self.origin().map_or(now, |copied| (copied.etag.as_str(), copied.version_id.as_str()))
    }

    /// Whether the server gives nothing that identifies its content. Another object may have the same size and time.
    pub(crate) fn is_anonymous(&self) -> bool {
        self.meta.write.is_none() && self.identity().0.is_empty()
    }

    /// Whether a rename made it from that object.
    pub(crate) fn is_copy_of(&self, source: &Self) -> bool {
        let same = match &source.meta.write {
            Some(_) => self.meta.write == source.meta.write,
            None => {
                // Without an ETag, only the time says something of the content.
                let is_copy = |copied: &Copied| !source.is_anonymous() || copied.written_secs == source.written().secs;
                self.origin().is_some_and(is_copy) && self.identity() == source.identity()
            }
        };
        same && self.size == source.size
    }

    /// The result of `stat`. `directory`: the key ends with a slash.
    pub(crate) fn stat(&self, directory: bool, defaults: &Defaults) -> Stat {
        let kind = match self.meta.kind() {
            _ if directory => FileKind::Directory,
            FileKind::File => FileKind::File,
            // Any client may store this mode with any content: a target is read as a whole.
            FileKind::Symlink if !(1..=TARGET_BYTES_MAX).contains(&self.size) => FileKind::File,
            FileKind::Symlink => FileKind::Symlink,
            kind if defaults.believed => kind,
            _ => FileKind::File,
        };
        let own = |number: Option<u32>| number.filter(|_| defaults.believed);
        let mode_bits = if defaults.believed { 0o7777 } else { 0o777 };
        let default_mode = if directory { defaults.dir_mode } else { defaults.file_mode };
        // The server knows the time of an object that was written without attributes.
        let changed = self.meta.ctime.unwrap_or(self.written());
        let mtime = self.meta.mtime.unwrap_or(self.written());
        let holds_bytes = matches!(kind, FileKind::File | FileKind::Symlink);
        let size = if holds_bytes { self.size } else { 0 };
        Stat {
            kind,
            mode: self.meta.mode.map_or(default_mode, |mode| mode & mode_bits),
            uid: own(self.meta.uid).unwrap_or(defaults.uid),
            gid: own(self.meta.gid).unwrap_or(defaults.gid),
            nlink: 1,
            rdev: if defaults.believed { self.meta.rdev } else { 0 },
            size,
            occupied: None,
            atime: self.meta.atime.unwrap_or(mtime),
            mtime,
            ctime: changed,
            version: Version::Tag {
                etag: if directory { DIRECTORY } else { self.identity().0 }.to_owned(),
                id: if directory { "" } else { self.identity().1 }.to_owned(),
                size,
                mtime: self.version_time(),
            },
        }
    }

    /// The time of the version. Other nanoseconds stand for other attributes of the same content.
    fn version_time(&self) -> Time {
        let written = self.written();
        let nanos = (u64::from(written.nanos) + u64::from(self.revision)) % 1_000_000_000;
        Time { nanos: nanos as u32, ..written }
    }
}

/// The result of `stat` for a directory that only the keys below it imply.
pub(crate) fn implied_directory(defaults: &Defaults) -> Stat {
    Stat {
        kind: FileKind::Directory,
        mode: defaults.dir_mode,
        uid: defaults.uid,
        gid: defaults.gid,
        nlink: 1,
        rdev: 0,
        size: 0,
        occupied: None,
        atime: defaults.time,
        mtime: defaults.time,
        ctime: defaults.time,
        version: Version::Tag { etag: DIRECTORY.to_owned(), id: String::new(), size: 0, mtime: Time::default() },
    }
}

fn number() -> String {
    format!("{:032x}", rand::random::<u128>())
}

fn format_time(time: Time) -> String {
    // Before 1970, the seconds are rounded down: -0.25 s is -1 s and 750 million ns.
    if time.secs < 0 && time.nanos > 0 {
        let secs = time.secs + 1;
        let sign = if secs == 0 { "-" } else { "" };
        return format!("{sign}{secs}.{:09}", 1_000_000_000 - time.nanos);
    }
    format!("{}.{:09}", time.secs, time.nanos)
}

fn parse_time(text: &str) -> Option<Time> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = fraction.get(..fraction.len().min(9))?;
    if !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let nanos: u32 = format!("{digits:0<9}").parse().ok()?;
    let secs: i64 = whole.parse().ok()?;
    Some(match whole.starts_with('-') && nanos > 0 {
        true => Time { secs: secs.checked_sub(1)?, nanos: 1_000_000_000 - nanos },
        false => Time { secs, nanos },
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn whole_seconds_and_long_fractions_are_read() {
        assert_eq!(parse_time("1500000000"), Some(Time { secs: 1_500_000_000, nanos: 0 }));
        assert_eq!(parse_time("1.5"), Some(Time { secs: 1, nanos: 500_000_000 }));
        assert_eq!(parse_time("1.0000000019"), Some(Time { secs: 1, nanos: 1 }));
        assert_eq!(parse_time("-0.25"), Some(Time { secs: -1, nanos: 750_000_000 }));
        for wrong in ["", "x", "1.x", "1.-5"] {
            assert_eq!(parse_time(wrong), None, "{wrong}");
        }
    }

    /// As in Google's store: its generation stays the same.
    #[test]
    fn a_change_of_metadata_alone_makes_another_version_of_the_same_content() {
        let defaults =
            Defaults { uid: 0, gid: 0, file_mode: 0o644, dir_mode: 0o755, time: Time::default(), believed: false };
        let version = |revision| {
            let object = Object { revision, ..Object::written_now("7".to_owned(), 3, Meta::default()) };
            let object = Object { last_modified: Time { secs: 60, nanos: 0 }, ..object };
            object.stat(false, &defaults).version
        };
        assert_eq!(version(0), version(0));
        assert_ne!(version(0), version(1));
        assert!(version(1).same_content(&version(2)));
    }

    #[test]
    fn metadata_of_other_programs_is_kept() {
        let mut headers = HeaderMap::new();
        for (name, value) in [("x-amz-meta-colour", "red"), ("content-type", "text/plain"), ("date", "today")] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        let mut written = HeaderMap::new();
        Meta::read(&headers).write(&mut written);
        headers.remove("date");
        assert_eq!(written, headers);
    }

    proptest! {
        #[test]
        fn every_time_comes_back(secs in -5_000_000_000..5_000_000_000_i64, nanos in 0..1_000_000_000_u32) {
            let time = Time { secs, nanos };
            prop_assert_eq!(parse_time(&format_time(time)), Some(time));
        }
    }
}
