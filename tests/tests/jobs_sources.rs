//! The sources of the bytes that a job reads through a mount, and that mapped files count whole. Needs root, and a
//! kernel with BTF.

use std::fs;
use std::process::{Command, Stdio};

use forebay_tests::mount::{COMMAND, Mount, Options, alone, content};
use forebay_tests::process::{forebay, wait};
use forebay_tests::reading::{How, Step};
use serde_json::Value;

/// Runs `observed` with these steps as a job. Returns the files of its report.
fn read(mount: &Mount, id: &str, steps: &[Step]) -> Vec<Value> {
    let mut command = Command::new(forebay());
    command.args(["run", "--job", id, "--mount"]).arg(mount.place.mnt()).arg("--").current_dir(mount.place.mnt());
    command.args([env!("CARGO_BIN_EXE_observed"), "read"]).stdin(Stdio::piped());
    let mut child = command.spawn().unwrap();
    serde_json::to_writer(child.stdin.take().unwrap(), steps).unwrap();
    assert!(wait(&mut child, COMMAND).unwrap().success());
    let answer = mount.forebay(["--json", "job", "show", id, "--mount"], &[&mount.place.mnt()]).ok();
    let report: Value = serde_json::from_str(&answer.out).unwrap();
    assert_eq!(report["observer"], "ebpf", "{report}");
    let files = report["files"].as_array().unwrap().iter();
    files.filter(|file| !file["path"].as_str().unwrap().starts_with(".tmp")).cloned().collect()
}

fn sum(files: &[Value], field: &str) -> u64 {
    files.iter().map(|file| file[field].as_u64().unwrap()).sum()
}

#[test]
fn cold_small_files_come_from_the_pool_and_warm_ones_do_not() {
    const FILES: u64 = 40;
    const BYTES: u64 = 100_000;
    let _alone = alone();
    // Files that are fetched ahead do not count as demand fetches.
    let mount = Mount::new(Options::policy("[prefetch]\nonline = false\n"));
    let step = |number: u64| {
        let name = format!("file-{number}");
        fs::write(mount.pool(&name), content(number, BYTES as usize)).unwrap();
        Step { file: mount.path(&name), how: How::Pread, from: 0, len: BYTES }
    };
    let steps: Vec<Step> = (0..FILES).map(step).collect();
    let cold = read(&mount, "cold", &steps);
    assert_eq!(cold.len() as u64, FILES);
    assert_eq!((sum(&cold, "bytes"), sum(&cold, "pool_bytes")), (FILES * BYTES, FILES * BYTES), "{cold:?}");
    let warm = read(&mount, "warm", &steps);
    assert_eq!((sum(&warm, "bytes"), sum(&warm, "pool_bytes")), (FILES * BYTES, 0), "{warm:?}");
}

#[test]
fn a_staged_file_that_is_mapped_and_read_counts_whole() {
    const BYTES: u64 = 2 << 20;
    let _alone = alone();
    let mount = Mount::new(Options::default());
    fs::write(mount.pool("mapped"), content(1, BYTES as usize)).unwrap();
    // One large write gives the file the largest folios.
    fs::write(mount.path("written"), content(2, BYTES as usize + (1 << 20))).unwrap();
    mount.forebay(["stage"], &[&mount.path("mapped")]).ok();
    let step = |name: &str, from, len| Step { file: mount.path(name), how: How::Mmap, from, len };
    let files = read(&mount, "maps", &[step("mapped", 0, BYTES), step("written", BYTES, 1 << 20)]);
    let told: Vec<_> =
        files.iter().map(|file| (file["path"].as_str().unwrap(), file["bytes"].as_u64().unwrap())).collect();
    assert_eq!(told, [("mapped", BYTES), ("written", 1 << 20)]);
}
