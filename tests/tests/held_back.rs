//! What the pool refuses or delays: attributes that it cannot hold, and writers that wait for room.

use std::time::Duration;

use forebay_backends::{ErrorKind, Pool, Time};
use forebay_engine::{Change, Ino, Lookup, Options, Overlay, Policy, SetTime};
use forebay_tests::engine::*;
use forebay_tests::mount::{self, Mount, Place};
use rustix::fs::{XattrFlags, setxattr};
use rustix::io::Errno;

/// SEMANTICS 46
#[tokio::test(flavor = "multi_thread")]
async fn an_attribute_that_the_pool_cannot_hold_is_refused_when_it_is_set() {
    let fixture = Fixture::new();
    fixture.memory.limit_xattrs(4096);
    let overlay = fixture.open().await;
    write(&overlay, "a", "content").await.unwrap();
    let ino = find(&overlay, "a").await;
    let large = vec![7; 3000];
    overlay.set_xattr(ino, b"user.fits", &large, 0, CALLER).await.unwrap();
    let cases = [
        (&b"foo.bar"[..], &large[..10], ErrorKind::Unsupported),
        (b"user.", &large[..10], ErrorKind::InvalidInput),
        (b"user.b", &large[..], ErrorKind::NoSpace),
    ];
    for (name, value, kind) in cases {
        let error = refused(overlay.set_xattr(ino, name, value, 0, CALLER).await);
        assert_eq!(error.kind(), kind, "{}", name.escape_ascii());
    }
    // A value that replaces another one of the same name fits.
    overlay.set_xattr(ino, b"user.fits", &vec![8; 3500], 0, CALLER).await.unwrap();
    flushed(&overlay).await;
    // While the pool does not answer, an attribute is accepted, and the flush finds out whether it fits.
    fixture.fault.set_down(true);
    overlay.set_xattr(ino, b"user.small", b"1", 0, CALLER).await.unwrap();
}

/// SEMANTICS 46
#[tokio::test(flavor = "multi_thread")]
async fn content_goes_to_the_pool_without_an_attribute_that_it_refuses_later() {
    let fixture = Fixture::new();
    let overlay = fixture.open().await;
    fixture.mkdir("made").await;
    for path in ["a", "made/b"] {
        write(&overlay, path, "content").await.unwrap();
    }
    overlay.mkdir(find(&overlay, "made").await, b"dir", 0o755, 0, CALLER).await.unwrap();
    write(&overlay, "made/dir/c", "content").await.unwrap();
    for path in ["a", "made/b", "made/dir"] {
        let ino = find(&overlay, path).await;
        for (name, size) in [(&b"user.large"[..], 3000), (b"user.small", 10)] {
            overlay.set_xattr(ino, name, &vec![7; size], 0, CALLER).await.unwrap();
        }
    }
    fixture.memory.limit_xattrs(100);
    assert!(flush(&overlay).await.failed > 0, "that an attribute is missing in the pool is told");
    let all =
        [("/a", "content"), ("/made/", ""), ("/made/b", "content"), ("/made/dir/", ""), ("/made/dir/c", "content")];
    assert_eq!(fixture.pooled(), pairs(&all));
    let dirty = overlay.dirty().await.unwrap();
    assert_eq!(dirty.len(), 3, "{dirty:?}");
    for file in &dirty {
        let why = file.error.as_deref().unwrap_or_default();
        assert!(why.contains("user.large"), "{file:?}");
    }
    for path in ["a", "made/b", "made/dir"] {
        let xattrs = fixture.memory.xattrs(&pool_path(path)).await.unwrap();
        assert_eq!(xattrs, [(b"user.small".to_vec(), vec![7; 10])], "{path}");
    }
    // New content reaches the pool, too, and the mount still shows the attribute.
    write(&overlay, "a", "newer").await.unwrap();
    assert!(flush(&overlay).await.failed > 0);
    assert_eq!(fixture.pooled()[0], ("/a".into(), "newer".into()));
    let ino = find(&overlay, "a").await;
    assert_eq!(overlay.get_xattr(ino, b"user.large").await.unwrap().len(), 3000);
    // The content may be evicted: the pool has it.
    assert!(evict(&overlay, false).await.bytes > 0);
    fixture.memory.limit_xattrs(1 << 20);
    flushed(&overlay).await;
    assert_eq!(fixture.memory.xattrs(&pool_path("a")).await.unwrap().len(), 2);
}

