//! `[[quota]]`: how much of the fast pool users and groups may hold.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use forebay_backends::Result;
use toml_edit::Table;

use crate::conditions::{Accounts, accounts};
use crate::document::{PolicyFields, PolicySource, duration, size};

/// All users, or all groups, one by one.
const EACH: &str = "*";
/// Spelling of no limit.
const UNLIMITED: &str = "unlimited";
/// How long a soft limit may be exceeded, unless the quota says otherwise.
const GRACE: Duration = Duration::from_secs(3600);

/// The keys of a `[[quota]]`.
pub(crate) const KEYS: [&str; 8] =
    ["user", "group", "bytes", "soft-bytes", "files", "soft-files", "staged-bytes", "grace"];

/// A user or a group, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum QuotaSubject {
    User(u32),
    Group(u32),
}

/// What one user or group may hold of the fast pool that eviction cannot free. `None`: no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuotaLimits {
    /// Bytes that are not in the pool yet, and bytes that are reserved for scratch directories.
    pub bytes: Option<u64>,
    /// As `bytes`; may be exceeded for the time of `grace`.
    pub soft_bytes: Option<u64>,
    /// Files with content that is not in the pool yet.
    pub files: Option<u64>,
    /// As `files`; may be exceeded for the time of `grace`.
    pub soft_files: Option<u64>,
    /// Bytes that are leased by stagings for a user. Groups have no such limit.
    pub staged_bytes: Option<u64>,
    pub grace: Duration,
}

impl Default for QuotaLimits {
    fn default() -> Self {
        Self { bytes: None, soft_bytes: None, files: None, soft_files: None, staged_bytes: None, grace: GRACE }
    }
}

impl QuotaLimits {
    /// Returns whether anything is limited.
    pub fn any(&self) -> bool {
        [self.bytes, self.soft_bytes, self.files, self.soft_files, self.staged_bytes].iter().any(Option::is_some)
    }
}

/// The quotas of a mount. The later one wins, limit by limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QuotaPolicy(Vec<Quota>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Quota {
    subjects: QuotaSubjects,
    bytes: Option<Option<u64>>,
    soft_bytes: Option<Option<u64>>,
    files: Option<Option<u64>>,
    soft_files: Option<Option<u64>>,
    staged_bytes: Option<Option<u64>>,
    grace: Option<Duration>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum QuotaSubjects {
    EachUser,
    EachGroup,
    Named(BTreeSet<QuotaSubject>),
}

impl QuotaPolicy {
    /// Returns whether nothing has a quota.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether anything is limited but what is staged.
    pub fn limits_use(&self) -> bool {
        let limits = |quota: &Quota| [quota.bytes, quota.soft_bytes, quota.files, quota.soft_files];
        self.0.iter().any(|quota| limits(quota).iter().any(|limit| matches!(limit, Some(Some(_)))))
    }

    /// Returns the limits of a user or a group. Root has none.
    pub fn limits_of(&self, subject: QuotaSubject) -> QuotaLimits {
        let mut limits = QuotaLimits::default();
        if subject == QuotaSubject::User(0) {
            return limits;
        }
        for quota in self.0.iter().filter(|quota| quota.subjects.contains(subject)) {
            let take = |given: Option<Option<u64>>, to: &mut Option<u64>| *to = given.unwrap_or(*to);
            take(quota.bytes, &mut limits.bytes);
            take(quota.soft_bytes, &mut limits.soft_bytes);
            take(quota.files, &mut limits.files);
            take(quota.soft_files, &mut limits.soft_files);
            take(quota.staged_bytes, &mut limits.staged_bytes);
            limits.grace = quota.grace.unwrap_or(limits.grace);
        }
        limits
    }

    /// Returns the users and groups that a quota names.
    pub fn named(&self) -> BTreeSet<QuotaSubject> {
        let named = self.0.iter().filter_map(|quota| match &quota.subjects {
            QuotaSubjects::Named(subjects) => Some(subjects),
            _ => None,
        });
        named.flatten().copied().collect()
    }

