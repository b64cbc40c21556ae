//! Scratch directories: plain directories on the fast pool, which a commit takes into the overlay.

use serde::{Deserialize, Serialize};

use crate::operator::TypedPath;

/// A scratch directory as operators see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ScratchDir {
    /// Its name: that of a job, or one that its user gave.
    pub id: String,
    pub uid: u32,
    /// The path of the directory on this node.
    pub path: String,
    /// Bytes that may be written to it, and that are reserved for it. `None`: as many as the fast pool has room for.
    pub limit_bytes: Option<u64>,
    /// Bytes that it occupied when it was counted last.
    pub used_bytes: u64,
    /// Writes to its files are refused until it has room again.
    pub is_full: bool,
    /// It is not in the fast pool: the file system of its device is not mounted.
    #[serde(default)]
    pub is_missing: bool,
    /// Seconds since 1970.
    pub created_unix: u64,
}

/// What a scratch directory is created with.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ScratchRequest {
    pub id: String,
    /// The user whose directory it is; only root may name another user. `None`: the user of the client.
    #[serde(default)]
    pub uid: Option<u32>,
    /// The group of that user.
    #[serde(default)]
    pub gid: Option<u32>,
    #[serde(default)]
    pub limit_bytes: Option<u64>,
}

/// A tree to take into the overlay.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CommitRequest {
    pub id: String,
    /// Below the scratch directory; empty: all of it.
    pub path: TypedPath,
    /// The inode number, in the mount, of the directory that gets the tree. The client has checked that the user may
    /// write there.
    pub parent_ino: u64,
    /// The name that the tree gets.
    pub name: TypedPath,
}

/// A tree to merge into a directory that may exist.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MergeRequest {
    /// The daemon checks whether the user may write; the client, whether it reaches the directory.
    #[serde(flatten)]
    pub commit: CommitRequest,
    /// All groups of the user of the scratch directory.
    pub groups: Vec<u32>,
}

/// What a commit took into the overlay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CommitReport {
    pub files: u64,
    pub directories: u64,
    pub bytes: u64,
}

/// What is to be done with scratch directories.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "scratch", rename_all = "snake_case")]
pub enum ScratchVerb {
    /// Creates a directory. One of this name and this user stays as it is.
    Create(ScratchRequest),
    Commit(CommitRequest),
    /// As a commit, but a directory of the tree is merged into one that exists, and everything else replaces what has
    /// its name.
    Merge(MergeRequest),
    /// Removes a directory with everything in it. An unknown one is no error.
    Discard {
        id: String,
    },
    List,
}

/// The most bytes of the name of a scratch directory.
const ID_BYTES: usize = 128;

/// Checks the name of a scratch directory: letters, digits, and `-_.@`, but no `.` at the beginning.
///
/// # Errors
/// The reason why it is not valid.
pub fn check_scratch_id(id: &str) -> Result<(), String> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.@".contains(&b);
    match () {
        () if id.is_empty() || id.starts_with('.') || !id.bytes().all(plain) => {
            Err("the name of a scratch directory has letters, digits and -_.@ only, and no dot at its beginning".into())
        }
        () if id.len() > ID_BYTES => Err(format!("the name of a scratch directory has {ID_BYTES} bytes at most")),
        () => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_to_no_other_directory() {
        for good in ["slurm-17", "a", "run_3.b@x"] {
            check_scratch_id(good).unwrap();
        }
        for bad in ["", ".", "..", ".hidden", "a/b", "a b", "ä", "a\n", &"x".repeat(129)] {
            assert!(check_scratch_id(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn verbs_are_readable_json() {
        let verb: ScratchVerb = serde_json::from_str(r#"{"scratch":"discard","id":"a"}"#).unwrap();
        assert_eq!(verb, ScratchVerb::Discard { id: "a".into() });
        let verb: ScratchVerb = serde_json::from_str(r#"{"scratch":"create","id":"a","limit_bytes":5}"#).unwrap();
        let request = ScratchRequest { id: "a".into(), limit_bytes: Some(5), ..ScratchRequest::default() };
        assert_eq!(verb, ScratchVerb::Create(request));
        let text = r#"{"scratch":"merge","id":"a","path":"","parent_ino":1,"name":"out","groups":[5]}"#;
        let verb: ScratchVerb = serde_json::from_str(text).unwrap();
        let commit = CommitRequest { id: "a".into(), path: "".into(), parent_ino: 1, name: "out".into() };
        assert_eq!(verb, ScratchVerb::Merge(MergeRequest { commit, groups: vec![5] }));
    }
}
