//! Renames in their three modes.

use crate::{ErrorKind, Expected, FileKind, RenameMode, Result, SetAttrs, Stat};

use super::context::{CaseContext, Outcome, refused};
use super::{Case, case, ensure, ensure_eq};

pub(super) const CASES: &[Case] = &[
    case!(rename_moves_files_and_trees, needs | can | can.renames.exist()),
    case!(rename_replaces_files_and_empty_directories, needs | can | can.renames.exist()),
    case!(rename_without_replacing_refuses_what_exists, needs | can | can.renames.exist()),
    case!(exchange_swaps_two_objects, needs | can | can.renames.exchange()),
    case!(impossible_renames_are_refused, needs | can | can.renames.exist()),
    case!(renaming_a_link_onto_its_file_changes_nothing, needs | can | can.objects.hard_links, |can| can
        .renames
        .exist()),
    case!(another_object_under_the_name_is_refused, needs | can | can.renames.exist()),
];

impl CaseContext {
    async fn rename(&self, from: &str, to: &str, mode: RenameMode) -> Result<Stat> {
        self.pool.rename(&self.path(from), &self.path(to), mode).await
    }
}

/// If the pool cannot rename, checks that renames are refused and returns `false`.
async fn can_rename(t: &CaseContext) -> Outcome<bool> {
    if t.can().renames.exist() {
        return Ok(true);
    }
    t.put("from", "x").await?;
    refused("rename", t.rename("from", "to", RenameMode::Replace).await, ErrorKind::Unsupported)?;
    refused("stat", t.pool.stat(&t.path("to")).await, ErrorKind::NotFound)?;
    Ok(false)
}

async fn rename_moves_files_and_trees(t: CaseContext) -> Outcome {
    if !can_rename(&t).await? {
        return Ok(());
    }
    let before = t.put("a", "content").await?;
    let after = t.rename("a", "b", RenameMode::Replace).await?;
    ensure_eq!(t.stat("b").await?.version, after.version, "version returned and found");
    ensure_eq!((after.size, after.mode, after.mtime), (before.size, before.mode, before.mtime), "attributes");
    refused("stat of the old name", t.pool.stat(&t.path("a")).await, ErrorKind::NotFound)?;
    ensure_eq!(t.content("b").await?, "content", "content");
    t.mkdir("d").await?;
    t.mkdir("d/sub").await?;
    t.put("d/sub/f", "below").await?;
    t.mkdir("e").await?;
    t.rename("d", "e/moved", RenameMode::Replace).await?;
    ensure_eq!(t.content("e/moved/sub/f").await?, "below", "content below the moved directory");
    refused("stat of the old name", t.pool.stat(&t.path("d")).await, ErrorKind::NotFound)?;
    if t.can().objects.symlinks {
        t.pool.symlink(&t.path("l"), b"b", &t.attrs(0o777)).await?;
        t.rename("l", "m", RenameMode::Replace).await?;
        ensure_eq!(t.pool.readlink(&t.path("m")).await?, b"b", "target of the moved symlink");
    }
    Ok(())
}

async fn rename_replaces_files_and_empty_directories(t: CaseContext) -> Outcome {
    if !can_rename(&t).await? {
        return Ok(());
    }
    t.put("a", "new").await?;
    t.put("b", "old").await?;
    t.rename("a", "b", RenameMode::Replace).await?;
    ensure_eq!(t.content("b").await?, "new", "content");
    t.mkdir("d").await?;
    t.put("d/f", "x").await?;
    t.mkdir("e").await?;
    t.rename("d", "e", RenameMode::Replace).await?;
    ensure_eq!(t.names("e").await?, [b"f".to_vec()], "entries");
    t.rename("b", "b", RenameMode::Replace).await?;
    ensure_eq!(t.content("b").await?, "new", "content after a rename to itself");
    Ok(())
}

async fn rename_without_replacing_refuses_what_exists(t: CaseContext) -> Outcome {
    if !can_rename(&t).await? {
        return Ok(());
    }
    t.put("a", "a").await?;
    t.put("b", "b").await?;
    t.mkdir("d").await?;
    refused("onto a file", t.rename("a", "b", RenameMode::NoReplace).await, ErrorKind::Exists)?;
    refused("onto a directory", t.rename("a", "d", RenameMode::NoReplace).await, ErrorKind::Exists)?;
    refused("onto itself", t.rename("a", "a", RenameMode::NoReplace).await, ErrorKind::Exists)?;
    ensure_eq!(t.content("b").await?, "b", "content");
    t.rename("a", "c", RenameMode::NoReplace).await?;
    ensure_eq!(t.content("c").await?, "a", "content");
    Ok(())
}

