//! Rights that change while another user has an object open or cached.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use forebay_tests::mount::{Mount, Options};
use forebay_tests::process;
use forebay_tests::users::{U1, U2};

const SET_ID: u32 = 0o6777;

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

/// A user to whom the new mode gives no access does not read the new content, whether the file was replaced or changed
/// in place.
///
/// SECURITY 5: "an open fails for each user to whom the new mode gives no access"
#[test]
fn new_content_is_not_read_with_old_rights() {
    const ROUNDS: u32 = 6;
    let mount = Mount::new(Options::default());
    let names: Vec<String> = (0..ROUNDS).map(|round| format!("f{round}")).collect();
    // All names are made before the first lookup in their directory: the mount may show a later name only after a
    // delay.
    for name in &names {
        fs::write(mount.pool(name), "public").unwrap();
        chown(mount.pool(name), Some(U2.0), Some(U2.0)).unwrap();
    }
    for (round, name) in names.iter().enumerate() {
        let (mnt, pool) = (mount.place.mnt(), mount.pool(name));
        let first = U1.sh(&mnt, &format!("stat {name} >/dev/null; cat {name} 2>&1"));
        assert_eq!(first.out.trim(), "public", "round {round}");
        match round % 2 {
            0 => {
                let secret = mount.pool("secret");
                fs::write(&secret, "secret").unwrap();
                chown(&secret, Some(U2.0), Some(U2.0)).unwrap();
                fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
                fs::rename(&secret, &pool).unwrap();
            }
            _ => {
                fs::set_permissions(&pool, Permissions::from_mode(0o600)).unwrap();
                fs::write(&pool, "secret, and longer").unwrap();
            }
        }
        let seen = U1.sh(&mnt, &format!("cat {name} 2>&1 || true")).out;
        assert!(!seen.contains("secret"), "round {round}: {seen}");
        assert!(seen.contains("Permission denied"), "round {round}: {seen}");
        assert!(U2.sh(&mnt, &format!("cat {name}")).out.contains("secret"), "round {round}: its owner is refused");
    }
}

/// SECURITY 6: "the file loses its set-id bits, whichever call makes the change"
#[test]
fn set_id_bits_go_with_every_change_of_content() {
    let mount = Mount::new(Options::default());
    let mnt = mount.place.mnt();
    fs::set_permissions(&mnt, Permissions::from_mode(0o777)).unwrap();
    fs::write(mount.path("source"), vec![b'x'; 8192]).unwrap();
    let changes = [
        "fallocate -l 16384 FILE",
        "fallocate -p -o 0 -l 4096 FILE",
        "fallocate -z -o 0 -l 4096 FILE",
        "xfs_io -c 'copy_range -l 4096 source' FILE",
        "printf y >>FILE",
        "printf y >FILE",
        "truncate -s 0 FILE",
        "python3 -c \"import os; os.open('FILE', os.O_RDONLY | os.O_TRUNC)\"",
    ];
    for (at, change) in changes.iter().enumerate() {
        let name = format!("f{at}");
        let file = mount.path(&name);
        fs::write(&file, vec![b'a'; 8192]).unwrap();
        chown(&file, Some(U2.0), Some(U2.0)).unwrap();
        fs::set_permissions(&file, Permissions::from_mode(SET_ID)).unwrap();
        U1.sh(&mnt, &change.replace("FILE", &name)).ok();
        assert_eq!(mode(&file), 0o777, "{change}");
    }
}

/// As on every file system, a change of the owner clears the set-id bits, except on directories.
#[test]
fn set_id_bits_of_special_files_go_with_a_change_of_the_owner() {
    let mount = Mount::new(Options::default());
    U2.sh(&mount.place.native(), "true").ok();
    fs::set_permissions(mount.place.mnt(), Permissions::from_mode(0o777)).unwrap();
    U2.sh(&mount.place.mnt(), "mkfifo fifo && chmod 6555 fifo && chown 4002:4002 fifo").ok();
    assert_eq!(mode(&mount.path("fifo")), 0o555);
}

/// A writer opened the file before it got the bits, and writes by passthrough.
///
/// SECURITY 16: "If a file gets set-id bits while a program has it open for writing, the file loses them when the
/// program writes"
#[test]
fn a_write_by_an_earlier_descriptor_takes_set_id_bits() {
    let mount = Mount::new(Options { limit: Some("4G".into()), ..Options::default() });
    let mnt = mount.place.mnt();
    fs::set_permissions(&mnt, Permissions::from_mode(0o777)).unwrap();
    for (name, written) in [("written", "True"), ("kept", "False")] {
        let file = mount.path(name);
        fs::write(&file, "harmless").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o777)).unwrap();
        chown(&file, Some(U2.0), Some(U2.0)).unwrap();
        let script = format!(
            "f = open('{name}', 'r+b', 0)\nprint(flush=True)\ninput()\nif {written}: f.write(b'hostile')\n\
             print(flush=True)\nimport sys; sys.stdin.read()"
        );
        let mut writer = U1.command("python3", &mnt);
        writer.args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut writer = process::spawn(&mut writer).expect("python3 is installed");
        let mut said = BufReader::new(writer.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        U2.sh(&mnt, &format!("chmod 6777 {name} && touch {name}")).ok();
        assert_eq!(mode(&file), 0o6777, "{name}");
        writer.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        said.read_line(&mut line).unwrap();
        let wanted = if written == "True" { 0o777 } else { 0o6777 };
        mount.flush();
        assert_eq!((mode(&file), mode(&mount.pool(name))), (wanted, wanted), "{name}, while it is open");
        drop(writer.stdin.take());
        assert!(process::wait(&mut writer, Duration::from_secs(20)).is_some());
        mount.flush();
        assert_eq!((mode(&file), mode(&mount.pool(name))), (wanted, wanted), "{name}");
    }
}
