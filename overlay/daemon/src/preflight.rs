//! Checks a mount before it is made, so that a mistake is reported before anything has changed.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use bytesize::ByteSize;
use forebay_backends::PoolLocation;
use forebay_cache::guard;

use super::config::MountConfig;
use super::policy_files::NamedAccounts;
use super::registry::{self, RegisteredMount};
use super::worker::policy;
use super::{Failure, FailureKind, limits, mounts, multi_mount, paths, policy_files, unmount};

/// What a mount would do, as far as it is known in advance.
#[derive(Debug, Clone)]
pub struct MountPlan {
    /// The configuration, with absolute paths.
    pub config: MountConfig,
    /// Fast directories that do not exist yet.
    pub to_create: Vec<PathBuf>,
    /// A dead mount at the mountpoint that must be detached first.
    pub stale_mount: bool,
    /// The mountpoint has files that the mount would hide.
    pub hides_files: bool,
}

/// Checks a mount and completes its configuration. Changes nothing.
pub fn check(mut config: MountConfig) -> Result<MountPlan, Failure> {
    if let Ok(PoolLocation::Hollow(_)) = PoolLocation::parse(&config.pool) {
        return Err(Failure::usage(format!("{}: a hollow pool has no content", config.pool))
            .remedy("`forebay serve --reverse-proxy` uses one; a mount needs another pool"));
    }
    let text = utf8(paths::absolute(&config.mountpoint).map_err(|e| Failure::io("mountpoint", &e))?)?;
    let stale_mount = existing_mount(&text)?;
    let (mountpoint, hides_files) = if stale_mount { (text, false) } else { mountpoint(&text)? };
    config.mountpoint = mountpoint;
    let to_create = storage(&mut config)?;
    Ok(MountPlan { config, to_create, stale_mount, hides_files })
}

/// Checks pool, fast directories and limit, and makes their paths canonical. Returns the fast directories that do not
/// exist yet. Pool and fast directories must lie apart from `config.mountpoint`, which is itself not checked.
pub(super) fn storage(config: &mut MountConfig) -> Result<Vec<PathBuf>, Failure> {
    let pool = pool_dir(config)?;
    if let Some(pool) = &pool {
        let url = PoolLocation::parse(&config.pool)?;
        config.pool = url.url_of(pool.to_str().ok_or_else(|| not_utf8(pool))?);
        not_ours("the pool", pool)?;
        apart("the mountpoint", &config.mountpoint, "the pool", pool)?;
    }
    if config.fast.is_empty() {
        return Err(Failure::usage("no fast pool was given").remedy("--fast DIR, a directory on the local NVMe"));
    }
    let mut to_create = Vec::new();
    for fast in &mut config.fast {
        let (dir, exists) = fast_dir(fast)?;
        not_ours("the fast pool", &dir)?;
        not_beneath("the fast pool", &dir)?;
        *fast = utf8(dir)?;
        if !exists {
            to_create.push(fast.clone());
        }
    }
    for (at, fast) in config.fast.iter().enumerate() {
        if let Some(pool) = &pool {
            apart("the fast pool", fast, "the pool", pool)?;
        }
        apart("the fast pool", fast, "the mountpoint", &config.mountpoint)?;
        if config.fast[..at].contains(fast) {
            return Err(Failure::usage(format!("fast directory {} is given twice", fast.display())));
        }
    }
    if let Some(files) = &config.policy {
        config.accounts = policy_files::compile_with(files, &config.pool, &NamedAccounts::default())?.1;
    }
    for tier in &policy(config)?.tiers {
        for dir in &tier.dirs {
            let (dir, _) = fast_dir(dir)?;
            let what = format!("a directory of tier {}", tier.name);
            not_beneath(&what, &dir)?;
            if let Some(pool) = &pool {
                apart(&what, &dir, "the pool", pool)?;
            }
            apart(&what, &dir, "the mountpoint", &config.mountpoint)?;
        }
    }
    let mut entries = registry::entries();
    entries.retain(|entry| !(shared_with(config, entry).is_some() && unmount::is_over(entry)));
    not_shared(config, &entries)?;
    space(config)?;
    // The worker binds it again.
    config.metrics.map(|address| super::metrics::ADDRESS.bind(address)).transpose()?;
    if let Some(file) = &mut config.peers {
        *file = utf8(paths::absolute(file).map_err(|e| Failure::io("peers file", &e))?)?;
    }
    let peers = super::peers::settings(config)?;
    peers.map(|settings| super::peers::ADDRESS.bind(settings.listen)).transpose()?;
    Ok(to_create)
}

