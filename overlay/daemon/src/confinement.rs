//! What the processes of a mount of root's give up for good, before they serve anyone: privileges by programs that they
//! start, capabilities that no part of them needs, and system calls that no file system daemon makes.
//!
//! All of it is inherited: the supervisor confines itself while it has one thread, and its workers begin with that. A
//! worker gives up more by itself (`capabilities`). An ordinary user's daemon has nothing to give up, and its helper for
//! mounts is a set-id program, which a confined process cannot start.

use std::collections::BTreeMap;
use std::io;

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set, set_capabilities,
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

use super::capabilities::NEEDED;

/// What a worker needs, and what its observer is loaded with.
const SUPERVISED: CapabilitySet = NEEDED.union(CapabilitySet::BPF).union(CapabilitySet::PERFMON);

/// System calls that fail with `EPERM` in all processes of a mount. They change the machine, or reach into other processes
/// and name spaces. What is left out on purpose: `bpf` and `perf_event_open`, by which a restarted worker loads its
/// observer, and `umount2`.
const DENIED: &[libc::c_long] = &[
    // Other processes.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_process_madvise,
    // The kernel, and code in it.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_syslog,
    libc::SYS_userfaultfd,
    // The machine's clock, swap, accounting, names and quotas.
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_quotactl,
    // Other mounts and name spaces.
    libc::SYS_mount,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_unshare,
    libc::SYS_setns,
    // Other identities, keys and execution domains.
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setgroups,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_personality,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
];

/// Gives up what no process of a mount needs. To be called with one thread, when the mount is made. What cannot be given up
/// is told in the log: the mount serves all the same.
pub fn confine() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    if let Err(error) = bound().and_then(|()| filter()) {
        tracing::warn!("privileges that are not needed are kept: {error}");
    }
}

/// Narrows the bounding set and this thread's capabilities.
fn bound() -> io::Result<()> {
    for capability in CapabilitySet::all().difference(SUPERVISED).iter() {
        match remove_capability_from_bounding_set(capability) {
            // A kernel that does not know it does not give it.
            Err(rustix::io::Errno::INVAL) => {}
            other => other?,
        }
    }
    let held = capabilities(None)?;
    let sets = CapabilitySets {
        effective: held.effective & SUPERVISED,
        permitted: held.permitted & SUPERVISED,
        inheritable: CapabilitySet::empty(),
    };
    Ok(set_capabilities(None, sets)?)
}

/// Denies system calls, and privileges by programs that are started: one needs the other.
fn filter() -> io::Result<()> {
    let arch = std::env::consts::ARCH.try_into().map_err(io::Error::other)?;
    let rules: BTreeMap<i64, Vec<_>> = DENIED.iter().map(|call| (*call, Vec::new())).collect();
    let denied = SeccompAction::Errno(libc::EPERM as u32);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, denied, arch).map_err(io::Error::other)?;
    let program: BpfProgram = filter.try_into().map_err(io::Error::other)?;
    seccompiler::apply_filter(&program).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_denied_fails_and_the_rest_goes_on() {
        std::thread::spawn(|| {
            filter().unwrap();
            // SAFETY: plain system calls; the first would do nothing but ask to be traced.
            let traced = unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) };
            assert_eq!((traced, io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EPERM)));
            assert!(std::fs::metadata("/").is_ok());
            assert!(rustix::thread::no_new_privs().unwrap());
        })
        .join()
        .unwrap();
    }
}
