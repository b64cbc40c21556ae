//! Pools behind real servers, through the mount.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_backends::Pool;
use forebay_backends::dir::DirPool;
use forebay_backends::nfs::NfsPool;
use forebay_backends::s3::S3Pool;
use forebay_backends::store::StorePool;
use forebay_tests::mount::{Mount, Options, alone, content};
use forebay_tests::process::{sh, wait_until};
use forebay_tests::servers::Server;
use forebay_tests::servers::nfs::{NfsServer, Squash};
use forebay_tests::servers::s3::{self, Rgw, Versitygw};
use forebay_tests::servers::stores::{Kind, StoreServer};
use forebay_tests::sweep::{POLICY, sweep};
use forebay_tests::tree::{Bucket, Tree};

fn nfs() -> NfsServer {
    NfsServer::start(Path::new("/var/tmp"), Squash::None)
}

fn over(server: &dyn Server, options: Options) -> Mount {
    Mount::new(Options { remote: Some(server.remote()), ..options })
}

/// A policy under which no program gets an error while the server is started again. Ceph's gateway can take 20 s for it
/// beside other tests; the default deadline is 10 s.
fn patient() -> Options {
    Options::policy(&format!("{POLICY}[pool]\ndeadline = \"60s\"\n"))
}

/// The longest time from the return of the server to the arrival of absorbed writes: the flusher retries now and then.
const ARRIVES_WITHIN: Duration = Duration::from_secs(120);
/// Kills of the daemon, and of the server, for each kind of pool.
const KILLS: u64 = 20;
/// Ceph's gateway answers only some hundred requests per second on the test machine.
const KILLS_OVER_CEPH: u64 = 10;

#[test]
fn nothing_is_lost_or_invented_by_kills_over_s3() {
    let _alone = alone();
    let mut server = Versitygw::start();
    let mount = over(&server, patient());
    sweep(&mount, KILLS, false, Some(&mut server));
}

#[test]
fn nothing_is_lost_or_invented_by_kills_over_ceph() {
    let _alone = alone();
    let mut server = Rgw::start();
    let mount = over(&server, patient());
    sweep(&mount, KILLS_OVER_CEPH, false, Some(&mut server));
}

#[test]
fn nothing_is_lost_or_invented_by_kills_over_nfs() {
    let _alone = alone();
    let mut server = nfs();
    let mount = over(&server, patient());
    sweep(&mount, KILLS, true, Some(&mut server));
}

/// The bucket client of the tests shows what the files of the server show. So it can be trusted with servers that have
/// no plain files.
#[test]
fn a_bucket_is_seen_as_its_files_are() {
    let mut server = Versitygw::start();
    for (key, content) in [
        ("d/a", "1"),
        ("d/b.c", "22"),
        ("d/sub/?x-id=PutObject", ""),
        ("d/sub/in", "333"),
        ("d/empty/?x-id=PutObject", ""),
    ] {
        server.curl(&["-X", "PUT", "-d", content], key);
    }
    let (files, bucket) = (server.remote().tree.below("d"), Bucket::at(server.port()).below("d"));
    let look = |tree: &dyn Tree| {
        let mut names = tree.names().unwrap();
        names.sort();
        assert_eq!(names, ["a", "b.c", "empty", "sub"], "{tree}");
        assert_eq!(tree.below("sub").read("in").unwrap(), b"333", "{tree}");
        assert_eq!((tree.read("a").unwrap(), tree.links("a").unwrap()), (b"1".to_vec(), 1), "{tree}");
        for nothing in ["b", "c"] {
            assert_eq!(tree.read(nothing).unwrap_err().kind(), ErrorKind::NotFound, "{tree}");
            assert_eq!(tree.links(nothing).unwrap_err().kind(), ErrorKind::NotFound, "{tree}");
        }
    };
    look(&*files);
    look(&*bucket);
    // While the server is away, the bucket client repeats its requests.
    server.kill();
    let seen = std::thread::spawn(move || (bucket.names().unwrap().len(), bucket.read("a").unwrap()));
    std::thread::sleep(Duration::from_millis(300));
    assert!(!seen.is_finished());
    server.resume();
    assert_eq!(seen.join().unwrap(), (4, b"1".to_vec()));
    // The bucket client sees another client's change at once.
    server.curl(&["-X", "PUT", "-d", "other"], "d/a");
    assert_eq!(Bucket::at(server.port()).below("d").read("a").unwrap(), b"other");
}

