//! The rules for how paths are read, written, flushed and kept. This crate alone decides every behaviour of this kind.

mod tiers;

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use forebay_backends::{Error, ErrorKind, PoolPath, Result, Side};
use globset::{GlobBuilder, GlobMatcher};
use serde::Deserialize;

pub use tiers::{Tier, placement_tier};

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

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Write {
    /// Writes are absorbed by the fast pool and flushed later.
    Back,
    /// A close returns when the pool has the bytes.
    Through,
}

/// When dirty state goes to the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlushPolicy {
    /// Before `close` returns.
    OnClose,
    /// When the file has not changed for this long.
    Idle(Duration),
    /// Only by `forebay flush`.
    Manual,
}

/// The settings of one path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathPolicy {
    pub consistency: Consistency,
    pub flush: FlushPolicy,
    /// Files up to this many bytes are fetched whole when they are opened.
    pub whole_file_bytes: u64,
    /// How long names and attributes may be shown without asking the pool. An open follows `consistency`.
    pub metadata_ttl: Duration,
}

impl Default for PathPolicy {
    fn default() -> Self {
        Self {
            consistency: Consistency::CloseToOpen,
            flush: FlushPolicy::Idle(Duration::from_secs(5)),
            whole_file_bytes: 4 << 20,
            metadata_ttl: Duration::from_secs(30),
        }
    }
}

/// Limits of the fast pool.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SpacePolicy {
    /// Eviction starts above this share of the limit.
    pub high_watermark: f64,
    /// Eviction stops below this share of the limit.
    pub low_watermark: f64,
}

/// The share of one user in what the other users left, between 0 and 1. Root and the user who mounts may take all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SharePolicy {
    /// Bytes of the fast pool that are not in the pool yet.
    pub dirty: f64,
    /// Open files, as a share of the descriptors that the daemon may have.
    pub open_files: f64,
    /// Requests that wait at the same time.
    pub requests: f64,
}

impl Default for SharePolicy {
    fn default() -> Self {
        Self { dirty: 0.75, open_files: 0.75, requests: 0.75 }
    }
}

#[derive(Debug, Clone)]
pub struct Policy {
    default: PathPolicy,
    rules: Vec<PolicyRule>,
    /// Names given to storage pools that the pool identifies only by numbers.
    storage_pool_names: BTreeMap<String, String>,
    pub space: SpacePolicy,
    /// Fastest first. Empty: the `--fast` directories are the only tier.
    pub tiers: Vec<Tier>,
    pub shares: SharePolicy,
    /// Name of the eviction policy.
    pub evictor: String,
    pub prefetch: Prefetch,
    /// Whether reads are observed even while no part of the daemon needs it.
    pub observes_always: bool,
    /// How long a metadata call may take before the pool counts as not answering.
    pub pool_deadline: Duration,
    /// How often a pool that does not answer is probed; zero: every call probes it.
    pub pool_retry: Duration,
    /// How long idle processors may take to wake up while requests stream, to the microsecond. Zero: they do not sleep.
    /// `None`: no limit.
    pub wakeup_latency: Option<Duration>,
}

/// What is fetched before a program requests it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefetch {
    /// Files that a job will probably read, when the job begins.
    pub jobs: bool,
    /// Files that readers will probably open next, predicted from what they open.
    pub online: bool,
}

