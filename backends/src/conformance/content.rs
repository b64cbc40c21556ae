//! Contents: whole objects, ranges, holes, versions.

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};

use crate::{Error, ErrorKind, Expected, FileKind, Piece, Pool, PoolPath, SetAttrs, Side, Version};

use super::context::{CaseContext, CaseFailure, Outcome, pattern, refused, refused_as_one_of};
use super::{Case, case, ensure, ensure_eq};

pub(super) const CASES: &[Case] = &[
    case!(put_makes_a_file_with_content_and_attributes),
    case!(empty_files_are_files),
    case!(ranges_end_at_the_end_of_the_file),
    case!(files_of_64_mib_come_back),
    case!(holes_read_as_zeros),
    case!(pieces_must_ascend_and_fit),
    case!(a_broken_content_stream_changes_nothing),
    case!(a_dropped_put_leaves_nothing_behind),
    case!(every_change_makes_another_version),
    case!(reading_a_replaced_version_never_gives_the_new_bytes),
    case!(reading_a_version_changed_in_place_is_stale),
    case!(write_at_overwrites_and_grows, needs | can | can.ranged_write),
    case!(size_changes_cut_and_grow),
];

const BIG_BYTES: usize = 64 << 20;
const BIG_PIECE_BYTES: usize = 4 << 20;

async fn put_makes_a_file_with_content_and_attributes(t: CaseContext) -> Outcome {
    let put = t.put("f", "hello").await?;
    ensure_eq!(put.kind, FileKind::File, "kind");
    ensure_eq!(put.size, 5, "size");
    ensure_eq!(put.version.size(), 5, "size in the version");
    ensure!(t.same_time(put.mtime, t.attrs(0).mtime), "mtime is {:?}", put.mtime);
    ensure_eq!(t.stat("f").await?.version, put.version, "version returned and found");
    ensure_eq!(t.content("f").await?, "hello", "content");
    Ok(())
}

async fn empty_files_are_files(t: CaseContext) -> Outcome {
    let made = t.mkfile("made").await?;
    ensure_eq!((made.kind, made.size), (FileKind::File, 0), "mknod");
    let none = t.put_pieces("put", 0, Vec::new(), &Expected::Absent).await?;
    ensure_eq!((none.kind, none.size), (FileKind::File, 0), "put without pieces");
    let empty = t.put("piece", Bytes::new()).await?;
    ensure_eq!(empty.size, 0, "size");
    for name in ["made", "put", "piece"] {
        let stat = t.stat(name).await?;
        let data = t.pool.read(&t.path(name), &stat.version, 0..10).await?;
        ensure!(data.is_empty(), "{name} has {} bytes", data.len());
    }
    Ok(())
}

async fn ranges_end_at_the_end_of_the_file(t: CaseContext) -> Outcome {
    let data = pattern(1, 10_000);
    let version = t.put("f", data.clone()).await?.version;
    ranges_end_at_the_end_of(t.pool.as_ref(), &t.path("f"), &version, &data).await
}

/// `data`: the 10,000 bytes at `path`.
pub(super) async fn ranges_end_at_the_end_of(
    pool: &dyn Pool,
    path: &PoolPath,
    version: &Version,
    data: &Bytes,
) -> Outcome {
    for range in [0..0, 0..1, 0..10_000, 4_095..4_097, 9_999..10_000, 5_000..5_000] {
        let got = pool.read(path, version, range.clone()).await?;
        ensure_eq!(got, data.slice(range.start as usize..range.end as usize), "{range:?}");
    }
    for range in [9_990..10_010, 0..u64::MAX] {
        let got = pool.read(path, version, range.clone()).await?;
        ensure_eq!(got, data.slice(range.start as usize..), "{range:?}");
    }
    for range in [10_000..10_001, 20_000..30_000, u64::MAX - 1..u64::MAX] {
        let got = pool.read(path, version, range.clone()).await?;
        ensure!(got.is_empty(), "{range:?} behind the end has {} bytes", got.len());
    }
    #[expect(clippy::reversed_empty_ranges, reason = "that is what is refused")]
    let backwards = 5..4;
    refused("a range that ends before it starts", pool.read(path, version, backwards).await, ErrorKind::InvalidInput)
}

