//! What is left of a catalog that cannot be opened any more, made readable beside it.

use std::fs;
use std::io;
use std::path::Path;

use forebay_backends::{Error, Result, Side};
use rocksdb::{DB, IteratorMode, Options};

use super::{Catalog, Durability, boot_id, cf, corrupt, failed, may_be_torn, open_db};

/// Table files that are added get numbers this far above those that are there.
const APART: u64 = 1000;

/// Whether a catalog can be opened, and every record read.
///
/// # Errors
/// `Corrupt` where it is damaged.
pub fn check(catalog: &Path) -> Result<()> {
    let db = open_db(catalog, Durability::Process, may_be_torn(catalog, Durability::Process, &boot_id()))?;
    for name in cf::ALL {
        let family = db.cf_handle(name).ok_or_else(|| corrupt(name))?;
        for item in db.iterator_cf(family, IteratorMode::Start) {
            item.map_err(|e| failed("read the catalog", e))?;
        }
    }
    Ok(())
}

/// Rebuilds a damaged catalog in the directory `into`, to be read and then thrown away. The damaged one is not
/// touched.
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

/// Table files never change, so another name for them is enough.
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
        // Their own log of what they did, and their lock, say nothing of the records.
        let name = entry.file_name();
        if entry.file_type()?.is_file() && !name.to_string_lossy().starts_with("LO") {
            fs::copy(entry.path(), &target)?;
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

/// Makes a catalog with one table file in each column family. Only table files tell a repair which families there
/// are: without one, all that the log has of a family would be passed over. What the tables hold is the removal of
/// a key that does not exist.
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
