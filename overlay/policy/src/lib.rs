//! The rules for how paths are read, written, flushed and kept. This crate alone decides every behaviour of this kind.
//!
//! Text (`files`) is read with the place of every value (`document`) and compiled: `settings` are what rules decide,
//! `conditions` are what they ask of a file, `index` finds the rules of a path. Every matching rule is applied in order;
//! for each setting, the last rule that makes it wins. `directory` has the settings that users make for their own
//! directories, `diff` compares two policies.
//!
//! The crate is pure: no files, no clock, no threads.

mod conditions;
mod diff;
mod directory;
mod document;
mod files;
mod index;
mod quotas;
mod sections;
mod settings;
#[cfg(test)]
mod tests;
mod tiers;
mod writeback;

use std::fmt;
use std::ops::Deref;
use std::time::Duration;

use forebay_backends::{Error, PoolPath, Result};

pub use conditions::{Accounts, Context, FileFacts, JobFacts, NeededFacts, NoAccounts};
use conditions::{CONDITIONS, Conditions};
pub use diff::{PolicyDifference, TakesEffect};
pub use directory::{DIRECTORY_POLICY_MAX, DIRECTORY_POLICY_XATTR, DirectoryPolicy};
pub use document::Place;
use document::{PolicyFields, PolicySource, invalid};
pub use files::{FILES_MAX, PolicyFile, PolicyFiles, includes};
use index::{IndexBuilder, RuleIndex};
pub use quotas::{QuotaLimits, QuotaPolicy, QuotaSubject};
use sections::SECTIONS;
pub use sections::{MountPolicy, Prefetch, SharePolicy, SpacePolicy};
use settings::PathSetting;
pub use settings::{ConflictPolicy, Consistency, FlushPolicy, PathPolicy, Priority, Read, SettingName, Write};
pub use tiers::Tier;
pub use writeback::{SendLimits, SendWindow, WriteBack};

/// A compiled policy.
#[derive(Debug, Default)]
pub struct Policy {
    mount: MountPolicy,
    /// The settings of paths that no rule matches.
    default: PathPolicy,
    /// What the `[default]` sections set.
    default_settings: Vec<(PathSetting, Place)>,
    rules: Vec<PolicyRule>,
    index: RuleIndex,
    needed: NeededFacts,
}

/// Settings that are the same for all paths are read as fields.
impl Deref for Policy {
    type Target = MountPolicy;

    fn deref(&self) -> &MountPolicy {
        &self.mount
    }
}

#[derive(Debug)]
struct PolicyRule {
    /// What operators see of it: its name, or its conditions.
    title: String,
    conditions: Conditions,
    settings: Vec<(PathSetting, Place)>,
}

/// The settings of a file, with what made each of them.
#[derive(Debug, Clone)]
pub struct Verdict {
    pub policy: PathPolicy,
    /// In the order of [`SettingName::ALL`].
    pub origins: Vec<Origin>,
}

