//! Sends invalidations to the kernel.
//!
//! For an invalidation the kernel takes locks that it may hold while it waits for an answer of the daemon. So no thread
//! that answers requests sends one. Two threads do: one for names and attributes, one for bytes (which may have to wait
//! for pages that are being read). The engine puts notes into bounded sets. Only the attributes of a file that is being
//! opened are invalidated at once: the kernel takes no lock for that, and after the answer it would be too late, since
//! the kernel reads no further than the size that it knows.

use std::collections::{HashSet, VecDeque};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use forebay_engine::{Ino, KernelCache};
use fuser::{INodeNo, Notifier};
use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;

use super::device::FuseDevice;
use super::iomode::IoModes;

/// Notes that may wait in one lane. Equal ones are one note. Beyond that, one note invalidates all names, and notes
/// about single inodes are dropped: what they would invalidate stays cached until its time to live is over.
const WAITING_MAX: usize = 64 << 10;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Note {
    Name(Ino, Box<[u8]>),
    /// The time for which a name may be kept is over.
    Expiry(Ino, Box<[u8]>),
    Attributes(Ino),
    Bytes(Ino),
    /// The bytes from this offset on.
    Tail(Ino, i64),
    AllNames,
}

/// The notes that one thread has to send.
#[derive(Default)]
struct NotifierLane {
    waiting: Mutex<NoteQueue>,
    filled: Condvar,
}

#[derive(Default)]
struct NoteQueue {
    order: VecDeque<Note>,
    known: HashSet<Note>,
    /// Channels that are notified when a note was sent.
    told: Vec<(Note, oneshot::Sender<()>)>,
    closed: bool,
}

impl NoteQueue {
    /// Adds a note, unless an equal one waits. Returns false if the lane is full.
    fn push(&mut self, note: Note) -> bool {
        if self.order.len() >= WAITING_MAX && note != Note::AllNames {
            return false;
        }
        if self.known.insert(note.clone()) {
            self.order.push_back(note);
        }
        true
    }

    /// Returns the next note, and the channels to notify once it was sent.
    fn pop(&mut self) -> Option<(Note, Vec<oneshot::Sender<()>>)> {
        let note = self.order.pop_front()?;
        self.known.remove(&note);
        let told = self.told.extract_if(.., |(of, _)| *of == note).map(|(_, told)| told).collect();
        Some((note, told))
    }

    /// Replaces all notes about names by one about all names.
    fn collapse_names(&mut self) {
        self.order.retain(|note| !matches!(note, Note::Name(..)));
        self.known.retain(|note| !matches!(note, Note::Name(..)));
        for (of, _) in &mut self.told {
            if matches!(of, Note::Name(..)) {
                *of = Note::AllNames;
            }
        }
        self.push(Note::AllNames);
    }
}

impl NotifierLane {
    fn push(&self, note: Note) {
        let mut waiting = self.waiting.lock();
        let is_name = matches!(note, Note::Name(..));
        if !waiting.push(note) {
            if is_name {
                waiting.collapse_names();
            } else {
                tracing::warn!("too many invalidations wait: an inode stays cached until its time to live is over");
            }
        }
        self.filled.notify_one();
    }

    /// As `push`; the receiver is notified once the note was sent. If the lane is full, the sender is dropped.
    fn push_and_tell(&self, note: Note) -> oneshot::Receiver<()> {
        let (tell, told) = oneshot::channel();
        let mut waiting = self.waiting.lock();
        if waiting.push(note.clone()) {
            waiting.told.push((note, tell));
        }
        self.filled.notify_one();
        told
    }

    /// Waits for the next note. Returns it with the channels to notify once it was sent; `None` once the lane is
    /// closed.
    fn next(&self) -> Option<(Note, Vec<oneshot::Sender<()>>)> {
        let mut waiting = self.waiting.lock();
        loop {
            if waiting.closed {
                waiting.told.clear();
                return None;
            }
            if let Some(note) = waiting.pop() {
                return Some(note);
            }
            self.filled.wait(&mut waiting);
        }
    }

    fn close(&self) {
        self.waiting.lock().closed = true;
        self.filled.notify_all();
    }
}

/// [`KernelCache`] of a mount. Dropping it ends its threads, without waiting for them.
pub struct KernelNotifier {
    names: Arc<NotifierLane>,
    bytes: Arc<NotifierLane>,
    modes: Arc<IoModes>,
    notifier: Notifier,
    device: FuseDevice,
    /// Single names must stay, so not all names may be forgotten.
    keeps_names: Arc<AtomicBool>,
}

impl KernelNotifier {
    pub fn new(notifier: Notifier, device: &FuseDevice, modes: Arc<IoModes>) -> io::Result<Self> {
        let (names, bytes) = (Arc::default(), Arc::default());
        let keeps_names = Arc::<AtomicBool>::default();
        let this = Self {
            names,
            bytes,
            modes,
            notifier: notifier.clone(),
            device: device.try_clone()?,
            keeps_names: keeps_names.clone(),
        };
        for (name, lane) in [("forebay-names", &this.names), ("forebay-bytes", &this.bytes)] {
            let (lane, notifier, device) = (Arc::clone(lane), notifier.clone(), device.try_clone()?);
            let keeps_names = keeps_names.clone();
            thread::Builder::new().name(name.to_owned()).spawn(move || {
                while let Some((note, told)) = lane.next() {
                    match note {
                        Note::AllNames if keeps_names.load(Ordering::Acquire) => {
                            tracing::warn!("too many invalidations wait: names stay cached until their time is over");
                        }
                        note => send(&notifier, &device, &note),
                    }
                    told.into_iter().for_each(|told| _ = told.send(()));
                }
            })?;
        }
        Ok(this)
    }

