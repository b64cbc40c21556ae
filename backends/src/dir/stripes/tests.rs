//! The calls are answered byte by byte, as the kernel would: these tests do not use the decoding code for their
//! answers.

use std::ffi::CStr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use bytes::Bytes;
use futures::{StreamExt, stream};
use parking_lot::Mutex;
use proptest::prelude::*;

use super::calls::IoctlRequest;
use super::*;
use crate::dir::DirPool;
use crate::{Attrs, Expected, Piece, Pool, Time};

/// `_IOR('f', 25, 12 bytes)` and `_IOWR('f', 34, 1944 bytes)` on x86 and ARM, as a C compiler computes them.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[test]
fn requests_have_the_numbers_of_the_public_interface() {
    assert_eq!(beegfs::GET_STRIPE_INFO.opcode, 0x800c_6619);
    assert_eq!(beegfs::GET_ENTRY_INFO_V2.opcode, 0xc798_6622);
}

/// Answers as a file system, without a cluster behind it.
#[derive(Default)]
struct Answers {
    magic: u64,
    fs_type: &'static str,
    /// For `GET_STRIPEINFO`.
    stripe_info: Option<[u8; 12]>,
    /// For `GETENTRYINFO_V2`: offsets and bytes of the answer; the rest is zeros. `None`: the client does not know the call.
    entry_info: Option<Vec<(usize, Vec<u8>)>>,
    xattr: Option<Vec<u8>>,
    /// For `GETENTRYINFO_V2` and the attribute, in place of the answer.
    fails: Option<Errno>,
}

struct StandIn {
    answers: Answers,
    asked: Arc<RecordedCalls>,
}

/// The calls that were made.
#[derive(Default)]
struct RecordedCalls {
    /// Names in the arguments of `GETENTRYINFO_V2`.
    names: Mutex<Vec<String>>,
    stripe_infos: AtomicUsize,
}

impl SystemCalls for StandIn {
    fn magic(&self, _: BorrowedFd<'_>) -> rustix::io::Result<u64> {
        Ok(self.answers.magic)
    }

    fn mount_type(&self, _: BorrowedFd<'_>) -> Option<String> {
        Some(self.answers.fs_type.to_owned())
    }

    fn ioctl(&self, fd: BorrowedFd<'_>, request: IoctlRequest, argument: &mut [u8]) -> rustix::io::Result<()> {
        let is_dir = stat_fd(fd)?.kind == FileKind::Directory;
        assert!(!rustix::fs::fcntl_getfl(fd)?.contains(OFlags::PATH), "an fd of O_PATH takes no ioctl");
        assert_eq!(request.bytes, argument.len());
        match argument.len() {
            12 if is_dir => Err(Errno::ISDIR),
            12 => {
                self.asked.stripe_infos.fetch_add(1, Ordering::Relaxed);
                argument.copy_from_slice(&self.answers.stripe_info.ok_or(Errno::INVAL)?);
                Ok(())
            }
            1944 if !is_dir => Err(Errno::NOTDIR),
            1944 => {
                let name = argument.iter().take_while(|byte| **byte != 0).map(|byte| char::from(*byte)).collect();
                self.asked.names.lock().push(name);
                self.answers.fails.map_or(Ok(()), Err)?;
                for (at, bytes) in self.answers.entry_info.as_ref().ok_or(Errno::NOTTY)? {
                    argument[*at..at + bytes.len()].copy_from_slice(bytes);
                }
                Ok(())
            }
            _ => Err(Errno::NOTTY),
        }
    }

    fn xattr(&self, _: BorrowedFd<'_>, name: &CStr, value: &mut [u8]) -> rustix::io::Result<usize> {
        assert_eq!(name, c"lustre.lov");
        self.answers.fails.map_or(Ok(()), Err)?;
        let answer = self.answers.xattr.as_ref().ok_or(Errno::NODATA)?;
        value.get_mut(..answer.len()).ok_or(Errno::RANGE)?.copy_from_slice(answer);
        Ok(answer.len())
    }
}

struct Fixture {
    root: tempfile::TempDir,
    pool: DirPool,
    asked: Arc<RecordedCalls>,
}

fn pool(answers: Answers) -> Fixture {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("d")).unwrap();
    std::fs::write(root.path().join("d/f"), "content").unwrap();
    let asked = Arc::new(RecordedCalls::default());
    let calls = StandIn { answers, asked: Arc::clone(&asked) };
    let pool = DirPool::with_calls(root.path(), None, Box::new(calls)).unwrap();
    Fixture { root, pool, asked }
}

