//! What users and groups hold of a fast pool, and what they may.

use serde::{Deserialize, Serialize};

/// What is to be done with quotas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "verb", rename_all = "snake_case")]
pub enum QuotaVerb {
    /// Shows all users and groups that hold something or have a quota of their own.
    Show,
    /// As `Show`; also counts everything again, and compares.
    Check,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum QuotaKind {
    User,
    Group,
}

/// A number with its limits; `None`: no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct QuotaNumber {
    pub used: u64,
    pub soft: Option<u64>,
    pub hard: Option<u64>,
    /// While the soft limit is exceeded: the seconds that are left until it counts as the hard one.
    pub grace_left_secs: Option<u64>,
}

/// What one user or group holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct QuotaUse {
    pub kind: QuotaKind,
    pub id: u32,
    /// Bytes that are not in the pool yet, and bytes of scratch directories.
    pub bytes: QuotaNumber,
    /// Files whose content is not in the pool yet.
    pub files: QuotaNumber,
    /// Bytes that are leased for a user.
    pub staged_bytes: QuotaNumber,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct QuotaReport {
    pub quotas: Vec<QuotaUse>,
    /// What was counted and is not so; empty unless it was checked.
    pub differences: Vec<String>,
}
