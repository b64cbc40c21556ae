//! Loads the programs, assigns touches to jobs, and reads the counts.

use std::collections::HashMap as StdMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aya::maps::{Array, HashMap, MapData, PerCpuArray, RingBuf};
use aya::{Btf, Pod};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;

use crate::batch::MapBatches;
use crate::hooks::HookState;
use crate::kernel_types::KernelTypes;
use crate::layout::{DROPS, EPOCH, Key, MAX_PLACES, MEASURED, Offsets, Record, Rule, SLOTS, Setting, Slot};
use crate::programs::Programs;
use crate::{FirstTouch, ObserverError, WatchedPlace};

/// How often the slots are read again while the CPUs continue to count.
const ATTEMPTS: u32 = 8;
/// Records that are in memory at the same time, 200 bytes each.
const AT_ONCE: usize = 4096;

// SAFETY: plain numbers, and no byte of them is padding.
unsafe impl Pod for Key {}
// SAFETY: as above.
unsafe impl Pod for Record {}
// SAFETY: as above.
unsafe impl Pod for Offsets {}
// SAFETY: as above.
unsafe impl Pod for Setting {}

/// The fields of `pt_regs` with the number of a system call, its first argument, and its third and fourth argument, the
/// last two each with a distance in bytes from the field.
#[cfg(target_arch = "aarch64")]
const REGISTERS: (&str, &str, &str, u32, &str, u32) = ("syscallno", "regs", "regs", 16, "regs", 24);
#[cfg(not(target_arch = "aarch64"))]
const REGISTERS: (&str, &str, &str, u32, &str, u32) = ("orig_ax", "di", "dx", 0, "r10", 0);

/// The slots of one CPU.
#[repr(transparent)]
#[derive(Clone, Copy)]
struct Slots([Slot; SLOTS]);
// SAFETY: as above.
unsafe impl Pod for Slots {}

/// The settings of an observer.
#[derive(Debug, Clone, Default)]
pub struct ObserverOptions {
    /// At most [`MAX_PLACES`].
    pub places: Vec<WatchedPlace>,
    /// The process whose own touches do not count.
    pub ignored: u32,
    /// A directory for a file of one page, used if the program's own file is in no page cache that the hooks report.
    pub scratch: Option<PathBuf>,
    /// Hooks that are not used, by the names of their tracepoints: for tests.
    pub masked: Vec<String>,
}

/// Losses since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Touches of files for which the table of records had no room.
    pub touches: u64,
    /// First touches without a path.
    pub paths: u64,
    /// Processes that belong to a job, but were not assigned to it.
    pub processes: u64,
}

/// The programs, attached unless they rest. They are removed when this value is dropped.
pub struct Observer {
    hooks: Vec<HookState>,
    tasks: Mutex<HashMap<MapData, u32, u32>>,
    cgroups: Mutex<HashMap<MapData, u64, u32>>,
    records: Mutex<HashMap<MapData, Key, Record>>,
    /// The same map as `records`.
    records_fd: OwnedFd,
    records_max: usize,
    numbers: Mutex<Array<MapData, u64>>,
    cpus: PerCpuArray<MapData, Slots>,
    drops: PerCpuArray<MapData, [u64; DROPS]>,
    ring: Mutex<RingBuf<MapData>>,
    /// Wakes the thread that waits for the ring.
    bell: OwnedFd,
    programs: Mutex<Programs>,
    is_at_work: AtomicBool,
}

