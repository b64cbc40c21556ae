//! Big directories.

use super::*;

const ENTRIES: usize = 10_000;

/// Lists a directory of many entries, and fails if one is missing, appears twice, or does not have its own
/// attributes.
async fn assert_all_are_listed(server: &NfsServer, pool: &NfsPool) {
    let dir = server.export().join("many");
    if !dir.exists() {
        fs::create_dir(&dir).unwrap();
        for n in 0..ENTRIES {
            fs::write(dir.join(format!("a rather long name of an entry {n:05}")), format!("{n}")).unwrap();
        }
    }
    let pages: Vec<_> = pool.list(&path("many")).await.unwrap().try_collect().await.unwrap();
    assert!(pages.len() > 2, "{} pages", pages.len());
    let entries = pages.concat();
    let names: BTreeSet<_> = entries.iter().map(|entry| &entry.name[..]).collect();
    assert_eq!((entries.len(), names.len()), (ENTRIES, ENTRIES));
    for entry in entries {
        let number: u32 = std::str::from_utf8(&entry.name).unwrap()[31..].trim().parse().unwrap();
        assert_eq!(entry.stat.size, number.to_string().len() as u64);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn ten_thousand_entries_are_listed_once_each() {
    let server = start(Squash::None);
    assert_all_are_listed(&server, &open(&server).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn entries_are_listed_once_each_where_the_server_forgets_or_lacks_something() {
    const BAD_COOKIE: u32 = 10_003;
    const NOT_SUPPORTED: u32 = 10_004;
    const JUKEBOX: u32 = 10_008;
    let server = start(Squash::None);
    for (before, status) in [(2, BAD_COOKIE), (0, NOT_SUPPORTED), (1, JUKEBOX)] {
        let unreliable = NfsFaultProxy::start(server.nfs_port()).await;
        let pool = NfsPool::open(&server.url_by("/pool", unreliable.port())).await.unwrap();
        unreliable.lose_after(before, procedure::READDIRPLUS, Loss::Status(status));
        timeout(LIMIT, assert_all_are_listed(&server, &pool)).await.unwrap();
        assert!(unreliable.has_lost(), "status {status} was never given");
    }
}
