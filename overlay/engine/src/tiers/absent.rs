//! The tiers at the start of the daemon, and content that is not there any more.
//!
//! A directory keeps its number as long as the catalog exists, so content that lies there is found again. The memory
//! tier is empty after a reboot, and a tier may be taken out of the policy: the clean content there is then absent. This
//! is one pass over the records of the device, in a few batches. The same holds for a fast directory that is not given any
//! more.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_cache::{ContentId, ContentStore, TierLayout};
use forebay_catalog::Catalog;
use forebay_policy::Policy;

use crate::Ino;

/// The key of the numbers of directories in the catalog.
const KEY: &str = "tier_devices";
/// Records that one batch changes.
const BATCH: usize = 1000;
/// Files that a message names.
const NAMED: usize = 3;

/// Adds the tiers of the policy to the fast pool, and gives up clean content on devices that are not there any more.
///
/// # Errors
/// `InvalidInput` if a tier cannot be used, or if unflushed content lies on a device that is missing.
pub(crate) fn attach(store: &mut ContentStore, catalog: &Catalog, policy: &Policy, id: &str) -> Result<()> {
    let stored: BTreeMap<u32, Vec<u8>> = catalog.meta(KEY)?.unwrap_or_default();
    if stored.is_empty() && policy.tiers.is_empty() {
        return Ok(());
    }
    let mut known: BTreeMap<usize, PathBuf> = BTreeMap::new();
    for (number, path) in stored {
        known.insert(number as usize, std::ffi::OsString::from_vec(path).into());
    }
    let mut missing = known.clone();
    let mut memory = Vec::new();
    if !policy.tiers.is_empty() {
        let layouts: Vec<TierLayout> = policy.tiers.iter().map(layout).collect();
        let number = |path: &Path| known.iter().find(|(_, known)| *known == path).map(|(number, _)| *number);
        let given = store.add_tiers(&layouts, id, number, known.keys().copied().collect())?;
        for dir in given {
            // A directory without the mark of this fast pool is a new one.
            if dir.is_marked {
                missing.remove(&dir.number);
            }
            if store.is_volatile(ContentId((dir.number as u64) << 56)) {
                memory.push(dir.number);
            }
            known.insert(dir.number, dir.path);
        }
    }
    for (number, path) in &missing {
        let place = format!("tier directory {}", path.display());
        let remedy = "mount its file system, and keep it in the policy";
        give_up_missing(catalog, *number, (&place, remedy), memory.contains(number))?;
    }
    let stored: BTreeMap<u32, Vec<u8>> =
        known.iter().map(|(number, path)| (*number as u32, path.as_os_str().as_bytes().to_vec())).collect();
    catalog.set_meta(KEY, &stored)?;
    // Before anything is placed there, or a mark is written.
    catalog.sync()
}

fn layout(tier: &forebay_policy::Tier) -> TierLayout {
    TierLayout {
        name: tier.name.clone(),
        dirs: tier.dirs.clone(),
        limit_bytes: tier.limit_bytes,
        high_watermark: tier.space.high_watermark,
    }
}

/// Takes those that are not given any more out of the numbers of the fast directories that were used before.
///
/// # Errors
/// `InvalidInput` if unflushed content lies on one of them.
pub(crate) fn give_up_directories(store: &ContentStore, catalog: &Catalog, known: &mut BTreeSet<usize>) -> Result<()> {
    let is_given = |number: usize| store.devices().iter().any(|device| device.number == number);
    for number in known.iter().copied().filter(|number| !is_given(*number)).collect::<Vec<_>>() {
        let place = format!("fast directory {} of this fast pool", number + 1);
        give_up_missing(catalog, number, (&place, "give it again (--fast)"), false)?;
        known.remove(&number);
    }
    Ok(())
}

/// Gives up the clean content of a device that is not there. `place` names it, with what brings it back. `in_memory`: there
/// is none but clean content.
fn give_up_missing(catalog: &Catalog, number: usize, place: (&str, &str), in_memory: bool) -> Result<()> {
    let (place, remedy) = place;
    let mut found = Vec::new();
    catalog.contents_on(number, |id, record| {
        found.push((id, record.ino));
        Ok(true)
    })?;
    let mut dirty = Vec::new();
    for (_, ino) in &found {
        if catalog.inode(*ino)?.is_some_and(|inode| inode.file.is_dirty() && on(number, inode.file.content())) {
            dirty.push(*ino);
        }
    }
    if !dirty.is_empty() && !in_memory {
        let some: Vec<String> = dirty.iter().take(NAMED).map(|ino| name_of(catalog, *ino)).collect();
        let what = format!(
            "{place} is not there, and holds {} files that are not in the pool yet ({}, ...): {remedy} until \
             `forebay flush --wait` is done",
            dirty.len(),
            some.join(", ")
        );
        return Err(Error::new(ErrorKind::InvalidInput, Side::Application, what));
    }
    for some in found.chunks(BATCH) {
        let mut batch = catalog.batch();
        for (id, ino) in some {
            match catalog.inode(*ino)? {
                Some(inode) if inode.file.content() == Some(*id) && inode.file.is_dirty() => {
                    let name = name_of(catalog, *ino);
                    tracing::error!("{name}: its only copy was in memory, and the machine was restarted");
                    continue;
                }
                Some(mut inode) if inode.file.content() == Some(*id) => {
                    (inode.file, _) = inode.file.evict()?;
                    batch.put_inode(*ino, &inode, inode.is_dirty());
                }
                _ => {}
            }
            batch.delete_content(*id);
        }
        catalog.write(batch)?;
    }
    if !found.is_empty() {
        tracing::info!("{place}: the content of {} files is not there any more", found.len());
    }
    Ok(())
}

fn on(number: usize, content: Option<ContentId>) -> bool {
    content.is_some_and(|id| (id.0 >> 56) as usize == number)
}

/// Returns the last part of a file's path.
fn name_of(catalog: &Catalog, ino: Ino) -> String {
    let link = catalog.inode(ino).ok().flatten().and_then(|inode| inode.links.first().cloned());
    link.map_or_else(|| format!("inode {ino}"), |(_, name)| name.escape_ascii().to_string())
}
