//! Whether a device of the fast pool works.
//!
//! ```text
//!              error                errors within WINDOW             probe works        probe works again
//!   Healthy ─────────▶ Suspect ────────────────────────▶ Bypassed ───────────────▶ Probed ─────────────────▶ Healthy
//!      ▲                  │                                 ▲                          │
//!      └── WINDOW passes ─┘                                 └───────── probe fails ────┘
//! ```
//!
//! A suspect device is probed, too: an error of a probe counts like any other.
//!
//! Nothing new is placed on a device that is suspect, bypassed or probed, and clean content on a bypassed one is not
//! used. The device of the catalog is never bypassed: it stays suspect, because nothing works without it.

use std::time::{Duration, Instant};

/// Errors within [`WINDOW`] after which a device is bypassed.
const ERRORS_MAX: u32 = 3;
/// How long an error counts.
const WINDOW: Duration = Duration::from_secs(60);
/// Pauses between probes: the first, and the longest.
const PROBE_FIRST: Duration = Duration::from_secs(1);
const PROBE_LONGEST: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HealthState {
    Healthy,
    Suspect { errors: u32, last: Instant, probed: Instant },
    Bypassed { since: Instant, pause: Duration },
    Probed { since: Instant, pause: Duration },
}

/// The state of one device, and how often it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceHealth {
    state: HealthState,
    holds_catalog: bool,
    /// Errors since the start.
    errors: u64,
}

impl DeviceHealth {
    pub(crate) fn new(holds_catalog: bool) -> Self {
        Self { state: HealthState::Healthy, holds_catalog, errors: 0 }
    }

    /// An operation on the device failed. Returns whether the device is bypassed from now on, and was not before.
    pub(crate) fn failed(&mut self, now: Instant) -> bool {
        self.errors += 1;
        let errors = match self.state {
            HealthState::Healthy => 1,
            HealthState::Suspect { errors, last, .. } if now - last < WINDOW => errors.saturating_add(1),
            HealthState::Suspect { .. } => 1,
            HealthState::Bypassed { .. } => return false,
            HealthState::Probed { pause, .. } => {
                self.state = HealthState::Bypassed { since: now, pause };
                return true;
            }
        };
        let bypass = errors >= ERRORS_MAX && !self.holds_catalog;
        self.state = match bypass {
            true => HealthState::Bypassed { since: now, pause: PROBE_FIRST },
            false => HealthState::Suspect { errors, last: now, probed: now },
        };
        bypass
    }

    /// Returns how long it takes until the device is to be probed; `None`: it need not be.
    pub(crate) fn probe_in(&self, now: Instant) -> Option<Duration> {
        match self.state {
            HealthState::Healthy => None,
            HealthState::Suspect { probed, .. } => Some((probed + PROBE_FIRST).saturating_duration_since(now)),
            HealthState::Bypassed { since, pause } | HealthState::Probed { since, pause } => {
                Some((since + pause).saturating_duration_since(now))
            }
        }
    }

    /// A small file was written, synced and read, or that failed. Returns whether the device is used again from now on.
    pub(crate) fn probed(&mut self, works: bool, now: Instant) -> bool {
        let longer = |pause: Duration| (pause * 2).min(PROBE_LONGEST);
        self.state = match (self.state, works) {
            (HealthState::Suspect { last, .. }, true) if now - last >= WINDOW => HealthState::Healthy,
            (HealthState::Suspect { errors, last, .. }, true) => HealthState::Suspect { errors, last, probed: now },
            (HealthState::Bypassed { pause, .. }, true) => HealthState::Probed { since: now, pause },
            (HealthState::Probed { since, pause }, true) if now - since >= pause => HealthState::Healthy,
            (HealthState::Bypassed { pause, .. } | HealthState::Probed { pause, .. }, false) => {
                self.errors += 1;
                HealthState::Bypassed { since: now, pause: longer(pause) }
            }
            (HealthState::Healthy | HealthState::Suspect { .. }, false) => {
                self.failed(now);
                return false;
            }
            (other, true) => other,
        };
        self.state == HealthState::Healthy
    }

    /// Returns whether new content may be placed on the device.
    pub fn takes_content(&self) -> bool {
        self.state == HealthState::Healthy || self.holds_catalog
    }

    /// Returns whether clean content on the device is to be used.
    pub fn is_used(&self) -> bool {
        matches!(self.state, HealthState::Healthy | HealthState::Suspect { .. })
    }