/// Carries out the plan: creates directories and detaches a dead mount.
pub fn prepare(plan: &MountPlan) -> Result<(), Failure> {
    if plan.stale_mount {
        detach_dead(&plan.config.mountpoint)?;
    }
    create_storage(&plan.config, &plan.to_create)
}

/// Detaches a dead mount, and removes what its daemon left. Fails if another daemon serves the mountpoint by now.
pub(super) fn detach_dead(mountpoint: &Path) -> Result<(), Failure> {
    let runtime = registry::Runtime::of(mountpoint);
    // No supervisor begins while this is held.
    let claimed = runtime.claim()?;
    if existing_mount(mountpoint)? {
        unmount::take_away(mountpoint, true)
            .map_err(|e| e.context(format!("the dead mount at {}", mountpoint.display())))?;
    }
    runtime.remove();
    drop(claimed);
    Ok(())
}

/// Creates the fast directories that do not exist yet, and takes possession of all of them.
pub(super) fn create_storage(config: &MountConfig, to_create: &[PathBuf]) -> Result<(), Failure> {
    for dir in to_create {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .map_err(|e| Failure::io(format!("cannot create fast directory {}", dir.display()), &e))?;
    }
    config.fast.iter().try_for_each(|dir| {
        // `guard::take` comes first: the probe file of `writable` would follow a link that another user put there.
        guard::take(dir)?;
        writable(dir)
    })
}

/// Returns whether a dead forebay mount lies at the mountpoint. Fails if the mount is alive.
pub(super) fn existing_mount(mountpoint: &Path) -> Result<bool, Failure> {
    if let Some(root) = multi_mount::MultiMountRoot::at(mountpoint) {
        return Err(root.is_here());
    }
    let known = registry::entries().into_iter().find(|e| e.mountpoint() == mountpoint);
    let alive = known.as_ref().is_some_and(|e| e.supervisor_alive() || e.worker_alive());
    let mounted = mounts::is_ours(mountpoint);
    let place = mountpoint.display();
    match known {
        Some(entry) if alive && mounted => Err(Failure::new(
            FailureKind::Busy,
            format!("{place} is already mounted by forebay (pid {})", entry.state.supervisor.pid),
        )
        .remedy(format!("forebay umount {place}"))),
        // `is_over` has waited for the daemon of the earlier mount, as `forebay umount` does.
        Some(entry) if alive && unmount::is_over(&entry) => Ok(false),
        Some(entry) if alive => Err(Failure::new(
            FailureKind::Busy,
            format!("the daemon of an earlier mount at {place} (pid {}) has not ended yet", entry.state.supervisor.pid),
        )
        .remedy("close the files that are still open there, and wait; `forebay status` shows it")),
        None if mounted && !is_dead(mountpoint) => Err(Failure::new(
            FailureKind::Busy,
            format!("{place} is already mounted by forebay, and its daemon is not known here"),
        )
        .remedy(format!("run this as the user who mounted it; if its daemon is gone: umount --lazy {place}"))),
        _ => Ok(mounted),
    }
}

/// Returns whether the kernel says that a mount has no daemon any more. One that does not answer may have one: between two
/// workers, requests wait.
fn is_dead(mountpoint: &Path) -> bool {
    let place = mountpoint.to_owned();
    let (answer, answers) = mpsc::channel();
    std::thread::spawn(move || {
        // After the deadline the receiver is gone.
        let _ = answer.send(rustix::fs::statfs(&place).err());
    });
    answers.recv_timeout(limits::POOL_CHECK) == Ok(Some(rustix::io::Errno::NOTCONN))
}

/// Returns the canonical path of a directory to mount at, and whether it holds anything.
pub(super) fn mountpoint(text: &Path) -> Result<(PathBuf, bool), Failure> {
    let place = text.display();
    let meta = std::fs::metadata(text).map_err(|e| match e.raw_os_error() {
        Some(libc::ENOENT) => Failure::usage(format!("mountpoint {place} does not exist"))
            .remedy(format!("mkdir -p {}", super::config::quoted(&text.to_string_lossy()))),
        Some(libc::ENOTCONN) => Failure::new(FailureKind::Busy, format!("a dead FUSE mount lies at {place}"))
            .remedy(format!("umount --lazy {place}")),
        _ => Failure::io(format!("mountpoint {place}"), &e),
    })?;
    if !meta.is_dir() {
        return Err(Failure::usage(format!("mountpoint {place} is not a directory")));
    }
    let canonical = text.canonicalize().map_err(|e| Failure::io(format!("mountpoint {place}"), &e))?;
    let hides = std::fs::read_dir(&canonical).is_ok_and(|mut entries| entries.next().is_some());
    Ok((utf8(canonical)?, hides))
}

