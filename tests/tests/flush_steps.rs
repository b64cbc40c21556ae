//! Steps of the flush that meet each other, other clients, or programs that still have the file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_api::operator::FlushRequest;
use forebay_backends::decorators::{CallKind, Odds, PoolCall};
use forebay_backends::{Attrs, ErrorKind, Expected, Piece, Pool, Time};
use forebay_engine::{Change, Ino, Options, Overlay, Policy, SetTime, TestOptions, summary};
use forebay_tests::engine::*;
use forebay_tests::held::{HeldCalls, HeldPool};

const ON_CLOSE: &str = "[default]\nflush = \"on-close\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n";
/// A wait that takes this long has no end.
const HANGS: Duration = Duration::from_secs(60);

/// Opens an overlay on a pool of which calls can be held.
async fn open_held(fixture: &Fixture, policy: Option<&str>, for_tests: TestOptions) -> (Overlay, HeldCalls) {
    let held = HeldCalls::default();
    let overlay = opened(|| {
        let options = fixture.options();
        Options {
            pool: Arc::new(HeldPool::with(fixture.metrics.clone(), held.clone())),
            policy: policy.map_or(options.policy, |policy| Policy::parse(policy).unwrap()),
            for_tests: for_tests.clone(),
            ..options
        }
    });
    (overlay.await, held)
}

/// Accepts the calls of a kind for one path.
fn calls(kind: CallKind, path: &str) -> impl Fn(&PoolCall<'_>) -> bool + Send + Sync + use<> {
    let path = pool_path(path);
    move |call| call.kind == kind && call.path.as_bytes() == path.as_bytes()
}

async fn in_time<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(HANGS, work).await.unwrap_or_else(|_| panic!("{what} hangs"))
}

/// Opens the content file that has these bytes, as a program has it open that the kernel serves without the daemon.
fn hold_content(fixture: &Fixture, bytes: &str) -> File {
    fn search(dir: &Path, bytes: &[u8]) -> Option<File> {
        let mut entries = std::fs::read_dir(dir).ok()?.flatten();
        entries.find_map(|entry| match entry.file_type().ok()?.is_dir() {
            true => search(&entry.path(), bytes),
            false if std::fs::read(entry.path()).ok()? == bytes => {
                File::options().read(true).write(true).open(entry.path()).ok()
            }
            false => None,
        })
    }
    search(&fixture.fast.path().join("content"), bytes.as_bytes()).expect("no content file has these bytes")
}