/// SEMANTICS 46
#[test]
fn the_file_system_of_a_directory_pool_tells_which_attributes_it_takes() {
    let place = Place::new();
    place.small_disk("pool", "ext4", 64);
    let mount = Mount::on(place, mount::Options::policy("[default]\nflush = \"manual\"\n"));
    let file = mount.path("f");
    // This ext4 has blocks of 1 KiB, and one of them for the attributes of a file.
    std::fs::write(&file, "content").unwrap();
    // A file on ext4 itself gives the expected answers.
    let native = mount.pool("native");
    std::fs::write(&native, "").unwrap();
    let big = vec![7; 60_000];
    for (name, value, expected) in
        [("foo.bar", &b"1"[..], Errno::OPNOTSUPP), ("user.", b"1", Errno::INVAL), ("user.big", &big, Errno::NOSPC)]
    {
        assert_eq!(setxattr(&native, name, value, XattrFlags::empty()), Err(expected), "{name} on ext4");
        assert_eq!(setxattr(&file, name, value, XattrFlags::empty()), Err(expected), "{name}");
        assert_eq!(
            setxattr(mount.place.mnt(), name, value, XattrFlags::empty()),
            Err(expected),
            "{name} of a directory"
        );
    }
    setxattr(&file, "user.fits", &[7; 700], XattrFlags::empty()).unwrap();
    assert_eq!(setxattr(&file, "user.more", &[7; 700], XattrFlags::empty()), Err(Errno::NOSPC), "both together");
    setxattr(&file, "trusted.a", b"1", XattrFlags::empty()).unwrap();
    mount.flush();
    assert_eq!(std::fs::read_to_string(mount.pool("f")).unwrap(), "content");
    let mut value = [0; 4000];
    assert_eq!(rustix::fs::getxattr(mount.pool("f"), "user.fits", &mut value[..]), Ok(700));
}

fn flushing() -> Policy {
    let text = "[default]\nflush = \"idle:1h\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n";
    Policy::parse(text).unwrap()
}

/// SEMANTICS 47
#[tokio::test(flavor = "multi_thread")]
async fn a_writer_waits_while_flushing_makes_room() {
    let fixture = Fixture::new();
    let options = Options { limit_bytes: Some(8 << 20), policy: flushing(), ..fixture.options() };
    let overlay = Overlay::open(options).await.unwrap();
    let content = "x".repeat(3 << 20);
    for file in 0..8 {
        write(&overlay, &format!("f{file}"), &content).await.unwrap();
    }
    assert!(overlay.status().await.used_bytes <= 8 << 20);
    flushed(&overlay).await;
    assert_eq!(fixture.pooled().len(), 8);
    assert!(fixture.pooled().iter().all(|(_, there)| *there == content));
}

/// SEMANTICS 47
#[tokio::test(flavor = "multi_thread")]
async fn a_writer_does_not_wait_for_room_that_flushing_cannot_make() {
    let content = "x".repeat(3 << 20);
    for case in ["manual", "down"] {
        let fixture = Fixture::new();
        let policy = if case == "manual" { fixture.options().policy } else { flushing() };
        let overlay = Overlay::open(Options { limit_bytes: Some(8 << 20), policy, ..fixture.options() }).await.unwrap();
        // The directory is new, so the daemon does not ask the pool for names in it.
        overlay.mkdir(Ino::ROOT, b"d", 0o755, 0, CALLER).await.unwrap();
        fixture.fault.set_down(case == "down");
        let begun = std::time::Instant::now();
        for file in 0..2 {
            write(&overlay, &format!("d/f{file}"), &content).await.unwrap();
        }
        let error = refused(write(&overlay, "d/f2", &content).await);
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{case}");
        assert!(error.to_string().contains("bytes do not fit"), "{case}: {error}");
        assert!(begun.elapsed() < Duration::from_secs(60), "{case}");
        assert_eq!(overlay.status().await.waiting_for_room, 0, "{case}");
    }
}

