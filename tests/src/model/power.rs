//! Crashes: of the process, which lose nothing, and of the machine, which lose what was not acknowledged.

use std::collections::{HashMap, HashSet};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use forebay_overlay::Ino;

use super::Failure;
use super::check::{Compared, same_but};
use super::config::World;
use super::run::Run;
use super::tree::{Body, Id, Tree};
use super::view;

/// What is acknowledged, and the moments to which a power cut may lead back.
#[derive(Debug, Default)]
pub struct History {
    /// The model at the last sync and after every operation since.
    moments: Vec<Tree>,
    /// Files that were written and not acknowledged since.
    unsafe_files: HashSet<Id>,
    /// What of the content files is on the device, by their names.
    on_device: HashMap<PathBuf, Vec<u8>>,
    /// The work of a flush may have reached the pool without being acknowledged.
    pub conflicts_may_be: bool,
}

impl History {
    pub fn wrote(&mut self, id: Id) {
        self.unsafe_files.insert(id);
    }

    /// The bytes of a file are safe.
    pub fn acknowledged(&mut self, id: Id) {
        self.unsafe_files.remove(&id);
    }

    /// Everything is in the pool.
    pub fn flushed(&mut self, model: &Tree) {
        self.unsafe_files.clear();
        self.moments = vec![model.clone()];
    }

    /// The catalog is on the device, and the content of a file.
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
    /// The content file of an inode is on the device as it is now.
    pub fn note_synced(&mut self, ino: Ino) {
        if self.machine.config.world != World::PowerCuts {
            return;
        }
        let overlay = self.overlay();
        let Ok(opened) = self.machine.run(overlay.open_file(ino, libc::O_RDONLY)) else { return };
        if let Some(resident) = &opened.resident {
            for path in content_files(&self.machine.content_dir()) {
                if path.file_name().is_some_and(|n| *n == *format!("{:x}", resident.id)) {
                    let bytes = fs::read(&path).expect("a content file");
                    self.history.on_device.insert(path.file_name().expect("a name").into(), bytes);
                }
            }
        }
        overlay.release(ino, libc::O_RDONLY);
    }

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
        let on_device = std::mem::take(&mut self.history.on_device);
        let mut kept = HashMap::new();
        self.machine
            .crash(|fast| kept = damage(&fast.join("content"), &on_device))
            .map_err(|e| format!("start after a power cut: {e}"))?;
        self.history.on_device = kept;
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
        if !found {
            return Err(format!(
                "after a power cut it is as at no moment since the last sync; seen from the last: {why}"
            ));
        }
        self.history.conflicts_may_be = true;
        self.model = shown;
        for node in self.model.nodes.values_mut() {
            node.mtime = None;
        }
        // What is there now was read back from the devices.
        self.history.moments = vec![self.model.clone()];
        for (id, node) in &self.model.nodes {
            if let Body::File(_) = node.body {
                self.history.unsafe_files.remove(id);
            }
        }
        Ok(())
    }
}

fn content_files(dir: &Path) -> Vec<PathBuf> {
    let list = |dir: &Path| -> Vec<PathBuf> {
        fs::read_dir(dir).map(|found| found.flatten().map(|e| e.path()).collect()).unwrap_or_default()
    };
    let mut files: Vec<PathBuf> = list(dir).iter().flat_map(|sub| list(sub)).collect();
    files.sort();
    files
}

/// Leaves of each content file what was synced, or that and anything of the rest. Returns what is there now.
fn damage(dir: &Path, on_device: &HashMap<PathBuf, Vec<u8>>) -> HashMap<PathBuf, Vec<u8>> {
    let mut kept = HashMap::new();
    for path in content_files(dir) {
        let name: PathBuf = path.file_name().expect("a name").into();
        let bytes = fs::read(&path).expect("a content file");
        let synced = on_device.get(&name).cloned().unwrap_or_default();
        let left = if synced == bytes { bytes.clone() } else { leave(&name, bytes.clone(), synced) };
        if left != bytes {
            let file = OpenOptions::new().write(true).open(&path).expect("a content file");
            file.set_len(0).and_then(|()| file.write_all_at(&left, 0)).expect("a content file");
        }
        kept.insert(name, left);
    }
    kept
}

fn leave(name: &Path, now: Vec<u8>, synced: Vec<u8>) -> Vec<u8> {
    let lot = name.as_os_str().len() + now.len() + synced.len();
    match lot % 4 {
        0 => synced,
        1 => now,
        // The size arrived, the bytes did not.
        2 => {
            let mut left = synced;
            left.resize(now.len(), 0);
            left
        }
        _ => now[..now.len() / 2].to_vec(),
    }
}
