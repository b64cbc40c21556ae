//! Mixed roots: one directory that shows several pools, each under a name of its own.
//!
//! Each pool is a mount of its own below the root, with its own daemon, catalog and limit. So a pool that hangs or dies
//! does not affect the other pools, and the kernel itself refuses renames and links between pools with `EXDEV`. The
//! root is a directory that contains only the names. For root it is a small tmpfs that is mounted read-only. Other
//! users may not mount a tmpfs; for them it is their own directory.
//!
//! One daemon with several engines would need less memory, but would die for all pools. With one mount for each pool,
//! no pool waits for another pool's lock, memory or daemon, and each has its own `statfs`. The record `mixed.json` in
//! the runtime directory of the root lists the names. It is ignored once none of them is mounted.
//!
//! | module | does |
//! |---|---|
//! | `table` | `forebay.toml` → one `MountConfig` for each `[[pool]]` |
//! | `check` | the preflight of each mount, and whether the pools conflict with each other |
//! | `directory` | the root and the names in it |
//! | `mount`, `umount` | all pools or none |
//! | `foreground` | `-f`: ends with the last daemon |

mod check;
mod directory;
mod foreground;
mod mount;
mod table;
mod umount;

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use check::{MultiMountPlan, check};
pub use foreground::keep;
pub use mount::mount;
pub use table::{NamedPool, read};
pub use umount::{refuse_in_use, umount};

use super::config::quoted;
use super::registry::{self, Located, RegisteredMount, Runtime};
use super::{Failure, FailureKind, mounts, paths};

/// The record of a mixed root, in the runtime directory of its mountpoint.
const RECORD: &str = "mixed.json";

/// A mixed root, as recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MultiMountRoot {
    pub mountpoint: PathBuf,
    /// The names of its pools, in the order of the file.
    pub pools: Vec<String>,
    /// The file that describes it.
    pub file: PathBuf,
    /// Directories of names that were created because the root is not a tmpfs. They are removed with the root.
    #[serde(default)]
    pub made: Vec<String>,
}

/// The target of a command: a mount and a path below it.
#[derive(Debug, Clone)]
pub struct MountPath {
    pub entry: RegisteredMount,
    pub inner: String,
    /// Prefix for the mount's paths in output: the pool's name and a slash if the command was given the mixed root,
    /// else nothing.
    pub prefix: String,
}

impl From<Located> for MountPath {
    fn from(Located { entry, inner }: Located) -> Self {
        Self { entry, inner, prefix: String::new() }
    }
}

impl MultiMountRoot {
    /// Returns the mixed root at exactly this mountpoint.
    pub fn at(mountpoint: &Path) -> Option<Self> {
        all().into_iter().find(|root| root.mountpoint == mountpoint)
    }

    /// Returns the root that a path names, by its text or through symlinks.
    pub fn meant_by(path: &Path) -> Option<Self> {
        let text = paths::absolute(path).ok()?;
        let mut roots = all();
        let found = roots.iter().position(|r| r.mountpoint == text).or_else(|| {
            let ours = registry::foreign_mounts(&[]);
            let followed = paths::follow_until(&text, |p| ours.iter().any(|m| p.starts_with(m)));
            roots.iter().position(|r| r.mountpoint == followed)
        });
        found.map(|at| roots.swap_remove(at))
    }

    pub fn path_of(&self, pool: &str) -> PathBuf {
        self.mountpoint.join(pool)
    }

    /// Returns its pools, each with its mount if there is one.
    pub fn mounts(&self) -> Vec<(&str, Option<RegisteredMount>)> {
        let entries = registry::entries();
        let entry = |name: &str| entries.iter().find(|e| e.mountpoint() == self.path_of(name)).cloned();
        self.pools.iter().map(|name| (name.as_str(), entry(name))).collect()
    }

    /// Returns the top directories of all its pools.
    ///
    /// # Errors
    /// `NoDaemon` if a pool is not mounted: a command for the root is a command for all pools.
    pub fn places(&self) -> Result<Vec<MountPath>, Failure> {
        let place = |(name, entry): (&str, Option<RegisteredMount>)| {
            let entry = entry.ok_or_else(|| self.lacks(name))?;
            Ok(MountPath { entry, inner: String::new(), prefix: format!("{name}/") })
        };
        self.mounts().into_iter().map(place).collect()
    }

    /// Returns the failure for a pool that is not mounted.
    pub fn lacks(&self, pool: &str) -> Failure {
        let place = self.mountpoint.display();
        Failure::new(FailureKind::NoDaemon, format!("pool {pool} of the mixed root {place} is not mounted"))
            .remedy(format!("forebay umount {place}, then: {}", self.command_line()))
    }

    /// Returns the failure for a mountpoint that is in use.
    pub fn is_here(&self) -> Failure {
        let place = self.mountpoint.display();
        Failure::new(FailureKind::Busy, format!("{place} is already mounted by forebay: {}", self.pools.join(", ")))
            .remedy(format!("forebay umount {place}"))
    }

    pub fn command_line(&self) -> String {
        let word = |path: &Path| quoted(&path.to_string_lossy());
        format!("forebay mount --config {} {}", word(&self.file), word(&self.mountpoint))
    }

    fn runtime(&self) -> Runtime {
        Runtime::of(&self.mountpoint)
    }

    fn load(runtime: &Runtime) -> io::Result<Self> {
        let text = std::fs::read(runtime.dir().join(RECORD))?;
        serde_json::from_slice(&text).map_err(io::Error::other)
    }

    fn save(&self) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(self).map_err(io::Error::other)?;
        let runtime = self.runtime();
        runtime.replace(&runtime.dir().join(RECORD), &text)
    }

    /// Returns whether anything of the root is left: its directory, a mount, a daemon, or a directory that was created
    /// for a name. The last is checked only if nothing is mounted that could block the check.
    fn is_left(&self) -> bool {
        let mounted = |name: &String| mounts::is_ours(&self.path_of(name));
        directory::is_mounted(&self.mountpoint)
            || self.pools.iter().any(mounted)
            || self.is_served()
            || self.made.iter().any(|name| self.path_of(name).is_dir())
    }

    /// Returns whether one of its pools has a daemon.
    fn is_served(&self) -> bool {
        self.mounts().into_iter().filter_map(|(_, entry)| entry).any(|e| e.supervisor_alive() || e.worker_alive())
    }
}

/// Returns all mixed roots that this user may query. A record without mounts is ignored: another process unmounted
/// them.
pub fn all() -> Vec<MultiMountRoot> {
    registry::runtimes()
        .filter_map(|runtime| MultiMountRoot::load(&runtime).ok())
        .filter(MultiMountRoot::is_left)
        .collect()
}

/// Returns the mounts that a path names: the mount that it lies in, or for a mixed root the mounts of all its pools.
pub fn places(path: &Path) -> Result<Vec<MountPath>, Failure> {
    let failure = match registry::locate(path) {
        Ok(located) => return Ok(vec![located.into()]),
        Err(failure) => failure,
    };
    if let Some(root) = MultiMountRoot::meant_by(path) {
        return root.places();
    }
    let text = paths::absolute(path).map_err(|e| Failure::io("cannot tell the working directory", &e))?;
    match all().into_iter().find(|root| text.starts_with(&root.mountpoint)) {
        Some(root) => Err(Failure::new(
            FailureKind::NoDaemon,
            format!("{} is in no mounted pool of the mixed root {}", text.display(), root.mountpoint.display()),
        )
        .remedy(format!("its pools are {}", root.pools.join(", ")))),
        None => Err(failure),
    }
}
