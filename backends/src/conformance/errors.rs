//! The kinds of errors that no other case covers.

use crate::{Error, ErrorKind, Expected, FileKind, SetAttrs, Side};

use super::context::{CaseContext, CaseFailure, Outcome, refused};
use super::{Case, case, ensure};

pub(super) const CASES: &[Case] = &[
    case!(what_is_missing_is_not_found),
    case!(what_is_below_a_file_is_not_a_directory),
    case!(directories_have_no_content),
    case!(errors_name_the_path_and_are_on_the_pools_side),
];

async fn what_is_missing_is_not_found(t: CaseContext) -> Outcome {
    let version = t.put("f", "x").await?.version;
    let attrs = t.attrs(0o755);
    for name in ["none", "none/below"] {
        let path = t.path(name);
        let kind = ErrorKind::NotFound;
        refused("stat", t.pool.stat(&path).await, kind)?;
        refused("list", t.pool.list(&path).await.map(drop), kind)?;
        refused("read", t.pool.read(&path, &version, 0..1).await, kind).or_else(|failure| {
            // A pool that keeps the file open finds the version without its name.
            if name == "none" { Ok(()) } else { Err(failure) }
        })?;
        refused("readlink", t.pool.readlink(&path).await, kind)?;
        refused("remove", t.pool.remove(&path, &Expected::Anything).await, kind)?;
        refused("remove_dir", t.pool.remove_dir(&path).await, kind)?;
        let changes = SetAttrs { mode: Some(0o600), ..SetAttrs::default() };
        refused("set_attrs", t.pool.set_attrs(&path, &changes).await, kind)?;
    }
    let below = t.path("none/below");
    refused("mkdir", t.pool.mkdir(&below, &attrs).await, ErrorKind::NotFound)?;
    refused("mknod", t.pool.mknod(&below, FileKind::File, 0, &attrs).await, ErrorKind::NotFound)?;
    refused("put", t.put_if("none/below", "x", &Expected::Anything).await, ErrorKind::NotFound)?;
    refused("put if absent", t.put_if("none/below", "x", &Expected::Absent).await, ErrorKind::NotFound)
}

async fn what_is_below_a_file_is_not_a_directory(t: CaseContext) -> Outcome {
    let kind = ErrorKind::NotDirectory;
    t.put("f", "x").await?;
    let below = t.path("f/below");
    let attrs = t.attrs(0o755);
    refused("list of the file", t.pool.list(&t.path("f")).await.map(drop), kind)?;
    refused("remove_dir of the file", t.pool.remove_dir(&t.path("f")).await, kind)?;
    refused("stat", t.pool.stat(&below).await, kind)?;
    refused("list", t.pool.list(&below).await.map(drop), kind)?;
    refused("mkdir", t.pool.mkdir(&below, &attrs).await, kind)?;
    refused("mknod", t.pool.mknod(&below, FileKind::File, 0, &attrs).await, kind)?;
    refused("put", t.put_if("f/below", "x", &Expected::Anything).await, kind)?;
    refused("remove", t.pool.remove(&below, &Expected::Anything).await, kind)?;
    refused("remove_dir", t.pool.remove_dir(&below).await, kind)
}

async fn directories_have_no_content(t: CaseContext) -> Outcome {
    let version = t.mkdir("d").await?.version;
    refused("read", t.pool.read(&t.path("d"), &version, 0..1).await, ErrorKind::IsDirectory)?;
    refused("readlink", t.pool.readlink(&t.path("d")).await, ErrorKind::InvalidInput)
}

async fn errors_name_the_path_and_are_on_the_pools_side(t: CaseContext) -> Outcome {
    t.mkdir("d").await?;
    t.put("d/f", "x").await?;
    let check = |error: Option<Error>, name: &str| {
        let Some(error) = error else { return Err(CaseFailure::new("no error")) };
        ensure!(error.to_string().contains(name), "the error does not name {name}: {error}");
        ensure!(error.side() == Side::Pool, "the error is on the side {:?}: {error}", error.side());
        Ok(())
    };
    check(t.pool.stat(&t.path("no-such-name")).await.err(), "no-such-name")?;
    check(t.pool.remove_dir(&t.path("d")).await.err(), "/d")?;
    check(t.put_if("d/f", "y", &Expected::Absent).await.err(), "d/f")
}
