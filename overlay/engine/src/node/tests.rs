//! Random steps on what is known of a content file, compared with a file and a pool copy that are modelled.

use std::sync::atomic::{AtomicU64, Ordering};

use forebay_backends::{FileKind, Stat, Time, Version};
use forebay_cache::Stamp;
use forebay_catalog::InodeRecord;
use proptest::collection::vec;
use proptest::prelude::*;

use super::{Attachment, Bypass, DirtyContent, FileOpens};

/// Returns the record of a file that the pool has.
pub(crate) fn file_of_pool(size: u64) -> InodeRecord {
    InodeRecord::from_pool(&stat_of_file(size), None)
}

fn stat_of_file(size: u64) -> Stat {
    let time = Time { secs: 1, nanos: 0 };
    Stat {
        kind: FileKind::File,
        mode: 0o644,
        uid: 0,
        gid: 0,
        nlink: 1,
        rdev: 0,
        size,
        occupied: None,
        atime: time,
        mtime: time,
        ctime: time,
        version: Version::Tag { etag: String::new(), id: String::new(), size, mtime: time },
    }
}

#[derive(Debug, Clone)]
enum Step {
    /// `write`, `direct`, and whether it reads or writes without the daemon.
    Open(bool, bool, bool),
    /// Ends the open with this number, or one that is not known.
    Close(usize),
    /// The daemon writes.
    Write,
    /// A program writes without the daemon.
    WritePast,
    /// An upload. `settled`: no write can hide behind the stamp that it took.
    Upload {
        settled: bool,
    },
    SetId,
    Stop {
        works: bool,
    },
    Resume {
        works: bool,
    },
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (any::<bool>(), any::<bool>(), any::<bool>()).prop_map(|(w, d, b)| Step::Open(w, d, b)),
        4 => (0usize..5).prop_map(Step::Close),
        2 => Just(Step::Write),
        2 => Just(Step::WritePast),
        2 => any::<bool>().prop_map(|settled| Step::Upload { settled }),
        1 => Just(Step::SetId),
        2 => any::<bool>().prop_map(|works| Step::Stop { works }),
        1 => any::<bool>().prop_map(|works| Step::Resume { works }),
    ]
}

/// A file that the engine would keep, and what is true of it.
#[derive(Default)]
struct World {
    opens: FileOpens,
    bypass: Bypass,
    dirty: DirtyContent,
    all: AtomicU64,
    /// The opens of programs: `write`, `direct`, and whether it reads or writes without the daemon.
    programs: Vec<(bool, bool, bool)>,
    is_dirty: bool,
    is_immutable: bool,
    /// Versions of the content and of the pool's copy.
    content: u64,
    in_pool: u64,
    set_id: Option<u64>,
}

/// The stamp of a version of the content.
fn stamp(version: u64) -> Stamp {
    Stamp { size: version, ..Stamp::default() }
}

impl World {
    fn step(&mut self, step: Step) {
        match step {
            Step::Open(write, direct, bypasses) => {
                self.opens.add(write, direct, &self.all);
                self.programs.push((write, direct, bypasses));
                if write {
                    if bypasses {
                        self.bypass.open();
                        self.opens.note_bypass();
                    }
                    self.mark();
                } else if bypasses {
                    self.opens.note_passthrough();
                }
            }
            Step::Close(which) if which < self.programs.len() => {
                let (write, ..) = self.programs.swap_remove(which);
                self.opens.remove(write, &self.all);
                if write && !self.opens.has_writer() {
                    self.settle();
                }
            }
            Step::Close(_) => {
                // A release of an open that an earlier daemon counted.
                if self.programs.is_empty() {
                    self.opens.remove(true, &self.all);
                    self.opens.remove(false, &self.all);
                }
            }
            Step::Write => {
                self.opens.begin_change();
                assert!(self.opens.has_writer());
                self.mark();
                self.content += 1;
                self.dirty.forget_pool_copy();
                self.opens.end_change();
                if !self.opens.has_writer() {
                    self.settle();
                }
            }
            Step::WritePast => {
                let bypasses = self.programs.iter().any(|(write, _, bypasses)| *write && *bypasses);
                if bypasses && !self.is_immutable {
                    assert!(matches!(self.bypass, Bypass::Writing(_)) && self.is_dirty);
                    self.content += 1;
                }
            }
            Step::Upload { settled } if self.is_dirty => {
                self.in_pool = self.content;
                let known = settled.then(|| stamp(self.content));
                self.dirty.uploaded(known);
                assert_eq!((self.dirty.uploaded_stamp(), self.dirty.pool_stamp()), (known, known));
                if !self.opens.has_writer() {
                    self.clean();
                }
            }
            Step::Upload { .. } => {}
            Step::SetId => {
                self.bypass.note_set_id(Some((self.content, Time::default())));
                self.set_id = (!self.bypass.is_none()).then_some(self.content);
            }
            Step::Stop { works } => {
                let was = self.bypass;
                let immutable = &mut self.is_immutable;
                let stopped = self.bypass.stop(|on| set(immutable, on, works));
                assert_eq!(stopped, works && matches!(was, Bypass::Writing(_)));
            }
            Step::Resume { works } => {
                let immutable = &mut self.is_immutable;
                self.bypass.resume(|on| set(immutable, on, works));
            }
        }
    }

