//! `forebay dirty`, `ls` and `du`.

use std::collections::BTreeMap;
use std::path::Path;

use forebay_api::operator::{ContentState, DirtyFile, ListedPath, ObjectKind};
use forebay_daemon::multi_mount::MountPath;
use forebay_daemon::protocol::{Reply, Request};
use forebay_daemon::registry::RegisteredMount;
use forebay_daemon::{Failure, FailureKind, client};

use crate::exit::Exit;
use crate::output::Output;
use crate::targets;
use crate::values::{bytes, moment, shown};

pub fn dirty(path: Option<&Path>, output: &Output) -> Result<Exit, Failure> {
    targets::each(targets::meant(path)?, output, |place| not_in_pool(&place, output))
}

fn not_in_pool(MountPath { entry, inner, prefix }: &MountPath, output: &Output) -> Result<Exit, Failure> {
    let named = as_understood(resolved(entry, inner), &entry.state.version, inner);
    let is_meant = |f: &DirtyFile| is_below(&f.path, inner) || named.as_ref().is_ok_and(|path| is_below(&f.path, path));
    let mut found = false;
    for reply in client::call(entry, &Request::Dirty)? {
        let Reply::Dirty(files) = reply? else { continue };
        let mut wanted: Vec<_> = files.into_iter().filter(is_meant).collect();
        found |= !wanted.is_empty();
        wanted.iter_mut().for_each(|f| f.path = prefixed(prefix, &f.path));
        if output.json {
            wanted.iter().for_each(|f| output.json(f));
            continue;
        }
        let rows: Vec<Vec<String>> = wanted
            .iter()
            .map(|f| {
                let error = f.error.as_ref().map_or(String::new(), |e| format!("  NOT FLUSHED: {}", shown(e)));
                let path = f.path.trim_start_matches('/');
                let why = if f.why.is_empty() { String::new() } else { format!("  {}", shown(&f.why)) };
                vec![bytes(f.bytes), f.what.name().into(), moment(f.since_unix), format!("{}{why}{error}", shown(path))]
            })
            .collect();
        output.table(&rows);
    }
    match named {
        // A name that is removed, and not in the pool yet, is no mistake. Of a link that leads out of the mount, only its
        // own difference is listed.
        Err(failure) if !found || failure.kind == FailureKind::Usage => Err(failure),
        _ => Ok(Exit::Done),
    }
}

/// Returns a daemon's answer about a path. A daemon of another version may not know the request, which is a failure of the
/// same kind as a link that leads out of the mount: then the path stands for its text.
fn as_understood(answer: Result<String, Failure>, daemon: &str, inner: &str) -> Result<String, Failure> {
    match answer {
        Err(failure) if failure.kind == FailureKind::Usage && daemon != env!("CARGO_PKG_VERSION") => {
            Ok(inner.to_owned())
        }
        answer => answer,
    }
}

/// Returns the path of what a path of a mount names, after its symbolic links.
fn resolved(entry: &RegisteredMount, inner: &str) -> Result<String, Failure> {
    if inner.is_empty() {
        return Ok(String::new());
    }
    for reply in client::call(entry, &Request::Resolve { path: inner.to_owned() })? {
        if let Reply::Resolved(path) = reply? {
            return Ok(path);
        }
    }
    Err(Failure::new(FailureKind::Other, "the daemon ended its answer without a path"))
}

pub fn ls(path: &Path, recursive: bool, output: &Output) -> Result<Exit, Failure> {
    listed(targets::meant(Some(path))?, recursive, output, |files| {
        if output.json {
            files.iter().for_each(|f| output.json(f));
            return;
        }
        let rows: Vec<Vec<String>> = files
            .iter()
            .map(|f| {
                let lease = f.lease_owner.as_ref().map_or(String::new(), |o| format!("  leased by {}", shown(o)));
                let pool = f.storage_pool.as_ref().map_or(String::new(), |p| format!("  in storage pool {}", shown(p)));
                let (size, resident) = if f.kind == ObjectKind::Directory {
                    ("-".into(), String::new())
                } else {
                    (bytes(f.size), share(f.resident_bytes, f.size))
                };
                let when = moment(u64::try_from(f.mtime_unix).unwrap_or(0));
                vec![
                    f.state.name().into(),
                    resident,
                    size,
                    when,
                    format!("{}{pool}{lease}", shown(f.path.trim_start_matches('/'))),
                ]
            })
            .collect();
        output.table(&rows);
    })
}

/// Sums of sizes.
#[derive(Debug, Default, Clone, serde::Serialize)]
struct Sum {
    files: u64,
    bytes: u64,
    resident_bytes: u64,
    dirty_bytes: u64,
}

