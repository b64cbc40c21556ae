//! File names and keys.
//!
//! A key is a string of UTF-8 with any characters. A path consists of names, which are bytes with restrictions. A
//! name or a part of a key that is legal on both sides is the same on both. The rest is escaped by a suffix:
//!
//! | key | is shown as |
//! |---|---|
//! | a part that is empty, `.` or `..` | the part with `.%key` behind it |
//! | a part that ends with `.%key` or `.%bytes`, or that listings garble | the same |
//! | the object `a` where there are keys that begin with `a/` | `a.%key`, beside the directory `a` |
//! | the object `a/` if it is not empty | `.%key` in the directory `a` |
//!
//! | name | is kept as |
//! |---|---|
//! | not UTF-8, or with a character that listings garble | percent-encoded, with `.%bytes` behind it |
//!
//! Listings are XML, which has no control characters but tab and newline, and reads a carriage return as a newline.
//! Servers are asked to encode keys in listings, but not every server does.
//!
//! A name that ends with one of the suffixes but has none of these forms is refused.

use percent_encoding::{AsciiSet, CONTROLS, percent_decode, percent_encode};

use crate::{ErrorKind, PoolPath, RESERVED_PREFIX, is_file_name};

const ESCAPED_KEY: &str = ".%key";
const ESCAPED_BYTES: &str = ".%bytes";
/// The characters that stay unescaped in a name that is not UTF-8: all printable ASCII except `%`.
const NOT_UTF8: &AsciiSet = &CONTROLS.add(b'%');

/// The most bytes a name may have: Linux's NAME_MAX.
pub(crate) const NAME_MAX: usize = 255;
/// The most bytes a key may have, by the S3 API reference.
pub(crate) const KEY_MAX: usize = 1_024;

/// The meaning of a name in its directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NameMeaning {
    /// A part of a key.
    Plain(String),
    /// The object of that name, if a directory has the same name.
    Shadowed(String),
}

/// The part that a name stands for; `None` if there is none.
fn part_of(name: &[u8]) -> Option<NameMeaning> {
    let text = std::str::from_utf8(name).ok();
    if let Some(part) = text.and_then(|text| text.strip_suffix(ESCAPED_KEY)) {
        let escaped = matches!(part, "" | "." | "..")
            || part.ends_with(ESCAPED_KEY)
            || is_literal_bytes(part)
            || is_garbled(part);
        return Some(if escaped {
            NameMeaning::Plain(part.to_owned())
        } else {
            NameMeaning::Shadowed(part.to_owned())
        });
    }
    match text {
        Some(text) if text.ends_with(ESCAPED_BYTES) => None,
        Some(text) if !is_garbled(text) => Some(NameMeaning::Plain(text.to_owned())),
        _ => Some(NameMeaning::Plain(percent_encode(name, NOT_UTF8).to_string() + ESCAPED_BYTES)),
    }
}

/// Whether XML cannot represent a part unescaped.
fn is_garbled(part: &str) -> bool {
    part.chars().any(|c| matches!(c, '\0'..='\x08' | '\x0b'..='\x1f' | '\u{fffe}' | '\u{ffff}'))
}

/// Whether a part ends like an encoded name but is not one.
fn is_literal_bytes(part: &str) -> bool {
    part.ends_with(ESCAPED_BYTES) && encoded_name(part).is_none()
}

fn encoded_name(part: &str) -> Option<Vec<u8>> {
    let encoded = part.strip_suffix(ESCAPED_BYTES)?;
    let name: Vec<u8> = percent_decode(encoded.as_bytes()).collect();
    (part_of(&name) == Some(NameMeaning::Plain(part.to_owned()))).then_some(name)
}

/// The name that shows a part of a key; `None` if it would be too long, or contains a NUL or, against the rules of a
/// listing, a slash.
pub(crate) fn name_of(part: &str) -> Option<Vec<u8>> {
    let name = match part {
        "" | "." | ".." => format!("{part}{ESCAPED_KEY}").into_bytes(),
        _ if part.ends_with(ESCAPED_BYTES) => match encoded_name(part) {
            Some(name) => name,
            None => format!("{part}{ESCAPED_KEY}").into_bytes(),
        },
        _ if part.ends_with(ESCAPED_KEY) || is_garbled(part) => format!("{part}{ESCAPED_KEY}").into_bytes(),
        _ => part.as_bytes().to_vec(),
    };
    is_file_name(&name).then_some(name)
}

/// The name of an object that a directory of the same name hides.
pub(crate) fn shadowed_name(part: &str) -> Option<Vec<u8>> {
    let name = format!("{part}{ESCAPED_KEY}").into_bytes();
    (is_file_name(&name) && part_of(&name) == Some(NameMeaning::Shadowed(part.to_owned()))).then_some(name)
}

/// The place of a path in a bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ObjectPlace {
    /// The key of an object at the place, without a slash at its end.
    pub(crate) key: String,
    /// The name stands for an object beside a directory of the same name; no directory can have it.
    pub(crate) shadowed: bool,
    /// The place is the pool's root directory.
    pub(crate) is_root: bool,
}

impl ObjectPlace {
    /// The prefix of the keys of everything below the place.
    pub(crate) fn directory(&self) -> String {
        if self.is_root && self.key.is_empty() { String::new() } else { format!("{}/", self.key) }
    }

