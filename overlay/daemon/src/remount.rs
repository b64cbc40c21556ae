//! Changes options of a mount that is served (`-o remount`). Options that the kernel keeps change at once, without the
//! daemon. Options with which the daemon was started stay as they are; a request for another value is refused.

use std::path::{Path, PathBuf};

use bytesize::ByteSize;
use rustix::mount::MountFlags;

use super::config::MountConfig;
use super::registry::{self, RegisteredMount};
use super::{Failure, FailureKind, mounts, multi_mount, paths, supervisor};

/// The requested options.
#[derive(Debug)]
pub struct Remount {
    /// The options of the daemon that were given; the other options are empty.
    pub config: MountConfig,
    /// The options of the mount itself that were given, in their order.
    pub options: Vec<String>,
    /// The list is complete: mount(8) adds the present options of the mount to it.
    pub is_complete: bool,
}

/// The arguments for mount(2).
#[derive(Debug, PartialEq, Eq)]
pub struct RemountPlan {
    pub mountpoint: PathBuf,
    flags: MountFlags,
}

impl RemountPlan {
    pub fn is_read_only(&self) -> bool {
        self.flags.contains(MountFlags::RDONLY)
    }

    /// Remounts. Files that are open for writing keep a mount from becoming read-only.
    pub fn apply(&self) -> Result<(), Failure> {
        let place = &self.mountpoint;
        // FUSE has no options of its own that a remount can change.
        match rustix::mount::mount_remount(place, self.flags, "") {
            Err(rustix::io::Errno::BUSY) => {
                Err(supervisor::in_use(place).remedy("close the files that are open for writing there"))
            }
            Err(rustix::io::Errno::PERM) => {
                Err(Failure::new(FailureKind::Denied, format!("remount {}: only root may", place.display())))
            }
            outcome => outcome.map_err(|e| Failure::io(format!("remount {}", place.display()), &e.into())),
        }
    }
}

/// Checks the requested options against the present mount. Changes nothing.
pub fn check(asked: &Remount) -> Result<RemountPlan, Failure> {
    let place = paths::absolute(&asked.config.mountpoint).map_err(|e| Failure::io("mountpoint", &e))?;
    if multi_mount::MultiMountRoot::at(&place).is_some() {
        return Err(Failure::usage(format!("{} is a mixed root: only its pools can be remounted", place.display()))
            .remedy(format!("mount -o remount,... {}/NAME", place.display())));
    }
    let entry = registry::entries().into_iter().find(|e| e.mountpoint() == place && e.supervisor_alive());
    let mount = mounts::at(&place).map_err(|e| Failure::io("the list of mounts", &e))?;
    let (Some(entry), Some(mount)) = (entry, mount.filter(|m| m.fs_type == mounts::FS_TYPE)) else {
        let what = format!("nothing that this user's forebay serves is mounted at {}", place.display());
        return Err(Failure::new(FailureKind::NoDaemon, what).remedy("`forebay status` shows the mounts"));
    };
    stays(&asked.config, &entry)?;
    let flags = flags(asked, mount.flags, &entry.state.config)?;
    Ok(RemountPlan { mountpoint: place, flags })
}

/// Returns the failure for an option that is refused, with the way to get it all the same.
fn refused(option: &str, why: &str, place: &Path) -> Failure {
    let place = place.display();
    Failure::usage(format!("mount option `{option}` cannot be changed by a remount: {why}")).remedy(format!(
        "forebay umount {place}, then mount it with the options that you want; nothing is lost by that"
    ))
}

