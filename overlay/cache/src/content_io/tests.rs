//! Tests that both implementations must pass, run for each, and for a ring so small that its queues overflow.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

use futures::future::{join_all, poll_immediate};

use super::*;

const MIB: usize = 1 << 20;

fn plain() -> Arc<dyn ContentIo> {
    Arc::new(PlainIo::new())
}

pub(super) fn start_uring(limits: RingLimits) -> Uring {
    Uring::start(limits).expect(
        "these tests need io_uring: set sysctl kernel.io_uring_disabled=0, and let the container's seccomp profile \
         allow io_uring_setup, io_uring_enter and io_uring_register",
    )
}

fn uring() -> Arc<dyn ContentIo> {
    Arc::new(start_uring(RingLimits::DEFAULT))
}

/// With these limits, submissions do not fit, completions overflow, and every operation takes several steps.
pub(super) const TIGHT: RingLimits = RingLimits { entries: 2, in_flight: 40, step_bytes: 4096 };

fn tight_uring() -> Arc<dyn ContentIo> {
    Arc::new(start_uring(TIGHT))
}

fn temporary_file() -> Arc<File> {
    Arc::new(tempfile::tempfile().expect("a temporary file"))
}

/// Returns bytes that differ from block to block, so that misplaced ones are detected.
pub(super) fn pattern(seed: usize, len: usize) -> Bytes {
    let mut state = seed as u64 + 1;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..len).map(next).collect()
}

async fn what_was_written_is_read_back(io: Arc<dyn ContentIo>) {
    let file = temporary_file();
    let data = pattern(1, 100_003);
    io.write_at(Arc::clone(&file), 12_345, data.clone()).await.unwrap();
    assert_eq!(file.metadata().unwrap().len(), 12_345 + 100_003);
    assert_eq!(io.read_at(Arc::clone(&file), 12_345, data.len()).await.unwrap(), data);
    assert_eq!(io.read_at(Arc::clone(&file), 0, 12_345).await.unwrap(), vec![0; 12_345]);
    let offset = 1 << 33;
    io.write_at(Arc::clone(&file), offset, data.clone()).await.unwrap();
    assert_eq!(io.read_at(file, offset + 1, 5000).await.unwrap(), data.slice(1..5001));
}

async fn reads_end_with_the_file(io: Arc<dyn ContentIo>) {
    let file = temporary_file();
    let data = pattern(2, 10_000);
    io.write_at(Arc::clone(&file), 0, data.clone()).await.unwrap();
    assert_eq!(io.read_at(Arc::clone(&file), 9_000, 4096).await.unwrap(), data.slice(9_000..));
    assert_eq!(io.read_at(Arc::clone(&file), 0, 64 * MIB).await.unwrap(), data);
    for offset in [10_000, 10_001, 1 << 40] {
        assert!(io.read_at(Arc::clone(&file), offset, 4096).await.unwrap().is_empty());
    }
}

async fn nothing_is_moved_by_empty_operations(io: Arc<dyn ContentIo>) {
    let file = temporary_file();
    io.write_at(Arc::clone(&file), 77, Bytes::new()).await.unwrap();
    assert!(io.read_at(Arc::clone(&file), 0, 0).await.unwrap().is_empty());
    assert_eq!(file.metadata().unwrap().len(), 0);
}

async fn large_writes_arrive_whole(io: Arc<dyn ContentIo>) {
    let file = temporary_file();
    let data = pattern(3, 64 * MIB);
    io.write_at(Arc::clone(&file), 4097, data.clone()).await.unwrap();
    assert!(io.read_at(file, 4097, 64 * MIB).await.unwrap() == data);
}

