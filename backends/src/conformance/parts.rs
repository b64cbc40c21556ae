//! Content that is sent ahead of its object.

use bytes::{Bytes, BytesMut};
use futures::{StreamExt, TryStreamExt, stream};

use crate::{
    Capabilities, ErrorKind, Expected, FileKind, Part, Piece, Pieces, PoolPath, RESERVED_PREFIX, SentPart, Stat,
};

use super::context::{CaseContext, CaseFailure, Outcome, pattern, refused};
use super::{Case, case, ensure, ensure_eq};

pub(super) const CASES: &[Case] = &[
    case!(parts_are_sent_and_read_and_replaced_and_removed, needs sends_ahead),
    case!(parts_are_in_no_listing, needs sends_ahead),
    case!(parts_make_a_file, needs sends_ahead),
    case!(parts_that_are_gone_or_replaced_change_nothing, needs sends_ahead),
    case!(parts_that_are_wrong_change_nothing, needs sends_ahead),
];

/// Pages of the root's listing that are searched: a pool in use may have many.
const PAGES: usize = 4;
const PIECE_BYTES: usize = 3_000_000;

fn sends_ahead(can: &Capabilities) -> bool {
    can.parts_ahead.is_some()
}

fn content(data: &Bytes) -> Pieces<'static> {
    let data = data.clone();
    let pieces = (0..data.len())
        .step_by(PIECE_BYTES)
        .map(move |at| Ok(Piece { offset: at as u64, data: data.slice(at..(at + PIECE_BYTES).min(data.len())) }));
    stream::iter(pieces).boxed()
}

fn here(data: &Bytes) -> Part<'static> {
    Part::Here { len: data.len() as u64, content: content(data) }
}

/// Names of parts that belong to one case.
struct Parts {
    t: CaseContext,
    prefix: String,
    /// The least length of a part that is not the last.
    least: usize,
}

/// Runs a case with parts, and removes them at its end. Without the capability, checks that the pool refuses them.
async fn with_parts(t: CaseContext, names: &[&str], check: impl AsyncFnOnce(&Parts) -> Outcome) -> Outcome {
    let Some(least) = t.can().parts_ahead else { return are_refused(t).await };
    let parts = Parts { t, prefix: format!("trial-{:016x}", rand::random::<u64>()), least: least as usize };
    let outcome = check(&parts).await;
    for name in names {
        parts.t.pool.remove_part(&parts.name(name)).await?;
    }
    outcome
}

async fn are_refused(t: CaseContext) -> Outcome {
    let part = SentPart { name: "a".to_owned(), len: 1, tag: String::new() };
    let data = Bytes::from_static(b"x");
    refused("send_part", t.pool.send_part("a", 1, content(&data)).await, ErrorKind::Unsupported)?;
    refused("read_part", t.pool.read_part(&part, 0..1).await, ErrorKind::Unsupported)?;
    refused("remove_part", t.pool.remove_part("a").await, ErrorKind::Unsupported)?;
    let put = t.pool.put_parts(&t.path("f"), vec![here(&data)], &t.attrs(0o640), &Expected::Anything).await;
    refused("put_parts", put, ErrorKind::Unsupported)?;
    refused("stat", t.pool.stat(&t.path("f")).await, ErrorKind::NotFound)
}

impl Parts {
    fn name(&self, name: &str) -> String {
        format!("{}-{name}", self.prefix)
    }

    async fn send(&self, name: &str, data: &Bytes) -> Outcome<SentPart> {
        let name = self.name(name);
        let part = self.t.pool.send_part(&name, data.len() as u64, content(data)).await?;
        ensure_eq!((part.name.as_str(), part.len), (name.as_str(), data.len() as u64), "what was sent");
        Ok(part)
    }

    async fn read(&self, part: &SentPart) -> crate::Result<Bytes> {
        self.t.pool.read_part(part, 0..part.len).await
    }

    async fn put(&self, parts: Vec<Part<'_>>, expected: &Expected) -> crate::Result<Stat> {
        self.t.pool.put_parts(&self.t.path("f"), parts, &self.t.attrs(0o640), expected).await
    }

