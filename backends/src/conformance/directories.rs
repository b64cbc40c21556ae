//! Directories, names and listings.

use std::collections::BTreeSet;

use futures::{StreamExt, TryStreamExt, stream};

use crate::{ErrorKind, Expected, FileKind, LISTED_CONTENT_BYTES, PoolPath, RESERVED_PREFIX};

use super::context::{CaseContext, CaseFailure, Outcome, refused};
use super::{Case, case, ensure, ensure_eq};

pub(super) const CASES: &[Case] = &[
    case!(mkdir_makes_an_empty_directory),
    case!(root_is_a_directory),
    case!(only_empty_directories_are_removed),
    case!(listing_has_every_entry_with_its_attributes),
    case!(contents_that_come_along_are_those_of_their_versions),
    case!(three_thousand_entries_are_listed_once_each),
    case!(entries_that_vanish_while_listing_are_left_out),
    case!(odd_names_are_kept_byte_for_byte),
    case!(too_long_names_are_refused),
    case!(too_long_paths_are_known_before),
    case!(reserved_names_are_refused),
    case!(sync_dir_and_space_answer),
];

const MANY: usize = 3_000;
const AT_ONCE: usize = 32;

async fn mkdir_makes_an_empty_directory(t: CaseContext) -> Outcome {
    let made = t.mkdir("d").await?;
    ensure_eq!(made.kind, FileKind::Directory, "kind");
    ensure_eq!(t.stat("d").await?, made, "attributes returned and found");
    ensure!(t.names("d").await?.is_empty(), "a new directory has entries");
    refused("mkdir again", t.pool.mkdir(&t.path("d"), &t.attrs(0o755)).await, ErrorKind::Exists)?;
    t.put("f", "x").await?;
    refused("mkdir over a file", t.pool.mkdir(&t.path("f"), &t.attrs(0o755)).await, ErrorKind::Exists)
}

async fn root_is_a_directory(t: CaseContext) -> Outcome {
    let root = PoolPath::root();
    ensure_eq!(t.pool.stat(&root).await?.kind, FileKind::Directory, "kind of the root");
    // The root of a pool in use may have any number of entries.
    t.pool.list(&root).await?.try_next().await?;
    refused("mkdir of the root", t.pool.mkdir(&root, &t.attrs(0o755)).await, ErrorKind::Exists)?;
    refused("remove of the root", t.pool.remove(&root, &Expected::Anything).await, ErrorKind::IsDirectory)?;
    refused("remove_dir of the root", t.pool.remove_dir(&root).await, ErrorKind::Busy)
}

async fn only_empty_directories_are_removed(t: CaseContext) -> Outcome {
    t.mkdir("d").await?;
    t.mkdir("d/sub").await?;
    refused("remove_dir", t.pool.remove_dir(&t.path("d")).await, ErrorKind::NotEmpty)?;
    refused("remove", t.pool.remove(&t.path("d"), &Expected::Anything).await, ErrorKind::IsDirectory)?;
    t.pool.remove_dir(&t.path("d/sub")).await?;
    t.pool.remove_dir(&t.path("d")).await?;
    refused("stat", t.pool.stat(&t.path("d")).await, ErrorKind::NotFound)
}

async fn listing_has_every_entry_with_its_attributes(t: CaseContext) -> Outcome {
    t.put("file", "content").await?;
    t.mkdir("dir").await?;
    t.put("dir/below", "not listed above").await?;
    if t.can().objects.symlinks {
        t.pool.symlink(&t.path("link"), b"nowhere", &t.attrs(0o777)).await?;
    }
    let entries = t.list(&t.dir).await?;
    ensure_eq!(entries.len(), if t.can().objects.symlinks { 3 } else { 2 }, "number of entries");
    for entry in entries {
        ensure_eq!(entry.stat, t.stat(&entry.name).await?, "attributes of {}", entry.name.escape_ascii());
    }
    Ok(())
}