    pub fn is_healthy(&self) -> bool {
        self.state == HealthState::Healthy
    }

    /// Returns whether the device holds the catalog, so that it is never bypassed.
    pub fn holds_catalog(&self) -> bool {
        self.holds_catalog
    }

    /// Returns whether the device is bypassed, and the last probe of it worked.
    pub fn probe_worked(&self) -> bool {
        matches!(self.state, HealthState::Probed { .. })
    }

    /// The errors since the start.
    pub fn errors(&self) -> u64 {
        self.errors
    }

    /// Returns the state in words.
    pub fn name(&self) -> &'static str {
        match self.state {
            HealthState::Healthy => "healthy",
            HealthState::Suspect { .. } if self.holds_catalog => {
                "suspect: it holds the catalog, so it cannot be bypassed"
            }
            HealthState::Suspect { .. } => "suspect",
            HealthState::Bypassed { .. } => "bypassed",
            HealthState::Probed { .. } => "bypassed: a probe worked",
        }
    }
}

/// Returns whether an error says that the device fails. A full device does not fail, and neither does a missing file.
pub fn is_device_error(errno: i32) -> bool {
    matches!(
        errno,
        libc::EIO
            | libc::EROFS
            | libc::ENODEV
            | libc::ENXIO
            | libc::ESTALE
            | libc::EUCLEAN
            | libc::EBADMSG
            | libc::EREMOTEIO
            | libc::ESHUTDOWN
            | libc::ENOTCONN
            | libc::ENOMEDIUM
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_bypassed_after_some_errors_and_used_again_after_two_probes() {
        let (mut device, begun) = (DeviceHealth::new(false), Instant::now());
        let at = |secs: u64| begun + Duration::from_secs(secs);
        assert!(!device.failed(at(0)) && device.is_used() && !device.takes_content());
        assert_eq!((device.probe_in(at(0)), device.probe_in(at(1))), (Some(PROBE_FIRST), Some(Duration::ZERO)));
        assert!(!device.probed(true, at(1)), "one that works does not make the error undone");
        // The first error does not count any more.
        assert!(device.probed(true, at(61)) && device.is_healthy());
        assert_eq!([70, 71, 72].map(|secs| device.failed(at(secs))), [false, false, true]);
        assert!(!device.is_used() && !device.failed(at(72)));
        assert_eq!(device.probe_in(at(72)), Some(PROBE_FIRST));
        // Each probe that fails doubles the pause.
        for (secs, pause) in [(73, 2), (75, 4), (79, 8)] {
            assert!(!device.probed(false, at(secs)));
            assert_eq!(device.probe_in(at(secs)), Some(Duration::from_secs(pause)));
        }
        assert!(!device.probed(true, at(87)) && !device.is_used(), "one probe is not enough");
        assert!(!device.probed(true, at(88)), "too early");
        assert!(device.probed(true, at(95)) && device.takes_content());
        assert_eq!(device.errors(), 8);
    }

    #[test]
    fn a_probed_device_that_fails_is_bypassed_at_once() {
        let (mut device, now) = (DeviceHealth::new(false), Instant::now());
        (0..ERRORS_MAX).for_each(|_| _ = device.failed(now));
        device.probed(true, now + PROBE_FIRST);
        assert_eq!(device.name(), "bypassed: a probe worked");
        assert!(device.failed(now + PROBE_FIRST));
        assert_eq!(device.name(), "bypassed");
    }

    #[test]
    fn the_device_of_the_catalog_is_never_bypassed() {
        let (mut device, now) = (DeviceHealth::new(true), Instant::now());
        assert!((0..100).all(|_| !device.failed(now)));
        assert!(device.is_used() && device.takes_content() && device.name().contains("catalog"));
        let later = now + WINDOW;
        assert!(device.probed(true, later) && device.name() == "healthy");
    }

    #[test]
    fn errors_that_are_far_apart_do_not_add_up() {
        let (mut device, begun) = (DeviceHealth::new(false), Instant::now());
        assert!((0..10).all(|n| !device.failed(begun + n * WINDOW)));
    }

    #[test]
    fn a_full_device_does_not_fail() {
        let no = [libc::ENOSPC, libc::EDQUOT, libc::ENOENT, libc::EPERM, libc::EINTR, libc::EINVAL];
        assert!(no.into_iter().all(|errno| !is_device_error(errno)) && is_device_error(libc::EIO));
    }
}
