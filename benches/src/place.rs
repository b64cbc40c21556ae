//! The directories of a run: a native directory, fast pools and pools side by side on one file system.

use std::fs;
use std::path::{Path, PathBuf};

use crate::mount::Mount;
use crate::pairs::Side;
use crate::{Result, caches, work};

pub const BIG_BYTES: usize = 1 << 30;
pub const SMALL_FILES: usize = 10_000;
pub const MANY_ENTRIES: usize = 100_000;
const LIMIT: &str = "16GiB";

/// A directory; it is removed when this value is dropped.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The directories and mounts that rows need. The order of the fields is the order of the drops: the mounts are
/// unmounted before the directory that contains them is removed.
pub struct Place {
    /// The default policy.
    pub general: Mount,
    /// Flushes only on request, so the daemon does no background work.
    pub quiet: Mount,
    /// Mounted with `--immutable`.
    pub immutable: Mount,
    pub native: PathBuf,
    pub root: PathBuf,
    _scratch: Scratch,
}

impl Place {
    /// Makes the data, mounts, and stages the files that rows read.
    pub fn make(dir: &Path) -> Result<Self> {
        let root = dir.join(format!("forebay-bench-{}", std::process::id()));
        fs::create_dir(&root)?;
        let scratch = Scratch(root.clone());
        let (native, pool) = (root.join("native"), root.join("pool"));
        for side in [&native, &pool] {
            make_data(&side.join("data"))?;
        }
        rustix::fs::syncfs(fs::File::open(&root)?)?;
        let policy = root.join("quiet.toml");
        fs::write(&policy, "[default]\nflush = \"manual\"\n")?;
        let policy = policy.to_str().ok_or("a directory whose name is not UTF-8")?;
        let mount = |name: &str, pool: &Path, options: &[&str]| {
            let options = [&["--limit", LIMIT], options].concat();
            Mount::start(pool, &root.join(format!("mount-{name}")), &root.join(format!("fast-{name}")), &options)
        };
        let place = Self {
            general: mount("general", &pool, &[])?,
            quiet: mount("quiet", &root.join("pool-quiet"), &["--policy", policy])?,
            immutable: mount("immutable", &pool, &["--immutable"])?,
            native,
            root: root.clone(),
            _scratch: scratch,
        };
        place.general.stage(&place.general.path().join("data"))?;
        place.immutable.stage(&place.immutable.path().join("data/small"))?;
        Ok(place)
    }

    /// Returns the root directory of one side; `mount` is the mount of [`Side::Mount`].
    pub fn side<'a>(&'a self, side: Side, mount: &'a Mount) -> &'a Path {
        match side {
            Side::Native => &self.native,
            Side::Mount => mount.path(),
        }
    }

    pub fn drop_caches(&self, what: caches::Drop) -> Result<()> {
        caches::drop_caches(&self.root, what)
    }

    /// Writes the dirty pages of all earlier work to the disk.
    pub fn sync(&self) -> Result<()> {
        Ok(rustix::fs::syncfs(fs::File::open(&self.root)?)?)
    }
}

fn make_data(data: &Path) -> Result<()> {
    fs::create_dir_all(data)?;
    work::write_sequentially(&data.join("big"), BIG_BYTES)?;
    let small = data.join("small");
    work::make_spread(&small)?;
    work::create(&work::spread_names(&small, SMALL_FILES))?;
    work::make_many(&data.join("many"), MANY_ENTRIES)
}
