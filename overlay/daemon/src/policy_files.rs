//! Reads the files of a policy, and compiles them for a mount.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use forebay_api::policy::PolicyText;
use forebay_backends::Error;
use forebay_policy::{Accounts, Context, FILES_MAX, Policy, PolicyFile, PolicyFiles, includes};
use forebay_system::identity;
use serde::{Deserialize, Serialize};

use super::Failure;

/// What the names of users and groups in a policy stand for. It is kept beside the policy: a daemon that starts again
/// must not depend on whether the machine still knows the names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedAccounts {
    users: BTreeMap<String, u32>,
    groups: BTreeMap<String, u32>,
}

/// Asks the machine for the accounts that are not known yet, and notes them.
struct NotedAccounts(RefCell<NamedAccounts>);

impl NotedAccounts {
    fn find(known: &mut BTreeMap<String, u32>, name: &str, ask: fn(&str) -> Option<u32>) -> Option<u32> {
        if let Some(id) = known.get(name) {
            return Some(*id);
        }
        let id = ask(name)?;
        known.insert(name.to_owned(), id);
        Some(id)
    }
}

impl Accounts for NotedAccounts {
    fn uid(&self, name: &str) -> Option<u32> {
        Self::find(&mut self.0.borrow_mut().users, name, identity::user_named)
    }

    fn gid(&self, name: &str) -> Option<u32> {
        Self::find(&mut self.0.borrow_mut().groups, name, identity::group_named)
    }
}

/// A policy that was put into force after the mount, as it is kept for the next daemon.
#[derive(Debug, Serialize, Deserialize)]
#[serde(from = "StoredApplied")]
pub struct AppliedPolicy {
    pub files: PolicyFiles,
    pub accounts: NamedAccounts,
}

/// Earlier versions kept the files alone.
#[derive(Deserialize)]
#[serde(untagged)]
enum StoredApplied {
    Applied { files: PolicyFiles, accounts: NamedAccounts },
    Files(PolicyFiles),
}

impl From<StoredApplied> for AppliedPolicy {
    fn from(stored: StoredApplied) -> Self {
        match stored {
            StoredApplied::Applied { files, accounts } => Self { files, accounts },
            StoredApplied::Files(files) => Self { files, accounts: NamedAccounts::default() },
        }
    }
}

/// Reads a policy file, after the files that it includes.
///
/// # Errors
/// The error names the file that cannot be read, or the place of a wrong `include`.
pub fn read(file: &Path) -> Result<PolicyFiles, Failure> {
    let mut files = Vec::new();
    read_into(file, &mut Vec::new(), &mut files)?;
    Ok(PolicyFiles(files))
}

fn read_into(file: &Path, open: &mut Vec<PathBuf>, files: &mut Vec<PolicyFile>) -> Result<(), Failure> {
    let failed = |e: &std::io::Error| Failure::given(format!("policy {}", file.display()), e);
    let real = file.canonicalize().map_err(|e| failed(&e))?;
    if open.contains(&real) {
        return Err(Failure::usage(format!("policy {} includes itself", file.display())));
    }
    let text = std::fs::read_to_string(&real).map_err(|e| failed(&e))?;
    let name = file.display().to_string();
    open.push(real);
    for pattern in includes(&name, &text)? {
        let pattern = file.parent().unwrap_or(Path::new("/")).join(&pattern);
        let shown = pattern.display().to_string();
        let found = glob::glob(&shown).map_err(|e| Failure::usage(format!("{name}: include = \"{shown}\": {e}")))?;
        let mut found: Vec<PathBuf> = found.filter_map(Result::ok).collect();
        found.sort();
        if found.is_empty() && !shown.contains(['*', '?', '[']) {
            return Err(Failure::usage(format!("{name}: include = \"{shown}\": there is no such file")));
        }
        for included in found {
            read_into(&included, open, files)?;
        }
    }
    open.pop();
    if files.len() >= FILES_MAX {
        return Err(Failure::usage(format!("{name}: a policy has at most {FILES_MAX} files")));
    }
    files.push(PolicyFile { name, text });
    Ok(())
}

/// Compiles a policy for the pool with this URL.
///
/// # Errors
/// The error has file, line and column.
pub fn compile(files: &PolicyFiles, pool_url: &str) -> Result<Policy, Failure> {
    Ok(compile_with(files, pool_url, &NamedAccounts::default())?.0)
}

