use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::AtomicU32;

use proptest::prelude::*;

use super::*;

/// Hands out ids as the kernel does, and knows which are live.
#[derive(Clone, Default)]
struct Ids {
    next: Arc<AtomicU32>,
    live: Arc<Mutex<BTreeSet<u32>>>,
    fails_with: Option<i32>,
}

impl Registrar for Ids {
    fn register(&self, _: &File) -> io::Result<u32> {
        if let Some(errno) = self.fails_with {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let id = 1 + self.next.fetch_add(1, Ordering::Relaxed);
        self.live.lock().insert(id);
        Ok(id)
    }

    fn unregister(&self, id: u32) {
        assert!(self.live.lock().remove(&id), "id {id} was given back twice");
    }
}

fn content(id: u64) -> Arc<Content> {
    Arc::new(Content::new(id, File::open("/dev/null").unwrap(), true))
}

fn read(content: Option<&Arc<Content>>) -> Wish<'_> {
    Wish { content, writable: false }
}

fn modes(ids: &Ids) -> Arc<IoModes> {
    Arc::new(IoModes::new(Box::new(ids.clone()), None).unwrap())
}

const INO: Ino = Ino(7);

#[test]
fn a_backing_id_is_kept_for_the_next_open_until_the_content_changes() {
    let ids = Ids::default();
    let modes = modes(&ids);
    let first = content(1);
    for _ in 0..3 {
        let grant = modes.grant(INO, read(Some(&first)));
        assert_eq!((grant.mode, grant.backing), (Mode::Passthrough, 1));
        grant.commit();
        assert!(modes.release(INO, Mode::Passthrough, false));
    }
    modes.drop_backing(INO);
    assert!(ids.live.lock().is_empty());
    let grant = modes.grant(INO, read(Some(&content(2))));
    assert_eq!((grant.mode, grant.backing), (Mode::Passthrough, 2));
}

#[test]
fn replaced_content_is_read_through_us_while_the_old_one_is_open() {
    let ids = Ids::default();
    let modes = modes(&ids);
    modes.grant(INO, read(Some(&content(1)))).commit();
    modes.drop_backing(INO);
    assert_eq!(modes.grant(INO, read(Some(&content(2)))).mode, Mode::Beside);
    assert!(modes.release(INO, Mode::Passthrough, false));
    assert!(ids.live.lock().is_empty(), "replaced content is not kept");
}

#[test]
fn what_the_kernel_never_heard_of_is_taken_back() {
    let modes = modes(&Ids::default());
    drop(modes.grant(INO, read(None)));
    assert!(!modes.release(INO, Mode::Cached, false));
    assert_eq!(modes.grant(INO, read(Some(&content(1)))).mode, Mode::Passthrough);
}

#[test]
fn without_the_privilege_everything_is_cached_and_the_reason_is_known() {
    let ids = Ids { fails_with: Some(libc::EPERM), ..Ids::default() };
    let modes = modes(&ids);
    assert_eq!(modes.passthrough_state(), PassthroughState::On);
    assert_eq!(modes.grant(INO, read(Some(&content(1)))).mode, Mode::Cached);
    assert!(matches!(modes.passthrough_state(), PassthroughState::Off(why) if why.contains("CAP_SYS_ADMIN")));
}

#[test]
fn idle_backing_ids_are_bounded() {
    let ids = Ids::default();
    let modes = modes(&ids);
    let one = content(1);
    for ino in 0..2 * IDLE_BACKINGS_MAX as u64 {
        modes.grant(Ino(ino), read(Some(&one))).commit();
        modes.release(Ino(ino), Mode::Passthrough, false);
    }
    assert_eq!(ids.live.lock().len(), IDLE_BACKINGS_MAX);
}

