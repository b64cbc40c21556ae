use super::*;

struct TestDirs {
    _temp: tempfile::TempDir,
    root: PathBuf,
}

fn dirs() -> TestDirs {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path().canonicalize().unwrap();
    for name in ["pool", "mnt", "fast"] {
        std::fs::create_dir(root.join(name)).unwrap();
    }
    TestDirs { _temp: temp, root }
}

fn config(dirs: &TestDirs) -> MountConfig {
    MountConfig {
        pool: dirs.root.join("pool").to_str().unwrap().into(),
        mountpoint: dirs.root.join("mnt"),
        fast: vec![dirs.root.join("fast")],
        limit_bytes: None,
        policy: None,
        accounts: Default::default(),
        read_only: false,
        immutable: false,
        allow_other: false,
        throttle: None,
        threads: None,
        memory_bytes: None,
        metrics: None,
        kernel_options: Vec::new(),
        peers: None,
        mask_hooks: Vec::new(),
        origin: None,
    }
}

fn refused(config: MountConfig) -> Failure {
    check(config).unwrap_err()
}

#[test]
fn a_sound_mount_passes_and_missing_fast_directories_are_made() {
    let dirs = dirs();
    let mut config = config(&dirs);
    config.fast = vec![dirs.root.join("fast/../new/deep")];
    let plan = check(config).unwrap();
    assert_eq!(plan.to_create, [dirs.root.join("new/deep")]);
    assert!(!plan.hides_files && !plan.stale_mount);
    prepare(&plan).unwrap();
    assert_eq!(dirs.root.join("new/deep").metadata().unwrap().mode() & 0o777, 0o700);
}

#[test]
fn what_does_not_exist_is_named_with_a_remedy() {
    let dirs = dirs();
    let failure = refused(MountConfig { mountpoint: dirs.root.join("no"), ..config(&dirs) });
    assert_eq!(failure.kind, FailureKind::Usage);
    assert!(failure.to_string().contains("mkdir -p"), "{failure}");
    let failure = refused(MountConfig { pool: dirs.root.join("no").to_str().unwrap().into(), ..config(&dirs) });
    assert_eq!(failure.kind, FailureKind::PoolUnavailable);
    assert!(failure.to_string().contains(dirs.root.join("no").to_str().unwrap()), "{failure}");
    assert_eq!(refused(MountConfig { pool: "ftp://host/a".into(), ..config(&dirs) }).kind, FailureKind::Usage);
    assert_eq!(refused(MountConfig { fast: vec![], ..config(&dirs) }).kind, FailureKind::Usage);
}

#[test]
fn directories_inside_each_other_are_refused() {
    let dirs = dirs();
    for inside in ["pool/fast", "mnt/fast", "pool", "mnt"] {
        let failure = refused(MountConfig { fast: vec![dirs.root.join(inside)], ..config(&dirs) });
        assert_eq!(failure.kind, FailureKind::Usage, "{inside}");
    }
    let failure = refused(MountConfig { mountpoint: dirs.root.join("pool"), ..config(&dirs) });
    assert!(failure.to_string().contains("is the same directory as"), "{failure}");
    let fast = dirs.root.join("fast");
    assert!(refused(MountConfig { fast: vec![fast.clone(), fast], ..config(&dirs) }).what.contains("twice"));
}

#[test]
fn a_limit_above_the_partition_is_refused_with_both_numbers() {
    let dirs = dirs();
    let failure = refused(MountConfig { limit_bytes: Some(1 << 60), ..config(&dirs) });
    assert_eq!(failure.kind, FailureKind::NoSpace);
    assert!(failure.what.contains(&ByteSize(1 << 60).to_string()), "{failure}");
    let total = device(&dirs.root).unwrap().total_bytes;
    assert!(failure.what.contains(&ByteSize(total).to_string()), "{failure}");
}

#[test]
fn a_directory_that_cannot_be_written_is_refused() {
    let place = Path::new("/proc");
    let failure = writable(place).unwrap_err();
    assert!(failure.what.contains("/proc"), "{failure}");
}
