//! Settings that the owner of a directory makes for all that is below it, by an extended attribute of the directory.

use forebay_backends::{PoolPath, Result};

use crate::document::{PolicyFields, PolicySource};
use crate::settings::{PathSetting, SettingName};
use crate::tiers;
use crate::{Origin, PathPolicy, Policy, Verdict};

/// The extended attribute. Its value is TOML with settings alone: `flush = "on-close"`.
pub const DIRECTORY_POLICY_XATTR: &str = "user.forebay.policy";

/// The settings of one directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectoryPolicy {
    settings: Vec<PathSetting>,
}

impl Policy {
    /// Reads the settings of a directory.
    ///
    /// # Errors
    /// `InvalidInput` if the value is wrong, or makes a setting that `[allow]` does not name.
    pub fn parse_directory(&self, value: &str) -> Result<DirectoryPolicy> {
        let (source, document) = PolicySource::parse(DIRECTORY_POLICY_XATTR, value)?;
        let known = SettingName::ALL.map(SettingName::key);
        let fields = PolicyFields::of(&source, DIRECTORY_POLICY_XATTR, document.as_table(), &known)?;
        let settings: Vec<PathSetting> =
            PathSetting::all_of(&fields)?.into_iter().map(|(setting, _)| setting).collect();
        for setting in &settings {
            let name = setting.name();
            if let PathSetting::Tier(Some(tier)) = setting {
                tiers::check_name(tier, &self.mount.tiers).map_err(|why| fields.error(name.key(), why))?;
            }
            if !self.allowed.contains(&name) {
                let allowed: Vec<&str> = self.allowed.iter().map(|name| name.key()).collect();
                let what = format!("the site does not allow `{name}` here; it allows {}", allowed.join(", "));
                return Err(fields.error(name.key(), what));
            }
        }
        Ok(DirectoryPolicy { settings })
    }
}

impl DirectoryPolicy {
    pub fn apply(&self, policy: &mut PathPolicy) {
        self.settings.iter().for_each(|setting| setting.apply(policy));
    }

    /// Applies the settings of the directory at `path` to a verdict.
    pub fn apply_to(&self, verdict: &mut Verdict, path: &PoolPath) {
        for setting in &self.settings {
            setting.apply(&mut verdict.policy);
            verdict.origins[setting.name() as usize] = Origin::Directory { path: path.clone() };
        }
    }
}
