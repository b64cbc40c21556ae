//! The files that an operator's paths and globs name.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use forebay_api::operator::TypedPath;
use forebay_api::paths;
use forebay_backends::{Error, ErrorKind, FileKind, PoolPath, Result, Side};
use globset::{GlobBuilder, GlobMatcher};

use super::reporter::Reporter;
use crate::namespace::Ask;
use crate::permission::{SEARCH, UserGroups};
use crate::{Ino, Lookup, Overlay};

/// Symbolic links that are followed on one path: as many as the kernel follows.
const LINKS_MAX: usize = 40;
/// What to do about a symbolic link that is not followed.
const MEANT: &str = "give the path that is meant instead of the link";

/// What is asked of the pool, and the user who has to be allowed to search the directories on the way. `None`: they are not
/// checked.
type AskFor<'a> = (Ask<'a>, Option<&'a UserGroups>);

/// What an operator's path names.
pub(crate) struct NamedObject {
    /// The object, or the last link if what it names is not in this mount.
    pub ino: Ino,
    /// The symbolic links of the path, in this order.
    pub links: Vec<Ino>,
    /// Why the last link was not followed, although there may be something where it leads: it leads out of the mount, or
    /// to itself. A link that names nothing stands for itself.
    pub unfollowed: Option<Error>,
}

impl NamedObject {
    /// Returns what the whole path names.
    ///
    /// # Errors
    /// `InvalidInput` if that is not in this mount.
    fn whole(self) -> Result<Ino> {
        self.unfollowed.map_or(Ok(self.ino), Err)
    }
}

/// What a symbolic link at the end of a path stands for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LastLink {
    /// Itself.
    Kept,
    /// What it names.
    Followed,
}

impl Overlay {
    /// Returns the regular files that paths and globs name, each once. Reports as failed what cannot be found, and what
    /// `user` may not read.
    pub(super) async fn files_of(
        &self,
        paths: &[String],
        ask: Ask<'_>,
        user: Option<&UserGroups>,
        reporter: &Reporter,
    ) -> Result<Vec<Ino>> {
        let mut seen = std::collections::HashSet::new();
        let mut files = Vec::new();
        for typed in paths {
            match self.expand(typed, ask, user, reporter).await {
                Ok(found) => files.extend(found.into_iter().filter(|ino| seen.insert(*ino))),
                Err(e) => reporter.failed(typed.clone(), &e),
            }
        }
        Ok(files)
    }

