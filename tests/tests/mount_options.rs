//! Options from mount(8) and fstab, which arrive through the packaged helper.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use forebay_tests::mount::{COMMAND, Mount, Options, Place, attempt};
use forebay_tests::process::{self, Answer};

fn options(more: &str) -> Options {
    Options { more: vec!["-o".into(), more.into()], ..Options::default() }
}

/// Runs the helper as mount(8) does.
fn helper(mount: &Mount, options: &str) -> Answer {
    let helper = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("packaging/mount.fuse.forebay");
    let mut command = Command::new("sh");
    command.arg(helper).args([mount.place.pool(), mount.place.mnt()]).args(["-o", options]);
    process::run(command.env("FOREBAY_BIN", process::forebay()), COMMAND)
}

/// Returns the options of the mount and of its file system, as the kernel has them.
fn shown(mount: &Mount) -> Vec<String> {
    let answer = process::run(
        Command::new("findmnt").args(["-n", "-o", "VFS-OPTIONS,FS-OPTIONS"]).arg(mount.place.mnt()),
        COMMAND,
    );
    answer.ok().out.split([',', ' ', '\n']).filter(|o| !o.is_empty()).map(str::to_owned).collect()
}

#[track_caller]
fn has(mount: &Mount, options: &[&str]) {
    let shown = shown(mount);
    options.iter().for_each(|option| assert!(shown.iter().any(|o| o == option), "{option} is not among {shown:?}"));
}

#[track_caller]
fn has_not(mount: &Mount, option: &str) {
    let shown = shown(mount);
    assert!(!shown.iter().any(|o| o == option), "{option} is among {shown:?}");
}

/// SEMANTICS 53: "`-o remount` changes at once the options that the kernel keeps for a mount (`ro`, `nosuid`, `nodev`,
/// `noexec`, `noatime`, `lazytime`, and the options that lift them); an option that the remount does not name stays."
#[test]
fn a_remount_changes_the_running_mount_and_leaves_the_rest() {
    let mount = Mount::new(Options::default());
    fs::write(mount.path("f"), "before").unwrap();
    let worker = mount.worker();

    helper(&mount, "ro,remount").ok();
    has(&mount, &["ro", "nosuid", "nodev"]);
    let refused = fs::write(mount.path("f"), "no").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS), "{refused}");
    assert_eq!(fs::read_to_string(mount.path("f")).unwrap(), "before");
    // Earlier writes reach the pool all the same.
    mount.flush();
    assert_eq!(fs::read_to_string(mount.pool("f")).unwrap(), "before");

    helper(&mount, "rw,remount,noexec,lazytime,noatime").ok();
    has(&mount, &["rw", "nosuid", "nodev", "noexec", "noatime", "lazytime"]);
    fs::write(mount.path("f"), "after").unwrap();
    // If fstab has no line for the mount, mount(8) passes all current options. It expresses `suid` and `exec` by the
    // absence of `nosuid` and `noexec`.
    helper(&mount, "rw,nodev,relatime,remount,user_id=0,group_id=0,default_permissions,allow_other,max_read=1048576")
        .ok();
    has(&mount, &["nodev", "relatime", "lazytime"]);
    ["nosuid", "noexec", "noatime"].iter().for_each(|option| has_not(&mount, option));
    // With a line in fstab, mount(8) also passes the daemon's options.
    let fast = mount.place.fast();
    helper(&mount, &format!("ro,remount,nosuid,fast={},limit=2G,_netdev", fast.display())).ok();
    has(&mount, &["ro", "nosuid", "nodev"]);

    // The next worker does not change the options.
    assert_eq!(mount.worker(), worker, "a remount is nothing to the daemon");
    mount.kill_worker();
    mount.wait_for_other_worker(worker);
    has(&mount, &["ro", "nosuid"]);
    assert!(fs::write(mount.path("f"), "no").is_err());
    assert_eq!(fs::read_to_string(mount.path("f")).unwrap(), "after");
}

