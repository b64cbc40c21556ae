//! The content of a pool, read without the mount.

mod bucket;

use std::fmt::{self, Debug, Display, Formatter};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use bucket::Bucket;

/// One directory. Each call returns its state at that moment. `Display` shows its location in messages.
pub trait Tree: Debug + Display + Send + Sync {
    /// Returns the directory with that name below this one, whether or not it exists.
    fn below(&self, name: &str) -> Arc<dyn Tree>;

    /// Returns the content of a file.
    ///
    /// # Errors
    /// `NotFound` if and only if the file does not exist.
    fn read(&self, name: &str) -> io::Result<Vec<u8>>;

    /// Returns the names in the directory, in no order.
    ///
    /// # Errors
    /// Those of the listing.
    fn names(&self) -> io::Result<Vec<String>>;

    /// Returns the number of hard links of an object.
    ///
    /// # Errors
    /// `NotFound` if and only if the object does not exist.
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
