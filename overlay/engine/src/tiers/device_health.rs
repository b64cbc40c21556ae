//! What the engine does when a device of the fast pool fails.
//!
//! Clean content that cannot be read is given up, and read from the pool. Unflushed content stays: `status` and `dirty`
//! name it. A bypassed device is not synced any more. So its clean content that is not known to be durable is given up
//! before an epoch is closed without it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_cache::{ContentId, is_device_error};
use forebay_catalog::Lost;

use crate::node::Node;
use crate::{Inner, blocking};

/// How often devices are probed while files are open: programs that read by passthrough do not tell the daemon of errors.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// How long it takes at most until an open file is seen, and a device that fails, in an idle mount.
const IDLE: Duration = Duration::from_secs(30);
/// How often content that is being fetched is tried to be given up, and the pause.
const TRIES: u32 = 20;
const AGAIN: Duration = Duration::from_millis(50);
/// Files that the log names.
const NAMED: usize = 20;

/// Returns whether an error says that a device of the fast pool fails, or does not have what was written to it.
pub(crate) fn is_of_device(error: &Error) -> bool {
    error.side() == Side::Cache && is_device_error(error.errno())
}

/// Probes devices that failed, and those that are in use.
pub(crate) async fn health_loop(inner: Arc<Inner>) {
    let mut looked = Instant::now();
    loop {
        let is_used = inner.store.devices().len() > 1 && inner.table.opens.load(Ordering::Relaxed) > 0;
        let until_look = is_used.then(|| LOOK_EVERY.saturating_sub(looked.elapsed()));
        let until_probe = inner.store.probe_in();
        // An open is not announced: it is seen after this pause.
        let pause = until_probe.into_iter().chain(until_look).min().unwrap_or(if inner.store.devices().len() > 1 {
            LOOK_EVERY
        } else {
            IDLE
        });
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = inner.store.health_changed() => {}
        }
        let all = is_used && looked.elapsed() >= LOOK_EVERY;
        if all {
            looked = Instant::now();
        }
        let again = inner.clone();
        let result = blocking(move || {
            again.store.probe(all);
            again.leave_bypassed()
        })
        .await;
        if let Err(error) = result {
            tracing::error!(%error, "content of a failing device");
            tokio::time::sleep(AGAIN).await;
            inner.store.announce_health();
        }
    }
}

impl Inner {
    /// Notes that a content file could not be read or written. Returns whether the file has other content by now, or
    /// none, so that the caller tries again.
    pub(crate) fn content_failed(self: &Arc<Self>, node: &Arc<Node>, id: ContentId, error: &Error) -> bool {
        if !is_of_device(error) {
            return false;
        }
        // One content file that is missing or too short does not tell whether the device works.
        if !error.is(ErrorKind::Corrupt) {
            self.store.note_error(id, error);
        }
        match self.give_up_unwritten(node, id) {
            Ok(given_up) => given_up,
            Err(error) => {
                tracing::warn!(%error, "content of a failing device is not given up");
                false
            }
        }
    }

    /// Notes the result of a sync of a content file: a new failure counts against its device, so that a device that fails
    /// is bypassed before the syncs of many files fail. `known`: the loss that was recorded before the sync.
    pub(crate) fn note_sync(&self, id: ContentId, known: Option<&Lost>, synced: &Result<()>) {
        let Err(error) = synced else { return };
        match self.catalog.lost(id) {
            None => _ = self.store.note_error(id, error),
            // An earlier loss is reported again.
            Some(lost) if Some(&lost) == known => {}
            // The error of a lost file is always `EIO`. A full device does not fail.
            Some(lost) => {
                let error = Error::os(lost.errno(), Side::Cache, "sync of a content file");
                self.store.note_error(id, &error);
            }
        }
    }

    /// Notes that bytes could not be fetched into a content file. Returns whether the file has none by now, so that the
    /// caller tries again, on another device.
    pub(crate) fn fetch_failed(self: &Arc<Self>, node: &Arc<Node>, error: &Error) -> bool {
        let id = node.state.lock().record.file.content();
        // The error is noted where it occurred.
        is_of_device(error) && id.is_some_and(|id| self.give_up_unwritten(node, id).unwrap_or(false))
    }

    /// Gives up the clean content of devices that were bypassed since the last call, as far as it is not known to be
    /// durable, and names the unflushed content.
    fn leave_bypassed(self: &Arc<Self>) -> Result<()> {
        let bypassed: Vec<usize> = self.store.bypassed().collect();
        self.epochs.left_devices.lock().retain(|number| bypassed.contains(number));
        for number in bypassed {
            if self.epochs.left_devices.lock().contains(&number) {
                continue;
            }
            self.leave_device(number)?;
            self.epochs.left_devices.lock().insert(number);
        }
        Ok(())
    }

    fn leave_device(self: &Arc<Self>, number: usize) -> Result<()> {
        let (mut unsynced, mut dirty) = (Vec::new(), Vec::new());
        self.catalog.contents_on(number, |id, record| {
            match self.catalog.inode(record.ino)? {
                Some(inode) if inode.file.content() == Some(id) && inode.file.is_dirty() => dirty.push(record.ino),
                _ if !self.catalog.is_closed(record.epoch)? => unsynced.push((id, record.ino)),
                _ => {}
            }
            Ok(true)
        })?;
        for ino in dirty.iter().take(NAMED) {
            tracing::error!(path = self.display(*ino), "is not in the pool yet, and is on a device that fails");
        }
        if dirty.len() > NAMED {
            tracing::error!("{} further files are not in the pool yet: forebay dirty", dirty.len() - NAMED);
        }
        for (id, ino) in unsynced {
            for tried in 0.. {
                let Some(node) = self.node_unless_gone(ino)? else { break };
                let gone = self.give_up_unwritten(&node, id)?;
                let is_fetched = {
                    let state = node.state.lock();
                    state.record.file.content() == Some(id) && !state.flights.is_empty()
                };
                drop(node);
                self.table.drop_idle(ino);
                if gone || !is_fetched {
                    break;
                }
                if tried >= TRIES {
                    let what = format!("{}: is still being fetched", self.display(ino));
                    return Err(Error::new(ErrorKind::Busy, Side::Cache, what));
                }
                std::thread::sleep(AGAIN);
            }
        }
        Ok(())
    }
}
