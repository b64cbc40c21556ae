//! Fast directories that are not there, and fast pools whose catalog is repaired.

use std::fs::{self, File};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use forebay_api::scratch::ScratchRequest;
use forebay_backends::ErrorKind;
use forebay_engine::salvage::{Salvage, salvage};
use forebay_engine::{Options as EngineOptions, Overlay, Policy};
use forebay_tests::engine::{Fixture, flushed, opened, read, write};
use forebay_tests::mount::{Mount, Options, Place, attempt};
use forebay_tests::process::{sh, wait_until};
use forebay_tests::scratch::create;

const SHELL: Duration = Duration::from_secs(60);
const USAGE: i32 = 2;

/// SEMANTICS 1, although the fast directory is hidden when the next worker starts.
#[test]
fn a_worker_that_takes_over_waits_for_its_fast_directory() {
    let mount = Mount::manual();
    fs::write(mount.path("synced"), "synced").unwrap();
    File::open(mount.path("synced")).unwrap().sync_all().unwrap();
    let old = mount.worker();
    sh(&mount.place.at(""), "mount -t tmpfs none fast", SHELL);
    mount.kill_worker();
    wait_until("the refusal", || mount.log().contains("is another one than before"));
    assert!(!mount.place.fast().join("catalog").exists(), "a catalog was made");
    sh(&mount.place.at(""), "umount --lazy fast", SHELL);
    mount.wait_for_other_worker(old);
    assert_eq!(fs::read(mount.path("synced")).unwrap(), b"synced");
    mount.flush();
    assert_eq!(fs::read(mount.pool("synced")).unwrap(), b"synced");
}

#[test]
fn a_mount_without_one_of_its_fast_directories_is_refused() {
    let place = Place::new();
    let second = place.at("second");
    let more = vec!["--fast".into(), second.display().to_string()];
    let options = Options { more, ..Options::policy("[default]\nflush = \"manual\"\n") };
    let mount = Mount::on(place, options.clone());
    fs::write(mount.path("file"), "file").unwrap();
    mount.umount();
    let away = mount.place.at("away");
    fs::rename(&second, &away).unwrap();
    for _ in 0..2 {
        attempt(&mount.place, &options).refused(USAGE, &["second", "mount it", "echo"]);
    }
    fs::remove_dir_all(&second).unwrap();
    fs::rename(&away, &second).unwrap();
    mount.mount();
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"file");
}

#[test]
fn a_scratch_directory_outlives_a_damaged_catalog() {
    let mount = Mount::manual();
    let dir = create(&mount, &["--job", "run"]);
    fs::write(dir.join("result"), "result").unwrap();
    mount.umount();
    fs::write(mount.place.fast().join("catalog/CURRENT"), "garbage").unwrap();
    mount.forebay(["fsck", "--repair"], &[&mount.place.fast()]).ok();
    for _ in 0..2 {
        mount.mount();
        assert_eq!(fs::read(dir.join("result")).unwrap(), b"result");
        assert_eq!(create(&mount, &["--job", "run"]), dir, "it is known");
        mount.umount();
    }
}

/// Repairs a fast pool. A task of an overlay that was shut down in this process may hold it for a moment.
fn repaired(fast: &[PathBuf], tiers: &[PathBuf]) -> Option<Salvage> {
    let begun = Instant::now();
    loop {
        match salvage(fast, tiers) {
            Err(error) if error.is(ErrorKind::Busy) && begun.elapsed() < Duration::from_secs(30) => {
                std::thread::sleep(Duration::from_millis(5));
            }
            salvaged => return salvaged.unwrap(),
        }
    }
}

async fn close(overlay: Overlay) {
    overlay.shutdown().await.unwrap();
    drop(overlay);
}

