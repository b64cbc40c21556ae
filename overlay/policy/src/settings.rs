//! The settings that a rule can make for a path: their names, values and defaults.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use forebay_backends::Result;
use humantime::format_duration;
use serde::{Deserialize, Serialize};

use crate::document::{Place, PolicyFields, duration, size};

/// When an open revalidates a file against the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Consistency {
    /// Every open asks the pool for the version.
    CloseToOpen,
    /// An open asks the pool if the last answer is older than this.
    Ttl(Duration),
    /// A version that was seen once is never revalidated.
    Immutable,
}

/// What becomes of bytes that are read from the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Read {
    /// They are kept on the fast pool.
    Cache,
    /// They are not kept. What is resident for another reason is used.
    Bypass,
    /// They are kept, and not evicted to make room for something else.
    Pin,
}

/// How writes reach the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Write {
    /// Writes are absorbed by the fast pool and flushed as `flush` says.
    Back,
    /// A close returns when the pool has the bytes, whatever `flush` says.
    Through,
    /// As `through`, and the fast pool does not keep the bytes.
    Around,
    /// A new file never goes to the pool. It is removed after the last job that used it, see `forebay_engine::job_end`.
    Local,
}

/// When dirty state goes to the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlushPolicy {
    /// Before `close` returns.
    OnClose,
    /// When the file has not changed for this long.
    Idle(Duration),
    /// This long after it was written, also while a program has it open for writing, and again and again.
    Every(Duration),
    /// When no job that wrote it runs any more.
    JobEnd,
    /// Only by `forebay flush`.
    Manual,
}

/// Which of the files that are due goes to the pool first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    High,
    Normal,
    Low,
}

/// What happens when the pool's copy of a file changed while the mount has a newer one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConflictPolicy {
    /// The pool's copy stays, and the local copy is flushed beside it under another name.
    KeepBoth,
    /// Nothing is changed in the pool. The local copy stays dirty until somebody decides.
    Fail,
    /// The local copy replaces the pool's copy.
    Ours,
    /// The pool's copy replaces the local copy.
    Theirs,
}

/// The settings of one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathPolicy {
    pub consistency: Consistency,
    /// How long names and attributes may be shown without asking the pool. An open follows `consistency`.
    pub metadata_ttl: Duration,
    pub read: Read,
    /// Files up to this many bytes are fetched whole when they are opened.
    pub whole_file_bytes: u64,
    /// The longest readahead for a sequential reader, in bytes. `None`: as long as the pool's latency makes useful.
    pub readahead_bytes: Option<u64>,
    pub write: Write,
    flush: FlushPolicy,
    /// A file that is written all the time is flushed all the same this long after the first change.
    pub flush_deadline: Option<Duration>,
    pub priority: Priority,
    pub conflict: ConflictPolicy,
    /// The tier of the fast pool to which content is fetched. `None`: the engine chooses.
    pub tier: Option<Arc<str>>,
}

impl Default for PathPolicy {
    fn default() -> Self {
        Self {
            consistency: Consistency::CloseToOpen,
            metadata_ttl: Duration::from_secs(30),
            read: Read::Cache,
            whole_file_bytes: 4 << 20,
            readahead_bytes: None,
            write: Write::Back,
            flush: FlushPolicy::Idle(Duration::from_secs(5)),
            flush_deadline: None,
            priority: Priority::Normal,
            conflict: ConflictPolicy::KeepBoth,
            tier: None,
        }
    }
}

impl PathPolicy {
    /// Returns when dirty state goes to the pool. `write` may leave no choice.
    pub fn flush(&self) -> FlushPolicy {
        match self.write {
            Write::Back => self.flush,
            Write::Through | Write::Around => FlushPolicy::OnClose,
            Write::Local => FlushPolicy::Manual,
        }
    }

    /// Returns whether the pool has what is written when `close` returns, whatever `flush` says.
    pub fn goes_through(&self) -> bool {
        matches!(self.write, Write::Through | Write::Around)
    }

    /// Returns the value of a setting, as a policy file spells it.
    pub fn value(&self, name: SettingName) -> String {
        match name {
            SettingName::Consistency => self.consistency.to_string(),
            SettingName::MetadataTtl => format_duration(self.metadata_ttl).to_string(),
            SettingName::Read => self.read.to_string(),
            SettingName::WholeFile => size_text(self.whole_file_bytes),
            SettingName::Readahead => self.readahead_bytes.map_or_else(|| AUTO.into(), size_text),
            SettingName::Write => self.write.to_string(),
            SettingName::Flush => self.flush.to_string(),
            SettingName::FlushDeadline => {
                self.flush_deadline.map_or_else(|| NONE.into(), |deadline| format_duration(deadline).to_string())
            }
            SettingName::Priority => self.priority.to_string(),
            SettingName::Conflict => self.conflict.to_string(),
            SettingName::Tier => self.tier.as_deref().unwrap_or(AUTO).to_owned(),
        }
    }
}