/// Returns the pool's directory. `None`: the pool is no directory, and only its URL is checked. The request is made on
/// another thread, since a mounted pool that is down may never answer.
fn pool_dir(config: &MountConfig) -> Result<Option<PathBuf>, Failure> {
    let location = PoolLocation::parse(&config.pool).map_err(|e| Failure::usage(e.to_string()))?;
    let Some(dir) = location.directory() else { return Ok(None) };
    let dir = paths::absolute(dir).map_err(|e| Failure::io("pool", &e))?;
    let place = dir.display().to_string();
    let (answer, answers) = mpsc::channel();
    std::thread::spawn(move || {
        let looked = dir.canonicalize().and_then(|real| Ok((real.metadata()?, real)));
        // After the deadline the receiver is gone.
        let _ = answer.send(looked);
    });
    let remedy = "check that the pool is mounted: `findmnt`, `ls`";
    match answers.recv_timeout(limits::POOL_CHECK) {
        Ok(Ok((meta, real))) if meta.is_dir() => Ok(Some(real)),
        Ok(Ok(_)) => Err(Failure::usage(format!("pool {place} is not a directory"))),
        Ok(Err(e)) if e.kind() == io::ErrorKind::PermissionDenied => Err(Failure::io(format!("pool {place}"), &e)),
        Ok(Err(e)) => Err(Failure::new(FailureKind::PoolUnavailable, format!("pool {place}: {e}")).remedy(remedy)),
        Err(_) => Err(Failure::new(
            FailureKind::PoolUnavailable,
            format!("pool {place} has not answered for {} s", limits::POOL_CHECK.as_secs()),
        )
        .remedy(remedy)),
    }
}

/// Returns the canonical path of a fast directory, and whether it exists. If it does not exist, its existing ancestor
/// is canonical.
fn fast_dir(fast: &Path) -> Result<(PathBuf, bool), Failure> {
    let text = paths::absolute(fast).map_err(|e| Failure::io("fast directory", &e))?;
    match text.canonicalize() {
        Ok(real) if real.is_dir() => Ok((real, true)),
        Ok(real) => Err(Failure::usage(format!("fast directory {} is not a directory", real.display()))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let parent = existing_ancestor(&text);
            let rest = text.strip_prefix(&parent).unwrap_or(Path::new("")).to_path_buf();
            let real =
                parent.canonicalize().map_err(|e| Failure::io(format!("fast directory {}", text.display()), &e))?;
            Ok((real.join(rest), false))
        }
        Err(e) => Err(Failure::io(format!("fast directory {}", text.display()), &e)),
    }
}

fn existing_ancestor(path: &Path) -> PathBuf {
    path.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/")).to_path_buf()
}

pub(super) fn apart(what: &str, a: &Path, other: &str, b: &Path) -> Result<(), Failure> {
    let (a_text, b_text) = (a.display(), b.display());
    let how = if a == b {
        "is the same directory as"
    } else if a.starts_with(b) {
        "lies inside"
    } else if b.starts_with(a) {
        "contains"
    } else {
        return Ok(());
    };
    Err(Failure::usage(format!("{what} {a_text} {how} {other} {b_text}"))
        .remedy("use directories apart from each other"))
}

/// Fails if a directory lies in a forebay mount. Such a mount reserves names that pools need, and a mount that waits
/// for another one may wait for itself.
fn not_ours(what: &str, dir: &Path) -> Result<(), Failure> {
    let mounts = mounts::list().map_err(|e| Failure::io("the list of mounts", &e))?;
    let mount = mounts.iter().filter(|m| dir.starts_with(&m.mountpoint)).max_by_key(|m| m.mountpoint.as_os_str().len());
    match mount {
        Some(mount) if mount.fs_type == mounts::FS_TYPE => {
            let (dir, mount) = (dir.display(), mount.mountpoint.display());
            Err(Failure::usage(format!("{what} {dir} lies in a mount of forebay, {mount}"))
                .remedy("give a directory of the file system beneath: `forebay status` shows the pool of each mount"))
        }
        _ => Ok(()),
    }
}

/// Fails if a directory lies where a file system of `/etc/fstab` is to be mounted: once it is, it would hide what was made
/// there. A directory that is part of a fast pool already may be used.
fn not_beneath(what: &str, dir: &Path) -> Result<(), Failure> {
    if dir.join("device").exists() {
        return Ok(());
    }
    let Some(at) = mounts::not_mounted_above(dir) else { return Ok(()) };
    let (dir, at) = (dir.display(), at.display());
    Err(Failure::usage(format!("{what} {dir} is to be on the file system {at}, which is not mounted"))
        .remedy(format!("mount {at}; or remove it from /etc/fstab")))
}

