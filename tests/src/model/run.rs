//! One case, run on the engine and on the model side by side.

use std::sync::atomic::Ordering;

use forebay_backends::decorators::FaultMoment;
use forebay_backends::{Attrs, Error, ErrorKind, FileKind, Pool, PoolPath, RenameMode, Side, Time};
use forebay_engine::{Attr, Caller, Entry, Ino, Lookup, Opened, Overlay};

use super::Failure;
use super::config::World;
use super::effects::Effects;
use super::machine::Machine;
use super::op::{Case, Exchange, Op, Seeded, Spot};
use super::power::History;
use super::reading::Reading;
use super::tree::{Body, Id, ROOT, Refused, Tree, just_now};
use super::view;

/// The maximum number of files that are open at the same time.
const MAX_HANDLES: usize = 4;
const NAMES: [&[u8]; 4] = [b"a", b"b", b"c", b"d"];
pub const CALLER: Caller = Caller { uid: 0, gid: 0, pid: 1 };

pub struct Handle {
    pub id: Id,
    pub ino: Ino,
    pub flags: i32,
    pub opened: Opened,
}

impl Handle {
    pub fn writes(&self) -> bool {
        self.flags & libc::O_ACCMODE != libc::O_RDONLY
    }
}

/// A name in a directory, in the engine and in the model.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    pub dir: Id,
    pub dir_ino: Ino,
    pub name: &'static [u8],
}

pub struct Run {
    pub machine: Machine,
    pub model: Tree,
    pub handles: Vec<Handle>,
    /// The directory that a program reads in parts.
    pub reading: Option<Reading>,
    pub effects: Effects,
    pub history: History,
    /// Calls to the pool may fail.
    pub trouble: bool,
    /// The pool may have changed: the model must adopt what the engine shows before the next operation.
    pub outdated: bool,
    /// A file that another client appended to, and the inode that it must keep.
    pub grows: Option<(Vec<u8>, Ino)>,
    /// Bytes were written past the engine, which reserved no space for them.
    pub unreserved: bool,
    /// The clock was set, so modification times are unknown.
    pub clock_set: bool,
    /// The start of the current operation.
    pub began: Time,
    tags: u32,
}

/// Runs a case to its end.
///
/// # Errors
/// The operation that failed, what was expected, and what was seen.
pub fn run(case: &Case) -> Result<(), Failure> {
    let mut run = Run::begin(case)?;
    for (number, op) in case.ops.iter().enumerate() {
        run.step(*op).map_err(|e| format!("operation {number}, {op:?}: {e}"))?;
    }
    run.end().map_err(|e| format!("at the end: {e}"))
}

impl Run {
    fn begin(case: &Case) -> Result<Self, Failure> {
        let mut run = Self {
            machine: Machine::new(case.config),
            model: Tree::default(),
            handles: Vec::new(),
            reading: None,
            effects: Effects::default(),
            history: History::default(),
            trouble: false,
            outdated: false,
            grows: None,
            unreserved: false,
            clock_set: false,
            began: just_now(),
            tags: 0,
        };
        for seeded in &case.seeded {
            run.seed(*seeded);
        }
        run.model = futures::executor::block_on(view::pooled(&run.machine.memory));
        run.model.node_mut(ROOT).ino = Some(Ino::ROOT);
        run.effects.take_all(&run.model);
        run.machine.start().map_err(|e| format!("start: {e}"))?;
        run.history.synced(&run.model, None);
        Ok(run)
    }

    /// Puts an object into the pool. Skips one that does not fit.
    fn seed(&mut self, seeded: Seeded) {
        let pool = self.machine.memory.clone();
        let attrs = Attrs { mode: 0o640, uid: 0, gid: 0, atime: Time::now(), mtime: Time::now(), xattrs: Vec::new() };
        let dirs = futures::executor::block_on(view::pooled(&pool)).dirs();
        let path = |at: Spot| {
            let dir = &dirs[at.dir as usize % dirs.len()].1;
            dir.iter().fold(PoolPath::root(), |p, name| p.join(name)).join(NAMES[at.name as usize])
        };
        futures::executor::block_on(async {
            match seeded {
                Seeded::File { at, len } => {
                    if pool.mknod(&path(at), FileKind::File, 0, &attrs).await.is_ok() {
                        let bytes = super::content::pattern(self.tag(), 0, len as usize);
                        let _ = pool.write_at(&path(at), 0, bytes.into()).await;
                    }
                }
                Seeded::Dir { at } => _ = pool.mkdir(&path(at), &Attrs { mode: 0o755, ..attrs }).await,
                Seeded::Link { from, to } => _ = pool.link(&path(from), &path(to)).await,
                Seeded::Symlink { at } => _ = pool.symlink(&path(at), b"elsewhere", &attrs).await,
            }
        });
    }