/// Returns a size in the largest unit of which it is a multiple.
fn size_text(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit = units.into_iter().find(|(shift, _)| bytes > 0 && bytes.trailing_zeros() >= *shift);
    unit.map_or_else(|| format!("{bytes}B"), |(shift, unit)| format!("{}{unit}", bytes >> shift))
}

/// Spelling of what is chosen by the engine.
const AUTO: &str = "auto";
/// Spelling of no deadline.
const NONE: &str = "none";

/// The settings, in the order in which `explain` shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SettingName {
    Consistency,
    MetadataTtl,
    Read,
    WholeFile,
    Readahead,
    Write,
    Flush,
    FlushDeadline,
    Priority,
    Conflict,
    Tier,
}

impl SettingName {
    pub const ALL: [Self; 11] = [
        Self::Consistency,
        Self::MetadataTtl,
        Self::Read,
        Self::WholeFile,
        Self::Readahead,
        Self::Write,
        Self::Flush,
        Self::FlushDeadline,
        Self::Priority,
        Self::Conflict,
        Self::Tier,
    ];

    /// Returns the key in a policy file.
    pub const fn key(self) -> &'static str {
        match self {
            Self::Consistency => "consistency",
            Self::MetadataTtl => "metadata-ttl",
            Self::Read => "read",
            Self::WholeFile => "whole-file",
            Self::Readahead => "readahead",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::FlushDeadline => "flush-deadline",
            Self::Priority => "priority",
            Self::Conflict => "conflict",
            Self::Tier => "tier",
        }
    }

    /// Returns the values that are allowed.
    pub const fn values(self) -> &'static str {
        match self {
            Self::Consistency => "close-to-open, ttl:DURATION, immutable",
            Self::MetadataTtl => "DURATION",
            Self::Read => "cache, bypass, pin",
            Self::WholeFile => "SIZE",
            Self::Readahead => "auto, SIZE",
            Self::Write => "back, through, around, local",
            Self::Flush => "on-close, idle:DURATION, every:DURATION, job-end, manual",
            Self::FlushDeadline => "none, DURATION",
            Self::Priority => "high, normal, low",
            Self::Conflict => "keep-both, fail, ours, theirs",
            Self::Tier => "auto, NAME",
        }
    }
}

impl fmt::Display for SettingName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.key())
    }
}

/// One setting with its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PathSetting {
    Consistency(Consistency),
    MetadataTtl(Duration),
    Read(Read),
    WholeFile(u64),
    Readahead(Option<u64>),
    Write(Write),
    Flush(FlushPolicy),
    FlushDeadline(Option<Duration>),
    Priority(Priority),
    Conflict(ConflictPolicy),
    Tier(Option<Arc<str>>),
}

impl PathSetting {
    /// Reads a value. The error says what is allowed.
    pub fn parse(name: SettingName, text: &str) -> std::result::Result<Self, String> {
        let other = || format!("must be one of {}", name.values());
        let with = |prefix: &str| text.strip_prefix(prefix).map(duration).transpose();
        Ok(match name {
            SettingName::Consistency => Self::Consistency(match (text, with("ttl:")?) {
                ("close-to-open", _) => Consistency::CloseToOpen,
                ("immutable", _) => Consistency::Immutable,
                (_, Some(ttl)) => Consistency::Ttl(ttl),
                _ => return Err(other()),
            }),
            SettingName::MetadataTtl => Self::MetadataTtl(duration(text)?),
            SettingName::Read => Self::Read(match text {
                "cache" => Read::Cache,
                "bypass" => Read::Bypass,
                "pin" => Read::Pin,
                _ => return Err(other()),
            }),
            SettingName::WholeFile => Self::WholeFile(size(text)?),
            SettingName::Readahead if text == AUTO => Self::Readahead(None),
            SettingName::Readahead => Self::Readahead(Some(size(text)?)),
            SettingName::Write => Self::Write(match text {
                "back" => Write::Back,
                "through" => Write::Through,
                "around" => Write::Around,
                "local" => Write::Local,
                _ => return Err(other()),
            }),
            SettingName::Flush => Self::Flush(match (text, with("idle:")?, with("every:")?) {
                ("on-close", ..) => FlushPolicy::OnClose,
                ("job-end", ..) => FlushPolicy::JobEnd,
                ("manual", ..) => FlushPolicy::Manual,
                (_, Some(idle), _) => FlushPolicy::Idle(idle),
                (_, _, Some(every)) if every < SHORTEST_EVERY => {
                    return Err(format!("every must be at least {}", format_duration(SHORTEST_EVERY)));
                }
                (_, _, Some(every)) => FlushPolicy::Every(every),
                _ => return Err(other()),
            }),
            SettingName::FlushDeadline if text == NONE => Self::FlushDeadline(None),
            SettingName::FlushDeadline => Self::FlushDeadline(Some(duration(text)?)),
            SettingName::Priority => Self::Priority(match text {
                "high" => Priority::High,
                "normal" => Priority::Normal,
                "low" => Priority::Low,
                _ => return Err(other()),
            }),
            SettingName::Tier => Self::Tier(Some(text).filter(|text| *text != AUTO).map(Arc::from)),
            SettingName::Conflict => Self::Conflict(match text {
                "keep-both" => ConflictPolicy::KeepBoth,
                "fail" => ConflictPolicy::Fail,
                "ours" => ConflictPolicy::Ours,
                "theirs" => ConflictPolicy::Theirs,
                _ => return Err(other()),
            }),
        })
    }

