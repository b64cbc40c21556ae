//! Makes changes of names durable before they are answered (`dirsync`).

use forebay_backends::Result;
use forebay_engine::{Entry, Opened, Overlay, UserSlot};

/// Returns `done` once `sync` has made it durable. If `sync` fails, the kernel gets an error, and no inode or handle
/// that it would forget or release later. So `uncount` takes back what was counted for the answer.
pub async fn once_durable<T>(
    overlay: &Overlay,
    done: T,
    sync: impl Future<Output = Result<()>>,
    uncount: impl FnOnce(&Overlay, T),
) -> Result<T> {
    match sync.await {
        Ok(()) => Ok(done),
        Err(error) => {
            uncount(overlay, done);
            Err(error)
        }
    }
}

/// Takes back nothing, since nothing was counted.
pub fn nothing(_: &Overlay, (): ()) {}

/// Takes back the lookup of a name that was looked up or created.
pub fn entry(overlay: &Overlay, entry: Entry) {
    overlay.forget(entry.attr.ino, 1);
}

/// Takes back the lookup and the open of a file that was created with these flags.
pub fn created(flags: i32) -> impl FnOnce(&Overlay, (Entry, Opened, UserSlot)) + Send + 'static {
    move |overlay, (made, _, user)| {
        overlay.release(made.attr.ino, flags);
        overlay.shares().close(user, made.attr.ino);
        entry(overlay, made);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use forebay_backends::memory::MemoryPool;
    use forebay_backends::{Error, Side};

    use super::*;
    use forebay_engine::{Caller, Ino, Options, Policy, content_io};

    const USER: u32 = 1000;
    const CALLER: Caller = Caller { uid: USER, gid: USER, pid: 1 };

    async fn overlay(fast: &tempfile::TempDir) -> Overlay {
        let options = Options {
            pool: Arc::new(MemoryPool::new()),
            fast: vec![fast.path().to_owned()],
            limit_bytes: Some(64 << 20),
            policy: Policy::parse("[default]\nflush = \"manual\"\n").unwrap(),
            memory_bytes: 8 << 20,
            content_io: content_io::Choice::Plain,
            read_only: false,
            node: "here".into(),
            reattached: false,
            other_root: Default::default(),
            for_tests: Default::default(),
        };
        Overlay::open(options).await.unwrap()
    }

    async fn fails() -> Result<()> {
        Err(Error::os(libc::EIO, Side::Cache, "sync"))
    }

    #[tokio::test]
    async fn what_is_answered_with_an_error_is_neither_open_nor_known_to_the_kernel() {
        let fast = tempfile::tempdir().unwrap();
        let overlay = overlay(&fast).await;
        let user = overlay.shares().open_new(USER).unwrap();
        let (made, opened) = overlay.create(Ino::ROOT, b"file", 0o644, 0, libc::O_RDWR, CALLER).await.unwrap();
        let file = made.attr.ino;
        overlay.shares().made(user, file);
        let answer = once_durable(&overlay, (made, opened, user), fails(), created(libc::O_RDWR)).await;
        assert_eq!(answer.unwrap_err().errno(), libc::EIO);
        let dir = overlay.mkdir(Ino::ROOT, b"dir", 0o755, 0, CALLER).await.unwrap();
        let dir_ino = dir.attr.ino;
        assert!(once_durable(&overlay, dir, fails(), entry).await.is_err());
        assert_eq!(overlay.status().await.open_files, 0);
        assert_eq!(overlay.shares().open_files(USER), 0);
        assert!(!overlay.is_known_to_kernel(file) && !overlay.is_known_to_kernel(dir_ino));
    }

    #[tokio::test]
    async fn what_is_answered_stays_counted() {
        let fast = tempfile::tempdir().unwrap();
        let overlay = overlay(&fast).await;
        let dir = overlay.mkdir(Ino::ROOT, b"dir", 0o755, 0, CALLER).await.unwrap();
        let dir = once_durable(&overlay, dir, async { Ok(()) }, entry).await.unwrap();
        assert!(overlay.is_known_to_kernel(dir.attr.ino));
    }
}
