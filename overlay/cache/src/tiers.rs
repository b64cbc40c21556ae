//! Tiers: the devices of the fast pool in groups, fastest first, each with a limit of its own.
//!
//! The directories that `--fast` gives are one tier. Those of the other tiers are numbered from [`FIRST_OF_TIERS`] on. A
//! tier on tmpfs is *volatile*: only clean content is placed there, and its bytes do not count for the limit of the
//! fast pool, because they free nothing there.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use forebay_backends::{Error, Result};

use crate::device::Device;
use crate::health::is_device_error;
use crate::store::{bad, default_limit, free_bytes, has_fine_times, on_device, total_bytes};
use crate::{ContentId, ContentStore, Reservation, SpaceBudget};

/// The name of the tier of the directories that `--fast` gives.
pub const TIER_OF_FAST: &str = "fast";
/// The numbers of the directories of other tiers: from here on, below 256.
pub(crate) const FIRST_OF_TIERS: usize = 128;
const LAST_OF_TIERS: usize = 255;
/// Of file systems, in `f_type` of statfs(2).
const TMPFS: i64 = 0x0102_1994;
const RAMFS: i64 = 0x8584_58f6;
const HUGETLBFS: i64 = 0x9584_58f6;

/// What a tier is to be.
#[derive(Debug, Clone, PartialEq)]
pub struct TierLayout {
    pub name: String,
    /// Empty for the tier of the directories that `--fast` gives.
    pub dirs: Vec<PathBuf>,
    /// `None`: nine tenths of its file systems, or what `--limit` says.
    pub limit_bytes: Option<u64>,
    /// The share of the limit above which content leaves the tier.
    pub high_watermark: f64,
}

/// A directory of a tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierDirectory {
    pub number: usize,
    pub path: PathBuf,
    /// It was used before, by this fast pool.
    pub is_marked: bool,
}

/// Space that is reserved for content.
#[derive(Debug, Default)]
pub struct SpaceReservation {
    pub in_fast_pool: Option<Reservation>,
    pub in_tier: Option<Reservation>,
}

impl From<Reservation> for SpaceReservation {
    fn from(reservation: Reservation) -> Self {
        Self { in_fast_pool: Some(reservation), in_tier: None }
    }
}

/// A tier of the fast pool.
#[derive(Debug)]
pub struct StorageTier {
    pub name: String,
    pub budget: Arc<SpaceBudget>,
    pub is_volatile: bool,
    /// The numbers of its devices.
    pub devices: Vec<usize>,
    high_watermark: f64,
    /// Files that came from a slower tier, and that went to one.
    pub promoted_files: AtomicU64,
    pub demoted_files: AtomicU64,
}

impl StorageTier {
    /// Returns the tier of a fast pool that has no other.
    pub(crate) fn only(budget: Arc<SpaceBudget>, devices: usize) -> Self {
        Self::new(TIER_OF_FAST.into(), budget, (0..devices).collect(), 1.0)
    }

    fn new(name: String, budget: Arc<SpaceBudget>, devices: Vec<usize>, high_watermark: f64) -> Self {
        let (is_volatile, promoted_files, demoted_files) = Default::default();
        Self { name, budget, is_volatile, devices, high_watermark, promoted_files, demoted_files }
    }

    /// Returns whether `bytes` more fit below the high watermark.
    pub fn has_room(&self, bytes: u64) -> bool {
        let used = self.budget.used().saturating_add(self.budget.reserved()).saturating_add(bytes);
        used as f64 <= self.budget.limit() as f64 * self.high_watermark
    }
}