    pub fn tag(&mut self) -> u32 {
        self.tags += 1;
        self.tags
    }

    fn step(&mut self, op: Op) -> Result<(), Failure> {
        if self.outdated {
            self.heal();
            self.catch_up()?;
        }
        self.began = just_now();
        match op {
            Op::Outage { down } => {
                self.machine.pool.set_down(down);
                self.trouble |= down;
                if !down {
                    self.heal();
                }
            }
            Op::Fail { call, after } => {
                let moment = if after { FaultMoment::After } else { FaultMoment::Before };
                self.machine.pool.fail_call(call.into(), moment);
                self.trouble = true;
            }
            Op::Other(other) => self.other(other)?,
            Op::Clock { hours } => self.set_clock(hours),
            // At the end of such a case everything must arrive by the policy that it began with.
            Op::Policy { .. } if self.machine.config.arrives => {}
            Op::Policy { flushing, reading } => {
                (self.machine.config.flushing, self.machine.config.reading) = (flushing, reading);
                let policy = self.machine.policy();
                let overlay = self.overlay();
                self.machine.run(overlay.set_policy(policy));
                self.outdated |= self.shared();
            }
            Op::Crash => self.crash()?,
            op => {
                self.both(op)?;
                // Once a local name is gone, another client's object with that name becomes visible.
                self.outdated |=
                    self.shared() && matches!(op, Op::Rename { .. } | Op::Unlink { .. } | Op::Rmdir { .. });
            }
        }
        self.after_step()
    }

    /// Runs an operation on the engine and on the model.
    fn both(&mut self, op: Op) -> Result<(), Failure> {
        match op {
            Op::Create { at, mode, hold } => self.create(at, mode, hold),
            Op::Open { at, write, truncate } => self.open(at, write, truncate),
            Op::Close { handle } => self.close(handle),
            Op::Write { handle, offset, len, direct } => self.write(handle, offset, len, direct),
            Op::Read { handle, offset, len, direct } => self.read(handle, offset, len, direct),
            Op::TruncateOpen { handle, size } => self.truncate_open(handle, size),
            Op::WriteAt { at, offset, len, direct } => self.write_at(at, offset, len, direct),
            Op::ReadAll { at } => self.read_all(at),
            Op::Holes { at } => self.holes(at),
            Op::Allocate { handle, offset, len, how } => self.allocate(handle, offset, len, how),
            Op::Truncate { at, size } => self.truncate(at, size),
            Op::Rename { from, to, how } => self.rename(from, to, mode_of(how)),
            Op::Link { from, to } => self.link(from, to),
            Op::Unlink { at } => self.unlink(at),
            Op::Mkdir { at } => self.mkdir(at),
            Op::Rmdir { at } => self.rmdir(at),
            Op::Symlink { at } => self.symlink(at),
            Op::Chmod { at, mode } => self.chmod(at, mode),
            Op::Utimes { at, secs } => self.utimes(at, secs),
            Op::SetXattr { at, name, len } => self.set_xattr(at, name, len),
            Op::RemoveXattr { at, name } => self.remove_xattr(at, name),
            Op::Stat { at } => self.stat(at),
            Op::List { dir } => self.list(dir),
            Op::ReadDir { dir, entries } => self.read_dir_part(dir, entries),
            Op::Fsync { at } => self.fsync(at),
            Op::FsyncOpen { handle } => self.fsync_open(handle),
            Op::Stage { at } => self.stage(at),
            Op::Evict { all, at, release } => self.evict(all, at, release),
            Op::Flush { all, at, wait } => self.flush(all, at, wait),
            Op::Policy { .. } | Op::Outage { .. } | Op::Fail { .. } | Op::Other(_) | Op::Clock { .. } | Op::Crash => {
                Ok(())
            }
        }
    }

