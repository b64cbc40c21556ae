//! What a worker may do: as much as it needs, and where there is an observer, no more than that once it is loaded.
//!
//! Capabilities belong to threads, and a new thread has those of the thread that starts it. So the first thread gives up
//! before it starts any others; one alone is started earlier, loads the observer, and gives up after that. The threads of
//! the allocator are started after that, by whoever calls the worker's `run`.
//!
//! So a daemon that observes by the capabilities of its file holds neither CAP_BPF nor CAP_PERFMON afterwards. Kernels
//! before 5.19 require CAP_BPF to read a map: there the worker keeps it.

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// What serving a mount takes: files, modes, owners, attributes and special files of anybody; passthrough and unmounting;
/// leases and flags of content files; blocks that are reserved and limits; memory for rings; processes under `hidepid`; an
/// NFS server that wants a privileged port.
pub const NEEDED: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::LEASE)
    .union(CapabilitySet::LINUX_IMMUTABLE)
    .union(CapabilitySet::SYS_ADMIN)
    .union(CapabilitySet::SYS_RESOURCE)
    .union(CapabilitySet::SYS_PTRACE)
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::NET_BIND_SERVICE);

/// Gives up, for this thread, what serving a mount does not need. An observer cannot be loaded after that by who may do
/// so by `CAP_BPF` and `CAP_PERFMON`; `CAP_SYS_ADMIN` stands for both.
pub fn give_up() {
    let kept = if reads_maps_without() { NEEDED } else { NEEDED | CapabilitySet::BPF };
    let given_up = capabilities(None).and_then(|held| {
        let sets = CapabilitySets {
            effective: held.effective & kept,
            permitted: held.permitted & kept,
            inheritable: held.inheritable & kept,
        };
        set_capabilities(None, sets)
    });
    if let Err(error) = given_up {
        tracing::warn!("capabilities that are not needed are kept: {error}");
    }
}

/// Since Linux 5.19 whoever holds a map's descriptor may read it. Before, that took `CAP_BPF` where
/// `kernel.unprivileged_bpf_disabled` is set.
fn reads_maps_without() -> bool {
    is_since(&rustix::system::uname().release().to_string_lossy(), (5, 19))
}

fn is_since(release: &str, wanted: (u32, u32)) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse().ok());
    numbers.next().zip(numbers.next()).is_some_and(|version| version >= wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_by_number() {
        assert!(is_since("6.18.44-custom", (5, 19)) && is_since("5.19.0", (5, 19)));
        assert!(!is_since("5.4.0-100-generic", (5, 19)) && !is_since("5.15.0-1", (5, 19)) && !is_since("", (5, 19)));
    }

    #[test]
    fn what_is_not_needed_is_gone_for_the_thread() {
        std::thread::spawn(|| {
            let before = capabilities(None).unwrap();
            give_up();
            let after = capabilities(None).unwrap();
            assert_eq!(after.effective, before.effective & (NEEDED | CapabilitySet::BPF) & after.effective);
            assert!(!after.permitted.intersects(CapabilitySet::PERFMON | CapabilitySet::SYS_MODULE));
            assert_eq!(after.permitted & NEEDED, before.permitted & NEEDED);
        })
        .join()
        .unwrap();
    }
}
