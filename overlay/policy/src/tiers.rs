//! `[[tier]]`: the tiers of the fast pool, fastest first.

use std::collections::BTreeSet;
use std::path::PathBuf;

use forebay_backends::Result;
use serde::Deserialize;

use crate::{PathPolicy, SpacePolicy, invalid};

/// The name of the tier of the directories that `--fast` gives.
const FAST: &str = "fast";
/// The most tiers.
const TIERS_MAX: usize = 16;
/// Uses after which content is moved to a faster tier, unless the tier says otherwise.
const USES: u32 = 2;

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct TierSettings {
    name: String,
    #[serde(default)]
    fast: Vec<PathBuf>,
    limit: Option<String>,
    high_watermark: Option<f64>,
    low_watermark: Option<f64>,
    uses: Option<u32>,
}

/// A tier of the fast pool.
#[derive(Debug, Clone, PartialEq)]
pub struct Tier {
    pub name: String,
    /// Its directories; none for the tier of the directories that `--fast` gives.
    pub dirs: Vec<PathBuf>,
    /// Bytes; `None`: nine tenths of its file systems.
    pub limit_bytes: Option<u64>,
    /// Content leaves the tier above the high watermark, until the low one.
    pub space: SpacePolicy,
    /// Content of the next slower tier is moved here after so many uses. Zero: never.
    pub uses: u32,
}

/// Checks the tiers, and adds that of `--fast` at the end if it is not in the list.
pub(crate) fn checked(settings: Vec<TierSettings>, space: SpacePolicy) -> Result<Vec<Tier>> {
    if settings.len() > TIERS_MAX {
        return Err(invalid(format!("{} tiers: {TIERS_MAX} at most", settings.len())));
    }
    let (mut tiers, mut names) = (Vec::new(), BTreeSet::new());
    let given = !settings.is_empty();
    for one in settings {
        let name = one.name.clone();
        let wrong = |what: String| invalid(format!("tier \"{name}\": {what}"));
        if one.name.is_empty() || !one.name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)) {
            return Err(wrong("a name consists of letters, digits, '-', '_' and '.'".into()));
        }
        if !names.insert(one.name.clone()) {
            return Err(wrong("two tiers have this name".into()));
        }
        if (one.name == FAST) != one.fast.is_empty() {
            let what = match one.fast.is_empty() {
                true => "fast = [\"DIRECTORY\", ...] is missing",
                false => "this tier has the directories that --fast gives: give others another name",
            };
            return Err(wrong(what.into()));
        }
        if let Some(relative) = one.fast.iter().find(|dir| !dir.is_absolute()) {
            return Err(wrong(format!("{}: an absolute path is needed", relative.display())));
        }
        let limit_bytes = match one.limit.as_deref().map(|text| (text, text.parse::<bytesize::ByteSize>())) {
            None => None,
            Some((_, Ok(size))) if size.as_u64() > 0 => Some(size.as_u64()),
            Some((text, _)) => return Err(wrong(format!("limit = \"{text}\": a size such as 64GiB"))),
        };
        let high_watermark = one.high_watermark.unwrap_or(space.high_watermark);
        let low_watermark = one.low_watermark.unwrap_or(space.low_watermark.min(high_watermark));
        if !(0.0 < low_watermark && low_watermark <= high_watermark && high_watermark <= 1.0) {
            let what =
                format!("0 < low-watermark ({low_watermark}) <= high-watermark ({high_watermark}) <= 1 must hold");
            return Err(wrong(what));
        }
        tiers.push(Tier {
            name: one.name,
            dirs: one.fast,
            limit_bytes,
            space: SpacePolicy { high_watermark, low_watermark },
            uses: one.uses.unwrap_or(USES),
        });
    }
    if given && !names.contains(FAST) {
        tiers.push(Tier { name: FAST.into(), dirs: Vec::new(), limit_bytes: None, space, uses: USES });
    }
    Ok(tiers)
}

/// Returns the name of the tier to which the settings of a path bind it.
pub fn placement_tier(_path: &PathPolicy) -> Option<&str> {
    None
}

#[cfg(test)]
mod tests {
    use crate::Policy;

    #[test]
    fn tiers_are_in_the_order_of_the_file_and_fast_is_the_last_unless_it_is_named() {
        let text = "[space]\nhigh-watermark = 0.8\nlow-watermark = 0.7\n\
                    [[tier]]\nname = \"ram\"\nfast = [\"/dev/shm/f\"]\nlimit = \"8GiB\"\nuses = 3\n\
                    [[tier]]\nname = \"nvme\"\nfast = [\"/a\", \"/b\"]\nhigh-watermark = 0.6\n";
        let policy = Policy::parse(text).unwrap();
        let shown: Vec<_> = policy.tiers.iter().map(|tier| (&*tier.name, tier.dirs.len(), tier.uses)).collect();
        assert_eq!(shown, [("ram", 1, 3), ("nvme", 2, 2), ("fast", 0, 2)]);
        assert_eq!(policy.tiers[0].limit_bytes, Some(8 << 30));
        let marks: Vec<_> = policy.tiers.iter().map(|t| (t.space.high_watermark, t.space.low_watermark)).collect();
        assert_eq!(marks, [(0.8, 0.7), (0.6, 0.6), (0.8, 0.7)]);
        let first = Policy::parse(&format!(
            "[[tier]]\nname = \"fast\"\nlimit = \"1GiB\"\n{}",
            &text[text.find("[[").unwrap()..]
        ));
        assert_eq!(first.unwrap().tiers[0].name, "fast");
        assert!(Policy::default().tiers.is_empty() && Policy::parse("").unwrap().tiers.is_empty());
    }

    #[test]
    fn wrong_tiers_are_named() {
        for (text, said) in [
            ("name = \"a b\"\nfast = [\"/x\"]", "letters"),
            ("name = \"ram\"", "tier \"ram\": fast = "),
            ("name = \"fast\"\nfast = [\"/x\"]", "another name"),
            ("name = \"ram\"\nfast = [\"x\"]", "absolute path"),
            ("name = \"ram\"\nfast = [\"/x\"]\nlimit = \"much\"", "a size such as"),
            ("name = \"ram\"\nfast = [\"/x\"]\nlimit = \"0\"", "a size such as"),
            ("name = \"ram\"\nfast = [\"/x\"]\nhigh-watermark = 1.5", "1.5"),
            ("name = \"ram\"\nfast = [\"/x\"]\n[[tier]]\nname = \"ram\"\nfast = [\"/y\"]", "two tiers"),
            ("name = \"ram\"\nfast = [\"/x\"]\nsize = \"1G\"", "size"),
        ] {
            let error = Policy::parse(&format!("[[tier]]\n{text}\n")).unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
