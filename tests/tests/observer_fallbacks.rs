//! What the observer still does if the kernel lacks hooks, or its user lacks capabilities. Needs root, and a kernel
//! with BTF.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use forebay_ebpf::{Observer, ObserverError, Way};
use forebay_tests::observed::{FILE_BYTES, options, reads};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// Makes a file that is not in the page cache.
fn cold_file(dir: &Path) -> std::path::PathBuf {
    let path = dir.join("file");
    std::fs::write(&path, vec![1; FILE_BYTES as usize]).unwrap();
    let file = File::open(&path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(file.as_fd(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
    path
}

#[test]
fn without_any_one_hook_the_rest_goes_on_and_it_is_said() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let names: Vec<&str> = forebay_ebpf::probe(&[]).iter().map(|state| state.hook.name).collect();
    assert!(names.len() >= 8, "{names:?}");
    for name in names {
        let path = cold_file(dir.path());
        let observer = Observer::start(&options(dir.path(), &[name])).unwrap();
        for state in observer.hooks() {
            let expected = (state.hook.name == name).then_some("masked");
            assert_eq!(state.lacking.as_deref(), expected, "{}", state.hook.name);
        }
        let record = reads(&observer, &path);
        let of = |way| record.way(way).bytes;
        match name {
            // Bytes that come into memory count as read.
            "mm_filemap_get_pages" => assert!(of(Way::Read) == FILE_BYTES && of(Way::Fill) >= FILE_BYTES, "{record:?}"),
            "mm_filemap_add_to_page_cache" => assert!(of(Way::Read) == FILE_BYTES && of(Way::Fill) == 0, "{record:?}"),
            _ => assert!(of(Way::Read) == FILE_BYTES && of(Way::Fill) >= FILE_BYTES, "{name}: {record:?}"),
        }
    }
}

#[test]
fn without_any_hook_that_shows_reads_there_is_no_observer() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let masked = ["mm_filemap_get_pages", "mm_filemap_add_to_page_cache"];
    match Observer::start(&options(dir.path(), &masked)) {
        Err(ObserverError::Kernel(why)) => assert!(why.contains("no hook shows reads"), "{why}"),
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("an observer that sees nothing"),
    }
}

/// Returns the exit status of the program that observes itself as user 65534 with only these capabilities.
fn as_nobody(dir: &Path, capabilities: CapabilitySet) -> i32 {
    let mut command = Command::new(dir.join("program"));
    command.arg("observe").arg(dir);
    let become_nobody = move || {
        rustix::thread::set_keep_capabilities(true)?;
        rustix::thread::set_thread_groups(&[])?;
        rustix::thread::set_thread_gid(rustix::process::Gid::from_raw(65_534))?;
        rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(65_534))?;
        let sets = CapabilitySets { effective: capabilities, permitted: capabilities, inheritable: capabilities };
        rustix::thread::set_capabilities(None, sets)?;
        for one in capabilities.iter() {
            rustix::thread::configure_capability_in_ambient_set(one, true)?;
        }
        Ok(())
    };
    // SAFETY: the closure makes only system calls.
    let mut child = unsafe { command.pre_exec(become_nobody) }.spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code().unwrap_or(-1);
        }
        assert!(Instant::now() < end, "it does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn two_capabilities_are_enough_and_without_them_it_says_so() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = cold_file(dir.path());
    // Test programs are built in a directory that only root may read.
    let program = dir.path().join("program");
    std::fs::copy(env!("CARGO_BIN_EXE_observed"), &program).unwrap();
    for open in [dir.path(), &path, &program] {
        std::fs::set_permissions(open, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    assert_eq!(as_nobody(dir.path(), CapabilitySet::BPF | CapabilitySet::PERFMON), 0);
    assert_eq!(as_nobody(dir.path(), CapabilitySet::empty()), 77, "without capabilities");
    assert_eq!(as_nobody(dir.path(), CapabilitySet::PERFMON), 77, "without CAP_BPF");
}