    async fn ensure_content(&self, stat: &Stat, wanted: &[&Bytes]) -> Outcome {
        let wanted: Vec<u8> = wanted.iter().flat_map(|part| part.iter().copied()).collect();
        ensure_eq!((stat.kind, stat.size), (FileKind::File, wanted.len() as u64), "kind and size");
        ensure_eq!(stat.mode, 0o640, "mode");
        ensure!(self.t.same_time(stat.mtime, self.t.attrs(0).mtime), "mtime is {:?}", stat.mtime);
        ensure_eq!(self.t.stat("f").await?.version, stat.version, "version returned and found");
        ensure!(self.t.content("f").await? == wanted, "the content differs from the parts");
        Ok(())
    }
}

async fn parts_are_sent_and_read_and_replaced_and_removed(t: CaseContext) -> Outcome {
    with_parts(t, &["a"], async |parts| {
        let pool = &parts.t.pool;
        // S3 takes it in parts.
        let data = pattern(1, 2 * parts.least + parts.least / 2 + 1);
        let part = parts.send("a", &data).await?;
        let (least, end) = (parts.least as u64, part.len);
        for range in [0..1, 0..end, least - 1..least + 1, end - 3..end, end - 3..end + 3, 5..5, end..end + 1] {
            let wanted = data.slice(range.start as usize..range.end.min(end) as usize);
            ensure!(pool.read_part(&part, range.clone()).await? == wanted, "{range:?} differs from what was sent");
        }
        let shorter = pattern(2, parts.least);
        let replaced = parts.send("a", &shorter).await?;
        ensure!(replaced.tag != part.tag, "two parts have the tag {}", part.tag);
        refused("read what was replaced", parts.read(&part).await, ErrorKind::Stale)?;
        refused("read none of what was replaced", pool.read_part(&part, 0..0).await, ErrorKind::Stale)?;
        ensure!(parts.read(&replaced).await? == shorter, "the content differs from what was sent last");
        for _ in 0..2 {
            pool.remove_part(&part.name).await?;
            refused("read what was removed", parts.read(&replaced).await, ErrorKind::NotFound)?;
        }
        for wrong in ["", "a/b", ".", "a b"] {
            refused(wrong, pool.send_part(wrong, 1, content(&"x".into())).await, ErrorKind::InvalidInput)?;
        }
        Ok(())
    })
    .await
}

async fn parts_are_in_no_listing(t: CaseContext) -> Outcome {
    with_parts(t, &["a"], async |parts| {
        let part = parts.send("a", &pattern(3, parts.least)).await?;
        let root = parts.t.pool.list(&PoolPath::root()).await?;
        let pages: Vec<_> = root.take(PAGES).try_collect().await?;
        let is_all = pages.len() < PAGES;
        let names: Vec<Vec<u8>> = pages.concat().into_iter().map(|entry| entry.name).collect();
        let of_parts = |name: &&Vec<u8>| name.starts_with(RESERVED_PREFIX) || **name == part.name.as_bytes();
        ensure!(!names.iter().any(|name| of_parts(&name)), "the root shows the part: {names:?}");
        let own = parts.t.dir.components().next().unwrap_or_default();
        ensure!(!is_all || names.iter().any(|name| name == own), "{} is not in the root", own.escape_ascii());
        ensure_eq!(parts.t.list(&parts.t.dir).await?.len(), 0, "names in the directory of the case");
        Ok(())
    })
    .await
}

async fn parts_make_a_file(t: CaseContext) -> Outcome {
    with_parts(t, &["a", "b"], async |parts| {
        // On S3, the third part ends with less than an upload can have before the end.
        let (a, b) = (pattern(4, 2 * parts.least + 1), pattern(5, parts.least));
        let (middle, end) = (pattern(6, parts.least + parts.least / 8), pattern(7, 1_000));
        let sent = (parts.send("a", &a).await?, parts.send("b", &b).await?);
        let list = || vec![Part::Sent(sent.0.clone()), here(&middle), Part::Sent(sent.1.clone()), here(&end)];
        let first = parts.put(list(), &Expected::Absent).await?;
        parts.ensure_content(&first, &[&a, &middle, &b, &end]).await?;
        refused("put_parts over it", parts.put(list(), &Expected::Absent).await, ErrorKind::Conflict)?;

        let turned = vec![here(&middle), Part::Sent(sent.1.clone()), Part::Sent(sent.0.clone())];
        let second = parts.put(turned, &Expected::Version(first.version.clone())).await?;
        parts.ensure_content(&second, &[&middle, &b, &a]).await?;
        let old = Expected::Version(first.version);
        refused("put_parts over an old version", parts.put(list(), &old).await, ErrorKind::Conflict)?;
        parts.ensure_content(&second, &[&middle, &b, &a]).await?;

        let third = parts.put(vec![Part::Sent(sent.1.clone())], &Expected::Anything).await?;
        parts.ensure_content(&third, &[&b]).await?;
        let fourth = parts.put(vec![here(&end)], &Expected::Anything).await?;
        parts.ensure_content(&fourth, &[&end]).await?;
        let empty = parts.put(Vec::new(), &Expected::Version(fourth.version)).await?;
        parts.ensure_content(&empty, &[]).await?;

        // A hole.
        let hole = BytesMut::zeroed(parts.least + 1).freeze();
        let hollow = Part::Here { len: hole.len() as u64, content: stream::empty().boxed() };
        let last = parts.put(vec![hollow, Part::Sent(sent.1.clone())], &Expected::Anything).await?;
        parts.ensure_content(&last, &[&hole, &b]).await?;
        ensure!(parts.read(&sent.0).await? == a, "a part changed when it was put");
        ensure!(parts.read(&sent.1).await? == b, "a part changed when it was put");
        Ok(())
    })
    .await
}