    /// Marks the content dirty, as each writer does first.
    fn mark(&mut self) {
        if !self.is_dirty {
            self.is_dirty = true;
            self.dirty.marked(stamp(self.content));
            assert!(!self.dirty.is_durable() && self.dirty.is_unwritten(stamp(self.content)));
        }
        self.dirty.synced();
        assert!(self.dirty.is_durable());
    }

    /// The last writer closed.
    fn settle(&mut self) {
        if self.is_dirty && self.dirty.pool_stamp() == Some(stamp(self.content)) {
            self.clean();
        }
        self.end_bypass(true);
    }

    fn clean(&mut self) {
        assert_eq!(self.content, self.in_pool, "what is clean is what the pool has");
        self.is_dirty = false;
        self.dirty.forget_pool_copy();
        self.end_bypass(true);
    }

    fn end_bypass(&mut self, works: bool) {
        let immutable = &mut self.is_immutable;
        if self.bypass.end(|on| set(immutable, on, works)) {
            self.set_id = None;
        }
    }

    fn check(&self) {
        let count = |wanted: bool| self.programs.iter().filter(|(write, ..)| *write == wanted).count();
        assert_eq!(self.all.load(Ordering::Relaxed), self.programs.len() as u64);
        assert_eq!(self.opens.any(), !self.programs.is_empty());
        assert_eq!(self.opens.has_writer(), count(true) > 0);
        if count(true) == 0 {
            assert!(!self.opens.writes_direct() && self.bypass.is_none());
        } else {
            assert!(self.is_dirty, "a writer may write at any time");
        }
        let past = |wanted: bool| self.programs.iter().any(|(write, _, past)| *past && (*write || !wanted));
        assert!(self.opens.may_bypass() || !past(true), "its writes are not seen");
        assert!(self.opens.may_pass_through() || !past(false), "its content file is in use");
        assert!(!self.opens.may_bypass() || count(true) > 0);
        assert!(!self.opens.may_pass_through() || !self.programs.is_empty());
        let direct = self.programs.iter().any(|(write, direct, _)| *write && *direct);
        assert!(self.opens.writes_direct() || !direct);
        assert_eq!(self.is_immutable, matches!(self.bypass, Bypass::Stopped(_)), "nothing stays immutable");
        assert_eq!(self.bypass.set_id_since().map(|(version, _)| version), self.set_id);
        // A known stamp never says that the pool has what it does not have.
        if self.dirty.pool_stamp() == Some(stamp(self.content)) {
            assert_eq!(self.content, self.in_pool);
        }
        if self.dirty.uploaded_stamp().is_some() {
            assert_eq!(self.dirty.uploaded_stamp(), self.dirty.pool_stamp());
            assert!(self.is_dirty);
        }
    }
}

/// Sets or clears the immutable flag, if that works.
fn set(immutable: &mut bool, on: bool, works: bool) -> bool {
    if works {
        *immutable = on;
    }
    works
}

proptest! {
    #[test]
    fn what_is_known_of_a_content_file_is_true(steps in vec(steps(), 1..60)) {
        let mut world = World::default();
        for step in steps {
            world.step(step);
            world.check();
        }
    }
}

/// If the flag cannot be cleared, the writers count as stopped until it can.
#[test]
fn a_file_whose_writers_are_gone_does_not_stay_immutable() {
    let mut bypass = Bypass::default();
    bypass.open();
    assert!(bypass.stop(|_| true));
    assert!(!bypass.end(|_| false));
    assert_eq!(bypass, Bypass::Stopped(None));
    assert!(bypass.end(|on| !on));
    assert!(bypass.is_none());
}

#[test]
fn a_deleted_inode_stays_deleted() {
    let mut attachment = Attachment::default();
    attachment.supersede();
    assert_eq!(attachment, Attachment::Superseded);
    attachment = Attachment::Deleted;
    attachment.supersede();
    assert_eq!(attachment, Attachment::Deleted);
}

#[test]
fn a_size_that_no_file_of_linux_has_is_cut() {
    let largest = i64::MAX as u64;
    for (reported, is) in [(largest - 1, largest - 1), (largest, largest), (largest + 1, largest), (u64::MAX, largest)]
    {
        let mut record = file_of_pool(reported);
        assert_eq!(record.size, is);
        record.size = 1;
        record.take_attrs(&stat_of_file(reported));
        assert_eq!(record.size, is);
    }
}
