//! The part of the suite that concerns reading, for read-only pools: over files that the caller creates by the
//! server's own means.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt, stream};

use crate::{
    Attrs, DirEntry, ErrorKind, Expected, FileKind, Pool, PoolPath, RenameMode, SetAttrs, Stat, Time, Version,
};

use super::content::ranges_end_at_the_end_of;
use super::context::{CaseFailure, Outcome, pattern, refused, refused_as_one_of};
use super::{CaseResult, Report, ensure, ensure_eq};

/// Creates the files that the pool reads.
#[async_trait]
pub trait Origin: Send + Sync + 'static {
    /// Makes or replaces a file, and makes missing parent directories. `path` is relative to the pool's root.
    async fn put(&self, path: &str, content: Bytes) -> Result<(), String>;

    /// Whether a file of this name can exist on the server.
    fn holds(&self, _name: &str) -> bool {
        true
    }
}

const MANY: usize = 2_500;
const PUT_AT_ONCE: usize = 16;
const BIG_BYTES: usize = 20 << 20;
/// Servers report times in seconds.
const NEXT_SECOND: Duration = Duration::from_millis(1_100);

const ODD: [&str; 19] = [
    "a b",
    "100%",
    "%2F%41",
    "#hash",
    "what?",
    "this&that",
    "one+one",
    "is=equal",
    "a:b;c,d",
    "it's",
    "[set]{brace}(round)",
    "star*",
    "~tilde",
    "dollar$at@bang!",
    "under_score-dash.dot",
    ".hidden",
    "ünïcode \u{1f4be} e\u{301}",
    "<tag> \"quoted\" &amp;",
    "#every?one&of=them+at%20once",
];

/// A pool and the origin of its files.
#[derive(Clone)]
struct Reads {
    pool: Arc<dyn Pool>,
    origin: Arc<dyn Origin>,
}

type Check = fn(Reads) -> BoxFuture<'static, Outcome>;

/// All cases, in the order in which they run.
const CASES: &[(&str, Check)] = &[
    ("files_have_their_content", |t| files_have_their_content(t).boxed()),
    ("ranges_end_at_the_end_of_the_file", |t| ranges(t).boxed()),
    ("large_files_come_as_streams", |t| large_files_come_as_streams(t).boxed()),
    ("empty_files_are_files", |t| empty_files_are_files(t).boxed()),
    ("directories_that_only_files_imply_are_there", |t| implied_directories(t).boxed()),
    ("thousands_of_entries_are_listed_once_each", |t| thousands_of_entries(t).boxed()),
    ("odd_names_are_kept", |t| odd_names_are_kept(t).boxed()),
    ("what_is_not_there_is_told_from_what_is_no_directory", |t| what_is_not_there(t).boxed()),
    ("a_replaced_version_is_stale", |t| a_replaced_version_is_stale(t).boxed()),
    ("changes_are_refused", |t| changes_are_refused(t).boxed()),
];

/// Runs every case and prints the name and result of each to standard output. Some thousands of files of up to 20 MiB
/// are put into the pool's root and stay there.
pub async fn run(pool: Arc<dyn Pool>, origin: Arc<dyn Origin>) -> Report {
    let reads = Reads { pool, origin };
    let url = reads.pool.url();
    let mut results = Vec::new();
    for (name, check) in CASES {
        let failure = check(reads.clone()).await.err().map(String::from);
        println!("reading {url}: {name} ... {}", failure.as_deref().unwrap_or("ok"));
        results.push(CaseResult { name, failure });
    }
    Report { pool: url, results }
}

impl Reads {
    fn path(path: &str) -> Outcome<PoolPath> {
        PoolPath::parse(path).ok_or_else(|| CaseFailure::new(format!("{path} is no path")))
    }

    async fn put(&self, path: &str, content: impl Into<Bytes>) -> Outcome {
        let put = self.origin.put(path, content.into()).await;
        put.map_err(|why| CaseFailure::new(format!("{path} was not put there: {why}")))
    }

