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

/// What `make install` installs is where the documented lines of slurm.conf, the plugin and the units look for it.
#[test]
fn what_is_installed_is_where_it_is_looked_for() {
    let root = packaging("..");
    for prefix in ["/usr", "/opt/forebay"] {
        let variables = [format!("PREFIX={prefix}"), "DESTDIR=/stage".into(), "FOREBAY_BIN=forebay".into()];
        let made =
            Command::new("make").args(["-n", "-o", "build", "install"]).args(variables).current_dir(&root).output();
        let steps = String::from_utf8(made.unwrap().stdout).unwrap();
        for installed in ["bin/forebay", "share/forebay/slurm"] {
            assert!(steps.contains(&format!("/stage{prefix}/{installed}")), "{installed}: {steps}");
        }
        assert!(steps.contains(&format!("s|/usr/bin/forebay|{prefix}/bin/forebay|")), "{steps}");
    }
    for (file, line) in [
        ("slurm/burst_buffer.lua", "forebay = \"/usr/bin/forebay\","),
        ("forebay@.service", "ExecStart=/usr/bin/forebay "),
        ("forebay-serve@.service", "ExecStart=/usr/bin/forebay "),
        ("../docs/SLURM.md", "Prolog=/usr/share/forebay/slurm/prolog"),
    ] {
        let text = fs::read_to_string(packaging(file)).unwrap();
        assert!(text.contains(line), "{file} does not have `{line}`");
    }
    let lines = String::from_utf8(forebay().args(["slurm", "install"]).output().unwrap().stdout).unwrap();
    assert!(lines.contains("/usr/share/forebay/slurm/prolog"), "{lines}");
}

#[test]
fn output_that_cannot_be_written_is_no_success() {
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let ended = forebay().args(["slurm", "install"]).stdout(full).output().unwrap();
    assert_eq!(ended.status.code(), Some(10), "{}", String::from_utf8_lossy(&ended.stderr));
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let ended = forebay().args(["slurm", "install"]).stdout(writer).output().unwrap();
    assert_eq!(ended.status.code(), Some(141), "as a program that SIGPIPE ended");
}

#[test]
fn the_version_is_that_of_the_package() {
    let told = forebay().arg("--version").output().unwrap().stdout;
    assert_eq!(String::from_utf8(told).unwrap().trim(), concat!("forebay ", env!("CARGO_PKG_VERSION")));
}
