//! Crashes. A crash of the process loses nothing; a crash of the machine loses what was not acknowledged.

use std::collections::{HashMap, HashSet};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use forebay_api::operator::ContentState;
use forebay_backends::PoolPath;

use super::Failure;
use super::check::{Compared, same_but};
use super::config::World;
use super::content::Content;
use super::run::Run;
use super::tree::{Id, Node, Tree};
use super::view;

/// The acknowledged contents, and the moments to which a power cut may return.
#[derive(Debug, Default)]
pub struct History {
    /// The model at the last sync, and after every operation since then.
    moments: Vec<Tree>,
    /// Files that were written after their last acknowledgement.
    unsafe_files: HashSet<Id>,
    /// The content of those files that is certainly on the device.
    acknowledged: HashMap<Id, Content>,
    /// Files that were opened for writing. The engine syncs their earlier content, so a power cut returns to it.
    touched: HashSet<Id>,
    /// A flush may have changed the pool without an acknowledgement: the pool may be newer than the catalog.
    pub ahead: bool,
}

impl History {
    pub fn wrote(&mut self, id: Id, before: &Content) {
        if self.unsafe_files.insert(id) {
            self.acknowledged.insert(id, before.clone());
        }
        self.touched.insert(id);
    }

    pub fn touched(&mut self, id: Id) {
        self.touched.insert(id);
    }

    /// Records that the bytes of a file survive a power cut.
    pub fn acknowledged(&mut self, id: Id) {
        self.unsafe_files.remove(&id);
    }

    /// Records that everything is in the pool.
    pub fn flushed(&mut self, model: &Tree) {
        self.unsafe_files.clear();
        self.moments = vec![model.clone()];
    }

    /// Records that the catalog, and the content of `file`, are on the device.
    pub fn synced(&mut self, model: &Tree, file: Option<Id>) {
        if let Some(id) = file {
            self.unsafe_files.remove(&id);
        }
        self.moments = vec![model.clone()];
    }

    pub fn moment(&mut self, model: &Tree) {
        self.moments.push(model.clone());
    }
}

impl Run {
    pub fn crash(&mut self) -> Result<(), Failure> {
        let trouble = self.trouble;
        self.handles.clear();
        self.model.sweep(&[]);
        if self.machine.config.world == World::PowerCuts {
            return self.power_cut();
        }
        self.machine.crash(|_| {}).map_err(|e| format!("start after a kill: {e}"))?;
        self.trouble = trouble;
        self.outdated |= self.shared();
        Ok(())
    }

    fn power_cut(&mut self) -> Result<(), Failure> {
        self.heal();
        // The program that read a directory does not survive the power cut.
        self.reading = None;
        let fates = self.fates();
        let touched: HashSet<_> =
            self.history.touched.drain().filter_map(|id| self.model.nodes.get(&id)?.ino).collect();
        self.machine
            .crash(|fast| damage(&fast.join("content"), &fates))
            .map_err(|e| format!("start after a power cut: {e}"))?;
        let overlay = self.overlay();
        let shown = self.machine.run(view::shown(&overlay)).map_err(|e| format!("after a power cut: {e}"))?;
        let compared = Compared { contents: true, mtimes: false };
        let unsafe_files = std::mem::take(&mut self.history.unsafe_files);
        let mut why = String::new();
        let found = self.history.moments.iter().rev().any(|moment| {
            match same_but(&shown, moment, compared, |id| unsafe_files.contains(&id)) {
                Ok(()) => true,
                Err(e) => {
                    if why.is_empty() {
                        why = e;
                    }
                    false
                }
            }
        });
        if !found && !self.history.ahead {
            return Err(format!(
                "after a power cut it is as at no moment since the last sync; seen from the last: {why}"
            ));
        }
        self.history.ahead = false;
        self.model = shown;
        for node in self.model.nodes.values_mut() {
            (node.mtime, node.not_before) = (None, None);
        }
        // This state was read back from the devices.
        self.history.moments = vec![self.model.clone()];
        self.history.acknowledged.clear();
        let was_touched = |(id, node): (&Id, &Node)| node.ino.is_some_and(|ino| touched.contains(&ino)).then_some(*id);
        self.history.touched = self.model.nodes.iter().filter_map(was_touched).collect();
        Ok(())
    }

    /// Decides how the power cut damages content files, by their numbers.
    fn fates(&mut self) -> HashMap<u64, Fate> {
        let overlay = self.overlay();
        let listed = self.machine.run(overlay.list_residency(&PoolPath::root(), true)).unwrap_or_default();
        let states: HashMap<String, ContentState> = listed.into_iter().map(|f| (f.path, f.state)).collect();
        let mut fates = HashMap::new();
        for (path, id) in self.model.paths() {
            let Some(ino) = self.model.node(id).ino else { continue };
            let state = states.get(&format!("/{}", path.escape_ascii()));
            if !matches!(state, Some(ContentState::Resident | ContentState::Dirty)) {
                continue;
            }
            let Ok(opened) = self.machine.run(overlay.open_file(ino, libc::O_RDONLY)) else { continue };
            let Some(resident) = opened.resident else { continue };
            if self.history.unsafe_files.contains(&id) {
                let before = self.history.acknowledged.get(&id).cloned().unwrap_or_default();
                fates.insert(resident.id, Fate::Torn { before });
            } else if state == Some(&ContentState::Resident) && !self.history.touched.contains(&id) {
                fates.insert(resident.id, Fate::Lost);
            }
        }
        fates
    }
}

enum Fate {
    /// The writes since the content was `before` may be lost in part or whole.
    Torn { before: Content },
    /// All bytes may be lost: the file was only fetched.
    Lost,
}

fn content_files(dir: &Path) -> Vec<PathBuf> {
    let list = |dir: &Path| -> Vec<PathBuf> {
        fs::read_dir(dir).map(|found| found.flatten().map(|e| e.path()).collect()).unwrap_or_default()
    };
    let mut files: Vec<PathBuf> = list(dir).iter().flat_map(|sub| list(sub)).collect();
    files.sort();
    files
}

fn damage(dir: &Path, fates: &HashMap<u64, Fate>) {
    for path in content_files(dir) {
        let number = path.file_name().and_then(|n| n.to_str()).and_then(|n| u64::from_str_radix(n, 16).ok());
        let Some((number, fate)) = number.and_then(|n| fates.get(&n).map(|f| (n, f))) else { continue };
        let bytes = fs::read(&path).expect("a content file");
        let left = match fate {
            Fate::Torn { before } => torn(number, bytes.clone(), before.to_vec()),
            Fate::Lost => vec![0; bytes.len() / (1 + number as usize % 2)],
        };
        if left != bytes {
            let file = OpenOptions::new().write(true).open(&path).expect("a content file");
            file.set_len(0).and_then(|()| file.write_all_at(&left, 0)).expect("a content file");
        }
    }
}

fn torn(number: u64, now: Vec<u8>, before: Vec<u8>) -> Vec<u8> {
    match number % 4 {
        0 => before,
        1 => now,
        // The size was stored, the bytes were not.
        2 => {
            let mut left = before;
            left.resize(now.len(), 0);
            left
        }
        _ => now[..now.len() / 2].to_vec(),
    }
}
