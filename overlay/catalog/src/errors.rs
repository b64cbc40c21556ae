//! Errors of RocksDB as errors of the catalog. Only damage is called damage: `forebay fsck --repair` retires a damaged
//! catalog.

use std::path::Path;

use forebay_backends::{Error, ErrorKind, Side};

/// The errnos that say nothing of the catalog's files: of the file system, its rights, or this process. RocksDB reports an
/// errno as text alone, and for some calls as a corruption.
const NO_DAMAGE: [i32; 13] = [
    libc::ENOSPC,
    libc::EDQUOT,
    libc::EMFILE,
    libc::ENFILE,
    libc::ENOMEM,
    libc::EACCES,
    libc::EPERM,
    libc::EROFS,
    libc::EIO,
    libc::ENXIO,
    libc::ENODEV,
    libc::ESTALE,
    libc::ETIMEDOUT,
];

/// The error for a database that cannot be opened.
pub(super) fn not_opened(path: &Path, error: &rocksdb::Error) -> Error {
    let place = path.display();
    let of = |kind, what: &str| Error::new(kind, Side::Cache, format!("catalog {place}: {what}"));
    let text = error.as_ref();
    let error = match (errno_in(text), error.kind()) {
        (Some(libc::ENOSPC), _) => of(ErrorKind::NoSpace, "make room there"),
        (Some(libc::EIO), _) => {
            let what =
                "cannot be read; if the rest of its device works, `forebay fsck --repair` saves what can be read";
            of(ErrorKind::Os(libc::EIO), what)
        }
        (Some(errno), _) => of(ErrorKind::from_errno(errno), "cannot be opened"),
        (None, _) if text.contains("/LOCK") => of(ErrorKind::Busy, "another process has it open"),
        (None, rocksdb::ErrorKind::Corruption) => damaged(path),
        // A file of it is missing.
        (None, rocksdb::ErrorKind::IOError) if text.contains("No such file or directory") => damaged(path),
        // For example, a column family that this program does not know.
        (None, rocksdb::ErrorKind::InvalidArgument | rocksdb::ErrorKind::NotSupported) => {
            let what = "a newer forebay made it: use that program to flush it, then give an empty fast pool";
            of(ErrorKind::InvalidInput, what)
        }
        (None, _) => of(ErrorKind::InvalidInput, "cannot be opened"),
    };
    error.with_source(text.to_owned())
}

/// The error for a catalog that cannot be read.
pub fn damaged(path: &Path) -> Error {
    let fast = path.parent().unwrap_or(path).display();
    let what = format!(
        "catalog {}: damaged; changes that were not flushed are still in the content files beside it: \
         `forebay fsck --repair {fast}` saves those that can be read",
        path.display()
    );
    Error::new(ErrorKind::Corrupt, Side::Cache, what)
}

pub(super) fn corrupt(what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, Side::Cache, format!("catalog record in {what}: run `forebay fsck`"))
}

/// The error for a database that does not give all of its records. Its kind tells a failed read (`EIO`) from other errnos.
pub(super) fn unread(error: rocksdb::Error) -> Error {
    let what = "read the catalog";
    match errno_in(error.as_ref()) {
        Some(errno) => Error::new(ErrorKind::from_errno(errno), Side::Cache, what).with_source(error),
        None => failed(what, error),
    }
}

/// The error for an operation of an open database.
pub(super) fn failed(what: &str, error: rocksdb::Error) -> Error {
    let errno = errno_in(error.as_ref());
    if errno.is_none() && error.kind() == rocksdb::ErrorKind::Corruption {
        let what = format!("{what}: `forebay fsck --repair` of the fast directory saves what can be read");
        return Error::new(ErrorKind::Corrupt, Side::Cache, what).with_source(error);
    }
    let kind = if errno == Some(libc::ENOSPC) { ErrorKind::NoSpace } else { ErrorKind::Os(libc::EIO) };
    Error::new(kind, Side::Cache, what).with_source(error)
}

