//! The path of a request, as a path in the pool.

use forebay_backends::PoolPath;
use http::header;
use http::{Response, StatusCode};
use percent_encoding::percent_decode_str;

use super::reply;
use crate::body::ReplyBody;

/// The longest path, in bytes: Linux's PATH_MAX.
const PATH_MAX: usize = 4096;

#[derive(Debug, PartialEq, Eq)]
pub struct RequestPath {
    pub path: PoolPath,
    /// The path ends with a slash.
    pub is_directory: bool,
}

/// Reads the path of a request. A name is what its percent-decoded bytes are, whatever their encoding.
///
/// # Errors
/// Says what is wrong: an escape that is none, or a name that no file can have.
pub fn parse(text: &str) -> Result<RequestPath, &'static str> {
    let names = text.strip_prefix('/').ok_or("the path does not begin with a slash")?;
    let is_directory = names.is_empty() || names.ends_with('/');
    let names = names.strip_suffix('/').unwrap_or(names);
    let mut path = PoolPath::root();
    let mut bytes = 0;
    for name in names.split('/').filter(|_| !names.is_empty()) {
        check_escapes(name)?;
        let name: Vec<u8> = percent_decode_str(name).collect();
        bytes += name.len() + 1;
        if name.contains(&0) || name.contains(&b'/') {
            return Err("a name in the path contains a slash or NUL");
        }
        if matches!(&name[..], b"" | b"." | b"..") {
            return Err("a name in the path is empty, `.` or `..`");
        }
        if bytes > PATH_MAX {
            return Err("the path is too long");
        }
        path = path.join(&name);
    }
    Ok(RequestPath { path, is_directory })
}

/// Checks that each percent sign begins an escape.
///
/// # Errors
/// Says what is wrong.
pub fn check_escapes(name: &str) -> Result<(), &'static str> {
    let mut rest = name;
    while let Some(at) = rest.find('%') {
        let escape = rest.as_bytes().get(at + 1..at + 3).ok_or("the path has an escape that is cut off")?;
        if !escape.iter().all(u8::is_ascii_hexdigit) {
            return Err("the path has an escape that is not hexadecimal");
        }
        rest = &rest[at + 3..];
    }
    Ok(())
}

/// Returns the redirection of a directory's name to the name with a slash, to which relative links fit.
pub fn with_slash(path: &str, query: Option<&str>) -> Response<ReplyBody> {
    let mut response = reply::text(StatusCode::MOVED_PERMANENTLY, "this is a directory");
    // Relative, so that neither scheme nor host of a proxy before this server matters.
    let name = path.rsplit('/').next().unwrap_or_default();
    let query = query.map(|query| format!("?{query}")).unwrap_or_default();
    response.headers_mut().insert(header::LOCATION, reply::value(format!("./{name}/{query}")));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<(String, bool), &'static str> {
        parse(text).map(|parsed| (parsed.path.to_string(), parsed.is_directory))
    }

    #[test]
    fn paths_are_decoded_name_by_name() {
        assert_eq!(of("/a%20b/c"), Ok(("/a b/c".into(), false)));
        assert_eq!(of("/"), Ok((PoolPath::root().to_string(), true)));
        assert_eq!(of("/a/"), Ok(("/a".into(), true)));
        let bytes = parse("/%ff%c0%ae").unwrap().path;
        assert_eq!(bytes.components().next(), Some(&b"\xff\xc0\xae"[..]), "what is no UTF-8 is a name of its own");
    }

    #[test]
    fn what_leads_elsewhere_is_refused() {
        for path in [
            "/../etc/passwd",
            "/a/../b",
            "/%2e%2e/etc/passwd",
            "/a/%2e",
            "/..%2f..%2fetc",
            "/a%2fb",
            "/a%00b",
            "/a//b",
            "//a",
            "/a/%",
            "/a/%2",
            "/a/%zz",
            "a",
            "",
            "/./a",
        ] {
            assert!(of(path).is_err(), "{path}");
        }
        assert!(of(&format!("/{}", "a/".repeat(3000))).is_err());
    }
}
