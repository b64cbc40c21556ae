//! Other programs that mount a bucket with a cache on local disk, started as their manuals describe.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use forebay_benches::Result;

const MOUNTED_WITHIN: Duration = Duration::from_secs(20);

/// The programs that are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    Rclone,
    S3fs,
}

impl Program {
    pub const ALL: [Self; 2] = [Self::Rclone, Self::S3fs];

    pub fn name(self) -> &'static str {
        match self {
            Self::Rclone => "rclone mount --vfs-cache-mode full",
            Self::S3fs => "s3fs -o use_cache",
        }
    }
}

/// A bucket and its credentials.
pub struct Bucket<'a> {
    pub endpoint: &'a str,
    pub name: &'a str,
    pub key: &'a str,
    pub secret: &'a str,
}

/// A mount of another program; it is unmounted when this value is dropped.
pub struct Other {
    child: Child,
    point: PathBuf,
}

impl Other {
    /// Mounts a bucket at `dir/mount` with an empty cache in `dir/cache`.
    ///
    /// # Errors
    /// The program is missing, or does not mount.
    pub fn start(program: Program, bucket: &Bucket<'_>, dir: &Path) -> Result<Self> {
        let (point, cache) = (dir.join("mount"), dir.join("cache"));
        fs::create_dir_all(&point)?;
        fs::create_dir_all(&cache)?;
        let mut command = match program {
            Program::Rclone => {
                let mut command = Command::new("rclone");
                command
                    .args(["mount", "--vfs-cache-mode", "full", "--vfs-write-back", "0s", "--config", "/dev/null"])
                    .arg("--cache-dir")
                    .arg(&cache)
                    .arg(format!(":s3:{}", bucket.name))
                    .arg(&point)
                    .args(["--s3-provider", "Other", "--s3-endpoint", bucket.endpoint])
                    .args(["--s3-access-key-id", bucket.key, "--s3-secret-access-key", bucket.secret]);
                command
            }
            Program::S3fs => {
                let mut command = Command::new("s3fs");
                command
                    .arg(bucket.name)
                    .arg(&point)
                    .args(["-f", "-o", "use_path_request_style", "-o"])
                    .arg(format!("url={}", bucket.endpoint))
                    .arg("-o")
                    .arg(format!("use_cache={}", cache.display()))
                    .env("AWS_ACCESS_KEY_ID", bucket.key)
                    .env("AWS_SECRET_ACCESS_KEY", bucket.secret);
                command
            }
        };
        // The endpoint is plain HTTP and needs no certificates; rclone refuses to start with some.
        command.env_remove("AWS_CA_BUNDLE");
        let log = fs::File::create(dir.join("log"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().map_err(|error| format!("{}: {error}", program.name()))?;
        let mut other = Self { child, point };
        let since = Instant::now();
        while !other.is_mounted()? {
            if other.child.try_wait()?.is_some() || since.elapsed() > MOUNTED_WITHIN {
                return Err(format!("{}: {}", program.name(), fs::read_to_string(dir.join("log"))?).into());
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(other)
    }

    pub fn path(&self) -> &Path {
        &self.point
    }

    fn is_mounted(&self) -> Result<bool> {
        let point = self.point.to_str().ok_or("a directory whose name is not UTF-8")?;
        Ok(fs::read_to_string("/proc/self/mounts")?.lines().any(|line| line.split(' ').nth(1) == Some(point)))
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(&self.point).status().is_ok_and(|status| status.success());
        if !unmounted {
            let _ = Command::new("umount").arg("-l").arg(&self.point).status();
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}