/// Returns the errno of [`NO_DAMAGE`] that a message of RocksDB names.
fn errno_in(text: &str) -> Option<i32> {
    NO_DAMAGE.into_iter().find(|errno| {
        let named = std::io::Error::from_raw_os_error(*errno).to_string();
        // The standard library adds the number, in parentheses.
        named.split(" (os error").next().is_some_and(|name| text.contains(name))
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use rocksdb::{DB, Options};

    use super::*;
    use crate::{Catalog, Durability, cf, rebuild};

    fn catalog() -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("catalog");
        Catalog::open(&path, Durability::Process).unwrap().set_meta("fact", &7u32).unwrap();
        (dir, path)
    }

    fn refused(path: &Path) -> Error {
        let checked = rebuild::check(path).unwrap_err();
        let opened = Catalog::open(path, Durability::Process).err().unwrap();
        assert_eq!(checked.kind(), opened.kind(), "{checked} / {opened}");
        opened
    }

    #[test]
    fn an_inode_that_cannot_be_decoded_does_not_end_a_scan_of_those_that_can() {
        let (_dir, path) = catalog();
        let catalog = Catalog::open(&path, Durability::Process).unwrap();
        let mut batch = catalog.batch();
        batch.put_raw(cf::INODES, &7u64.to_be_bytes(), &[]);
        catalog.write(batch).unwrap();
        let mut found = Vec::new();
        catalog
            .readable_inodes(|ino, _| {
                Ok({
                    found.push(ino);
                    true
                })
            })
            .unwrap();
        assert!(!found.contains(&crate::Ino(7)));
        assert!(catalog.inodes(|_, _| Ok(true)).unwrap_err().is(ErrorKind::Corrupt));
    }

    #[test]
    fn a_catalog_of_a_newer_program_is_not_damaged() {
        let (_dir, path) = catalog();
        let mut db = DB::open_cf(&Options::default(), &path, cf::ALL).unwrap();
        db.create_cf("future", &Options::default()).unwrap();
        drop(db);
        let error = refused(&path);
        assert!(error.is(ErrorKind::InvalidInput), "{error}");
        assert!(error.to_string().contains("newer"), "{error}");
        let mut db = DB::open_cf(&Options::default(), &path, cf::ALL.into_iter().chain(["future"])).unwrap();
        db.drop_cf("future").unwrap();
        drop(db);
        let again = Catalog::open(&path, Durability::Process).unwrap();
        assert_eq!(again.meta::<u32>("fact").unwrap(), Some(7));
    }

    #[test]
    fn damage_is_told_from_what_the_file_system_refuses() {
        let (_dir, path) = catalog();
        let current = path.join("CURRENT");
        let kept = fs::read(&current).unwrap();
        fs::write(&current, "garbage").unwrap();
        assert!(refused(&path).is(ErrorKind::Corrupt));
        fs::write(&current, "MANIFEST-999999\n").unwrap();
        assert!(refused(&path).is(ErrorKind::Corrupt), "its manifest is missing");
        fs::write(&current, kept).unwrap();
        if !rustix::process::geteuid().is_root() {
            fs::set_permissions(&current, fs::Permissions::from_mode(0o000)).unwrap();
            assert!(refused(&path).is(ErrorKind::PermissionDenied));
            fs::set_permissions(&current, fs::Permissions::from_mode(0o600)).unwrap();
        }
        Catalog::open(&path, Durability::Process).unwrap();
        for (text, errno) in [
            ("IO error: While open a file for random read: /c/000012.sst: Too many open files", Some(libc::EMFILE)),
            ("IO error: While open a file for lock: /c/LOCK: Permission denied", Some(libc::EACCES)),
            ("IO error: While open a file for appending: /c/1.log: Read-only file system", Some(libc::EROFS)),
            ("Corruption: Can't access /9.sst: IO error: While stat a file: Input/output error", Some(libc::EIO)),
            ("IO error: No space left on device: While appending to file", Some(libc::ENOSPC)),
            ("IO error: No such file or directory: While opening a file: /c/MANIFEST-1", None),
            ("Corruption: block checksum mismatch", None),
        ] {
            assert_eq!(errno_in(text), errno, "{text}");
        }
    }
}