impl Observer {
    /// Attaches the programs whose hooks the kernel has.
    ///
    /// # Errors
    /// `Denied` without the capabilities; `Kernel` if there is no BTF, or no hook that shows reads.
    pub fn start(options: &ObserverOptions) -> Result<Self, ObserverError> {
        let mut hooks = crate::probe(&options.masked);
        let mut setting = setting(options, &KernelTypes::running()?)?;
        // Tens of megabytes while it is parsed: not at the same time as the types above.
        let btf = Btf::from_sys_fs().map_err(|e| ObserverError::Kernel(format!("the kernel's BTF: {e}")))?;
        match hooks.iter().any(|state| state.hook.program == "get_pages" && state.lacking.is_none()) {
            true => setting.last_is_beyond = u32::from(measure(&btf, &setting, options.scratch.as_deref())? > 0),
            false => setting.fills_are_reads = 1,
        }
        let mut programs = Programs::load(&btf, &setting)?;
        for state in hooks.iter_mut().filter(|state| state.lacking.is_none()) {
            match programs.begin(&btf, state.hook.program, state.hook.name) {
                Err(ObserverError::Denied) => return Err(ObserverError::Denied),
                Err(error) => state.lacking = Some(error.to_string()),
                Ok(()) => {}
            }
        }
        if !hooks.iter().any(|state| state.hook.reads && state.lacking.is_none()) {
            let why = hooks.iter().filter(|state| state.hook.reads);
            let why = why.map(|state| format!("{}: {}", state.hook.name, state.lacking.as_deref().unwrap_or_default()));
            return Err(ObserverError::Kernel(format!("no hook shows reads ({})", why.collect::<Vec<_>>().join("; "))));
        }
        let records = programs.take_map("RECORDS")?;
        let aya::maps::Map::HashMap(data) = &records else {
            return Err(ObserverError::Kernel("the map RECORDS is of another type".into()));
        };
        let records_max = data.info().map_err(|e| bpf("RECORDS", e))?.max_entries() as usize;
        let records_fd = data.fd().as_fd().try_clone_to_owned().map_err(|e| bpf("RECORDS", e))?;
        Ok(Self {
            hooks,
            tasks: Mutex::new(programs.take("TASKS")?),
            cgroups: Mutex::new(programs.take("CGROUPS")?),
            records: Mutex::new(HashMap::try_from(records).map_err(|e| bpf("RECORDS", e))?),
            records_fd,
            records_max,
            numbers: Mutex::new(programs.take("NUMBERS")?),
            cpus: programs.take("CPU")?,
            drops: programs.take("DROPPED")?,
            ring: Mutex::new(programs.take("TOUCHES")?),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(ring_failed)?,
            programs: Mutex::new(programs),
            is_at_work: AtomicBool::new(true),
        })
    }

    /// Detaches the programs: touches cost nothing and are not reported until [`Self::work`]. The counts stay. No
    /// process belongs to a job any more, since the end of its processes would go unseen.
    pub fn rest(&self) {
        let mut programs = self.programs.lock();
        self.is_at_work.store(false, Ordering::Release);
        programs.detach_all();
        // Operations on existing maps do not fail.
        let _ = remove_where(&mut self.tasks.lock(), |_| true);
        let _ = remove_where(&mut self.cgroups.lock(), |_| true);
        let _ = self.new_rules();
    }

    /// Attaches the programs again. Returns when touches are reported.
    ///
    /// # Errors
    /// The kernel refuses. The observer then stays at rest.
    pub fn work(&self) -> Result<(), ObserverError> {
        let mut programs = self.programs.lock();
        programs.attach_all()?;
        self.is_at_work.store(true, Ordering::Release);
        Ok(())
    }

    /// Checks that this process can attach the programs again after a rest. Before Linux 5.19 it cannot without
    /// CAP_BPF.
    ///
    /// # Errors
    /// The reason why not. The hook with which it was tried is not used from then on.
    pub fn try_again(&mut self) -> Result<(), ObserverError> {
        let (program, tried) = self.programs.get_mut().try_again();
        if let Err(error) = &tried
            && let Some(state) = self.hooks.iter_mut().find(|state| Some(state.hook.program) == program)
        {
            state.lacking = Some(error.to_string());
        }
        tried
    }

    /// Whether the programs are attached.
    pub fn is_at_work(&self) -> bool {
        self.is_at_work.load(Ordering::Acquire)
    }