/// What made a setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// No file sets it.
    BuiltIn,
    /// A `[default]` section.
    Default { place: Place },
    /// A `[[rule]]`.
    Rule { title: String, place: Place },
    /// The extended attribute of a directory.
    Directory { path: PoolPath },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BuiltIn => f.write_str("built in"),
            Self::Default { place } => write!(f, "[default], {place}"),
            Self::Rule { title, place } => write!(f, "rule {title}, {place}"),
            Self::Directory { path } => write!(f, "{DIRECTORY_POLICY_XATTR} of {path}"),
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

    /// Compiles a policy.
    ///
    /// # Errors
    /// `InvalidInput`, with file, line and column, and what is allowed there.
    pub fn compile(files: &PolicyFiles, context: &Context<'_>) -> Result<Self> {
        Self::compile_as(files, context, &mut |refused| Err(refused))
    }

    /// Compiles a policy that was in force before, and that an earlier version may have accepted. A setting that is refused
    /// since then is replaced, which `replaced` is told.
    ///
    /// # Errors
    /// As [`Self::compile`].
    pub fn compile_stored(files: &PolicyFiles, context: &Context<'_>, mut replaced: impl FnMut(Error)) -> Result<Self> {
        let mut replace = |refused| {
            replaced(refused);
            Ok(())
        };
        Self::compile_as(files, context, &mut replace)
    }

    /// `refuse` gets the error of a setting that earlier versions accepted.
    fn compile_as(
        files: &PolicyFiles,
        context: &Context<'_>,
        refuse: &mut dyn FnMut(Error) -> Result<()>,
    ) -> Result<Self> {
        let mut policy = Self::default();
        let mut index = IndexBuilder::default();
        for file in &files.0 {
            let (source, document) = PolicySource::parse(&file.name, &file.text)?;
            let document = document.as_table();
            let known: Vec<&str> =
                ["include", "default", "rule", "tier", "quota"].into_iter().chain(SECTIONS).collect();
            PolicyFields::of(&source, "a policy", document, &known)?;
            policy.mount.take(&source, document)?;
            policy.mount.quotas.read(&source, document, context.accounts)?;
            let settings = SettingName::ALL.map(SettingName::key);
            if let Some(default) = PolicyFields::section(&source, document, "default", &settings)? {
                for (setting, place) in PathSetting::all_of(&default)? {
                    setting.apply(&mut policy.default);
                    policy.default_settings.retain(|(earlier, _)| earlier.name() != setting.name());
                    policy.default_settings.push((setting, place));
                }
            }
            for table in tables(&source, document)? {
                let number = policy.rules.len() as u32;
                policy.rules.push(PolicyRule::parse(&source, table, context, (number, &mut index), refuse)?);
            }
        }
        policy.check_tiers()?;
        policy.index = index.build()?;
        for rule in &policy.rules {
            let needed = rule.conditions.needed();
            policy.needed.storage_pool |= needed.storage_pool;
            policy.needed.content |= needed.content;
            policy.needed.age |= needed.age;
            policy.needed.jobs |= needed.jobs;
        }
        Ok(policy)
    }

    /// Checks that the tiers that are named exist.
    fn check_tiers(&self) -> Result<()> {
        let settings = self.rules.iter().flat_map(|rule| &rule.settings);
        for (setting, place) in settings.chain(&self.default_settings) {
            if let PathSetting::Tier(Some(name)) = setting {
                tiers::check_name(name, &self.mount.tiers).map_err(|why| invalid(format!("{place}: {why}")))?;
            }
        }
        Ok(())
    }

    /// Returns the policy without its rules, under which nothing is flushed unless it is requested.
    pub fn that_flushes_by_request(self) -> Self {
        let mut default = PathPolicy::default();
        PathSetting::Flush(FlushPolicy::Manual).apply(&mut default);
        let mount = MountPolicy { allowed: Vec::new(), ..self.mount };
        Self { mount, default, ..Self::default() }
    }

    /// Returns the policy with the tiers of another one: those of a fast pool that is in use do not change.
    pub fn with_tiers_of(mut self, other: &Self) -> Self {
        self.mount.tiers = other.mount.tiers.clone();
        self
    }

    /// Compiles one text, for a pool of which the rules need not know the URL.
    ///
    /// # Errors
    /// As [`Self::compile`].
    pub fn parse(text: &str) -> Result<Self> {
        Self::compile(&text.into(), &Context { pool_url: "", accounts: &NoAccounts })
    }

    /// Returns the settings of a file: the default, changed by every matching rule in order.
    pub fn decide(&self, facts: &FileFacts<'_>) -> PathPolicy {
        let mut policy = self.default.clone();
        for rule in self.matching(facts) {
            rule.settings.iter().for_each(|(setting, _)| setting.apply(&mut policy));
        }
        policy
    }

    /// Returns the settings of a file, and what made each of them.
    pub fn explain(&self, facts: &FileFacts<'_>) -> Verdict {
        let mut policy = self.default.clone();
        let mut origins = vec![Origin::BuiltIn; SettingName::ALL.len()];
        for (setting, place) in &self.default_settings {
            origins[setting.name() as usize] = Origin::Default { place: place.clone() };
        }
        for rule in self.matching(facts) {
            for (setting, place) in &rule.settings {
                setting.apply(&mut policy);
                let origin = Origin::Rule { title: rule.title.clone(), place: place.clone() };
                origins[setting.name() as usize] = origin;
            }
        }
        Verdict { policy, origins }
    }

    fn matching<'a>(&'a self, facts: &FileFacts<'a>) -> impl Iterator<Item = &'a PolicyRule> {
        let candidates = match self.rules.is_empty() {
            true => Vec::new(),
            false => self.index.candidates(facts.path.as_bytes(), facts.uid),
        };
        let facts = *facts;
        let rules = candidates.into_iter().map(|number| &self.rules[number as usize]);
        rules.filter(move |rule| rule.conditions.hold(&facts, |pool| self.storage_pool_name(pool)))
    }

    /// Returns what must be known of a file before its settings can be decided.
    pub fn needed(&self) -> NeededFacts {
        self.needed
    }

    /// Returns whether it may depend on its storage pool whether a file is local: a rule by storage pools may make a file
    /// local, or may say otherwise of a file that another rule makes local.
    pub fn may_be_local_by_storage_pool(&self) -> bool {
        self.may_write(Write::Local) && self.sets_by_storage_pool(|setting| matches!(setting, PathSetting::Write(_)))
    }

    /// Returns whether a file may have this setting to read because of its storage pool.
    pub fn may_read_by_storage_pool(&self, read: Read) -> bool {
        self.sets_by_storage_pool(|setting| *setting == PathSetting::Read(read))
    }

    fn sets_by_storage_pool(&self, wanted: impl Fn(&PathSetting) -> bool) -> bool {
        let rules = self.rules.iter().filter(|rule| rule.conditions.needed().storage_pool);
        rules.flat_map(|rule| &rule.settings).any(|(setting, _)| wanted(setting))
    }

    /// Returns whether the owner of a directory may decide whether, or when, what is below it is flushed.
    pub fn owners_decide_flush(&self) -> bool {
        let names = [SettingName::Write, SettingName::Flush, SettingName::FlushDeadline];
        names.iter().any(|name| self.mount.allowed.contains(name))
    }

    /// Returns whether any file may have this setting to write.
    pub fn may_write(&self, write: Write) -> bool {
        let mut settings = self.rules.iter().flat_map(|rule| &rule.settings);
        let by_owner = self.mount.allowed.contains(&SettingName::Write);
        by_owner || self.default.write == write || settings.any(|(setting, _)| *setting == PathSetting::Write(write))
    }

    /// Returns whether any file may have this setting to read.
    pub fn may_read(&self, read: Read) -> bool {
        let mut settings = self.rules.iter().flat_map(|rule| &rule.settings);
        let by_owner = self.mount.allowed.contains(&SettingName::Read);
        by_owner || self.default.read == read || settings.any(|(setting, _)| *setting == PathSetting::Read(read))
    }

    /// Returns whether any file may be flushed before `close` returns. Which files are is known only at the close: sizes,
    /// jobs and names change while a file is open.
    pub fn may_flush_on_close(&self) -> bool {
        let set = |setting: &PathSetting| match setting {
            PathSetting::Flush(flush) => *flush == FlushPolicy::OnClose,
            PathSetting::Write(write) => matches!(write, Write::Through | Write::Around),
            _ => false,
        };
        let by_owner = [SettingName::Flush, SettingName::Write].iter().any(|name| self.mount.allowed.contains(name));
        let mut settings = self.default_settings.iter().chain(self.rules.iter().flat_map(|rule| &rule.settings));
        by_owner || settings.any(|(setting, _)| set(setting))
    }

    /// Returns the given name of a storage pool.
    pub fn storage_pool_name<'a>(&'a self, pool: &'a str) -> &'a str {
        self.mount.storage_pool_names.get(pool).map_or(pool, String::as_str)
    }

    /// Returns the shortest time between a change and its flush, over the default and all rules.
    pub fn shortest_idle(&self) -> Duration {
        let of = |policy: PathPolicy| {
            let time = match policy.flush() {
                FlushPolicy::Idle(time) | FlushPolicy::Every(time) => time,
                FlushPolicy::OnClose | FlushPolicy::JobEnd => Duration::ZERO,
                FlushPolicy::Manual => return None,
            };
            Some(policy.flush_deadline.map_or(time, |deadline| time.min(deadline)))
        };
        let rules = self.rules.iter().map(|rule| {
            let mut policy = self.default.clone();
            rule.settings.iter().for_each(|(setting, _)| setting.apply(&mut policy));
            policy
        });
        // Rules of different conditions may hold for one file, and owners may choose any time.
        let deadlines = self.rules.iter().flat_map(|rule| &rule.settings);
        let deadlines = deadlines.filter_map(|(setting, _)| match setting {
            PathSetting::FlushDeadline(deadline) => *deadline,
            _ => None,
        });
        let by_owner = [SettingName::Flush, SettingName::FlushDeadline].iter().any(|name| self.allowed.contains(name));
        let directories = by_owner.then_some(Duration::ZERO);
        rules.chain([self.default.clone()]).filter_map(of).chain(deadlines).chain(directories).min().unwrap_or_default()
    }

    /// Returns the settings if they are the same for every file, so that the caller need not know the file.
    pub fn uniform(&self) -> Option<PathPolicy> {
        (self.rules.is_empty() && self.mount.allowed.is_empty()).then(|| self.default.clone())
    }
}