async fn parts_that_are_gone_or_replaced_change_nothing(t: CaseContext) -> Outcome {
    with_parts(t, &["a", "b"], async |parts| {
        let data = pattern(8, parts.least);
        let (a, b) = (parts.send("a", &data).await?, parts.send("b", &data).await?);
        let kept: Bytes = "kept".into();
        let before = parts.put(vec![here(&kept)], &Expected::Absent).await?;
        parts.t.pool.remove_part(&b.name).await?;
        let list = || vec![Part::Sent(a.clone()), Part::Sent(b.clone()), here(&kept)];
        refused("a part that is gone", parts.put(list(), &Expected::Anything).await, ErrorKind::NotFound)?;
        parts.send("b", &pattern(9, parts.least)).await?;
        refused("a part that was replaced", parts.put(list(), &Expected::Anything).await, ErrorKind::Stale)?;
        parts.send("b", &pattern(9, parts.least + 1)).await?;
        refused("a part that became longer", parts.put(list(), &Expected::Anything).await, ErrorKind::Stale)?;
        parts.ensure_content(&before, &[&kept]).await?;
        parts.send("b", &data).await.map(drop)
    })
    .await
}

async fn parts_that_are_wrong_change_nothing(t: CaseContext) -> Outcome {
    with_parts(t, &["a", "b"], async |parts| {
        let (pool, kept) = (&parts.t.pool, Bytes::from_static(b"kept"));
        let before = parts.put(vec![here(&kept)], &Expected::Absent).await?;
        let whole = pattern(10, parts.least);
        let sent = parts.send("a", &whole).await?;
        let short = whole.slice(1..);
        let answer = parts.put(vec![here(&short), Part::Sent(sent.clone())], &Expected::Anything).await;
        refused("a short part in the middle", answer, ErrorKind::InvalidInput)?;
        let long = Part::Here { len: parts.least as u64, content: content(&pattern(11, parts.least + 1)) };
        let answer = parts.put(vec![Part::Sent(sent.clone()), long], &Expected::Anything).await;
        refused("a part with more content than it says", answer, ErrorKind::InvalidInput)?;
        let broken = || {
            let piece = Ok(Piece { offset: 0, data: whole.clone() });
            let end = Err(crate::Error::new(ErrorKind::Corrupt, crate::Side::Cache, "the source broke"));
            stream::iter([piece, end]).boxed()
        };
        let answer = pool.send_part(&parts.name("b"), parts.least as u64, broken()).await;
        refused("a part whose source breaks", answer, ErrorKind::Corrupt)?;
        let broken = Part::Here { len: parts.least as u64, content: broken() };
        let answer = parts.put(vec![Part::Sent(sent.clone()), broken], &Expected::Anything).await;
        refused("parts whose source breaks", answer, ErrorKind::Corrupt)?;
        parts.ensure_content(&before, &[&kept]).await?;
        let nowhere = parts.t.path("nowhere/f");
        let answer = pool.put_parts(&nowhere, vec![Part::Sent(sent)], &parts.t.attrs(0o640), &Expected::Anything).await;
        refused("a directory that is not there", answer, ErrorKind::NotFound)?;
        Ok::<_, CaseFailure>(())
    })
    .await
}