#[test]
fn a_backing_id_keeps_the_descriptor_and_goes_with_it() {
    let ids = Ids::default();
    let modes = modes(&ids);
    let file = content(1);
    modes.grant(INO, read(Some(&file))).commit();
    modes.drop_idle_backing(INO);
    assert_eq!(ids.live.lock().len(), 1, "it is open");
    modes.release(INO, Mode::Passthrough, false);
    assert_eq!(Arc::strong_count(&file), 2, "the descriptor that the kernel knows is kept with the id");
    modes.drop_idle_backing(INO);
    assert!(ids.live.lock().is_empty());
    assert_eq!(Arc::strong_count(&file), 1);
}

#[test]
fn a_backing_id_of_a_dead_process_is_not_kept_after_the_last_release() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("modes");
    let ids = Ids::default();
    let before = Arc::new(IoModes::new(Box::new(ids.clone()), Some(&path)).unwrap());
    before.grant(INO, read(Some(&content(1)))).commit();
    std::mem::forget(before);
    let (after, _) = IoModes::inherit(Box::new(ids.clone()), &path).unwrap();
    let after = Arc::new(after);
    after.grant(INO, read(Some(&content(1)))).commit();
    assert!(after.release(INO, Mode::Passthrough, false));
    assert_eq!(ids.live.lock().len(), 1);
    assert!(after.release(INO, Mode::Passthrough, false));
    assert!(ids.live.lock().is_empty(), "it pins a descriptor beside the one of this process");
}

#[test]
fn the_next_process_goes_on_with_the_opens_of_the_last() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("modes");
    let ids = Ids::default();
    let before = Arc::new(IoModes::new(Box::new(ids.clone()), Some(&path)).unwrap());
    before.grant(INO, Wish { content: Some(&content(1)), writable: true }).commit();
    before.grant(INO, read(Some(&content(1)))).commit();
    before.grant(Ino(8), read(None)).commit();
    before.grant(Ino(9), read(Some(&content(3)))).commit();
    before.release(Ino(9), Mode::Passthrough, false);
    assert_eq!(ids.live.lock().len(), 2);
    // As after kill -9: no code of `before` runs any more.
    std::mem::forget(before);

    let (after, mut opens) = IoModes::inherit(Box::new(ids.clone()), &path).unwrap();
    let after = Arc::new(after);
    opens.sort_by_key(|open| open.ino);
    let want =
        [InheritedOpens { ino: INO, readers: 1, writers: 1 }, InheritedOpens { ino: Ino(8), readers: 1, writers: 0 }];
    assert_eq!(opens, want);
    assert_eq!(ids.live.lock().len(), 1, "the unused id is given back");

    assert_eq!(after.grant(INO, read(Some(&content(1)))).backing, 1, "the kernel wants the same backing file");
    assert_eq!(after.grant(INO, read(Some(&content(2)))).mode, Mode::Beside);
    assert_eq!(after.grant(Ino(8), read(Some(&content(5)))).mode, Mode::Cached);
    assert!(after.release(Ino(8), Mode::Cached, false));
    assert!(!after.release(Ino(8), Mode::Cached, false), "no underflow");
    assert_eq!(after.grant(Ino(8), read(Some(&content(5)))).mode, Mode::Passthrough);
}

/// What the kernel remembers of an inode; the rules are those of `fs/fuse/iomode.c`.
#[derive(Default)]
struct KernelInode {
    cached: u32,
    passthrough: Vec<u32>,
    /// Direct opens; true for those with a shared mapping, which count as cached too.
    direct: Vec<bool>,
}

impl KernelInode {
    fn is_cached(&self) -> bool {
        self.cached > 0 || self.direct.contains(&true)
    }

    fn open(&mut self, mode: Mode, backing: u32) -> Result<(), &'static str> {
        let passes = matches!(mode, Mode::Passthrough | Mode::Beside);
        if !passes && !self.passthrough.is_empty() {
            return Err("something else beside passthrough");
        }
        if passes && self.is_cached() {
            return Err("passthrough beside cached");
        }
        if passes && self.passthrough.iter().any(|id| *id != backing) {
            return Err("two backing files");
        }
        match mode {
            Mode::Cached => self.cached += 1,
            Mode::Passthrough | Mode::Beside => self.passthrough.push(backing),
            Mode::Direct => self.direct.push(false),
        }
        Ok(())
    }
}

