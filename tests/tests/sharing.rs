//! Several that have one file open at the same time, and one of them writes.

use std::sync::Arc;

use bytes::Bytes;
use forebay_engine::{Options, Overlay, Policy};
use forebay_tests::engine::*;

#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_to_a_file_that_became_resident_while_it_was_open_is_not_nobodys() {
    let fixture = Fixture::new();
    fixture.put("a", b"old").await;
    let policy = "[default]\nflush = \"manual\"\nwhole-file = \"0\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n";
    let policy = Policy::parse(policy).unwrap();
    let overlay = Overlay::open(Options { policy, ..fixture.options() }).await.unwrap();
    let ino = find(&overlay, "a").await;
    overlay.open_file(ino, RDWR).await.unwrap();
    assert_eq!(overlay.read(ino, 0, 100).await.unwrap(), &b"old"[..]);
    fixture.put("a", b"theirs").await;
    find(&overlay, "a").await;
    overlay.write(ino, 0, Bytes::from_static(b"our")).await.unwrap();
    overlay.close(ino, true).await.unwrap();
    overlay.release(ino, RDWR);
    flushed(&overlay).await;
    let pooled = fixture.pooled();
    assert_eq!(pooled.iter().map(|(_, content)| content.as_str()).collect::<Vec<_>>(), ["theirs", "our"]);
    assert_eq!(overlay.status().await.conflicts.len(), 1);
}

/// The second of them may be late, and find what the first has written by then: that is not what the pool has.
#[tokio::test(flavor = "multi_thread")]
async fn two_that_open_a_clean_file_for_writing_at_once_lose_nothing() {
    const FILES: usize = 2000;
    let fixture = Fixture::new();
    let names: Vec<String> = (0..FILES).map(|number| format!("file-{number}")).collect();
    for name in &names {
        fixture.put(name, b"old").await;
    }
    let overlay = Arc::new(fixture.open().await);
    stage(&overlay, "").await;
    for name in &names {
        let ino = find(&overlay, name).await;
        let open = |bytes: Option<&'static [u8]>| {
            let overlay = overlay.clone();
            async move {
                overlay.open_file(ino, RDWR).await.unwrap();
                if let Some(bytes) = bytes {
                    overlay.write(ino, 0, Bytes::from_static(bytes)).await.unwrap();
                }
                overlay.close(ino, true).await.unwrap();
                overlay.release(ino, RDWR);
            }
        };
        let looks: Vec<_> = (0..6).map(|_| tokio::spawn(open(None))).collect();
        tokio::spawn(open(Some(b"new"))).await.unwrap();
        for look in looks {
            look.await.unwrap();
        }
    }
    flushed(&overlay).await;
    let kept: Vec<_> = fixture.pooled().into_iter().filter(|(_, content)| content != "new").collect();
    assert_eq!(kept, pairs(&[]));
}