    fn set_clock(&mut self, hours: i16) {
        self.machine.ahead_secs.store(i64::from(hours) * 3600, Ordering::Relaxed);
        self.clock_set = true;
        for node in self.model.nodes.values_mut() {
            node.not_before = None;
        }
    }

    fn after_step(&mut self) -> Result<(), Failure> {
        let open: Vec<Id> = self.handles.iter().map(|h| h.id).collect();
        self.model.sweep(&open);
        self.note_names();
        match self.machine.config.world {
            World::Shared => self.effects.take_all(&self.model),
            World::PowerCuts => self.history.moment(&self.model),
            World::Quiet => {}
        }
        if let (Some(limit), false) = (self.machine.config.limit_bytes, self.unreserved) {
            let status = self.machine.run(self.machine.overlay().status());
            if status.used_bytes > limit {
                return Err(format!("{} bytes used of a limit of {limit}", status.used_bytes));
            }
        }
        Ok(())
    }

    pub fn heal(&mut self) {
        self.machine.pool.heal();
        self.trouble = false;
    }

    pub fn overlay(&self) -> Overlay {
        self.machine.overlay().clone()
    }

    pub fn shared(&self) -> bool {
        self.machine.config.world == World::Shared
    }

    /// Returns whether a failure of the pool, or a full fast pool, excuses an error.
    fn excused(&self, e: &Error) -> bool {
        let pool = matches!(e.kind(), ErrorKind::Unavailable | ErrorKind::Timeout | ErrorKind::Os(libc::EIO));
        let full = self.machine.config.limit_bytes.is_some() && e.is(ErrorKind::NoSpace) && e.side() == Side::Cache;
        (self.trouble && pool && e.side() == Side::Pool) || full
    }

    /// Returns the answer if success is right, and `None` if the error is right or excused. Anything else is a failure.
    pub fn judge<T>(&self, got: Result<T, Error>, right: Result<(), Refused>) -> Result<Option<T>, Failure> {
        match (got, right) {
            (Ok(answer), Ok(())) => Ok(Some(answer)),
            (Err(e), Err(refused)) if refused.contains(&e.errno()) => Ok(None),
            (Err(e), _) if self.excused(&e) => Ok(None),
            (Err(e), Ok(())) => Err(format!("failed with {:?}: {e}", e.kind())),
            (Err(e), Err(refused)) => Err(format!("failed with errno {} instead of {refused:?}: {e}", e.errno())),
            (Ok(_), Err(refused)) => Err(format!("succeeded instead of errno {refused:?}")),
        }
    }

    /// Returns the directory and name of a spot, or `None` if a failure of the pool hides the directory.
    pub fn place(&mut self, at: Spot) -> Result<Option<Place>, Failure> {
        let dirs = self.model.dirs();
        let (dir, path) = dirs[at.dir as usize % dirs.len()].clone();
        let mut place = Place { dir: ROOT, dir_ino: Ino::ROOT, name: NAMES[at.name as usize] };
        for name in &path {
            let got = self.look(place.dir, place.dir_ino, name)?;
            let Some((id, ino)) = got else { return Ok(None) };
            (place.dir, place.dir_ino) = (id, ino);
        }
        debug_assert_eq!(place.dir, dir);
        Ok(Some(place))
    }

    /// Looks a name up on both sides. Returns `None` if it does not exist, or cannot be looked up now.
    pub fn look(&mut self, dir: Id, dir_ino: Ino, name: &[u8]) -> Result<Option<(Id, Ino)>, Failure> {
        let overlay = self.overlay();
        let got = self.machine.run(overlay.lookup(dir_ino, name));
        let Some(found) = self.judge(got, Ok(())).map_err(|e| format!("lookup {}: {e}", name.escape_ascii()))? else {
            return Ok(None);
        };
        match (found, self.model.find(dir, name)) {
            (Lookup::Negative { .. }, None) => Ok(None),
            (Lookup::Found(entry), Some(id)) => {
                overlay.forget(entry.attr.ino, 1);
                self.meet(id, &entry).map_err(|e| format!("{}: {e}", name.escape_ascii()))?;
                Ok(Some((id, entry.attr.ino)))
            }
            (Lookup::Found(entry), None) => Err(format!("{} exists: {entry:?}", name.escape_ascii())),
            (Lookup::Negative { .. }, Some(_)) => Err(format!("{} does not exist", name.escape_ascii())),
        }
    }