    /// Every hook, with the reason if it is not used.
    pub fn hooks(&self) -> &[HookState] {
        &self.hooks
    }

    /// Adds a process, and all processes that it forks from now on, to a job.
    pub fn add_process(&self, pid: u32, job: u32) -> Result<(), ObserverError> {
        self.tasks.lock().insert(pid, job, 0).map_err(|e| bpf("add a process", e))?;
        self.new_rules()
    }

    /// Adds a process like [`Self::add_process`], but one that may exit at any time. The kernel forgets a process when it
    /// exits, but not one that is added later: the next process with its number would belong to the job. `is_running`:
    /// whether the process has not begun to exit.
    pub fn add_running_process(
        &self,
        pid: u32,
        job: u32,
        mut is_running: impl FnMut() -> bool,
    ) -> Result<(), ObserverError> {
        // Numbers are not used again so soon that another process has it at the second check, if it was this one before.
        if !is_running() {
            return Ok(());
        }
        self.add_process(pid, job)?;
        if is_running() { Ok(()) } else { self.remove_process(pid, job) }
    }

    /// Removes a process from a job, unless it belongs to another job by now.
    fn remove_process(&self, pid: u32, job: u32) -> Result<(), ObserverError> {
        let mut tasks = self.tasks.lock();
        if tasks.get(&pid, 0).is_ok_and(|of| of == job) {
            // The entry may be gone meanwhile.
            let _ = tasks.remove(&pid);
        }
        drop(tasks);
        self.new_rules()
    }

    /// Adds the processes in a cgroup, and below it, to a job. `cgroup` is the inode number of its directory in the
    /// hierarchy of version 2.
    pub fn add_cgroup(&self, cgroup: u64, job: u32) -> Result<(), ObserverError> {
        self.cgroups.lock().insert(cgroup, job, 0).map_err(|e| bpf("add a cgroup", e))?;
        self.new_rules()
    }

    /// Removes all processes and cgroups from the job.
    pub fn end(&self, job: u32) -> Result<(), ObserverError> {
        remove_where(&mut self.tasks.lock(), |of| of == job)?;
        remove_where(&mut self.cgroups.lock(), |of| of == job)?;
        self.new_rules()
    }

    /// The job of a process, if its process tree determines one.
    pub fn job_of(&self, pid: u32) -> Option<u32> {
        self.tasks.lock().get(&pid, 0).ok()
    }

    /// Invalidates the jobs of tasks that the CPUs remember.
    fn new_rules(&self) -> Result<(), ObserverError> {
        let mut numbers = self.numbers.lock();
        let epoch = numbers.get(&EPOCH, 0).map_err(|e| bpf("rules", e))?;
        numbers.set(EPOCH, epoch + 1, 0).map_err(|e| bpf("rules", e))
    }