fn tables<'a>(source: &PolicySource<'_>, document: &'a toml_edit::Table) -> Result<Vec<&'a dyn toml_edit::TableLike>> {
    let Some(item) = document.get("rule") else { return Ok(Vec::new()) };
    match item.as_array_of_tables() {
        Some(tables) => Ok(tables.iter().map(|table| table as &dyn toml_edit::TableLike).collect()),
        None => Err(source.error(item.span(), "rules are written as [[rule]]")),
    }
}

impl PolicyRule {
    fn parse<'a>(
        source: &'a PolicySource<'_>,
        table: &'a dyn toml_edit::TableLike,
        context: &Context<'_>,
        (number, index): (u32, &mut IndexBuilder),
        refuse: &mut dyn FnMut(Error) -> Result<()>,
    ) -> Result<Self> {
        let settings = SettingName::ALL.map(SettingName::key);
        let known: Vec<&str> = ["name"].into_iter().chain(CONDITIONS).chain(settings).collect();
        let fields = PolicyFields::of(source, "a [[rule]]", table, &known)?;
        let conditions = Conditions::parse(&fields, context)?;
        let mut settings = PathSetting::all_of(&fields)?;
        let first = table.iter().next().map(|(key, _)| key.to_owned()).unwrap_or_default();
        if settings.is_empty() {
            return Err(fields.error(&first, "this [[rule]] makes no setting"));
        }
        // With the job, the rule would end: the files would go to the pool before they could be removed.
        if conditions.needed().jobs && settings.iter().any(|(set, _)| *set == PathSetting::Write(Write::Local)) {
            let what = "write = \"local\" holds also after a job has ended, so its rule cannot have the conditions `job` \
                        and `profile`; name the paths";
            refuse(fields.error("write", what))?;
            // Nothing else may send the files while the job runs, as before.
            for (setting, _) in &mut settings {
                if *setting == PathSetting::Write(Write::Local) {
                    *setting = PathSetting::Flush(FlushPolicy::Manual);
                }
            }
            let is_flush = |setting: &PathSetting| setting.name() == SettingName::Flush;
            settings.retain(|(set, _)| !is_flush(set) || *set == PathSetting::Flush(FlushPolicy::Manual));
        }
        if table.iter().all(|(key, _)| !CONDITIONS.contains(&key)) {
            let what = "this [[rule]] has no condition, such as paths = [\"GLOB\"]; settings for all files belong to [default]";
            return Err(fields.error(&first, what));
        }
        match fields.texts("paths")? {
            Some(globs) => {
                index.add_paths(number, &globs).map_err(|why| fields.error("paths", format!("paths: {why}")))?;
            }
            None => index.add_pathless(number, conditions.owners()),
        }
        Ok(Self { title: title(&fields, table)?, conditions, settings })
    }
}

/// Returns what operators see of a rule: its name, or else its conditions.
fn title(fields: &PolicyFields<'_>, table: &dyn toml_edit::TableLike) -> Result<String> {
    if let Some(name) = fields.text("name")? {
        return Ok(name.into());
    }
    let conditions = table.iter().filter(|(key, _)| CONDITIONS.contains(key));
    Ok(conditions.map(|(key, value)| format!("{key} = {}", value.to_string().trim())).collect::<Vec<_>>().join(", "))
}