async fn layout(pool: &DirPool, path: &str) -> Option<Layout> {
    pool.layout(&PoolPath::parse(path).unwrap()).await.unwrap()
}

fn striped(chunk_bytes: u64, targets: u32, storage_pool: Option<&str>) -> Option<Layout> {
    let storage_pool = storage_pool.map(str::to_owned);
    Some(Layout { stripe: Some(Stripe { chunk_bytes, targets }), storage_pool, is_storage_pool_untold: false })
}

/// RAID0, chunks of 512 KiB, four targets.
const STRIPE_INFO: [u8; 12] = [
    1, 0, 0, 0, // pattern type
    0, 0, 8, 0, // chunk size
    4, 0, // number of targets
    0, 0, // padding
];

/// A file in storage pool 3: chunks of 1 MiB over two buddy groups.
fn entry_of_file() -> Vec<(usize, Vec<u8>)> {
    vec![
        (287, b"7A-5F3E-1\0".to_vec()), // entry id
        (324, vec![3, 0, 0, 0]),        // pattern type
        (328, vec![0, 0, 16, 0]),       // chunk size
        (332, vec![3, 0, 0, 0]),        // storage pool
        (336, vec![4, 0, 0, 0]),        // default number of targets
        (340, vec![2, 0]),              // number of targets
        (342, vec![101, 0, 102, 0]),    // their numbers
        (1940, vec![0, 0, 0, 0]),       // result
    ]
}

fn with(mut answer: Vec<(usize, Vec<u8>)>, at: usize, bytes: &[u8]) -> Option<Vec<(usize, Vec<u8>)>> {
    answer.push((at, bytes.to_vec()));
    Some(answer)
}

fn beegfs() -> Answers {
    Answers { magic: 0x1983_0326, fs_type: "beegfs", ..Answers::default() }
}

