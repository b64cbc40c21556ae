//! Unfinished uploads that killed daemons left in the pool.

use std::fs;
use std::path::Path;

use forebay_tests::mount::{Mount, Options};
use forebay_tests::process::wait_until;

fn unfinished(pool: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut dirs = vec![pool.to_path_buf()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                true => dirs.push(entry.path()),
                false => found.push(entry.file_name().to_string_lossy().into_owned()),
            }
        }
    }
    found.retain(|name| name.starts_with(".forebay~"));
    found
}

/// SEMANTICS 49
#[test]
fn uploads_that_a_killed_worker_left_are_removed_after_the_restart() {
    let policy = "[default]\nflush = \"idle:100ms\"\n";
    let throttle = Some("20MB/s".into());
    let mount = Mount::new(Options { throttle, ..Options::policy(policy) });
    fs::create_dir_all(mount.path("a/b")).unwrap();
    for path in ["top", "a/one", "a/b/two"] {
        fs::write(mount.path(path), vec![7; 20 << 20]).unwrap();
    }
    wait_until("uploads begin", || !unfinished(&mount.place.pool()).is_empty());
    // An upload of another node, which may still be writing it.
    let theirs = ".forebay~put-01234567-1-0123456789abcdef";
    fs::write(mount.pool(theirs), "theirs").unwrap();
    let left = unfinished(&mount.place.pool());
    let worker = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(worker);
    let is_left = |name: &String| name != theirs && left.contains(name);
    wait_until("they are removed", || !unfinished(&mount.place.pool()).iter().any(is_left));
    mount.flush();
    assert_eq!(unfinished(&mount.place.pool()), [theirs]);
    for path in ["top", "a/one", "a/b/two"] {
        assert_eq!(fs::metadata(mount.pool(path)).unwrap().len(), 20 << 20);
    }
}

/// SEMANTICS 49, for a mount whose supervisor was killed as well.
#[test]
fn uploads_that_a_killed_mount_left_are_removed_by_the_next_one() {
    let options = Options { throttle: Some("20MB/s".into()), ..Options::policy("[default]\nflush = \"idle:100ms\"\n") };
    let mount = Mount::new(options);
    fs::create_dir(mount.path("d")).unwrap();
    fs::write(mount.path("d/f"), vec![7; 20 << 20]).unwrap();
    wait_until("the upload begins", || unfinished(&mount.place.pool()).len() == 1);
    let left = unfinished(&mount.place.pool());
    mount.kill_all();
    assert_eq!(unfinished(&mount.place.pool()), left);
    mount.mount();
    wait_until("it is removed", || !unfinished(&mount.place.pool()).contains(&left[0]));
    mount.flush();
    assert_eq!(unfinished(&mount.place.pool()), Vec::<String>::new());
}

/// SEMANTICS 49, for files of nodes that are gone.
#[tokio::test(flavor = "multi_thread")]
async fn fsck_finds_what_daemons_of_other_nodes_left_in_the_pool() {
    use forebay_tests::engine::*;
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    let overlay = fixture.open().await;
    find(&overlay, "d").await;
    assert_eq!(overlay.fsck(false).await.unwrap().problems, Vec::<String>::new());
    fixture.memory.leave_unfinished(&pool_path("d"), 3);
    for (repair, repaired) in [(false, 0), (true, 1)] {
        let report = overlay.fsck(repair).await.unwrap();
        assert!(report.problems.len() == 1 && report.problems[0].starts_with("/d: 3 unfinished"), "{report:?}");
        assert_eq!(report.repaired, repaired);
    }
    assert_eq!(overlay.fsck(false).await.unwrap().problems, Vec::<String>::new());
}

/// One line on unfinished uploads stands for several of them. Damage that is left is not made up for by their number.
#[tokio::test(flavor = "multi_thread")]
async fn a_repair_tells_damage_that_is_left_however_many_uploads_it_removed() {
    use forebay_tests::engine::*;
    use std::os::unix::fs::FileExt;
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    fixture.put("a", b"all of it").await;
    let overlay = fixture.open().await;
    find(&overlay, "d").await;
    fixture.memory.leave_unfinished(&pool_path("d"), 3);
    // A file that is open is not repaired.
    let ino = find(&overlay, "a").await;
    let opened = overlay.open_file(ino, RDONLY).await.unwrap();
    opened.resident.unwrap().file.write_all_at(b"not", 0).unwrap();
    let report = overlay.fsck(true).await.unwrap();
    assert_eq!((report.problems.len(), report.repaired), (2, 1), "{report:?}");
    assert!(report.has_damage_left());
    overlay.release(ino, RDONLY);
    let report = overlay.fsck(true).await.unwrap();
    assert_eq!((report.problems.len(), report.has_damage_left()), (1, false), "{report:?}");
}
