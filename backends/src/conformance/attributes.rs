//! Modes, owners, times and extended attributes.

use futures::{StreamExt, stream};

use crate::{Attrs, ErrorKind, Expected, FileKind, SetAttrs, Stat, Time};

use super::context::{CaseContext, CaseFailure, Outcome, refused};
use super::{Case, case, ensure, ensure_eq};

pub(super) const CASES: &[Case] = &[
    case!(new_objects_have_the_attributes_they_are_given),
    case!(modes_are_set_with_all_their_bits, needs | can | can.objects.owners),
    case!(owners_are_set, needs | can | can.objects.owners),
    case!(times_are_set_to_the_nanosecond),
    case!(unchanged_attributes_stay),
    case!(attributes_are_set_only_on_the_content_that_is_meant),
    case!(put_replaces_attributes_too),
    case!(extended_attributes_are_set_listed_and_removed, needs | can | can.objects.xattrs),
    case!(put_and_mkdir_set_extended_attributes, needs | can | can.objects.xattrs),
    case!(access_control_lists_are_extended_attributes, needs | can | can.objects.xattrs),
];

type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

async fn new_objects_have_the_attributes_they_are_given(t: CaseContext) -> Outcome {
    let attrs = t.attrs(0o751);
    let check = |what: &str, stat: &Stat| {
        if t.can().objects.symlink_times || stat.kind != FileKind::Symlink {
            ensure!(t.same_time(stat.mtime, attrs.mtime), "{what}: mtime is {:?}", stat.mtime);
            ensure!(t.same_time(stat.atime, attrs.atime), "{what}: atime is {:?}", stat.atime);
        }
        if t.can().objects.owners && stat.kind != FileKind::Symlink {
            ensure_eq!(format!("{:o}", stat.mode), "751", "{what}: mode");
        }
        ensure_eq!((stat.uid, stat.gid), (attrs.uid, attrs.gid), "{what}: owner");
        Ok(())
    };
    let put = t.pool.put(&t.path("put"), 0, stream::empty().boxed(), &attrs, &Expected::Absent).await?;
    check("put", &put)?;
    check("mkdir", &t.pool.mkdir(&t.path("mkdir"), &attrs).await?)?;
    check("mknod", &t.pool.mknod(&t.path("mknod"), FileKind::File, 0, &attrs).await?)?;
    if t.can().objects.symlinks {
        check("symlink", &t.pool.symlink(&t.path("symlink"), b"nowhere", &attrs).await?)?;
    }
    for entry in t.list(&t.dir).await? {
        check(&format!("listed {}", entry.name.escape_ascii()), &entry.stat)?;
    }
    Ok(())
}

async fn modes_are_set_with_all_their_bits(t: CaseContext) -> Outcome {
    t.put("file", "x").await?;
    t.mkdir("dir").await?;
    if !t.can().objects.owners {
        return Ok(());
    }
    for mode in [0o000, 0o400, 0o777, 0o1755, 0o2755, 0o4755, 0o7777] {
        let changes = SetAttrs { mode: Some(mode), ..SetAttrs::default() };
        for name in ["file", "dir"] {
            let stat = t.pool.set_attrs(&t.path(name), &changes).await?;
            ensure_eq!(format!("{:o}", stat.mode), format!("{mode:o}"), "mode of {name}");
            ensure_eq!(t.stat(name).await?.version, stat.version, "version of {name} returned and found");
        }
        let name = format!("put-{mode:o}");
        let attrs = t.attrs(mode);
        let stat = t.pool.put(&t.path(&name), 0, stream::empty().boxed(), &attrs, &Expected::Absent).await?;
        ensure_eq!(format!("{:o}", stat.mode), format!("{mode:o}"), "mode of {name}");
    }
    Ok(())
}

