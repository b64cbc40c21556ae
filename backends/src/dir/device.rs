//! The number of the root's device in versions.

use crate::{Expected, Stat, Version};

use super::{ROOT_DEVICE, Shared};

impl Shared {
    /// Replaces the root's own device number by [`ROOT_DEVICE`]. The kernel gives network file systems and some other
    /// file systems a new number at each mount, and versions are kept for longer than a mount lasts.
    pub(super) fn outward(&self, mut stat: Stat) -> Stat {
        stat.version = self.outward_version(&stat.version);
        stat
    }

    pub(super) fn outward_version(&self, version: &Version) -> Version {
        let mut version = version.clone();
        if let Version::Inode { dev, .. } = &mut version
            && *dev == self.root.device()
        {
            *dev = ROOT_DEVICE;
        }
        version
    }

    /// The version with the kernel's device number.
    pub(super) fn inward(&self, version: &Version) -> Version {
        let mut version = version.clone();
        if let Version::Inode { dev, .. } = &mut version
            && *dev == ROOT_DEVICE
        {
            *dev = self.root.device();
        }
        version
    }

    pub(super) fn inward_expected(&self, expected: &Expected) -> Expected {
        match expected {
            Expected::Version(version) => Expected::Version(self.inward(version)),
            Expected::Name(version) => Expected::Name(self.inward(version)),
            other => other.clone(),
        }
    }
}
