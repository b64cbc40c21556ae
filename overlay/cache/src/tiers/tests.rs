use std::io;
use std::path::PathBuf;

use forebay_backends::Side;
use tempfile::TempDir;

use super::*;

struct Dirs {
    disk: TempDir,
    memory: TempDir,
}

impl Dirs {
    fn new() -> Self {
        let disk = tempfile::tempdir_in("/var/tmp").unwrap();
        Self { disk, memory: tempfile::tempdir_in("/dev/shm").unwrap() }
    }

    fn fast(&self) -> PathBuf {
        self.disk.path().join("fast")
    }

    fn layouts(&self) -> Vec<TierLayout> {
        let layout = |name: &str, dirs: Vec<PathBuf>, limit| TierLayout {
            name: name.into(),
            dirs,
            limit_bytes: Some(limit),
            high_watermark: 0.9,
        };
        vec![
            layout("ram", vec![self.memory.path().join("ram")], 1 << 20),
            layout("nvme", vec![self.disk.path().join("a"), self.disk.path().join("b")], 10 << 20),
            layout(TIER_OF_FAST, Vec::new(), 100 << 20),
        ]
    }

    fn store(&self, known: &[TierDirectory]) -> (ContentStore, Vec<TierDirectory>) {
        let mut store = ContentStore::open(&[self.fast()], Some(1 << 30)).unwrap();
        let numbered = |path: &Path| known.iter().find(|known| known.path == path).map(|known| known.number);
        let taken = known.iter().map(|known| known.number).collect();
        let numbers = store.add_tiers(&self.layouts(), "me", numbered, taken).unwrap();
        store.identify("me", &BTreeSet::new()).unwrap();
        (store, numbers)
    }
}

#[test]
fn what_is_written_is_placed_on_the_fastest_durable_tier_and_what_is_fetched_on_the_slowest() {
    let dirs = Dirs::new();
    let (store, numbers) = dirs.store(&[]);
    assert_eq!(numbers.iter().map(|dir| dir.number).collect::<Vec<_>>(), [128, 129, 130]);
    assert_eq!(store.tiers().iter().map(|tier| tier.is_volatile).collect::<Vec<_>>(), [true, false, false]);
    assert_eq!(store.budget.limit(), 110 << 20, "memory does not count");
    assert_eq!((store.tier_for_writes(), store.tier_for_fetches(1 << 20), store.last_tier()), (1, 2, 2));
    let id = store.place(ContentId(7), 1);
    assert!(store.tier_of(id) == Some(1) && !store.is_volatile(id));
    store.account(id, 0, 10 << 20);
    assert_eq!((store.tier_for_writes(), store.budget.used()), (2, 10 << 20), "the fastest is full");
    let (in_memory, on_fast) = (store.place(ContentId(8), 0), store.place(ContentId(9), 2));
    assert!(store.is_volatile(in_memory) && !store.is_volatile(on_fast));
    store.account(in_memory, 0, 1 << 20);
    assert_eq!(store.budget.used(), 10 << 20);
    store.account(on_fast, 0, 100 << 20);
    assert_eq!(store.tier_for_fetches(1), 2, "both are full: the slowest one makes room");
    assert_eq!(store.tiers()[2].budget.used(), 100 << 20);
}

#[test]
fn a_directory_keeps_its_number_when_tiers_come_and_go() {
    let dirs = Dirs::new();
    let (store, given) = dirs.store(&[]);
    assert!(given.iter().all(|dir| !dir.is_marked));
    drop(store);
    let numbers = |given: &[TierDirectory]| given.iter().map(|dir| dir.number).collect::<Vec<_>>();
    // The others are found by the marks on their disks alone.
    let (store, again) = dirs.store(&given[..1]);
    assert!(numbers(&again) == [128, 129, 130] && again.iter().all(|dir| dir.is_marked));
    drop(store);
    // What was in memory is gone after a reboot.
    std::fs::remove_dir_all(&given[0].path).unwrap();
    let (_, again) = dirs.store(&[TierDirectory { number: 200, ..given[0].clone() }]);
    assert_eq!((numbers(&again), again[0].is_marked), (vec![200, 129, 130], false));
}

