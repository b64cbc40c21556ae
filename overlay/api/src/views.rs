//! Views: trees of staged files that programs read without the daemon.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::operator::{TypedPath, UserGroups};

/// How far a view is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ViewPhase {
    /// Its files are being staged, or its tree is being laid.
    Staging,
    /// Its tree is complete, and can be mounted.
    Laid,
    /// Its lease is over: its mounts and its tree are being removed.
    Ending,
}

/// A view.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct View {
    /// `view-N`: also the owner of the leases on its files.
    pub id: String,
    pub phase: ViewPhase,
    /// What it shows, relative to the mount.
    pub path: TypedPath,
    /// The inode number of that in the mount.
    pub ino: u64,
    /// The tree in the fast pool, which only the daemon's user reaches.
    pub tree: String,
    /// The job with which it ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// The time at which it ends, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_unix: Option<u64>,
    /// It is mounted in the mount namespace of its job alone.
    #[serde(default)]
    pub for_job: bool,
    pub created_unix: u64,
    pub files: u64,
    pub directories: u64,
    /// Bytes that programs can read in it.
    pub bytes: u64,
    /// Bytes of files that were copied, because they could not be linked.
    pub copied_bytes: u64,
}

/// What a view is begun with.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ViewRequest {
    /// A file or a directory, relative to the mount.
    pub path: TypedPath,
    /// The view ends with this job, if the job runs at the mount.
    #[serde(default)]
    pub job: Option<String>,
    #[serde(default)]
    pub lease_secs: Option<u64>,
    #[serde(default)]
    pub for_job: bool,
    /// The user for whom it is made: it must own what all on the node will see as a view, and may read what is staged.
    /// `None`: the daemon's rights count.
    #[serde(default)]
    pub user: Option<UserGroups>,
}

/// What became of a path since a view of it was laid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ViewChange {
    /// It has other content, or is of another kind.
    Changed,
    /// The view does not show it.
    Added,
    /// The mount does not show it any more.
    Removed,
}

impl fmt::Display for ViewChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Changed => "changed",
            Self::Added => "added",
            Self::Removed => "removed",
        })
    }
}

/// How the mount differs from a view by now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ViewChanges {
    /// Files with other content, or what became something of another kind.
    pub changed: u64,
    /// What the view does not show.
    pub added: u64,
    /// What the mount does not show any more.
    pub removed: u64,
    /// Some of these paths, relative to the mount.
    pub named: Vec<(ViewChange, TypedPath)>,
}

/// What is to be done with views.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "view", rename_all = "snake_case")]
pub enum ViewVerb {
    /// Begins a view. Its files are staged next, with leases in its name.
    Begin(ViewRequest),
    /// Lays the tree of a view whose files are staged.
    Lay {
        id: String,
        /// Copy files that cannot be linked.
        #[serde(default)]
        allow_copy: bool,
        /// The client mounts it, and says so by [`Self::Mounted`]. If it ends before, the view ends, too.
        #[serde(default)]
        awaits_mount: bool,
    },
    /// The client has mounted a view.
    Mounted {
        id: String,
    },
    List,
    /// Compares a view with the mount, and the mount with the pool before.
    Compare {
        id: String,
    },
    /// Ends a view, with its leases. An unknown one is no error.
    End {
        id: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verbs_are_readable_json() {
        let verb: ViewVerb = serde_json::from_str(r#"{"view":"lay","id":"view-3"}"#).unwrap();
        assert_eq!(verb, ViewVerb::Lay { id: "view-3".into(), allow_copy: false, awaits_mount: false });
        let verb: ViewVerb = serde_json::from_str(r#"{"view":"begin","path":"a/b"}"#).unwrap();
        assert_eq!(verb, ViewVerb::Begin(ViewRequest { path: "a/b".into(), ..ViewRequest::default() }));
    }
}