impl Sum {
    fn add(&mut self, file: &ListedPath) {
        self.files += 1;
        self.bytes = self.bytes.saturating_add(file.size);
        self.resident_bytes = self.resident_bytes.saturating_add(file.resident_bytes);
        if file.state == ContentState::Dirty {
            self.dirty_bytes = self.dirty_bytes.saturating_add(file.size);
        }
    }
}

pub fn du(path: &Path, summarize: bool, output: &Output) -> Result<Exit, Failure> {
    let places = targets::meant(Some(path))?;
    let base = places.first().map_or(String::new(), |place| place.inner.clone());
    let mut children: BTreeMap<String, Sum> = BTreeMap::new();
    let mut total = Sum::default();
    let exit = listed(places, true, output, |files| {
        for file in files.iter().filter(|f| f.kind != ObjectKind::Directory) {
            total.add(file);
            if !summarize {
                children.entry(child(&file.path, &base)).or_default().add(file);
            }
        }
    })?;
    let mut rows = vec![["size", "resident", "", "dirty", "files", "path"].map(String::from).to_vec()];
    let name = path.display().to_string();
    for (path, sum) in children.iter().map(|(p, s)| (p.as_str(), s)).chain([(name.as_str(), &total)]) {
        if output.json {
            output.json(&serde_json::json!({ "path": path, "sum": sum }));
        }
        rows.push(vec![
            bytes(sum.bytes),
            bytes(sum.resident_bytes),
            share(sum.resident_bytes, sum.bytes),
            bytes(sum.dirty_bytes),
            sum.files.to_string(),
            shown(path),
        ]);
    }
    if !output.json {
        output.table(&rows);
    }
    Ok(exit)
}

fn listed(
    places: Vec<MountPath>,
    recursive: bool,
    output: &Output,
    mut each: impl FnMut(Vec<ListedPath>),
) -> Result<Exit, Failure> {
    targets::each(places, output, |MountPath { entry, inner, prefix }| {
        for reply in client::call(&entry, &Request::Ls { path: inner, recursive })? {
            if let Reply::Listed(mut files) = reply? {
                files.iter_mut().for_each(|f| f.path = prefixed(&prefix, &f.path));
                each(files);
            }
        }
        Ok(Exit::Done)
    })
}

/// A path of a mount, as shown below a mixed root.
fn prefixed(prefix: &str, path: &str) -> String {
    if prefix.is_empty() { path.to_string() } else { format!("{prefix}{}", path.trim_start_matches('/')) }
}

/// The first component of `path` below `base`.
fn child(path: &str, base: &str) -> String {
    let path = path.trim_start_matches('/');
    let rest = path.strip_prefix(base).unwrap_or(path).trim_start_matches('/');
    let first = rest.split('/').next().unwrap_or(rest);
    if first.is_empty() { path.to_string() } else { first.to_string() }
}

fn is_below(path: &str, base: &str) -> bool {
    let (path, base) = (path.trim_start_matches('/'), base.trim_start_matches('/'));
    base.is_empty() || path == base || path.strip_prefix(base).is_some_and(|rest| rest.starts_with('/'))
}

fn share(part: u64, whole: u64) -> String {
    match part.saturating_mul(100).checked_div(whole) {
        Some(percent) => format!("{percent}%"),
        None => "100%".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_kept_by_the_first_component_below() {
        assert_eq!(child("/a/b/c", "a"), "b");
        assert_eq!(child("a/f", ""), "a");
        assert_eq!(child("/a/f", "a/f"), "a/f");
    }

    #[test]
    fn below_is_by_component() {
        assert!(is_below("/a/b", "a") && is_below("/a", "a") && is_below("/x", ""));
        assert!(!is_below("/ab", "a"));
        assert!(is_below("/a/b", "/a") && is_below("/x", "/"));
    }

    #[test]
    fn a_daemon_of_another_version_need_not_know_how_to_follow_links() {
        let answer = |daemon| as_understood(Err(Failure::usage("the request is not understood")), daemon, "a/f");
        assert_eq!(answer("0.0.1").unwrap(), "a/f");
        assert_eq!(answer(env!("CARGO_PKG_VERSION")).unwrap_err().kind, FailureKind::Usage);
        let fails = |kind| as_understood(Err(Failure::new(kind, "")), "0.0.1", "a/f").unwrap_err().kind;
        assert_eq!(fails(FailureKind::NoDaemon), FailureKind::NoDaemon);
    }

    #[test]
    fn nothing_of_nothing_is_all_of_it() {
        assert_eq!(share(0, 0), "100%");
        assert_eq!(share(1, 3), "33%");
    }
}