/// The table of capabilities in docs/POOLS.md is what the pools report.
#[tokio::test(flavor = "multi_thread")]
async fn the_documented_capabilities_are_those_of_the_pools() {
    let (gateway, ceph, ganesha) = (Versitygw::start(), Rgw::start(), nfs());
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let attach = async |url: &str| S3Pool::attach(url, &s3::environment()).await.unwrap();
    let stores = [Kind::FakeGcs, Kind::Azurite, Kind::Nginx].map(StoreServer::start);
    let stores = futures::future::join_all(stores).await;
    let store = async |server: &StoreServer| StorePool::attach(&server.url(""), &server.environment()).await.unwrap();
    let pools: [(&str, Arc<dyn Pool>); 7] = [
        ("directory on ext4", Arc::new(DirPool::open(dir.path()).unwrap())),
        ("NFS, ganesha", Arc::new(NfsPool::open(&ganesha.url()).await.unwrap())),
        ("S3, versitygw", Arc::new(attach(&gateway.url("")).await)),
        ("S3, Ceph", Arc::new(attach(&ceph.url("")).await)),
        ("Google, fake-gcs-server", Arc::new(store(&stores[0]).await)),
        ("Azure, Azurite", Arc::new(store(&stores[1]).await)),
        ("web, nginx", Arc::new(store(&stores[2]).await)),
    ];
    let columns = pools.each_ref().map(|(_, pool)| pool.capabilities().rows());
    let mut table =
        format!("| | {} |\n|{}\n", pools.each_ref().map(|(name, _)| *name).join(" | "), "---|".repeat(1 + pools.len()));
    for (n, (name, _)) in columns[0].iter().enumerate() {
        let values = columns.each_ref().map(|column| column[n].1.as_str());
        table.push_str(&format!("| {name} | {} |\n", values.join(" | ")));
    }
    let page = include_str!("../../docs/POOLS.md");
    assert!(page.contains(&table), "docs/POOLS.md should have this table:\n\n{table}");
}

/// A tree that is written on one node comes back on another node, byte for byte.
fn a_tree_comes_back(server: &dyn Server) {
    let mount = over(server, Options::default());
    let tree = mount.place.native();
    sh(&tree, "mkdir -p a/b/c 'with space' empty && ln -s ../b a/link && touch a/nothing", Duration::from_secs(10));
    for (n, len) in [1, 4_096, 100_000, 3 << 20, 20 << 20].into_iter().enumerate() {
        std::fs::write(tree.join(format!("a/b/file-{n}")), content(n as u64, len)).unwrap();
        std::fs::write(tree.join(format!("with space/\u{fc}-{n}")), content(n as u64 + 100, len / 2)).unwrap();
    }
    sh(
        &tree,
        "touch -d '2001-02-03 04:05:06.789' a/b/file-1 && chmod 640 a/b/file-1 && chown 7:8 a/b/file-2",
        Duration::from_secs(10),
    );
    let copy = format!("cp -a . {}", mount.path("tree").display());
    sh(&tree, &copy, Duration::from_secs(60));
    mount.flush();
    mount.umount();

    let other = over(server, Options::default());
    let shown = other.path("tree");
    sh(&tree, &format!("diff -r --no-dereference . {}", shown.display()), Duration::from_secs(60));
    // The sizes of directories differ between file systems, and some servers give symlinks no times.
    let list = "find . -type f -printf '%p %m %U %G %s %T@\\n' -o -type l -printf '%p %l\\n' \\
                -o -type d -printf '%p %m %U %G %T@\\n' | sort";
    let (here, there) = (sh(&tree, list, Duration::from_secs(10)), sh(&shown, list, Duration::from_secs(10)));
    assert_eq!(here.out, there.out);
    sh(&shown, "mv a moved && rm -r 'with space' && mv moved/b/file-0 moved/b/file-1", Duration::from_secs(30));
    other.flush();
    other.umount();

    let third = over(server, Options::default());
    let names = sh(&third.path("tree"), "find . | sort", Duration::from_secs(30));
    let wanted = "./empty ./moved ./moved/b ./moved/b/c ./moved/b/file-1 ./moved/b/file-2 ./moved/b/file-3 \
                  ./moved/b/file-4 ./moved/link ./moved/nothing";
    assert_eq!(names.out.split_whitespace().filter(|name| *name != ".").collect::<Vec<_>>().join(" "), wanted);
    let kept = std::fs::read(third.path("tree/moved/b/file-4")).unwrap();
    assert!(kept == content(4, 20 << 20), "the content changed by a rename");
}

#[test]
fn a_tree_goes_to_s3_and_comes_back() {
    let _alone = alone();
    a_tree_comes_back(&Versitygw::start());
}

#[test]
fn a_tree_goes_to_ceph_and_comes_back() {
    let _alone = alone();
    a_tree_comes_back(&Rgw::start());
}

#[test]
fn a_tree_goes_to_nfs_and_comes_back() {
    let _alone = alone();
    a_tree_comes_back(&nfs());
}