async fn contents_that_come_along_are_those_of_their_versions(t: CaseContext) -> Outcome {
    let most = LISTED_CONTENT_BYTES as usize;
    let sizes = [0, 1, 100, most - 1, most, most + 1];
    for size in sizes {
        t.put(format!("{size}"), "x".repeat(size)).await?;
    }
    t.mkdir("dir").await?;
    if t.can().objects.symlinks {
        t.pool.symlink(&t.path("link"), b"nowhere", &t.attrs(0o777)).await?;
    }
    let plain = t.list(&t.dir).await?;
    ensure!(plain.iter().all(|entry| entry.content.is_none()), "contents come along unasked");
    let enough = most as u64 * 3;
    for bytes in [enough, 101] {
        let pages: Vec<_> = t.pool.list_with_contents(&t.dir, bytes).await?.try_collect().await?;
        let mut entries = pages.concat();
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        let came: u64 =
            entries.iter().filter_map(|entry| entry.content.as_ref()).map(|content| content.len() as u64).sum();
        ensure!(came <= bytes, "{came} bytes came along, of {bytes}");
        if t.can().listed_contents && bytes == enough {
            ensure_eq!(came, (1 + 100 + 2 * most - 1) as u64, "bytes that came along");
        }
        for entry in &mut entries {
            let Some(content) = entry.content.take() else { continue };
            ensure_eq!(entry.stat.kind, FileKind::File, "kind of {}", entry.name.escape_ascii());
            ensure_eq!(content, t.content(&entry.name).await?, "content of {}", entry.name.escape_ascii());
        }
        ensure_eq!(entries, plain, "entries with contents and without");
    }
    Ok(())
}

async fn three_thousand_entries_are_listed_once_each(t: CaseContext) -> Outcome {
    let wanted: Vec<_> = (0..MANY).map(|n| format!("entry-{n:05}").into_bytes()).collect();
    let making = stream::iter(wanted.clone()).map(|name| {
        let t = t.clone();
        async move { t.mkfile(name).await.map(drop) }
    });
    making.buffer_unordered(AT_ONCE).try_collect::<()>().await?;
    ensure_eq!(t.list(&t.dir).await?.len(), MANY, "number of entries");
    let found: BTreeSet<_> = t.list(&t.dir).await?.into_iter().map(|entry| entry.name).collect();
    ensure!(found.iter().eq(&wanted), "the names differ from those that were made");
    Ok(())
}

async fn entries_that_vanish_while_listing_are_left_out(t: CaseContext) -> Outcome {
    for n in 0..100 {
        t.mkfile(format!("{n}")).await?;
    }
    let listing = t.pool.list(&t.dir).await?;
    for n in 0..50 {
        t.pool.remove(&t.path(format!("{n}")), &Expected::Anything).await?;
    }
    let pages: Vec<_> = listing.try_collect().await?;
    let names: BTreeSet<_> = pages.concat().into_iter().map(|entry| entry.name).collect();
    for n in 50..100 {
        ensure!(names.contains(format!("{n}").as_bytes()), "{n} is missing, though it was there all the time");
    }
    Ok(())
}

async fn odd_names_are_kept_byte_for_byte(t: CaseContext) -> Outcome {
    let longest = vec![b'n'; t.can().name_max as usize];
    let mut names: Vec<Vec<u8>> = vec![
        b" ".to_vec(),
        b" leading and trailing ".to_vec(),
        b"new\nline".to_vec(),
        b"tab\tquote\"back\\slash'percent%2Fplus+".to_vec(),
        b".hidden".to_vec(),
        b"...".to_vec(),
        b"~tilde".to_vec(),
        b"-dash".to_vec(),
        b"#hash?query&and=is*star[set]{brace}".to_vec(),
        "ünïcode \u{1f4be} e\u{301}".as_bytes().to_vec(),
        b"not utf-8 \xff\xfe\x80".to_vec(),
        b"\x01\x7f".to_vec(),
        b".forebay".to_vec(),
        longest,
    ];
    names.sort();
    for (n, name) in names.iter().enumerate() {
        t.put(name, format!("content {n}")).await?;
    }
    let found: Vec<_> = t.list(&t.dir).await?.into_iter().map(|entry| entry.name).collect();
    ensure_eq!(found, names, "names");
    for (n, name) in names.iter().enumerate() {
        ensure_eq!(t.content(name).await?, format!("content {n}"), "content of {}", name.escape_ascii());
    }
    t.mkdir("dir").await?;
    for name in &names {
        let inner = [b"dir/", &name[..]].concat();
        t.mkdir(&inner).await?;
        t.mkfile([&inner[..], b"/", &name[..]].concat()).await?;
    }
    ensure_eq!(t.names("dir").await?, names, "names of directories");
    Ok(())
}

