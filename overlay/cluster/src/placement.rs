//! Which members may own and hold a file.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::identity::{Member, NodeId, Role};
use crate::members::{Roster, Seat};

/// Where the cluster keeps content of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// Each node reads the pool; a node that asks for what is resident gets it.
    Pool,
    /// All members own: their fast pools are one.
    #[default]
    All,
    /// The members with the role cache own.
    Dedicated,
    /// Each node reads the pool for itself, and gives nothing away.
    Own,
}

impl Placement {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pool => "pool",
            Self::All => "all",
            Self::Dedicated => "dedicated",
            Self::Own => "own",
        }
    }
}

/// The members to which content is confined.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Confinement(Option<BTreeSet<NodeId>>);

impl Confinement {
    /// Content may be on these members only. An empty set allows none.
    pub fn to(members: BTreeSet<NodeId>) -> Self {
        Self(Some(members))
    }

    pub fn allows(&self, id: &NodeId) -> bool {
        self.0.as_ref().is_none_or(|members| members.contains(id))
    }
}

/// Placement and confinement of a file.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct Placing {
    pub placement: Placement,
    pub confine_to: Confinement,
}

impl Placing {
    /// Returns the members that may own the file.
    pub fn eligible(&self, roster: &Roster) -> Vec<Seat> {
        let has_role = |role: Role| match self.placement {
            Placement::All => true,
            Placement::Dedicated => role == Role::Cache,
            Placement::Pool | Placement::Own => false,
        };
        let may = |seat: &Seat| {
            let member = roster.member(*seat);
            has_role(member.role) && self.confine_to.allows(&member.id)
        };
        (0..roster.len() as Seat).filter(may).collect()
    }

    /// Returns whether this node asks other members.
    pub fn asks(&self, this: &NodeId) -> bool {
        matches!(self.placement, Placement::All | Placement::Dedicated) && self.confine_to.allows(this)
    }

    /// Returns whether a member gives content to another one.
    pub fn gives_to(&self, giver: &Member, other: &NodeId) -> bool {
        let gives = match self.placement {
            Placement::Pool | Placement::All => true,
            Placement::Dedicated => giver.role == Role::Cache,
            Placement::Own => false,
        };
        gives && self.confine_to.allows(&giver.id) && self.confine_to.allows(other)
    }

    /// Returns whether nodes that read the file give it to others, too.
    pub fn readers_give(&self) -> bool {
        matches!(self.placement, Placement::Pool | Placement::All)
    }
}
