//! Operations on content, and requests of operators.

use std::os::unix::fs::FileExt;

use forebay_api::operator::{ContentState, ObjectKind};
use forebay_api::operator::{EvictRequest, FlushRequest, StageRequest};
use forebay_backends::{Error, ErrorKind, FileKind};
use forebay_engine::{Change, Ino, Seek, summary};

use super::Failure;
use super::config::Flushing;
use super::content::{self, describe};
use super::op::{Allocate, Spot};
use super::run::{CALLER, Handle, Run};
use super::tree::{Body, Id};

impl Run {
    fn open_at(&mut self, at: Spot, flags: i32) -> Result<Option<Handle>, Failure> {
        let Some((id, ino)) = self.target(at)? else { return Ok(None) };
        let right = match self.model.node(id).kind() {
            FileKind::File => Ok(()),
            FileKind::Directory => Err(vec![libc::EISDIR]),
            _ => Err(vec![libc::EINVAL]),
        };
        let overlay = self.overlay();
        let got = self.machine.run(overlay.open_file(ino, flags));
        let failed = got.is_err();
        let Some(opened) = self.judge(got, right.clone())? else {
            // O_TRUNC and the rest of an open are two steps, as in the kernel: the first may have succeeded.
            if failed && right.is_ok() && flags & libc::O_TRUNC != 0 {
                self.truncated_or_not(id, ino)?;
            }
            return Ok(None);
        };
        if flags & libc::O_TRUNC != 0 {
            self.wrote(id, content::truncated(&self.content_of(id), 0));
        }
        if flags & libc::O_ACCMODE != libc::O_RDONLY {
            self.history.touched(id);
        }
        Ok(Some(Handle { id, ino, flags, opened }))
    }

    fn truncated_or_not(&mut self, id: Id, ino: Ino) -> Result<(), Failure> {
        if self.content_of(id).is_empty() {
            // An empty file looks the same either way.
            return Ok(());
        }
        let overlay = self.overlay();
        if self.machine.run(overlay.getattr(ino)).is_ok_and(|(attr, _)| attr.size == 0) {
            self.wrote(id, content::truncated(&self.content_of(id), 0));
        }
        Ok(())
    }

    pub fn open(&mut self, at: Spot, write: bool, truncate: bool) -> Result<(), Failure> {
        let access = if write { libc::O_RDWR } else { libc::O_RDONLY };
        let flags = access | if write && truncate { libc::O_TRUNC } else { 0 };
        match self.open_at(at, flags)? {
            Some(handle) => self.hold(handle),
            None => Ok(()),
        }
    }

    pub fn close(&mut self, number: u8) -> Result<(), Failure> {
        let Some(index) = self.handle_at(number) else { return Ok(()) };
        let handle = self.handles.remove(index);
        self.end_handle(handle)
    }

    /// `close(2)`: the flush that the policy requires, then the release.
    pub fn end_handle(&mut self, handle: Handle) -> Result<(), Failure> {
        let overlay = self.overlay();
        let got = self.machine.run(overlay.close(handle.ino, handle.writes()));
        let flushes = handle.writes() && self.machine.config.flushing == Flushing::OnClose;
        self.history.ahead |= flushes;
        self.outdated |= handle.writes() && self.shared();
        let right = match got {
            // Another client writes the file at the same time, or removed it while it was open.
            Err(e) if e.is(ErrorKind::Stale) && self.shared() => Ok(None),
            // In the pool, its name still belongs to a removed file that is open for writing, or too large for the fast
            // pool.
            Err(e) if !self.handles.is_empty() && e.to_string().contains("removed when it is closed") => Ok(None),
            got => self.judge(got, Ok(())).map_err(|e| format!("close: {e}")),
        };
        let acknowledged = right?.is_some();
        overlay.release(handle.ino, handle.flags);
        // Runs the work that the release left to the runtime.
        self.machine.run(async { tokio::task::yield_now().await });
        let named = self.model.nodes.get(&handle.id).is_some_and(|n| n.nlink > 0);
        if flushes && acknowledged && named {
            self.history.acknowledged(handle.id);
        }
        Ok(())
    }

    pub fn content_of(&self, id: Id) -> content::Content {
        self.model.node(id).content().expect("a file").clone()
    }

