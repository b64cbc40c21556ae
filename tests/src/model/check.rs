//! The comparison of trees.

use std::collections::HashMap;

use forebay_backends::FileKind;

use super::Failure;
use super::content::describe;
use super::tree::{Body, Id, Tree};

/// Optional parts of a comparison. Names, kinds, links, symlink targets, modes and extended attributes always count.
#[derive(Debug, Clone, Copy)]
pub struct Compared {
    pub contents: bool,
    /// Of files: equal if both trees know the time. If `right` does not, the time in `is` must not be before the last
    /// write.
    pub mtimes: bool,
}

/// Checks that two trees are the same.
///
/// # Errors
/// The first difference between `is` and `right`.
pub fn same(is: &Tree, right: &Tree, compared: Compared) -> Result<(), Failure> {
    same_but(is, right, compared, |_| false)
}

/// Compares like [`same`], but without content and mtime of the nodes of `right` that `skip` selects.
pub fn same_but(is: &Tree, right: &Tree, compared: Compared, skip: impl Fn(Id) -> bool) -> Result<(), Failure> {
    let (is_paths, right_paths) = (is.paths(), right.paths());
    let mut pairs: HashMap<Id, Id> = HashMap::new();
    for (path, right_id) in &right_paths {
        let shown = path.escape_ascii();
        let Some(is_id) = is_paths.get(path) else { return Err(format!("{shown} is not there")) };
        let pair = *pairs.entry(*right_id).or_insert(*is_id);
        let names = |tree: &Tree, id: Id| if let Body::Dir(_) = tree.node(id).body { 1 } else { tree.node(id).nlink };
        if pair != *is_id || names(is, *is_id) != names(right, *right_id) {
            return Err(format!(
                "{shown} has {} hard links instead of {}, or other hard links",
                names(is, *is_id),
                names(right, *right_id)
            ));
        }
        let skipped = skip(*right_id);
        same_node(is, *is_id, right, *right_id, compared, skipped).map_err(|e| format!("{shown}: {e}"))?;
    }
    match is_paths.keys().find(|path| !right_paths.contains_key(*path)) {
        Some(path) => Err(format!("{} should not be there", path.escape_ascii())),
        None => Ok(()),
    }
}

fn same_node(is: &Tree, is_id: Id, right: &Tree, right_id: Id, compared: Compared, skip: bool) -> Result<(), Failure> {
    let (a, b) = (is.node(is_id), right.node(right_id));
    if a.kind() != b.kind() {
        return Err(format!("is {:?} instead of {:?}", a.kind(), b.kind()));
    }
    match (&a.body, &b.body) {
        (Body::File(x), Body::File(y)) if compared.contents && !skip && x != y => {
            return Err(format!("holds {} instead of {}", describe(x), describe(y)));
        }
        (Body::Symlink(x), Body::Symlink(y)) if x != y => {
            return Err(format!("leads to {} instead of {}", x.escape_ascii(), y.escape_ascii()));
        }
        _ => {}
    }
    if a.mode != b.mode && a.kind() != FileKind::Symlink {
        return Err(format!("has mode {:o} instead of {:o}", a.mode, b.mode));
    }
    if a.xattrs != b.xattrs {
        return Err(format!("has extended attributes {:?} instead of {:?}", a.xattrs.keys(), b.xattrs.keys()));
    }
    match (a.mtime, b.mtime) {
        (Some(x), Some(y)) if compared.mtimes && !skip && a.kind() == FileKind::File && x != y => {
            Err(format!("has mtime {x:?} instead of {y:?}"))
        }
        (Some(x), None) if compared.mtimes && !skip => b.modified_at(x),
        _ => Ok(()),
    }
}
