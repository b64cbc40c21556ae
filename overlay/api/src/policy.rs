//! Requests about the policy of a mount, and their answers.

use serde::{Deserialize, Serialize};

/// What to do with the policy.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "verb", rename_all = "snake_case")]
pub enum PolicyVerb {
    /// Explains the settings of a path.
    Explain { path: String },
    /// Puts another policy into force, until the pool is unmounted. `dry_run`: only counts what it would change.
    Apply { files: Vec<PolicyText>, dry_run: bool },
}

/// One file of a policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PolicyText {
    pub name: String,
    pub text: String,
}

/// The settings of one path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PolicyExplanation {
    pub path: String,
    pub settings: Vec<ExplainedSetting>,
    /// What happens next to the file, and when.
    pub next: Vec<String>,
}

/// One setting, and what made it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExplainedSetting {
    pub name: String,
    pub value: String,
    pub origin: String,
}

/// What a new policy would change.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PolicyEffect {
    /// Settings and rules that differ, a line for each.
    pub differences: Vec<String>,
    /// Known files with another setting.
    pub changed_files: u64,
    /// Files that wait for `forebay flush` now and would be flushed by policy.
    pub flushed: FileSum,
    /// Files that would be flushed by policy now and would wait for `forebay flush`.
    pub held_back: FileSum,
    /// New files that would never go to the pool.
    pub kept_local: FileSum,
    /// Resident files that eviction may choose now, and could not choose any more.
    pub pinned: FileSum,
    /// Resident files that eviction may not choose now, and could choose.
    pub unpinned: FileSum,
    /// The time that `flushed` takes at the pool's present speed, in seconds.
    pub seconds: f64,
    /// What changes only when the pool is mounted again.
    pub at_next_mount: Vec<String>,
}

/// A number of files with their bytes on the fast pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileSum {
    pub files: u64,
    pub bytes: u64,
}

impl FileSum {
    pub fn add(&mut self, bytes: u64) {
        self.files += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }
}
