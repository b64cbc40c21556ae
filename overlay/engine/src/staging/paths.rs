//! The files that an operator's paths and globs name.

use forebay_backends::{Error, ErrorKind, FileKind, PoolPath, Result, Side};
use globset::GlobBuilder;

use super::reporter::Reporter;
use crate::namespace::Ask;
use crate::{Ino, Overlay};

impl Overlay {
    /// Returns the regular files that paths and globs name, each once. Reports what cannot be found as failed.
    pub(super) async fn files_of(&self, paths: &[String], ask: Ask<'_>, reporter: &Reporter) -> Result<Vec<Ino>> {
        let mut seen = std::collections::HashSet::new();
        let mut files = Vec::new();
        for typed in paths {
            match self.expand(typed, ask).await {
                Ok(found) => files.extend(found.into_iter().filter(|ino| seen.insert(*ino))),
                Err(e) => reporter.failed(typed.clone(), &e),
            }
        }
        Ok(files)
    }

    async fn expand(&self, typed: &str, ask: Ask<'_>) -> Result<Vec<Ino>> {
        let inner = &self.inner;
        let is_glob = |name: &str| name.contains(['*', '?', '[', '{']);
        let (root, glob) = match typed.split('/').position(is_glob) {
            // A name that exists exactly as typed is not taken for a glob.
            Some(_) if self.resolve_as(&parse_path(typed)?, ask).await.is_ok() => (parse_path(typed)?, None),
            Some(at) => {
                let prefix: Vec<&str> = typed.split('/').take(at).collect();
                let glob = GlobBuilder::new(typed.trim_matches('/')).literal_separator(true).build();
                let glob =
                    glob.map_err(|e| Error::new(ErrorKind::InvalidInput, Side::Application, format!("{typed}: {e}")))?;
                (parse_path(&prefix.join("/"))?, Some(glob.compile_matcher()))
            }
            None => (parse_path(typed)?, None),
        };
        let root = self.resolve_as(&root, ask).await?;
        let ask = match ask {
            // The contents of files that a glob leaves out are not wanted.
            Ask::Contents(age, _) if glob.is_some() => Ask::Names(age),
            ask => ask,
        };
        let tree = inner.tree(root, ask).await?;
        let mut files = Vec::new();
        let mut matched_dirs = Vec::new();
        for (ino, kind) in tree {
            if let Some(glob) = &glob {
                let Some(path) = inner.overlay_path(ino) else { continue };
                let hit = glob.is_match(path.as_path()) || matched_dirs.iter().any(|d| path.starts_with(d));
                if !hit {
                    continue;
                }
                if kind == FileKind::Directory {
                    matched_dirs.push(path);
                }
            }
            if kind == FileKind::File {
                files.push(ino);
            }
        }
        if files.is_empty() && glob.is_some() && matched_dirs.is_empty() {
            return Err(Error::new(ErrorKind::NotFound, Side::Application, format!("{typed}: nothing matches")));
        }
        Ok(files)
    }

    /// Returns the inode that a path names. If names must be fresh, the pool is asked again for a name that is cached
    /// as absent: another client may have just created it.
    pub(crate) async fn resolve_as(&self, path: &PoolPath, ask: Ask<'_>) -> Result<Ino> {
        let (Ask::Names(age) | Ask::Contents(age, _)) = ask else { return self.resolve(path).await };
        let mut at = Ino::ROOT;
        for name in path.components() {
            let mut there = self.inner.find(at, name).await.map_err(|e| e.context(path))?;
            if there.is_none() {
                self.inner.forget_absence(at, name, age).await?;
                there = self.inner.find(at, name).await.map_err(|e| e.context(path))?;
                self.inner.tell_kernel_name(at, name);
            }
            at = there.ok_or_else(|| Error::new(ErrorKind::NotFound, Side::Application, path.to_string()))?;
        }
        Ok(at)
    }
}

/// A path as operators type it: a leading or trailing `/` does not matter, `\xNN` is a byte.
pub fn parse_path(typed: &str) -> Result<PoolPath> {
    let bad = || Error::new(ErrorKind::InvalidInput, Side::Application, format!("{typed}: not a path in the mount"));
    let mut bytes = Vec::with_capacity(typed.len());
    let mut rest = typed.trim_matches('/').as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let hex = tail.get(1..3).and_then(|h| std::str::from_utf8(h).ok()).and_then(|h| u8::from_str_radix(h, 16).ok());
        match (first, tail.first(), hex) {
            (b'\\', Some(b'x'), Some(byte)) => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            (b'\\', Some(b'\\'), _) => {
                bytes.push(b'\\');
                rest = &tail[1..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    PoolPath::parse(bytes).ok_or_else(bad)
}