/// Returns a fast directory that another mount uses, too.
fn shared_with<'a>(config: &'a MountConfig, entry: &RegisteredMount) -> Option<&'a PathBuf> {
    config.fast.iter().find(|fast| entry.state.config.fast.contains(fast))
}

fn not_shared(config: &MountConfig, entries: &[RegisteredMount]) -> Result<(), Failure> {
    for entry in entries.iter().filter(|e| e.supervisor_alive() || e.worker_alive()) {
        if let Some(fast) = shared_with(config, entry) {
            let (fast, other) = (fast.display(), entry.mountpoint().display());
            return Err(Failure::new(
                FailureKind::Busy,
                format!("fast directory {fast} is in use by the mount {other}"),
            )
            .remedy(format!("give this mount a directory of its own, or: forebay umount {other}")));
        }
    }
    Ok(())
}

fn writable(dir: &Path) -> Result<(), Failure> {
    tempfile_in(dir).map_err(|e| {
        let failure = Failure::io(format!("fast directory {} cannot be written", dir.display()), &e);
        match e.raw_os_error() {
            Some(libc::EROFS) => failure.remedy("it is on a read-only file system: remount it, or give another --fast"),
            Some(libc::ENOSPC) => failure.remedy("free some space there, or give another --fast"),
            _ => failure.remedy("make it writable for the user who mounts, or give another --fast"),
        }
    })
}

fn tempfile_in(dir: &Path) -> io::Result<()> {
    let probe = dir.join(format!(".forebay~probe-{}", std::process::id()));
    let written = std::fs::write(&probe, [0; 4096]);
    let removed = std::fs::remove_file(&probe);
    written.and(removed)
}

/// A device of the fast pool, as `statvfs` sees it.
pub(super) struct DeviceSpace {
    pub(super) dev: u64,
    dir: PathBuf,
    pub(super) total_bytes: u64,
    free_bytes: u64,
}

pub(super) fn device(dir: &Path) -> Result<DeviceSpace, Failure> {
    let dir = existing_ancestor(dir);
    let failed = |e: io::Error| Failure::io(format!("fast directory {}", dir.display()), &e);
    let dev = dir.metadata().map_err(failed)?.dev();
    let stat = rustix::fs::statvfs(&dir).map_err(|e| failed(e.into()))?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
    Ok(DeviceSpace { dev, total_bytes: bytes(stat.f_blocks), free_bytes: bytes(stat.f_bavail), dir })
}

fn space(config: &MountConfig) -> Result<(), Failure> {
    let mut devices: Vec<DeviceSpace> = Vec::new();
    for fast in &config.fast {
        let device = device(fast)?;
        if device.free_bytes < limits::FAST_FREE_BYTES {
            return Err(Failure::new(
                FailureKind::NoSpace,
                format!(
                    "the file system of fast directory {} has too little room: {} free of {}",
                    fast.display(),
                    ByteSize(device.free_bytes),
                    ByteSize(device.total_bytes)
                ),
            )
            .remedy(format!("free at least {} there, or give another --fast", ByteSize(limits::FAST_FREE_BYTES))));
        }
        if !devices.iter().any(|d| d.dev == device.dev) {
            devices.push(device);
        }
    }
    let total: u64 = devices.iter().map(|d| d.total_bytes).sum();
    match config.limit_bytes {
        Some(limit) if limit < limits::LIMIT_BYTES => {
            Err(Failure::usage(format!("the limit {} leaves the fast pool nothing to hold", ByteSize(limit)))
                .remedy("--limit with a unit, such as 500G"))
        }
        Some(limit) if limit > total => {
            let places: Vec<String> = devices.iter().map(|d| d.dir.display().to_string()).collect();
            Err(Failure::new(
                FailureKind::NoSpace,
                format!(
                    "the limit {} is larger than the file system behind {}, which holds {}",
                    ByteSize(limit),
                    places.join(", "),
                    ByteSize(total)
                ),
            )
            .remedy(format!("--limit {} or less", ByteSize(total / 10 * 9))))
        }
        _ => Ok(()),
    }
}

fn utf8(path: PathBuf) -> Result<PathBuf, Failure> {
    if path.to_str().is_some() { Ok(path) } else { Err(not_utf8(&path)) }
}

fn not_utf8(path: &Path) -> Failure {
    Failure::usage(format!("{} is not UTF-8", path.display()))
        .remedy("mountpoint, pool and fast directories need names in UTF-8; what lies in the pool does not")
}

#[cfg(test)]
mod tests;