async fn exchange_swaps_two_objects(t: CaseContext) -> Outcome {
    t.put("f", "file").await?;
    t.mkdir("d").await?;
    t.put("d/below", "x").await?;
    let answer = t.rename("f", "d", RenameMode::Exchange).await;
    if !t.can().renames.exchange() {
        refused("exchange", answer, ErrorKind::Unsupported)?;
        ensure_eq!(t.content("f").await?, "file", "content");
        return Ok(());
    }
    let stat = answer?;
    ensure_eq!((stat.kind, t.stat("d").await?), (FileKind::File, stat.clone()), "what is returned and found");
    ensure_eq!(t.content("d").await?, "file", "content");
    ensure_eq!(t.names("f").await?, [b"below".to_vec()], "entries");
    refused("with nothing", t.rename("f", "none", RenameMode::Exchange).await, ErrorKind::NotFound)?;
    refused("of nothing", t.rename("none", "f", RenameMode::Exchange).await, ErrorKind::NotFound)?;
    refused("with what is below", t.rename("f", "f/below", RenameMode::Exchange).await, ErrorKind::InvalidInput)
}

async fn impossible_renames_are_refused(t: CaseContext) -> Outcome {
    if !can_rename(&t).await? {
        return Ok(());
    }
    t.put("f", "x").await?;
    t.mkdir("d").await?;
    t.mkdir("full").await?;
    t.put("full/f", "x").await?;
    let rename = async |from, to| t.rename(from, to, RenameMode::Replace).await;
    refused("nothing", rename("none", "g").await, ErrorKind::NotFound)?;
    refused("into nothing", rename("f", "none/g").await, ErrorKind::NotFound)?;
    refused("into a file", rename("d", "f/g").await, ErrorKind::NotDirectory)?;
    refused("file onto directory", rename("f", "d").await, ErrorKind::IsDirectory)?;
    refused("directory onto file", rename("d", "f").await, ErrorKind::NotDirectory)?;
    refused("onto a full directory", rename("d", "full").await, ErrorKind::NotEmpty)?;
    refused("into itself", rename("full", "full/inside").await, ErrorKind::InvalidInput)?;
    refused("onto its parent", rename("full/f", "full").await, ErrorKind::NotEmpty)?;
    ensure_eq!(t.list(&t.dir).await?.len(), 3, "number of entries");
    Ok(())
}

async fn renaming_a_link_onto_its_file_changes_nothing(t: CaseContext) -> Outcome {
    if !t.can().objects.hard_links || !can_rename(&t).await? {
        return Ok(());
    }
    t.put("a", "x").await?;
    t.pool.link(&t.path("a"), &t.path("b")).await?;
    let stat = t.rename("a", "b", RenameMode::Replace).await?;
    ensure_eq!(stat.nlink, 2, "links");
    ensure!(t.stat("a").await?.version.same_object(&stat.version), "the first name went");
    Ok(())
}

/// A path with the identity of one object does not reach another object that was moved to its name. Pools without
/// identities know an object only by its name.
async fn another_object_under_the_name_is_refused(t: CaseContext) -> Outcome {
    if !can_rename(&t).await? {
        return Ok(());
    }
    t.put("f", "mine").await?;
    t.put("secret", "his").await?;
    for dir in ["d", "private"] {
        t.mkdir(dir).await?;
        t.put(format!("{dir}/notes"), dir).await?;
    }
    let f = t.path("f").of_object(t.stat("f").await?.version.identity());
    let d = t.path("d").of_object(t.stat("d").await?.version.identity());
    if f.object().is_none() {
        return Ok(());
    }
    let notes = d.join(b"notes");
    let changes = SetAttrs { mode: Some(0o604), ..SetAttrs::default() };
    t.pool.set_attrs(&f, &changes).await?;
    ensure_eq!(t.pool.stat(&notes).await?.size, 1, "size of what is in the directory that is meant");
    for (name, other) in [("f", "secret"), ("d", "private")] {
        t.rename(name, "old", RenameMode::Replace).await?;
        t.rename(other, name, RenameMode::Replace).await?;
        t.rename("old", other, RenameMode::Replace).await?;
    }
    let before = (t.stat("f").await?, t.stat("d").await?);
    let not_found = ErrorKind::NotFound;
    refused("attributes of a file", t.pool.set_attrs(&f, &changes).await, not_found)?;
    refused("attributes of a directory", t.pool.set_attrs(&d, &changes).await, not_found)?;
    if t.can().objects.xattrs {
        refused("an extended attribute", t.pool.set_xattr(&f, b"user.a", b"b").await, not_found)?;
    }
    refused("stat", t.pool.stat(&notes).await, not_found)?;
    refused("list", t.pool.list(&d).await.map(drop), not_found)?;
    refused("mkdir", t.pool.mkdir(&d.join(b"new"), &t.attrs(0o755)).await, not_found)?;
    refused("remove", t.pool.remove(&notes, &Expected::Anything).await, not_found)?;
    refused("rename", t.pool.rename(&notes, &t.path("taken"), RenameMode::NoReplace).await, not_found)?;
    let none = Box::pin(futures::stream::empty());
    let put = t.pool.put(&d.join(b"new"), 0, none, &t.attrs(0o644), &Expected::Absent).await;
    refused("put", put, not_found)?;
    let after = (t.stat("f").await?, t.stat("d").await?);
    ensure_eq!((after.0.version, after.1.version), (before.0.version, before.1.version), "versions");
    ensure_eq!(t.names("d").await?, vec![b"notes".to_vec()], "names");
    Ok(())
}