    /// Returns the object of a spot on both sides.
    pub fn target(&mut self, at: Spot) -> Result<Option<(Id, Ino)>, Failure> {
        let Some(place) = self.place(at)? else { return Ok(None) };
        self.look(place.dir, place.dir_ino, place.name)
    }

    /// Returns the object of a spot if it is a file.
    pub fn file(&mut self, at: Spot) -> Result<Option<(Id, Ino)>, Failure> {
        Ok(self.target(at)?.filter(|(id, _)| self.model.node(*id).kind() == FileKind::File))
    }

    /// Checks that an entry of the engine is an object of the model, and notes its inode.
    pub fn meet(&mut self, id: Id, entry: &Entry) -> Result<(), Failure> {
        let ino = entry.attr.ino;
        match self.model.node(id).ino {
            None => {
                if let Some((other, _)) = self.model.nodes.iter().find(|(_, n)| n.ino == Some(ino)) {
                    return Err(format!("{ino} is object {other} of the model already, not {id}"));
                }
                self.model.node_mut(id).ino = Some(ino);
            }
            Some(known) if known == ino => {}
            Some(known) => return Err(format!("it became {ino} from {known}")),
        }
        self.same_attr(id, &entry.attr)
    }

    pub fn same_attr(&self, id: Id, attr: &Attr) -> Result<(), Failure> {
        let node = self.model.node(id);
        let differs = |what: &str, is: String, right: String| Err(format!("{what} is {is} instead of {right}"));
        if attr.kind != node.kind() {
            return differs("kind", format!("{:?}", attr.kind), format!("{:?}", node.kind()));
        }
        if attr.mode != node.mode && node.kind() != FileKind::Symlink {
            return differs("mode", format!("{:o}", attr.mode), format!("{:o}", node.mode));
        }
        let nlink = if node.kind() == FileKind::Directory { self.model.dir_nlink(id) } else { node.nlink };
        // Subdirectories that other clients made count once the directory is listed again.
        let counted = node.kind() != FileKind::Directory || !self.shared();
        // Names of other clients that local names hide count, too.
        let hidden = self.shared() && attr.nlink > nlink;
        if counted && attr.nlink != nlink && !hidden {
            return differs("nlink", attr.nlink.to_string(), nlink.to_string());
        }
        let size = match &node.body {
            Body::File(content) => Some(content.len() as u64),
            Body::Symlink(target) => Some(target.len() as u64),
            Body::Dir(_) => None,
        };
        if size.is_some_and(|size| attr.size != size) {
            return differs("size", attr.size.to_string(), format!("{size:?}"));
        }
        match node.mtime {
            Some(mtime) if node.kind() == FileKind::File && attr.mtime != mtime => {
                differs("mtime", format!("{:?}", attr.mtime), format!("{mtime:?}"))
            }
            _ => self.model.node(id).modified_at(attr.mtime),
        }
    }

    pub fn hold(&mut self, handle: Handle) -> Result<(), Failure> {
        if self.handles.len() >= MAX_HANDLES {
            let first = self.handles.remove(0);
            self.end_handle(first)?;
        }
        self.handles.push(handle);
        Ok(())
    }

    pub fn handle_at(&self, number: u8) -> Option<usize> {
        (!self.handles.is_empty()).then(|| number as usize % self.handles.len())
    }
}

fn mode_of(how: Exchange) -> RenameMode {
    match how {
        Exchange::Replace => RenameMode::Replace,
        Exchange::NoReplace => RenameMode::NoReplace,
        Exchange::Swap => RenameMode::Exchange,
    }
}
