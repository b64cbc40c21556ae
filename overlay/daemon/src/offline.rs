//! A fast pool that no daemon has open: which mount it belongs to, and its check.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::config::MountConfig;
use super::{Failure, FailureKind, registry, worker};
use forebay_api::operator::FsckReport;
use forebay_backends::PoolDescription;
use forebay_cache::guard;
use forebay_engine::{OtherRoot, salvage};
use futures::FutureExt;
use serde::{Deserialize, Serialize};

/// The note in each fast directory, with the configuration of its last mount.
const NOTE: &str = "mount.json";
/// The note in the first fast directory that describes the pool, as it was attached last.
const POOL_NOTE: &str = "pool.json";

#[derive(Serialize, Deserialize)]
struct PoolNote {
    /// [`MountConfig::pool`]
    location: String,
    known: PoolDescription,
}

/// Writes the note. A failure does not prevent the mount.
pub fn remember(config: &MountConfig) {
    for fast in &config.fast {
        let written = serde_json::to_vec_pretty(config)
            .map_err(io::Error::other)
            .and_then(|text| registry::Runtime::at(fast.clone()).replace(&fast.join(NOTE), &text));
        if let Err(error) = written {
            tracing::warn!("cannot write {}: {error}", fast.join(NOTE).display());
        }
    }
}

/// Writes the note that describes the pool. A failure does not prevent the mount.
pub fn remember_pool(config: &MountConfig, known: PoolDescription) {
    let Some(fast) = config.fast.first() else { return };
    let file = fast.join(POOL_NOTE);
    let written = serde_json::to_vec_pretty(&PoolNote { location: config.pool.clone(), known })
        .map_err(io::Error::other)
        .and_then(|text| registry::Runtime::at(fast.clone()).replace(&file, &text));
    if let Err(error) = written {
        tracing::warn!("cannot write {}: {error}", file.display());
    }
}

/// Returns what is known of a mount's pool from an earlier mount, if anything is.
pub fn recall_pool(config: &MountConfig) -> Option<PoolDescription> {
    let fast = config.fast.first()?;
    guard::take(fast).ok()?;
    let note: PoolNote = serde_json::from_slice(&read_own(&fast.join(POOL_NOTE)).ok()?).ok()?;
    (note.location == config.pool).then_some(note.known)
}

/// Reads a note of this user. It names a pool, and where bytes may go, so its owner is checked. The check is by
/// descriptor, since the name may be given to another file.
fn read_own(note: &Path) -> io::Result<Vec<u8>> {
    let mut file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(note)?;
    let meta = file.metadata()?;
    if meta.uid() != rustix::process::geteuid().as_raw() || meta.mode() & 0o022 != 0 {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "another user could have written it; mount the fast directory once as its owner, which writes it anew",
        ));
    }
    let mut text = Vec::new();
    file.read_to_end(&mut text)?;
    Ok(text)
}

/// Returns the configuration of the last mount of a fast directory.
pub fn recall(fast: &Path) -> Result<MountConfig, Failure> {
    let note = fast.join(NOTE);
    let text = read_own(&note).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            Failure::usage(format!("{} is not a fast directory: it has no {NOTE}", fast.display()))
                .remedy("give a directory that was named to `forebay mount --fast`, or a mountpoint")
        }
        _ => Failure::io(note.display(), &e),
    })?;
    // Nor is a note of this user trusted if it was moved into a directory of another user.
    guard::take(fast)?;
    serde_json::from_slice(&text).map_err(|e| Failure::new(FailureKind::Corrupt, format!("{}: {e}", note.display())))
}

/// Opens a fast pool as it was last mounted, checks it, and closes it. With `repair`, a catalog that cannot be opened
/// is replaced by an empty one. What the old catalog knew and the pool does not have is set aside. With `new_root`, the
/// pool's root may be another directory than before, and is the pool's root from now on.
pub fn fsck(config: &MountConfig, repair: bool, new_root: bool) -> Result<FsckReport, Failure> {
    let salvaged = if repair {
        let tiers: Vec<_> = worker::policy(config)?.tiers.iter().flat_map(|tier| tier.dirs.clone()).collect();
        salvage::salvage(&config.fast, &tiers)?
    } else {
        None
    };
    let Some(salvaged) = salvaged else { return check(config, repair, new_root) };
    Ok(FsckReport { problems: salvaged.lost, notes: salvaged.notes, repaired: 0, ..FsckReport::default() })
}

fn check(config: &MountConfig, repair: bool, new_root: bool) -> Result<FsckReport, Failure> {
    let rt = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|e| Failure::io("cannot start", &e))?;
    let task = async {
        // A check changes nothing in the pool: due intents stay due. The tiers are those of the mount: content on a
        // tier that a policy does not name is given up.
        let policy = worker::policy(config)?.that_flushes_by_request();
        let other_root = if new_root { OtherRoot::Accept } else { OtherRoot::Refuse };
        let overlay = worker::open(config, policy, false, other_root).await?.overlay;
        let report = overlay.fsck(repair).await;
        overlay.shutdown().await?;
        Ok(report?)
    };
    let outcome = rt.block_on(task.boxed_local());
    rt.shutdown_background();
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fast_directory_remembers_its_mount() {
        let dir = tempfile::tempdir().unwrap();
        let config: MountConfig = serde_json::from_value(serde_json::json!({
            "pool": "/p", "mountpoint": "/m", "fast": [dir.path()], "read_only": true, "immutable": false,
            "allow_other": false
        }))
        .unwrap();
        assert_eq!(recall(dir.path()).unwrap_err().kind, FailureKind::Usage);
        remember(&config);
        assert_eq!(recall(dir.path()).unwrap(), config);
        std::fs::write(dir.path().join(NOTE), "{").unwrap();
        assert_eq!(recall(dir.path()).unwrap_err().kind, FailureKind::Corrupt);
    }
}