impl ContentStore {
    /// Adds tiers, fastest first. `numbered` returns the number of a directory that was used before, and `id` is what
    /// the devices are marked with. `taken`: the numbers of all directories that were ever used. Returns the directories,
    /// whose numbers are to be stored before anything is placed there.
    ///
    /// # Errors
    /// `InvalidInput` with the directory and the remedy.
    pub fn add_tiers(
        &mut self,
        layouts: &[TierLayout],
        id: &str,
        numbered: impl Fn(&Path) -> Option<usize>,
        mut taken: BTreeSet<usize>,
    ) -> Result<Vec<TierDirectory>> {
        let fast: Vec<usize> = self.devices.iter().map(|device| device.number).collect();
        if fast.len() > FIRST_OF_TIERS {
            return Err(bad(format!("{} --fast directories beside tiers: {FIRST_OF_TIERS} at most", fast.len())));
        }
        let (mut tiers, mut numbers) = (Vec::new(), Vec::new());
        let mut limit = 0u64;
        for layout in layouts {
            let mut devices = Vec::new();
            for dir in &layout.dirs {
                // Before it is opened: its lock would be found taken, by this process.
                let real = dir.canonicalize();
                if let Some(other) =
                    self.devices.iter().find(|other| real.as_ref().is_ok_and(|real| other.path == *real))
                {
                    let what = "a directory is given once, by --fast or in one tier";
                    return Err(bad(format!("tier {}: {} is given twice: {what}", layout.name, other.path.display())));
                }
                // Its number follows from its path, which is known only when it is open.
                let mut device = Device::open(dir, LAST_OF_TIERS)?;
                let mark = Device::marked(&device.path, id);
                let known = mark.or_else(|| numbered(&device.path));
                let free = || (FIRST_OF_TIERS..=LAST_OF_TIERS).find(|number| !taken.contains(number));
                let Some(number) = known.filter(|known| *known >= FIRST_OF_TIERS).or_else(free) else {
                    return Err(bad(format!("tier {}: there are too many directories", layout.name)));
                };
                if let Some(other) = self.known_device(number) {
                    let (this, other) = (device.path.display(), other.path.display());
                    return Err(bad(format!(
                        "tier {}: {this} was used before as {other}: empty one of them",
                        layout.name
                    )));
                }
                taken.insert(number);
                device.number = number;
                devices.push(number);
                numbers.push(TierDirectory { number, path: device.path.clone(), is_marked: mark.is_some() });
                self.fine_times &= has_fine_times(&device.lock).unwrap_or(false);
                self.devices.push(device);
            }
            let is_fast = layout.dirs.is_empty();
            let devices = if is_fast { fast.clone() } else { devices };
            let of_tier = |device: &&Device| devices.contains(&device.number);
            let is_volatile = !is_fast && is_volatile(layout, self.devices.iter().filter(of_tier))?;
            let total = total_bytes(self.devices.iter().filter(of_tier))?;
            let bytes = match layout.limit_bytes {
                Some(limit) if limit > total => {
                    let what = format!("tier {}: limit is {limit} bytes, but it has {total} bytes in all", layout.name);
                    return Err(bad(format!("{what}: give a smaller limit")));
                }
                Some(limit) => limit,
                None if is_fast => self.budget.limit(),
                None => default_limit(total),
            };
            limit += if is_volatile { 0 } else { bytes };
            let tier = StorageTier::new(layout.name.clone(), SpaceBudget::new(bytes), devices, layout.high_watermark);
            tiers.push(StorageTier { is_volatile, ..tier });
        }
        self.budget = SpaceBudget::new(limit);
        self.tiers = tiers;
        Ok(numbers)
    }

    /// Opens those directories of other tiers that carry the mark of this fast pool, with the numbers in their marks: for a
    /// fast pool whose catalog cannot be read. Nothing is made in the others.
    ///
    /// # Errors
    /// `Busy` if another process uses a directory.
    pub fn add_marked(&mut self, dirs: &[PathBuf]) -> Result<()> {
        let Some(id) = self.devices.first().and_then(Device::pool_id) else { return Ok(()) };
        for dir in dirs {
            let number = Device::marked(dir, &id).filter(|number| *number >= FIRST_OF_TIERS);
            if let Some(number) = number.filter(|number| self.known_device(*number).is_none()) {
                self.devices.push(Device::open(dir, number)?);
            }
        }
        Ok(())
    }

    pub fn tiers(&self) -> &[StorageTier] {
        &self.tiers
    }

    /// Returns whether there is more than one tier.
    pub fn has_tiers(&self) -> bool {
        self.tiers.len() > 1
    }

    /// Returns the place of a content file's tier, from the fastest; `None` if its device is not there.
    pub fn tier_of(&self, id: ContentId) -> Option<usize> {
        if !self.has_tiers() {
            return Some(0);
        }
        let device = self.device_of(id);
        self.tiers.iter().position(|tier| tier.devices.contains(&device))
    }

    /// Returns whether a content file is gone after a reboot.
    pub fn is_volatile(&self, id: ContentId) -> bool {
        self.has_tiers() && self.tier_of(id).is_some_and(|tier| self.tiers[tier].is_volatile)
    }

    /// Returns the slowest tier.
    pub fn last_tier(&self) -> usize {
        self.tiers.iter().rposition(|tier| !tier.is_volatile).unwrap_or(0)
    }