async fn too_long_names_are_refused(t: CaseContext) -> Outcome {
    let name = vec![b'n'; t.can().name_max as usize + 1];
    let path = t.path(&name);
    refused("stat", t.pool.stat(&path).await, ErrorKind::NameTooLong)?;
    refused("put", t.put_if(&name, "x", &Expected::Anything).await, ErrorKind::NameTooLong)?;
    refused("mkdir", t.pool.mkdir(&path, &t.attrs(0o755)).await, ErrorKind::NameTooLong)
}

async fn too_long_paths_are_known_before(t: CaseContext) -> Outcome {
    let Some(max) = t.can().path_max else { return Ok(()) };
    let mut long = t.dir.clone();
    let bytes = |path: &PoolPath| path.components().map(|name| name.len() + 1).sum::<usize>() - 1;
    while bytes(&long) + 101 < max as usize {
        long = long.join(&[b'd'; 99]);
        t.pool.mkdir(&long, &t.attrs(0o755)).await?;
    }
    let longest = long.join(&vec![b'n'; max as usize - bytes(&long) - 1]);
    ensure_eq!(bytes(&longest), max as usize, "bytes of the longest path");
    t.pool.check_path(&longest)?;
    t.pool.mkdir(&longest, &t.attrs(0o755)).await?;
    ensure_eq!(t.pool.stat(&longest).await?.kind, FileKind::Directory, "kind of what has the longest path");
    let longer = long.join(&vec![b'n'; max as usize - bytes(&long)]);
    refused("check_path", t.pool.check_path(&longer), ErrorKind::NameTooLong)?;
    refused("mkdir", t.pool.mkdir(&longer, &t.attrs(0o755)).await, ErrorKind::NameTooLong)
}

async fn reserved_names_are_refused(t: CaseContext) -> Outcome {
    let name = [RESERVED_PREFIX, b"x"].concat();
    let path = t.path(&name);
    refused("stat", t.pool.stat(&path).await, ErrorKind::InvalidInput)?;
    refused("put", t.put_if(&name, "x", &Expected::Anything).await, ErrorKind::InvalidInput)?;
    refused("mkdir", t.pool.mkdir(&path, &t.attrs(0o755)).await, ErrorKind::InvalidInput)?;
    refused("list", t.pool.list(&path).await.map(drop), ErrorKind::InvalidInput)?;
    ensure!(t.list(&t.dir).await?.is_empty(), "something was made");
    Ok(())
}

async fn sync_dir_and_space_answer(t: CaseContext) -> Outcome {
    t.mkfile("f").await?;
    t.pool.sync_dir(&t.dir).await?;
    refused("sync_dir of a file", t.pool.sync_dir(&t.path("f")).await, ErrorKind::NotDirectory)?;
    refused("sync_dir of nothing", t.pool.sync_dir(&t.path("g")).await, ErrorKind::NotFound)?;
    let space = t.pool.space().await?;
    if space.free_bytes > space.total_bytes || space.available_bytes > space.total_bytes {
        return Err(CaseFailure::new(format!("more is free than there is: {space:?}")));
    }
    Ok(())
}
