//! Tests with operations that cannot finish at once: reads of an empty pipe, and writes to a full one.

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::future::{join_all, poll_immediate};

use super::*;
use crate::content_io::tests::{TIGHT, pattern, start_uring};

/// Far longer than the ring's thread needs to submit an operation. If it ever is too short, a test proves less, but
/// does not fail.
const UNDER_WAY: Duration = Duration::from_millis(50);

fn empty_pipe() -> (Arc<File>, PipeWriter) {
    let (reader, writer) = std::io::pipe().unwrap();
    (Arc::new(File::from(OwnedFd::from(reader))), writer)
}

fn pipe_to_write() -> (PipeReader, Arc<File>) {
    let (reader, writer) = std::io::pipe().unwrap();
    (reader, Arc::new(File::from(OwnedFd::from(writer))))
}

/// A buffer that records when it is freed.
struct Watched {
    bytes: Bytes,
    freed: Arc<AtomicBool>,
}

impl AsRef<[u8]> for Watched {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.freed.store(true, Ordering::SeqCst);
    }
}

fn watched(bytes: Bytes) -> (Bytes, Arc<AtomicBool>) {
    let freed = Arc::new(AtomicBool::new(false));
    (Bytes::from_owner(Watched { bytes, freed: Arc::clone(&freed) }), freed)
}

#[tokio::test]
async fn the_buffer_of_a_dropped_write_lives_until_the_kernel_is_done() {
    let io = start_uring(RingLimits::DEFAULT);
    let (mut reader, pipe) = pipe_to_write();
    let expected = pattern(1, 1 << 20);
    let (data, freed) = watched(expected.clone());
    assert!(poll_immediate(io.write_at(pipe, 0, data)).await.is_none());
    tokio::time::sleep(UNDER_WAY).await;
    assert!(!freed.load(Ordering::SeqCst), "the pipe is smaller than the write");
    let mut read = vec![0; expected.len()];
    reader.read_exact(&mut read).unwrap();
    assert!(read == expected, "short writes are continued");
    drop(io);
    assert!(freed.load(Ordering::SeqCst));
}

#[tokio::test]
async fn the_buffer_of_a_dropped_read_takes_what_comes_late() {
    let io = start_uring(RingLimits::DEFAULT);
    let (pipe, mut writer) = empty_pipe();
    assert!(poll_immediate(io.read_at(Arc::clone(&pipe), 0, 4096)).await.is_none());
    tokio::time::sleep(UNDER_WAY).await;
    // If the buffer were freed, one of these allocations would get its memory.
    let canaries: Vec<Vec<u8>> = (0..64).map(|_| vec![7; 4096]).collect();
    writer.write_all(&[9; 4096]).unwrap();
    while Arc::strong_count(&pipe) > 1 {
        tokio::task::yield_now().await;
    }
    assert!(canaries.iter().flatten().all(|byte| *byte == 7));
}

#[tokio::test]
async fn dropping_the_ring_waits_for_what_is_under_way() {
    let io = start_uring(RingLimits::DEFAULT);
    let (mut reader, pipe) = pipe_to_write();
    let expected = pattern(2, 300_000);
    let (data, freed) = watched(expected.clone());
    assert!(poll_immediate(io.write_at(pipe, 0, data)).await.is_none());
    let draining = thread::spawn(move || {
        thread::sleep(UNDER_WAY);
        let mut read = Vec::new();
        // Returns when the operation has closed the write end.
        reader.read_to_end(&mut read).unwrap();
        read
    });
    drop(io);
    assert!(freed.load(Ordering::SeqCst));
    assert!(draining.join().unwrap() == expected);
}

#[tokio::test]
async fn more_than_the_bound_wait_for_their_turn() {
    let io = start_uring(RingLimits { in_flight: 4, ..RingLimits::DEFAULT });
    let (pipe, mut writer) = empty_pipe();
    let file = Arc::new(tempfile::tempfile().unwrap());
    let mut blocked = join_all((0..4).map(|_| io.read_at(Arc::clone(&pipe), 0, 1)));
    assert!(poll_immediate(&mut blocked).await.is_none());
    let mut waiting = io.write_at(Arc::clone(&file), 0, pattern(3, 100));
    assert!(poll_immediate(&mut waiting).await.is_none());
    tokio::time::sleep(UNDER_WAY).await;
    assert!(poll_immediate(&mut waiting).await.is_none());
    assert_eq!(file.metadata().unwrap().len(), 0, "no turn, no write");
    writer.write_all(&[1]).unwrap();
    waiting.await.unwrap();
    writer.write_all(&[1; 3]).unwrap();
    assert!(blocked.await.iter().all(|read| read.as_ref().unwrap() == &[1][..]));
}

