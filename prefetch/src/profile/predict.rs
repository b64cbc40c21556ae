//! From what runs read to what the next one will.

use super::{Expected, Profile, Reason, all, weight};
use crate::signature::Invocation;

pub(super) fn predict(profile: &Profile, _invocation: &Invocation) -> Vec<Expected> {
    let seen = profile.runs.len();
    let mut out: Vec<Expected> = profile
        .files
        .iter()
        .map(|file| Expected {
            path: file.path.to_string(),
            bytes: file.size_bytes,
            rank: file.rank,
            probability: weight(file.used) / weight(all(seen)),
            parts: file.parts.as_deref().copied(),
            why: Reason::Replayed { used: file.used.count_ones(), seen: seen as u32 },
        })
        .collect();
    out.sort_by(|a, b| a.rank.cmp(&b.rank).then_with(|| a.path.cmp(&b.path)));
    out
}