    /// Drops the kernel's pages of a directory. Waits for no lane: no reader holds such a page while it waits for an answer.
    pub fn drop_listing(&self, dir: Ino) {
        send(&self.notifier, &self.device, &Note::Bytes(dir));
    }
}

impl Drop for KernelNotifier {
    fn drop(&mut self) {
        self.names.close();
        self.bytes.close();
    }
}

impl KernelCache for KernelNotifier {
    fn invalidate_inode(&self, ino: Ino, data: bool) {
        if data {
            self.modes.drop_backing(ino);
            self.bytes.push(Note::Bytes(ino));
        } else {
            self.names.push(Note::Attributes(ino));
        }
    }

    fn invalidate_from(&self, ino: Ino, offset: u64) -> oneshot::Receiver<()> {
        // If the range begins within a page, the kernel drops the whole page.
        self.bytes.push_and_tell(Note::Tail(ino, i64::try_from(offset).unwrap_or(i64::MAX)))
    }

    fn release_content(&self, ino: Ino) {
        self.modes.drop_idle_backing(ino);
    }

    fn invalidate_attributes_now(&self, ino: Ino) {
        send(&self.notifier, &self.device, &Note::Attributes(ino));
    }

    fn invalidate_name(&self, parent: Ino, name: &[u8]) {
        self.names.push(Note::Name(parent, name.into()));
    }

    fn expire_name(&self, parent: Ino, name: &[u8]) -> oneshot::Receiver<()> {
        self.names.push_and_tell(Note::Expiry(parent, name.into()))
    }

    fn keep_names(&self, keep: bool) {
        self.keeps_names.store(keep, Ordering::Release);
    }

    fn invalidate_name_and_tell(&self, parent: Ino, name: &[u8]) -> oneshot::Receiver<()> {
        // If the lane is full, this note replaces those of all names.
        self.names.push(Note::Name(parent, name.into()));
        self.names.push_and_tell(Note::Name(parent, name.into()))
    }
}

/// Sends a note. For the kernel, a range that starts below zero means "attributes only", and length 0 means "to the
/// end".
fn send(notifier: &Notifier, device: &FuseDevice, note: &Note) {
    let sent = match note {
        Note::Name(parent, name) => notifier.inval_entry(INodeNo(parent.0), OsStr::from_bytes(name)),
        Note::Expiry(parent, name) => device.expire_name(*parent, name),
        Note::Attributes(ino) => notifier.inval_inode(INodeNo(ino.0), -1, 0),
        Note::Bytes(ino) => notifier.inval_inode(INodeNo(ino.0), 0, 0),
        Note::Tail(ino, from) => notifier.inval_inode(INodeNo(ino.0), *from, 0),
        Note::AllNames => device.forget_all_names(),
    };
    match sent {
        Ok(()) => {}
        // No fault: the directory is not cached, or the mount ends.
        Err(error)
            if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::ENODEV | libc::ENOTCONN)) => {}
        Err(error) => tracing::warn!(?note, %error, "the kernel did not accept an invalidation"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(lane: &NotifierLane) -> Option<Note> {
        lane.next().map(|(note, _)| note)
    }

    #[test]
    fn whoever_waits_for_a_note_is_told_of_that_one() {
        let lane = NotifierLane::default();
        let [mut first, mut second] = [1, 2].map(|ino| lane.push_and_tell(Note::Tail(Ino(ino), 5)));
        let (_, told) = lane.next().unwrap();
        told.into_iter().for_each(|told| told.send(()).unwrap());
        assert!(first.try_recv().is_ok() && second.try_recv().is_err());
    }

    #[test]
    fn equal_notes_are_sent_once() {
        let lane = NotifierLane::default();
        for _ in 0..3 {
            lane.push(Note::Attributes(Ino(1)));
            lane.push(Note::Name(Ino(1), b"a"[..].into()));
        }
        assert_eq!(next(&lane), Some(Note::Attributes(Ino(1))));
        lane.push(Note::Attributes(Ino(1)));
        assert_eq!(next(&lane), Some(Note::Name(Ino(1), b"a"[..].into())));
        assert_eq!(next(&lane), Some(Note::Attributes(Ino(1))), "what was sent may be needed again");
    }

    #[test]
    fn too_many_names_become_all_names() {
        let lane = NotifierLane::default();
        lane.push(Note::Bytes(Ino(9)));
        let mut told = lane.push_and_tell(Note::Name(Ino(1), b"waits"[..].into()));
        for at in 0..WAITING_MAX as u64 - 1 {
            lane.push(Note::Name(Ino(at), b"a"[..].into()));
        }
        assert_eq!(next(&lane), Some(Note::Bytes(Ino(9))));
        assert!(told.try_recv().is_err(), "nothing was sent yet");
        let (note, tell) = lane.next().unwrap();
        assert_eq!(note, Note::AllNames);
        tell.into_iter().for_each(|tell| tell.send(()).unwrap());
        assert!(told.try_recv().is_ok());
        assert!(lane.waiting.lock().order.is_empty());
        lane.close();
        assert_eq!(next(&lane), None);
    }
}