    async fn put_all(&self, files: Vec<(String, Bytes)>) -> Outcome {
        let putting = stream::iter(files).map(|(path, content)| async move { self.put(&path, content).await });
        putting.buffer_unordered(PUT_AT_ONCE).try_collect().await
    }

    async fn stat(&self, path: &str) -> Outcome<Stat> {
        let path = Self::path(path)?;
        self.pool.stat(&path).await.map_err(|error| CaseFailure::new(format!("stat {path}: {error}")))
    }

    async fn content(&self, path: &str) -> Outcome<Bytes> {
        let stat = self.stat(path).await?;
        Ok(self.pool.read(&Self::path(path)?, &stat.version, 0..u64::MAX).await?)
    }

    /// The entries of a directory by their names; each must equal the result of `stat`.
    async fn list(&self, path: &str) -> Outcome<Vec<DirEntry>> {
        let dir = Self::path(path)?;
        let pages: Vec<Vec<DirEntry>> = self.pool.list(&dir).await?.try_collect().await?;
        let mut entries = pages.concat();
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        for entry in &entries {
            let stat = self.pool.stat(&dir.join(&entry.name)).await?;
            ensure_eq!(entry.stat, stat, "{} as it is listed and found", entry.name.escape_ascii());
        }
        Ok(entries)
    }

    async fn names(&self, path: &str) -> Outcome<Vec<String>> {
        let names = self.list(path).await?.into_iter().map(|entry| entry.name.escape_ascii().to_string());
        Ok(names.collect())
    }
}

async fn files_have_their_content(t: Reads) -> Outcome {
    t.put("content/hello", "hello, world").await?;
    let stat = t.stat("content/hello").await?;
    ensure_eq!((stat.kind, stat.size, stat.version.size()), (FileKind::File, 12, 12), "kind and sizes");
    ensure!(stat.mtime > Time { secs: 1_500_000_000, nanos: 0 }, "mtime is {:?}", stat.mtime);
    ensure_eq!(t.content("content/hello").await?, "hello, world", "content");
    ensure_eq!(t.stat("content/hello").await?, stat, "attributes, asked for again");
    Ok(())
}

async fn ranges(t: Reads) -> Outcome {
    let data = pattern(1, 10_000);
    t.put("ranges/f", data.clone()).await?;
    let version = t.stat("ranges/f").await?.version;
    ranges_end_at_the_end_of(t.pool.as_ref(), &Reads::path("ranges/f")?, &version, &data).await
}

async fn large_files_come_as_streams(t: Reads) -> Outcome {
    let data = pattern(2, BIG_BYTES);
    t.put("large/f", data.clone()).await?;
    let (path, version) = (Reads::path("large/f")?, t.stat("large/f").await?.version);
    for range in [0..BIG_BYTES, 4_097..BIG_BYTES - 3] {
        let mut stream = t.pool.stream(&path, &version, range.start as u64..range.end as u64).await?;
        let mut at = range.start;
        while let Some(piece) = stream.try_next().await? {
            ensure!(data[at..].starts_with(&piece), "the bytes at {at} differ");
            at += piece.len();
        }
        ensure_eq!(at, range.end, "where the stream ends");
    }
    Ok(())
}

async fn empty_files_are_files(t: Reads) -> Outcome {
    t.put("empty/f", "").await?;
    let stat = t.stat("empty/f").await?;
    ensure_eq!((stat.kind, stat.size), (FileKind::File, 0), "kind and size");
    ensure!(t.content("empty/f").await?.is_empty(), "an empty file has content");
    ensure_eq!(t.names("empty").await?, ["f"], "names");
    Ok(())
}

async fn implied_directories(t: Reads) -> Outcome {
    t.put("tree/a/b/c/deep", "1").await?;
    t.put("tree/a/b/beside", "2").await?;
    t.put("tree/a-b", "3").await?;
    for dir in ["", "tree", "tree/a", "tree/a/b", "tree/a/b/c"] {
        ensure_eq!(t.stat(dir).await?.kind, FileKind::Directory, "kind of /{dir}");
    }
    ensure_eq!(t.names("tree").await?, ["a", "a-b"], "names");
    ensure_eq!(t.names("tree/a").await?, ["b"], "names");
    ensure_eq!(t.names("tree/a/b").await?, ["beside", "c"], "names");
    ensure!(t.names("").await?.contains(&"tree".to_owned()), "the root lacks `tree`");
    ensure_eq!(t.content("tree/a/b/c/deep").await?, "1", "content");
    Ok(())
}

