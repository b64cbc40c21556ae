//! Hard links, symlinks and special files.

use crate::{ErrorKind, Expected, FileKind, SetAttrs};

use super::context::{CaseContext, Outcome, refused};
use super::{Case, case, ensure, ensure_eq};

pub(super) const CASES: &[Case] = &[
    case!(hard_links_name_one_file, needs | can | can.objects.hard_links),
    case!(put_keeps_hard_links_together, needs | can | can.objects.hard_links),
    case!(put_over_a_name_leaves_the_other_names_alone),
    case!(links_are_refused_where_they_cannot_be, needs | can | can.objects.hard_links),
    case!(symlinks_are_objects_of_their_own, needs | can | can.objects.symlinks),
    case!(no_path_goes_through_a_symlink, needs | can | can.objects.symlinks),
    case!(special_files_are_made, needs | can | can.objects.special_files),
];

async fn hard_links_name_one_file(t: CaseContext) -> Outcome {
    let (a, b) = (t.path("a"), t.path("b"));
    t.put("a", "content").await?;
    let linked = t.pool.link(&a, &b).await;
    if !t.can().objects.hard_links {
        refused("link", linked, ErrorKind::Unsupported)?;
        return refused("stat", t.pool.stat(&b).await, ErrorKind::NotFound);
    }
    let linked = linked?;
    ensure_eq!(linked.nlink, 2, "links");
    ensure!(linked.version.same_object(&t.stat("a").await?.version), "the names are two objects");
    t.pool.set_attrs(&b, &SetAttrs { size: Some(4), ..SetAttrs::default() }).await?;
    ensure_eq!(t.content("a").await?, "cont", "content by the other name");
    t.pool.remove(&a, &Expected::Anything).await?;
    ensure_eq!(t.stat("b").await?.nlink, 1, "links after one was removed");
    ensure_eq!(t.content("b").await?, "cont", "content by the remaining name");
    Ok(())
}

async fn put_keeps_hard_links_together(t: CaseContext) -> Outcome {
    if !t.can().objects.hard_links {
        return Ok(());
    }
    t.put("a", "a rather long first content").await?;
    let version = t.pool.link(&t.path("a"), &t.path("b")).await?.version;
    let put = t.put_if("b", "short", &Expected::Version(version.clone())).await?;
    ensure_eq!((put.nlink, put.size), (2, 5), "links and size");
    ensure_eq!(t.content("a").await?, "short", "content by the other name");
    ensure!(t.same_time(put.mtime, t.attrs(0).mtime), "mtime is {:?}", put.mtime);
    refused("old version", t.put_if("a", "x", &Expected::Version(version)).await, ErrorKind::Conflict)?;
    t.put("a", "anything").await?;
    ensure_eq!(t.content("b").await?, "anything", "content by the other name");
    ensure_eq!(t.list(&t.dir).await?.len(), 2, "number of entries");
    Ok(())
}

async fn put_over_a_name_leaves_the_other_names_alone(t: CaseContext) -> Outcome {
    t.put("a", "a rather long first content").await?;
    let mut version = t.stat("a").await?.version;
    if t.can().objects.hard_links {
        version = t.pool.link(&t.path("a"), &t.path("b")).await?.version;
    }
    let put = t.put_if("a", "short", &Expected::Name(version.clone())).await?;
    ensure_eq!((put.nlink, put.size), (1, 5), "links and size");
    ensure_eq!(t.content("a").await?, "short", "content");
    if t.can().objects.hard_links {
        ensure_eq!(t.content("b").await?, "a rather long first content", "content by the other name");
        ensure_eq!(t.stat("b").await?.nlink, 1, "links of what had the name");
    }
    refused("old version", t.put_if("a", "x", &Expected::Name(version)).await, ErrorKind::Conflict)?;
    ensure_eq!(t.content("a").await?, "short", "content after a refusal");
    Ok(())
}

async fn links_are_refused_where_they_cannot_be(t: CaseContext) -> Outcome {
    if !t.can().objects.hard_links {
        return Ok(());
    }
    t.put("f", "x").await?;
    t.put("g", "y").await?;
    t.mkdir("d").await?;
    let link = async |a: &str, b: &str| t.pool.link(&t.path(a), &t.path(b)).await;
    refused("link onto a file", link("f", "g").await, ErrorKind::Exists)?;
    refused("link onto a directory", link("f", "d").await, ErrorKind::Exists)?;
    refused("link of nothing", link("none", "h").await, ErrorKind::NotFound)?;
    refused("link into nothing", link("f", "none/h").await, ErrorKind::NotFound)?;
    refused("link of a directory", link("d", "h").await, ErrorKind::NotPermitted)
}