/// Fails if a daemon option is requested with another value than the daemon was started with.
fn stays(asked: &MountConfig, entry: &RegisteredMount) -> Result<(), Failure> {
    let has = &entry.state.config;
    let refused = |option: String, now: String| {
        Err(refused(
            &option,
            &format!("the daemon that serves {} was started with {now}", has.mountpoint.display()),
            &has.mountpoint,
        ))
    };
    let real = |dir: &Path| dir.canonicalize().unwrap_or_else(|_| dir.to_path_buf());
    let same = |a: &str, b: &str| a == b || real(Path::new(a)) == real(Path::new(b));
    if !asked.pool.is_empty() && !same(&asked.pool, &has.pool) {
        return refused(asked.pool.clone(), format!("the pool {}", has.pool));
    }
    if !asked.fast.is_empty() && !asked.fast.iter().map(|dir| real(dir)).eq(has.fast.iter().map(|dir| real(dir))) {
        let text = |dirs: &[PathBuf]| dirs.iter().map(|d| d.display().to_string()).collect::<Vec<_>>().join(":");
        return refused(format!("fast={}", text(&asked.fast)), text(&has.fast));
    }
    let size = |bytes: Option<u64>| bytes.map_or("the usual one".to_owned(), |bytes| ByteSize(bytes).to_string());
    for (name, asked, has) in
        [("limit", asked.limit_bytes, has.limit_bytes), ("memory", asked.memory_bytes, has.memory_bytes)]
    {
        if asked.is_some() && asked != has {
            return refused(format!("{name}={}", size(asked)), size(has));
        }
    }
    if asked.policy.is_some() && asked.policy != has.policy {
        return refused("policy".to_owned(), "another text".to_owned());
    }
    if let Some(threads) = asked.threads.filter(|_| asked.threads != has.threads) {
        let now = has.threads.map_or("as many as it needs".to_owned(), |n| n.to_string());
        return refused(format!("threads={threads}"), now);
    }
    if asked.throttle.is_some() && asked.throttle != has.throttle {
        return refused("throttle".to_owned(), "another pace, or none".to_owned());
    }
    if let Some(address) = asked.metrics.filter(|_| asked.metrics != has.metrics) {
        let now = has.metrics.map_or("no metrics".to_owned(), |now| format!("metrics on {now}"));
        return refused(format!("metrics={address}"), now);
    }
    if let Some(file) = asked.peers.as_ref().filter(|_| asked.peers != has.peers) {
        let now = has.peers.as_ref().map_or("no peers".to_owned(), |now| format!("peers={}", now.display()));
        return refused(format!("peers={}", file.display()), now);
    }
    if asked.immutable && !has.immutable {
        return refused("immutable".to_owned(), "a pool that changes".to_owned());
    }
    Ok(())
}

fn flags(asked: &Remount, has: MountFlags, config: &MountConfig) -> Result<MountFlags, Failure> {
    // The daemon handles these, too; mount(8) does not list them among the present options.
    let daemons = MountFlags::SYNCHRONOUS | MountFlags::DIRSYNC;
    let kept = daemons | MountFlags::LAZYTIME;
    let from = if asked.is_complete { has & kept } else { has };
    let wanted = mounts::changed(from, &asked.options) | config.forbidden();
    let place = &config.mountpoint;
    for (name, flag) in [("sync", MountFlags::SYNCHRONOUS), ("dirsync", MountFlags::DIRSYNC)] {
        if (wanted ^ has).contains(flag) {
            let (option, now) = if has.contains(flag) { ("async", "with") } else { (name, "without") };
            return Err(refused(option, &format!("the daemon was started {now} `{name}`"), place));
        }
    }
    if !wanted.contains(MountFlags::RDONLY) && (config.read_only || config.immutable) {
        let how = if config.immutable { "immutable" } else { "ro" };
        return Err(refused("rw", &format!("the daemon was started with `{how}`"), place));
    }
    Ok(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags_of(options: &str, is_complete: bool, has: MountFlags, read_only: bool) -> Result<MountFlags, Failure> {
        let json = serde_json::json!({ "pool": "s3://pool", "mountpoint": "/m", "fast": ["/f"], "read_only": read_only,
            "immutable": false, "allow_other": false });
        let config: MountConfig = serde_json::from_value(json).unwrap();
        let options = options.split(',').map(str::to_owned).collect();
        flags(&Remount { config: config.clone(), options, is_complete }, has, &config)
    }

    #[test]
    fn what_is_not_named_stays() {
        let has = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::RELATIME | MountFlags::SYNCHRONOUS;
        assert_eq!(flags_of("ro", false, has, false).unwrap(), has | MountFlags::RDONLY);
        assert_eq!(
            flags_of("suid,noexec", false, has, false).unwrap(),
            (has - MountFlags::NOSUID) | MountFlags::NOEXEC
        );
        // mount(8) lists all options that stay, except `sync`.
        let listed = "rw,nodev,relatime,noexec";
        assert_eq!(flags_of(listed, true, has, false).unwrap(), (has - MountFlags::NOSUID) | MountFlags::NOEXEC);
    }

    #[test]
    fn what_the_daemon_was_started_with_stays() {
        let has = MountFlags::NOSUID | MountFlags::RDONLY;
        for (option, has, read_only) in [
            ("rw", has, true),
            ("sync", has, true),
            ("dirsync", has, true),
            ("async", has | MountFlags::SYNCHRONOUS, true),
        ] {
            let failure = flags_of(option, false, has, read_only).unwrap_err();
            assert!(failure.what.contains(&format!("`{option}`")) && failure.remedy.is_some(), "{failure}");
        }
        assert_eq!(flags_of("rw", false, has, false).unwrap(), MountFlags::NOSUID);
    }
}
