//! Files that do not fit into the fast pool, in front of a pool that cannot write ranges, but takes content in parts
//! before the object exists (`parts_ahead`: S3). Ranges of the content are *spilled*: sent as parts, and then punched out
//! of the content file. Other clients of the pool do not see the parts. The flush after the last close makes the object of the parts and of what is
//! left in the content file, in one step.
//!
//! A file without spilled ranges becomes one with them only while no program changes it. From then on, every change of its
//! content, every spill and the flush hold the flush lock of the file. A reader takes no lock: if the ranges changed while
//! it read (`NodeState::spills`), it reads again.
//!
//! The order of a spill: the part is listed as leaving; the part is sent; the content file is synced; the range is in the
//! catalog; the catalog is synced; the hole is punched. So at each moment the bytes are in the content file or in a part
//! that the catalog names, also after a power cut.

mod parts;

use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_cache::{CHUNK_BYTES, Content, ContentId, Stamp, is_open_elsewhere};
use forebay_catalog::{Spilled, SpilledRange};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, stream};

use super::super::writeback::next_data;
use super::super::{Inner, Txn, blocking};
use super::through;
use crate::contents::{failed, set_times};
use crate::node::{Node, NodeState};
pub(crate) use parts::PartsUnderWay;

/// The fast pool holds so many parts, if they are not too small or too large for that.
const PARTS_IN_FAST_POOL: u64 = 32;
/// The largest part: a write into it fetches all of it.
const PART_MAX_BYTES: u64 = 512 << 20;
/// The most spilled ranges of a file. S3 makes an object of 10,000 parts at most, and there may be a part of the content
/// file before and after each range.
const RANGES_MAX: usize = 4500;
/// After so many ranges, the next ones are four times as long.
const RANGES_OF_A_LENGTH: usize = 1000;
/// A range has at most this part of the fast pool.
const RANGE_SHARE: u64 = 4;
/// How many parts are sent at a time.
const PARTS_AT_ONCE: usize = 4;
/// How often it is tried to spill ranges of a file: other writers may be about to change it.
const ATTEMPTS: u32 = 20;
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(20);
/// How many times more than once parts may be sent for nothing, because a program changed the file meanwhile.
const WASTED_MAX: u32 = 1;
/// How often a read begins again because other ranges are spilled meanwhile.
const READ_ATTEMPTS: u32 = 100;

/// The outcome of an attempt to spill.
enum Spill {
    Done,
    /// There is no range to spill.
    Nothing,
    /// A program may change the file just now.
    Disturbed,
    /// A program changed it while parts were sent.
    Wasted,
}

impl Inner {
    /// Makes room for a write to a file, which the flush cannot: by writing the file through to the pool, or by spilling
    /// ranges of it. `full`: why the write to the content file failed; `write`: what it changes. Returns `false` if other
    /// programs change the file just now: then the write may be tried again.
    ///
    /// # Errors
    /// `full` if there is no way.
    pub(super) async fn leave_fast_pool(
        self: &Arc<Self>,
        node: &Arc<Node>,
        full: &Error,
        write: Range<u64>,
    ) -> Result<bool> {
        self.learn_policy_facts(node).await;
        match self.spillable_bytes() {
            Some(least) => self.spill_for(node, full, least, write).await,
            None => self.begin_write_through(node, full).await,
        }
    }

    /// Returns the least bytes of a part, if files are spilled in front of this pool.
    fn spillable_bytes(&self) -> Option<u64> {
        let can = self.pool.capabilities();
        can.parts_ahead.filter(|_| !can.ranged_write)
    }