async fn thousands_of_entries(t: Reads) -> Outcome {
    let wanted: BTreeSet<_> = (0..MANY).map(|n| format!("entry-{n:05}")).collect();
    let file = |name: &String| (format!("many/{name}"), Bytes::from(name.clone()));
    t.put_all(wanted.iter().map(file).collect()).await?;
    t.put_all((0..3).map(|n| (format!("many/dir-{n}/f"), Bytes::from_static(b"x"))).collect()).await?;
    let entries: Vec<Vec<DirEntry>> = t.pool.list(&Reads::path("many")?).await?.try_collect().await?;
    let entries = entries.concat();
    ensure_eq!(entries.len(), MANY + 3, "number of entries");
    let (dirs, files): (Vec<_>, Vec<_>) = entries.iter().partition(|entry| entry.stat.kind == FileKind::Directory);
    ensure_eq!(dirs.len(), 3, "directories");
    let found: BTreeSet<_> = files.iter().map(|entry| String::from_utf8_lossy(&entry.name).into_owned()).collect();
    ensure!(found == wanted, "the names differ from those that were put");
    ensure!(files.iter().all(|entry| entry.stat.size == 11), "a size differs");
    ensure_eq!(t.content("many/entry-01234").await?, "entry-01234", "content");
    Ok(())
}

async fn odd_names_are_kept(t: Reads) -> Outcome {
    let mut names: Vec<_> = ODD.into_iter().filter(|name| t.origin.holds(name)).collect();
    names.sort_unstable();
    let mut files = Vec::new();
    for name in &names {
        files.push((format!("odd/{name}"), Bytes::from(*name)));
        files.push((format!("odd-dirs/{name}/{name}"), Bytes::from(*name)));
    }
    t.put_all(files).await?;
    let escaped: Vec<_> = names.iter().map(|name| name.as_bytes().escape_ascii().to_string()).collect();
    ensure_eq!(t.names("odd").await?, escaped, "names");
    ensure_eq!(t.names("odd-dirs").await?, escaped, "names of directories");
    for name in names {
        ensure_eq!(t.content(&format!("odd/{name}")).await?, name, "content");
        ensure_eq!(t.names(&format!("odd-dirs/{name}")).await?, [name.as_bytes().escape_ascii().to_string()], "names");
        ensure_eq!(t.content(&format!("odd-dirs/{name}/{name}")).await?, name, "content");
    }
    Ok(())
}

async fn what_is_not_there(t: Reads) -> Outcome {
    t.put("there/f", "x").await?;
    let stat = t.stat("there/f").await?;
    let pool = &t.pool;
    for missing in ["nothing", "there/nothing", "nothing/f", "there/fo", "ther"] {
        let path = Reads::path(missing)?;
        refused(missing, pool.stat(&path).await, ErrorKind::NotFound)?;
        refused(missing, pool.list(&path).await.map(drop), ErrorKind::NotFound)?;
    }
    let below = Reads::path("there/f/below")?;
    refused("stat below a file", pool.stat(&below).await, ErrorKind::NotDirectory)?;
    let file = Reads::path("there/f")?;
    refused("list of a file", pool.list(&file).await.map(drop), ErrorKind::NotDirectory)?;
    refused("sync of a file", pool.sync_dir(&file).await, ErrorKind::NotDirectory)?;
    refused("readlink of a file", pool.readlink(&file).await, ErrorKind::InvalidInput)?;
    refused(
        "read of a directory",
        pool.read(&Reads::path("there")?, &stat.version, 0..1).await,
        ErrorKind::IsDirectory,
    )?;
    let gone = Reads::path("there/nothing")?;
    let read = pool.read(&gone, &stat.version, 0..1).await;
    refused_as_one_of("read of nothing", read, &[ErrorKind::Stale, ErrorKind::NotFound])?;
    let long = PoolPath::root().join(&vec![b'n'; pool.capabilities().name_max as usize + 1]);
    refused("a name that is too long", pool.stat(&long).await, ErrorKind::NameTooLong)
}

