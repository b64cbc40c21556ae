//! The capabilities of a worker: those that it needs; with an observer, the rest is given up once the observer is
//! loaded.
//!
//! Capabilities belong to threads, and a new thread has those of the thread that starts it. So the first thread gives
//! capabilities up before it starts other threads. Only one thread is started earlier: it loads the observer, and gives
//! up its capabilities after that. The caller of the worker's `run` starts the threads of the allocator after that.
//!
//! So a daemon that observes by the capabilities of its file holds neither CAP_BPF nor CAP_PERFMON afterwards. Kernels
//! before 5.19 require CAP_BPF to read a map: on these the worker keeps it.

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// The capabilities for serving a mount: files, modes, owners, attributes and special files of all users; passthrough
/// and unmounting; leases and flags of content files; reserved blocks and limits; memory for rings; processes under
/// `hidepid`; an NFS server that requires a privileged port.
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

/// Gives up, for this thread, the capabilities that serving a mount does not need. After that, a process that relied on
/// `CAP_BPF` and `CAP_PERFMON` cannot load an observer; `CAP_SYS_ADMIN` replaces both.
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
        tracing::warn!("capabilities that are not needed could not be dropped: {error}");
    }
}

/// Returns whether a map can be read without `CAP_BPF`. Since Linux 5.19, its descriptor is enough. Before, `CAP_BPF`
/// was required if `kernel.unprivileged_bpf_disabled` is set.
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