async fn files_of_64_mib_come_back(t: CaseContext) -> Outcome {
    let data = pattern(64, BIG_BYTES);
    let piece = |n: usize| Piece {
        offset: (n * BIG_PIECE_BYTES) as u64,
        data: data.slice(n * BIG_PIECE_BYTES..(n + 1) * BIG_PIECE_BYTES),
    };
    let pieces = (0..BIG_BYTES / BIG_PIECE_BYTES).map(piece).collect();
    let version = t.put_pieces("big", BIG_BYTES as u64, pieces, &Expected::Absent).await?.version;
    let path = t.path("big");
    // Ranges that are not aligned with the pieces.
    let step = 7 * 1_000_003_usize;
    let ranges = (0..BIG_BYTES).step_by(step).map(|from| from..(from + step).min(BIG_BYTES));
    let reading = stream::iter(ranges).map(|range| {
        let (t, version, path, data) = (t.clone(), version.clone(), path.clone(), data.clone());
        async move {
            let got = t.pool.read(&path, &version, range.start as u64..range.end as u64).await?;
            ensure!(got == data[range.clone()], "{range:?} differs from what was put");
            Ok::<_, CaseFailure>(())
        }
    });
    reading.buffer_unordered(4).try_collect::<()>().await
}

async fn holes_read_as_zeros(t: CaseContext) -> Outcome {
    let piece = |offset, data: &'static str| Piece { offset, data: data.into() };
    let size = 3 << 20;
    let put = t.put_pieces("f", size, vec![piece(1_000, "abc"), piece(2 << 20, "xyz")], &Expected::Absent).await?;
    ensure_eq!(put.size, size, "size");
    let mut wanted = vec![0; size as usize];
    wanted[1_000..1_003].copy_from_slice(b"abc");
    wanted[2 << 20..(2 << 20) + 3].copy_from_slice(b"xyz");
    ensure!(t.content("f").await? == wanted, "the content differs");
    let hollow = t.put_pieces("hollow", 1 << 20, Vec::new(), &Expected::Absent).await?;
    let data = t.pool.read(&t.path("hollow"), &hollow.version, 0..u64::MAX).await?;
    ensure!(data.len() == 1 << 20 && data.iter().all(|b| *b == 0), "a file that is one hole is not zeros");
    Ok(())
}

async fn pieces_must_ascend_and_fit(t: CaseContext) -> Outcome {
    let piece = |offset, length| Piece { offset, data: vec![1; length].into() };
    let wrong = [
        vec![piece(0, 11)],
        vec![piece(9, 2)],
        vec![piece(u64::MAX, 2)],
        vec![piece(0, 3), piece(2, 2)],
        vec![piece(5, 1), piece(0, 1)],
    ];
    t.put("old", "kept").await?;
    for pieces in wrong {
        let what = format!("{pieces:?}");
        for name in ["new", "old"] {
            let answer = t.put_pieces(name, 10, pieces.clone(), &Expected::Anything).await;
            refused(&what, answer, ErrorKind::InvalidInput)?;
        }
    }
    ensure_eq!(t.names_here().await?, [b"old".to_vec()], "names");
    ensure_eq!(t.content("old").await?, "kept", "content");
    Ok(())
}

async fn a_broken_content_stream_changes_nothing(t: CaseContext) -> Outcome {
    let old = t.put("old", "kept").await?;
    for name in ["new", "old"] {
        // The first piece is large enough to reach the pool before the stream fails.
        let pieces = [
            Ok(Piece { offset: 0, data: pattern(1, 3 << 20) }),
            Err(Error::new(ErrorKind::Corrupt, Side::Cache, "the source broke")),
        ];
        let content = stream::iter(pieces).boxed();
        let answer = t.pool.put(&t.path(name), 4 << 20, content, &t.attrs(0o644), &Expected::Anything).await;
        refused(name, answer, ErrorKind::Corrupt)?;
    }
    ensure_eq!(t.names_here().await?, [b"old".to_vec()], "names");
    ensure_eq!(t.stat("old").await?, old, "attributes");
    ensure_eq!(t.content("old").await?, "kept", "content");
    Ok(())
}

async fn a_dropped_put_leaves_nothing_behind(t: CaseContext) -> Outcome {
    let first = Piece { offset: 0, data: pattern(1, 3 << 20) };
    let (reached, waits) = tokio::sync::oneshot::channel::<()>();
    let content = stream::iter([Ok(first)]).chain(stream::once(async move {
        let _ = reached.send(());
        futures::future::pending().await
    }));
    let (path, attrs) = (t.path("new"), t.attrs(0o644));
    let put = t.pool.put(&path, 4 << 20, content.boxed(), &attrs, &Expected::Anything);
    tokio::select! {
        answer = put => return Err(CaseFailure::new(format!("put ended before its content: {answer:?}"))),
        _ = waits => {}
    }
    ensure_eq!(t.names_here().await?, Vec::<Vec<u8>>::new(), "names");
    Ok(())
}

async fn every_change_makes_another_version(t: CaseContext) -> Outcome {
    let mut versions = vec![t.put("f", "one").await?.version, t.put("f", "two").await?.version];
    versions.push(t.put("f", "two").await?.version);
    if t.can().ranged_write {
        versions.push(t.pool.write_at(&t.path("f"), 0, "TWO".into()).await?.version);
    }
    let size = SetAttrs { size: Some(2), ..SetAttrs::default() };
    versions.push(t.pool.set_attrs(&t.path("f"), &size).await?.version);
    for (n, version) in versions.iter().enumerate() {
        ensure!(!versions[..n].contains(version), "change {n} left the version {version:?}");
    }
    ensure_eq!(Some(&t.stat("f").await?.version), versions.last(), "the last version");
    Ok(())
}

