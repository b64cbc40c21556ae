//! NFS servers that send what no server should.
//!
//! SECURITY 18: "A wrong answer of an NFS server harms only the call that it answers. That call ends in bounded time and
//! memory, with an error that names the pool."

mod common;
#[path = "hostile_nfs/memory.rs"]
mod memory;
#[path = "hostile_nfs/mutations.rs"]
mod mutations;
#[path = "hostile_nfs/server.rs"]
mod server;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use forebay_backends::nfs::NfsPool;
use forebay_backends::{DirEntry, Error, ErrorKind, Expected, FileKind, Pool, PoolPath, Result, Retry, Version};
use futures::TryStreamExt;

use common::{attrs, path, pieces};
use memory::assert_bounded;
use server::{
    DIR, GOOD, GOOD_BYTES, HostileServer, LINK, MOUNT, NFS, NfsAttributes, ROOT, RpcCall, RpcReply, Xdr, accepted,
    good, good_content, handle, procedure, status,
};

/// Longer than the time for retries, and shorter than a hang.
const PATIENCE: Duration = Duration::from_secs(60);
/// The time limit for calls with malformed answers: the pool does not wait for a server that runs.
const SOON: Duration = Duration::from_secs(8);

async fn in_time<T>(limit: Duration, call: impl Future<Output = T>) -> T {
    tokio::time::timeout(limit, call).await.expect("the call has no end")
}

async fn listed(pool: &NfsPool, dir: &PoolPath) -> Result<Vec<DirEntry>> {
    let pages: Vec<_> = pool.list(dir).await?.try_collect().await?;
    Ok(pages.concat())
}

fn names(entries: &[DirEntry]) -> BTreeSet<Vec<u8>> {
    entries.iter().map(|entry| entry.name.clone()).collect()
}

/// The version of `good` from a well-behaved server.
async fn version_of_good(pool: &NfsPool) -> Version {
    pool.stat(&path("good")).await.unwrap().version
}

/// Checks that everything works with a well-behaved server.
async fn assert_sound(pool: &NfsPool) {
    let sound = async {
        let root = listed(pool, &PoolPath::root()).await.unwrap();
        assert_eq!(names(&root), server::names_of_root());
        assert_eq!(listed(pool, &path("dir")).await.unwrap().len(), 1);
        let version = version_of_good(pool).await;
        assert!(pool.read(&path("good"), &version, 0..u64::MAX).await.unwrap() == good_content(), "other bytes");
        assert_eq!(pool.readlink(&path("link")).await.unwrap(), server::TARGET);
    };
    in_time(PATIENCE, sound).await;
}

/// Checks that the error names the pool and allows a later retry.
fn assert_told(error: &Error, pool: &NfsPool) {
    let text = error.to_string();
    assert!(text.contains(&pool.url()), "the pool is not named: {text}");
    assert_eq!(error.retry(), Retry::Later, "what is dirty must be kept for another try: {text}");
}

/// Checks that all kinds of calls fail within `limit` while `script` answers them, and that everything works
/// afterwards.
async fn assert_refused(limit: Duration, script: impl Fn(&RpcCall) -> Option<RpcReply> + Send + Sync + 'static) {
    let server = HostileServer::start().await;
    let pool = server.open().await;
    let version = version_of_good(&pool).await;
    server.misbehave(script);
    let (root, file, link, new) = (PoolPath::root(), path("good"), path("link"), path("new"));
    let attrs = attrs();
    let answers = futures::join!(
        in_time(limit, async { pool.stat(&file).await.map(drop) }),
        in_time(limit, async { listed(&pool, &root).await.map(drop) }),
        in_time(limit, async { pool.read(&file, &version, 0..9).await.map(drop) }),
        in_time(limit, async { pool.readlink(&link).await.map(drop) }),
        in_time(limit, async { pool.space().await.map(drop) }),
        in_time(limit, async { pool.mkdir(&new, &attrs).await.map(drop) }),
        in_time(limit, async { pool.put(&new, 3, pieces(&[(0, "abc")]), &attrs, &Expected::Anything).await.map(drop) }),
    );
    for answer in [answers.0, answers.1, answers.2, answers.3, answers.4, answers.5, answers.6] {
        assert_told(&answer.unwrap_err(), &pool);
    }
    server.behave();
    assert_sound(&pool).await;
    assert_bounded();
}