#[derive(Debug, Clone)]
struct PolicyRule {
    /// Empty: the rule matches every path.
    paths: Vec<GlobMatcher>,
    /// `None`: the rule matches every storage pool, and files that are in none.
    storage_pool: Option<String>,
    settings: Settings,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Settings {
    consistency: Option<String>,
    write: Option<Write>,
    flush: Option<String>,
    whole_file: Option<String>,
    metadata_ttl: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct SpaceSettings {
    high_watermark: Option<f64>,
    low_watermark: Option<f64>,
    evictor: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ShareSettings {
    dirty: Option<f64>,
    open_files: Option<f64>,
    requests: Option<f64>,
}

impl ShareSettings {
    fn policy(&self) -> Result<SharePolicy> {
        let all = SharePolicy::default();
        let share = |name: &str, given: Option<f64>, default: f64| match given.unwrap_or(default) {
            share if 0.0 < share && share <= 1.0 => Ok(share),
            other => Err(invalid(format!("shares.{name} = {other}: a share above 0 and up to 1"))),
        };
        Ok(SharePolicy {
            dirty: share("dirty", self.dirty, all.dirty)?,
            open_files: share("open-files", self.open_files, all.open_files)?,
            requests: share("requests", self.requests, all.requests)?,
        })
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct PoolSettings {
    deadline: Option<String>,
    retry: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct PrefetchSettings {
    jobs: Option<bool>,
    online: Option<bool>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ObserverSettings {
    at_work: Option<AtWork>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum AtWork {
    Needed,
    Always,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct CpuSettings {
    wakeup_latency: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct PolicyFile {
    #[serde(default)]
    default: Settings,
    #[serde(default)]
    space: SpaceSettings,
    #[serde(default)]
    shares: ShareSettings,
    #[serde(default)]
    pool: PoolSettings,
    #[serde(default)]
    cpu: CpuSettings,
    #[serde(default)]
    prefetch: PrefetchSettings,
    #[serde(default)]
    observer: ObserverSettings,
    #[serde(default)]
    storage_pools: BTreeMap<String, String>,
    #[serde(default)]
    tier: Vec<tiers::TierSettings>,
    #[serde(default)]
    rule: Vec<toml::Table>,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            default: PathPolicy::default(),
            rules: Vec::new(),
            storage_pool_names: BTreeMap::new(),
            space: SpacePolicy { high_watermark: 0.95, low_watermark: 0.90 },
            tiers: Vec::new(),
            shares: SharePolicy::default(),
            evictor: forebay_prefetch::eviction::DEFAULT.into(),
            prefetch: Prefetch { jobs: true, online: true },
            observes_always: false,
            pool_deadline: Duration::from_secs(10),
            pool_retry: Duration::from_secs(2),
            wakeup_latency: Some(Duration::ZERO),
        }
    }
}

impl Policy {
    /// Returns a policy under which nothing in the pool changes.
    pub fn immutable() -> Self {
        let mut policy = Self::default();
        policy.default.consistency = Consistency::Immutable;
        policy.default.metadata_ttl = Duration::from_secs(365 * 86400);
        policy
    }

    /// Parses a policy file.
    ///
    /// # Errors
    /// `InvalidInput`, with the line or the setting and the allowed values.
    pub fn parse(text: &str) -> Result<Self> {
        Self::of(toml::from_str(text).map_err(|e| invalid(e.to_string()))?)
    }

    /// Parses a policy from a table that was already read.
    ///
    /// # Errors
    /// As [`Self::parse`], without lines.
    pub fn from_table(table: toml::Table) -> Result<Self> {
        Self::of(toml::Value::Table(table).try_into().map_err(|e| invalid(e.to_string()))?)
    }

    fn of(file: PolicyFile) -> Result<Self> {
        let mut policy = Self::default();
        file.default.apply(&mut policy.default)?;
        if let Some(text) = &file.pool.deadline {
            policy.pool_deadline = duration("pool.deadline", text)?;
        }
        if let Some(text) = &file.pool.retry {
            policy.pool_retry = duration("pool.retry", text)?;
        }
        if let Some(text) = &file.cpu.wakeup_latency {
            policy.wakeup_latency = match text.as_str() {
                "any" => None,
                text => Some(duration("cpu.wakeup-latency", text)?),
            };
        }
        if let Some(share) = file.space.high_watermark {
            policy.space.high_watermark = share;
        }
        if let Some(share) = file.space.low_watermark {
            policy.space.low_watermark = share;
        }
        let SpacePolicy { high_watermark, low_watermark } = policy.space;
        if !(0.0 < low_watermark && low_watermark <= high_watermark && high_watermark <= 1.0) {
            return Err(invalid(format!(
                "space: 0 < low-watermark ({low_watermark}) <= high-watermark ({high_watermark}) <= 1 must hold"
            )));
        }
        if let Some(name) = file.space.evictor {
            policy.evictor = name;
        }
        policy.tiers = tiers::checked(file.tier, policy.space)?;
        policy.shares = file.shares.policy()?;
        policy.prefetch.jobs = file.prefetch.jobs.unwrap_or(policy.prefetch.jobs);
        policy.prefetch.online = file.prefetch.online.unwrap_or(policy.prefetch.online);
        policy.observes_always = file.observer.at_work == Some(AtWork::Always);
        policy.storage_pool_names = file.storage_pools;
        for table in file.rule {
            policy.rules.push(PolicyRule::parse(table)?);
        }
        Ok(policy)
    }

    /// Returns the settings of a path: the default, changed by every matching rule, in the file's order. A rule that
    /// names a storage pool does not match a file that is in no storage pool, or in an unknown one.
    pub fn for_path(&self, path: &PoolPath, storage_pool: Option<&str>) -> PathPolicy {
        let mut result = self.default;
        if self.rules.is_empty() {
            return result;
        }
        let path = std::path::Path::new(std::ffi::OsStr::from_bytes(path.as_bytes()));
        let is_in =
            |wanted: &String| storage_pool.is_some_and(|pool| pool == wanted || self.storage_pool_name(pool) == wanted);
        for rule in &self.rules {
            let by_path = rule.paths.is_empty() || rule.paths.iter().any(|glob| glob.is_match(path));
            if by_path && rule.storage_pool.as_ref().is_none_or(is_in) {
                // Cannot fail: the settings were checked when the rule was parsed.
                let _ = rule.settings.apply(&mut result);
            }
        }
        result
    }

    /// Returns whether a rule names a storage pool, so that the storage pools of files must be known.
    pub fn asks_storage_pool(&self) -> bool {
        self.rules.iter().any(|rule| rule.storage_pool.is_some())
    }

    /// Returns the given name of a storage pool.
    pub fn storage_pool_name<'a>(&'a self, pool: &'a str) -> &'a str {
        self.storage_pool_names.get(pool).map_or(pool, String::as_str)
    }

    /// Returns the shortest idle time before a flush, over the default and all rules.
    pub fn shortest_idle(&self) -> Duration {
        let of = |policy: PathPolicy| match policy.flush {
            FlushPolicy::Idle(idle) => Some(idle),
            FlushPolicy::OnClose => Some(Duration::ZERO),
            FlushPolicy::Manual => None,
        };
        let rules = self.rules.iter().map(|rule| {
            let mut policy = self.default;
            // Cannot fail: the settings were checked when the rule was parsed.
            let _ = rule.settings.apply(&mut policy);
            policy
        });
        rules.chain([self.default]).filter_map(of).min().unwrap_or_default()
    }

    /// Returns the settings if they are the same for every path, so that the caller need not know the path.
    pub fn uniform(&self) -> Option<PathPolicy> {
        self.rules.is_empty().then_some(self.default)
    }
}

impl PolicyRule {
    fn parse(mut table: toml::Table) -> Result<Self> {
        let (paths, storage_pool) = (table.remove("paths"), table.remove("storage-pool"));
        if paths.is_none() && storage_pool.is_none() {
            return Err(invalid("a [[rule]] needs paths = [\"GLOB\", ...] or storage-pool = \"NAME\""));
        }
        let paths: Option<Vec<String>> =
            paths.map(toml::Value::try_into).transpose().map_err(|e| invalid(format!("rule.paths: {e}")))?;
        if paths.as_ref().is_some_and(Vec::is_empty) {
            return Err(invalid("rule.paths: no path is named"));
        }
        let storage_pool = storage_pool
            .map(toml::Value::try_into)
            .transpose()
            .map_err(|e| invalid(format!("rule.storage-pool: {e}")))?;
        let paths = paths.unwrap_or_default();
        let settings: Settings =
            toml::Value::Table(table).try_into().map_err(|e| invalid(format!("rule for {paths:?}: {e}")))?;
        settings.apply(&mut PathPolicy::default())?;
        let compile = |glob: &String| {
            let matcher = GlobBuilder::new(glob.trim_start_matches('/')).literal_separator(true).build();
            matcher.map(|g| g.compile_matcher()).map_err(|e| invalid(format!("rule.paths: {e}")))
        };
        Ok(Self { paths: paths.iter().map(compile).collect::<Result<_>>()?, storage_pool, settings })
    }
}

impl Settings {
    fn apply(&self, policy: &mut PathPolicy) -> Result<()> {
        if let Some(text) = &self.consistency {
            policy.consistency = match text.as_str() {
                "close-to-open" => Consistency::CloseToOpen,
                "immutable" => Consistency::Immutable,
                other => match other.strip_prefix("ttl:") {
                    Some(ttl) => Consistency::Ttl(duration("consistency", ttl)?),
                    None => {
                        return Err(invalid(format!(
                            "consistency = \"{other}\": \"close-to-open\", \"ttl:DURATION\" or \"immutable\""
                        )));
                    }
                },
            };
        }
        if let Some(text) = &self.flush {
            policy.flush = match text.as_str() {
                "on-close" => FlushPolicy::OnClose,
                "manual" => FlushPolicy::Manual,
                other => match other.strip_prefix("idle:") {
                    Some(idle) => FlushPolicy::Idle(duration("flush", idle)?),
                    None => {
                        return Err(invalid(format!(
                            "flush = \"{other}\": \"on-close\", \"idle:DURATION\" or \"manual\""
                        )));
                    }
                },
            };
        }
        if self.write == Some(Write::Through) {
            policy.flush = FlushPolicy::OnClose;
        }
        if let Some(text) = &self.whole_file {
            let size: bytesize::ByteSize =
                text.parse().map_err(|e| invalid(format!("whole-file = \"{text}\": {e}; a size such as 4MiB")))?;
            policy.whole_file_bytes = size.as_u64();
        }
        if let Some(text) = &self.metadata_ttl {
            policy.metadata_ttl = duration("metadata-ttl", text)?;
        }
        Ok(())
    }
}

fn duration(setting: &str, text: &str) -> Result<Duration> {
    humantime::parse_duration(text).map_err(|e| invalid(format!("{setting} = \"{text}\": {e}; a duration such as 30s")))
}

fn invalid(context: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, Side::Application, format!("policy: {}", context.into().trim_end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_rules_change_what_earlier_ones_said() {
        let policy = Policy::parse(
            "[default]\nflush = \"manual\"\n\
             [[rule]]\npaths = [\"out/**\"]\nflush = \"on-close\"\nwhole-file = \"1MiB\"\n\
             [[rule]]\npaths = [\"out/*.tmp\"]\nflush = \"idle:1m\"\n",
        )
        .unwrap();
        let at = |path: &str| policy.for_path(&PoolPath::parse(path).unwrap(), None);
        assert_eq!(at("in/a").flush, FlushPolicy::Manual);
        assert_eq!(at("out/x/y").flush, FlushPolicy::OnClose);
        assert_eq!(at("out/a.tmp").flush, FlushPolicy::Idle(Duration::from_secs(60)));
        assert_eq!(at("out/a.tmp").whole_file_bytes, 1 << 20);
    }

    #[test]
    fn rules_hold_for_a_storage_pool_by_its_number_or_its_name() {
        let policy = Policy::parse(
            "[storage-pools]\n2 = \"fast\"\n\
             [[rule]]\nstorage-pool = \"fast\"\nflush = \"manual\"\n\
             [[rule]]\nstorage-pool = \"2\"\npaths = [\"out/**\"]\nflush = \"on-close\"\n",
        )
        .unwrap();
        let at = |path: &str, pool| policy.for_path(&PoolPath::parse(path).unwrap(), pool).flush;
        assert!(policy.asks_storage_pool() && policy.uniform().is_none());
        assert_eq!(at("a", Some("2")), FlushPolicy::Manual);
        assert_eq!(at("out/a", Some("2")), FlushPolicy::OnClose);
        for elsewhere in [Some("1"), None] {
            assert_eq!(at("out/a", elsewhere), PathPolicy::default().flush);
        }
        assert_eq!((policy.storage_pool_name("2"), policy.storage_pool_name("3")), ("fast", "3"));
    }

    #[test]
    fn what_holds_for_all_paths_is_known_without_a_path() {
        let policy = |text: &str| Policy::parse(text).unwrap();
        let plain = policy("[default]\nflush = \"manual\"\n[observer]\nat-work = \"always\"");
        assert_eq!(plain.uniform().map(|policy| policy.flush), Some(FlushPolicy::Manual));
        assert!(plain.observes_always && !plain.asks_storage_pool());
        assert_eq!(plain.shortest_idle(), Duration::ZERO);
        assert!(!policy("[observer]\nat-work = \"needed\"").observes_always);
        let text = "[default]\nflush = \"idle:9s\"\n[[rule]]\npaths = [\"x\"]\nflush = \"idle:3s\"\n";
        let ruled = policy(text);
        assert_eq!((ruled.shortest_idle(), ruled.uniform()), (Duration::from_secs(3), None));
        let table = Policy::from_table(text.parse().unwrap()).unwrap();
        assert_eq!(table.shortest_idle(), ruled.shortest_idle());
        let immutable = Policy::immutable().default;
        assert_eq!(immutable.consistency, Consistency::Immutable);
        assert_eq!(immutable.metadata_ttl.as_secs(), 31_536_000);
    }

    #[test]
    fn wakeups_may_be_bounded_or_not() {
        let of = |text: &str| Policy::parse(text).unwrap().wakeup_latency;
        assert_eq!(of(""), Some(Duration::ZERO));
        assert_eq!(of("[cpu]\nwakeup-latency = \"2us\""), Some(Duration::from_micros(2)));
        assert_eq!(of("[cpu]\nwakeup-latency = \"any\""), None);
    }

    #[test]
    fn errors_name_the_setting_and_what_is_allowed() {
        for (text, needle) in [
            ("[default]\nflush = \"soon\"", "on-close"),
            ("[default]\nconsistency = \"ttl:x\"", "duration"),
            ("[default]\nflsh = \"manual\"", "flsh"),
            ("[[rule]]\nflush = \"manual\"", "paths"),
            ("[[rule]]\npaths = []\nflush = \"manual\"", "rule.paths"),
            ("[[rule]]\nstorage-pool = 2\nflush = \"manual\"", "rule.storage-pool"),
            ("[cpu]\nwakeup-latency = \"soon\"", "cpu.wakeup-latency"),
            ("[shares]\ndirty = 0", "shares.dirty"),
            ("[shares]\nopen-files = 1.5", "up to 1"),
            ("[space]\nhigh-watermark = 0.5\nlow-watermark = 0.6", "low-watermark"),
            ("[space]\nlow-watermark = 0.0", "low-watermark"),
        ] {
            let error = Policy::parse(text).unwrap_err();
            assert!(error.to_string().contains(needle), "{error}");
            assert!(error.is(ErrorKind::InvalidInput));
        }
    }
}
