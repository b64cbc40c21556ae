//! What a pool holds, seen by somebody who does not look through the mount.

mod bucket;

use std::fmt::{self, Debug, Display, Formatter};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use bucket::Bucket;

/// One directory. What it tells is what is there at the moment of the call. Shown, it is a place for messages.
pub trait Tree: Debug + Display + Send + Sync {
    /// The directory of that name in it, there or not.
    fn below(&self, name: &str) -> Arc<dyn Tree>;

    /// The content of a file.
    ///
    /// # Errors
    /// `NotFound` where there is none, and only there.
    fn read(&self, name: &str) -> io::Result<Vec<u8>>;

    /// The names in it, in no order.
    ///
    /// # Errors
    /// Those of looking.
    fn names(&self) -> io::Result<Vec<String>>;

    /// The number of hard links of what is there by that name.
    ///
    /// # Errors
    /// `NotFound` where nothing is there, and only there.
    fn links(&self, name: &str) -> io::Result<u64>;
}

/// A directory of plain files.
#[derive(Debug, Clone)]
pub struct Files(pub PathBuf);

impl Files {
    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.0.join(name)
    }
}

impl Display for Files {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.display())
    }
}

impl Tree for Files {
    fn below(&self, name: &str) -> Arc<dyn Tree> {
        Arc::new(Self(self.path(name)))
    }

    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        fs::read(self.path(name))
    }

    fn names(&self) -> io::Result<Vec<String>> {
        fs::read_dir(&self.0)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn links(&self, name: &str) -> io::Result<u64> {
        Ok(self.path(name).symlink_metadata()?.nlink())
    }
}