async fn owners_are_set(t: CaseContext) -> Outcome {
    let before = t.put("f", "x").await?;
    let changes = SetAttrs { uid: Some(12_345), gid: Some(54_321), ..SetAttrs::default() };
    let after = t.pool.set_attrs(&t.path("f"), &changes).await?;
    if !t.can().objects.owners {
        ensure_eq!((after.uid, after.gid), (before.uid, before.gid), "owner without the right to change it");
        return Ok(());
    }
    ensure_eq!((after.uid, after.gid), (12_345, 54_321), "owner");
    let group = SetAttrs { gid: Some(7), ..SetAttrs::default() };
    let after = t.pool.set_attrs(&t.path("f"), &group).await?;
    ensure_eq!((after.uid, after.gid), (12_345, 7), "owner after a change of the group");
    let attrs = Attrs { uid: 11, gid: 12, mode: 0o6755, ..t.attrs(0) };
    let put = t.pool.put(&t.path("p"), 0, stream::empty().boxed(), &attrs, &Expected::Absent).await?;
    ensure_eq!((put.uid, put.gid, put.mode), (11, 12, 0o6755), "owner and set-id bits of a put");
    if t.can().objects.symlinks {
        t.pool.symlink(&t.path("l"), b"f", &t.attrs(0o777)).await?;
        let link = t.pool.set_attrs(&t.path("l"), &changes).await?;
        ensure_eq!((link.kind, link.uid, link.gid), (FileKind::Symlink, 12_345, 54_321), "owner of a symlink");
        ensure_eq!(t.stat("f").await?.gid, 7, "group of what the symlink names");
    }
    Ok(())
}

async fn times_are_set_to_the_nanosecond(t: CaseContext) -> Outcome {
    t.put("file", "x").await?;
    t.mkdir("dir").await?;
    let mut names = vec!["file", "dir"];
    if t.can().objects.symlinks && t.can().objects.symlink_times {
        t.pool.symlink(&t.path("link"), b"file", &t.attrs(0o777)).await?;
        names.push("link");
    }
    for (secs, nanos) in [(0, 0), (1, 1), (1_234_567_890, 123_456_789), (1_999_999_999, 999_999_999)] {
        let (atime, mtime) = (Time { secs, nanos }, Time { secs: secs + 5, nanos: nanos / 2 });
        let changes = SetAttrs { atime: Some(atime), mtime: Some(mtime), ..SetAttrs::default() };
        for name in &names {
            let stat = t.pool.set_attrs(&t.path(name), &changes).await?;
            ensure!(t.same_time(stat.atime, atime), "atime of {name}: {:?} is not {atime:?}", stat.atime);
            ensure!(t.same_time(stat.mtime, mtime), "mtime of {name}: {:?} is not {mtime:?}", stat.mtime);
        }
    }
    Ok(())
}

async fn unchanged_attributes_stay(t: CaseContext) -> Outcome {
    let before = t.put("f", "content").await?;
    let mtime = Time { secs: 1_111_111_111, nanos: 0 };
    let after = t.pool.set_attrs(&t.path("f"), &SetAttrs { mtime: Some(mtime), ..SetAttrs::default() }).await?;
    ensure!(t.same_time(after.atime, before.atime), "atime changed to {:?}", after.atime);
    ensure_eq!((after.mode, after.uid, after.gid), (before.mode, before.uid, before.gid), "mode and owner");
    ensure_eq!((after.kind, after.size, after.nlink), (before.kind, before.size, before.nlink), "the rest");
    let nothing = t.pool.set_attrs(&t.path("f"), &SetAttrs::default()).await?;
    ensure!(nothing.version.same_content(&after.version), "changing nothing made other content");
    ensure_eq!(t.content("f").await?, "content", "content");
    Ok(())
}

async fn attributes_are_set_only_on_the_content_that_is_meant(t: CaseContext) -> Outcome {
    let known = t.put("file", "first").await?.version;
    let changes =
        |only_if| SetAttrs { mtime: Some(Time { secs: 1_000_000_000, nanos: 0 }), only_if, ..SetAttrs::default() };
    let known = t.pool.set_attrs(&t.path("file"), &changes(Some(known))).await?.version;
    t.put("file", "other").await?;
    let before = t.pool.stat(&t.path("file")).await?;
    refused("set_attrs", t.pool.set_attrs(&t.path("file"), &changes(Some(known))).await, ErrorKind::Busy)?;
    ensure_eq!(t.pool.stat(&t.path("file")).await?, before, "what another client wrote");
    Ok(())
}