    /// Returns the tier for content that is written: the fastest one that is not volatile and has room.
    pub fn tier_for_writes(&self) -> usize {
        let durable = || self.durable_tiers().filter(|tier| self.takes_content(*tier));
        let free = |tier: &usize| self.tiers[*tier].budget.limit().saturating_sub(self.tiers[*tier].budget.used());
        durable()
            .find(|tier| self.tiers[*tier].has_room(0))
            .or_else(|| durable().max_by_key(free))
            .unwrap_or_else(|| self.last_tier())
    }

    /// Returns the tier for content that is fetched: the slowest one, as long as it has room for `bytes`.
    pub fn tier_for_fetches(&self, bytes: u64) -> usize {
        let fits = |tier: &usize| {
            let budget = &self.tiers[*tier].budget;
            budget.used().saturating_add(budget.reserved()).saturating_add(bytes) <= budget.limit()
        };
        let durable = || self.durable_tiers().filter(|tier| self.takes_content(*tier));
        durable().rev().find(fits).or_else(|| durable().next_back()).unwrap_or_else(|| self.last_tier())
    }

    /// Returns whether a device of a tier takes new content.
    pub fn takes_content(&self, tier: usize) -> bool {
        self.devices_of(tier).any(|device| device.health().takes_content())
    }

    fn durable_tiers(&self) -> impl DoubleEndedIterator<Item = usize> {
        (0..self.tiers.len()).filter(|tier| !self.tiers[*tier].is_volatile)
    }

    fn devices_of(&self, tier: usize) -> impl Iterator<Item = &Device> {
        let numbers = &self.tiers[tier].devices;
        self.devices.iter().filter(|device| numbers.contains(&device.number))
    }

    /// Returns the devices that keep their content over a reboot, and that work.
    pub(crate) fn durable_devices(&self) -> impl Iterator<Item = &Device> {
        let is_durable = |device: &&Device| {
            let volatile = self.tiers.iter().any(|tier| tier.is_volatile && tier.devices.contains(&device.number));
            !volatile && device.health().takes_content()
        };
        self.devices.iter().filter(is_durable)
    }

    /// Returns the number of the device with the most free space, of those that keep their content over a reboot.
    pub fn roomiest_device(&self) -> usize {
        self.durable_devices().max_by_key(|device| free_bytes(device)).map_or(0, |device| device.number)
    }

    /// Returns the id of a new content file: its number and its device, which is the one of the tier with the most free
    /// space that works.
    pub fn place(&self, number: ContentId, tier: usize) -> ContentId {
        if self.devices.len() == 1 {
            return number;
        }
        let working = self.devices_of(tier).filter(|device| device.health().takes_content());
        let roomiest = working.max_by_key(|device| free_bytes(device)).map(|device| device.number);
        on_device(number, roomiest.unwrap_or_else(|| self.roomiest_device()))
    }

    /// Returns how many bytes fit into the file system of a tier's roomiest device.
    pub fn free_bytes_in(&self, tier: usize) -> u64 {
        self.devices_of(tier).filter(|device| device.health().takes_content()).map(free_bytes).max().unwrap_or(0)
    }

    /// Records that a content file occupies `is` bytes, where `was` bytes were known.
    pub fn account(&self, id: ContentId, was: u64, is: u64) {
        self.account_reserved(id, was, is, SpaceReservation::default());
    }

    /// The same for bytes that were reserved before they were written. The reservation ends in the same step.
    pub fn account_reserved(&self, id: ContentId, was: u64, is: u64, reserved: SpaceReservation) {
        self.account_reserved_on(self.device_of(id), was, is, reserved);
    }

    /// The same for other bytes on a device.
    pub fn account_on(&self, device: usize, was: u64, is: u64) {
        self.account_reserved_on(device, was, is, SpaceReservation::default());
    }

    fn account_reserved_on(&self, device: usize, was: u64, is: u64, reserved: SpaceReservation) {
        if !self.has_tiers() {
            return self.budget.account_reserved(was, is, reserved.in_fast_pool);
        }
        let Some(tier) = self.tiers.iter().find(|tier| tier.devices.contains(&device)) else { return };
        tier.budget.account_reserved(was, is, reserved.in_tier);
        if !tier.is_volatile {
            self.budget.account_reserved(was, is, reserved.in_fast_pool);
        }
    }

    /// Notes that an operation on a content file failed. Returns whether its device is not used any more from now on.
    pub fn note_error(&self, id: ContentId, error: &Error) -> bool {
        self.device(id).is_ok_and(|device| self.note_device_error(device, error))
    }

