//! `[[tier]]`: the tiers of the fast pool, fastest first.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;

use forebay_backends::Result;
use toml_edit::Table;

use crate::SpacePolicy;
use crate::document::{PolicyFields, PolicySource, meant, size};

/// The name of the tier of the directories that `--fast` gives.
const FAST: &str = "fast";
/// The most tiers.
const TIERS_MAX: usize = 16;
/// Uses after which content is moved to a faster tier, unless the tier says otherwise.
const USES: u32 = 2;

/// The keys of a `[[tier]]`.
const KEYS: [&str; 6] = ["name", "fast", "limit", "high-watermark", "low-watermark", "uses"];

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

/// Reads the tiers of one file.
pub(crate) fn read(source: &PolicySource<'_>, document: &Table, space: SpacePolicy) -> Result<Vec<Tier>> {
    let Some(item) = document.get("tier") else { return Ok(Vec::new()) };
    let Some(tables) = item.as_array_of_tables() else {
        return Err(source.error(item.span(), "tiers are written as [[tier]]"));
    };
    if tables.len() > TIERS_MAX {
        return Err(source.error(item.span(), format!("{} tiers: {TIERS_MAX} at most", tables.len())));
    }
    let (mut tiers, mut names) = (Vec::new(), BTreeSet::new());
    for table in tables {
        let tier = Tier::read(&PolicyFields::of(source, "a [[tier]]", table, &KEYS)?, table, space)?;
        if !names.insert(tier.name.clone()) {
            return Err(source.error(table.span(), format!("two tiers have the name \"{}\"", tier.name)));
        }
        tiers.push(tier);
    }
    if !names.contains(FAST) {
        tiers.push(Tier { name: FAST.into(), dirs: Vec::new(), limit_bytes: None, space, uses: USES });
    }
    Ok(tiers)
}

impl Tier {
    fn read(fields: &PolicyFields<'_>, table: &Table, space: SpacePolicy) -> Result<Self> {
        let Some(name) = fields.text("name")? else {
            return Err(fields.source.error(table.span(), "a [[tier]] needs name = \"NAME\""));
        };
        if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)) {
            return Err(fields.error("name", "a name consists of letters, digits, '-', '_' and '.'"));
        }
        let wrong = |key: &str, what: String| fields.error(key, format!("tier \"{name}\": {what}"));
        let dirs: Vec<PathBuf> = fields.texts("fast")?.unwrap_or_default().into_iter().map(PathBuf::from).collect();
        if (name == FAST) != dirs.is_empty() {
            return Err(match dirs.is_empty() {
                true => wrong("name", "fast = [\"DIRECTORY\", ...] is missing".into()),
                false => {
                    wrong("fast", "this tier has the directories that --fast gives: give others another name".into())
                }
            });
        }
        if let Some(relative) = dirs.iter().find(|dir| !dir.is_absolute()) {
            return Err(wrong("fast", format!("{}: an absolute path is needed", relative.display())));
        }
        let limit = |text: &str| match size(text)? {
            0 => Err("must be above 0; a size such as 64GiB".into()),
            bytes => Ok(bytes),
        };
        let high_watermark = fields.share("high-watermark")?.unwrap_or(space.high_watermark);
        let low_watermark = fields.share("low-watermark")?.unwrap_or(space.low_watermark.min(high_watermark));
        if low_watermark > high_watermark {
            let what = format!("low-watermark ({low_watermark}) is above high-watermark ({high_watermark})");
            return Err(wrong("low-watermark", what));
        }
        let uses = match fields.number("uses")? {
            Some(uses) if uses.fract() != 0.0 || !(0.0..=f64::from(u32::MAX)).contains(&uses) => {
                return Err(wrong("uses", format!("uses = {uses}: must be a number of uses; 0 means never")));
            }
            uses => uses.map_or(USES, |uses| uses as u32),
        };
        let space = SpacePolicy { high_watermark, low_watermark };
        Ok(Self { name: name.into(), dirs, limit_bytes: fields.read("limit", limit)?, space, uses })
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name)?;
        if !self.dirs.is_empty() {
            let dirs: Vec<String> = self.dirs.iter().map(|dir| dir.display().to_string()).collect();
            write!(f, " fast={}", dirs.join(":"))?;
        }
        if let Some(limit) = self.limit_bytes {
            write!(f, " limit={limit}B")?;
        }
        let SpacePolicy { high_watermark, low_watermark } = self.space;
        write!(f, " high-watermark={high_watermark} low-watermark={low_watermark} uses={}", self.uses)
    }
}

/// Checks the name of the tier that a rule gives to files.
pub(crate) fn check_name(name: &str, tiers: &[Tier]) -> std::result::Result<(), String> {
    let known: Vec<&str> = tiers.iter().map(|tier| tier.name.as_str()).chain([FAST]).collect();
    if known.contains(&name) {
        Ok(())
    } else {
        Err(format!("tier = \"{name}\": there is no such tier{}", meant(name, &known)))
    }
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
    fn differences_show_each_value_of_a_tier() {
        let policy = |tier: &str| Policy::parse(&format!("[[tier]]\nname = \"ram\"\n{tier}\n")).unwrap();
        let old = policy("fast = [\"/x\"]\nlimit = \"1GiB\"");
        for (tier, shown) in [
            ("fast = [\"/x\"]\nlimit = \"2GiB\"", "-> ram fast=/x limit=2147483648B"),
            ("fast = [\"/x\", \"/y\"]\nlimit = \"1GiB\"", "-> ram fast=/x:/y limit"),
            ("fast = [\"/x\"]\nlimit = \"1GiB\"\nuses = 7", "low-watermark=0.9 uses=7, fast high"),
            ("fast = [\"/x\"]\nlimit = \"1GiB\"\nlow-watermark = 0.5", "low-watermark=0.5 uses=2, fast high"),
        ] {
            let found: Vec<String> = old.differences(&policy(tier)).iter().map(ToString::to_string).collect();
            assert!(found.len() == 1 && found[0].starts_with("tiers: ram fast=/x limit=1073741824B"), "{found:?}");
            assert!(found[0].contains(shown), "{found:?}");
        }
        let added = Policy::default().differences(&old);
        assert!(added.len() == 1 && added[0].to_string().starts_with("tiers: none -> ram"), "{added:?}");
        assert!(old.differences(&old).is_empty());
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
            ("name = \"ram\"\nfast = [\"/x\"]\nsize = \"1G\"", "no `size`"),
            ("fast = [\"/x\"]", "needs name"),
            ("name = \"ram\"\nfast = [\"/x\"]\nuses = 1.5", "number of uses"),
        ] {
            let error = Policy::parse(&format!("[[tier]]\n{text}\n")).unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