async fn put_replaces_attributes_too(t: CaseContext) -> Outcome {
    t.put("f", "one").await?;
    if t.can().objects.xattrs {
        t.pool.set_xattr(&t.path("f"), b"user.old", b"1").await?;
    }
    let attrs = Attrs { mode: 0o600, mtime: Time { secs: 77, nanos: 0 }, ..t.attrs(0) };
    let put = t.pool.put(&t.path("f"), 0, stream::empty().boxed(), &attrs, &Expected::Anything).await?;
    ensure!(t.same_time(put.mtime, attrs.mtime), "mtime is {:?}", put.mtime);
    if t.can().objects.owners {
        ensure_eq!(put.mode, 0o600, "mode");
    }
    if t.can().objects.xattrs {
        ensure_eq!(user_xattrs(&t, "f").await?, Xattrs::new(), "extended attributes");
    }
    Ok(())
}

/// The user attributes: a file system may add other attributes, such as security labels.
async fn user_xattrs(t: &CaseContext, name: &str) -> Outcome<Xattrs> {
    let mut xattrs = t.pool.xattrs(&t.path(name)).await?;
    xattrs.retain(|(name, _)| name.starts_with(b"user."));
    xattrs.sort();
    Ok(xattrs)
}

async fn extended_attributes_are_set_listed_and_removed(t: CaseContext) -> Outcome {
    t.put("f", "x").await?;
    t.mkdir("d").await?;
    for name in ["f", "d"] {
        let path = t.path(name);
        if !t.can().objects.xattrs {
            refused("xattrs", t.pool.xattrs(&path).await, ErrorKind::Unsupported)?;
            refused("set_xattr", t.pool.set_xattr(&path, b"user.a", b"1").await, ErrorKind::Unsupported)?;
            refused("remove_xattr", t.pool.remove_xattr(&path, b"user.a").await, ErrorKind::Unsupported)?;
            continue;
        }
        ensure_eq!(user_xattrs(&t, name).await?, Xattrs::new(), "attributes of a new object");
        let before = t.stat(name).await?;
        let values = [(&b"user.binary"[..], &b"\0\xff\n"[..]), (b"user.empty", b""), (b"user.long", &[b'x'; 2_000])];
        for (name, value) in values {
            t.pool.set_xattr(&path, name, value).await?;
        }
        let wanted: Xattrs = values.iter().map(|(name, value)| (name.to_vec(), value.to_vec())).collect();
        ensure_eq!(user_xattrs(&t, name).await?, wanted, "attributes");
        ensure!(t.stat(name).await?.version != before.version, "the version stayed");
        t.pool.set_xattr(&path, b"user.empty", b"full").await?;
        t.pool.remove_xattr(&path, b"user.long").await?;
        let wanted: Xattrs = vec![wanted[0].clone(), (b"user.empty".to_vec(), b"full".to_vec())];
        ensure_eq!(user_xattrs(&t, name).await?, wanted, "attributes after changes");
        refused("remove again", t.pool.remove_xattr(&path, b"user.long").await, ErrorKind::NoAttribute)?;
        refused("no namespace", t.pool.set_xattr(&path, b"plain", b"1").await, ErrorKind::Unsupported)?;
        refused("no name", t.pool.set_xattr(&path, b"user.", b"1").await, ErrorKind::InvalidInput)?;
    }
    if t.can().objects.xattrs {
        // The pool refuses an attribute that no object can have without an object.
        let pair = |name: &[u8], value: &[u8]| (name.to_vec(), value.to_vec());
        let good = [pair(b"user.a", b"1"), pair(b"user.long", &[b'x'; 2_000])];
        t.pool.check_xattrs(FileKind::File, &good).await?;
        for (name, kind) in [(&b"plain"[..], ErrorKind::Unsupported), (b"user.", ErrorKind::InvalidInput)] {
            let all = [good[0].clone(), pair(name, b"1")];
            let attrs = Attrs { xattrs: all.to_vec(), ..t.attrs(0) };
            let answers = [
                t.pool.check_xattrs(FileKind::File, &all).await,
                t.pool.set_xattr(&t.path("f"), name, b"1").await,
                t.pool.put(&t.path("new"), 0, stream::empty().boxed(), &attrs, &Expected::Absent).await.map(drop),
                t.pool.mkdir(&t.path("new"), &attrs).await.map(drop),
            ];
            for answer in answers {
                let Err(error) = answer else { return Err(CaseFailure::new("it succeeded")) };
                ensure_eq!((error.kind(), error.attribute()), (kind, Some(name)), "what is refused");
            }
            refused("what was not made", t.pool.stat(&t.path("new")).await, ErrorKind::NotFound)?;
        }
        refused("of nothing", t.pool.xattrs(&t.path("none")).await, ErrorKind::NotFound)?;
    }
    Ok(())
}

