//! Mixed roots: one directory that shows several pools, each under a name of its own.
//!
//! Each pool is a mount of its own below the root, with its own daemon, catalog and limit. So one that hangs or dies
//! does not touch the others, and the kernel itself refuses renames and links from one pool to another with `EXDEV`.
//! The root is a directory with nothing in it but the names: for root a small tmpfs that is mounted read-only; for
//! others, who may not mount one, their own directory.
//!
//! One daemon with several engines would need less memory, but would die for all pools. With one mount for each pool,
//! no pool waits for another pool's lock, memory or daemon, and each has a `statfs` of its own. The record `mixed.json`
//! in the runtime directory of the root lists the names. It counts for nothing once none of them is mounted.
//!
//! | module | does |
//! |---|---|
//! | `table` | `forebay.toml` → one `MountConfig` for each `[[pool]]` |
//! | `check` | the preflight of each mount, and whether the pools keep out of each other's way |
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

pub use check::{Plan, check};
pub use foreground::keep;
pub use mount::mount;
pub use table::{Named, read};
pub use umount::{refuse_in_use, umount};

use super::config::quoted;
use super::registry::{self, Entry, Located, Runtime};
use super::{Failure, FailureKind, mounts, paths};

/// The record of a mixed root, in the runtime directory of its mountpoint.
const RECORD: &str = "mixed.json";

/// A mixed root that was made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Root {
    pub mountpoint: PathBuf,
    /// The names of its pools, in the order of the file.
    pub pools: Vec<String>,
    /// The file that describes it.
    pub file: PathBuf,
    /// Directories of the names that were made below a mountpoint that is no mount, and are removed with it.
    #[serde(default)]
    pub made: Vec<String>,
}

/// Where a command acts: a mount and a path below it.
#[derive(Debug, Clone)]
pub struct Place {
    pub entry: Entry,
    pub inner: String,
    /// What goes before the mount's paths where they are shown: the pool's name and a slash where the mixed root was
    /// meant, else nothing.
    pub prefix: String,
}

impl From<Located> for Place {
    fn from(Located { entry, inner }: Located) -> Self {
        Self { entry, inner, prefix: String::new() }
    }
}

impl Root {
    /// The mixed root that is mounted at exactly this place.
    pub fn at(mountpoint: &Path) -> Option<Self> {
        all().into_iter().find(|root| root.mountpoint == mountpoint)
    }

    /// The root that a path means, by its text or by symlinks that lead to it.
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

    /// Its pools, and their mounts as far as they are there.
    pub fn mounts(&self) -> Vec<(&str, Option<Entry>)> {
        let entries = registry::entries();
        let entry = |name: &str| entries.iter().find(|e| e.mountpoint() == self.path_of(name)).cloned();
        self.pools.iter().map(|name| (name.as_str(), entry(name))).collect()
    }

    /// All its pools, each from its top.
    ///
    /// # Errors
    /// `NoDaemon` where one is not mounted: what is asked of the root is asked of all.
    pub fn places(&self) -> Result<Vec<Place>, Failure> {
        let place = |(name, entry): (&str, Option<Entry>)| {
            let entry = entry.ok_or_else(|| self.lacks(name))?;
            Ok(Place { entry, inner: String::new(), prefix: format!("{name}/") })
        };
        self.mounts().into_iter().map(place).collect()
    }

    /// The failure that says that a pool is not mounted.
    pub fn lacks(&self, pool: &str) -> Failure {
        let place = self.mountpoint.display();
        Failure::new(FailureKind::NoDaemon, format!("pool {pool} of the mixed root {place} is not mounted"))
            .remedy(format!("forebay umount {place}, then: {}", self.command_line()))
    }

    /// The failure that says that the place is taken.
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

    /// Whether anything of it is left: its directory, a mount, a daemon or, where nothing is mounted any more that could
    /// keep us waiting, a directory that was made for a name.
    fn is_left(&self) -> bool {
        let mounted = |name: &String| mounts::is_ours(&self.path_of(name));
        directory::is_mounted(&self.mountpoint)
            || self.pools.iter().any(mounted)
            || self.is_served()
            || self.made.iter().any(|name| self.path_of(name).is_dir())
    }

    /// Whether one of its pools has a daemon.
    fn is_served(&self) -> bool {
        self.mounts().into_iter().filter_map(|(_, entry)| entry).any(|e| e.supervisor_alive() || e.worker_alive())
    }
}

/// All mixed roots that this user may ask about. A record whose mounts somebody else took away counts for nothing.
pub fn all() -> Vec<Root> {
    registry::runtimes().filter_map(|runtime| Root::load(&runtime).ok()).filter(Root::is_left).collect()
}

/// The mounts that a path means: the one that it lies in, or for a mixed root those of all its pools.
pub fn places(path: &Path) -> Result<Vec<Place>, Failure> {
    let failure = match registry::locate(path) {
        Ok(located) => return Ok(vec![located.into()]),
        Err(failure) => failure,
    };
    if let Some(root) = Root::meant_by(path) {
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
