//! Settings that change with a file: with its size, its jobs, its names, its owner, and the settings of its directories.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use forebay_tests::mount::{COMMAND, Mount, Options};
use forebay_tests::process::{run, wait_until};

/// The flush has looked at everything that was written before, and has found that it waits for a request.
const LOOKED_AT: Duration = Duration::from_secs(3);

#[track_caller]
fn until_pool_has(mount: &Mount, name: &str, content: &[u8]) {
    let file = mount.pool(name);
    wait_until(&format!("{name} is in the pool"), || fs::read(&file).is_ok_and(|have| have == content));
}

/// SEMANTICS 2: "Where the policy says `on-close`, changes that `close` acknowledged are in the pool." That is so if only the
/// size, the job or the name that the file has at its close makes the policy say so.
#[test]
fn a_close_waits_by_what_the_file_is_then() {
    let mount = Mount::new(Options::policy(
        "[default]\nflush = \"manual\"\n\
         [[rule]]\npaths = \"results/**\"\nsize = \"1MiB..\"\nflush = \"on-close\"\n\
         [[rule]]\npaths = \"through/**\"\nsize = \"1MiB..\"\nwrite = \"through\"\n\
         [[rule]]\npaths = \"moved/**\"\nflush = \"on-close\"\n\
         [[rule]]\njob = \"train*\"\npaths = \"jobs/**\"\nflush = \"on-close\"\n",
    ));
    let content = vec![7u8; 2 << 20];
    for dir in ["results", "through", "moved", "jobs"] {
        fs::create_dir(mount.path(dir)).unwrap();
    }
    for name in ["results/a", "through/a"] {
        fs::write(mount.path(name), &content).unwrap();
        assert!(fs::read(mount.pool(name)).is_ok_and(|have| have == content), "{name}");
        fs::write(mount.path(format!("{name}-small")), "small").unwrap();
    }
    let mut moved = File::create(mount.path("b")).unwrap();
    moved.write_all(b"moved").unwrap();
    fs::rename(mount.path("b"), mount.path("moved/b")).unwrap();
    drop(moved);
    assert_eq!(fs::read(mount.pool("moved/b")).unwrap(), b"moved");
    let script = format!("echo 1 > {}/jobs/r && cat {}/jobs/r", mount.place.mnt().display(), mount.place.pool().display());
    let answer = mount.forebay(["run", "--job", "train-1", "--", "sh", "-c", &script], &[]).ok();
    assert_eq!(answer.out.trim(), "1");
    assert!(!mount.pool("results/a-small").exists() && !mount.pool("through/a-small").exists());
}