    async fn spill_for(
        self: &Arc<Self>,
        node: &Arc<Node>,
        full: &Error,
        least: u64,
        write: Range<u64>,
    ) -> Result<bool> {
        let refused = || Error::new(full.kind(), full.side(), full.to_string());
        if !self.goes_to_pool(node) {
            return Err(refused());
        }
        let _waiting = self.wait_for_room();
        let (mut is_refused, mut wasted) = (false, 0);
        for _ in 0..ATTEMPTS {
            let is_used = self.is_used_past_daemon(node)? || node.state.lock().opens.may_pass_through();
            is_refused = is_used && !node.is_changed_by_daemon();
            if !is_used {
                let spilled = {
                    let _locks = self.hold_path(node).await;
                    self.spill(node, least, &write).await
                };
                match spilled {
                    Ok(Spill::Done) => return Ok(true),
                    // Its writes did not wait for the flush of other files until now.
                    Ok(Spill::Nothing) if node.is_spilled() => {
                        let bytes = self.bytes_for_write(node, &write)?;
                        let room = match full.is(ErrorKind::NoSpace) {
                            true => self.with_room(|| self.reserve(bytes)).await.map(drop),
                            false => self.room_for_file(node, bytes).await.map(drop),
                        };
                        tokio::time::sleep(PAUSE).await;
                        return room.map(|()| false).map_err(|_| refused());
                    }
                    Ok(Spill::Nothing) => return Err(refused()),
                    Ok(Spill::Disturbed) => {}
                    Ok(Spill::Wasted) if wasted < WASTED_MAX => wasted += 1,
                    Ok(Spill::Wasted) => return Ok(false),
                    Err(error) => {
                        let path = self.display(node.ino);
                        tracing::warn!(%path, %error, "it does not fit into the fast pool, and no part of it can be sent");
                        return Err(refused());
                    }
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
        if is_refused { Err(refused()) } else { Ok(false) }
    }

    /// Returns how many bytes a write takes at most, with the spilled ranges that it brings back.
    fn bytes_for_write(&self, node: &Node, write: &Range<u64>) -> Result<u64> {
        let Some(id) = node.state.lock().record.file.content() else { return Ok(write.end - write.start) };
        let spilled = self.catalog.spilled(id)?;
        let comes: u64 = spilled.in_range(write).map(|range| range.part.len).sum();
        Ok(comes + (write.end - write.start))
    }

    /// Sends ranges of a dirty file as parts, and punches them out of the content file. `keep`: a range that stays. The
    /// caller holds the flush lock.
    async fn spill(self: &Arc<Self>, node: &Arc<Node>, least: u64, keep: &Range<u64>) -> Result<Spill> {
        let has_punched = node.is_spilled() && self.punch_again(node).await?;
        let (content, stamp, generation, was_spilled) = {
            let mut state = node.state.lock();
            let file = state.record.file;
            if (!file.is_spilled() && state.opens.is_changing()) || state.opens.may_pass_through() {
                return Ok(Spill::Disturbed);
            }
            let stays = file.content().is_none_or(|id| self.store.is_volatile(id) || self.is_in_view(id));
            if !file.is_dirty() || !state.dirty_content.is_durable() || stays {
                return Ok(Spill::Nothing);
            }
            let content = self.content(node.ino, &mut state)?;
            let stamp = Stamp::of(&content.file)?;
            (content, stamp, state.generation, file.is_spilled())
        };
        let id = ContentId(content.id);
        let mut spilled = self.catalog.spilled(id)?;
        let chosen = self.chosen_to_spill(&content, stamp.size, &spilled, least, keep)?;
        if chosen.is_empty() {
            return Ok(if has_punched { Spill::Done } else { Spill::Nothing });
        }
        let parts: Vec<(String, Range<u64>)> = chosen.into_iter().map(|range| (new_name(), range)).collect();
        let _under_way = self.note_under_way(&parts).await?;
        let sends = parts.into_iter().map(|(name, range)| self.clone().send(name, range, content.clone()));
        // All come to their end: a part must not arrive after it was removed.
        let sent: Vec<Result<SpilledRange>> = stream::iter(sends).buffer_unordered(PARTS_AT_ONCE).collect().await;
        let sent: Vec<SpilledRange> = sent.into_iter().collect::<Result<_>>()?;
        // Also finds whether a byte was lost on the way to the device before it was read.
        self.sync_content(&content).await?;
        {
            let mut txn = Txn::begin(self);
            let state = txn.state(node.ino)?;
            let same = state.record.file.content() == Some(id)
                && state.generation == generation
                && Stamp::of(&content.file)? == stamp;
            // A file with spilled ranges is changed only with the flush lock.
            let is_changing = !was_spilled && state.opens.is_changing();
            if !same || is_changing || state.opens.may_pass_through() || is_open_elsewhere(&content.file) {
                return Ok(Spill::Wasted);
            }
            // From now on, no writer of it can be stopped: the content file stays writable.
            if !self.end_bypass(node.ino, txn.state_at_once(node.ino)?) {
                return Ok(Spill::Wasted);
            }
            let record = txn.record(node.ino)?;
            record.file = record.file.spill()?;
            for gone in spilled.remove(|range| range.offset >= stamp.size) {
                txn.batch.put_leaving_part(&gone.part.name);
            }
            for range in &sent {
                txn.batch.delete_leaving_part(&range.part.name);
                spilled.insert(range.clone());
            }
            txn.batch.put_spilled(id, &spilled);
            txn.on_commit(node.ino, NodeState::spilled)?;
            txn.commit()?;
        }
        self.punch_spilled(node, &content, sent.iter().map(SpilledRange::range).collect()).await?;
        if !was_spilled {
            let path = self.display(node.ino);
            tracing::info!(%path, "it does not fit into the fast pool: parts of it are sent to the pool before its last close");
        }
        Ok(Spill::Done)
    }

    /// Punches spilled ranges out of the content file that have bytes there: the daemon was killed before it punched them,
    /// or while it fetched them back. Returns whether there were any.
    async fn punch_again(self: &Arc<Self>, node: &Arc<Node>) -> Result<bool> {
        let content = self.content(node.ino, &mut node.state.lock())?;
        let spilled = self.catalog.spilled(ContentId(content.id))?;
        let mut ranges = Vec::new();
        for spilled in spilled.ranges() {
            let range = spilled.range();
            if next_data(&content.file, range.start, range.end)?.is_some() {
                ranges.push(spilled.range());
            }
        }
        if ranges.is_empty() {
            return Ok(false);
        }
        let blocks = || content.file.metadata().map(|meta| meta.blocks()).map_err(failed);
        let before = blocks()?;
        self.punch_spilled(node, &content, ranges).await?;
        Ok(blocks()? < before)
    }

    /// Punches ranges out of the content file, once the catalog durably has them as spilled.
    async fn punch_spilled(&self, node: &Arc<Node>, content: &Arc<Content>, ranges: Vec<Range<u64>>) -> Result<()> {
        let (catalog, punched, locked) = (self.catalog.clone(), content.clone(), node.clone());
        blocking(move || {
            catalog.sync()?;
            ranges.iter().try_for_each(|range| {
                // The lock keeps the times as they are meanwhile.
                let _state = locked.state.lock();
                let mtime = Stamp::of(&punched.file)?.mtime;
                punch(&punched, range)?;
                set_times(&punched.file, None, Some(mtime))
            })
        })
        .await?;
        self.account(node, content)
    }

    /// Returns ranges that can be spilled, the first in the file first. All begin and end at multiples of `least`, so
    /// whatever is left between two parts is no shorter than a part may be.
    fn chosen_to_spill(
        &self,
        content: &Content,
        size: u64,
        spilled: &Spilled,
        least: u64,
        keep: &Range<u64>,
    ) -> Result<Vec<Range<u64>>> {
        let (limit, known) = (self.store.budget.limit(), spilled.ranges().len());
        let most = PART_MAX_BYTES.min(limit / RANGE_SHARE);
        let bytes = (limit / PARTS_IN_FAST_POOL) << (2 * (known / RANGES_OF_A_LENGTH));
        let bytes = (bytes.min(most) / least * least).max(least);
        let parts = PARTS_AT_ONCE.min(RANGES_MAX.saturating_sub(known));
        let mut chosen = Vec::new();
        let mut at = 0;
        // Holes are passed over in one step, however long they are.
        while chosen.len() < parts
            && let Some((data, _)) = next_data(&content.file, at, size)?
        {
            let range = data / bytes * bytes..(data / bytes + 1).saturating_mul(bytes);
            if range.end > size {
                break;
            }
            at = range.end;
            let is_kept = range.start < keep.end && keep.start < range.end;
            if !is_kept && spilled.in_range(&range).next().is_none() {
                chosen.push(range);
            }
        }
        Ok(chosen)
    }

    async fn send(self: Arc<Self>, name: String, range: Range<u64>, content: Arc<Content>) -> Result<SpilledRange> {
        let pieces = self.range_pieces(content, range.clone());
        let part = self.ask(self.pool.send_part(&name, range.end - range.start, pieces)).await?;
        Ok(SpilledRange { offset: range.start, part })
    }

    /// Writes into a file with spilled ranges; `None`: it has none any more.
    pub(super) fn write_spilled<'a>(
        self: &'a Arc<Self>,
        node: &'a Arc<Node>,
        offset: u64,
        data: &'a Bytes,
    ) -> BoxFuture<'a, Result<Option<u32>>> {
        async move {
            let _locks = self.hold_path(node).await;
            if !node.is_spilled() {
                return Ok(None);
            }
            let range = offset..offset.saturating_add(data.len() as u64);
            self.bring_back(node, &range, |spilled| spilled.overlaps(&range)).await?;
            self.make_room_by_spilling(node, &range).await?;
            let content = {
                let mut state = node.state.lock();
                if !state.record.file.is_dirty() {
                    return Ok(None);
                }
                self.content(node.ino, &mut state)?
            };
            let (_share, space) = self.reserve_for_write_now(node, &content, offset, data.len() as u64).await?;
            self.write_into(node, &content, offset, data, space).map(Some)
        }
        .boxed()
    }

    /// Spills more ranges of a file if there is no room for a write to it. The flush is not waited for: the caller holds
    /// the flush lock.
    async fn make_room_by_spilling(self: &Arc<Self>, node: &Arc<Node>, write: &Range<u64>) -> Result<()> {
        let content = self.content(node.ino, &mut node.state.lock())?;
        match self.reserve_for_write_now(node, &content, write.start, write.end - write.start).await {
            Err(full) if through::is_full(&full) => {
                let least = self.spillable_bytes().unwrap_or(CHUNK_BYTES);
                // If it fails, the write tells that there is no room.
                if let Err(error) = self.spill(node, least, write).await {
                    tracing::debug!(ino = %node.ino, %error, "no part can be sent");
                }
                Ok(())
            }
            reserved => reserved.map(drop),
        }
    }

    /// Sets the size of a file with spilled ranges. Returns `false` if it has none any more.
    pub(super) fn truncate_spilled<'a>(
        self: &'a Arc<Self>,
        node: &'a Arc<Node>,
        size: u64,
    ) -> BoxFuture<'a, Result<bool>> {
        async move {
            let _locks = self.hold_path(node).await;
            if !node.is_spilled() {
                return Ok(false);
            }
            let is_cut = |spilled: &SpilledRange| spilled.offset < size && size < spilled.range().end;
            self.bring_back(node, &(0..0), is_cut).await?;
            let content = self.content(node.ino, &mut node.state.lock())?;
            self.set_len(node, &content, size).await?;
            // After a power cut, the content file must not be longer than its ranges say.
            self.sync_content(&content).await?;
            self.forget_spilled(node, &content, |spilled| spilled.offset >= size)?;
            node.state.lock().changed();
            self.account(node, &content)?;
            Ok(true)
        }
        .boxed()
    }

    /// Fetches the spilled ranges that `comes` names into the content file. `keep`: a range that must not be spilled to
    /// make room for them. The caller holds the flush lock.
    async fn bring_back(
        self: &Arc<Self>,
        node: &Arc<Node>,
        keep: &Range<u64>,
        comes: impl Fn(&SpilledRange) -> bool + Send,
    ) -> Result<()> {
        let content = self.content(node.ino, &mut node.state.lock())?;
        let id = ContentId(content.id);
        let stamp = Stamp::of(&content.file)?;
        // The file was truncated by a daemon that was killed before it could say so.
        if self.catalog.spilled(id)?.ranges().iter().any(|spilled| spilled.offset >= stamp.size) {
            self.sync_content(&content).await?;
            self.forget_spilled(node, &content, |spilled| spilled.offset >= stamp.size)?;
        }
        let coming: Vec<SpilledRange> =
            self.catalog.spilled(id)?.ranges().iter().filter(|spilled| comes(spilled)).cloned().collect();
        if coming.is_empty() {
            return Ok(());
        }
        for spilled in &coming {
            let range = spilled.range();
            let keep =
                if keep.is_empty() { range.clone() } else { keep.start.min(range.start)..keep.end.max(range.end) };
            self.make_room_by_spilling(node, &keep).await?;
            // The flush is not waited for: the caller holds the flush lock.
            let (_share, space) =
                self.reserve_for_write_now(node, &content, range.start, range.end - range.start).await?;
            let pieces = (range.start..range.end).step_by(CHUNK_BYTES as usize);
            let mut pieces = stream::iter(pieces.map(|at| async move {
                let end = spilled.range().end.min(at + CHUNK_BYTES);
                self.read_part(spilled, at..end).await.map(|data| (at, data))
            }))
            .buffered(PARTS_AT_ONCE);
            while let Some(piece) = pieces.next().await {
                let (at, data) = match piece {
                    // It was emptied meanwhile: its parts are gone.
                    Err(_) if node.state.lock().record.file.content() != Some(id) => return Ok(()),
                    piece => piece?,
                };
                let (restored, locked) = (content.clone(), node.clone());
                blocking(move || {
                    // The lock keeps the times as they are meanwhile.
                    let _state = locked.state.lock();
                    let mtime = Stamp::of(&restored.file)?.mtime;
                    std::os::unix::fs::FileExt::write_all_at(&*restored.file, &data, at).map_err(failed)?;
                    set_times(&restored.file, None, Some(mtime))
                })
                .await?;
            }
            self.account_reserved(node, &content, Some(space))?;
            self.sync_content(&content).await?;
            // Before the next range: what is listed as spilled may be punched to make room for that.
            self.forget_spilled(node, &content, |other| other.part.name == spilled.part.name)?;
        }
        Ok(())
    }

    /// Records that ranges are no longer spilled: their parts leave.
    fn forget_spilled(&self, node: &Node, content: &Content, leaves: impl Fn(&SpilledRange) -> bool) -> Result<()> {
        let id = ContentId(content.id);
        let mut spilled = self.catalog.spilled(id)?;
        let gone = spilled.remove(leaves);
        if gone.is_empty() {
            return Ok(());
        }
        let mut txn = Txn::begin(self);
        let record = txn.record(node.ino)?;
        if record.file.content() != Some(id) {
            // It was emptied meanwhile.
            return Ok(());
        }
        if spilled.is_empty() {
            record.file = record.file.unspill()?;
        }
        txn.batch.put_spilled(id, &spilled);
        gone.iter().for_each(|range| txn.batch.put_leaving_part(&range.part.name));
        txn.on_commit(node.ino, NodeState::spilled)?;
        txn.commit()
    }

    /// Reads a range of the content that is spilled as a whole, by offsets in the content.
    async fn read_part(&self, spilled: &SpilledRange, range: Range<u64>) -> Result<Bytes> {
        let within = range.start - spilled.offset..range.end - spilled.offset;
        let data = self.ask(self.pool.read_part(&spilled.part, within)).await?;
        if data.len() as u64 != range.end - range.start {
            let what = format!("part {} of the content is shorter than it was", spilled.part.name);
            return Err(Error::os(libc::EIO, Side::Pool, what));
        }
        Ok(data)
    }

    /// Reads a range of a file with spilled ranges; `None`: it has none any more.
    pub(super) fn read_spilled<'a>(
        self: &'a Arc<Self>,
        node: &'a Arc<Node>,
        offset: u64,
        len: u64,
    ) -> BoxFuture<'a, Result<Option<Bytes>>> {
        async move {
            for _ in 0..READ_ATTEMPTS {
                let (content, spills) = {
                    let mut state = node.state.lock();
                    if !state.record.file.is_spilled() {
                        return Ok(None);
                    }
                    (self.content(node.ino, &mut state)?, state.spills)
                };
                let spilled = self.catalog.spilled(ContentId(content.id))?;
                let read = self.read_pieces(&content, &spilled, offset, len).await;
                if node.state.lock().spills == spills {
                    return read.map(Some).map_err(|e| e.context(self.display(node.ino)));
                }
            }
            let what = format!("{}: changes all the time while it is read", self.display(node.ino));
            Err(Error::new(ErrorKind::Busy, Side::Cache, what))
        }
        .boxed()
    }

    async fn read_pieces(&self, content: &Arc<Content>, spilled: &Spilled, offset: u64, len: u64) -> Result<Bytes> {
        let size = content.file.metadata().map_err(failed)?.len();
        let end = offset.saturating_add(len).min(size);
        let (mut at, mut read) = (offset, BytesMut::new());
        while at < end {
            let next = spilled.in_range(&(at..end)).next();
            let (data, to) = match next {
                Some(part) if part.offset <= at => {
                    let to = end.min(part.range().end);
                    (self.read_part(part, at..to).await?, to)
                }
                behind => {
                    let to = behind.map_or(end, |part| part.offset);
                    (self.read_content(content, at, (to - at) as usize).await?, to)
                }
            };
            read.extend_from_slice(&data);
            if data.len() as u64 != to - at {
                // It was truncated meanwhile.
                break;
            }
            at = to;
        }
        Ok(read.freeze())
    }
}

/// Returns a name that no other part has.
fn new_name() -> String {
    format!("{:032x}", rand::random::<u128>())
}

fn punch(content: &Content, range: &Range<u64>) -> Result<()> {
    use rustix::fs::FallocateFlags;
    let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&*content.file, how, range.start, range.end - range.start).map_err(|e| failed(e.into()))
}
