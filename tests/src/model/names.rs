//! Operations on names and attributes.

use forebay_backends::{FileKind, RenameMode, Time};
use forebay_engine::{Change, Entry, SetTime};

use super::Failure;
use super::op::Spot;
use super::run::{CALLER, Handle, Place, Run};
use super::tree::{Body, Node, Refused, Tree};

const XATTRS: [&[u8]; 2] = [b"user.one", b"user.two"];

impl Run {
    pub fn create(&mut self, at: Spot, mode: u32, hold: bool) -> Result<(), Failure> {
        let Some(place) = self.place(at)? else { return Ok(()) };
        let overlay = self.overlay();
        let got = self.machine.run(overlay.create(place.dir_ino, place.name, mode, 0, libc::O_RDWR, CALLER));
        let node = Node::new(Body::File(Tree::empty()), mode);
        let Some((entry, opened)) = self.judge(got, self.free(place))? else { return Ok(()) };
        self.made(place, node, &entry)?;
        let id = self.model.find(place.dir, place.name).expect("just made");
        self.history.wrote(id, &Tree::empty());
        let handle = Handle { id, ino: entry.attr.ino, flags: libc::O_RDWR, opened };
        if hold { self.hold(handle) } else { self.end_handle(handle) }
    }

    fn free(&self, place: Place) -> Result<(), Refused> {
        match self.model.find(place.dir, place.name) {
            Some(_) => Err(vec![libc::EEXIST]),
            None => Ok(()),
        }
    }

    fn made(&mut self, place: Place, node: Node, entry: &Entry) -> Result<(), Failure> {
        let id = self.model.make(place.dir, place.name, node).expect("the name was free");
        self.meet(id, entry)
    }

    pub fn mkdir(&mut self, at: Spot) -> Result<(), Failure> {
        let Some(place) = self.place(at)? else { return Ok(()) };
        let overlay = self.overlay();
        let got = self.machine.run(overlay.mkdir(place.dir_ino, place.name, 0o755, 0, CALLER));
        let Some(entry) = self.judge(got, self.free(place))? else { return Ok(()) };
        overlay.forget(entry.attr.ino, 1);
        self.made(place, Node::new(Body::Dir(Default::default()), 0o755), &entry)
    }

    pub fn symlink(&mut self, at: Spot) -> Result<(), Failure> {
        let Some(place) = self.place(at)? else { return Ok(()) };
        let overlay = self.overlay();
        let target = format!("to-{}", self.tag()).into_bytes();
        let got = self.machine.run(overlay.symlink(place.dir_ino, place.name, &target, CALLER));
        let Some(entry) = self.judge(got, self.free(place))? else { return Ok(()) };
        overlay.forget(entry.attr.ino, 1);
        self.made(place, Node::new(Body::Symlink(target), 0o777), &entry)
    }

    pub fn link(&mut self, from: Spot, to: Spot) -> Result<(), Failure> {
        let Some((id, ino)) = self.target(from)? else { return Ok(()) };
        let Some(place) = self.place(to)? else { return Ok(()) };
        let overlay = self.overlay();
        let got = self.machine.run(overlay.link(ino, place.dir_ino, place.name));
        let right = self.model.clone().link(id, place.dir, place.name);
        let Some(entry) = self.judge(got, right)? else { return Ok(()) };
        overlay.forget(entry.attr.ino, 1);
        self.model.link(id, place.dir, place.name).expect("checked before");
        self.meet(id, &entry)
    }

    pub fn unlink(&mut self, at: Spot) -> Result<(), Failure> {
        let Some(place) = self.place(at)? else { return Ok(()) };
        let overlay = self.overlay();
        let got = self.machine.run(overlay.unlink(place.dir_ino, place.name));
        let right = self.model.clone().unlink(place.dir, place.name).map(drop);
        if self.judge(got, right)?.is_some() {
            let id = self.model.unlink(place.dir, place.name).expect("checked before");
            self.lost_name(id);
        }
        Ok(())
    }

    /// Records that the user removed a name of an object. With the last name the user gives up the content.
    fn lost_name(&mut self, id: usize) {
        let node = self.model.node(id);
        if let (0, Some(content)) = (node.nlink, node.content()) {
            self.effects.given_up(content);
        }
    }

    pub fn rmdir(&mut self, at: Spot) -> Result<(), Failure> {
        let Some(place) = self.place(at)? else { return Ok(()) };
        let overlay = self.overlay();
        let got = self.machine.run(overlay.rmdir(place.dir_ino, place.name));
        let right = self.model.clone().rmdir(place.dir, place.name);
        if self.judge(got, right)?.is_some() {
            self.model.rmdir(place.dir, place.name).expect("checked before");
        }
        Ok(())
    }

    pub fn rename(&mut self, from: Spot, to: Spot, mode: RenameMode) -> Result<(), Failure> {
        let Some(source) = self.place(from)? else { return Ok(()) };
        let Some(target) = self.place(to)? else { return Ok(()) };
        let overlay = self.overlay();
        let call = overlay.rename(source.dir_ino, source.name, target.dir_ino, target.name, mode);
        let got = self.machine.run(call);
        let (a, b) = ((source.dir, source.name), (target.dir, target.name));
        let right = self.model.clone().rename(a, b, mode).map(drop);
        if self.judge(got, right)?.is_some() {
            let replaced = self.model.rename(a, b, mode).expect("checked before");
            if let Some(replaced) = replaced.filter(|id| self.model.nodes.contains_key(id)) {
                self.lost_name(replaced);
            }
        }
        Ok(())
    }