async fn swap(overlay: &Overlay, a: &str, b: &str) {
    for (from, to) in [(a, "between"), (b, a), ("between", b)] {
        rename(overlay, from, to).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_name_of_a_program_keeps_a_circle_of_names_from_the_pool() {
    let fixture = Fixture::new();
    for (name, content) in [("x", "X"), ("y", "Y"), (".forebay-moving-1", "1"), (".forebay-moving-2", "2")] {
        fixture.put(name, content.as_bytes()).await;
    }
    let overlay = fixture.open().await;
    let mut parked = Vec::new();
    for name in ["x", "y"] {
        let ino = find(&overlay, name).await;
        // What an earlier daemon called a parked object, made by a program in the mount or by another client.
        parked.push(format!(".forebay-moving-here-{}", ino.0));
    }
    swap(&overlay, "x", "y").await;
    swap(&overlay, ".forebay-moving-1", ".forebay-moving-2").await;
    write(&overlay, &parked[0], "a program's").await.unwrap();
    fixture.put(&parked[1], b"another client's").await;
    flushed(&overlay).await;
    let pooled = |path: &str| String::from_utf8(in_pool(&fixture, path).unwrap()).unwrap();
    assert_eq!((pooled("x"), pooled("y")), ("Y".into(), "X".into()));
    assert_eq!((pooled(".forebay-moving-1"), pooled(".forebay-moving-2")), ("2".into(), "1".into()));
    assert_eq!((pooled(&parked[0]), pooled(&parked[1])), ("a program's".into(), "another client's".into()));
    assert_eq!(fixture.pooled().len(), 6, "{:?}", fixture.pooled());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_upload_delays_only_the_moves_of_directories_above_it() {
    let fixture = Fixture::new();
    for dir in ["a", "b", "c"] {
        fixture.mkdir(dir).await;
    }
    let (overlay, held) = open_held(&fixture, Some(ON_CLOSE), TestOptions::default()).await;
    let writing = |path: &'static str| {
        let overlay = overlay.clone();
        tokio::spawn(async move { write(&overlay, path, path).await.unwrap() })
    };
    held.hold(1, calls(CallKind::Put, "a/f"));
    let long = writing("a/f");
    in_time("the upload", held.until_waiting(1)).await;
    rename(&overlay, "b", "moved").await.unwrap();
    in_time("a move of another directory", writing("moved/g")).await.unwrap();
    rename(&overlay, "a", "above").await.unwrap();
    let above = writing("above/h");
    // The move of the directory above waits, and what is below another directory does not wait for it.
    in_time("an upload below another directory", writing("c/i")).await.unwrap();
    rename(&overlay, "c", "again").await.unwrap();
    in_time("a move of another directory", writing("again/j")).await.unwrap();
    assert!(held.waiting() == 1 && !long.is_finished() && !above.is_finished());
    held.release();
    long.await.unwrap();
    above.await.unwrap();
    flushed(&overlay).await;
    let right = [
        ("/above/", ""),
        ("/above/f", "a/f"),
        ("/above/h", "above/h"),
        ("/again/", ""),
        ("/again/i", "c/i"),
        ("/again/j", "again/j"),
        ("/moved/", ""),
        ("/moved/g", "moved/g"),
    ];
    assert_eq!(fixture.pooled(), pairs(&right));
}

/// SEMANTICS 34: "A store through a shared mapping is written back like any other write, also after the file was closed"
#[tokio::test(flavor = "multi_thread")]
async fn a_held_file_stays_dirty_although_its_content_file_is_closed_during_the_upload() {
    let fixture = Fixture::new();
    let few = TestOptions { open_contents: Some(1), ..TestOptions::default() };
    let (overlay, held) = open_held(&fixture, None, few).await;
    write(&overlay, "a", "before").await.unwrap();
    let program = hold_content(&fixture, "before");
    held.hold(1, calls(CallKind::Put, "a"));
    let flushing = overlay.clone();
    let flushing = tokio::spawn(async move { flush(&flushing).await });
    in_time("the upload", held.until_waiting(1)).await;
    // The daemon keeps one content file open, and now it is this one.
    write(&overlay, "b", "other").await.unwrap();
    held.release();
    flushing.await.unwrap();
    program.write_all_at(b"stored", 0).unwrap();
    drop(program);
    flushed(&overlay).await;
    assert_eq!(fixture.pooled(), pairs(&[("/a", "stored"), ("/b", "other")]));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_arrives_late_is_no_change_of_another_client() {
    for name in ["made", "replaced"] {
        let fixture = Fixture::new();
        fixture.put("replaced", b"old").await;
        let (overlay, held) = open_held(&fixture, None, TestOptions::default()).await;
        write(&overlay, name, "first").await.unwrap();
        let mtime = Time { nanos: 123_456_789, ..Time::now() };
        let change = Change { mtime: Some(SetTime::At(mtime)), ..Change::default() };
        overlay.setattr(find(&overlay, name).await, &change, CALLER).await.unwrap();
        fixture.fault.set_error(ErrorKind::Timeout);
        fixture.fault.set_odds(CallKind::Put, Odds { before: 1.0, after: 0.0 });
        assert!(flush(&overlay).await.failed > 0, "{name}");
        fixture.fault.heal();
        write(&overlay, name, "second").await.unwrap();
        held.hold(1, calls(CallKind::Put, name));
        let flushing = overlay.clone();
        let flushing = tokio::spawn(async move { flush(&flushing).await });
        in_time("the upload", held.until_waiting(1)).await;
        let late = futures::stream::iter([Ok(Piece { offset: 0, data: Bytes::from_static(b"first") })]);
        let attrs = Attrs { mtime, ..attrs(0o644) };
        fixture.memory.put(&pool_path(name), 5, Box::pin(late), &attrs, &Expected::Anything).await.unwrap();
        held.release();
        flushing.await.unwrap();
        flushed(&overlay).await;
        assert_eq!(overlay.status().await.conflicts, Vec::<String>::new(), "{name}");
        assert_eq!(in_pool(&fixture, name).unwrap(), b"second", "{name}");
        // What another client wrote is kept.
        fixture.put(name, b"first").await;
        write(&overlay, name, "third").await.unwrap();
        fixture.put(name, b"forth").await;
        flushed(&overlay).await;
        assert_eq!(overlay.status().await.conflicts.len(), 1, "{name}");
        assert_eq!(in_pool(&fixture, name).unwrap(), b"forth", "{name}");
    }
}

/// SEMANTICS 2: "Where the policy says `on-close`, changes that `close` acknowledged are in the pool."
#[tokio::test(flavor = "multi_thread")]
async fn a_close_that_meets_a_call_in_doubt_acknowledges_nothing_that_was_not_sent() {
    let fixture = Fixture::new();
    fixture.put("a", b"old").await;
    let (overlay, held) = open_held(&fixture, Some(ON_CLOSE), TestOptions::default()).await;
    let ino = find(&overlay, "a").await;
    overlay.open_file(ino, RDWR).await.unwrap();
    put(&overlay, ino, 0, b"new").await;
    fixture.fault.set_odds(CallKind::Put, Odds { before: 1.0, after: 0.0 });
    held.hold(1, calls(CallKind::Stat, "a"));
    let other = overlay.clone();
    let other = tokio::spawn(async move { other.close(ino, true).await });
    in_time("the other close", held.until_waiting(1)).await;
    refused(overlay.close(ino, true).await);
    held.release();
    refused(other.await.unwrap());
    assert_eq!(in_pool(&fixture, "a").unwrap(), b"old");
    fixture.fault.heal();
    overlay.close(ino, true).await.unwrap();
    assert_eq!(in_pool(&fixture, "a").unwrap(), b"new");
    overlay.release(ino, RDWR);
}

/// SEMANTICS 10: "If the pool's copy of a dirty file changed, both copies are kept"
#[tokio::test(flavor = "multi_thread")]
async fn conflicts_of_two_long_names_at_one_moment_keep_all_copies() {
    let fixture = Fixture::new();
    let names = ["1", "2"].map(|end| format!("{}{end}", "n".repeat(249)));
    for name in &names {
        fixture.put(name, b"old").await;
    }
    let (overlay, held) = open_held(&fixture, None, TestOptions::default()).await;
    for name in &names {
        write(&overlay, name, &format!("ours {}", &name[249..])).await.unwrap();
        fixture.put(name, format!("theirs {}", &name[249..]).as_bytes()).await;
    }
    // Both copies look for a free name at the same time.
    held.hold(2, |call| call.kind == CallKind::Stat && call.path.to_string().contains(".conflict-"));
    let flushing = overlay.clone();
    let flushing = tokio::spawn(async move { flush(&flushing).await });
    in_time("the conflicts", held.until_waiting(2)).await;
    held.release();
    flushing.await.unwrap();
    flushed(&overlay).await;
    let mut contents: Vec<String> = fixture.pooled().into_iter().map(|(_, content)| content).collect();
    contents.sort();
    assert_eq!(contents, ["ours 1", "ours 2", "theirs 1", "theirs 2"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_removed_while_a_reader_holds_it_is_no_conflict() {
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    fixture.mkdir("e").await;
    fixture.put("d/a", b"old").await;
    // No program has looked at this name.
    fixture.memory.link(&pool_path("d/a"), &pool_path("e/b")).await.unwrap();
    let overlay = fixture.open().await;
    let (dir, ino): (Ino, Ino) = (find(&overlay, "d").await, find(&overlay, "d/a").await);
    overlay.open_file(ino, RDWR).await.unwrap();
    put(&overlay, ino, 0, b"new").await;
    close(&overlay, ino).await;
    let reader = hold_content(&fixture, "new");
    overlay.unlink(dir, b"a").await.unwrap();
    let done = summary(overlay.flush(FlushRequest { wait: true, ..Default::default() })).await.0;
    assert_eq!((done.failed, done.message), (0, None));
    drop(reader);
    flushed(&overlay).await;
    assert_eq!(overlay.status().await.conflicts, Vec::<String>::new());
    assert_eq!(fixture.pooled(), pairs(&[("/d/", ""), ("/e/", ""), ("/e/b", "new")]));
}

/// SEMANTICS 87: "drops a local change". That is the rename, and not the file that was renamed.
#[tokio::test(flavor = "multi_thread")]
async fn a_rename_that_is_dropped_for_a_file_of_another_client_leaves_the_renamed_file() {
    let policy =
        "[default]\nflush = \"manual\"\nconflict = \"theirs\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n";
    for was_there in [false, true] {
        for is_old_name_taken in [false, true] {
            let fixture = Fixture::new();
            fixture.put("a", b"renamed").await;
            if was_there {
                fixture.put("b", b"before").await;
            }
            let options = || Options { policy: Policy::parse(policy).unwrap(), ..fixture.options() };
            let overlay = opened(options).await;
            let renamed = find(&overlay, "a").await;
            rename(&overlay, "a", "b").await.unwrap();
            if is_old_name_taken {
                write(&overlay, "a", "new").await.unwrap();
            }
            fixture.put("b", b"of another client").await;
            flushed(&overlay).await;
            let case = format!("replaced: {was_there}, taken: {is_old_name_taken}: {:?}", fixture.pooled());
            assert_eq!(in_pool(&fixture, "b").unwrap(), b"of another client", "{case}");
            assert_eq!(read(&overlay, "b").await.unwrap(), "of another client", "{case}");
            assert!(!overlay.status().await.conflicts.is_empty(), "{case}");
            if is_old_name_taken {
                assert_eq!(in_pool(&fixture, "a").unwrap(), b"new", "{case}");
                let kept = fixture.pooled().into_iter().find(|(path, _)| path.starts_with("/b.conflict-"));
                assert_eq!(kept.map(|(_, content)| content).as_deref(), Some("renamed"), "{case}");
            } else {
                assert_eq!(in_pool(&fixture, "a").unwrap(), b"renamed", "{case}");
                assert_eq!(find(&overlay, "a").await, renamed, "{case}");
                assert_eq!(read(&overlay, "a").await.unwrap(), "renamed", "{case}");
            }
        }
    }
}

/// SEMANTICS 8: "an open sees what any client flushed before it". Of the exceptions: "while the daemon renames a directory in
/// the pool", which may take minutes there. The opens also meet the moment before the call, in which it is recorded.
#[tokio::test(flavor = "multi_thread")]
async fn no_open_waits_for_the_move_of_a_directory_that_begins() {
    let fixture = Fixture::new();
    fixture.mkdir("d0").await;
    fixture.put("d0/f", b"x").await;
    let (overlay, held) = open_held(&fixture, None, TestOptions::default()).await;
    let file = find(&overlay, "d0/f").await;
    for round in 0..20 {
        rename(&overlay, &format!("d{round}"), &format!("d{}", round + 1)).await.unwrap();
        held.hold(1, |call| call.kind == CallKind::Rename);
        let again = overlay.clone();
        let flushing = tokio::spawn(async move { flushed(&again).await });
        let opening = async {
            while held.waiting() == 0 {
                overlay.open_file(file, RDONLY).await.unwrap();
                overlay.release(file, RDONLY);
            }
        };
        in_time("opens beside a move of their directory", opening).await;
        held.release();
        flushing.await.unwrap();
    }
}