#[tokio::test]
async fn the_metadata_server_tells_stripe_and_storage_pool() {
    let Fixture { pool, asked, root: _root } = pool(Answers { entry_info: Some(entry_of_file()), ..beegfs() });
    assert!(pool.capabilities().layouts);
    assert_eq!(layout(&pool, "d/f").await, striped(1 << 20, 2, Some("3")));
    assert_eq!(layout(&pool, "d").await, striped(1 << 20, 2, Some("3")));
    assert_eq!(layout(&pool, "").await, striped(1 << 20, 2, Some("3")));
    assert_eq!(*asked.names.lock(), ["f", "", ""]);
    assert_eq!(asked.stripe_infos.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_directory_has_no_targets_but_a_number_that_new_files_get() {
    let entry_info = with(entry_of_file(), 340, &[0, 0]);
    let Fixture { pool, root: _root, .. } = pool(Answers { entry_info, ..beegfs() });
    assert_eq!(layout(&pool, "d").await, striped(1 << 20, 4, Some("3")));
}

#[tokio::test]
async fn an_older_client_tells_the_stripe_of_files_alone_and_is_not_asked_again_for_more() {
    let Fixture { pool, asked, root: _root } = pool(Answers { stripe_info: Some(STRIPE_INFO), ..beegfs() });
    for _ in 0..3 {
        assert_eq!(layout(&pool, "d/f").await, striped(512 << 10, 4, None));
        assert_eq!(layout(&pool, "d").await, None);
    }
    assert_eq!(asked.names.lock().len(), 1);
}

#[tokio::test]
async fn a_client_that_knows_no_call_leaves_a_directory_like_any_other() {
    let Fixture { pool, root, .. } = pool(beegfs());
    assert_eq!(layout(&pool, "d/f").await, None);
    std::os::unix::fs::symlink("d", root.path().join("s")).unwrap();
    assert_eq!(layout(&pool, "s").await, None);
    let missing = pool.layout(&PoolPath::parse("missing").unwrap()).await.unwrap_err();
    assert!(missing.is(ErrorKind::NotFound), "{missing}");
}

#[tokio::test]
async fn answers_that_cannot_be_are_not_believed() {
    let entry = |at, bytes: &[u8]| Answers { entry_info: with(entry_of_file(), at, bytes), ..beegfs() };
    let info = |at: usize, bytes: &[u8]| {
        let mut answer = STRIPE_INFO;
        answer[at..at + bytes.len()].copy_from_slice(bytes);
        Answers { stripe_info: Some(answer), ..beegfs() }
    };
    for (what, answers) in [
        ("an entry without identity", entry(287, &[0])),
        ("no pattern", entry(324, &[0, 0, 0, 0])),
        ("chunks of no bytes", entry(328, &[0, 0, 0, 0])),
        ("chunks that are no power of two", entry(328, &[0, 0, 3, 0])),
        ("more targets than there can be", entry(340, &[1, 1])),
        ("no pattern", info(0, &[9, 0, 0, 0])),
        ("chunks of no bytes", info(4, &[0, 0, 0, 0])),
        ("chunks of a byte", info(4, &[1, 0, 0, 0])),
        ("no targets", info(8, &[0, 0])),
        ("more targets than there can be", info(8, &[255, 255])),
    ] {
        assert_eq!(layout(&pool(answers).pool, "d/f").await, None, "{what}");
    }
    for number in [[0, 0, 0, 0], [0, 0, 1, 0], [255; 4]] {
        let unknown = layout(&pool(entry(332, &number)).pool, "d/f").await;
        assert_eq!(unknown, striped(1 << 20, 2, None), "storage pool {number:?}");
    }
}

/// A storage pool that is not known is another thing than none.
#[tokio::test]
async fn a_call_that_fails_does_not_count_as_no_layout() {
    let fails = Some(Errno::IO);
    for (what, answers) in [
        ("an error of the client", Answers { entry_info: Some(entry_of_file()), fails, ..beegfs() }),
        ("one of the server", Answers { entry_info: with(entry_of_file(), 1940, &[5, 0, 0, 0]), ..beegfs() }),
        ("an error of Lustre", Answers { fails, ..lustre(plain(V3)) }),
    ] {
        let Fixture { pool, root: _root, .. } = pool(answers);
        for path in ["d/f", "d"] {
            let error = pool.layout(&PoolPath::parse(path).unwrap()).await.unwrap_err();
            assert!(error.is(ErrorKind::Os(libc::EIO)), "{what}: {path}: {error}");
        }
    }
}

#[tokio::test]
async fn a_client_that_fails_to_tell_the_storage_pool_still_tells_the_stripe_of_files() {
    let fails = Some(Errno::IO);
    let Fixture { pool, root: _root, .. } = pool(Answers { stripe_info: Some(STRIPE_INFO), fails, ..beegfs() });
    let untold = striped(512 << 10, 4, None).map(|layout| Layout { is_storage_pool_untold: true, ..layout });
    assert_eq!(layout(&pool, "d/f").await, untold);
    assert!(pool.layout(&PoolPath::parse("d").unwrap()).await.is_err());
}

#[tokio::test]
async fn a_name_that_is_too_long_for_the_call_is_not_cut() {
    assert!(beegfs::entry_info_argument(&[b'n'; 256]).is_none());
    let argument = beegfs::entry_info_argument(&[b'n'; 255]).unwrap();
    assert_eq!((argument[254], argument[255]), (b'n', 0));
}

fn lustre(xattr: Vec<u8>) -> Answers {
    Answers { magic: 0x0bd0_0bd0, fs_type: "lustre", xattr: Some(xattr), ..Answers::default() }
}

/// RAID0 in chunks of 4 MiB over 3 targets, of the pool "flash" in the later layout.
fn plain(magic: [u8; 4]) -> Vec<u8> {
    let mut value = magic.to_vec();
    value.extend([1, 0, 0, 0]); // pattern
    value.extend([7; 16]); // object
    value.extend([0, 0, 64, 0]); // chunk size
    value.extend([3, 0]); // number of stripes
    value.extend([0, 0]); // generation
    if magic != V1 {
        value.extend(*b"flash\0\0\0\0\0\0\0\0\0\0\0"); // pool
    }
    value.extend([9; 3 * 24]); // objects on targets
    value
}

const V1: [u8; 4] = [0xd0, 0x0b, 0xd1, 0x0b];
const V3: [u8; 4] = [0xd0, 0x0b, 0xd3, 0x0b];

/// Parts of a file: mirror, flags, start in MiB, and layout.
fn composite(parts: &[(u8, u8, u8, Vec<u8>)]) -> Vec<u8> {
    let mut value = vec![0xd0, 0x0b, 0xd6, 0x0b]; // magic
    value.extend([0, 1, 0, 0]); // total bytes
    value.extend([1, 0, 0, 0]); // generation
    value.extend([0, 0]); // flags
    value.extend([parts.len() as u8, 0]); // entries
    value.extend([0; 16]); // mirrors, and padding
    let mut offset = 32 + 48 * parts.len();
    for (mirror, flags, start, layout) in parts {
        value.extend([1, 0, *mirror, 0]); // number
        value.extend([*flags, 0, 0, 0]);
        value.extend([0, 0, *start << 4, 0, 0, 0, 0, 0]); // start
        value.extend([255; 8]); // end
        value.extend((offset as u32).to_le_bytes()); // offset of its layout
        value.extend((layout.len() as u32).to_le_bytes()); // length of its layout
        value.extend([0; 16]); // generation, time, and padding
        offset += layout.len();
    }
    parts.iter().for_each(|(.., layout)| value.extend(layout));
    value
}

#[tokio::test]
async fn lustre_tells_stripe_and_pool_in_an_attribute() {
    for (value, expected) in [
        (plain(V1), striped(4 << 20, 3, None)),
        (plain(V3), striped(4 << 20, 3, Some("flash"))),
        (plain([0xd0, 0x0b, 0xd5, 0x0b]), striped(4 << 20, 3, Some("flash"))),
    ] {
        let Fixture { pool, root: _root, .. } = pool(lustre(value));
        assert_eq!(layout(&pool, "d/f").await, expected);
        assert_eq!(layout(&pool, "d").await, expected);
    }
    assert_eq!(layout(&pool(Answers { xattr: None, ..lustre(Vec::new()) }).pool, "d").await, None);
}

#[test]
fn of_a_layout_in_parts_the_last_that_is_in_use_counts() {
    let wide = |targets: u8| {
        let mut value = plain(V3);
        value[28] = targets;
        value
    };
    let on_metadata = || {
        let mut value = plain(V1);
        (value[5], value[28]) = (1, 0); // pattern: on the metadata server
        value
    };
    let of = |parts: &[(u8, u8, u8, Vec<u8>)]| lustre::layout(&composite(parts));
    let (used, stale) = (0x10, 0x11);
    let grown = [(1, used, 0, on_metadata()), (1, used, 1, wide(2)), (1, 0, 4, wide(8))];
    assert_eq!(of(&grown), striped(4 << 20, 2, Some("flash")));
    let template = [(0, 0, 0, wide(1)), (0, 0, 4, wide(8))];
    assert_eq!(of(&template), striped(4 << 20, 8, Some("flash")));
    let mirrors = [(1, stale, 0, wide(1)), (2, used, 0, wide(5)), (3, used, 4, wide(6))];
    assert_eq!(of(&mirrors), striped(4 << 20, 5, Some("flash")));
    assert_eq!(of(&grown[..1]), None);
    assert_eq!(of(&[]), None);
}

#[test]
fn attributes_that_cannot_be_are_not_believed() {
    let changed = |at: usize, bytes: &[u8]| {
        let mut value = plain(V1);
        value[at..at + bytes.len()].copy_from_slice(bytes);
        lustre::layout(&value)
    };
    assert_eq!(changed(0, &[0xd0, 0x0b, 0xd9, 0x0b]), None, "an unknown kind");
    assert_eq!(changed(4, &[0, 0, 0, 1]), None, "a pattern that is none");
    assert_eq!(changed(4, &[1, 0, 0, 0x80]), striped(4 << 20, 3, None), "a file that was released");
    assert_eq!(changed(24, &[0, 0, 0, 0]), None, "chunks of no bytes");
    assert_eq!(changed(24, &[1, 0, 0, 0]), None, "chunks of a byte");
    assert_eq!(changed(28, &[255, 255]), None, "as many targets as there are");
    let mut unbounded = plain(V3);
    unbounded[28..30].copy_from_slice(&[255, 255]);
    let pool = Layout { stripe: None, storage_pool: Some("flash".into()), is_storage_pool_untold: false };
    assert_eq!(lustre::layout(&unbounded), Some(pool), "the pool is known, the number of targets is not");
    let value = composite(&[(1, 0x10, 0, plain(V3))]);
    for length in (0..28).chain(32..80).chain(80..128) {
        assert_eq!(lustre::layout(&value[..length]), None, "cut after {length} bytes");
    }
    for length in 0..48 {
        assert_eq!(lustre::layout(&plain(V3)[..length]), None, "cut after {length} bytes");
    }
}

proptest! {
    #[test]
    fn no_answer_makes_a_panic_or_an_impossible_layout(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..2_048),
        kind in 0..5_usize,
    ) {
        let magics = [V1, V3, [0xd0, 0x0b, 0xd6, 0x0b], [0; 4]];
        if let (Some(start), Some(magic)) = (bytes.get_mut(..4), magics.get(kind)) {
            start.copy_from_slice(magic);
        }
        for layout in [beegfs::stripe_info(&bytes), beegfs::entry_info(&bytes), lustre::layout(&bytes)].into_iter().flatten() {
            if let Some(stripe) = layout.stripe {
                prop_assert!(stripe.targets > 0 && stripe.chunk_bytes > 0 && stripe.chunk_bytes % (64 << 10) == 0);
            }
            prop_assert!(layout.stripe.is_some() || layout.storage_pool.is_some());
        }
    }
}

#[tokio::test]
async fn a_file_system_is_known_by_its_number_or_by_its_type() {
    let kind = |magic, fs_type| {
        let calls = StandIn { answers: Answers { magic, fs_type, ..Answers::default() }, asked: Arc::default() };
        let root = tempfile::tempdir().unwrap();
        let root = std::fs::File::open(root.path()).unwrap();
        Stripes::detect(Box::new(calls), root.as_fd()).kind
    };
    assert_eq!(kind(0x1983_0326, "what.ever"), Some(Striped::BeeGfs));
    assert_eq!(kind(0x6573_5546, "fuse.beegfs"), Some(Striped::BeeGfs));
    assert_eq!(kind(0x0bd0_0bd0, "lustre"), Some(Striped::Lustre));
    assert_eq!(kind(0xef53, "ext4"), None);
}

#[tokio::test]
async fn another_file_system_than_the_url_says_is_refused_by_name() {
    let root = tempfile::tempdir_in("/dev/shm").unwrap();
    let url = format!("beegfs://{}", root.path().display());
    let Err(error) = crate::PoolLocation::parse(&url).unwrap().open(std::time::Duration::from_secs(10)).await else {
        panic!("it was opened")
    };
    assert!(error.is(ErrorKind::InvalidInput));
    let text = error.to_string();
    assert!(text.contains(&root.path().display().to_string()) && text.contains("on tmpfs, not on BeeGFS"), "{text}");
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0, "nothing is tried there");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_striped_file_system_passes_the_suite_and_keeps_the_bytes_of_big_files() {
    let Fixture { pool, root, asked } = pool(Answers { stripe_info: Some(STRIPE_INFO), ..beegfs() });
    let pool: Arc<dyn Pool> = Arc::new(pool);
    let report = crate::conformance::run(Arc::clone(&pool), PoolPath::parse("d").unwrap()).await;
    assert!(report.passed(), "{report}");
    let bytes: Vec<u8> = (0..9_000_000_u32).map(|at| (at / 7) as u8).collect();
    let odd = 1_000_003;
    let pieces = bytes.chunks(odd).enumerate();
    let pieces: Vec<_> =
        pieces.map(|(at, data)| Ok(Piece { offset: (at * odd) as u64, data: Bytes::copy_from_slice(data) })).collect();
    let time = Time { secs: 1, nanos: 0 };
    let attrs = Attrs { mode: 0o644, uid: 0, gid: 0, atime: time, mtime: time, xattrs: Vec::new() };
    let (path, size) = (PoolPath::parse("big").unwrap(), bytes.len() as u64);
    pool.put(&path, size, stream::iter(pieces).boxed(), &attrs, &Expected::Absent).await.unwrap();
    assert!(std::fs::read(root.path().join("big")).unwrap() == bytes);
    assert!(asked.stripe_infos.load(Ordering::Relaxed) > 0);
    // A failed `put` leaves no file behind.
    let broken = Err(Error::new(ErrorKind::Busy, Side::Application, "changed"));
    let pieces = bytes.chunks(1 << 20).enumerate();
    let pieces = pieces.map(|(at, data)| Ok(Piece { offset: (at << 20) as u64, data: Bytes::copy_from_slice(data) }));
    let pieces: Vec<_> = pieces.take(5).chain([broken]).collect();
    let path = PoolPath::parse("d/broken").unwrap();
    let error = pool.put(&path, size, stream::iter(pieces).boxed(), &attrs, &Expected::Absent).await.unwrap_err();
    assert!(error.is(ErrorKind::Busy));
    // Writes in progress keep the unfinished file until they end.
    for _ in 0..100 {
        if std::fs::read_dir(root.path().join("d")).unwrap().count() == 1 {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    panic!("the unfinished file stays");
}
