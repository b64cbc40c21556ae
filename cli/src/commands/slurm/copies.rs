//! Copies into scratch directories, with the rights of the job's user.

use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Instant;

use forebay_slurm::directives::{ScratchCopy, SourceKind};
use forebay_slurm::exchange::gone;

/// The deepest directory that is copied.
const DEPTH_MAX: usize = 128;

/// Checks that a source is what the directive says.
pub fn check_kind(path: &Path, kind: Option<SourceKind>) -> io::Result<()> {
    let found = std::fs::symlink_metadata(path)?;
    match kind {
        Some(SourceKind::File) if !found.is_file() => Err(io::Error::other("it is no file")),
        Some(SourceKind::Directory) if !found.is_dir() => Err(io::Error::other("it is no directory")),
        _ => Ok(()),
    }
}

/// Copies a file or a directory to `into`, which lies below `dir`. A directory gets its content.
pub fn copy_in(copy: &ScratchCopy, dir: &Path, into: &Path, until: Instant) -> io::Result<()> {
    let source = Path::new(&copy.path);
    let found = std::fs::metadata(source)?;
    match copy.kind {
        Some(SourceKind::File) if !found.is_file() => return Err(io::Error::other("it is no file")),
        Some(SourceKind::Directory) if !found.is_dir() => return Err(io::Error::other("it is no directory")),
        _ => {}
    }
    let above = if found.is_dir() { Some(into) } else { into.parent() };
    if let Some(above) = above.filter(|above| above.starts_with(dir)) {
        std::fs::create_dir_all(above)?;
    }
    match (found.is_dir(), source.file_name()) {
        (true, _) => copy_tree(source, into, until, 0),
        (false, Some(name)) if into.is_dir() => copy_file(source, &into.join(name), until),
        (false, _) => copy_file(source, into, until),
    }
}

fn copy_tree(from: &Path, into: &Path, until: Instant, depth: usize) -> io::Result<()> {
    if depth > DEPTH_MAX {
        return Err(io::Error::other(format!("{} is deeper than {DEPTH_MAX} directories", from.display())));
    }
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let (source, target, kind) = (entry.path(), into.join(entry.file_name()), entry.file_type()?);
        if kind.is_dir() {
            std::fs::create_dir_all(&target)?;
            copy_tree(&source, &target, until, depth + 1)?;
        } else if kind.is_symlink() {
            gone(std::fs::remove_file(&target))?;
            symlink(std::fs::read_link(&source)?, &target)?;
        } else if kind.is_file() {
            copy_file(&source, &target, until)?;
        } else {
            return Err(io::Error::other(format!("{} is a special file", source.display())));
        }
    }
    Ok(())
}

fn copy_file(from: &Path, into: &Path, until: Instant) -> io::Result<()> {
    if Instant::now() >= until {
        return Err(io::Error::new(io::ErrorKind::TimedOut, format!("the time is up before {}", from.display())));
    }
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", from.display()));
    std::fs::copy(from, into).map_err(named)?;
    Ok(())
}