async fn reading_a_replaced_version_never_gives_the_new_bytes(t: CaseContext) -> Outcome {
    let path = t.path("f");
    let old = t.put("f", "old content").await?.version;
    // A pool may keep the file open, and may then continue to return the old bytes.
    t.pool.read(&path, &old, 0..3).await?;
    let gone = [ErrorKind::Stale, ErrorKind::NotFound];
    let check = |answer: crate::Result<Bytes>| match answer {
        Ok(data) if data == "old content" => Ok(()),
        other => refused_as_one_of("the old version", other, &gone),
    };
    let new = t.put("f", "NEW CONTENT").await?.version;
    check(t.pool.read(&path, &old, 0..100).await)?;
    ensure_eq!(t.pool.read(&path, &new, 0..100).await?, "NEW CONTENT", "the new version");
    t.pool.remove(&path, &Expected::Anything).await?;
    check(t.pool.read(&path, &old, 0..100).await)?;
    t.mkdir("f").await?;
    check(
        t.pool
            .read(&path, &old, 0..100)
            .await
            .or_else(|error| if error.is(ErrorKind::IsDirectory) { Ok("old content".into()) } else { Err(error) }),
    )
}

async fn reading_a_version_changed_in_place_is_stale(t: CaseContext) -> Outcome {
    let path = t.path("f");
    let first = t.put("f", "0123456789").await?.version;
    t.pool.read(&path, &first, 0..3).await?;
    let cut = t.pool.set_attrs(&path, &SetAttrs { size: Some(5), ..SetAttrs::default() }).await?.version;
    refused("read of the uncut version", t.pool.read(&path, &first, 0..10).await, ErrorKind::Stale)?;
    ensure_eq!(t.pool.read(&path, &cut, 0..10).await?, "01234", "the cut version");
    if t.can().ranged_write {
        let written = t.pool.write_at(&path, 0, "abcde".into()).await?.version;
        refused("read of the version before", t.pool.read(&path, &cut, 0..10).await, ErrorKind::Stale)?;
        ensure_eq!(t.pool.read(&path, &written, 0..10).await?, "abcde", "the written version");
    }
    Ok(())
}

async fn write_at_overwrites_and_grows(t: CaseContext) -> Outcome {
    let path = t.path("f");
    t.put("f", "0123456789").await?;
    if !t.can().ranged_write {
        refused("write_at", t.pool.write_at(&path, 0, "x".into()).await, ErrorKind::Unsupported)?;
        ensure_eq!(t.content("f").await?, "0123456789", "content");
        return Ok(());
    }
    let stat = t.pool.write_at(&path, 3, "abc".into()).await?;
    ensure_eq!(stat.size, 10, "size");
    ensure_eq!(t.content("f").await?, "012abc6789", "content");
    let stat = t.pool.write_at(&path, 12, "end".into()).await?;
    ensure_eq!(stat, t.stat("f").await?, "attributes returned and found");
    ensure_eq!(t.content("f").await?, "012abc6789\0\0end", "content");
    t.mkdir("d").await?;
    refused("write_at to a directory", t.pool.write_at(&t.path("d"), 0, "x".into()).await, ErrorKind::IsDirectory)?;
    refused("write_at to nothing", t.pool.write_at(&t.path("g"), 0, "x".into()).await, ErrorKind::NotFound)?;
    refused("write_at at the end of time", t.pool.write_at(&path, u64::MAX, "xx".into()).await, ErrorKind::TooLarge)
}

async fn size_changes_cut_and_grow(t: CaseContext) -> Outcome {
    let path = t.path("f");
    t.put("f", "0123456789").await?;
    let resize = |size| SetAttrs { size: Some(size), ..SetAttrs::default() };
    ensure_eq!(t.pool.set_attrs(&path, &resize(4)).await?.size, 4, "size");
    let grown = t.pool.set_attrs(&path, &resize(8)).await?;
    ensure_eq!(grown, t.stat("f").await?, "attributes returned and found");
    ensure_eq!(t.content("f").await?, "0123\0\0\0\0", "content");
    t.mkdir("d").await?;
    refused("the size of a directory", t.pool.set_attrs(&t.path("d"), &resize(4)).await, ErrorKind::IsDirectory)
}

impl CaseContext {
    async fn names_here(&self) -> Outcome<Vec<Vec<u8>>> {
        Ok(self.list(&self.dir).await?.into_iter().map(|entry| entry.name).collect())
    }
}