async fn symlinks_are_objects_of_their_own(t: CaseContext) -> Outcome {
    let path = t.path("l");
    let made = t.pool.symlink(&path, b"some/where \xff", &t.attrs(0o777)).await;
    if !t.can().objects.symlinks {
        refused("symlink", made, ErrorKind::Unsupported)?;
        return refused("stat", t.pool.stat(&path).await, ErrorKind::NotFound);
    }
    let made = made?;
    ensure_eq!((made.kind, made.size), (FileKind::Symlink, 12), "kind and size");
    ensure_eq!(t.pool.readlink(&path).await?, b"some/where \xff", "target");
    // xfs accepts targets of at most 1,023 bytes.
    let long = vec![b'x'; 1_000];
    t.pool.symlink(&t.path("long"), &long, &t.attrs(0o777)).await?;
    ensure_eq!(t.pool.readlink(&t.path("long")).await?, long, "long target");
    refused("symlink again", t.pool.symlink(&path, b"x", &t.attrs(0o777)).await, ErrorKind::Exists)?;
    let mode = SetAttrs { mode: Some(0o600), ..SetAttrs::default() };
    refused("mode of a symlink", t.pool.set_attrs(&path, &mode).await, ErrorKind::Unsupported)?;
    refused("read", t.pool.read(&path, &made.version, 0..1).await, ErrorKind::InvalidInput)?;
    t.put("f", "x").await?;
    refused("readlink of a file", t.pool.readlink(&t.path("f")).await, ErrorKind::InvalidInput)?;
    t.pool.remove(&path, &Expected::Version(made.version)).await?;
    refused("readlink of nothing", t.pool.readlink(&path).await, ErrorKind::NotFound)
}

async fn no_path_goes_through_a_symlink(t: CaseContext) -> Outcome {
    if !t.can().objects.symlinks {
        return Ok(());
    }
    t.mkdir("d").await?;
    t.put("d/f", "x").await?;
    for (name, target) in [("inside", &b"d"[..]), ("outside", b"/"), ("up", b"..")] {
        t.pool.symlink(&t.path(name), target, &t.attrs(0o777)).await?;
        let below = t.path(format!("{name}/f"));
        refused("stat", t.pool.stat(&below).await, ErrorKind::NotDirectory)?;
        refused("list", t.pool.list(&t.path(name)).await.map(drop), ErrorKind::NotDirectory)?;
        refused("mkdir", t.pool.mkdir(&below, &t.attrs(0o755)).await, ErrorKind::NotDirectory)?;
        let put = t.put_if(format!("{name}/f"), "x", &Expected::Anything).await;
        refused("put", put, ErrorKind::NotDirectory)?;
    }
    Ok(())
}

async fn special_files_are_made(t: CaseContext) -> Outcome {
    let attrs = t.attrs(0o644);
    let device = libc::makedev(1, 3);
    let made = t.pool.mknod(&t.path("char"), FileKind::CharDevice, device, &attrs).await;
    if !t.can().objects.special_files {
        refused("mknod of a device", made, ErrorKind::Unsupported)?;
        return refused("stat", t.pool.stat(&t.path("char")).await, ErrorKind::NotFound);
    }
    ensure_eq!((made?.rdev, t.stat("char").await?.kind), (device, FileKind::CharDevice), "character device");
    let kinds = [(FileKind::Fifo, 0), (FileKind::Socket, 0), (FileKind::BlockDevice, libc::makedev(7, 300))];
    for (kind, rdev) in kinds {
        let name = format!("{kind:?}");
        let path = t.path(&name);
        let stat = t.pool.mknod(&path, kind, rdev, &attrs).await?;
        ensure_eq!((stat.kind, stat.rdev, stat.size), (kind, rdev, 0), "{name}");
        ensure!(t.same_time(stat.mtime, attrs.mtime), "{name}: mtime is {:?}", stat.mtime);
        ensure_eq!(t.stat(&name).await?, stat, "{name}: attributes returned and found");
        refused(&name, t.pool.mknod(&path, kind, rdev, &attrs).await, ErrorKind::Exists)?;
        // These objects have no content; in particular, a fifo must not block the reader.
        refused(&name, t.pool.read(&path, &stat.version, 0..1).await, ErrorKind::InvalidInput)?;
    }
    let wrong = t.pool.mknod(&t.path("d"), FileKind::Directory, 0, &attrs).await;
    refused("mknod of a directory", wrong, ErrorKind::InvalidInput)
}