async fn sixty_four_tasks_do_not_disturb_each_other(io: Arc<dyn ContentIo>) {
    const TASK_BYTES: usize = 50_000;
    let (shared, mut tasks) = (temporary_file(), Vec::new());
    for task in 0..64 {
        let (io, shared) = (Arc::clone(&io), Arc::clone(&shared));
        tasks.push(tokio::spawn(async move {
            let own = temporary_file();
            let offset = (task * TASK_BYTES) as u64;
            for round in 0..8 {
                let data = pattern(task * 8 + round, TASK_BYTES);
                io.write_at(Arc::clone(&shared), offset, data.clone()).await.unwrap();
                io.write_at(Arc::clone(&own), 0, data.clone()).await.unwrap();
                assert!(io.read_at(Arc::clone(&shared), offset, TASK_BYTES).await.unwrap() == data);
                assert!(io.read_at(Arc::clone(&own), 0, MIB).await.unwrap() == data);
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
}

/// A dropped operation runs on. So each round has its own range, and in the end every write that began is in the file.
async fn dropped_futures_harm_nobody(io: Arc<dyn ContentIo>) {
    const WRITE_BYTES: usize = 100_000;
    let file = temporary_file();
    let mut begun = Vec::new();
    for index in 0..300 {
        let offset = (index * WRITE_BYTES) as u64;
        let write = io.write_at(Arc::clone(&file), offset, pattern(index, WRITE_BYTES));
        let read = io.read_at(Arc::clone(&file), 0, MIB);
        // Each future is polled once and dropped: it is under way, done, or waits for a permit.
        if poll_immediate(write).await.is_some() || index < 10 {
            begun.push(index);
        }
        let _ = poll_immediate(read).await;
        tokio::task::yield_now().await;
    }
    // All permits are returned, although their futures were dropped.
    let base = 300 * WRITE_BYTES as u64;
    let later =
        (0..200).map(|index| io.write_at(Arc::clone(&file), base + index * 4096, pattern(index as usize, 4096)));
    assert!(join_all(later).await.iter().all(Result::is_ok));
    for index in 0..200u64 {
        let read = io.read_at(Arc::clone(&file), base + index * 4096, 4096).await.unwrap();
        assert_eq!(read, pattern(index as usize, 4096));
    }
    wait_until_unused(&file).await;
    for index in begun {
        let read = io.read_at(Arc::clone(&file), (index * WRITE_BYTES) as u64, WRITE_BYTES).await.unwrap();
        assert!(read == pattern(index, WRITE_BYTES), "write {index} began and was dropped");
    }
}

/// Waits until no operation uses the file: an operation holds its file until it is done.
async fn wait_until_unused(file: &Arc<File>) {
    while Arc::strong_count(file) > 1 {
        tokio::task::yield_now().await;
    }
}

async fn a_full_device_says_so(io: Arc<dyn ContentIo>) {
    let full = Arc::new(OpenOptions::new().write(true).open("/dev/full").unwrap());
    let error = io.write_at(full, 0, pattern(5, 10_000)).await.unwrap_err();
    assert_eq!((error.kind(), error.side(), error.errno()), (ErrorKind::NoSpace, Side::Cache, libc::ENOSPC));
    assert!(error.to_string().contains("write 10000 bytes at offset 0"), "{error}");
}

async fn what_the_kernel_refuses_is_an_error(io: Arc<dyn ContentIo>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("content");
    let write_only = Arc::new(File::create(&path).unwrap());
    let read_only = Arc::new(File::open(&path).unwrap());
    let error = io.read_at(write_only, 0, 10).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Os(libc::EBADF));
    let error = io.write_at(read_only, 0, pattern(6, 10)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Os(libc::EBADF));
    let opened_directory = Arc::new(File::open(directory.path()).unwrap());
    let error = io.read_at(opened_directory, 0, 10).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IsDirectory);
}

async fn offsets_past_the_largest_are_refused(io: Arc<dyn ContentIo>) {
    let file = temporary_file();
    file.write_all_at(b"unchanged", 0).unwrap();
    for offset in [u64::MAX, u64::MAX - 1, OFFSET_MAX + 1] {
        let error = io.write_at(Arc::clone(&file), offset, pattern(7, 10)).await.unwrap_err();
        assert_eq!((error.kind(), error.side()), (ErrorKind::TooLarge, Side::Cache));
        let error = io.read_at(Arc::clone(&file), offset, 10).await.unwrap_err();
        assert_eq!((error.kind(), error.side()), (ErrorKind::InvalidInput, Side::Cache));
    }
    let error = io.write_at(Arc::clone(&file), OFFSET_MAX - 5, pattern(7, 10)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooLarge);
    assert!(io.read_at(Arc::clone(&file), OFFSET_MAX, 10).await.unwrap().is_empty());
    let error = io.read_at(Arc::clone(&file), 0, usize::MAX).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Os(libc::ENOMEM));
    assert_eq!(io.read_at(file, 0, 100).await.unwrap(), &b"unchanged"[..]);
}

macro_rules! suite {
    ($($implementation:ident)*) => { $(mod $implementation {
        suite!(@each $implementation
            what_was_written_is_read_back
            reads_end_with_the_file
            nothing_is_moved_by_empty_operations
            large_writes_arrive_whole
            sixty_four_tasks_do_not_disturb_each_other
            dropped_futures_harm_nobody
            a_full_device_says_so
            what_the_kernel_refuses_is_an_error
            offsets_past_the_largest_are_refused
        );
    })* };
    (@each $implementation:ident $($case:ident)*) => { $(
        #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
        async fn $case() {
            super::$case(super::$implementation()).await;
        }
    )* };
}

suite!(plain uring tight_uring);

#[test]
fn the_choice_is_heeded_and_a_fallback_has_a_reason() {
    let (io, reason) = open(Choice::Plain);
    assert_eq!((io.name(), reason), ("plain", None));
    for choice in [Choice::Auto, Choice::Uring] {
        let (io, reason) = open(choice);
        assert_eq!((io.name(), reason), ("io_uring", None));
    }
    let (io, reason) = open_uring_or_plain(RingLimits { entries: 0, ..RingLimits::DEFAULT });
    assert_eq!(io.name(), "plain");
    let reason = reason.expect("the kernel refuses a ring without entries");
    assert!(reason.contains("Invalid argument"), "{reason}");
}
