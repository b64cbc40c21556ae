//! A real etcd server, with one member.

use std::process::{Child, Command};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use tempfile::TempDir;

use super::started::{answers, end, free_port, spawn, wait_until};

/// An etcd that keeps its data while it is killed and started again.
pub struct Etcd {
    dir: TempDir,
    host: String,
    port: u16,
    peer_port: u16,
    child: Option<Child>,
}

impl Etcd {
    /// Starts a server that listens on loopback, and on `host`, which may be another address of this network namespace.
    pub fn start(host: &str) -> Self {
        let dir = tempfile::Builder::new().prefix("forebay-etcd-").tempdir_in("/var/tmp").unwrap();
        let (port, peer_port) = (free_port(), free_port());
        let mut server = Self { dir, host: host.to_owned(), port, peer_port, child: None };
        server.resume();
        server
    }

    /// Starts the server again after a kill, with the same port and data.
    pub fn resume(&mut self) {
        let (client, peer) = (format!(":{}", self.port), format!("http://127.0.0.1:{}", self.peer_port));
        let local = format!("http://127.0.0.1{client}");
        let all =
            if self.host == "127.0.0.1" { local.clone() } else { format!("{local},http://{}{client}", self.host) };
        let mut command = Command::new("etcd");
        command
            .args(["--name", "one", "--initial-cluster", &format!("one={peer}")])
            .args(["--listen-client-urls", &all, "--advertise-client-urls", &local])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .arg("--data-dir")
            .arg(self.dir.path().join("data"));
        let log = self.dir.path().join("log");
        self.child = Some(spawn(command, &log));
        let port = self.port;
        wait_until("etcd", &log, || answers(port).is_some());
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the number of all keys.
    pub fn keys(&self) -> usize {
        let all = r#"{"key":"AA==","range_end":"AA==","count_only":true}"#;
        let url = format!("http://127.0.0.1:{}/v3/kv/range", self.port);
        let done = Command::new("curl").args(["-fsS", "-d", all, &url]).output().expect("curl is there");
        let answer: serde_json::Value = serde_json::from_slice(&done.stdout).expect("JSON");
        answer["count"].as_str().map_or(0, |count| count.parse().expect("a number"))
    }

    /// Writes a key, as any client of the server can.
    pub fn put(&self, key: &str, value: &str) {
        let encoded = |text: &str| STANDARD.encode(text);
        let put = serde_json::json!({ "key": encoded(key), "value": encoded(value) }).to_string();
        let url = format!("http://127.0.0.1:{}/v3/kv/put", self.port);
        let done = Command::new("curl").args(["-fsS", "-d", &put, &url]).output().expect("curl is there");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            end(&mut child);
        }
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}
