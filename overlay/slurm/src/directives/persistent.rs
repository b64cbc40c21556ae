//! Directories that outlive their jobs: DataWarp's `create_persistent`, `persistentdw` and `destroy_persistent`.

use serde::{Deserialize, Serialize};

use super::value::{one_of, persistent_name, shown, size_bytes};
use super::words::unknown;
use super::{PATHS_MAX, WordPair};

/// What a job does with directories of its user on its nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PersistentRequest {
    /// Created before the job starts. One that exists stays as it is.
    #[serde(default)]
    pub create: Vec<PersistentDir>,
    /// The job does not start without them.
    #[serde(default)]
    pub uses: Vec<String>,
    /// Removed with all that is in them when the job has ended.
    #[serde(default)]
    pub destroy: Vec<String>,
}

/// A directory to create on each node of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PersistentDir {
    pub name: String,
    /// On each node.
    pub bytes: u64,
    pub access: DirectoryAccess,
}

/// How the nodes of a job are to see a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DirectoryAccess {
    /// Each node has its own.
    Private,
    /// All nodes see one: possible only for a job on one node.
    Striped,
}

impl PersistentRequest {
    /// Returns whether the job must not start before the directories are there.
    pub fn is_needed(&self) -> bool {
        !self.create.is_empty() || !self.uses.is_empty()
    }

    /// Reads one directive.
    pub(super) fn read(&mut self, directive: &str, options: &[WordPair<'_>]) -> Result<(), String> {
        let (mut name, mut bytes, mut access) = (None, None, DirectoryAccess::Striped);
        let creates = directive == "create_persistent";
        for (option, text) in options {
            match *option {
                "name" => name = Some(persistent_name(text)?),
                "capacity" if creates => bytes = Some(size_bytes(option, text)?),
                "type" if creates => one_of(option, text, &["scratch"])?,
                "pool" if creates => one_of(option, text, &["forebay"])?,
                "access_mode" | "access" if creates => {
                    one_of(option, text, &["striped", "private"])?;
                    if *text == "private" {
                        access = DirectoryAccess::Private;
                    }
                }
                "access_mode" | "type" | "capacity" | "pool" | "access" => {
                    return Err(format!(
                        "{option}={} belongs to create_persistent: {directive} name=NAME",
                        shown(text)
                    ));
                }
                _ => {
                    let known: &[&str] =
                        if creates { &["name", "capacity", "access_mode", "type", "pool"] } else { &["name"] };
                    return Err(unknown(&format!("option of {directive}"), option, known));
                }
            }
        }
        let name = name.ok_or_else(|| format!("{directive} needs name=NAME"))?;
        let is_known = match directive {
            "persistentdw" => self.uses.contains(&name),
            "destroy_persistent" => self.destroy.contains(&name),
            _ => self.create.iter().any(|dir| dir.name == name),
        };
        match () {
            () if is_known => return Err(format!("{directive} name={name} was given already")),
            () if self.create.len() + self.uses.len() + self.destroy.len() >= PATHS_MAX => {
                return Err(format!("a job has {PATHS_MAX} directives about persistent directories at most"));
            }
            () if directive == "persistentdw" => self.uses.push(name),
            () if directive == "destroy_persistent" => self.destroy.push(name),
            () => {
                let bytes = bytes.ok_or("create_persistent needs capacity=SIZE, such as capacity=100GiB")?;
                self.create.push(PersistentDir { name, bytes, access });
            }
        }
        Ok(())
    }
}
