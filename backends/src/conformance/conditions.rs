//! Conditional changes, and racing writers and readers.

use futures::future::join_all;

use crate::{ConditionalPut, ErrorKind, Expected, Stat, Version};

use super::context::{CaseContext, CaseFailure, Outcome, refused};
use super::{Case, case, ensure, ensure_eq};

pub(super) const CASES: &[Case] = &[
    case!(put_if_absent_creates_once),
    case!(put_if_version_replaces_that_version_only),
    case!(put_of_anything_always_wins),
    case!(remove_if_version_removes_that_version_only),
    case!(what_is_known_is_known_to_be_there_only_while_it_is),
    case!(of_sixteen_writers_if_absent_one_wins),
    case!(of_sixteen_writers_if_version_one_wins),
    case!(racing_puts_and_reads_are_never_torn),
];

const WRITERS: usize = 16;
const ROUNDS: usize = 60;

async fn put_if_absent_creates_once(t: CaseContext) -> Outcome {
    let first = t.put_if("f", "first", &Expected::Absent).await?;
    refused("put", t.put_if("f", "second", &Expected::Absent).await, ErrorKind::Conflict)?;
    ensure_eq!(t.content("f").await?, "first", "content");
    ensure_eq!(t.stat("f").await?.version, first.version, "version");
    t.mkdir("d").await?;
    refused("put over a directory", t.put_if("d", "x", &Expected::Absent).await, ErrorKind::Conflict)?;
    if t.can().objects.symlinks {
        t.pool.symlink(&t.path("l"), b"nowhere", &t.attrs(0o777)).await?;
        refused("put over a symlink", t.put_if("l", "x", &Expected::Absent).await, ErrorKind::Conflict)?;
    }
    only_names(&t, if t.can().objects.symlinks { &["d", "f", "l"] } else { &["d", "f"] }).await
}

async fn put_if_version_replaces_that_version_only(t: CaseContext) -> Outcome {
    let first = t.put("f", "first").await?.version;
    let second = t.put_if("f", "second", &Expected::Version(first.clone())).await?.version;
    refused("old version", t.put_if("f", "x", &Expected::Version(first)).await, ErrorKind::Conflict)?;
    ensure_eq!(t.content("f").await?, "second", "content");
    let third = t.put_if("f", "third", &Expected::Version(second)).await?;
    ensure_eq!(t.stat("f").await?.version, third.version, "version returned and found");
    let wanted = Expected::Version(third.version);
    refused("no target", t.put_if("g", "x", &wanted).await, ErrorKind::Conflict)?;
    t.pool.remove(&t.path("f"), &Expected::Anything).await?;
    refused("removed target", t.put_if("f", "x", &wanted).await, ErrorKind::Conflict)?;
    t.mkdir("f").await?;
    refused("a directory instead", t.put_if("f", "x", &wanted).await, ErrorKind::Conflict)?;
    only_names(&t, &["f"]).await
}

async fn put_of_anything_always_wins(t: CaseContext) -> Outcome {
    t.put_if("f", "one", &Expected::Anything).await?;
    t.put_if("f", "two", &Expected::Anything).await?;
    ensure_eq!(t.content("f").await?, "two", "content");
    t.mkdir("d").await?;
    refused("put over a directory", t.put_if("d", "x", &Expected::Anything).await, ErrorKind::IsDirectory)?;
    if t.can().objects.symlinks {
        t.pool.symlink(&t.path("l"), b"f", &t.attrs(0o777)).await?;
        t.put("l", "in place of the link").await?;
        ensure_eq!(t.content("f").await?, "two", "content of what the link named");
        ensure_eq!(t.content("l").await?, "in place of the link", "content");
        t.pool.remove(&t.path("l"), &Expected::Anything).await?;
    }
    only_names(&t, &["d", "f"]).await
}

async fn remove_if_version_removes_that_version_only(t: CaseContext) -> Outcome {
    let path = t.path("f");
    let first = t.put("f", "first").await?.version;
    let second = t.put("f", "second").await?.version;
    refused("old version", t.pool.remove(&path, &Expected::Version(first)).await, ErrorKind::Conflict)?;
    refused("absent", t.pool.remove(&path, &Expected::Absent).await, ErrorKind::Conflict)?;
    ensure_eq!(t.content("f").await?, "second", "content");
    t.pool.remove(&path, &Expected::Version(second.clone())).await?;
    refused("stat", t.pool.stat(&path).await, ErrorKind::NotFound)?;
    refused("remove again", t.pool.remove(&path, &Expected::Version(second)).await, ErrorKind::NotFound)?;
    t.pool.remove(&path, &Expected::Absent).await?;
    refused("remove anything", t.pool.remove(&path, &Expected::Anything).await, ErrorKind::NotFound)
}

