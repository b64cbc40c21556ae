//! Finds the rules whose paths match a path, without a look at the other rules.
//!
//! Most globs begin with directories that are spelled out (`home/anna/**`), or ask only for the end of the name
//! (`**/*.tmp`). Such globs are found by a hash of these directories, or of the ending. What is left of the others is
//! matched by one `GlobSet` for each spelled-out beginning.

use std::collections::HashMap;

use forebay_backends::Result;
use globset::{Candidate, GlobSet, GlobSetBuilder};
use std::os::unix::ffi::OsStrExt;

use crate::conditions::path_glob;
use crate::document::invalid;

/// Numbers of rules, in the order of the rules.
#[derive(Debug, Default)]
pub(crate) struct RuleIndex {
    /// Spelled-out directories of globs, without slashes at the ends → what follows.
    beginnings: HashMap<Box<[u8]>, Following>,
    /// `**/*.EXT` → rules. The key has no dot.
    endings: HashMap<Box<[u8]>, Vec<u32>>,
    /// `**/NAME` → rules.
    names: HashMap<Box<[u8]>, Vec<u32>>,
    /// Rules that do not ask for a path, but for an owner.
    owners: HashMap<u32, Vec<u32>>,
    /// Rules that ask for neither.
    others: Vec<u32>,
}

/// Globs with the same beginning.
#[derive(Debug, Default)]
struct Following {
    /// The glob is spelled out to its end.
    exact: Vec<u32>,
    /// `BEGINNING/**`
    below: Vec<u32>,
    globs: GlobSet,
    /// Glob of `globs` → rule.
    rules: Vec<u32>,
}

/// An index that is being made.
#[derive(Debug, Default)]
pub(crate) struct IndexBuilder {
    index: RuleIndex,
    globs: HashMap<Box<[u8]>, (GlobSetBuilder, Vec<u32>)>,
}