async fn a_replaced_version_is_stale(t: Reads) -> Outcome {
    let path = Reads::path("replaced/f")?;
    let mut before: Option<(Version, Bytes)> = None;
    // Content of another size, and then content of the same size.
    for content in [pattern(3, 3 << 20), pattern(4, 2 << 20), pattern(5, 2 << 20)] {
        tokio::time::sleep(NEXT_SECOND).await;
        t.put("replaced/f", content.clone()).await?;
        let now = t.stat("replaced/f").await?.version;
        if let Some((before, _)) = &before {
            ensure!(!now.same_content(before), "the version did not change: {now:?}");
            for range in [0..10, 1_000_000..1_000_010, 0..u64::MAX] {
                refused("an old version", t.pool.read(&path, before, range).await, ErrorKind::Stale)?;
            }
        }
        ensure!(t.pool.read(&path, &now, 0..u64::MAX).await? == content, "the content differs");
        let listed = t.list("replaced").await?;
        ensure!(listed.iter().any(|entry| entry.stat.version == now), "the listing has another version");
        before = Some((now, content));
    }
    // A read that runs during a replacement never returns a mixture of both contents.
    let Some((version, content)) = before else { return Ok(()) };
    let mut stream = t.pool.stream(&path, &version, 0..u64::MAX).await?;
    let first = stream.try_next().await?;
    tokio::time::sleep(NEXT_SECOND).await;
    t.put("replaced/f", pattern(6, 2 << 20)).await?;
    let rest = stream.try_collect::<Vec<_>>().await;
    match rest {
        Ok(rest) => {
            let all = first.into_iter().chain(rest).collect::<Vec<_>>().concat();
            ensure!(all == content, "the bytes are not those of the version");
            Ok(())
        }
        Err(error) => refused("a version that was replaced", Err::<(), _>(error), ErrorKind::Stale),
    }
}

async fn changes_are_refused(t: Reads) -> Outcome {
    t.put("kept/f", "kept").await?;
    let (file, new, dir) = (Reads::path("kept/f")?, Reads::path("kept/new")?, Reads::path("kept")?);
    let attrs = Attrs { mode: 0o644, uid: 0, gid: 0, atime: Time::now(), mtime: Time::now(), xattrs: Vec::new() };
    let pool = &t.pool;
    let no = ErrorKind::ReadOnly;
    let nothing = || stream::empty().boxed();
    ensure!(pool.capabilities().read_only, "it does not say that it is only read");
    refused("put", pool.put(&new, 0, nothing(), &attrs, &Expected::Absent).await, no)?;
    refused("put over", pool.put(&file, 0, nothing(), &attrs, &Expected::Anything).await, no)?;
    refused("write", pool.write_at(&file, 0, Bytes::from_static(b"x")).await, no)?;
    refused("mkdir", pool.mkdir(&new, &attrs).await, no)?;
    refused("symlink", pool.symlink(&new, b"f", &attrs).await, no)?;
    refused("mknod", pool.mknod(&new, FileKind::File, 0, &attrs).await, no)?;
    refused("link", pool.link(&file, &new).await, no)?;
    refused("remove", pool.remove(&file, &Expected::Anything).await, no)?;
    refused("rmdir", pool.remove_dir(&dir).await, no)?;
    refused("rename", pool.rename(&file, &new, RenameMode::Replace).await, no)?;
    let mode = SetAttrs { mode: Some(0o600), ..SetAttrs::default() };
    refused("chmod", pool.set_attrs(&file, &mode).await, no)?;
    refused("set an attribute", pool.set_xattr(&file, b"user.a", b"b").await, no)?;
    refused("remove an attribute", pool.remove_xattr(&file, b"user.a").await, no)?;
    ensure_eq!(t.names("kept").await?, ["f"], "names");
    ensure_eq!(t.content("kept/f").await?, "kept", "content");
    pool.space().await?;
    Ok(pool.sync_dir(&dir).await?)
}
