//! The ioctl calls that return BeeGFS's stripes, through the kernel: a file system in user space answers them.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use forebay_backends::{Layout, Pool, PoolLocation, PoolPath, Stripe};
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, IoctlFlags,
    ReplyAttr, ReplyEntry, ReplyIoctl, Request, Session, SessionACL,
};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

const TTL: Duration = Duration::from_secs(1);
const DIRECTORY: INodeNo = INodeNo(2);
const FILE: INodeNo = INodeNo(3);

/// `_IOR('f', 25, 12 bytes)` and `_IOWR('f', 34, 1944 bytes)`.
const GET_STRIPEINFO: u32 = 0x800c_6619;
const GETENTRYINFO_V2: u32 = 0xc798_6622;

/// Stands in for BeeGFS: a directory `d` with a file `f` in it.
struct StandIn {
    /// Whether it knows the call that returns storage pools.
    recent: bool,
}

fn attr(ino: INodeNo) -> FileAttr {
    let (kind, perm) = if ino == FILE { (FileType::RegularFile, 0o644) } else { (FileType::Directory, 0o755) };
    FileAttr {
        ino,
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm,
        nlink: if ino == FILE { 1 } else { 2 },
        uid: 0,
        gid: 0,
        rdev: 0,
        flags: 0,
        blksize: 4096,
    }
}

impl Filesystem for StandIn {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match (parent, name.to_str()) {
            (INodeNo::ROOT, Some("d")) => reply.entry(&TTL, &attr(DIRECTORY), Generation(0)),
            (DIRECTORY, Some("f")) => reply.entry(&TTL, &attr(FILE), Generation(0)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &attr(ino));
    }

    fn ioctl(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        _: IoctlFlags,
        request: u32,
        argument: &[u8],
        answer_bytes: u32,
        reply: ReplyIoctl,
    ) {
        match request {
            GET_STRIPEINFO if ino == FILE => {
                assert_eq!(answer_bytes, 12);
                // RAID0 in chunks of 512 KiB over four targets.
                reply.ioctl(0, &[1, 0, 0, 0, 0, 0, 8, 0, 4, 0, 0, 0]);
            }
            GETENTRYINFO_V2 if self.recent && ino != FILE => {
                assert_eq!((argument.len(), answer_bytes), (1944, 1944));
                let mut answer = argument.to_vec();
                let mut set = |at: usize, bytes: &[u8]| answer[at..at + bytes.len()].copy_from_slice(bytes);
                set(287, b"7A-5F3E-1"); // entry id
                set(324, &[1, 0, 0, 0]); // pattern type
                set(328, &[0, 0, 16, 0]); // chunk size
                set(332, &[2, 0, 0, 0]); // storage pool
                set(336, &[8, 0, 0, 0]); // default number of targets
                match &argument[..2] {
                    b"f\0" if ino == DIRECTORY => set(340, &[3, 0]), // number of targets
                    [0, _] => {}
                    name => panic!("{name:?} was asked for"),
                }
                reply.ioctl(0, &answer);
            }
            _ => reply.error(Errno::ENOTTY),
        }
    }
}

/// A mount of the stand-in, of type `fuse.beegfs`. BeeGFS mounts have the type after the dot.
struct Mounted {
    dir: tempfile::TempDir,
    _session: BackgroundSession,
}

impl Mounted {
    fn new(stand_in: StandIn) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let device = File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let options = CString::new(options).unwrap();
        let mounted = mount("stand-in", dir.path(), "fuse.beegfs", MountFlags::RDONLY, options.as_c_str());
        mounted.expect("a mount by root");
        let session = Session::from_fd(stand_in, device.into(), SessionACL::default(), Config::default());
        Self { dir, _session: session.unwrap().spawn().unwrap() }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(self.dir.path(), UnmountFlags::DETACH);
    }
}

async fn layouts(recent: bool) -> [Option<Layout>; 2] {
    let mounted = Mounted::new(StandIn { recent });
    let url = format!("beegfs://{}", mounted.dir.path().display());
    let pool: Arc<dyn Pool> = PoolLocation::parse(&url).unwrap().open(Duration::from_secs(10)).await.unwrap();
    assert!(pool.capabilities().layouts && pool.capabilities().read_only);
    let of = async |path: &str| pool.layout(&PoolPath::parse(path).unwrap()).await.unwrap();
    [of("d").await, of("d/f").await]
}

fn layout(chunk_bytes: u64, targets: u32, storage_pool: Option<&str>) -> Option<Layout> {
    let storage_pool = storage_pool.map(str::to_owned);
    Some(Layout { stripe: Some(Stripe { chunk_bytes, targets }), storage_pool, is_storage_pool_untold: false })
}

#[tokio::test(flavor = "multi_thread")]
async fn stripes_and_storage_pools_come_through_the_kernel() {
    assert_eq!(layouts(true).await, [layout(1 << 20, 8, Some("2")), layout(1 << 20, 3, Some("2"))]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_client_tells_the_stripes_of_files() {
    assert_eq!(layouts(false).await, [None, layout(512 << 10, 4, None)]);
}
