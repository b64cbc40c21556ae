//! The page of a directory, for people (HTML) and for programs (JSON).

use std::fmt::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forebay_backends::{FileKind, Time};
use forebay_engine::ServedEntry;
use http::header::{self, HeaderValue};
use http::{HeaderMap, Response};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use serde::Serialize;

use crate::body::ReplyBody;

/// What may stand in a path as it is.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

#[derive(Serialize)]
struct ListedFile {
    /// Percent-encoded, since names need not be UTF-8.
    href: String,
    name: String,
    kind: &'static str,
    size: u64,
    mtime_unix: i64,
}

fn kind(kind: FileKind) -> &'static str {
    match kind {
        FileKind::File => "file",
        FileKind::Directory => "directory",
        FileKind::Symlink => "symlink",
        _ => "special",
    }
}

fn href(entry: &ServedEntry) -> String {
    let slash = if entry.kind == FileKind::Directory { "/" } else { "" };
    // A name with a colon would be taken for a scheme.
    format!("./{}{slash}", percent_encode(&entry.name, PLAIN))
}

/// Returns the page. JSON if the query has `format=json`, or if the request accepts JSON and no HTML.
pub fn page(path: &str, query: Option<&str>, request: &HeaderMap, entries: &[ServedEntry]) -> Response<ReplyBody> {
    let accepts = |what: &str| {
        request.get_all(header::ACCEPT).iter().filter_map(|v| v.to_str().ok()).any(|text| text.contains(what))
    };
    let asked = query.is_some_and(|query| query.split('&').any(|part| part == "format=json"));
    let json = asked || (accepts("application/json") && !accepts("text/html"));
    let (content_type, body) = match json {
        true => ("application/json", as_json(entries)),
        false => ("text/html; charset=utf-8", as_html(path, entries)),
    };
    let mut response = Response::new(ReplyBody::from(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(header::VARY, HeaderValue::from_static("accept"));
    // A name that looks like markup must never run.
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static("default-src 'none'"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

fn as_json(entries: &[ServedEntry]) -> String {
    let files: Vec<ListedFile> = entries
        .iter()
        .map(|entry| ListedFile {
            href: href(entry),
            name: String::from_utf8_lossy(&entry.name).into_owned(),
            kind: kind(entry.kind),
            size: entry.size,
            mtime_unix: entry.mtime.secs,
        })
        .collect();
    serde_json::to_string(&files).unwrap_or_default()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn as_html(path: &str, entries: &[ServedEntry]) -> String {
    let title = escaped(&percent_encoding::percent_decode_str(path).decode_utf8_lossy());
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>{title}</title>\n<h1>{title}</h1>\n<table>\n"
    );
    if path != "/" {
        page.push_str("<tr><td><a href=\"../\">..</a>\n");
    }
    for entry in entries {
        let name = escaped(&String::from_utf8_lossy(&entry.name));
        let (slash, size) = match entry.kind {
            FileKind::Directory => ("/", String::new()),
            _ => ("", entry.size.to_string()),
        };
        let _ = writeln!(
            page,
            "<tr><td><a href=\"{}\">{name}{slash}</a><td>{}<td align=\"right\">{size}",
            href(entry),
            httpdate::fmt_http_date(time(entry.mtime)),
        );
    }
    page.push_str("</table>\n</html>\n");
    page
}

/// Returns a time in whole seconds, as HTTP has it. A time before 1970 is shown as 1970.
pub(super) fn time(time: Time) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(u64::try_from(time.secs).unwrap_or(0).min(253_402_300_799))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_text_and_never_markup() {
        let entry = |name: &[u8], kind| ServedEntry { name: name.into(), kind, size: 3, mtime: Time::default() };
        let entries = [
            entry(b"<script>alert(1)</script>", FileKind::File),
            entry(b"javascript:alert(1)", FileKind::File),
            entry(b"\xff \"quoted\"", FileKind::Directory),
        ];
        let html = as_html("/a%3Cb%3E/", &entries);
        assert!(
            !html.contains("<script>") && !html.contains("\"javascript:") && html.contains("/a&lt;b&gt;/"),
            "{html}"
        );
        assert!(html.contains("./%FF%20%22quoted%22/"), "{html}");
        let json: serde_json::Value = serde_json::from_str(&as_json(&entries)).unwrap();
        assert_eq!(json[2]["href"], "./%FF%20%22quoted%22/");
        assert_eq!(json[0]["size"], 3);
    }
}