/// SEMANTICS 53: "A remount does not change the options that the daemon was started with (`fast`, `limit`, `policy`,
/// ..., `sync`, `dirsync`, and `ro` if the mount was made with it): if it names another value for one of them, it is
/// refused, with the reason."
#[test]
fn a_remount_refuses_what_the_daemon_was_started_with() {
    const USAGE: i32 = 2;
    let mount = Mount::new(Options::default());
    fs::write(mount.place.at("policy"), "[default]\nflush = \"manual\"\n").unwrap();
    let policy = format!("policy={}", mount.place.at("policy").display());
    for option in ["limit=5G", "fast=/elsewhere", "threads=3", "memory=1G", "immutable", "sync", "dirsync", &policy] {
        let name = option.split('=').next().unwrap();
        helper(&mount, &format!("rw,remount,noexec,{option}"))
            .refused(USAGE, &[name, "started with", "forebay umount"]);
        has_not(&mount, "noexec");
    }
    helper(&mount, "rw,remount,strictatime").refused(USAGE, &["strictatime", "never change the access time"]);
    helper(&mount, "rw,remount,speed=11").refused(USAGE, &["speed=11", "not known"]);
    let open = OpenOptions::new().create(true).append(true).open(mount.path("open")).unwrap();
    const BUSY: i32 = 6;
    helper(&mount, "ro,remount").refused(BUSY, &["in use", "close the files that are open for writing"]);
    drop(open);
    mount.umount();
    helper(&mount, "ro,remount").refused(3, &["nothing", "is mounted at"]);

    let read_only = Mount::on(Place::new(), options("ro"));
    helper(&read_only, "rw,remount").refused(USAGE, &["rw", "started with `ro`"]);
    has(&read_only, &["ro"]);
}

#[test]
fn a_remount_keeps_what_the_file_system_of_the_pool_forbids() {
    let place = Place::new();
    place.small_disk("pool", "tmpfs", 16);
    process::sh(&place.at(""), "mount -o remount,noexec pool", COMMAND);
    let mount = Mount::on(place, Options::default());
    helper(&mount, "rw,remount,exec,allow_suid").ok();
    has(&mount, &["noexec", "nodev"]);
    has_not(&mount, "nosuid");
}

/// mount(8) does not pass `suid` to a helper, but it passes `allow_suid`.
#[test]
fn options_that_mount_8_keeps_to_itself_have_other_names() {
    let mount = Mount::new(options("allow_suid,allow_dev,lazytime"));
    has(&mount, &["lazytime"]);
    ["nosuid", "nodev"].iter().for_each(|option| has_not(&mount, option));
    mount.umount();
    attempt(&mount.place, &options("strictatime")).refused(2, &["strictatime", "leave it out"]);
}

/// The worker's calls of fsync and fdatasync, as strace sees them.
struct Syncs {
    trace: process::Running,
    file: PathBuf,
}

impl Syncs {
    fn of(mount: &Mount) -> Self {
        process::need(&["strace"]);
        let file = mount.place.at("syncs");
        let mut command = Command::new("strace");
        command.args(["-f", "-qq", "-e", "trace=fsync,fdatasync", "-e", "signal=none", "-o"]).arg(&file);
        let trace = process::Running::new(command.args(["-p", &mount.worker().pid.to_string()]));
        // strace is attached when it has recorded a call.
        let deadline = Instant::now() + COMMAND;
        let probe = File::create(mount.path("probe")).unwrap();
        while fs::read_to_string(&file).is_ok_and(|text| text.is_empty()) || !file.exists() {
            assert!(Instant::now() < deadline, "strace does not see the daemon");
            (&probe).write_all(b"x").and_then(|()| probe.sync_all()).unwrap();
        }
        Self { trace, file }
    }

    fn count(&self) -> usize {
        BufReader::new(File::open(&self.file).unwrap())
            .lines()
            .map_while(Result::ok)
            .filter(|l| l.contains("sync("))
            .count()
    }

    /// Returns a lower bound of the number of syncs while `work` runs.
    fn during(&self, work: impl FnOnce()) -> usize {
        let before = self.count();
        work();
        self.count() - before
    }
}

