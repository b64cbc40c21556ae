//! Lexical operations on paths: no function asks a file system, unless its text says so.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// Makes a path absolute and removes `.`, `..` and doubled slashes, as if there were no symlinks.
///
/// A relative path starts at the working directory, whose name the kernel knows: this does not access its file system.
pub fn absolute(path: &Path) -> std::io::Result<PathBuf> {
    let whole = if path.is_absolute() { path.to_path_buf() } else { working_dir()?.join(path) };
    Ok(normalised(&whole))
}

fn working_dir() -> std::io::Result<PathBuf> {
    std::env::current_dir().or_else(|error| match std::env::var_os("PWD").map(PathBuf::from) {
        Some(pwd) if pwd.is_absolute() => Ok(pwd),
        _ => Err(error),
    })
}

/// Removes `.`, `..` and doubled slashes from an absolute path.
pub fn normalised(path: &Path) -> PathBuf {
    let mut out = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::Normal(name) => out.push(name),
            Component::ParentDir => {
                out.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    out
}

/// Returns the part of `path` below `ancestor`, without a leading slash; `None` if it is not below.
pub fn below(path: &Path, ancestor: &Path) -> Option<Vec<u8>> {
    path.strip_prefix(ancestor).ok().map(|rest| rest.as_os_str().as_bytes().to_vec())
}

/// Follows the symlinks of a path's components until `stop` returns true for one. This component and the rest are
/// appended as text. Accesses the file systems of the components before it.
pub fn follow_until(path: &Path, stop: impl Fn(&Path) -> bool) -> PathBuf {
    /// As many symlinks as the kernel follows in one path.
    const LINKS: usize = 40;
    let mut links = 0;
    let mut rest: Vec<OsString> = path.components().rev().map(|c| c.as_os_str().to_os_string()).collect();
    let mut done = PathBuf::from("/");
    while let Some(name) = rest.pop() {
        if name == ".." {
            done.pop();
            continue;
        }
        if name == "/" || name == "." {
            continue;
        }
        let next = done.join(&name);
        if stop(&next) {
            done = next;
            continue;
        }
        match std::fs::read_link(&next) {
            Ok(target) if links < LINKS => {
                links += 1;
                if target.is_absolute() {
                    done = PathBuf::from("/");
                }
                rest.extend(target.components().rev().map(|c| c.as_os_str().to_os_string()));
            }
            _ => done = next,
        }
    }
    done
}

/// Encodes a path for the local API: valid UTF-8 is kept; other bytes and the backslash are escaped.
pub fn encode(path: &[u8]) -> String {
    let mut out = String::with_capacity(path.len());
    for chunk in path.utf8_chunks() {
        out.push_str(&chunk.valid().replace('\\', r"\\"));
        for byte in chunk.invalid() {
            out.push_str(&format!("\\x{byte:02x}"));
        }
    }
    out
}

/// Undoes [`encode`]; `None` if an escape is invalid.
pub fn decode(path: &str) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if byte != b'\\' {
            out.push(byte);
        } else if let Some(after) = rest.strip_prefix(b"\\") {
            out.push(b'\\');
            rest = after;
        } else {
            let digits = rest.strip_prefix(b"x")?.get(..2)?;
            out.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
            rest = &rest[3..];
        }
    }
    Some(out)
}

/// The FNV-1a hash: stable across versions of the program.
pub fn stable_hash(path: &OsStr) -> u64 {
    path.as_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normalisation_is_lexical() {
        assert_eq!(normalised(Path::new("/a//b/./c/../d/")), Path::new("/a/b/d"));
        assert_eq!(normalised(Path::new("/../..")), Path::new("/"));
    }

    #[test]
    fn below_respects_component_borders() {
        assert_eq!(below(Path::new("/mnt/a/b"), Path::new("/mnt/a")), Some(b"b".to_vec()));
        assert_eq!(below(Path::new("/mnt/a"), Path::new("/mnt/a")), Some(Vec::new()));
        assert_eq!(below(Path::new("/mnt/ab"), Path::new("/mnt/a")), None);
    }

    #[test]
    fn names_that_are_not_utf8_survive_the_api() {
        assert_eq!(encode("grün".as_bytes()), "grün");
        assert_eq!(encode(b"a\xffb"), r"a\xffb");
        assert_eq!(encode(br"a\b"), r"a\\b");
        for name in [&b"a\xff\\x41"[..], "grün".as_bytes(), b"\\", b""] {
            assert_eq!(decode(&encode(name)).as_deref(), Some(name));
        }
        assert_eq!(decode(r"a\q"), None);
    }

    #[test]
    fn symlinks_are_followed_only_before_the_stop() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        std::fs::create_dir(root.join("mnt")).unwrap();
        std::os::unix::fs::symlink("mnt", root.join("link")).unwrap();
        std::os::unix::fs::symlink("/nowhere", root.join("mnt/inner")).unwrap();
        let mount = root.join("mnt");
        let found = follow_until(&root.join("link/inner/x"), |p| p.starts_with(&mount));
        assert_eq!(found, root.join("mnt/inner/x"));
    }
}
