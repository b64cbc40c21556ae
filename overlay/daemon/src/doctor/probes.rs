//! The single checks.

use std::fs;
use std::path::{Path, PathBuf};

use bytesize::ByteSize;
use forebay_fuse::WAKEUP_DEVICE as DEVICE;

use super::{CAP_BPF, CAP_PERFMON, CAP_SYS_ADMIN, Check, CheckVerdict, fs_type, holds, in_path, version};
use crate::{limits, mounts};

/// The first kernel with passthrough.
const PASSTHROUGH_SINCE: (u32, u32) = (6, 9);
/// The oldest kernel that the daemon is tested on.
const OLDEST: (u32, u32) = (5, 15);
/// Open files that a busy mount needs.
const DESCRIPTORS: u64 = 65_536;

/// Checks the machine, without regard to a mount.
pub fn machine() -> Vec<Check> {
    let mut checks = vec![kernel(), device(), passthrough()];
    checks.extend(unprivileged_mount());
    checks.push(io_uring());
    checks.extend(observer());
    checks.extend([descriptors(), wakeups()]);
    checks
}

/// Checks the fast directories that a mount would use.
pub fn places(fast: &[PathBuf]) -> Vec<Check> {
    fast.iter().map(|dir| fast_dir(dir)).collect()
}

fn kernel() -> Check {
    const NAME: &str = "kernel";
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy().into_owned();
    match version(&release) {
        Some(v) if v < OLDEST => Check::lacking(
            NAME,
            CheckVerdict::Needed,
            release,
            "not tested on kernels this old",
            "upgrade to 5.15 or later; 6.9 or later for passthrough",
        ),
        Some(v) if v < PASSTHROUGH_SINCE => Check::lacking(
            NAME,
            CheckVerdict::Missing,
            release,
            "no passthrough: the daemon serves every read, at 0.05 to 0.5 of the local speed",
            "upgrade to Linux 6.9 or later",
        ),
        _ => Check::ok(NAME, release),
    }
}

fn device() -> Check {
    const NAME: &str = "/dev/fuse";
    match fs::OpenOptions::new().read(true).write(true).open(NAME) {
        Ok(_) => Check::ok(NAME, "can be opened"),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Check::lacking(
            NAME,
            CheckVerdict::Needed,
            "does not exist",
            "nothing can be mounted",
            "modprobe fuse; in a container: --device /dev/fuse",
        ),
        Err(e) => {
            Check::lacking(NAME, CheckVerdict::Needed, e.to_string(), "nothing can be mounted", "chmod 666 /dev/fuse")
        }
    }
}

fn passthrough() -> Check {
    Check::of(
        holds(CAP_SYS_ADMIN),
        "passthrough",
        if holds(CAP_SYS_ADMIN) { "CAP_SYS_ADMIN is held" } else { "CAP_SYS_ADMIN is not held" },
        "resident files are read through the daemon, at .05 to .5 of the local speed",
        "mount as root (sudo forebay mount ..., or the systemd unit)",
    )
}

/// Checks what a user without CAP_SYS_ADMIN needs to mount.
fn unprivileged_mount() -> Vec<Check> {
    if holds(CAP_SYS_ADMIN) {
        return Vec::new();
    }
    let install = "apt-get install fuse3";
    let program = match in_path("fusermount3") {
        Some((file, true)) => Check::ok("fusermount3", file.display().to_string()),
        Some((file, false)) => Check::lacking(
            "fusermount3",
            CheckVerdict::Needed,
            format!("{} is not set-uid root", file.display()),
            "nothing can be mounted without root",
            format!("chmod u+s {}", file.display()),
        ),
        None => Check::lacking(
            "fusermount3",
            CheckVerdict::Needed,
            "not in the search path",
            "nothing can be mounted without root",
            install,
        ),
    };
    let conf = fs::read_to_string("/etc/fuse.conf").unwrap_or_default();
    let others = Check::of(
        conf.lines().any(|l| l.trim() == "user_allow_other"),
        "allow_other",
        "user_allow_other in /etc/fuse.conf",
        "only the user who mounts may use the mount",
        "echo user_allow_other | sudo tee -a /etc/fuse.conf",
    );
    vec![program, others]
}

fn io_uring() -> Check {
    const SWITCH: &str = "/proc/sys/kernel/io_uring_disabled";
    let (ok, found) = match fs::read_to_string(SWITCH).ok().as_deref().map(str::trim) {
        Some("0") => (true, "allowed".to_string()),
        Some("1") if holds(CAP_SYS_ADMIN) => (true, "allowed for privileged processes".into()),
        Some(value) => (false, format!("kernel.io_uring_disabled = {value}")),
        None => (version(&rustix::system::uname().release().to_string_lossy()) >= Some(OLDEST), "no switch".into()),
    };
    let costs = "content is moved by plain reads and writes: somewhat more CPU for each fetched and flushed byte";
    Check::of(ok, "io_uring", found, costs, "sysctl -w kernel.io_uring_disabled=0; in a container: a seccomp profile")
}

