//! What is staged for a user: the leased bytes, and those of stages that are under way.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_policy::QuotaSubject;
use parking_lot::Mutex;

use crate::{Inner, Ino};

/// The bytes that stages are about to lease, of users with a limit.
#[derive(Debug, Default)]
pub(crate) struct StagesUnderWay {
    /// Held during a check, so that stages that begin at the same time are checked one by one. A check reads the
    /// catalog, and may ask who a user is.
    turn: Mutex<()>,
    stages: Mutex<Stages>,
}

#[derive(Debug, Default)]
struct Stages {
    next: u64,
    under_way: BTreeMap<u64, AllowedStage>,
}

#[derive(Debug)]
struct AllowedStage {
    uid: u32,
    files: Vec<(Ino, u64)>,
}

/// A stage that a quota allowed. Its bytes count for the user until it is dropped: by then the files are leased.
pub(crate) struct StageUnderWay {
    inner: Arc<Inner>,
    number: u64,
}

impl Drop for StageUnderWay {
    fn drop(&mut self) {
        self.inner.stages.stages.lock().under_way.remove(&self.number);
    }
}

/// What the quota of a user allows of a stage.
pub(crate) struct AllowedFiles {
    /// So many of its files.
    pub files: usize,
    /// Counts them; `None`: nothing is limited, or it is a rehearsal.
    pub under_way: Option<StageUnderWay>,
}

impl Inner {
    /// Checks what a stage would lease: of each file, the bytes. The first `declared` files were requested; the others
    /// are only expected to be read. `rehearses`: nothing will be leased. Blocks.
    ///
    /// # Errors
    /// `Quota` with the numbers, if the quota of the owner's user does not allow the requested files.
    pub(crate) fn allow_stage(
        self: &Arc<Self>,
        owner: &str,
        mut files: Vec<(Ino, u64)>,
        declared: usize,
        rehearses: bool,
    ) -> Result<AllowedFiles> {
        let policy = self.policy();
        let user = if policy.quotas.is_empty() { None } else { self.user_of_owner(owner) };
        let limit = user.and_then(|uid| Some((uid, policy.quotas.limits_of(QuotaSubject::User(uid)).staged_bytes?)));
        let Some((uid, limit)) = limit else { return Ok(AllowedFiles { files: files.len(), under_way: None }) };
        let _turn = self.stages.turn.lock();
        let mut staged = self.staged_for(uid)?;
        for (ino, _) in &files[..declared] {
            staged.remove(ino);
        }
        let has = staged.values().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
        let requested = files[..declared].iter().fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes));
        let Some(mut left) = limit.saturating_sub(has).checked_sub(requested) else {
            let what = format!(
                "{requested} bytes are to be staged for user {uid}, for whom {has} other bytes are staged: the quota \
                 allows {limit} (`forebay quota show`)"
            );
            tracing::warn!("{what}");
            return Err(Error::new(ErrorKind::Quota, Side::Cache, what));
        };
        let fits = |(ino, bytes): &&(Ino, u64)| {
            let counted = staged.get(ino).copied().unwrap_or(0);
            let less = left.checked_sub(bytes.saturating_sub(counted));
            left = less.unwrap_or(left);
            less.is_some()
        };
        let allowed = declared + files[declared..].iter().take_while(fits).count();
        files.truncate(allowed);
        let under_way = (!rehearses).then(|| {
            let mut stages = self.stages.stages.lock();
            let number = stages.next;
            stages.next += 1;
            stages.under_way.insert(number, AllowedStage { uid, files });
            StageUnderWay { inner: self.clone(), number }
        });
        Ok(AllowedFiles { files: allowed, under_way })
    }

    /// Returns the files that are staged for a user, or are about to be, with their bytes.
    fn staged_for(&self, uid: u32) -> Result<HashMap<Ino, u64>> {
        let mut staged: HashMap<Ino, u64> = HashMap::new();
        let mut add = |ino, bytes: u64| {
            let most = staged.entry(ino).or_default();
            *most = bytes.max(*most);
        };
        // The stages first: one that ends meanwhile has leased its files.
        for stage in self.stages.stages.lock().under_way.values().filter(|stage| stage.uid == uid) {
            stage.files.iter().for_each(|(ino, bytes)| add(*ino, *bytes));
        }
        let mut users = BTreeMap::new();
        for (ino, leases) in self.leases_that_hold()? {
            self.users_of(&leases, &mut users).get(&uid).into_iter().for_each(|bytes| add(ino, *bytes));
        }
        Ok(staged)
    }
}
