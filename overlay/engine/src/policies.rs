//! The policy in force.

use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use forebay_policy::Policy;

use super::{Inner, Overlay};

#[derive(Debug)]
pub(crate) struct Policies(ArcSwap<Policy>);

impl Policies {
    pub fn new(policy: Policy) -> Self {
        Self(ArcSwap::from_pointee(policy))
    }

    /// Puts a policy into force.
    pub fn set(&self, policy: Policy) {
        self.0.store(Arc::new(policy));
    }
}

impl Inner {
    pub fn policy(&self) -> Guard<Arc<Policy>> {
        self.policies.0.load()
    }
}

impl Overlay {
    /// Returns the policy in force.
    pub fn policy(&self) -> Arc<Policy> {
        self.inner.policies.0.load_full()
    }
}