    /// Reads all settings of a table, with their places.
    pub fn all_of(fields: &PolicyFields<'_>) -> Result<Vec<(Self, Place)>> {
        let mut settings = Vec::new();
        for name in SettingName::ALL {
            if let Some(setting) = fields.read(name.key(), |text| Self::parse(name, text))? {
                settings.push((setting, fields.place(name.key())));
            }
        }
        Ok(settings)
    }

    pub fn name(&self) -> SettingName {
        match self {
            Self::Consistency(_) => SettingName::Consistency,
            Self::MetadataTtl(_) => SettingName::MetadataTtl,
            Self::Read(_) => SettingName::Read,
            Self::WholeFile(_) => SettingName::WholeFile,
            Self::Readahead(_) => SettingName::Readahead,
            Self::Write(_) => SettingName::Write,
            Self::Flush(_) => SettingName::Flush,
            Self::FlushDeadline(_) => SettingName::FlushDeadline,
            Self::Priority(_) => SettingName::Priority,
            Self::Conflict(_) => SettingName::Conflict,
            Self::Tier(_) => SettingName::Tier,
        }
    }

    pub fn apply(&self, policy: &mut PathPolicy) {
        match self.clone() {
            Self::Consistency(consistency) => policy.consistency = consistency,
            Self::MetadataTtl(ttl) => policy.metadata_ttl = ttl,
            Self::Read(read) => policy.read = read,
            Self::WholeFile(bytes) => policy.whole_file_bytes = bytes,
            Self::Readahead(bytes) => policy.readahead_bytes = bytes,
            Self::Write(write) => policy.write = write,
            Self::Flush(flush) => policy.flush = flush,
            Self::FlushDeadline(deadline) => policy.flush_deadline = deadline,
            Self::Priority(priority) => policy.priority = priority,
            Self::Conflict(conflict) => policy.conflict = conflict,
            Self::Tier(tier) => policy.tier = tier,
        }
    }
}

/// Each flush of an open file sends all of it.
const SHORTEST_EVERY: Duration = Duration::from_secs(1);

impl fmt::Display for Consistency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CloseToOpen => f.write_str("close-to-open"),
            Self::Ttl(ttl) => write!(f, "ttl:{}", format_duration(*ttl)),
            Self::Immutable => f.write_str("immutable"),
        }
    }
}

impl fmt::Display for Read {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cache => "cache",
            Self::Bypass => "bypass",
            Self::Pin => "pin",
        })
    }
}

impl fmt::Display for Write {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Back => "back",
            Self::Through => "through",
            Self::Around => "around",
            Self::Local => "local",
        })
    }
}

impl fmt::Display for FlushPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OnClose => f.write_str("on-close"),
            Self::Idle(idle) => write!(f, "idle:{}", format_duration(*idle)),
            Self::Every(every) => write!(f, "every:{}", format_duration(*every)),
            Self::JobEnd => f.write_str("job-end"),
            Self::Manual => f.write_str("manual"),
        }
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::High => "high",
            Self::Normal => "normal",
            Self::Low => "low",
        })
    }
}

impl fmt::Display for ConflictPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::KeepBoth => "keep-both",
            Self::Fail => "fail",
            Self::Ours => "ours",
            Self::Theirs => "theirs",
        })
    }
}