async fn what_is_known_is_known_to_be_there_only_while_it_is(t: CaseContext) -> Outcome {
    let path = t.path("f");
    let first = t.put("f", "first").await?.version;
    ensure_eq!(t.pool.still_has(&path, &first).await?, t.can().versions.alone, "what is there");
    t.put("f", "second").await?;
    ensure!(!t.pool.still_has(&path, &first).await?, "what was replaced");
    t.pool.remove(&path, &Expected::Anything).await?;
    ensure!(!t.pool.still_has(&path, &first).await?, "what was removed");
    t.mkdir("f").await?;
    ensure!(!t.pool.still_has(&path, &first).await?, "what is a directory now");
    Ok(())
}

async fn of_sixteen_writers_if_absent_one_wins(t: CaseContext) -> Outcome {
    for round in 0..4 {
        race(&t, &format!("f{round}"), &Expected::Absent).await?;
    }
    Ok(())
}

async fn of_sixteen_writers_if_version_one_wins(t: CaseContext) -> Outcome {
    for round in 0..4 {
        let name = format!("f{round}");
        let version = t.put(&name, "before").await?.version;
        race(&t, &name, &Expected::Version(version)).await?;
    }
    Ok(())
}

async fn race(t: &CaseContext, name: &str, expected: &Expected) -> Outcome {
    let writers = (0..WRITERS).map(|n| {
        let (t, name, expected) = (t.clone(), name.to_owned(), expected.clone());
        tokio::spawn(async move { t.put_if(name, format!("writer {n}"), &expected).await })
    });
    let mut winners: Vec<(usize, Stat)> = Vec::new();
    for (n, answer) in join_all(writers).await.into_iter().enumerate() {
        match answer? {
            Ok(stat) => winners.push((n, stat)),
            Err(error) if error.is(ErrorKind::Conflict) => {}
            Err(error) => return Err(error.into()),
        }
    }
    ensure!(!winners.is_empty(), "no writer won");
    let content = t.content(name).await?;
    ensure!(
        winners.iter().any(|(n, _)| content == format!("writer {n}")),
        "the content is no winner's: {content:?}, won by {winners:?}"
    );
    if t.can().conditional_put == ConditionalPut::Atomic {
        ensure_eq!(winners.len(), 1, "winners");
        ensure_eq!(t.stat(name).await?.version, winners[0].1.version, "version returned and found");
    }
    Ok(())
}

/// Each version is one repeated byte whose value depends on the size, so that every mixture is visible.
async fn racing_puts_and_reads_are_never_torn(t: CaseContext) -> Outcome {
    let content = |n: usize| vec![n as u8; 20_000 + n * 1_000];
    t.put("f", content(1)).await?;
    let writer = {
        let t = t.clone();
        tokio::spawn(async move {
            for round in 0..ROUNDS {
                t.put("f", content(1 + round % 7)).await?;
            }
            Ok::<_, CaseFailure>(())
        })
    };
    let readers = (0..3).map(|_| {
        let t = t.clone();
        tokio::spawn(async move {
            let mut reads = 0;
            for _ in 0..ROUNDS * 10 {
                let stat = t.stat("f").await?;
                reads += usize::from(check_read(&t, &stat.version).await?);
            }
            Ok::<_, CaseFailure>(reads)
        })
    });
    let readers: Vec<_> = readers.collect();
    writer.await??;
    for reader in readers {
        reader.await??;
    }
    let stat = t.stat("f").await?;
    ensure!(check_read(&t, &stat.version).await?, "the last version cannot be read");
    Ok(())
}

async fn check_read(t: &CaseContext, version: &Version) -> Outcome<bool> {
    let data = match t.pool.read(&t.path("f"), version, 0..u64::MAX).await {
        Ok(data) => data,
        Err(error) if error.is(ErrorKind::Stale) => return Ok(false),
        Err(error) => return Err(error.into()),
    };
    ensure_eq!(data.len() as u64, version.size(), "length read and length of the version");
    let first = data.first().copied().unwrap_or(0);
    ensure!(data.iter().all(|b| *b == first), "bytes of two versions in one read");
    ensure_eq!(data.len(), 20_000 + usize::from(first) * 1_000, "length for this content");
    Ok(true)
}

async fn only_names(t: &CaseContext, names: &[&str]) -> Outcome {
    let found: Vec<_> = t.list(&t.dir).await?.into_iter().map(|entry| entry.name).collect();
    ensure_eq!(found, names.iter().map(|name| name.as_bytes().to_vec()).collect::<Vec<_>>(), "names");
    Ok(())
}
