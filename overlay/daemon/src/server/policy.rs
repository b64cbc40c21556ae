//! Requests about the policy of a mount.

use forebay_api::policy::PolicyVerb;
use forebay_engine::Overlay;

use super::super::policy_files::{AppliedPolicy, NamedAccounts};
use super::super::protocol::Reply;
use super::super::registry::Runtime;
use super::super::{Failure, policy_files};
use super::parse;

/// The file in a runtime directory that holds a policy that was put into force after the mount.
pub const APPLIED: &str = "policy.json";

pub async fn carry_out(overlay: &Overlay, verb: PolicyVerb, pool: &str, runtime: &Runtime) -> Result<Reply, Failure> {
    match verb {
        PolicyVerb::Explain { path } => Ok(Reply::PolicyExplanation(overlay.explain_policy(&parse(&path)?).await?)),
        PolicyVerb::Apply { files, dry_run } => {
            let files = policy_files::from_wire(files);
            let (policy, accounts) = policy_files::compile_with(&files, pool, &NamedAccounts::default())?;
            // From the effect on, so that it is that of this policy on the one that it replaces.
            let change = if dry_run { None } else { Some(overlay.begin_policy_change().await) };
            let effect = overlay.policy_effect(policy).await?;
            if let Some(change) = change {
                let applied = AppliedPolicy { files, accounts };
                let text = serde_json::to_vec(&applied).map_err(|e| Failure::usage(e.to_string()))?;
                let (policy, _) = policy_files::compile_with(&applied.files, pool, &applied.accounts)?;
                // Kept first: a worker that starts again must have the policy that this answer reports.
                runtime
                    .replace(&runtime.dir().join(APPLIED), &text)
                    .map_err(|e| Failure::io("the policy cannot be kept for a restart of the daemon", &e))?;
                change.put_into_force(policy);
                tracing::info!("another policy is in force: {} differences", effect.differences.len());
            }
            Ok(Reply::PolicyEffect(Box::new(effect)))
        }
    }
}
