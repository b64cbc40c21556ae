//! The paths in the arguments of a command, sorted by their mounts.

use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use forebay_daemon::multi_mount::{self, MountPath};
use forebay_daemon::registry::{self, Located, RegisteredMount};
use forebay_daemon::{Failure, FailureKind};

use crate::args::PathArgs;
use crate::exit::Exit;
use crate::output::Output;

/// A mount and paths in it, in the form that the daemon takes.
#[derive(Debug)]
pub struct MountTarget {
    pub entry: RegisteredMount,
    pub paths: Vec<String>,
}

/// Finds the mounts of all paths. Fails before anything is started if a path lies in no mount.
pub fn of(paths: &PathArgs) -> Result<Vec<MountTarget>, Failure> {
    let mut targets: Vec<MountTarget> = Vec::new();
    for path in expand(paths)? {
        for place in multi_mount::places(Path::new(&path))? {
            match targets.iter_mut().find(|t| t.entry.mountpoint() == place.entry.mountpoint()) {
                Some(target) => target.paths.push(place.inner),
                None => targets.push(MountTarget { entry: place.entry, paths: vec![place.inner] }),
            }
        }
    }
    if targets.is_empty() {
        return Err(Failure::usage("the list of paths is empty"));
    }
    Ok(targets)
}

/// The mounts of a path or, without a path, those of the only root, mixed or not.
pub fn meant(path: Option<&Path>) -> Result<Vec<MountPath>, Failure> {
    if let Some(path) = path {
        return multi_mount::places(path);
    }
    let mut entries = registry::entries();
    if let [root] = multi_mount::all().as_slice()
        && entries.iter().all(|e| e.mountpoint().parent() == Some(&root.mountpoint))
    {
        return root.places();
    }
    match (entries.pop(), entries.is_empty()) {
        (Some(entry), true) => Ok(vec![Located { entry, inner: String::new() }.into()]),
        (None, _) => Err(Failure::new(FailureKind::NoDaemon, "there is no forebay mount")
            .remedy("forebay mount URL MOUNTPOINT --fast DIR")),
        (Some(_), false) => {
            Err(Failure::usage("there are several mounts").remedy("name one; `forebay status` lists them"))
        }
    }
}

/// Applies `act` to each. If there are several, an unavailable daemon does not keep the rest from being processed:
/// its failure is printed, and determines the exit code.
pub fn each<T>(all: Vec<T>, output: &Output, mut act: impl FnMut(T) -> Result<Exit, Failure>) -> Result<Exit, Failure> {
    let several = all.len() > 1;
    let mut exit = Exit::Done;
    for one in all {
        match act(one) {
            Ok(Exit::Done) => {}
            Ok(other) => exit = other,
            Err(failure) if several => {
                output.failure(&failure);
                exit = Exit::from(failure.kind);
            }
            Err(failure) => return Err(failure),
        }
    }
    Ok(exit)
}

/// Replaces lists among the paths by their content.
fn expand(paths: &PathArgs) -> Result<Vec<OsString>, Failure> {
    let mut all = Vec::new();
    for path in &paths.paths {
        let bytes = path.as_bytes();
        if bytes == b"-" {
            let mut text = Vec::new();
            std::io::stdin().read_to_end(&mut text).map_err(|e| Failure::io("standard input", &e))?;
            all.extend(split(&text, paths.null));
        } else if let Some(list) = bytes.strip_prefix(b"@") {
            let list = OsStr::from_bytes(list);
            let text = std::fs::read(list).map_err(|e| Failure::given(format!("list {}", list.display()), &e))?;
            all.extend(split(&text, paths.null));
        } else {
            all.push(path.clone());
        }
    }
    Ok(all)
}

fn split(text: &[u8], null: bool) -> Vec<OsString> {
    let end = if null { 0 } else { b'\n' };
    text.split(|b| *b == end).filter(|l| !l.is_empty()).map(|l| OsString::from_vec(l.to_vec())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_hold_one_name_on_each_line_or_before_each_nul() {
        assert_eq!(split(b"a b\n\nc\n", false), ["a b", "c"]);
        assert_eq!(split(b"a\nb\0c\0", true), ["a\nb", "c"]);
    }

    #[test]
    fn a_list_is_read_from_a_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "/x\n/y\n").unwrap();
        let mut list = OsString::from("@");
        list.push(file.path());
        let paths = PathArgs { paths: vec!["/w".into(), list], null: false };
        assert_eq!(expand(&paths).unwrap(), ["/w", "/x", "/y"]);
    }
}
