//! Checks a mixed root before it is mounted: each pool as if it were mounted alone, and all pools together.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use bytesize::ByteSize;

use super::super::preflight::{self, apart};
use super::super::{Failure, FailureKind, paths};
use super::table::{NamedPool, within};
use super::{MultiMountRoot, directory};

/// What a mount would do, as far as it is known in advance.
#[derive(Debug, Clone)]
pub struct MultiMountPlan {
    pub root: MultiMountRoot,
    /// One plan for each pool of the root, in the root's order.
    pub pools: Vec<preflight::MountPlan>,
    /// Dead mounts below the mountpoint that must be detached first.
    pub dead_mounts: Vec<PathBuf>,
    /// The mountpoint has files that the mount would hide.
    pub hides_files: bool,
}

/// Checks the pools of `file` for a root at `mountpoint`, and completes their configuration. Changes nothing.
pub fn check(mountpoint: &Path, file: &Path, pools: Vec<NamedPool>) -> Result<MultiMountPlan, Failure> {
    let file = paths::absolute(file).map_err(|e| Failure::io(file.display(), &e))?;
    let names: Vec<String> = pools.iter().map(|p| p.name.clone()).collect();
    let text = paths::absolute(mountpoint).map_err(|e| Failure::io("mountpoint", &e))?;
    let dead_mounts = dead_mounts(&text, &names)?;
    let (place, hides_files) = if dead_mounts.is_empty() { preflight::mountpoint(&text)? } else { (text, false) };
    if !directory::is_own_mount() && dead_mounts.is_empty() {
        directory::refuse_content(&place, &names)?;
    }
    let mut plans = Vec::with_capacity(pools.len());
    for NamedPool { name, mut config } in pools {
        // The pool must lie apart from the whole root, not only from its own directory there: the root hides all that
        // lies below it.
        config.mountpoint = place.clone();
        let to_create = preflight::storage(&mut config).map_err(|f| within(&label(&file, &name), f))?;
        config.mountpoint = place.join(&name);
        plans.push(preflight::MountPlan { config, to_create, stale_mount: false, hides_files: false });
    }
    let root = MultiMountRoot { mountpoint: place, pools: names, file, made: Vec::new() };
    apart_from_each_other(&root, &plans)?;
    fits(&root, &plans)?;
    Ok(MultiMountPlan { root, pools: plans, dead_mounts, hides_files })
}

/// Returns the name of a pool for messages.
pub(super) fn label(file: &Path, name: &str) -> String {
    format!("{}: [[pool]] {name:?}", file.display())
}

/// Returns the mounts that an earlier root left at the mountpoint, innermost first. Fails if that root is served.
fn dead_mounts(mountpoint: &Path, names: &[String]) -> Result<Vec<PathBuf>, Failure> {
    let left = MultiMountRoot::at(mountpoint);
    if let Some(root) = left.as_ref().filter(|root| root.is_served()) {
        return Err(root.is_here());
    }
    if left.is_none() && preflight::existing_mount(mountpoint)? {
        let place = mountpoint.display();
        return Err(Failure::new(FailureKind::Busy, format!("a dead mount of one pool lies at {place}"))
            .remedy(format!("forebay umount --lazy {place}")));
    }
    let mut dead = Vec::new();
    for name in left.iter().flat_map(|root| &root.pools).chain(names) {
        let place = mountpoint.join(name);
        if !dead.contains(&place) && preflight::existing_mount(&place)? {
            dead.push(place);
        }
    }
    if directory::is_mounted(mountpoint) {
        dead.push(mountpoint.to_path_buf());
    }
    Ok(dead)
}

/// The fast directories of a pool must not be visible in another pool, nor be shared with it.
fn apart_from_each_other(root: &MultiMountRoot, plans: &[preflight::MountPlan]) -> Result<(), Failure> {
    let named = || root.pools.iter().zip(plans);
    for (at, (name, plan)) in named().enumerate() {
        for fast in &plan.config.fast {
            for (other_at, (other, other_plan)) in named().enumerate().filter(|(n, _)| *n != at) {
                let failed = |f| within(&label(&root.file, name), f);
                let pool = Path::new(&other_plan.config.pool);
                if pool.is_absolute() {
                    apart("the fast pool", fast, &format!("the pool {other:?},"), pool).map_err(failed)?;
                }
                for theirs in other_plan.config.fast.iter().filter(|_| other_at < at) {
                    apart("the fast pool", fast, &format!("that of {other:?},"), theirs).map_err(failed)?;
                }
            }
        }
    }
    Ok(())
}

/// The limits of pools that share the same devices must fit there together.
fn fits(root: &MultiMountRoot, plans: &[preflight::MountPlan]) -> Result<(), Failure> {
    let mut total_bytes: BTreeMap<u64, u64> = BTreeMap::new();
    let mut users: Vec<(&str, BTreeSet<u64>, u64)> = Vec::new();
    for (name, plan) in root.pools.iter().zip(plans) {
        let mut devices = BTreeSet::new();
        for fast in &plan.config.fast {
            let device = preflight::device(fast)?;
            total_bytes.insert(device.dev, device.total_bytes);
            devices.insert(device.dev);
        }
        users.push((name, devices, plan.config.limit_bytes.unwrap_or(0)));
    }
    let all: BTreeSet<u64> = total_bytes.keys().copied().collect();
    for devices in users.iter().map(|(_, devices, _)| devices).chain([&all]) {
        let sharing: Vec<_> = users.iter().filter(|(_, own, _)| own.is_subset(devices)).collect();
        let asked = sharing.iter().fold(0u64, |sum, (_, _, limit)| sum.saturating_add(*limit));
        let there = devices.iter().filter_map(|dev| total_bytes.get(dev)).fold(0u64, |sum, b| sum.saturating_add(*b));
        if asked > there {
            let names: Vec<&str> = sharing.iter().map(|(name, _, _)| *name).collect();
            return Err(Failure::new(
                FailureKind::NoSpace,
                format!(
                    "{}: the limits of the pools {} are {} together, and the file system of their fast directories \
                     holds {}",
                    root.file.display(),
                    names.join(", "),
                    ByteSize(asked),
                    ByteSize(there)
                ),
            )
            .remedy("smaller limits, or fast directories on other devices"));
        }
    }
    Ok(())
}

/// Carries out the plan: detaches dead mounts and creates fast directories.
pub(super) fn prepare(plan: &MultiMountPlan) -> Result<(), Failure> {
    for place in &plan.dead_mounts {
        if directory::is_mounted(place) {
            directory::remove(&plan.root, true)?;
        } else {
            preflight::detach_dead(place)?;
        }
    }
    if let Ok(left) = MultiMountRoot::load(&plan.root.runtime()) {
        directory::remove(&left, true)?;
    }
    for (name, pool) in plan.root.pools.iter().zip(&plan.pools) {
        preflight::prepare(pool).map_err(|f| within(&label(&plan.root.file, name), f))?;
    }
    Ok(())
}