/// The forms of globs that are found by a hash.
#[derive(Debug, PartialEq, Eq)]
enum PathForm<'a> {
    Exact(&'a str),
    Below(&'a str),
    Ending(&'a str),
    Name(&'a str),
    /// The spelled-out beginning of a glob that has to be matched.
    Other(&'a str),
}

impl<'a> PathForm<'a> {
    fn of(glob: &'a str) -> Self {
        let is_plain = |text: &str| !text.is_empty() && !text.contains(['*', '?', '[', ']', '{', '}', '\\', '!']);
        if is_plain(glob) {
            return Self::Exact(glob);
        }
        if let Some(beginning) = glob.strip_suffix("/**").filter(|beginning| is_plain(beginning)) {
            return Self::Below(beginning);
        }
        if let Some(name) = glob.strip_prefix("**/") {
            if is_plain(name) && !name.contains('/') {
                return Self::Name(name);
            }
            if let Some(ending) = name.strip_prefix("*.")
                && is_plain(ending)
                && !ending.contains(['/', '.'])
            {
                return Self::Ending(ending);
            }
        }
        let plain = glob.split_inclusive('/').take_while(|part| part.ends_with('/') && is_plain(part));
        let len: usize = plain.map(str::len).sum();
        Self::Other(glob[..len].trim_end_matches('/'))
    }
}

impl IndexBuilder {
    /// Adds a rule with its globs. Rules must be added in their order.
    pub fn add_paths(&mut self, rule: u32, globs: &[&str]) -> std::result::Result<(), String> {
        for text in globs {
            let compiled = path_glob(text).map_err(|e| e.to_string())?;
            let glob = text.trim_start_matches('/');
            let index = &mut self.index;
            let beginning = |text: &str| Box::<[u8]>::from(text.as_bytes());
            let rules = match PathForm::of(glob) {
                PathForm::Exact(path) => &mut index.beginnings.entry(beginning(path)).or_default().exact,
                PathForm::Below(dir) => &mut index.beginnings.entry(beginning(dir)).or_default().below,
                PathForm::Ending(ending) => index.endings.entry(beginning(ending)).or_default(),
                PathForm::Name(name) => index.names.entry(beginning(name)).or_default(),
                PathForm::Other(dirs) => {
                    let (globs, rules) =
                        self.globs.entry(beginning(dirs)).or_insert_with(|| (GlobSetBuilder::new(), Vec::new()));
                    globs.add(compiled);
                    rules.push(rule);
                    continue;
                }
            };
            if rules.last() != Some(&rule) {
                rules.push(rule);
            }
        }
        Ok(())
    }

    /// Adds a rule that does not ask for paths.
    pub fn add_pathless(&mut self, rule: u32, owners: Option<&[u32]>) {
        match owners {
            Some(owners) => owners.iter().for_each(|owner| self.index.owners.entry(*owner).or_default().push(rule)),
            None => self.index.others.push(rule),
        }
    }

    pub fn build(mut self) -> Result<RuleIndex> {
        for (beginning, (globs, rules)) in self.globs {
            let following = self.index.beginnings.entry(beginning).or_default();
            following.globs = globs.build().map_err(|e| invalid(format!("the paths of all rules together: {e}")))?;
            following.rules = rules;
        }
        Ok(self.index)
    }
}

impl RuleIndex {
    /// Returns the rules whose paths match, and those without paths that may match, in order.
    pub fn candidates(&self, path: &[u8], uid: u32) -> Vec<u32> {
        let mut found = self.others.clone();
        let mut add = |rules: Option<&Vec<u32>>| {
            if let Some(rules) = rules {
                found.extend_from_slice(rules);
            }
        };
        if !self.owners.is_empty() {
            add(self.owners.get(&uid));
        }
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        if !self.names.is_empty() {
            add(self.names.get(name));
        }
        // As in globs: `**/*.x` matches the name `.x`, too.
        if !self.endings.is_empty()
            && let Some(dot) = name.iter().rposition(|byte| *byte == b'.')
        {
            add(self.endings.get(&name[dot + 1..]));
        }
        if !self.beginnings.is_empty() {
            let mut matches = Vec::new();
            let mut candidate = None;
            let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
            for end in std::iter::once(0).chain(ends).chain([path.len()]) {
                let Some(following) = self.beginnings.get(&path[..end]) else { continue };
                if end == path.len() {
                    found.extend_from_slice(&following.exact);
                } else {
                    found.extend_from_slice(&following.below);
                }
                if !following.rules.is_empty() {
                    let candidate = candidate.get_or_insert_with(|| Candidate::new(std::ffi::OsStr::from_bytes(path)));
                    following.globs.matches_candidate_into(candidate, &mut matches);
                    found.extend(matches.iter().map(|glob| following.rules[*glob]));
                }
            }
        }
        found.sort_unstable();
        found.dedup();
        found
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn globs_are_found_by_what_they_spell_out() {
        for (glob, form) in [
            ("a/b", PathForm::Exact("a/b")),
            ("a/b/**", PathForm::Below("a/b")),
            ("**/*.tmp", PathForm::Ending("tmp")),
            ("**/*.tar.gz", PathForm::Other("")),
            ("**/core", PathForm::Name("core")),
            ("a/b/*.c", PathForm::Other("a/b")),
            ("a/b*/c", PathForm::Other("a")),
            ("*", PathForm::Other("")),
            ("a/[b]/c", PathForm::Other("a")),
        ] {
            assert_eq!(PathForm::of(glob), form, "{glob}");
        }
    }

    fn glob() -> impl Strategy<Value = String> {
        let part = prop_oneof![
            Just("a"),
            Just("b"),
            Just("ab"),
            Just("*"),
            Just("**"),
            Just("?"),
            Just("*.x"),
            Just("a.x"),
            Just(".x"),
            Just("[ab]"),
            Just("{a,b}"),
            Just("a*"),
            Just("*.x.y"),
            Just("[!a]")
        ];
        prop::collection::vec(part, 1..4).prop_map(|parts| parts.join("/"))
    }

    fn path() -> impl Strategy<Value = String> {
        let part = prop_oneof![Just("a"), Just("b"), Just("ab"), Just("a.x"), Just(".x"), Just("b.x.y"), Just("c")];
        prop::collection::vec(part, 0..4).prop_map(|parts| parts.join("/"))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// The index finds the rules that a look at each glob finds.
        #[test]
        fn the_index_agrees_with_each_glob(
            rules in prop::collection::vec(prop::collection::vec(glob(), 1..3), 0..12),
            paths in prop::collection::vec(path(), 1..20),
        ) {
            let mut builder = IndexBuilder::default();
            for (number, globs) in rules.iter().enumerate() {
                let globs: Vec<&str> = globs.iter().map(String::as_str).collect();
                builder.add_paths(number as u32, &globs).unwrap();
            }
            let index = builder.build().unwrap();
            for path in paths {
                let plain: Vec<u32> = (0..rules.len() as u32).filter(|number| {
                    let globs = &rules[*number as usize];
                    globs.iter().any(|glob| path_glob(glob).unwrap().compile_matcher().is_match(&path))
                }).collect();
                prop_assert_eq!(index.candidates(path.as_bytes(), 0), plain, "path {} of rules {:?}", path, rules);
            }
        }
    }
}