    /// Records that the user changed a file's content.
    pub fn wrote(&mut self, id: Id, new: content::Content) {
        let old = self.content_of(id);
        if self.model.node(id).nlink > 0 {
            self.effects.replaced(&old, &new);
        } else {
            self.effects.seen(&new);
        }
        self.model.set_content(id, new, (!self.clock_set).then_some(self.began));
        self.history.wrote(id, &old);
    }

    /// Judges like [`Run::judge`] the result of an operation on the bytes of an open file. If another client removed or
    /// replaced the file, bytes that were never fetched may be lost: the engine may return `ESTALE`.
    fn judge_open<T>(&self, id: Id, got: Result<T, Error>) -> Result<Option<T>, Failure> {
        let gone = self.shared() && self.model.node(id).nlink == 0;
        match got {
            Err(e) if gone && e.is(ErrorKind::Stale) => Ok(None),
            got => self.judge(got, Ok(())),
        }
    }

    pub fn write(&mut self, number: u8, offset: u32, len: u32, direct: bool) -> Result<(), Failure> {
        let Some(index) = self.handle_at(number) else { return Ok(()) };
        if !self.handles[index].writes() {
            return Ok(());
        }
        let handle = self.handles.remove(index);
        let done = self.write_through(&handle, offset, len, direct);
        self.handles.insert(index, handle);
        done
    }

    fn write_through(&mut self, handle: &Handle, offset: u32, len: u32, direct: bool) -> Result<(), Failure> {
        let data = content::pattern(self.tag(), offset.into(), len as usize);
        if data.is_empty() {
            return Ok(());
        }
        match &handle.opened.resident {
            Some(resident) if direct => {
                resident.file.write_all_at(&data, offset.into()).map_err(|e| e.to_string())?;
                self.unreserved = true;
            }
            _ => {
                let overlay = self.overlay();
                let got = self.machine.run(overlay.write(handle.ino, offset.into(), data.clone().into()));
                match self.judge_open(handle.id, got)? {
                    Some(n) if n as usize == data.len() => {}
                    Some(n) => return Err(format!("{n} of {} bytes were written", data.len())),
                    None => return Ok(()),
                }
            }
        }
        let new = content::written(&self.content_of(handle.id), offset.into(), &data);
        self.wrote(handle.id, new);
        Ok(())
    }

    pub fn read(&mut self, number: u8, offset: u32, len: u32, direct: bool) -> Result<(), Failure> {
        let Some(index) = self.handle_at(number) else { return Ok(()) };
        let handle = &self.handles[index];
        let (id, ino) = (handle.id, handle.ino);
        let right = self.content_of(id);
        let (from, to) = ((offset as usize).min(right.len()), (offset as usize + len as usize).min(right.len()));
        let right = &right[from..to];
        let is = match &handle.opened.resident {
            Some(resident) if direct => {
                let mut buffer = vec![0; len as usize];
                let n = resident.file.read_at(&mut buffer, offset.into()).map_err(|e| e.to_string())?;
                buffer.truncate(n);
                buffer
            }
            _ => {
                let overlay = self.overlay();
                let got = self.machine.run(overlay.read(ino, offset.into(), len));
                // Wrong bytes are never right; an error may be.
                let Some(bytes) = self.judge_open(id, got)? else { return Ok(()) };
                bytes.to_vec()
            }
        };
        if is != right {
            return Err(format!("read {} instead of {}", describe(&is), describe(right)));
        }
        Ok(())
    }

    pub fn truncate_open(&mut self, number: u8, size: u32) -> Result<(), Failure> {
        let Some(index) = self.handle_at(number) else { return Ok(()) };
        let handle = &self.handles[index];
        if !handle.writes() {
            return Ok(());
        }
        let (id, ino) = (handle.id, handle.ino);
        self.resize(id, ino, size)
    }

    pub fn truncate(&mut self, at: Spot, size: u32) -> Result<(), Failure> {
        match self.file(at)? {
            Some((id, ino)) => self.resize(id, ino, size),
            None => Ok(()),
        }
    }

    fn resize(&mut self, id: Id, ino: Ino, size: u32) -> Result<(), Failure> {
        let change = Change { size: Some(size.into()), ..Change::default() };
        let overlay = self.overlay();
        let got = self.machine.run(overlay.setattr(ino, &change, CALLER));
        let failed = got.is_err();
        match self.judge_open(id, got)? {
            Some((attr, _)) => {
                self.wrote(id, content::truncated(&self.content_of(id), size.into()));
                self.same_attr(id, &attr)
            }
            None if failed && size == 0 => self.truncated_or_not(id, ino),
            None => Ok(()),
        }
    }

