//! Why a member did not give what was wanted of it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A reason to go on without a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum PassOver {
    /// It did not answer, or did not go on, within the bound of time.
    Slow,
    /// It refused the connection, or broke it.
    Gone,
    /// It was not asked: it failed a short while ago.
    Suspected,
    /// It gives to as many as it may.
    Busy,
    /// It knows the file with another version.
    RefusedVersion,
    /// It does not have the bytes, and was not asked to fetch them.
    NotResident,
    /// It has no room to fetch the bytes.
    NoRoom,
    /// To fetch, it would have to ask a node that waits for it.
    Loop,
    /// It was asked to fetch, and does not see itself as an owner: the two nodes see different members.
    NotOwner,
    /// The file may not be on that node, or not be given to this one.
    Confined,
    /// What came had another length or checksum than it said.
    Damaged,
}

impl PassOver {
    pub const ALL: [Self; 11] = [
        Self::Slow,
        Self::Gone,
        Self::Suspected,
        Self::Busy,
        Self::RefusedVersion,
        Self::NotResident,
        Self::NoRoom,
        Self::Loop,
        Self::NotOwner,
        Self::Confined,
        Self::Damaged,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Slow => "slow",
            Self::Gone => "gone",
            Self::Suspected => "suspected",
            Self::Busy => "busy",
            Self::RefusedVersion => "refused-version",
            Self::NotResident => "not-resident",
            Self::NoRoom => "no-room",
            Self::Loop => "loop",
            Self::NotOwner => "not-owner",
            Self::Confined => "confined",
            Self::Damaged => "damaged",
        }
    }
}

impl fmt::Display for PassOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// How often members were passed over, by reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PassOvers([u64; PassOver::ALL.len()]);

impl PassOvers {
    pub fn count(&mut self, why: PassOver) {
        self.0[why as usize] += 1;
    }

    pub fn of(&self, why: PassOver) -> u64 {
        self.0[why as usize]
    }

    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    pub fn add(&mut self, other: &Self) {
        for (sum, count) in self.0.iter_mut().zip(other.0) {
            *sum += count;
        }
    }

    /// Returns the reasons that occurred.
    pub fn iter(&self) -> impl Iterator<Item = (PassOver, u64)> + '_ {
        PassOver::ALL.into_iter().map(|why| (why, self.of(why))).filter(|(_, count)| *count > 0)
    }
}
