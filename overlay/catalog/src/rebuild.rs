//! Rebuilds the readable part of a catalog that cannot be opened any more, in a directory beside it.

use std::fs;
use std::io;
use std::path::Path;

use forebay_backends::{Error, Result, Side};
use rocksdb::{DB, IteratorMode, Options};

use super::{Catalog, Durability, boot_id, cf, corrupt, errors::unread, failed, may_be_torn, open_db};

/// The seed tables get file numbers that are this far above the existing ones.
const APART: u64 = 1000;

/// Checks that the catalog can be opened and that every record can be read.
///
/// # Errors
/// `Corrupt` if the catalog is damaged.
pub fn check(catalog: &Path) -> Result<()> {
    let db = open_db(catalog, Durability::Process, may_be_torn(catalog, Durability::Process, &boot_id()))?;
    for name in cf::ALL {
        let family = db.cf_handle(name).ok_or_else(|| corrupt(name))?;
        for item in db.iterator_cf(family, IteratorMode::Start) {
            item.map_err(unread)?;
        }
    }
    Ok(())
}

/// Rebuilds a damaged catalog in the directory `into`. The caller reads the result and then removes it. The damaged
/// catalog is not changed.
pub fn rebuild(damaged: &Path, into: &Path) -> Result<Catalog> {
    let fail = |what: &str, e: io::Error| Error::io(e, Side::Cache, format!("{what} {}", into.display()));
    copy(damaged, into).map_err(|e| fail("copy the catalog to", e))?;
    let seed = into.with_extension("seed");
    let seeded = seed_families(&seed).and_then(|()| add_tables(&seed, into).map_err(|e| fail("add tables to", e)));
    let cleared = remove(&seed).map_err(|e| fail("clear up beside", e));
    seeded.and(cleared)?;
    DB::repair(&Options::default(), into).map_err(|e| failed("rebuild the catalog", e))?;
    let db = open_db(into, Durability::Process, true)?;
    Catalog::over(db, 1, 0)
}

/// Copies the catalog's files. Table files never change, so a hard link to each is enough.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    remove(to)?;
    fs::create_dir(to)?;
    if !from.exists() {
        return Ok(());
    }
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        let is_table = entry.path().extension().is_some_and(|e| e == "sst");
        if is_table && fs::hard_link(entry.path(), &target).is_ok() {
            continue;
        }
        // Skips RocksDB's own text log and its lock: they contain no records.
        let name = entry.file_name();
        if entry.file_type()?.is_file() && !name.to_string_lossy().starts_with("LO") {
            match fs::copy(entry.path(), &target) {
                // The part before a block that cannot be read is kept.
                Err(e) if e.raw_os_error() == Some(libc::EIO) => {}
                copied => _ = copied?,
            }
        }
    }
    Ok(())
}

fn remove(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Makes a catalog with one table file in each column family. A repair finds out from the table files alone which
/// families exist: without a table of its family, a record in the write-ahead log would be skipped. Each table holds
/// only the deletion of a key that does not exist.
fn seed_families(dir: &Path) -> Result<()> {
    remove(dir).map_err(|e| Error::io(e, Side::Cache, format!("clear {}", dir.display())))?;
    let db = open_db(dir, Durability::Process, true)?;
    for name in cf::ALL {
        let family = db.cf_handle(name).ok_or_else(|| corrupt(name))?;
        let seeded = db.delete_cf(family, b"").and_then(|()| db.flush_cf(family));
        seeded.map_err(|e| failed("make tables", e))?;
    }
    Ok(())
}

fn add_tables(from: &Path, to: &Path) -> io::Result<()> {
    let number = |path: &Path| path.file_stem().and_then(|s| s.to_str()).and_then(|s| s.parse::<u64>().ok());
    let mut next = APART;
    for entry in fs::read_dir(to)? {
        next = next.max(number(&entry?.path()).unwrap_or(0) + APART);
    }
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "sst") {
            fs::rename(&path, to.join(format!("{next:06}.sst")))?;
            next += 1;
        }
    }
    Ok(())
}