    /// Adds the quotas of one file.
    pub(crate) fn read(&mut self, source: &PolicySource<'_>, document: &Table, known: &dyn Accounts) -> Result<()> {
        let Some(item) = document.get("quota") else { return Ok(()) };
        let Some(tables) = item.as_array_of_tables() else {
            return Err(source.error(item.span(), "quotas are written as [[quota]]"));
        };
        for table in tables {
            let fields = PolicyFields::of(source, "a [[quota]]", table, &KEYS)?;
            let quota = Quota::read(&fields, table, known)?;
            self.0.push(quota);
            check_order(&fields, self)?;
        }
        Ok(())
    }
}

/// Checks that no soft limit is above the hard limit of the same user or group.
fn check_order(fields: &PolicyFields<'_>, quotas: &QuotaPolicy) -> Result<()> {
    // A user or a group that no quota names stands for all of those.
    let others = [(QuotaSubject::User(u32::MAX), "each user"), (QuotaSubject::Group(u32::MAX), "each group")];
    let named = quotas.named().into_iter().map(|subject| (subject, subject.to_string()));
    for (subject, name) in named.chain(others.map(|(subject, name)| (subject, name.to_owned()))) {
        let limits = quotas.limits_of(subject);
        for (key, hard_key, soft, hard) in [
            ("soft-bytes", "bytes", limits.soft_bytes, limits.bytes),
            ("soft-files", "files", limits.soft_files, limits.files),
        ] {
            if let (Some(soft), Some(hard)) = (soft, hard)
                && soft > hard
            {
                let key = if fields.item(key).is_some() { key } else { hard_key };
                let what = format!("the soft limit of {name} ({soft}) is above the hard one ({hard})");
                return Err(fields.error(key, what));
            }
        }
    }
    Ok(())
}

impl Quota {
    fn read(fields: &PolicyFields<'_>, table: &Table, known: &dyn Accounts) -> Result<Self> {
        let subjects = QuotaSubjects::read(fields, table, known)?;
        let bytes = |text: &str| if text == UNLIMITED { Ok(None) } else { size(text).map(Some) };
        if fields.item("staged-bytes").is_some() && fields.item("group").is_some() {
            let what = "content is staged for a user: a group has no `staged-bytes`";
            return Err(fields.error("staged-bytes", what));
        }
        let quota = Self {
            subjects,
            bytes: fields.read("bytes", bytes)?,
            soft_bytes: fields.read("soft-bytes", bytes)?,
            files: number(fields, "files")?,
            soft_files: number(fields, "soft-files")?,
            staged_bytes: fields.read("staged-bytes", bytes)?,
            grace: fields.read("grace", duration)?,
        };
        let limits = [quota.bytes, quota.soft_bytes, quota.files, quota.soft_files, quota.staged_bytes];
        if limits.iter().all(Option::is_none) && quota.grace.is_none() {
            return Err(fields.source.error(table.span(), "this [[quota]] sets no limit, such as bytes = \"100GiB\""));
        }
        Ok(quota)
    }
}

/// Reads a number of files: a whole number, or `unlimited`.
fn number(fields: &PolicyFields<'_>, key: &str) -> Result<Option<Option<u64>>> {
    let Some(item) = fields.item(key) else { return Ok(None) };
    match (item.as_integer(), item.as_str()) {
        (Some(number), _) if number >= 0 => Ok(Some(Some(number as u64))),
        (_, Some(UNLIMITED)) => Ok(Some(None)),
        _ => Err(fields.error(key, format!("{key} must be a number of files, or \"{UNLIMITED}\""))),
    }
}