    pub fn chmod(&mut self, at: Spot, mode: u32) -> Result<(), Failure> {
        let Some((id, ino)) = self.target(at)? else { return Ok(()) };
        if self.model.node(id).kind() == FileKind::Symlink {
            return Ok(());
        }
        let change = Change { mode: Some(mode), ..Change::default() };
        let overlay = self.overlay();
        let got = self.machine.run(overlay.setattr(ino, &change, CALLER));
        let Some((attr, _)) = self.judge(got, Ok(()))? else { return Ok(()) };
        self.model.node_mut(id).mode = mode;
        self.same_attr(id, &attr)
    }

    pub fn utimes(&mut self, at: Spot, secs: u32) -> Result<(), Failure> {
        let Some((id, ino)) = self.file(at)? else { return Ok(()) };
        let time = Time { secs: i64::from(secs) - 1000, nanos: secs % 1_000_000_000 };
        let change = Change { mtime: Some(SetTime::At(time)), ..Change::default() };
        let overlay = self.overlay();
        let got = self.machine.run(overlay.setattr(ino, &change, CALLER));
        let Some((attr, _)) = self.judge(got, Ok(()))? else { return Ok(()) };
        let node = self.model.node_mut(id);
        (node.mtime, node.not_before) = (Some(time), None);
        self.same_attr(id, &attr)
    }

    pub fn set_xattr(&mut self, at: Spot, name: u8, len: u8) -> Result<(), Failure> {
        let Some((id, ino)) = self.target(at)? else { return Ok(()) };
        if self.model.node(id).kind() == FileKind::Symlink {
            return Ok(());
        }
        let name = XATTRS[name as usize];
        let value = super::content::pattern(self.tag(), 0, len.into());
        let overlay = self.overlay();
        let got = self.machine.run(overlay.set_xattr(ino, name, &value, 0, CALLER));
        if self.judge(got, Ok(()))?.is_some() {
            self.model.node_mut(id).xattrs.insert(name.to_vec(), value);
        }
        Ok(())
    }

    pub fn remove_xattr(&mut self, at: Spot, name: u8) -> Result<(), Failure> {
        let Some((id, ino)) = self.target(at)? else { return Ok(()) };
        let name = XATTRS[name as usize];
        let overlay = self.overlay();
        let got = self.machine.run(overlay.remove_xattr(ino, name, CALLER));
        let known = self.model.node(id).xattrs.contains_key(name);
        let right = if known { Ok(()) } else { Err(vec![libc::ENODATA]) };
        if self.judge(got, right)?.is_some() {
            self.model.node_mut(id).xattrs.remove(name);
        }
        Ok(())
    }

    pub fn stat(&mut self, at: Spot) -> Result<(), Failure> {
        let Some((id, ino)) = self.target(at)? else { return Ok(()) };
        let overlay = self.overlay();
        let got = self.machine.run(overlay.getattr(ino));
        if let Some((attr, _)) = self.judge(got, Ok(()))? {
            self.same_attr(id, &attr)?;
        }
        if let Body::Symlink(target) = self.model.node(id).body.clone() {
            let got = self.machine.run(overlay.readlink(ino));
            if let Some(read) = self.judge(got, Ok(()))?.filter(|read| *read != target) {
                return Err(format!("the target is {}", read.escape_ascii()));
            }
        }
        let got = self.machine.run(overlay.list_xattrs(ino));
        let Some(names) = self.judge(got, Ok(()))? else { return Ok(()) };
        let right: Vec<Vec<u8>> = self.model.node(id).xattrs.keys().cloned().collect();
        if names != right {
            return Err(format!("{} extended attributes instead of {}", names.len(), right.len()));
        }
        Ok(())
    }

    pub fn list(&mut self, dir: u8) -> Result<(), Failure> {
        let Some(place) = self.place(Spot { dir, name: 0 })? else { return Ok(()) };
        let overlay = self.overlay();
        let got = self.machine.run(overlay.read_dir(place.dir_ino));
        let Some(snapshot) = self.judge(got, Ok(()))? else { return Ok(()) };
        let is: Vec<_> = snapshot.entries.iter().map(|e| (e.name.to_vec(), e.kind)).collect();
        let entries = self.model.entries(place.dir);
        let right: Vec<_> = entries.iter().map(|(name, id)| (name.clone(), self.model.node(*id).kind())).collect();
        if is != right {
            return Err(format!("lists {} instead of {}", listed(&is), listed(&right)));
        }
        Ok(())
    }
}

fn listed(entries: &[(Vec<u8>, FileKind)]) -> String {
    let names: Vec<String> = entries.iter().map(|(n, k)| format!("{} {k:?}", n.escape_ascii())).collect();
    format!("[{}]", names.join(", "))
}