    /// The ring of first touches, for waiting.
    pub fn ring(&self) -> Result<Ring, ObserverError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(ring_failed)?;
        // Edge-triggered: entries that are in the ring before a program wakes the waiting thread do not wake it.
        let events = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, self.ring.lock().as_fd(), epoll::EventData::new_u64(0), events).map_err(ring_failed)?;
        epoll::add(&epoll, &self.bell, epoll::EventData::new_u64(0), events).map_err(ring_failed)?;
        Ok(Ring(epoll))
    }

    /// Wakes the thread that waits for the ring, once.
    pub fn ring_bell(&self) {
        // The counter cannot overflow in the life of a machine.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// Takes the first touches in the ring, oldest first.
    pub fn first_touches(&self) -> Vec<FirstTouch> {
        let mut ring = self.ring.lock();
        let mut all = Vec::new();
        while let Some(item) = ring.next() {
            all.extend(FirstTouch::parse(&item));
        }
        all
    }

    /// Calls `each` for every record, with totals since the start. On a very busy machine, counts that a CPU is just
    /// adding to a record may be missing; the next call includes them. `each` must neither read records nor forget
    /// them.
    pub fn records(&self, mut each: impl FnMut(&Key, &Record)) -> Result<(), ObserverError> {
        let records = self.records.lock();
        let mut batches = MapBatches::of(self.records_fd.as_fd());
        loop {
            let slots = self.slots()?;
            // SAFETY: it is the map of the records.
            let some = unsafe { batches.next::<Key, Record>(AT_ONCE) }.map_err(|e| bpf("records", e))?;
            if some.is_empty() {
                return Ok(());
            }
            let some = self.totals(&records, some.into_iter().collect(), slots)?;
            some.iter().for_each(|(key, record)| each(key, record));
        }
    }

    /// Records, including counts that the CPUs have not added to them yet. `slots` were read before the records.
    fn totals(
        &self,
        records: &HashMap<MapData, Key, Record>,
        mut all: StdMap<Key, Record>,
        mut slots: Vec<Slot>,
    ) -> Result<StdMap<Key, Record>, ObserverError> {
        for _ in 0..ATTEMPTS {
            let later = self.slots()?;
            // Counts that were being added to their record may be in neither.
            let moved = |(before, after): &(&Slot, &Slot)| before.changes != after.changes || !after.is_whole();
            let moved: Vec<Key> = slots.iter().zip(&later).filter(moved).map(|(before, _)| before.key).collect();
            slots = later;
            if !moved.iter().any(|key| all.contains_key(key)) {
                break;
            }
            for key in moved {
                if let (Some(known), Ok(record)) = (all.get_mut(&key), records.get(&key, 0)) {
                    *known = record;
                }
            }
        }
        for slot in slots.iter().filter(|slot| slot.is_whole()) {
            if let Some(record) = all.get_mut(&slot.key) {
                record.add(slot);
            }
        }
        Ok(all)
    }

    /// The slots of all CPUs, in the same order each time.
    fn slots(&self) -> Result<Vec<Slot>, ObserverError> {
        let cpus = self.cpus.get(&0, 0).map_err(|e| bpf("records", e))?;
        Ok(cpus.iter().flat_map(|slots| slots.0).collect())
    }

    /// Removes records, for instance of a job that has ended. The next touch of such a file is a first touch.
    pub fn forget(&self, keys: impl IntoIterator<Item = Key>) {
        let mut records = self.records.lock();
        let removed = keys.into_iter().filter(|key| records.remove(key).is_ok()).count();
        drop(records);
        if removed > 0 {
            // A CPU that remembers the file would count its touches for a record that is gone. Operations on existing
            // maps do not fail.
            let _ = self.new_rules();
        }
    }

    /// Returns how many records the kernel's table has room for.
    pub fn records_max(&self) -> usize {
        self.records_max
    }

    pub fn dropped(&self) -> Dropped {
        let mut sum = [0; DROPS];
        if let Ok(cpus) = self.drops.get(&0, 0) {
            for cpu in cpus.iter() {
                sum.iter_mut().zip(cpu).for_each(|(to, from)| *to += from);
            }
        }
        Dropped { touches: sum[0], paths: sum[1], processes: sum[2] }
    }
}

/// The ring of first touches.
pub struct Ring(OwnedFd);

impl Ring {
    /// Waits until more than a quarter of the ring is used, or for the bell, for at most `at_most`.
    pub fn wait(&self, at_most: Duration) {
        let at_most = Timespec { tv_sec: at_most.as_secs() as i64, tv_nsec: at_most.subsec_nanos().into() };
        let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }];
        let _ = epoll::wait(&self.0, &mut events, Some(&at_most));
    }
}

fn remove_where<K: Pod>(map: &mut HashMap<MapData, K, u32>, holds: impl Fn(u32) -> bool) -> Result<(), ObserverError> {
    let found: Vec<K> = map.iter().flatten().filter(|(_, job)| holds(*job)).map(|(key, _)| key).collect();
    for key in found {
        // The entry may be gone meanwhile.
        let _ = map.remove(&key);
    }
    Ok(())
}