impl QuotaSubjects {
    fn read(fields: &PolicyFields<'_>, table: &Table, known: &dyn Accounts) -> Result<Self> {
        let is_each = |key: &str| fields.texts(key).map(|texts| texts.is_some_and(|texts| texts == [EACH]));
        let named = |ids: Option<Vec<u32>>, subject: fn(u32) -> QuotaSubject| {
            ids.map(|ids| Self::Named(ids.into_iter().map(subject).collect()))
        };
        let subjects = match (fields.item("user").is_some(), fields.item("group").is_some()) {
            (true, false) if is_each("user")? => Some(Self::EachUser),
            (false, true) if is_each("group")? => Some(Self::EachGroup),
            (true, false) => named(accounts(fields, "user", "user", |name| known.uid(name))?, QuotaSubject::User),
            (false, true) => named(accounts(fields, "group", "group", |name| known.gid(name))?, QuotaSubject::Group),
            _ => None,
        };
        let subjects = subjects.ok_or_else(|| {
            let what = "a [[quota]] needs either user = \"NAME\" or group = \"NAME\"; \"*\" is each of them";
            fields.source.error(table.span(), what)
        })?;
        if subjects.contains(QuotaSubject::User(0)) && subjects != Self::EachUser {
            return Err(fields.error("user", "root has no quota"));
        }
        Ok(subjects)
    }

    fn contains(&self, subject: QuotaSubject) -> bool {
        match (self, subject) {
            (Self::EachUser, QuotaSubject::User(_)) | (Self::EachGroup, QuotaSubject::Group(_)) => true,
            (Self::Named(subjects), subject) => subjects.contains(&subject),
            _ => false,
        }
    }
}

impl fmt::Display for QuotaSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(uid) => write!(f, "user {uid}"),
            Self::Group(gid) => write!(f, "group {gid}"),
        }
    }
}

impl fmt::Display for QuotaPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // In their order: the later one wins.
        let shown = self.0.iter().map(|quota| {
            let subjects = match &quota.subjects {
                QuotaSubjects::EachUser => "each user".to_owned(),
                QuotaSubjects::EachGroup => "each group".to_owned(),
                QuotaSubjects::Named(subjects) => {
                    subjects.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
                }
            };
            format!("{subjects}: {quota}")
        });
        let shown: Vec<String> = shown.collect();
        f.write_str(if shown.is_empty() { "none" } else { "" })?;
        f.write_str(&shown.join("; "))
    }
}

impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limits = [
            ("bytes", self.bytes),
            ("soft-bytes", self.soft_bytes),
            ("files", self.files),
            ("soft-files", self.soft_files),
            ("staged-bytes", self.staged_bytes),
        ];
        let mut shown: Vec<String> = Vec::new();
        for (name, limit) in limits.iter().filter_map(|(name, limit)| limit.map(|limit| (name, limit))) {
            shown.push(format!("{name}={}", limit.map_or_else(|| UNLIMITED.into(), |limit| limit.to_string())));
        }
        shown.extend(self.grace.map(|grace| format!("grace={}", humantime::format_duration(grace))));
        f.write_str(&shown.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Policy;

    #[test]
    fn the_later_quota_wins_limit_by_limit_and_root_has_none() {
        let policy = Policy::parse(
            "[[quota]]\nuser = \"*\"\nbytes = \"10GiB\"\nsoft-bytes = \"5GiB\"\nfiles = 1000\ngrace = \"10m\"\n\
             [[quota]]\nuser = [\"1000\", \"1001\"]\nbytes = \"unlimited\"\nstaged-bytes = \"1TiB\"\n\
             [[quota]]\nuser = \"1001\"\nfiles = \"unlimited\"\n\
             [[quota]]\ngroup = \"50\"\nbytes = \"1GiB\"\n",
        )
        .unwrap();
        let of = |uid| policy.quotas.limits_of(QuotaSubject::User(uid));
        assert_eq!((of(7).bytes, of(7).soft_bytes, of(7).files), (Some(10 << 30), Some(5 << 30), Some(1000)));
        assert_eq!((of(1000).bytes, of(1000).files, of(1000).staged_bytes), (None, Some(1000), Some(1 << 40)));
        assert_eq!((of(1001).files, of(1001).grace), (None, Duration::from_secs(600)));
        assert!(!of(0).any());
        let group = |gid| policy.quotas.limits_of(QuotaSubject::Group(gid));
        assert_eq!((group(50).bytes, group(50).grace), (Some(1 << 30), GRACE));
        assert!(!group(51).any());
        let named: Vec<String> = policy.quotas.named().iter().map(ToString::to_string).collect();
        assert_eq!(named, ["user 1000", "user 1001", "group 50"]);
        assert!(Policy::parse("").unwrap().quotas.is_empty());
    }

    #[test]
    fn wrong_quotas_are_named() {
        for (text, said) in [
            ("bytes = \"1GiB\"", "needs either user"),
            ("user = \"1\"\ngroup = \"1\"\nbytes = \"1GiB\"", "needs either user"),
            ("user = \"1\"", "sets no limit"),
            ("user = \"root-of-nowhere\"\nbytes = \"1GiB\"", "no user of this name"),
            ("user = \"0\"\nbytes = \"1GiB\"", "root has no quota"),
            ("user = \"1\"\nbytes = \"lots\"", "such as 4MiB"),
            ("user = \"1\"\nfiles = -1", "number of files"),
            ("user = \"1\"\nfiles = 1.5", "number of files"),
            ("group = \"1\"\nstaged-bytes = \"1GiB\"", "a group has no `staged-bytes`"),
            ("user = \"1\"\nbytes = \"1GiB\"\nsoft-bytes = \"2GiB\"", "above the hard one"),
            ("user = \"1\"\nbyte = \"1GiB\"", "did you mean `bytes`?"),
        ] {
            let error = Policy::parse(&format!("[[quota]]\n{text}\n")).unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
        let split = "[[quota]]\nuser = \"*\"\nsoft-bytes = \"2GiB\"\n[[quota]]\nuser = \"1\"\nbytes = \"1GiB\"\n";
        assert!(Policy::parse(split).unwrap_err().to_string().contains("soft limit of user 1 "));
        let later = "[[quota]]\nuser = \"1\"\nsoft-bytes = \"2GiB\"\n[[quota]]\nuser = \"*\"\nbytes = \"1GiB\"\n";
        assert!(Policy::parse(later).unwrap_err().to_string().contains("soft limit of user 1 "));
        assert!(Policy::parse("quota = 1").unwrap_err().to_string().contains("[[quota]]"));
    }

    #[test]
    fn differences_show_quotas() {
        let (none, some) = (Policy::parse("").unwrap(), Policy::parse("[[quota]]\nuser = \"*\"\nfiles = 7\n").unwrap());
        let found: Vec<String> = none.differences(&some).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["quotas: none -> each user: files=7"]);
    }

    #[test]
    fn differences_show_the_order_of_quotas() {
        let all = "[[quota]]\nuser = \"*\"\nfiles = 7\n";
        let named = "[[quota]]\nuser = [\"1\", \"2\"]\nfiles = 9\n";
        let policy = |first: &str, second: &str| Policy::parse(&format!("{first}{second}")).unwrap();
        let (old, new) = (policy(all, named), policy(named, all));
        assert_ne!(
            old.quotas.limits_of(QuotaSubject::User(1)).files,
            new.quotas.limits_of(QuotaSubject::User(1)).files
        );
        let found: Vec<String> = old.differences(&new).iter().map(ToString::to_string).collect();
        let shown = ["each user: files=7", "user 1, user 2: files=9"];
        assert_eq!(found, [format!("quotas: {}; {} -> {}; {}", shown[0], shown[1], shown[1], shown[0])]);
        assert!(old.differences(&old).is_empty());
    }
}