/// Checks what the observer is allowed, and what each of its hooks shows.
fn observer() -> Vec<Check> {
    const GRANT: &str = "sudo setcap cap_bpf,cap_perfmon+ep $(command -v forebay), or the systemd unit";
    let held = holds(CAP_SYS_ADMIN) || (holds(CAP_BPF) && holds(CAP_PERFMON));
    let allowed = Check::of(
        held,
        "observer (eBPF)",
        match (holds(CAP_SYS_ADMIN), held) {
            (true, _) => "CAP_SYS_ADMIN is held, which stands for CAP_BPF and CAP_PERFMON",
            (false, true) => "CAP_BPF and CAP_PERFMON are held",
            (false, false) => "CAP_BPF and CAP_PERFMON are not held",
        },
        "only the requests of jobs are observed, not their passthrough reads and page cache hits",
        GRANT,
    );
    let hook = |state: forebay_ebpf::HookState| {
        let forebay_ebpf::Hook { name, shows, without, .. } = state.hook;
        match state.lacking {
            None => Check::ok(name, format!("shows {shows}")),
            Some(why) => Check::lacking(name, CheckVerdict::Missing, why, without, "a kernel that has it and its BTF"),
        }
    };
    std::iter::once(allowed).chain(forebay_ebpf::probe(&[]).into_iter().map(hook)).collect()
}

fn descriptors() -> Check {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    let found = limit.map_or("no limit".into(), |n| format!("{n} at most"));
    Check::of(
        limit.is_none_or(|n| n >= DESCRIPTORS),
        "open files",
        found,
        "each open resident file takes one: more open files than this fail with EMFILE",
        "ulimit -Hn 1048576, or LimitNOFILE=1048576 in the systemd unit",
    )
}

fn wakeups() -> Check {
    let open = fs::OpenOptions::new().write(true).open(DEVICE);
    Check::of(
        open.is_ok(),
        "fast wake-ups",
        open.map_or_else(|e| format!("{DEVICE}: {e}"), |_| format!("{DEVICE} can be written")),
        "opens, creates and listings wait for idle processors to wake up: on virtual machines about half the rate",
        "mount as root; in a container: --device /dev/cpu_dma_latency",
    )
}

fn fast_dir(dir: &Path) -> Check {
    const NAME: &str = "fast directory";
    let place = dir.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
    let stat = match rustix::fs::statvfs(place) {
        Ok(stat) => stat,
        Err(e) => {
            let found = format!("{}: {e}", dir.display());
            return Check::lacking(
                NAME,
                CheckVerdict::Needed,
                found,
                "there is nowhere to cache",
                "give another --fast",
            );
        }
    };
    let kind = fs_type(place).unwrap_or("unknown");
    let (free, total) = (stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize);
    let found = format!("{} on {kind}, {} free of {}", dir.display(), ByteSize(free), ByteSize(total));
    if free < limits::FAST_FREE_BYTES {
        return Check::lacking(NAME, CheckVerdict::Needed, found, "the file system is full", "free some space there");
    }
    match kind {
        "tmpfs" => Check::lacking(
            NAME,
            CheckVerdict::Missing,
            found,
            "memory, not NVMe: a power cut loses what is not flushed",
            "a directory on a local disk",
        ),
        "nfs" | "beegfs" | "lustre" | "cifs" | "fuse" => Check::lacking(
            NAME,
            CheckVerdict::Missing,
            found,
            "not local: as slow as the pool",
            "a directory on a local ext4 or xfs",
        ),
        _ => Check::ok(NAME, found),
    }
}

/// Checks a pool that is a directory. The request is made on another thread, since a pool that is down may never
/// answer.
pub(super) fn pool_dir(dir: &Path) -> Check {
    const NAME: &str = "pool";
    let known = mounts::list().unwrap_or_default();
    let mount = known.iter().filter(|m| dir.starts_with(&m.mountpoint)).max_by_key(|m| m.mountpoint.as_os_str().len());
    let kind = mount.map_or("unknown".into(), |m| m.fs_type.clone());
    let (answer, answers) = std::sync::mpsc::channel();
    let asked = dir.to_path_buf();
    std::thread::spawn(move || {
        // After the deadline the receiver is gone.
        let _ = answer.send(fs::read_dir(asked).map(|_| ()));
    });
    let place = dir.display();
    match answers.recv_timeout(limits::POOL_CHECK) {
        Ok(Ok(())) => Check::ok(NAME, format!("{place} on {kind} answers")),
        Ok(Err(e)) => Check::lacking(
            NAME,
            CheckVerdict::Needed,
            format!("{place} on {kind}: {e}"),
            "there is nothing to mount",
            "mount the pool first",
        ),
        Err(_) => Check::lacking(
            NAME,
            CheckVerdict::Needed,
            format!("{place} on {kind} has not answered for {} s", limits::POOL_CHECK.as_secs()),
            "only resident files can be served",
            "check the pool's servers and the network",
        ),
    }
}