    async fn expand(
        &self,
        typed: &str,
        ask: Ask<'_>,
        user: Option<&UserGroups>,
        reporter: &Reporter,
    ) -> Result<Vec<Ino>> {
        let inner = &self.inner;
        let (root, glob) = self.split(typed, ask, user).await?;
        let root = self.walk(&root, (ask, user), LastLink::Followed).await?.whole()?;
        let is_link = inner.node(root)?.state.lock().record.kind == FileKind::Symlink;
        if is_link && !matches!(ask, Ask::Nothing) {
            let what = format!("{typed}: it is a symbolic link, and where it leads is nothing");
            return Err(Error::new(ErrorKind::NotFound, Side::Application, what));
        }
        let ask = match ask {
            // The contents of files that a glob leaves out are not wanted.
            Ask::Contents(age, _) if glob.is_some() => Ask::Names(age),
            ask => ask,
        };
        let (tree, refused) = match user {
            Some(user) => inner.tree_for(root, ask, user).await?,
            None => (inner.tree(root, ask).await?, Vec::new()),
        };
        // The glob is about what is below the root, under whatever name that was reached.
        let above = inner.overlay_path(root).unwrap_or_default();
        let mut files = Vec::new();
        let mut matched_dirs: Vec<PoolPath> = Vec::new();
        let is_hit = |glob: &GlobMatcher, path: &PoolPath, dirs: &[PoolPath]| {
            let below = path.as_path().strip_prefix(above.as_path());
            below.is_ok_and(|below| glob.is_match(below) || dirs.iter().any(|dir| path.starts_with(dir)))
        };
        for (ino, kind) in tree {
            if let Some(glob) = &glob {
                let Some(path) = inner.overlay_path(ino).filter(|_| ino != root) else { continue };
                if !is_hit(glob, &path, &matched_dirs) {
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
        let mut is_refused = false;
        for (ino, why) in refused {
            // As in a shell, what a glob does not name may be closed to the user.
            let is_named =
                |glob: &GlobMatcher| inner.overlay_path(ino).is_some_and(|path| is_hit(glob, &path, &matched_dirs));
            if ino == root || glob.as_ref().is_none_or(is_named) {
                reporter.failed(inner.display(ino), &why);
                is_refused = true;
            }
        }
        if files.is_empty() && glob.is_some() && matched_dirs.is_empty() && !is_refused {
            return Err(Error::new(ErrorKind::NotFound, Side::Application, format!("{typed}: nothing matches")));
        }
        Ok(files)
    }

    /// Splits a typed path before its first pattern. A name that exists exactly as typed is not taken for a pattern.
    async fn split(
        &self,
        typed: &str,
        ask: Ask<'_>,
        user: Option<&UserGroups>,
    ) -> Result<(PoolPath, Option<GlobMatcher>)> {
        let names: Vec<&str> = typed.trim_matches('/').split('/').collect();
        for (at, name) in names.iter().enumerate() {
            if !name.contains(['*', '?', '[', '{']) {
                continue;
            }
            let probed = self.walk(&parse_path(&names[..=at].join("/"))?, (ask, user), LastLink::Kept).await;
            // A name that cannot be looked up, because the pool does not answer, may be a pattern for names that are known.
            let Ok(found) = probed else {
                let glob = GlobBuilder::new(&names[at..].join("/")).literal_separator(true).build();
                let glob =
                    glob.map_err(|e| Error::new(ErrorKind::InvalidInput, Side::Application, format!("{typed}: {e}")))?;
                return Ok((parse_path(&names[..at].join("/"))?, Some(glob.compile_matcher())));
            };
            found.whole()?;
        }
        Ok((parse_path(typed)?, None))
    }

    /// Returns the inode that a path names. If names must be fresh, the pool is asked again for a name that is cached
    /// as absent: another client may have just created it.
    pub(crate) async fn resolve_as(&self, path: &PoolPath, ask: Ask<'_>) -> Result<Ino> {
        self.resolve_for(path, ask, None).await
    }

    /// As [`Self::resolve_as`], for a user that must be allowed to search the directories on the way.
    ///
    /// # Errors
    /// `PermissionDenied`, whether there is such a name or not; `NotFound`.
    pub(crate) async fn resolve_for(&self, path: &PoolPath, ask: Ask<'_>, user: Option<&UserGroups>) -> Result<Ino> {
        let mut at = Ino::ROOT;
        for name in path.components() {
            at = self.step(at, name, (ask, user)).await.map_err(|e| e.context(path))?.ok_or_else(|| missing(path))?;
        }
        Ok(at)
    }

    /// Returns what a name in a directory stands for, as [`Self::resolve_for`] does.
    async fn step(&self, dir: Ino, name: &[u8], (ask, user): AskFor<'_>) -> Result<Option<Ino>> {
        if let Some(user) = user {
            self.inner.check_allowed(dir, user, SEARCH).await?;
        }
        let (Ask::Names(age) | Ask::Contents(age, _)) = ask else {
            return Ok(match self.lookup(dir, name).await? {
                Lookup::Found(entry) => {
                    self.forget(entry.attr.ino, 1);
                    Some(entry.attr.ino)
                }
                Lookup::Negative { .. } => None,
            });
        };
        let there = self.inner.find(dir, name).await?;
        if there.is_some() {
            return Ok(there);
        }
        self.inner.forget_absence(dir, name, age).await?;
        let there = self.inner.find(dir, name).await?;
        self.inner.tell_kernel_name(dir, name);
        Ok(there)
    }

    /// Returns what an operator's path names. Symbolic links on the path are followed as a program would follow them, as
    /// long as they stay in the mount: what is outside cannot be staged, flushed or evicted here.
    pub(crate) async fn named(&self, path: &PoolPath, ask: Ask<'_>) -> Result<NamedObject> {
        self.walk(path, (ask, None), LastLink::Followed).await
    }

    /// Checks that a path may be written back for a user, who has to reach it, and to read or own what is there. Of a path
    /// that does not exist, the flush tells.
    ///
    /// # Errors
    /// `PermissionDenied`; those of [`Self::follow_links`]; errors of the pool.
    pub async fn check_flush_for(&self, typed: &str, user: &UserGroups) -> Result<()> {
        let found = self.walk(&parse_path(typed)?, (Ask::Nothing, Some(user)), LastLink::Followed).await;
        let ino = match found {
            Err(e) if e.is_gone() => return Ok(()),
            found => found?.ino,
        };
        let (kind, owner) = {
            let node = self.inner.node(ino)?;
            let record = &node.state.lock().record;
            (record.kind, record.uid)
        };
        if owner == user.uid { Ok(()) } else { self.inner.check_readable(ino, kind, user).await }
    }

    /// Returns the path of what a path names, after its symbolic links.
    ///
    /// # Errors
    /// Those of the commands that take paths: `NotFound`, and `InvalidInput` if a link leads out of the mount.
    pub async fn follow_links(&self, path: &PoolPath) -> Result<TypedPath> {
        Ok(self.inner.typed_path(self.named(path, Ask::Nothing).await?.whole()?))
    }

    async fn walk(&self, path: &PoolPath, ask: AskFor<'_>, last: LastLink) -> Result<NamedObject> {
        let inner = &self.inner;
        let steps = |path: &[u8]| -> Vec<Box<[u8]>> {
            let names = path.split(|b| *b == b'/').filter(|name: &&[u8]| !matches!(*name, b"" | b"."));
            names.rev().map(Into::into).collect()
        };
        let mut rest = steps(path.as_bytes());
        // How many of the names in `rest` are of the path itself, and not of a link.
        let mut left = rest.len();
        // The directories above `at`. What a path names has no `..`, but what a link names may.
        let mut above = Vec::new();
        let (mut at, mut links, mut target) = (Ino::ROOT, Vec::new(), Vec::new());
        let via = |links: &[Ino], target: &[u8], why: &str| {
            let link = links.last().map_or_else(|| path.to_string(), |link| inner.display(*link));
            format!("{link} is a symbolic link to {}, {why}", target.escape_ascii())
        };
        let refused = |links: Vec<Ino>, why: String| {
            let unfollowed = Some(Error::new(ErrorKind::InvalidInput, Side::Application, why));
            Ok(NamedObject { ino: links.last().copied().unwrap_or(Ino::ROOT), links, unfollowed })
        };
        while let Some(name) = rest.pop() {
            let is_of_link = rest.len() >= left;
            left = left.min(rest.len());
            if *name == *b".." {
                let Some(dir) = above.pop() else {
                    let why = via(&links, &target, &format!("which is outside of this mount: {MEANT}"));
                    return refused(links, why);
                };
                at = dir;
                continue;
            }
            let found = match self.step(at, &name, ask).await {
                Ok(found) => found,
                Err(e) if is_of_link && names_nothing(&e) => None,
                Err(e) => return Err(e.context(path)),
            };
            let Some(found) = found else {
                return match links.last().copied() {
                    None => Err(missing(path)),
                    // The path ends with a link that names nothing.
                    Some(link) if is_of_link && left == 0 => Ok(NamedObject { ino: link, links, unfollowed: None }),
                    Some(_) => Err(missing(format!("{path}: {}", via(&links, &target, "and there is no such path")))),
                };
            };
            let is_link = inner.node(found)?.state.lock().record.kind == FileKind::Symlink;
            if !is_link || (rest.is_empty() && last == LastLink::Kept) {
                above.push(at);
                at = found;
                continue;
            }
            target = self.readlink(found).await.map_err(|e| e.context(path))?;
            if links.len() >= LINKS_MAX {
                return refused(links, format!("{path}: more than {LINKS_MAX} symbolic links"));
            }
            links.push(found);
            if target.starts_with(b"/") {
                let place = inner.mount.mountpoint().unwrap_or_default();
                let below = paths::below(Path::new(OsStr::from_bytes(&target)), place.as_ref());
                let Some(below) = below.filter(|_| !place.is_empty()) else {
                    let place = if place.is_empty() { "this mount" } else { &place };
                    let why = via(&links, &target, &format!("which is not below {place}: {MEANT}"));
                    return refused(links, why);
                };
                rest.extend(steps(&below));
                above.clear();
                at = Ino::ROOT;
            } else {
                rest.extend(steps(&target));
            }
        }
        Ok(NamedObject { ino: at, links, unfollowed: None })
    }
}

/// Returns whether a lookup tells that there is no such path.
fn names_nothing(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotDirectory | ErrorKind::NameTooLong)
}

fn missing(path: impl fmt::Display) -> Error {
    Error::new(ErrorKind::NotFound, Side::Application, path.to_string())
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