#[tokio::test(flavor = "multi_thread")]
async fn repair_keeps_scratch_directories_with_their_owners() {
    let fixture = Fixture::new();
    let overlay = fixture.open().await;
    let request = ScratchRequest { id: "run".into(), limit_bytes: Some(1 << 20), ..Default::default() };
    let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let made = overlay.create_scratch(request, own.0, own.1).await.unwrap();
    let file = PathBuf::from(&made.path).join("result");
    fs::write(&file, "result").unwrap();
    close(overlay).await;
    fs::remove_file(fixture.fast.path().join("catalog/CURRENT")).unwrap();
    assert!(repaired(&[fixture.fast.path().to_owned()], &[]).is_some());
    for _ in 0..2 {
        let overlay = fixture.open().await;
        let known = overlay.scratch_dirs().unwrap();
        assert_eq!(known.len(), 1, "{known:?}");
        assert_eq!((known[0].id.as_str(), known[0].uid, &known[0].path), ("run", own.0, &made.path));
        assert_eq!(fs::read(&file).unwrap(), b"result");
        close(overlay).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn repair_sets_aside_what_is_on_tiers_and_the_next_mount_uses_them() {
    let fixture = Fixture::new();
    let second = tempfile::tempdir_in("/var/tmp").unwrap();
    let tier = second.path().join("tier");
    let policy = format!(
        "[default]\nflush = \"manual\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n[[tier]]\nname = \"quick\"\nfast = [\"{}\"]\n\
         limit = \"100MiB\"\n",
        tier.display()
    );
    let options = || EngineOptions { policy: Policy::parse(&policy).unwrap(), ..fixture.options() };
    let overlay = opened(options).await;
    write(&overlay, "dirty", "only here").await.unwrap();
    close(overlay).await;
    fs::write(fixture.fast.path().join("catalog/CURRENT"), "garbage").unwrap();
    let fast = [fixture.fast.path().to_owned()];
    let salvaged = repaired(&fast, std::slice::from_ref(&tier)).unwrap();
    assert!(salvaged.lost.is_empty(), "{salvaged:?}");
    assert_eq!(fs::read(tier.join("saved/files/dirty")).unwrap(), b"only here", "{salvaged:?}");
    let overlay = opened(options).await;
    write(&overlay, "again", "again").await.unwrap();
    assert_eq!(read(&overlay, "again").await.unwrap(), "again");
    close(overlay).await;
}

/// Without the mark of a directory that is not there, its files would be reported as lost.
#[tokio::test(flavor = "multi_thread")]
async fn repair_waits_for_a_directory_that_is_not_there() {
    let fixture = Fixture::new();
    let more = tempfile::tempdir_in("/var/tmp").unwrap();
    let fast = [fixture.fast.path().to_owned(), more.path().join("second")];
    let options = || EngineOptions { fast: fast.to_vec(), ..fixture.options() };
    close(opened(options).await).await;
    fs::write(fast[0].join("catalog/CURRENT"), "garbage").unwrap();
    let away = more.path().join("away");
    fs::rename(&fast[1], &away).unwrap();
    let begun = Instant::now();
    let refused = loop {
        let error = salvage(&fast, &[]).unwrap_err();
        if !error.is(ErrorKind::Busy) || begun.elapsed() > Duration::from_secs(30) {
            break error;
        }
    };
    assert!(refused.is(ErrorKind::InvalidInput) && refused.to_string().contains("second"), "{refused}");
    fs::remove_dir_all(&fast[1]).unwrap();
    fs::rename(&away, &fast[1]).unwrap();
    assert!(repaired(&fast, &[]).is_some());
    close(opened(options).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fast_directory_that_is_left_off_is_given_up_unless_it_has_the_only_copy() {
    let fixture = Fixture::new();
    fixture.put("clean", b"clean").await;
    let more = tempfile::tempdir_in("/var/tmp").unwrap();
    let fast = [more.path().join("first"), more.path().join("second")];
    let with = |count: usize| EngineOptions { fast: fast[..count].to_vec(), ..fixture.options() };
    let overlay = opened(|| with(2)).await;
    assert_eq!(read(&overlay, "clean").await.unwrap(), "clean");
    // Content goes to the directory whose file system has most free space, which both have: to any of them.
    let names: Vec<String> = (0..10).map(|at| format!("dirty{at}")).collect();
    for name in &names {
        write(&overlay, name, "only here").await.unwrap();
    }
    close(overlay).await;
    let begun = Instant::now();
    let refused = loop {
        let error = Overlay::open(with(1)).await.err().unwrap();
        if !error.is(ErrorKind::Busy) || begun.elapsed() > Duration::from_secs(30) {
            break error;
        }
    };
    assert!(refused.is(ErrorKind::InvalidInput) && refused.to_string().contains("dirty"), "{refused}");
    let overlay = opened(|| with(2)).await;
    flushed(&overlay).await;
    close(overlay).await;
    for count in [1, 1, 2, 2] {
        let overlay = opened(|| with(count)).await;
        assert_eq!(read(&overlay, "clean").await.unwrap(), "clean");
        for name in &names {
            assert_eq!(read(&overlay, name).await.unwrap(), "only here");
        }
        close(overlay).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_takes_over_makes_no_catalog() {
    let fixture = Fixture::new();
    let options = || EngineOptions { reattached: true, ..fixture.options() };
    let refused = Overlay::open(options()).await.err().unwrap();
    assert!(refused.is(ErrorKind::Unavailable), "{refused}");
    assert_eq!(fs::read_dir(fixture.fast.path()).unwrap().count(), 0);
    close(fixture.open().await).await;
    close(opened(options).await).await;
}
