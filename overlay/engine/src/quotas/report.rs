//! Counts for quotas what the catalog has, and shows it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;

use forebay_api::quotas::{QuotaKind, QuotaNumber, QuotaReport, QuotaUse, QuotaVerb};
use forebay_backends::{ErrorKind, Result};
use forebay_catalog::Intent;
use forebay_policy::QuotaSubject;
use forebay_system::clock::unix_now;
use forebay_system::identity;

use super::{FileOwner, Limit, QuotaAmount, QuotaResource, Quotas, SpaceHolder};
use crate::{Inner, Ino, Overlay, blocking};

/// How often it is looked before a difference is one.
const CHECKS: u32 = 4;
/// The most differences that a check lists.
const DIFFERENCES_MAX: usize = 100;

/// Pause between two looks whether everything is counted.
const COUNTED_PAUSE: Duration = Duration::from_millis(20);

/// The leases of a file that hold: their owners and bytes.
pub(super) type HoldingLeases = Vec<(String, u64)>;

impl Overlay {
    /// Returns what users and groups hold, and what they may.
    ///
    /// # Errors
    /// Those of the catalog.
    pub async fn quotas(&self, verb: QuotaVerb) -> Result<QuotaReport> {
        let inner = self.inner.clone();
        while !inner.quotas.is_complete() {
            tokio::time::sleep(COUNTED_PAUSE).await;
        }
        blocking(move || {
            let mut differences = Vec::new();
            for attempt in 0..CHECKS {
                if verb == QuotaVerb::Show || (attempt > 0 && differences.is_empty()) {
                    break;
                }
                // A change that is just being made may show for a moment.
                std::thread::sleep(COUNTED_PAUSE * attempt);
                differences = inner.check_quotas()?;
            }
            let staged = inner.staged_bytes()?;
            Ok(QuotaReport { quotas: inner.quotas.uses(&staged), differences })
        })
        .await
    }
}

impl Inner {
    /// Counts what there is, beside other work. Writes of those who have a limit wait meanwhile.
    pub(crate) fn begin_counting_quotas(self: &Arc<Self>, generation: u64) {
        let inner = self.clone();
        tokio::task::spawn_blocking(move || {
            inner.charge_all_scratch();
            match inner.changed_inodes() {
                Ok(inos) => inos.into_iter().take_while(|_| !inner.stop.is_cancelled()).for_each(|ino| {
                    // Such a file is charged when it is changed the next time.
                    if let Err(error) = inner.count_for_quotas(ino) {
                        tracing::error!(%error, %ino, "a file is not counted for quotas");
                    }
                }),
                Err(error) => tracing::error!(%error, "what users hold cannot be counted: quotas are not exact"),
            }
            // A count that was cut short must not end the grace of a soft limit.
            if !inner.stop.is_cancelled() {
                inner.quotas.complete(generation);
            }
        });
    }

    fn count_for_quotas(&self, ino: Ino) -> Result<()> {
        let node = match self.node(ino) {
            // Deleted since.
            Err(e) if e.is(ErrorKind::Stale) => return Ok(()),
            node => node?,
        };
        {
            let mut state = node.state.lock();
            let content = state.record.file.content().filter(|_| state.record.file.is_dirty());
            // A program may have written past the last daemon, after its last count.
            if let Some(Ok(meta)) = content.map(|id| self.store.stat(id))
                && !state.is_deleted()
            {
                self.count(&mut state, meta.blocks() * 512)?;
                self.save_count(ino, &mut state)?;
            }
            self.charge(ino, &mut state);
        }
        drop(node);
        self.table.drop_idle(ino);
        Ok(())
    }

    /// Returns the inodes whose content or attributes are not in the pool yet.
    fn changed_inodes(&self) -> Result<Vec<Ino>> {
        let mut inos = Vec::new();
        self.catalog.intents(|intent, _| {
            inos.extend(if let Intent::Inode(ino) = intent { Some(ino) } else { None });
            Ok(true)
        })?;
        Ok(inos)
    }

    /// Compares what is charged with the files, one by one. Returns the differences.
    fn check_quotas(&self) -> Result<Vec<String>> {
        if !self.quotas.count() {
            return Ok(Vec::new());
        }
        let mut differences = Vec::new();
        let inos: BTreeSet<Ino> = self.changed_inodes()?.into_iter().chain(self.quotas.charged_files()).collect();
        for ino in inos {
            let holder = SpaceHolder::File(ino);
            let (charged, dirty) = match self.node(ino) {
                Err(e) if e.is(ErrorKind::Stale) => (self.quotas.charged(&holder), None),
                node => {
                    let node = node?;
                    let mut state = node.state.lock();
                    let is_dirty = state.record.file.is_dirty() && !state.is_deleted();
                    let owner = FileOwner::of(&state.record);
                    let dirty = is_dirty.then(|| (owner, self.counted_bytes(&mut state)));
                    (self.quotas.charged(&holder), dirty)
                }
            };
            if charged != dirty {
                let shown = |charge: Option<(FileOwner, u64)>| match charge {
                    Some((owner, bytes)) => format!("{bytes} bytes of user {} and group {}", owner.uid, owner.gid),
                    None => "nothing".into(),
                };
                differences.push(format!(
                    "{}: {} is counted, {} is there",
                    self.display(ino),
                    shown(charged),
                    shown(dirty)
                ));
            }
            self.table.drop_idle(ino);
            if differences.len() >= DIFFERENCES_MAX {
                break;
            }
        }
        differences.extend(self.wrong_scratch());
        differences.extend(self.quotas.wrong_sums());
        Ok(differences)
    }