/// The same for a policy whose names had these numbers before. Other names are those of the machine. Returns the policy,
/// and the numbers of all names in it.
///
/// # Errors
/// As for [`compile`].
pub fn compile_with(
    files: &PolicyFiles,
    pool_url: &str,
    known: &NamedAccounts,
) -> Result<(Policy, NamedAccounts), Failure> {
    let accounts = NotedAccounts(RefCell::new(known.clone()));
    let compiled = Policy::compile(files, &Context { pool_url, accounts: &accounts });
    Ok((compiled.map_err(not_compiled)?, accounts.0.into_inner()))
}

/// Compiles a policy that was in force before. The log names the settings that were replaced, because this version does not
/// accept them.
///
/// # Errors
/// As for [`compile`].
pub fn compile_stored(files: &PolicyFiles, pool_url: &str, known: &NamedAccounts) -> Result<Policy, Failure> {
    let accounts = NotedAccounts(RefCell::new(known.clone()));
    let replaced = |refused| tracing::error!("the policy in force has a setting that is replaced: {refused}");
    Policy::compile_stored(files, &Context { pool_url, accounts: &accounts }, replaced).map_err(not_compiled)
}

fn not_compiled(error: Error) -> Failure {
    Failure::usage(format!("policy {error}"))
}

/// Returns the files as the control socket carries them.
pub fn to_wire(files: PolicyFiles) -> Vec<PolicyText> {
    files.0.into_iter().map(|file| PolicyText { name: file.name, text: file.text }).collect()
}

/// Returns the files that came through the control socket.
pub fn from_wire(files: Vec<PolicyText>) -> PolicyFiles {
    PolicyFiles(files.into_iter().map(|file| PolicyFile { name: file.name, text: file.text }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SEMANTICS 89: "A policy that was applied holds for a daemon that starts again."
    #[test]
    fn a_policy_compiles_again_although_the_machine_forgot_its_users() {
        let text =
            "[[rule]]\nowner = \"forebay-gone\"\nflush = \"manual\"\n[[rule]]\ngroup = \"root\"\nflush = \"manual\"\n";
        let files = PolicyFiles::from(text);
        assert!(compile(&files, "").unwrap_err().what.contains("forebay-gone"));
        let users = BTreeMap::from([("forebay-gone".to_owned(), 4711)]);
        let (_, noted) = compile_with(&files, "", &NamedAccounts { users, ..NamedAccounts::default() }).unwrap();
        assert_eq!(noted.groups.get("root"), Some(&0));
        let applied = serde_json::to_vec(&AppliedPolicy { files, accounts: noted.clone() }).unwrap();
        let AppliedPolicy { files, accounts } = serde_json::from_slice(&applied).unwrap();
        assert_eq!(compile_with(&files, "", &accounts).unwrap().1, noted);
        let of_earlier = serde_json::to_vec(&files).unwrap();
        assert_eq!(serde_json::from_slice::<AppliedPolicy>(&of_earlier).unwrap().files, files);
    }

    #[test]
    fn included_files_come_first_in_the_order_of_their_names() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        std::fs::create_dir(dir.path().join("site.d")).unwrap();
        write("site.d/20.toml", "[default]\nflush = \"manual\"\n");
        write("site.d/10.toml", "[default]\nflush = \"on-close\"\n");
        write("main.toml", "include = \"site.d/*.toml\"\n[default]\nwhole-file = \"1MiB\"\n");
        let files = read(&dir.path().join("main.toml")).unwrap();
        let names: Vec<_> = files.0.iter().map(|file| file.name.rsplit('/').next().unwrap()).collect();
        assert_eq!(names, ["10.toml", "20.toml", "main.toml"]);
        assert_eq!(compile(&files, "").unwrap().uniform().unwrap().flush(), forebay_policy::FlushPolicy::Manual);
        write("loop.toml", "include = [\"loop.toml\"]\n");
        assert!(read(&dir.path().join("loop.toml")).unwrap_err().what.contains("includes itself"));
        write("none.toml", "include = \"nothing.toml\"\n");
        assert!(read(&dir.path().join("none.toml")).unwrap_err().what.contains("no such file"));
        write("empty.toml", "include = \"nothing.d/*.toml\"\n");
        assert_eq!(read(&dir.path().join("empty.toml")).unwrap().0.len(), 1);
    }
}