    pub(crate) fn note_device_error(&self, device: &Device, error: &Error) -> bool {
        is_device_error(error.errno()) && self.note_failure(device, error)
    }

    /// Notes that a device failed. Returns whether it is not used any more from now on.
    pub(crate) fn note_failure(&self, device: &Device, error: &Error) -> bool {
        device.note_last_error(error);
        let bypassed = device.change_health(|health| health.failed(Instant::now()));
        self.health_changed.notify_one();
        bypassed
    }

    /// Records what all content occupies after a start that began with a count of `counted` bytes: so much in each tier,
    /// and `others` on devices that are not there.
    pub fn account_at_start(&self, counted: u64, others: u64, in_tiers: &[u64]) {
        let durable = |(tier, _): &(&StorageTier, &u64)| !tier.is_volatile;
        let sum: u64 = self.tiers.iter().zip(in_tiers).filter(durable).map(|(_, bytes)| bytes).sum();
        self.budget.account(counted, others + sum);
        if self.has_tiers() {
            self.tiers.iter().zip(in_tiers).for_each(|(tier, bytes)| tier.budget.account(0, *bytes));
        }
    }

    /// Notes that a content file could not be made. Returns whether another device takes it.
    pub(crate) fn takes_content_elsewhere(&self, id: ContentId, error: &Error) -> bool {
        self.note_error(id, error);
        let failed = self.device_of(id);
        let takes = |device: &Device| device.number != failed && device.health().takes_content();
        is_device_error(error.errno()) && failed != 0 && self.devices.iter().any(takes)
    }

    /// Returns whether clean content may be read from its device. Content on a device that is not there may not.
    pub fn is_used(&self, id: ContentId) -> bool {
        self.devices.len() == 1 || self.device(id).is_ok_and(|device| device.health().is_used())
    }

    /// Returns the state of the device of a content file, unless it is healthy.
    pub fn unhealthy(&self, id: ContentId) -> Option<String> {
        let device = self.device(id).ok()?;
        let health = device.health();
        let tells = || format!("its device {} is {}", device.path.display(), health.name());
        (!health.is_healthy()).then(tells)
    }

    /// Returns the numbers of the devices that are bypassed.
    pub fn bypassed(&self) -> impl Iterator<Item = usize> {
        self.devices.iter().filter(|device| !device.health().is_used()).map(|device| device.number)
    }

    /// Wakes the task that waits in [`Self::health_changed`].
    pub fn announce_health(&self) {
        self.health_changed.notify_one();
    }

    /// Waits until the health of a device may have changed. For one task.
    pub async fn health_changed(&self) {
        self.health_changed.notified().await;
    }

    /// Returns how long it takes until a device is to be probed; `None`: all are healthy.
    pub fn probe_in(&self) -> Option<Duration> {
        let now = Instant::now();
        self.devices.iter().filter_map(|device| device.health().probe_in(now)).min()
    }

    /// Probes the devices that are to be probed, or all. Returns the numbers of those that are bypassed since. Blocks.
    pub fn probe(&self, all: bool) -> Vec<usize> {
        let mut bypassed = Vec::new();
        for device in &self.devices {
            let due = device.health().probe_in(Instant::now());
            if !due.map_or(all, |due| due.is_zero()) {
                continue;
            }
            let works = device.probe().inspect_err(|error| device.note_last_error(error)).is_ok();
            let was_used = device.health().is_used();
            device.change_health(|health| health.probed(works, Instant::now()));
            if was_used && !device.health().is_used() {
                bypassed.push(device.number);
            }
        }
        bypassed
    }
}

/// Returns whether a tier loses its content with the machine.
fn is_volatile<'a>(layout: &TierLayout, devices: impl Iterator<Item = &'a Device>) -> Result<bool> {
    let mut kinds = BTreeSet::new();
    for device in devices {
        let kind = rustix::fs::statfs(&device.path).map_err(|e| device.failed("statfs", e.into()))?.f_type;
        if kind == HUGETLBFS {
            let what = "hugetlbfs has no files that are read and written by offset: use tmpfs, with huge=within_size";
            return Err(bad(format!("tier {}: {}: {what}", layout.name, device.path.display())));
        }
        kinds.insert(matches!(kind, TMPFS | RAMFS));
    }
    match kinds.len() {
        0 | 1 => Ok(kinds.contains(&true)),
        _ => Err(bad(format!("tier {}: memory and disks in one tier: make two tiers of it", layout.name))),
    }
}

#[cfg(test)]
mod tests;