    /// Returns the leased bytes of each user.
    fn staged_bytes(&self) -> Result<BTreeMap<u32, u64>> {
        let (mut staged, mut users) = (BTreeMap::new(), BTreeMap::new());
        for (_, leases) in self.leases_that_hold()? {
            for (uid, bytes) in self.users_of(&leases, &mut users) {
                let of_user: &mut u64 = staged.entry(uid).or_default();
                *of_user = of_user.saturating_add(bytes);
            }
        }
        Ok(staged)
    }

    pub(super) fn leases_that_hold(&self) -> Result<Vec<(Ino, HoldingLeases)>> {
        let (mut all, now) = (Vec::new(), unix_now());
        self.catalog.leases(|ino, leases| {
            let holding: HoldingLeases = leases.holding(now).map(|lease| (lease.owner.clone(), lease.bytes)).collect();
            if !holding.is_empty() {
                all.push((ino, holding));
            }
            Ok(true)
        })?;
        Ok(all)
    }

    /// Returns the bytes of one file that each user has leased. `known`: users of owners that were looked up before.
    pub(super) fn users_of(
        &self,
        leases: &HoldingLeases,
        known: &mut BTreeMap<String, Option<u32>>,
    ) -> BTreeMap<u32, u64> {
        let mut users = BTreeMap::new();
        for (owner, bytes) in leases {
            let uid = *known.entry(owner.clone()).or_insert_with(|| self.user_of_owner(owner));
            if let Some(uid) = uid {
                // Each lease protects a prefix of the file.
                let most: &mut u64 = users.entry(uid).or_default();
                *most = (*most).max(*bytes);
            }
        }
        users
    }

    /// Returns the user of an owner of leases: of a job, or the one that has this name or number.
    pub(super) fn user_of_owner(&self, owner: &str) -> Option<u32> {
        let numbered = || owner.strip_prefix("user:")?.parse().ok();
        self.advisor().user_of(owner).or_else(numbered).or_else(|| identity::user_named(owner))
    }

    /// Returns in words which scratch directories are charged otherwise than they should be.
    fn wrong_scratch(&self) -> Vec<String> {
        let all = self.scratch_charges();
        let wrong = all.into_iter().filter_map(|(id, owner, bytes)| {
            let charged = self.quotas.charged(&SpaceHolder::Scratch(id.clone()));
            (charged != Some((owner, bytes))).then(|| format!("scratch directory {id}: {bytes} bytes are not counted"))
        });
        wrong.collect()
    }
}

impl Quotas {
    fn charged_files(&self) -> Vec<Ino> {
        let ledger = self.ledger.lock();
        let inos = ledger.charges.keys().filter_map(|holder| match holder {
            SpaceHolder::File(ino) => Some(*ino),
            SpaceHolder::Scratch(_) => None,
        });
        inos.collect()
    }

    fn charged(&self, holder: &SpaceHolder) -> Option<(FileOwner, u64)> {
        self.ledger.lock().charges.get(holder).map(|charge| (charge.owner, charge.bytes))
    }

    /// Adds up all charges, and returns in words which users and groups have another sum.
    pub(super) fn wrong_sums(&self) -> Vec<String> {
        let ledger = self.ledger.lock();
        let mut sums: BTreeMap<QuotaSubject, (u64, u64)> = BTreeMap::new();
        for charge in ledger.charges.values() {
            for subject in charge.owner.subjects() {
                let (bytes, files) = sums.entry(subject).or_default();
                (*bytes, *files) = (*bytes + charge.bytes, *files + charge.files);
            }
        }
        let known: BTreeSet<QuotaSubject> = sums.keys().chain(ledger.accounts.keys()).copied().collect();
        let wrong = known.into_iter().filter_map(|subject| {
            let is = ledger.accounts.get(&subject).map_or((0, 0), |has| (has.bytes.used, has.files.used));
            let sum = sums.get(&subject).copied().unwrap_or_default();
            let told =
                || format!("{subject}: {} bytes in {} files are counted, {} in {} are there", is.0, is.1, sum.0, sum.1);
            (is != sum).then(told)
        });
        wrong.collect()
    }

    /// Returns what all hold that hold something or that a quota names.
    fn uses(&self, staged: &BTreeMap<u32, u64>) -> Vec<QuotaUse> {
        let (ledger, now) = (self.ledger.lock(), unix_now());
        if ledger.policy.is_empty() {
            return Vec::new();
        }
        let mut subjects = ledger.policy.named();
        subjects.extend(ledger.accounts.keys());
        subjects.extend(staged.keys().map(|uid| QuotaSubject::User(*uid)));
        let uses = subjects.into_iter().map(|subject| {
            let limits = ledger.policy.limits_of(subject);
            let number = |resource| {
                let amount =
                    ledger.accounts.get(&subject).map_or_else(QuotaAmount::default, |has| has.amount(resource));
                let limit = Limit::of(&limits, resource);
                let grace_left_secs = limit.grace_left_secs(amount.exceeded_unix, now);
                QuotaNumber { used: amount.used, soft: limit.soft, hard: limit.hard, grace_left_secs }
            };
            let (kind, id, staged) = match subject {
                QuotaSubject::User(uid) => (QuotaKind::User, uid, staged.get(&uid).copied().unwrap_or(0)),
                QuotaSubject::Group(gid) => (QuotaKind::Group, gid, 0),
            };
            let staged_bytes = QuotaNumber { used: staged, hard: limits.staged_bytes, ..QuotaNumber::default() };
            QuotaUse {
                kind,
                id,
                bytes: number(QuotaResource::Bytes),
                files: number(QuotaResource::Files),
                staged_bytes,
            }
        });
        uses.collect()
    }
}