fn ring_failed(source: Errno) -> ObserverError {
    ObserverError::Io { what: "the ring of first touches".into(), source: source.into() }
}

/// The third argument of `mm_filemap_get_pages` for one page: 0 if it is that page, 1 if it is the one after it.
/// Kernels differ, and fixed kernels cannot be recognised by their version.
///
/// Reads of a program that runs from a tmpfs, as on nodes without a disk, do not pass that hook.
fn measure(btf: &Btf, setting: &Setting, scratch: Option<&Path>) -> Result<u64, ObserverError> {
    let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    let mut programs = Programs::load(btf, &Setting { ignored: thread, ..*setting })?;
    programs.begin(btf, "measure", "mm_filemap_get_pages")?;
    let numbers: Array<MapData, u64> = programs.take("NUMBERS")?;
    let own = || File::open("/proc/self/exe").ok();
    let made = || {
        let file =
            File::from(open(scratch?, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR).ok()?);
        file.write_all_at(&[1], 0).ok().map(|()| file)
    };
    let files: [&dyn Fn() -> Option<File>; 2] = [&own, &made];
    for file in files.iter().filter_map(|file| file()) {
        if file.read_exact_at(&mut [0; 1], 0).is_ok()
            && let pages @ 1.. = numbers.get(&MEASURED, 0).map_err(|e| bpf("measure", e))?
        {
            return Ok(pages - 1);
        }
    }
    // The value when the hook was added, in Linux 6.12, and in 6.18; it differs in 7.0.
    Ok(u64::from(version().is_none_or(|version| version < (7, 0))))
}

pub(crate) fn bpf(what: &str, source: impl std::error::Error + Send + Sync + 'static) -> ObserverError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&source);
    while let Some(error) = cause {
        let denied = |e: &std::io::Error| matches!(e.raw_os_error(), Some(libc::EPERM | libc::EACCES));
        if error.downcast_ref::<std::io::Error>().is_some_and(denied) && !holds_capabilities() {
            return ObserverError::Denied;
        }
        cause = error.source();
    }
    ObserverError::Bpf { what: what.into(), source: Box::new(source) }
}

/// Whether this process has CAP_BPF and CAP_PERFMON, or CAP_SYS_ADMIN, which includes both.
fn holds_capabilities() -> bool {
    use rustix::thread::{CapabilitySet, capabilities};
    let Ok(sets) = capabilities(None) else { return false };
    sets.effective.contains(CapabilitySet::SYS_ADMIN)
        || sets.effective.contains(CapabilitySet::BPF | CapabilitySet::PERFMON)
}

fn setting(options: &ObserverOptions, types: &KernelTypes) -> Result<Setting, ObserverError> {
    if options.places.len() > MAX_PLACES {
        return Err(ObserverError::Kernel(format!("at most {MAX_PLACES} places can be watched")));
    }
    let mut setting = Setting { ignored: options.ignored, offsets: offsets(types)?, ..Setting::default() };
    // Kernels before 6.18 map exactly the pages that they report; kernels with unknown fields are treated alike.
    if version().is_some_and(|version| version >= (6, 18))
        && let Ok(offsets) = folio_offsets(types, setting.offsets)
    {
        setting.offsets = offsets;
        setting.maps_folios = 1;
    }
    for (rule, place) in setting.places.iter_mut().zip(&options.places) {
        *rule = Rule { root: place.root.unwrap_or(0), device: place.device, everybody: u32::from(place.everybody) };
    }
    Ok(setting)
}