    /// The key of the object that stands for a directory at the place. A bucket itself can have none.
    pub(crate) fn marker(&self) -> String {
        match self.directory() {
            directory if directory.is_empty() => format!("{}root", String::from_utf8_lossy(RESERVED_PREFIX)),
            directory => directory,
        }
    }
}

/// `root` is empty or ends with a slash.
///
/// # Errors
/// `InvalidInput` for reserved names and names that stand for no key; `NameTooLong`.
pub(crate) fn place_of(root: &str, path: &PoolPath) -> Result<ObjectPlace, ErrorKind> {
    if path.is_reserved() {
        return Err(ErrorKind::InvalidInput);
    }
    let mut key = root.trim_end_matches('/').to_owned();
    let (mut shadowed, mut first) = (false, true);
    for name in path.components() {
        if name.len() > NAME_MAX {
            return Err(ErrorKind::NameTooLong);
        }
        if shadowed {
            return Err(ErrorKind::NotDirectory);
        }
        let part = match part_of(name).ok_or(ErrorKind::InvalidInput)? {
            NameMeaning::Plain(part) => part,
            NameMeaning::Shadowed(part) => {
                shadowed = true;
                part
            }
        };
        // The first part of a key may be empty, too.
        if !(first && root.is_empty()) {
            key.push('/');
        }
        first = false;
        key.push_str(&part);
    }
    if key.len() >= KEY_MAX {
        return Err(ErrorKind::NameTooLong);
    }
    Ok(ObjectPlace { key, shadowed, is_root: path.is_root() })
}

/// Whether a part of a key is a name that pools reserve for their own unfinished work.
pub(crate) fn is_reserved(part: &str) -> bool {
    part.as_bytes().starts_with(RESERVED_PREFIX)
}

/// Whether a key cannot be sent in a URL: clients and servers treat `.` and `..` as steps in a tree.
pub(crate) fn is_unspeakable(key: &str) -> bool {
    key.split('/').any(|part| part == "." || part == "..")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn path(names: &[&[u8]]) -> PoolPath {
        names.iter().fold(PoolPath::root(), |path, name| path.join(name))
    }

    #[test]
    fn what_is_legal_on_both_sides_is_the_same() {
        for name in ["a", ".hidden", "...", "with space", "100%", "%2F", "ünïcode", "new\nline", "key.%ke"] {
            assert_eq!(place_of("", &path(&[b"d", name.as_bytes()])).unwrap().key, format!("d/{name}"));
            assert_eq!(name_of(name).unwrap(), name.as_bytes());
        }
    }

    #[test]
    fn what_no_name_can_be_is_shown_escaped() {
        let escaped = [("", ".%key"), (".", "..%key"), ("..", "...%key"), ("a.%key", "a.%key.%key"), ("\r", "\r.%key")];
        for (part, name) in escaped {
            assert_eq!(name_of(part).unwrap(), name.as_bytes());
            assert_eq!(part_of(name.as_bytes()), Some(NameMeaning::Plain(part.to_owned())));
        }
        let place = place_of("root/", &path(&[b"a", b".%key", b"b"])).unwrap();
        assert_eq!((place.key.as_str(), place.shadowed), ("root/a//b", false));
        // A key that begins with a slash is in a directory with an empty name, not in the root.
        let place = place_of("", &path(&[b".%key"])).unwrap();
        assert_eq!((place.key.as_str(), place.directory().as_str(), place.is_root), ("", "/", false));
        assert_eq!(place_of("", &path(&[b".%key", b"x"])).unwrap().key, "/x");
        assert_eq!(place_of("", &PoolPath::root()).unwrap().directory(), "");
        assert_eq!(place_of("r/", &PoolPath::root()).unwrap().directory(), "r/");
    }

    #[test]
    fn an_object_beside_a_directory_of_its_name_has_a_name() {
        let name = shadowed_name("a").unwrap();
        let place = place_of("", &path(&[&name])).unwrap();
        assert_eq!((place.key.as_str(), place.shadowed), ("a", true));
        assert_eq!(place_of("", &path(&[&name, b"below"])), Err(ErrorKind::NotDirectory));
    }

    #[test]
    fn names_that_stand_for_nothing_are_refused() {
        assert_eq!(place_of("", &path(&[b"x.%bytes"])), Err(ErrorKind::InvalidInput));
        assert_eq!(place_of("", &path(&[&[b'n'; 256]])), Err(ErrorKind::NameTooLong));
        assert_eq!(place_of("", &path(&[RESERVED_PREFIX])), Err(ErrorKind::InvalidInput));
        let deep: Vec<&[u8]> = vec![b"0123456789"; 100];
        assert_eq!(place_of("", &path(&deep)), Err(ErrorKind::NameTooLong));
    }

    proptest! {
        #[test]
        fn every_name_comes_back(name in prop::collection::vec(prop_oneof![Just(b'%'), Just(b'.'), any::<u8>()], 1..40)) {
            prop_assume!(!name.contains(&b'/') && !name.contains(&0) && name != b"." && name != b"..");
            if let Some(NameMeaning::Plain(part)) = part_of(&name) {
                prop_assert_eq!(name_of(&part), Some(name));
            }
        }

        #[test]
        fn every_part_comes_back(part in "([a.%\r]|\\.%key|\\.%bytes|%FF|%0D|\u{fc}){0,6}") {
            if let Some(name) = name_of(&part) {
                prop_assert_eq!(part_of(&name), Some(NameMeaning::Plain(part)));
            }
        }
    }
}