async fn put_and_mkdir_set_extended_attributes(t: CaseContext) -> Outcome {
    let xattrs: Xattrs = vec![(b"user.a".to_vec(), b"1".to_vec()), (b"user.b".to_vec(), b"2".to_vec())];
    let attrs = Attrs { xattrs: xattrs.clone(), ..t.attrs(0o755) };
    let put = t.pool.put(&t.path("f"), 0, stream::empty().boxed(), &attrs, &Expected::Absent).await;
    if !t.can().objects.xattrs {
        refused("put", put, ErrorKind::Unsupported)?;
        return refused("stat", t.pool.stat(&t.path("f")).await, ErrorKind::NotFound);
    }
    put?;
    t.pool.mkdir(&t.path("d"), &attrs).await?;
    t.pool.mknod(&t.path("m"), FileKind::File, 0, &attrs).await?;
    for name in ["f", "d", "m"] {
        ensure_eq!(user_xattrs(&t, name).await?, xattrs, "attributes of {name}");
    }
    Ok(())
}

/// rw for the owner, r for one user, the group, and the mask; in the kernel's own form.
fn small_acl() -> Vec<u8> {
    const NO_ID: u32 = u32::MAX;
    let entries: [(u16, u16, u32); 5] = [(1, 6, NO_ID), (2, 4, 4_711), (4, 4, NO_ID), (16, 4, NO_ID), (32, 0, NO_ID)];
    let mut acl = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        acl.extend_from_slice(&tag.to_le_bytes());
        acl.extend_from_slice(&permissions.to_le_bytes());
        acl.extend_from_slice(&id.to_le_bytes());
    }
    acl
}

async fn access_control_lists_are_extended_attributes(t: CaseContext) -> Outcome {
    let name = b"system.posix_acl_access".to_vec();
    t.put("f", "x").await?;
    match t.pool.set_xattr(&t.path("f"), &name, &small_acl()).await {
        // Extended attributes without ACLs are common.
        Err(error) if error.is(ErrorKind::Unsupported) => return Ok(()),
        answer => answer?,
    }
    let xattrs = t.pool.xattrs(&t.path("f")).await?;
    ensure!(xattrs.contains(&(name, small_acl())), "the list is missing from {xattrs:?}");
    let attrs = Attrs { xattrs: xattrs.clone(), ..t.attrs(0o640) };
    t.pool.put(&t.path("copy"), 0, stream::empty().boxed(), &attrs, &Expected::Absent).await?;
    let (mut copied, mut wanted) = (t.pool.xattrs(&t.path("copy")).await?, xattrs);
    copied.sort();
    wanted.sort();
    ensure_eq!(copied, wanted, "attributes of the copy");
    Ok(())
}