    pub fn write_at(&mut self, at: Spot, offset: u32, len: u32, direct: bool) -> Result<(), Failure> {
        let Some(handle) = self.open_at(at, libc::O_RDWR)? else { return Ok(()) };
        let done = self.write_through(&handle, offset, len, direct);
        let closed = self.end_handle(handle);
        done.and(closed)
    }

    pub fn read_all(&mut self, at: Spot) -> Result<(), Failure> {
        let Some((id, ino)) = self.file(at)? else { return Ok(()) };
        let overlay = self.overlay();
        let got = self.machine.run(super::view::content(&overlay, ino));
        let Some(is) = self.judge(got, Ok(()))? else { return Ok(()) };
        let right = self.content_of(id);
        if is != right {
            return Err(format!("read {} instead of {}", describe(&is), describe(&right)));
        }
        Ok(())
    }

    /// Checks that holes read as zeros, and that the last hole is at the end of the file.
    pub fn holes(&mut self, at: Spot) -> Result<(), Failure> {
        let Some((id, ino)) = self.file(at)? else { return Ok(()) };
        let right = self.content_of(id);
        let overlay = self.overlay();
        let mut offset = 0;
        while offset < right.len() as u64 {
            let data = match self.machine.run(overlay.seek(ino, offset, Seek::Data)) {
                Err(e) if e.errno() == libc::ENXIO => right.len() as u64,
                got => match self.judge(got, Ok(()))? {
                    Some(data) => data,
                    None => return Ok(()),
                },
            };
            if right[offset as usize..(data as usize).min(right.len())].iter().any(|byte| *byte != 0) {
                return Err(format!("a hole from {offset} to {data} of {}", describe(&right)));
            }
            if data >= right.len() as u64 {
                return Ok(());
            }
            let got = self.machine.run(overlay.seek(ino, data, Seek::Hole));
            let Some(hole) = self.judge(got, Ok(()))? else { return Ok(()) };
            if hole <= data || hole > right.len() as u64 {
                return Err(format!("data from {data} to {hole} of {} bytes", right.len()));
            }
            offset = hole;
        }
        Ok(())
    }

    pub fn allocate(&mut self, number: u8, offset: u32, len: u32, how: Allocate) -> Result<(), Failure> {
        let Some(index) = self.handle_at(number) else { return Ok(()) };
        let handle = &self.handles[index];
        if !handle.writes() || len == 0 {
            return Ok(());
        }
        let (id, ino) = (handle.id, handle.ino);
        let mode = match how {
            Allocate::Grow => 0,
            Allocate::KeepSize => libc::FALLOC_FL_KEEP_SIZE,
            Allocate::PunchHole => libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
        };
        let overlay = self.overlay();
        let got = self.machine.run(overlay.fallocate(ino, mode, offset.into(), len.into()));
        if self.judge_open(id, got)?.is_none() {
            return Ok(());
        }
        let old = self.content_of(id);
        let (from, to) = (offset as usize, offset as usize + len as usize);
        let new = match how {
            Allocate::Grow if to > old.len() => content::truncated(&old, to as u64),
            Allocate::Grow | Allocate::KeepSize => old,
            Allocate::PunchHole => {
                let end = to.min(old.len());
                content::written(&old, from.min(end) as u64, &vec![0; end.saturating_sub(from)])
            }
        };
        self.wrote(id, new);
        Ok(())
    }

    pub fn fsync(&mut self, at: Spot) -> Result<(), Failure> {
        match self.file(at)? {
            Some((id, ino)) => self.sync(id, ino),
            None => Ok(()),
        }
    }

    pub fn fsync_open(&mut self, number: u8) -> Result<(), Failure> {
        let Some(index) = self.handle_at(number) else { return Ok(()) };
        let (id, ino) = (self.handles[index].id, self.handles[index].ino);
        self.sync(id, ino)
    }

    fn sync(&mut self, id: Id, ino: Ino) -> Result<(), Failure> {
        let overlay = self.overlay();
        let got = self.machine.run(overlay.fsync(ino, false));
        if self.judge(got, Ok(()))?.is_some() {
            self.history.synced(&self.model, Some(id));
        }
        Ok(())
    }

