//! A fast pool that no daemon has open: which mount it belongs to, and its check.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::config::MountConfig;
use super::{Failure, FailureKind, registry, worker};
use forebay_api::operator::FsckReport;
use forebay_cache::guard;
use forebay_engine::salvage;

/// The note in each fast directory, with the configuration of its last mount.
const NOTE: &str = "mount.json";

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

/// Returns the configuration of the last mount of a fast directory.
pub fn recall(fast: &Path) -> Result<MountConfig, Failure> {
    let note = fast.join(NOTE);
    let read = || -> io::Result<Vec<u8>> {
        let mut file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(&note)?;
        let meta = file.metadata()?;
        // The note names a pool, and where bytes may go, so its owner is checked. The check is by descriptor, since the
        // name may be given to another file.
        if meta.uid() != rustix::process::geteuid().as_raw() || meta.mode() & 0o022 != 0 {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "another user could have written it; mount the fast directory once as its owner, which writes it anew",
            ));
        }
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        Ok(text)
    };
    let text = read().map_err(|e| match e.kind() {
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
/// is replaced by an empty one. What the old catalog knew and the pool does not have is set aside.
pub fn fsck(config: &MountConfig, repair: bool) -> Result<FsckReport, Failure> {
    let salvaged = if repair { salvage::salvage(&config.fast)? } else { None };
    let Some(salvaged) = salvaged else { return check(config, repair) };
    Ok(FsckReport { problems: salvaged.lost, notes: salvaged.notes, repaired: 0, ..FsckReport::default() })
}

fn check(config: &MountConfig, repair: bool) -> Result<FsckReport, Failure> {
    let rt = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|e| Failure::io("cannot start", &e))?;
    let outcome = rt.block_on(async {
        // A check changes nothing in the pool: due intents stay due. The tiers are those of the mount: content on a tier
        // that a policy does not name is given up.
        let policy = worker::policy(config)?.that_flushes_by_request();
        let (overlay, _) = worker::open(config, policy, false).await?;
        let report = overlay.fsck(repair).await;
        overlay.shutdown().await?;
        Ok(report?)
    });
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