#[tokio::test]
async fn completions_that_overflow_are_not_lost() {
    // The completion queue has 4 entries, and 40 operations complete at once.
    let io = start_uring(TIGHT);
    for _ in 0..20 {
        let (pipe, mut writer) = empty_pipe();
        let mut reads = join_all((0..TIGHT.in_flight).map(|_| io.read_at(Arc::clone(&pipe), 0, 1)));
        assert!(poll_immediate(&mut reads).await.is_none());
        tokio::time::sleep(UNDER_WAY / 10).await;
        writer.write_all(&pattern(4, TIGHT.in_flight)).unwrap();
        let read: Result<Vec<Bytes>> = reads.await.into_iter().collect();
        let mut read = read.unwrap().concat();
        let mut expected = pattern(4, TIGHT.in_flight).to_vec();
        read.sort_unstable();
        expected.sort_unstable();
        assert_eq!(read, expected);
    }
}

#[test]
fn futures_need_no_runtime() {
    let io = start_uring(RingLimits::DEFAULT);
    let file = Arc::new(tempfile::tempfile().unwrap());
    futures::executor::block_on(io.write_at(Arc::clone(&file), 3, pattern(5, 10))).unwrap();
    assert_eq!(futures::executor::block_on(io.read_at(file, 3, 10)).unwrap(), pattern(5, 10));
}

#[test]
fn starting_and_dropping_leaves_no_thread_or_descriptor() {
    let descriptors = |target: &str| {
        let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        links.filter(|link| std::fs::read_link(link.path()).is_ok_and(|path| path.to_string_lossy() == target)).count()
    };
    // Other tests run beside this one and have rings as well, but not hundreds.
    for _ in 0..300 {
        drop(start_uring(RingLimits::DEFAULT));
    }
    assert!(descriptors("anon_inode:[io_uring]") < 100);
    assert!(descriptors("anon_inode:[eventfd]") < 100);
}

#[tokio::test]
async fn what_is_under_way_when_the_thread_dies_is_answered_and_leaked() {
    let turns = Arc::new(Semaphore::new(1));
    let permit = Arc::clone(&turns).acquire_owned().await.unwrap();
    let (reply, outcome) = oneshot::channel();
    let (data, freed) = watched(pattern(6, 100));
    let file = Arc::new(tempfile::tempfile().unwrap());
    let op = RingOp::new(Arc::clone(&file), 0, IoRequest::Write(data), reply, permit);
    driver::die_with(op);
    let error = outcome.await.unwrap().unwrap_err();
    assert_eq!(as_error(error, || "write".into()).kind(), ErrorKind::Unavailable);
    assert!(!freed.load(Ordering::SeqCst), "the kernel may still read it");
    assert_eq!(Arc::strong_count(&file), 2, "the kernel may still write to it");
    assert_eq!(turns.available_permits(), 1);
}

#[tokio::test]
async fn a_dead_thread_gives_errors_and_no_hang() {
    let mut io = start_uring(RingLimits::DEFAULT);
    let (inbox, received) = mpsc::channel();
    drop(received);
    drop(io.inbox.replace(inbox));
    let file = Arc::new(tempfile::tempfile().unwrap());
    let error = io.write_at(file, 0, pattern(7, 10)).await.unwrap_err();
    assert_eq!((error.kind(), error.side()), (ErrorKind::Unavailable, Side::Cache));
    assert!(error.to_string().contains("restart the daemon"), "{error}");
}

#[test]
fn endless_interruptions_are_given_up() {
    let turns = Arc::new(Semaphore::new(1));
    let permit = turns.try_acquire_owned().unwrap();
    let file = Arc::new(tempfile::tempfile().unwrap());
    let (reply, _outcome) = oneshot::channel();
    let mut op = RingOp::new(file, 0, IoRequest::Write(pattern(8, 100)), reply, permit);
    let _ = op.entry(100);
    let mut again = 0;
    while matches!(op.complete(-libc::EAGAIN), op::OpProgress::Submit) {
        again += 1;
        assert!(again < 100_000);
    }
    assert!(again > 10);
    assert!(
        matches!(op.complete(0), op::OpProgress::Finish(Err(_))),
        "a write that moves nothing does not go on forever"
    );
}