    fn path_of(&self, at: Spot) -> String {
        let dirs = self.model.dirs();
        let (dir, path) = &dirs[at.dir as usize % dirs.len()];
        let names: Vec<&Vec<u8>> = self.model.entries(*dir).keys().collect();
        let mut path: Vec<String> = path.iter().map(|n| String::from_utf8_lossy(n).into_owned()).collect();
        if !names.is_empty() {
            path.push(String::from_utf8_lossy(names[at.name as usize % names.len()]).into_owned());
        }
        path.join("/")
    }

    fn is_link(&self, at: Spot) -> bool {
        let dirs = self.model.dirs();
        let entries = self.model.entries(dirs[at.dir as usize % dirs.len()].0);
        let found = (!entries.is_empty()).then(|| entries.values().nth(at.name as usize % entries.len()));
        found.flatten().is_some_and(|id| self.model.node(*id).kind() == FileKind::Symlink)
    }

    pub fn stage(&mut self, at: Spot) -> Result<(), Failure> {
        let path = self.path_of(at);
        let request = StageRequest { paths: vec![path.clone()], lease_owner: "job".into(), ..Default::default() };
        let overlay = self.overlay();
        let (done, failures) = self.machine.run(async { summary(overlay.stage(request)).await });
        if done.failed > 0 {
            let limited = self.machine.config.limit_bytes.is_some();
            // Symbolic links of the model lead nowhere.
            let is_link = failures.iter().all(|(_, why)| why.contains("it is a symbolic link"));
            return match self.trouble || limited || (is_link && self.is_link(at)) {
                true => Ok(()),
                false => Err(format!("stage {path}: {:?} {failures:?}", done.message)),
            };
        }
        let Some(root) = forebay_backends::PoolPath::parse(&path) else { return Ok(()) };
        let listed = self.machine.run(overlay.list_residency(&root, true)).unwrap_or_default();
        for file in listed.iter().filter(|f| f.kind == ObjectKind::File) {
            if !matches!(file.state, ContentState::Resident | ContentState::Dirty) || file.lease_owner.is_none() {
                return Err(format!("staged, but {file:?}"));
            }
        }
        Ok(())
    }

    pub fn evict(&mut self, all: bool, at: Spot, release: bool) -> Result<(), Failure> {
        let path = if all { String::new() } else { self.path_of(at) };
        let request = EvictRequest { paths: vec![path.clone()], release_leases: release, dry_run: false };
        let overlay = self.overlay();
        let (done, failures) = self.machine.run(async { summary(overlay.evict(request)).await });
        // A removed file that is open for writing, or too large for the fast pool, keeps its name in the pool until it
        // is closed.
        let waits =
            !self.handles.is_empty() && failures.iter().all(|(_, why)| why.contains("removed when it is closed"));
        if done.failed > 0 && !self.trouble && !waits {
            return Err(format!("evict {path}: {:?} {failures:?}", done.message));
        }
        Ok(())
    }

    pub fn flush(&mut self, all: bool, at: Spot, wait: bool) -> Result<(), Failure> {
        let path = if all { None } else { Some(self.path_of(at)) };
        // If other clients change the pool, the effects of a background flush cannot be told from their changes.
        let wait = wait || self.shared();
        let request = FlushRequest { paths: path.iter().cloned().collect(), wait, dry_run: false };
        let overlay = self.overlay();
        let (done, failures) = self.machine.run(async { summary(overlay.flush(request)).await });
        self.outdated |= self.shared();
        self.history.ahead |= !wait || !all || done.failed > 0;
        // A removed file that is open for writing, or too large for the fast pool, keeps its name in the pool until it
        // is closed.
        let waits =
            !self.handles.is_empty() && failures.iter().all(|(_, why)| why.contains("removed when it is closed"));
        if done.failed > 0 && !self.trouble && !waits {
            return Err(format!("flush {path:?}: {:?} {failures:?}", done.message));
        }
        if done.failed == 0 && wait {
            match path.filter(|p| !p.is_empty()) {
                None => self.history.flushed(&self.model),
                Some(path) => {
                    let id = self.model.paths().get(path.as_bytes()).copied();
                    if let Some(id) = id.filter(|id| matches!(self.model.node(*id).body, Body::File(_))) {
                        self.history.acknowledged(id);
                    }
                }
            }
        }
        Ok(())
    }
}