#[test]
fn what_cannot_be_a_tier_is_refused_with_the_reason() {
    let refused = |change: &dyn Fn(&Dirs, &mut Vec<TierLayout>)| {
        let dirs = Dirs::new();
        let mut layouts = dirs.layouts();
        change(&dirs, &mut layouts);
        let mut store = ContentStore::open(&[dirs.fast()], Some(1 << 30)).unwrap();
        store.add_tiers(&layouts, "me", |_| None, BTreeSet::new()).unwrap_err().to_string()
    };
    let twice = refused(&|dirs, layouts| layouts[1].dirs[1] = dirs.fast());
    assert!(twice.contains("tier nvme") && twice.contains("twice") && twice.contains("fast"), "{twice}");
    let mixed = refused(&|dirs, layouts| layouts[1].dirs[1] = dirs.memory.path().join("b"));
    assert!(mixed.contains("memory and disks in one tier"), "{mixed}");
    let large = refused(&|_, layouts| layouts[0].limit_bytes = Some(u64::MAX));
    assert!(large.contains("tier ram: limit is") && large.contains("smaller"), "{large}");
}

#[test]
fn nothing_is_placed_on_a_device_that_fails() {
    let dirs = Dirs::new();
    let (store, _) = dirs.store(&[]);
    let eio = Error::io(io::Error::from_raw_os_error(libc::EIO), Side::Cache, "write");
    let id = store.place(ContentId(7), 1);
    let full = Error::io(io::Error::from_raw_os_error(libc::ENOSPC), Side::Cache, "write");
    assert!(!store.note_error(id, &full) && store.unhealthy(id).is_none());
    assert!(!store.note_error(id, &eio));
    assert!(store.unhealthy(id).unwrap().ends_with("is suspect") && store.is_used(id));
    let other = store.place(ContentId(8), 1);
    assert!(store.device_of(other) != store.device_of(id) && store.tier_of(other) == Some(1));
    assert!(!store.note_error(id, &eio) && store.note_error(id, &eio) && !store.is_used(id));
    (0..3).for_each(|_| _ = store.note_error(other, &eio));
    assert_eq!(store.tier_for_writes(), 2, "no device of the tier works");
    assert_eq!(store.tier_of(store.place(ContentId(9), 1)), Some(2));
    // The first probe is due a second after the failure; both work.
    assert!(store.probe_in().unwrap() <= Duration::from_secs(1));
    std::thread::sleep(Duration::from_millis(1_100));
    assert!(store.probe(false).is_empty() && !store.is_used(id), "one probe is not enough");
    std::thread::sleep(Duration::from_millis(1_100));
    store.probe(false);
    assert!(store.is_used(id) && store.probe_in().is_none() && store.tier_for_writes() == 1);
}

#[test]
fn a_mark_that_cannot_be_read_is_kept() {
    let dirs = Dirs::new();
    drop(dirs.store(&[]));
    let mark = dirs.fast().join("device");
    let unreadable = b"\xff is no text";
    std::fs::write(&mark, unreadable).unwrap();
    let store = ContentStore::open(&[dirs.fast()], Some(1 << 30)).unwrap();
    let refused = store.identify("me", &BTreeSet::new()).unwrap_err();
    assert!(refused.to_string().contains("mark"), "{refused}");
    assert_eq!(std::fs::read(&mark).unwrap(), unreadable);
    std::fs::remove_file(&mark).unwrap();
    store.identify("me", &BTreeSet::new()).unwrap();
}

#[test]
fn a_directory_that_lost_its_mark_is_refused_with_the_remedy() {
    let disk = tempfile::tempdir_in("/var/tmp").unwrap();
    let dirs = [disk.path().join("first"), disk.path().join("second")];
    let open = || ContentStore::open(&dirs, Some(1 << 30)).unwrap();
    let store = open();
    let known = store.identify("me", &BTreeSet::new()).unwrap();
    assert_eq!(known, BTreeSet::from([0, 1]));
    store.check_marks().unwrap();
    drop(store);
    std::fs::rename(&dirs[1], disk.path().join("away")).unwrap();
    let store = open();
    for refused in [store.identify("me", &known).unwrap_err(), store.check_marks().unwrap_err()] {
        let text = refused.to_string();
        assert!(text.contains("second") && text.contains("mount it") && text.contains("echo 'me 1'"), "{text}");
    }
    assert!(!dirs[1].join("device").exists(), "it was marked");
    drop(store);
    std::fs::write(dirs[1].join("device"), "me 1\n").unwrap();
    assert_eq!(open().identify("me", &known).unwrap(), known);
}
