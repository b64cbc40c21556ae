//! The configuration of a mount: all that a restarted worker needs.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_policy::PolicyFiles;
use rustix::mount::MountFlags;
use serde::{Deserialize, Serialize};

use super::mounts;
use super::policy_files::NamedAccounts;

/// The speed to which a pool is slowed down, for demonstrations and tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThrottleConfig {
    pub bytes_per_sec: u64,
    pub latency: Duration,
}

/// The options of one mount. Paths are absolute and canonical once they have passed the preflight.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountConfig {
    /// A URL that [`forebay_backends::PoolLocation`] knows; for a directory its plain path.
    pub pool: String,
    /// The web server whose responses are kept, if this is a reverse proxy: its pool holds only their names.
    #[serde(default)]
    pub origin: Option<String>,
    pub mountpoint: PathBuf,
    /// Directories of the fast pool, one for each device.
    pub fast: Vec<PathBuf>,
    /// Bytes of content on the fast pool. `None`: the engine chooses.
    pub limit_bytes: Option<u64>,
    /// The text of the policy, not the name of its file: a restart must use the same policy.
    pub policy: Option<PolicyFiles>,
    /// What the names of users and groups in it stood for when the mount was made.
    #[serde(default)]
    pub accounts: NamedAccounts,
    pub read_only: bool,
    /// The pool never changes, neither through this mount nor through another client.
    pub immutable: bool,
    /// Users other than the one who mounts may use the mount, too.
    pub allow_other: bool,
    pub throttle: Option<ThrottleConfig>,
    /// Threads that answer the kernel. `None`: one for two cores, at most 8.
    pub threads: Option<usize>,
    /// Budget of all buffers together. `None`: the engine chooses.
    pub memory_bytes: Option<u64>,
    /// Where metrics and the page are served. `None`: nowhere.
    #[serde(default)]
    pub metrics: Option<SocketAddr>,
    /// The file that names the other nodes that give each other content. `None`: there are none.
    #[serde(default)]
    pub peers: Option<PathBuf>,
    /// Options of the mount itself, beside those of the file system: `nosuid`, `noexec`, ...
    #[serde(default)]
    pub kernel_options: Vec<String>,
    /// Kernel hooks that the observer does not use, by the names of their tracepoints, for tests. `all`: there is no
    /// observer.
    #[serde(default)]
    pub mask_hooks: Vec<String>,
}

impl MountConfig {
    /// Returns the mount flags that restrict the file system of a directory pool, and so the mount.
    pub fn forbidden(&self) -> MountFlags {
        let directory = Path::new(self.pool.strip_prefix("file://").unwrap_or(&self.pool));
        if directory.is_absolute() { mounts::flags_below(directory) } else { MountFlags::empty() }
    }

    /// Where content comes from, for people.
    pub fn source(&self) -> &str {
        self.origin.as_deref().unwrap_or(&self.pool)
    }

    /// Returns the command line that makes this mount again, for messages.
    pub fn command_line(&self) -> String {
        let mut words =
            vec!["forebay mount".to_string(), quoted(&self.pool), quoted(&self.mountpoint.to_string_lossy())];
        for fast in &self.fast {
            words.push(format!("--fast {}", quoted(&fast.to_string_lossy())));
        }
        if let Some(limit) = self.limit_bytes {
            words.push(format!("--limit {limit}"));
        }
        if self.policy.is_some() {
            words.push("--policy FILE".into());
        }
        if let Some(pace) = self.throttle {
            words.push(format!("--throttle {}/s,{}us", pace.bytes_per_sec, pace.latency.as_micros()));
        }
        if let Some(address) = self.metrics {
            words.push(format!("--metrics {address}"));
        }
        if let Some(file) = &self.peers {
            words.push(format!("--peers {}", quoted(&file.to_string_lossy())));
        }
        for (set, flag) in
            [(self.read_only, "--read-only"), (self.immutable, "--immutable"), (self.allow_other, "-o allow_other")]
        {
            if set {
                words.push(flag.into());
            }
        }
        words.join(" ")
    }
}

/// Quotes `word` for a shell.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:=@%,".contains(c);
    if !word.is_empty() && word.chars().all(plain) { word.into() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(pool: &str) -> MountConfig {
        MountConfig {
            pool: pool.into(),
            mountpoint: "/mnt/my data".into(),
            fast: vec!["/nvme".into()],
            limit_bytes: Some(7),
            policy: None,
            accounts: NamedAccounts::default(),
            read_only: true,
            immutable: false,
            allow_other: false,
            throttle: None,
            threads: None,
            memory_bytes: None,
            metrics: Some("127.0.0.1:9464".parse().unwrap()),
            peers: Some("/etc/peers.toml".into()),
            kernel_options: Vec::new(),
            mask_hooks: Vec::new(),
            origin: None,
        }
    }

    #[test]
    fn command_line_quotes_what_a_shell_would_split() {
        let line = config("/p").command_line();
        assert_eq!(
            line,
            "forebay mount /p '/mnt/my data' --fast /nvme --limit 7 --metrics 127.0.0.1:9464 --peers /etc/peers.toml --read-only"
        );
    }
}
