//! Members that failed are not asked for a while.

use std::collections::HashMap;
use std::time::Duration;

use crate::Moment;
use crate::identity::NodeId;
use crate::pass_over::PassOver;

/// How long a member is not asked after it failed. Each failed attempt afterwards doubles the time.
pub const SUSPECTED_SHORTEST: Duration = Duration::from_secs(1);
pub const SUSPECTED_LONGEST: Duration = Duration::from_secs(60);

/// Slow answers without one good answer among them that make a member suspected. A single one may be bad luck.
const SLOW_IN_A_ROW: u32 = 3;

/// What this node thinks of the members that failed it. A member that is not in here is trusted.
#[derive(Debug, Clone, Default)]
pub struct Suspicions {
    failing: HashMap<NodeId, Distrust>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Distrust {
    /// It was slow this often in a row, and is still asked.
    Slow { times: u32 },
    /// It is not asked before `until`, which is `length` after the failure.
    Suspected { until: Moment, length: Duration },
    /// One request is under way that decides. If no answer comes to it by `until`, another one may be sent.
    Probed { until: Moment, length: Duration },
}

impl Suspicions {
    /// Returns whether a member may be asked now. If it was suspected and its time is up, this is leave for one request.
    pub fn admits(&mut self, now: Moment, id: &NodeId) -> bool {
        if self.failing.is_empty() {
            return true;
        }
        match self.failing.get_mut(id) {
            None | Some(Distrust::Slow { .. }) => true,
            Some(Distrust::Suspected { until, .. } | Distrust::Probed { until, .. }) if now < *until => false,
            Some(distrust) => {
                let (Distrust::Suspected { length, .. } | Distrust::Probed { length, .. }) = *distrust else {
                    return true;
                };
                *distrust = Distrust::Probed { until: now + length, length };
                true
            }
        }
    }

    /// Returns whether no member failed that has not answered since.
    pub fn trusts_all(&self) -> bool {
        self.failing.is_empty()
    }

    /// Returns whether a member is suspected, or being tried again. Changes nothing.
    pub fn is_suspected(&self, id: &NodeId) -> bool {
        matches!(self.failing.get(id), Some(Distrust::Suspected { .. } | Distrust::Probed { .. }))
    }

    /// A member answered, with content or with a refusal.
    pub fn answered(&mut self, id: &NodeId) {
        if !self.failing.is_empty() {
            self.failing.remove(id);
        }
    }

    /// A member was passed over. Reasons that a healthy member has, too, count as an answer.
    pub fn passed_over(&mut self, now: Moment, id: &NodeId, why: PassOver) {
        let before = self.failing.get(id).copied();
        let doubled = match before {
            Some(Distrust::Suspected { length, .. } | Distrust::Probed { length, .. }) => {
                (length * 2).min(SUSPECTED_LONGEST)
            }
            _ => SUSPECTED_SHORTEST,
        };
        let suspect = match (why, before) {
            (PassOver::Suspected, _) => return,
            // Requests that were under way together fail together: that is one failure.
            (PassOver::Gone | PassOver::Slow | PassOver::Damaged, Some(Distrust::Suspected { until, .. }))
                if now < until =>
            {
                return;
            }
            (PassOver::Gone | PassOver::Damaged, _) => true,
            (PassOver::Slow, None) => {
                self.failing.insert(id.clone(), Distrust::Slow { times: 1 });
                return;
            }
            (PassOver::Slow, Some(Distrust::Slow { times })) if times + 1 < SLOW_IN_A_ROW => {
                self.failing.insert(id.clone(), Distrust::Slow { times: times + 1 });
                return;
            }
            (PassOver::Slow, _) => true,
            _ => false,
        };
        if suspect {
            let distrust = Distrust::Suspected { until: now + doubled, length: doubled };
            self.failing.insert(id.clone(), distrust);
        } else {
            self.answered(id);
        }
    }

    /// Forgets members that left.
    pub fn retain(&mut self, is_member: impl Fn(&NodeId) -> bool) {
        self.failing.retain(|id, _| is_member(id));
    }
}
