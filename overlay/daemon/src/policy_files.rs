//! Reads the files of a policy, and compiles them for a mount.

use std::path::{Path, PathBuf};

use forebay_api::policy::PolicyText;
use forebay_policy::{Accounts, Context, FILES_MAX, Policy, PolicyFile, PolicyFiles, includes};
use forebay_system::identity;

use super::Failure;

/// The users and groups of this machine.
struct MachineAccounts;

impl Accounts for MachineAccounts {
    fn uid(&self, name: &str) -> Option<u32> {
        identity::user_named(name)
    }

    fn gid(&self, name: &str) -> Option<u32> {
        identity::group_named(name)
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
    let compiled = Policy::compile(files, &Context { pool_url, accounts: &MachineAccounts });
    compiled.map_err(|e| Failure::usage(format!("policy {e}")))
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