/// More operations than the daemon makes syncs of its own accord in the same time.
const TIMES: usize = 40;

fn names(mount: &Mount) {
    for n in 0..TIMES / 4 {
        let (dir, file) = (mount.path(format!("d{n}")), mount.path(format!("f{n}")));
        fs::create_dir(&dir).unwrap();
        File::create(&file).unwrap();
        fs::rename(&file, dir.join("f")).unwrap();
        fs::remove_file(dir.join("f")).unwrap();
    }
}

fn writes(file: &File) {
    (0..TIMES).for_each(|n| file.write_all_at(&[n as u8; 100], n as u64 * 50).unwrap());
}

/// SEMANTICS 54: "With `dirsync`, a name that was created, removed or renamed survives a power cut when the call
/// returns; with `sync`, every change does."
#[test]
fn dirsync_and_sync_make_durable_what_they_say() {
    let usual = Mount::new(Options::default());
    let syncs = Syncs::of(&usual);
    let file = File::create(usual.path("file")).unwrap();
    let seen = syncs.during(|| (names(&usual), writes(&file)).1);
    assert!(seen < TIMES, "without the options nothing waits for the disk: {seen}");
    drop((syncs.trace, file));

    let dirsync = Mount::new(options("dirsync"));
    let syncs = Syncs::of(&dirsync);
    let seen = syncs.during(|| names(&dirsync));
    assert!(seen >= TIMES, "{seen}");
    drop(syncs.trace);

    let sync = Mount::new(options("sync"));
    has(&sync, &["sync"]);
    let syncs = Syncs::of(&sync);
    let seen = syncs.during(|| names(&sync));
    assert!(seen >= TIMES, "{seen}");
    let file = File::create(sync.path("file")).unwrap();
    let seen = syncs.during(|| writes(&file));
    assert!(seen >= TIMES, "{seen}");
    let seen = syncs.during(|| (0..TIMES).for_each(|n| file.set_len(n as u64).unwrap()));
    assert!(seen >= TIMES, "{seen}");
}

/// SEMANTICS 54: "A write to a file that is open with `O_SYNC` or `O_DSYNC` also survives a power cut"
#[test]
fn what_is_written_with_o_dsync_is_durable() {
    let mount = Mount::new(Options::default());
    let syncs = Syncs::of(&mount);
    let open = |flags| {
        OpenOptions::new().write(true).create(true).truncate(true).custom_flags(flags).open(mount.path("file")).unwrap()
    };
    for flags in [libc::O_DSYNC, libc::O_SYNC, libc::O_DSYNC | libc::O_DIRECT] {
        let file = open(flags);
        let seen = match flags & libc::O_DIRECT {
            0 => syncs.during(|| writes(&file)),
            _ => syncs.during(|| aligned_writes(&file)),
        };
        assert!(seen >= TIMES, "{flags:o}: {seen}");
        // The other open file description uses passthrough.
        drop(file);
        let (other, file) = (open(0), open(flags & !libc::O_DIRECT));
        let seen = syncs.during(|| writes(&file));
        assert!(seen >= TIMES, "beside another, {flags:o}: {seen}");
        drop(other);
    }
}

fn aligned_writes(file: &File) {
    #[repr(align(4096))]
    struct Page([u8; 4096]);
    let page = Box::new(Page([7; 4096]));
    (0..TIMES).for_each(|n| file.write_all_at(&page.0, n as u64 * 4096).unwrap());
}

/// SEMANTICS 54: "A mount with `sync` has no passthrough"
#[test]
fn a_mount_with_sync_says_itself_why_nothing_is_passed_through() {
    let place = Place::new();
    let said = attempt(&place, &options("sync")).ok();
    let told = format!("{}{}", said.out, said.err);
    assert!(told.contains("`sync`") && !told.contains("doctor"), "{said}");
    let mount = Mount::new(options("sync"));
    let status = mount.status();
    assert!(!status.passthrough && status.no_passthrough.is_some_and(|why| why.contains("`sync`")));
}