/// Like [`assert_refused`], with answers that are parsed and found malformed.
async fn assert_nonsense(script: impl Fn(&RpcCall) -> Option<RpcReply> + Send + Sync + 'static) {
    assert_refused(SOON, script).await;
}

fn raw(bytes: Vec<u8>) -> Option<RpcReply> {
    Some(RpcReply::Raw(bytes))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_of_two_gibibytes_is_refused_by_its_length() {
    assert_nonsense(|_| Some(RpcReply::Endless(vec![0xff; 64 << 10]))).await;
    assert_nonsense(|_| raw(0xffff_fffc_u32.to_be_bytes().to_vec())).await;
    assert_nonsense(|_| raw(0x8040_0000_u32.to_be_bytes().to_vec())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fragments_without_an_end_are_refused() {
    assert_nonsense(|_| Some(RpcReply::Endless(vec![0; 64 << 10]))).await;
    assert_nonsense(|_| Some(RpcReply::Endless([vec![0, 0, 16, 0], vec![0; 4096]].concat()))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_to_other_calls_and_calls_are_refused() {
    assert_nonsense(|request| {
        let other = accepted(request.number.wrapping_add(1)).0;
        raw(Xdr([other, good(request).0].concat()).record())
    })
    .await;
    assert_nonsense(|request| raw(Xdr::default().words(&[request.number, 0, 2, NFS, 3, 1, 0, 0, 0, 0]).record())).await;
    // An answer says that the call was accepted (0) or denied (1), and 7 is neither. 99 is no status of an accepted
    // call.
    assert_nonsense(|request| raw(Xdr::default().words(&[request.number, 1, 7, 0, 0, 0]).record())).await;
    assert_nonsense(|request| raw(Xdr::default().words(&[request.number, 1, 0, 0, 0, 99]).record())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_that_are_too_short_or_too_long_are_refused() {
    for length in [0, 1, 3, 4, 11, 24, 25, 28, 30] {
        assert_nonsense(move |request| {
            let mut whole = [accepted(request.number).0, good(request).0].concat();
            whole.truncate(length);
            raw(Xdr(whole).record())
        })
        .await;
    }
    assert_nonsense(|request| Some(RpcReply::Results(Xdr([good(request).0, vec![0; 4096]].concat())))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_breaks_off_is_asked_for_again_until_time_is_up() {
    assert_refused(PATIENCE, |request| {
        let mut whole = Xdr([accepted(request.number).0, good(request).0].concat()).record();
        whole.truncate(whole.len() / 2);
        Some(RpcReply::Last(whole))
    })
    .await;
}

/// A length in an answer is compared with the rest of the answer before memory is allocated.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lengths_that_an_answer_claims_take_no_memory() {
    const FAR: u32 = 0xffff_fff0;
    assert_nonsense(|request| raw(Xdr::default().words(&[request.number, 1, 0, 0, FAR, 0, 0]).record())).await;
    assert_nonsense(|request| raw(Xdr::default().words(&[request.number, 0, 2, NFS, 3, 1, 0, FAR, 0]).record())).await;
    let server = HostileServer::start().await;
    let pool = server.open().await;
    let version = version_of_good(&pool).await;
    server.misbehave(|request| {
        let xdr = Xdr::default().words(&[0, 0]);
        let results = match request.procedure {
            procedure::LOOKUP => Xdr::default().words(&[0, FAR]),
            procedure::READLINK => xdr.word(FAR),
            procedure::READ => xdr.words(&[9, 0, FAR]),
            procedure::READDIR | procedure::READDIRPLUS => xdr.long(0).word(1).long(9).word(FAR),
            procedure::MKDIR => Xdr::default().words(&[0, 1, FAR]),
            _ => return None,
        };
        Some(RpcReply::Results(results))
    });
    let answers = [
        in_time(SOON, pool.stat(&path("good"))).await.map(drop),
        in_time(SOON, pool.read(&path("good"), &version, 0..9)).await.map(drop),
        in_time(SOON, listed(&pool, &PoolPath::root())).await.map(drop),
        in_time(SOON, pool.mkdir(&path("new"), &attrs())).await.map(drop),
    ];
    for answer in answers {
        assert_told(&answer.unwrap_err(), &pool);
    }
    server.behave();
    assert_sound(&pool).await;
    // The flavours of credentials that a server accepts.
    server.misbehave(|request| {
        let mounts = request.program == MOUNT && request.procedure == procedure::MNT;
        mounts.then(|| RpcReply::Results(Xdr::default().word(0).bytes(&handle(&ROOT)).word(FAR)))
    });
    let error = in_time(SOON, NfsPool::open(&server.url())).await.unwrap_err();
    assert_told(&error, &pool);
    assert_bounded();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_that_lead_elsewhere_are_left_out() {
    let bad: [&[u8]; 8] = [b".", b"..", b"", b"a/b", b"/etc/passwd", b"nul\0nul", b"../../x", &[b'n'; 64 << 10]];
    for plus in [true, false] {
        let server = HostileServer::start().await;
        let pool = server.open().await;
        server.misbehave(move |request| {
            let names = bad.iter().copied().chain([&b"good"[..]]).zip(1..);
            if request.is(procedure::READDIRPLUS) {
                let entries = names.fold(Xdr::page(), |xdr, (name, cookie)| xdr.entry(name, cookie, &GOOD));
                let refused = Xdr::default().words(&[status::NOT_SUPPORTED, 0]);
                return Some(RpcReply::Results(if plus { entries.end(true) } else { refused }));
            }
            let entries = |xdr: Xdr, (name, cookie)| xdr.word(1).long(3).bytes(name).long(cookie);
            request.is(procedure::READDIR).then(|| RpcReply::Results(names.fold(Xdr::page(), entries).end(true)))
        });
        let entries = in_time(SOON, listed(&pool, &PoolPath::root())).await.unwrap();
        assert_eq!(names(&entries), BTreeSet::from([b"good".to_vec()]));
        server.behave();
        assert_sound(&pool).await;
    }
    assert_bounded();
}

/// Checks that a listing ends with an error. `page` makes each page of READDIRPLUS from the requested cookie.
async fn assert_listing_ends(page: fn(u64) -> Xdr) {
    let server = HostileServer::start().await;
    let pool = server.open().await;
    server.misbehave(move |request| {
        request.is(procedure::READDIRPLUS).then(|| RpcReply::Results(page(request.cookie()).end(false)))
    });
    let error = in_time(PATIENCE, listed(&pool, &PoolPath::root())).await.unwrap_err();
    assert!(error.to_string().contains("pages"), "{error}");
    assert_told(&error, &pool);
    assert_eq!(pool.stat(&path("good")).await.unwrap().size, GOOD.size);
    server.behave();
    assert_sound(&pool).await;
    assert_bounded();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listing_whose_pages_lead_in_a_circle_is_refused() {
    // The cookie stays the same, returns to the start, or loops through three pages.
    assert_listing_ends(|cookie| Xdr::page().entry(b"good", cookie, &GOOD)).await;
    assert_listing_ends(|_| Xdr::page().entry(b"good", 0, &GOOD)).await;
    assert_listing_ends(|cookie| Xdr::page().entry(format!("n{}", cookie % 3).as_bytes(), cookie % 3 + 1, &GOOD)).await;
    assert_listing_ends(|_| Xdr::page()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listing_that_says_the_same_for_ever_is_refused() {
    assert_listing_ends(|cookie| {
        let names = (1..=64).map(|n| (format!("{n:0>200}"), cookie + n));
        names.fold(Xdr::page(), |xdr, (name, cookie)| xdr.entry(name.as_bytes(), cookie, &GOOD))
    })
    .await;
    assert_listing_ends(|cookie| Xdr::page().entry(b"..", cookie + 1, &GOOD)).await;
}

async fn read_error(read: fn(&RpcCall) -> Xdr) -> Error {
    let server = HostileServer::start().await;
    let pool = server.open().await;
    let version = version_of_good(&pool).await;
    server.misbehave(move |request| request.is(procedure::READ).then(|| RpcReply::Results(read(request))));
    let error = in_time(SOON, pool.read(&path("good"), &version, 0..u64::MAX)).await.unwrap_err();
    // Only that call fails, and the error names its file.
    assert!(error.to_string().contains("/good"), "{error}");
    if !error.is(ErrorKind::Stale) {
        assert_told(&error, &pool);
    }
    assert_eq!(listed(&pool, &path("dir")).await.unwrap().len(), 1);
    server.behave();
    assert_sound(&pool).await;
    assert_bounded();
    error
}

fn read_results(data: &[u8], is_end: bool) -> Xdr {
    let xdr = Xdr::default().word(0).some_attributes(&GOOD);
    xdr.words(&[data.len() as u32, u32::from(is_end)]).bytes(data)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_that_give_too_much_or_next_to_nothing_are_refused() {
    let error = read_error(|request| read_results(&vec![7; request.word_from_end(4) as usize + 1], false)).await;
    assert!(error.to_string().contains("more bytes"), "{error}");
    let error = read_error(|_| read_results(b"x", false)).await;
    assert!(error.to_string().contains("few bytes"), "{error}");
    // No bytes, though the file has more: it counts as a truncated file.
    let nothing: [fn(&RpcCall) -> Xdr; 2] = [|_| read_results(b"", false), |_| read_results(b"", true)];
    for nothing in nothing {
        let error = read_error(nothing).await;
        assert!(error.is(ErrorKind::Stale), "{error}");
    }
}

async fn write_error(taken: fn(u32) -> u32) -> Error {
    let server = HostileServer::start().await;
    let pool = server.open().await;
    server.misbehave(move |request| {
        let results = || Xdr::default().words(&[0, 0, 0, taken(request.write_bytes()), 2]).long(0);
        request.is(procedure::WRITE).then(|| RpcReply::Results(results()))
    });
    let data = vec![7; GOOD_BYTES].into();
    let error = in_time(SOON, pool.write_at(&path("good"), 0, data)).await.unwrap_err();
    assert_told(&error, &pool);
    server.behave();
    assert_sound(&pool).await;
    error
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_that_take_too_much_or_next_to_nothing_are_refused() {
    for wrong in [(|_| 0) as fn(u32) -> u32, |asked| asked + 1, |_| u32::MAX] {
        let error = write_error(wrong).await;
        assert!(error.to_string().contains("says that it wrote"), "{error}");
    }
    let error = write_error(|_| 1).await;
    assert!(error.to_string().contains("few bytes of each write"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn file_handles_of_lengths_that_no_handle_has_are_refused() {
    for length in [0, 65, 1 << 20] {
        let server = HostileServer::start().await;
        let pool = server.open().await;
        let looked_up =
            move |of: &NfsAttributes| Xdr::default().word(0).bytes(&vec![1; length]).some_attributes(of).word(0);
        server.misbehave(move |request| request.is(procedure::LOOKUP).then(|| RpcReply::Results(looked_up(&DIR))));
        assert_told(&in_time(SOON, pool.stat(&path("dir"))).await.unwrap_err(), &pool);
        assert_told(&in_time(SOON, listed(&pool, &path("dir"))).await.unwrap_err(), &pool);
        server.misbehave(move |request| {
            request
                .is(procedure::MKDIR)
                .then(|| RpcReply::Results(Xdr::default().words(&[0, 1]).bytes(&vec![1; length]).words(&[0; 3])))
        });
        assert_told(&in_time(PATIENCE, pool.mkdir(&path("new"), &attrs())).await.unwrap_err(), &pool);
        server.misbehave(move |request| {
            let mounts = request.program == MOUNT && request.procedure == procedure::MNT;
            mounts.then(|| RpcReply::Results(Xdr::default().word(0).bytes(&vec![1; length]).words(&[1, 1])))
        });
        assert_told(&in_time(SOON, NfsPool::open(&server.url())).await.unwrap_err(), &pool);
        server.behave();
        assert_sound(&pool).await;
    }
    assert_bounded();
}

/// The attributes that the pool returns for such an object, from a lookup and from a listing.
async fn shown(attributes: NfsAttributes) -> (Result<forebay_backends::Stat>, Result<Vec<DirEntry>>) {
    let server = HostileServer::start().await;
    let pool = server.open().await;
    server.misbehave(move |request| {
        let results = match request.procedure {
            procedure::LOOKUP => Xdr::default().word(0).bytes(&handle(&GOOD)).some_attributes(&attributes).word(0),
            procedure::READDIRPLUS => Xdr::page().entry(b"odd", 1, &attributes).entry(b"good", 2, &GOOD).end(true),
            _ => return None,
        };
        (request.program == NFS).then_some(RpcReply::Results(results))
    });
    let stat = in_time(SOON, pool.stat(&path("odd"))).await;
    let list = in_time(SOON, listed(&pool, &PoolPath::root())).await;
    if let Err(error) = &stat {
        assert_told(error, &pool);
    }
    if let Err(error) = &list {
        assert_told(error, &pool);
    }
    server.behave();
    assert_sound(&pool).await;
    assert_bounded();
    (stat, list)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attributes_that_no_object_has_are_bounded() {
    let most = NfsAttributes { mode: u32::MAX, owner: u32::MAX, size: u64::MAX, id: u64::MAX, nanos: u32::MAX, ..GOOD };
    let (stat, list) = shown(most).await;
    let listed = list.unwrap().into_iter().find(|entry| entry.name == b"odd").unwrap().stat;
    for stat in [stat.unwrap(), listed] {
        assert_eq!((stat.kind, stat.mode, stat.size), (FileKind::File, 0o7777, i64::MAX as u64));
        assert!(stat.occupied.unwrap() <= i64::MAX as u64 && stat.version.size() == stat.size);
        assert!(stat.mtime.nanos < 1_000_000_000 && stat.ctime.nanos < 1_000_000_000);
    }
    // Root's set-id bits are accepted: the mount's `nosuid` makes them harmless.
    let (stat, _) = shown(NfsAttributes { mode: 0o106_755, ..GOOD }).await;
    assert_eq!(stat.unwrap().mode, 0o6755);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_of_an_unknown_kind_fails_alone() {
    for kind in [0, 8, u32::MAX] {
        let (stat, list) = shown(NfsAttributes { kind, ..GOOD }).await;
        for error in [stat.map(drop).unwrap_err(), list.map(drop).unwrap_err()] {
            assert!(error.is(ErrorKind::Os(libc::EIO)) && error.to_string().contains("makes no sense"), "{error}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_that_no_file_system_has_are_bounded() {
    let server = HostileServer::start().await;
    for (word, long) in [(0, 0), (u32::MAX, u64::MAX)] {
        server.misbehave(move |request| {
            let results = match request.procedure {
                procedure::FSINFO => Xdr::default().words(&[0, 0]).words(&[word; 7]).long(long).words(&[word; 3]),
                procedure::PATHCONF => Xdr::default().words(&[0, 0, word, u32::MAX, 1, 1, 0, 1]),
                procedure::FSSTAT => (0..6).fold(Xdr::default().words(&[0, 0]), |xdr, _| xdr.long(long)).word(word),
                _ => return None,
            };
            (request.program == NFS).then_some(RpcReply::Results(results))
        });
        let pool = server.open().await;
        let space = pool.space().await.unwrap();
        assert!(space.total_bytes <= i64::MAX as u64 && space.available_bytes <= i64::MAX as u64, "{space:?}");
        assert!(pool.capabilities().name_max <= 255);
        assert_sound(&pool).await;
    }
    assert_bounded();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn targets_of_symlinks_that_no_system_takes_are_refused() {
    for target in [vec![], b"a\0b".to_vec(), vec![b'x'; 4096], vec![b'x'; 1 << 20]] {
        let server = HostileServer::start().await;
        let pool = server.open().await;
        server.misbehave(move |request| {
            request.is(procedure::READLINK).then(|| RpcReply::Results(Xdr::default().words(&[0, 0]).bytes(&target)))
        });
        let error = in_time(SOON, pool.readlink(&path("link"))).await.unwrap_err();
        assert!(error.to_string().contains("target"), "{error}");
        assert_told(&error, &pool);
        assert_eq!(pool.stat(&path("link")).await.unwrap().size, LINK.size);
        server.behave();
        assert_sound(&pool).await;
    }
    assert_bounded();
}

/// The clock is paused, so it advances as soon as all tasks wait.
#[tokio::test]
async fn calls_that_are_never_answered_are_given_up() {
    let server = HostileServer::start().await;
    let pool = server.open().await;
    assert_sound(&pool).await;
    server.misbehave(|_| Some(RpcReply::Silence));
    tokio::time::pause();
    let begun = tokio::time::Instant::now();
    let error = pool.stat(&path("good")).await.unwrap_err();
    assert_told(&error, &pool);
    assert!(matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unavailable), "{error}");
    let error = pool.mkdir(&path("new"), &attrs()).await.unwrap_err();
    assert_told(&error, &pool);
    assert!(begun.elapsed() < Duration::from_secs(300), "{:?}", begun.elapsed());
    tokio::time::resume();
    server.behave();
    assert_sound(&pool).await;
}

/// The server garbles valid answers: it replaces words, truncates answers or appends bytes. Values that the pool
/// returns stay within bounds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbled_answers_break_nothing() {
    let mut mutations = mutations::Mutations::seeded();
    let server = HostileServer::start().await;
    let pool = server.open().await;
    let version = version_of_good(&pool).await;
    let begun = Instant::now();
    for case in 0..mutations.cases() {
        let mutation = mutations.draw();
        let shown = format!("case {case}: {mutation:?}");
        server.misbehave(move |request| mutation.answer(request));
        let told = match case % 4 {
            0 => in_time(PATIENCE, pool.stat(&path("good"))).await.map(|stat| {
                assert!(stat.size <= i64::MAX as u64 && stat.mode <= 0o7777, "{shown}: {stat:?}");
            }),
            1 => in_time(PATIENCE, listed(&pool, &PoolPath::root())).await.map(|entries| {
                let is_sound = |name: &[u8]| {
                    !matches!(name, b"" | b"." | b"..") && name.len() <= 255 && !name.iter().any(|b| b"/\0".contains(b))
                };
                assert!(entries.iter().all(|entry| is_sound(&entry.name)), "{shown}: {entries:?}");
            }),
            2 => in_time(PATIENCE, pool.read(&path("good"), &version, 5..1005)).await.map(|data| {
                assert_eq!(data.len(), 1000, "{shown}");
            }),
            _ => in_time(PATIENCE, pool.readlink(&path("link"))).await.map(|target| {
                assert!((1..4096).contains(&target.len()), "{shown}: {} bytes", target.len());
            }),
        };
        if let Err(error) = told {
            assert!(!error.to_string().is_empty(), "{shown}");
        }
        server.behave();
        if case % 50 == 0 {
            assert_sound(&pool).await;
        }
    }
    println!("{:?}", begun.elapsed());
    assert_sound(&pool).await;
    assert_bounded();
}