fn offsets(types: &KernelTypes) -> Result<Offsets, ObserverError> {
    // Before 5.16 there were only pages.
    let folio = if types.has("folio") { "folio" } else { "page" };
    // A field of its own in Linux 6.1 to 6.5; since then in the lowest byte of the second page's flags.
    let order = types.offset(folio, "_folio_order").or_else(|_| types.offset(folio, "_flags_1"));
    let orders = order.ok().zip(types.enumerator("PG_head").ok());
    Ok(Offsets {
        mapping_host: types.offset("address_space", "host")?,
        inode_sb: types.offset("inode", "i_sb")?,
        inode_ino: types.offset("inode", "i_ino")?,
        inode_generation: types.offset("inode", "i_generation")?,
        inode_size: types.offset("inode", "i_size")?,
        inode_dentries: types.offset("inode", "i_dentry.first")?,
        inode_mode: types.offset("inode", "i_mode")?,
        sb_dev: types.offset("super_block", "s_dev")?,
        dentry_alias: types.offset("dentry", "d_u.d_alias")?,
        dentry_parent: types.offset("dentry", "d_parent")?,
        dentry_inode: types.offset("dentry", "d_inode")?,
        dentry_name: types.offset("dentry", "d_name.name")?,
        folio_flags: types.offset(folio, "flags")?,
        folio_order: orders.map_or(0, |(order, _)| order),
        large_folio_bit: orders.map_or(0, |(_, bit)| bit),
        folio_index: types.offset(folio, "index")?,
        folio_mapping: types.offset(folio, "mapping")?,
        iocb_file: types.offset("kiocb", "ki_filp")?,
        iocb_pos: types.offset("kiocb", "ki_pos")?,
        iter_count: types.offset("iov_iter", "count")?,
        iter_source: types.offset("iov_iter", "data_source")?,
        file_inode: types.offset("file", "f_inode")?,
        task_start: types.offset("task_struct", "start_boottime")?,
        task_pid: types.offset("task_struct", "pid")?,
        task_tgid: types.offset("task_struct", "tgid")?,
        task_leader: types.offset("task_struct", "group_leader")?,
        task_flags: types.offset("task_struct", "flags")?,
        task_reads: types.offset("task_struct", "ioac.syscr")?,
        task_writes: types.offset("task_struct", "ioac.syscw")?,
        task_files: types.offset("task_struct", "files")?,
        files_table: types.offset("files_struct", "fdt")?,
        table_files: types.offset("fdtable", "fd")?,
        file_pos: types.offset("file", "f_pos")?,
        regs_number: types.offset("pt_regs", REGISTERS.0)?,
        regs_first: types.offset("pt_regs", REGISTERS.1)?,
        regs_third: types.offset("pt_regs", REGISTERS.2)? + REGISTERS.3,
        regs_fourth: types.offset("pt_regs", REGISTERS.4)? + REGISTERS.5,
        call_read: libc::SYS_read as u32,
        call_pread: libc::SYS_pread64 as u32,
        ..Offsets::default()
    })
}

/// The offsets of the fields that lead to the folios of mapped pages.
fn folio_offsets(types: &KernelTypes, known: Offsets) -> Result<Offsets, ObserverError> {
    if known.folio_order == 0 {
        return Err(ObserverError::Kernel("this kernel has no folios".into()));
    }
    Ok(Offsets {
        mapping_pages: types.offset("address_space", "i_pages.xa_head")?,
        node_shift: types.offset("xa_node", "shift")?,
        node_slots: types.offset("xa_node", "slots")?,
        mapping_areas: types.offset("address_space", "i_mmap.rb_root.rb_node")?,
        node_left: types.offset("rb_node", "rb_left")?,
        node_right: types.offset("rb_node", "rb_right")?,
        area_node: types.offset("vm_area_struct", "shared.rb")?,
        area_first_page: types.offset("vm_area_struct", "vm_pgoff")?,
        area_start: types.offset("vm_area_struct", "vm_start")?,
        area_end: types.offset("vm_area_struct", "vm_end")?,
        ..known
    })
}

/// The running kernel's major and minor version.
fn version() -> Option<(u32, u32)> {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}
