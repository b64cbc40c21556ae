//! Confines the processes of a root mount before they serve requests. They give up privileges of programs that they
//! start, capabilities that no part of them needs, and system calls that no file system daemon makes.
//!
//! Child processes inherit all of it: the supervisor confines itself while it has one thread, and its workers start
//! confined. A worker gives up more by itself (`capabilities`). A daemon of an ordinary user has nothing to give up,
//! and its mount helper is a set-id program, which a confined process could not start.

use std::collections::BTreeMap;
use std::io;

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set, set_capabilities,
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

use super::capabilities::NEEDED;

/// The capabilities that a worker needs, and those that load its observer.
const SUPERVISED: CapabilitySet = NEEDED.union(CapabilitySet::BPF).union(CapabilitySet::PERFMON);

/// System calls that fail with `EPERM` in all processes of a mount. They change the machine, or act on other processes
/// and namespaces. Three are left out on purpose: `bpf` and `perf_event_open`, with which a restarted worker loads its
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
    // Other mounts and namespaces.
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

/// Gives up what no process of a mount needs. Must be called while there is one thread, when the mount is made. If
/// something cannot be given up, the log says so, and the mount serves all the same.
pub fn confine() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    if let Err(error) = bound().and_then(|()| filter()) {
        tracing::warn!("privileges that are not needed could not be dropped: {error}");
    }
}

/// Narrows the bounding set and this thread's capabilities.
fn bound() -> io::Result<()> {
    for capability in CapabilitySet::all().difference(SUPERVISED).iter() {
        match remove_capability_from_bounding_set(capability) {
            // A kernel that does not know the capability does not grant it.
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

/// Denies system calls, and privileges of programs that are started: the filter requires the latter.
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