/// SEMANTICS 47
#[tokio::test(flavor = "multi_thread")]
async fn status_tells_that_writers_wait_for_room() {
    let fixture = Fixture::new();
    let options = Options { limit_bytes: Some(8 << 20), policy: flushing(), ..fixture.options() };
    let overlay = Overlay::open(options).await.unwrap();
    let content = "x".repeat(3 << 20);
    overlay.mkdir(Ino::ROOT, b"d", 0o755, 0, CALLER).await.unwrap();
    fixture.fault.set_hanging(true);
    for file in 0..2 {
        write(&overlay, &format!("d/f{file}"), &content).await.unwrap();
    }
    let writer = {
        let (overlay, content) = (overlay.clone(), content.clone());
        tokio::spawn(async move { write(&overlay, "d/f2", &content).await })
    };
    let begun = std::time::Instant::now();
    while overlay.status().await.waiting_for_room != 1 {
        assert!(begun.elapsed() < Duration::from_secs(60) && !writer.is_finished());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    fixture.fault.set_hanging(false);
    writer.await.unwrap().unwrap();
    assert_eq!(overlay.status().await.waiting_for_room, 0);
}

async fn in_pool(fixture: &Fixture, path: &str, content: impl Fn(&str) -> bool, within_secs: u64) {
    let begun = std::time::Instant::now();
    loop {
        if fixture.pooled().iter().any(|(there, is)| there == path && content(is)) {
            return;
        }
        assert!(begun.elapsed().as_secs() < within_secs, "{path} is not in the pool: {:?}", fixture.pooled());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// SEMANTICS 48: the rule says half a second, so the flush comes after ten seconds.
#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_is_written_all_the_time_is_flushed_at_last() {
    let fixture = Fixture::new();
    let text = "[default]\nflush = \"idle:500ms\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n";
    let policy = Policy::parse(text).unwrap();
    let overlay = Overlay::open(Options { policy, ..fixture.options() }).await.unwrap();
    let ino = overlay.create(Ino::ROOT, b"log", 0o644, 0, RDWR, CALLER).await.unwrap().0.attr.ino;
    let writer = {
        let overlay = overlay.clone();
        tokio::spawn(async move {
            for line in 0.. {
                overlay.write(ino, line * 5, "line\n".into()).await.unwrap();
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        })
    };
    in_pool(&fixture, "/log", |content| content.ends_with("line\n"), 60).await;
    writer.abort();
}

/// SEMANTICS 48
#[tokio::test(flavor = "multi_thread")]
async fn times_of_files_delay_no_flush() {
    let fixture = Fixture::new();
    let text = "[default]\nflush = \"idle:200ms\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n";
    let policy = Policy::parse(text).unwrap();
    let overlay = Overlay::open(Options { policy, ..fixture.options() }).await.unwrap();
    let now = Time::now();
    let time = SetTime::At(Time { secs: now.secs + 3600, ..now });
    overlay.mkdir(Ino::ROOT, b"d", 0o755, 0, CALLER).await.unwrap();
    for path in ["a", "d", "d/b"] {
        if path != "d" {
            write(&overlay, path, "content").await.unwrap();
        }
        let change = Change { atime: Some(time), mtime: Some(time), ..Change::default() };
        overlay.setattr(find(&overlay, path).await, &change, CALLER).await.unwrap();
    }
    for path in ["/a", "/d/b"] {
        in_pool(&fixture, path, |content| content == "content", 30).await;
    }
    assert_eq!(fixture.memory.stat(&pool_path("a")).await.unwrap().mtime.secs, now.secs + 3600);
}

/// SEMANTICS 9: the kernel may cache an answer only for the rest of the time, also if an earlier listing gave the
/// answer.
#[tokio::test(flavor = "multi_thread")]
async fn names_lag_by_the_ttl_once_and_not_twice() {
    const TTL: Duration = Duration::from_secs(4);
    let fixture = Fixture::new();
    fixture.put("a", b"x").await;
    let policy = Policy::parse(&format!("[default]\nmetadata-ttl = \"{}s\"\n", TTL.as_secs())).unwrap();
    let overlay = Overlay::open(Options { policy, ..fixture.options() }).await.unwrap();
    overlay.read_dir(Ino::ROOT).await.unwrap();
    let listed = std::time::Instant::now();
    tokio::time::sleep(TTL / 2).await;
    for name in ["a", "none"] {
        let age = listed.elapsed();
        if age >= TTL {
            println!("the machine was too busy: {age:?}");
            return;
        }
        let ttl = match overlay.lookup(Ino::ROOT, name.as_bytes()).await.unwrap() {
            Lookup::Found(entry) => entry.ttl,
            Lookup::Negative { ttl } => ttl,
        };
        assert!(ttl + age <= TTL + Duration::from_millis(100), "{name}: {ttl:?} after {age:?}");
    }
}
