//! Puts the programs where the loader includes them: built from source where the linker for that is here, and else as they
//! are checked in.

use std::path::{Path, PathBuf};
use std::process::Command;

/// What is checked in; `make programs` makes it.
const CHECKED_IN: &str = "programs.o";
const LINKER: &str = "bpf-linker 0.10.3";

fn main() {
    for path in
        [CHECKED_IN, "build-programs", "programs/src", "programs/Cargo.toml", "programs/Cargo.lock", "src/layout.rs"]
    {
        println!("cargo:rerun-if-changed={path}");
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    let programs = out.join(CHECKED_IN);
    let has_linker = Command::new("bpf-linker")
        .arg("--version")
        .output()
        .is_ok_and(|said| String::from_utf8_lossy(&said.stdout).trim() == LINKER);
    if has_linker {
        match build(&out, &programs) {
            Ok(()) => return,
            Err(why) => println!("cargo:warning=the programs are taken as they are checked in: {why}"),
        }
    }
    if let Err(error) = std::fs::copy(CHECKED_IN, &programs) {
        println!("cargo:warning={CHECKED_IN}: {error}");
    }
}

fn build(out: &Path, programs: &Path) -> Result<(), String> {
    let mut command = Command::new("./build-programs");
    command.arg(programs).env("CARGO_TARGET_DIR", out);
    // What is meant for this crate alone: flags, clippy, how it is compiled.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        let ours = name.starts_with("CARGO_") && !matches!(name.as_str(), "CARGO_HOME" | "CARGO_TARGET_DIR");
        if ours
            || name.starts_with("RUSTC")
            || matches!(name.as_str(), "TARGET" | "HOST" | "OPT_LEVEL" | "DEBUG" | "PROFILE")
        {
            command.env_remove(name);
        }
    }
    let done = command.output().map_err(|e| e.to_string())?;
    if done.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&done.stderr).lines().next().unwrap_or("build-programs failed").to_owned())
}