/// A name that a bucket cannot hold is refused at once, because it could never be flushed.
#[test]
fn names_that_no_key_can_have_are_refused_over_s3() {
    let _alone = alone();
    let server = Versitygw::start();
    let mount = over(&server, Options::policy(POLICY));
    let errno = |done: std::io::Result<()>| done.unwrap_err().raw_os_error();
    let mut deep = std::path::PathBuf::from("d".repeat(200));
    for _ in 0..4 {
        std::fs::create_dir(mount.path(&deep)).unwrap();
        deep.push("d".repeat(200));
    }
    // The directories above the name take 4 × 201 bytes of the key.
    let (held, too_long) = ("n".repeat(219), "n".repeat(220));
    let in_deep = |name: &str| mount.path(deep.with_file_name(name));
    assert_eq!(errno(std::fs::write(in_deep(&too_long), "x")), Some(libc::ENAMETOOLONG));
    assert_eq!(errno(std::fs::create_dir(in_deep(&too_long))), Some(libc::ENAMETOOLONG));
    std::fs::write(in_deep(&held), "x").unwrap();
    assert_eq!(errno(std::fs::rename(in_deep(&held), in_deep(&too_long))), Some(libc::ENAMETOOLONG));
    assert_eq!(errno(std::fs::write(mount.path("x.%bytes"), "x")), Some(libc::EINVAL));
    mount.flush();
    assert_eq!(std::fs::read(in_deep(&held)).unwrap(), b"x");
}

/// Waits until the pool has a file.
fn arrives(mount: &Mount, name: &str, bytes: &[u8]) {
    let since = Instant::now();
    while mount.tree().read(name).ok().as_deref() != Some(bytes) {
        assert!(since.elapsed() < ARRIVES_WITHIN, "{}", mount.log());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// While the server is away, programs read resident files and write files. The written files arrive afterwards.
fn an_outage_is_survived(server: &mut dyn Server) {
    let mount = over(server, Options::policy("[default]\nflush = \"idle:1s\"\n"));
    std::fs::write(mount.path("kept"), content(1, 100_000)).unwrap();
    mount.flush();
    // If the daemon knows all names of a directory, it can create a new name without asking the pool.
    assert_eq!(std::fs::read_dir(mount.path("")).unwrap().count(), 1);
    server.kill();
    assert_eq!(std::fs::read(mount.path("kept")).unwrap(), content(1, 100_000));
    std::fs::write(mount.path("absorbed"), content(2, 5 << 20)).unwrap();
    assert_eq!(std::fs::read(mount.path("absorbed")).unwrap(), content(2, 5 << 20));
    assert!(mount.status().dirty_files > 0);
    for at in 0..5 {
        std::fs::write(mount.path(format!("more-{at}")), "more").unwrap();
    }
    let told = || mount.forebay(["status"], &[&mount.place.mnt()]).ok().out;
    wait_until("one line for all files", || told().matches("NOT FLUSHED").count() == 1);
    server.start_again();
    arrives(&mount, "absorbed", &content(2, 5 << 20));
    mount.flush();
}

/// A mount begins while the server is away, and its daemon dies then, too.
fn an_outage_at_the_start_is_survived(server: &mut dyn Server) {
    let policy = "[default]\nflush = \"idle:1s\"\n[pool]\ndeadline = \"3s\"\n";
    let mount = over(server, Options::policy(policy));
    std::fs::write(mount.path("kept"), content(1, 100_000)).unwrap();
    mount.flush();
    assert_eq!(std::fs::read_dir(mount.path("")).unwrap().count(), 1);
    mount.umount();
    server.kill();
    mount.mount();
    assert_eq!(std::fs::read(mount.path("kept")).unwrap(), content(1, 100_000));
    std::fs::write(mount.path("absorbed"), content(2, 5 << 20)).unwrap();
    let worker = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(worker);
    assert_eq!(std::fs::read(mount.path("kept")).unwrap(), content(1, 100_000));
    assert_eq!(std::fs::read(mount.path("absorbed")).unwrap(), content(2, 5 << 20));
    assert!(mount.status().dirty_files > 0);
    server.start_again();
    arrives(&mount, "absorbed", &content(2, 5 << 20));
    assert!(mount.log().contains("the pool is attached"), "{}", mount.log());
    mount.flush();
}

/// SEMANTICS 12: "A mount can also begin then, if its fast pool was mounted with this pool before."
#[test]
fn a_mount_begins_during_an_outage_of_s3() {
    let _alone = alone();
    an_outage_at_the_start_is_survived(&mut Versitygw::start());
}

#[test]
fn a_mount_begins_during_an_outage_of_nfs() {
    let _alone = alone();
    an_outage_at_the_start_is_survived(&mut nfs());
}

#[test]
fn an_outage_of_s3_is_survived() {
    let _alone = alone();
    an_outage_is_survived(&mut Versitygw::start());
}

#[test]
fn an_outage_of_ceph_is_survived() {
    let _alone = alone();
    an_outage_is_survived(&mut Rgw::start());
}

#[test]
fn an_outage_of_nfs_is_survived() {
    let _alone = alone();
    an_outage_is_survived(&mut nfs());
}