#[derive(Debug, Clone)]
enum Step {
    Open { ino: u64, content: Option<u64>, writable: bool, fails: bool },
    Release { ino: u64, pick: usize },
    Map { ino: u64, pick: usize },
    Replaced { ino: u64 },
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let ino = 1..4u64;
    prop_oneof![
        6 => (ino.clone(), prop::option::of(1..3u64), any::<bool>(), prop::bool::weighted(0.1))
            .prop_map(|(ino, content, writable, fails)| Step::Open { ino, content, writable, fails }),
        5 => (ino.clone(), any::<usize>()).prop_map(|(ino, pick)| Step::Release { ino, pick }),
        1 => (ino.clone(), any::<usize>()).prop_map(|(ino, pick)| Step::Map { ino, pick }),
        1 => ino.prop_map(|ino| Step::Replaced { ino }),
        1 => Just(Step::Restart),
    ]
}

/// One mount: the kernel's view and the handles that are open.
struct World {
    ids: Ids,
    path: std::path::PathBuf,
    modes: Arc<IoModes>,
    kernel: HashMap<u64, KernelInode>,
    open: HashMap<u64, Vec<(Mode, bool, u32)>>,
}

impl World {
    fn apply(&mut self, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Open { ino, content: id, writable, fails } => {
                let content = id.map(content);
                let grant = self.modes.grant(Ino(ino), Wish { content: content.as_ref(), writable });
                if fails {
                    return Ok(());
                }
                let refused = self.kernel.entry(ino).or_default().open(grant.mode, grant.backing);
                prop_assert_eq!(refused, Ok(()));
                prop_assert!(
                    !matches!(grant.mode, Mode::Passthrough | Mode::Beside)
                        || self.ids.live.lock().contains(&grant.backing)
                );
                self.open.entry(ino).or_default().push((grant.mode, writable, grant.backing));
                grant.commit();
            }
            Step::Release { ino, pick } => {
                let Some(opens) = self.open.get_mut(&ino).filter(|opens| !opens.is_empty()) else { return Ok(()) };
                let (mode, writable, backing) = opens.swap_remove(pick % opens.len());
                let inode = self.kernel.entry(ino).or_default();
                match mode {
                    Mode::Cached => inode.cached -= 1,
                    Mode::Passthrough | Mode::Beside => inode.passthrough.retain({
                        let mut first = true;
                        move |id| *id != backing || !std::mem::take(&mut first)
                    }),
                    Mode::Direct => drop(inode.direct.pop()),
                }
                prop_assert!(self.modes.release(Ino(ino), mode, writable));
            }
            Step::Map { ino, pick } => {
                let inode = self.kernel.entry(ino).or_default();
                // Beside passthrough the kernel refuses the mapping itself, with ENODEV.
                if !inode.direct.is_empty() && inode.passthrough.is_empty() {
                    let at = pick % inode.direct.len();
                    inode.direct[at] = true;
                }
            }
            Step::Replaced { ino } => self.modes.drop_backing(Ino(ino)),
            Step::Restart => {
                let (next, _) = IoModes::inherit(Box::new(self.ids.clone()), &self.path).unwrap();
                std::mem::forget(std::mem::replace(&mut self.modes, Arc::new(next)));
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn the_kernel_never_has_to_refuse_an_open(steps in prop::collection::vec(step(), 1..60)) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("modes");
        let ids = Ids::default();
        let modes = Arc::new(IoModes::new(Box::new(ids.clone()), Some(&path)).unwrap());
        let mut world = World { ids, path, modes, kernel: HashMap::new(), open: HashMap::new() };
        for step in steps {
            world.apply(step)?;
        }
        for (ino, opens) in std::mem::take(&mut world.open) {
            for (mode, writable, _) in opens {
                prop_assert!(world.modes.release(Ino(ino), mode, writable));
            }
        }
        for ino in 1..4 {
            world.modes.drop_backing(Ino(ino));
        }
        prop_assert!(world.ids.live.lock().is_empty(), "ids leaked");
    }
}
