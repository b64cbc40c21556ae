//! Settings that the owner of a directory makes for all that is below it, by an extended attribute of the directory.

use forebay_backends::{PoolPath, Result};

use crate::document::{Place, PolicyFields, PolicySource, invalid};
use crate::settings::{PathSetting, SettingName};
use crate::tiers;
use crate::{Origin, PathPolicy, Policy, Verdict};

/// The extended attribute. Its value is TOML with settings alone: `flush = "on-close"`.
pub const DIRECTORY_POLICY_XATTR: &str = "user.forebay.policy";

/// The longest value, in bytes: it has room for every setting, with a comment. A longer one is refused, and has no meaning.
pub const DIRECTORY_POLICY_MAX: usize = 4096;

/// The settings of one directory, each with its place in the value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectoryPolicy {
    settings: Vec<(PathSetting, Place)>,
}

impl DirectoryPolicy {
    /// Reads the value of the attribute. Whether a site allows these settings, [`Policy::check_directory`] says.
    ///
    /// # Errors
    /// `InvalidInput` if the value is wrong, or too long.
    pub fn parse(value: &[u8]) -> Result<Self> {
        if value.len() > DIRECTORY_POLICY_MAX {
            return Err(invalid(format!(
                "{DIRECTORY_POLICY_XATTR}: a policy has at most {DIRECTORY_POLICY_MAX} bytes"
            )));
        }
        let text = std::str::from_utf8(value);
        let text = text.map_err(|_| invalid(format!("{DIRECTORY_POLICY_XATTR}: a policy is text")))?;
        let (source, document) = PolicySource::parse(DIRECTORY_POLICY_XATTR, text)?;
        let known = SettingName::ALL.map(SettingName::key);
        let fields = PolicyFields::of(&source, DIRECTORY_POLICY_XATTR, document.as_table(), &known)?;
        Ok(Self { settings: PathSetting::all_of(&fields)? })
    }
}

impl Policy {
    /// Checks that the settings of a directory are possible, and that `[allow]` names them.
    ///
    /// # Errors
    /// `InvalidInput` with the first one that is not.
    pub fn check_directory(&self, directory: &DirectoryPolicy) -> Result<()> {
        for (setting, place) in &directory.settings {
            let name = setting.name();
            if let PathSetting::Tier(Some(tier)) = setting {
                tiers::check_name(tier, &self.mount.tiers).map_err(|why| invalid(format!("{place}: {why}")))?;
            }
            if !self.allowed.contains(&name) {
                let allowed: Vec<&str> = self.allowed.iter().map(|name| name.key()).collect();
                let what = format!("the site does not allow `{name}` here; it allows {}", allowed.join(", "));
                return Err(invalid(format!("{place}: {what}")));
            }
        }
        Ok(())
    }
}

impl DirectoryPolicy {
    pub fn apply(&self, policy: &mut PathPolicy) {
        self.settings.iter().for_each(|(setting, _)| setting.apply(policy));
    }

    /// Applies the settings of the directory at `path` to a verdict.
    pub fn apply_to(&self, verdict: &mut Verdict, path: &PoolPath) {
        for (setting, _) in &self.settings {
            setting.apply(&mut verdict.policy);
            verdict.origins[setting.name() as usize] = Origin::Directory { path: path.clone() };
        }
    }
}
