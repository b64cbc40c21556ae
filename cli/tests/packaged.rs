//! What is packaged beside the program is what the program says of itself.

use std::fs;
use std::path::Path;
use std::process::Command;

fn forebay() -> Command {
    Command::new(env!("CARGO_BIN_EXE_forebay"))
}

fn packaging(below: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging").join(below)
}

#[test]
fn manual_pages_are_those_of_the_command_line() {
    let made = tempfile::tempdir().unwrap();
    assert!(forebay().arg("man").arg(made.path()).status().unwrap().success());
    let names = |dir: &Path| {
        let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(made.path()), names(&packaging("man")), "run `make man`");
    for name in names(made.path()) {
        let (is, right) = (fs::read(packaging("man").join(&name)).unwrap(), fs::read(made.path().join(&name)).unwrap());
        assert!(is == right, "{} is not what the program makes: run `make man`", name.display());
    }
}

#[test]
fn completions_are_those_of_the_command_line() {
    let made = forebay().args(["completions", "bash"]).output().unwrap().stdout;
    assert!(made == fs::read(packaging("completions/forebay.bash")).unwrap(), "run `make man`");
}

#[test]
fn the_version_is_that_of_the_package() {
    let told = forebay().arg("--version").output().unwrap().stdout;
    assert_eq!(String::from_utf8(told).unwrap().trim(), concat!("forebay ", env!("CARGO_PKG_VERSION")));
}
