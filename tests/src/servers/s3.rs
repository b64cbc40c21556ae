//! Real S3 servers on loopback: versitygw, which keeps objects as plain files, and Ceph's gateway.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tempfile::TempDir;

use super::started::{answers, end, free_port, spawn, wait_until};

pub const ACCESS_KEY: &str = "forebay";
pub const SECRET_KEY: &str = "forebay-secret";
pub const BUCKET: &str = "pool";

/// Returns the environment variables with a client's credentials.
pub fn environment() -> BTreeMap<String, String> {
    [("AWS_ACCESS_KEY_ID", ACCESS_KEY), ("AWS_SECRET_ACCESS_KEY", SECRET_KEY)]
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// Sends a signed request with curl. Returns what it prints.
fn curl(arguments: &[&str], url: &str) -> String {
    let done = Command::new("curl")
        .args(["-fsS", "--user", &format!("{ACCESS_KEY}:{SECRET_KEY}")])
        .args(["--aws-sigv4", "aws:amz:us-east-1:s3", "-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD"])
        .args(arguments)
        .arg(url)
        .output()
        .expect("curl is missing: apt-get install curl");
    let told = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "curl {arguments:?} {url}: {told}");
    String::from_utf8_lossy(&done.stdout).into_owned()
}

/// Sends a signed request for a key, with curl, to the server at a port. Returns what it prints.
pub fn curl_at(port: u16, arguments: &[&str], key: &str) -> String {
    curl(arguments, format!("http://127.0.0.1:{port}/{BUCKET}/{key}").trim_end_matches('/'))
}

/// Returns the URL of the pool at the port of a server, or of a proxy of it.
pub fn url_at(port: u16) -> String {
    format!("s3://{BUCKET}/?endpoint=http://127.0.0.1:{port}")
}

/// A versitygw whose buckets are directories below a temporary one.
pub struct Versitygw {
    dir: TempDir,
    /// Where it listens: loopback, or all addresses if empty.
    host: &'static str,
    port: u16,
    child: Option<Child>,
    killed_at: SystemTime,
}

impl Versitygw {
    /// Starts a server with one bucket, [`BUCKET`].
    pub fn start() -> Self {
        Self::at("127.0.0.1")
    }

    /// The same on all addresses of a network namespace that the test made.
    pub fn on_all_addresses() -> Self {
        Self::at("")
    }

    fn at(host: &'static str) -> Self {
        // The server stores attributes of objects as extended attributes of files, so tmpfs does not suffice.
        let dir = tempfile::Builder::new().prefix("forebay-versitygw-").tempdir_in("/var/tmp").unwrap();
        for name in ["data", "iam", "versions"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let mut server = Self { dir, host, port: free_port(), child: None, killed_at: UNIX_EPOCH };
        server.resume();
        server.curl(&["-X", "PUT"], "");
        server
    }

    /// Starts the server, or starts it again after a kill, on the same port and data.
    pub fn resume(&mut self) {
        let tools = std::env::var_os("FOREBAY_TOOLS").map(PathBuf::from).unwrap_or_default();
        let mut command = Command::new(tools.join("versitygw"));
        command
            .env("ROOT_ACCESS_KEY", ACCESS_KEY)
            .env("ROOT_SECRET_KEY", SECRET_KEY)
            .args(["--port", &format!("{}:{}", self.host, self.port), "--quiet", "--keep-alive", "--iam-dir"])
            .arg(self.dir.path().join("iam"))
            .args(["posix", "--versioning-dir"])
            .arg(self.dir.path().join("versions"))
            .arg(self.dir.path().join("data"));
        let log = self.dir.path().join("log");
        self.child = Some(spawn(command, &log));
        let port = self.port;
        wait_until("versitygw", &log, || answers(port).is_some());
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            end(&mut child);
            self.killed_at = SystemTime::now();
        }
    }

    /// Removes what a kill left half done, as if the server made each change atomically: the second name of an object
    /// that was about to replace another one, `.NAME.sgwtmp.NUMBER`, and directories without the mark of directories
    /// that clients made. The listing of the parent has such a directory, but its own name is not found.
    pub fn mend(&self) {
        mend(&self.files(), self.killed_at - LAST_MOMENTS);
    }

    pub fn url(&self, prefix: &str) -> String {
        self.url_by(prefix, self.port)
    }

    /// Returns the URL with another port, on which a proxy forwards the requests.
    pub fn url_by(&self, prefix: &str, port: u16) -> String {
        format!("s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{port}")
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Sends a signed request for a key with curl. Returns what it prints.
    pub fn curl(&self, arguments: &[&str], key: &str) -> String {
        curl_at(self.port, arguments, key)
    }

    /// Returns the directory in which the objects of the bucket are files.
    pub fn files(&self) -> PathBuf {
        self.dir.path().join("data").join(BUCKET)
    }
}

/// The longest time that the server works on a request.
const LAST_MOMENTS: Duration = Duration::from_secs(1);

fn mend(dir: &Path, since: SystemTime) {
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let (path, name, metadata) = (entry.path(), entry.file_name(), entry.metadata().unwrap());
        let changed = UNIX_EPOCH + Duration::new(metadata.ctime().cast_unsigned(), metadata.ctime_nsec() as u32);
        if metadata.is_dir() {
            if name == ".sgwtmp" {
                continue;
            }
            mend(&path, since);
            let is_marked = rustix::fs::getxattr(&path, "user.etag", &mut [0; 256]).is_ok();
            if !is_marked && changed >= since && fs::remove_dir(&path).is_ok() {
                println!("the server's death left a directory half made: {}", path.display());
            }
            continue;
        }
        let is_second = name.to_string_lossy().rsplit_once(".sgwtmp.").is_some_and(|(begin, _)| begin.starts_with('.'));
        if is_second && changed >= since {
            fs::remove_file(&path).unwrap();
            println!("the server's death left a second name of an object: {}", path.display());
        }
    }
}

impl Drop for Versitygw {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Ceph's gateway on one monitor and one object store in memory, all on loopback.
pub struct Rgw {
    dir: TempDir,
    port: u16,
    /// In the order of their start.
    children: Vec<Child>,
}

impl Rgw {
    /// Starts a gateway with one bucket, [`BUCKET`].
    pub fn start() -> Self {
        let dir = tempfile::Builder::new().prefix("forebay-rgw-").tempdir_in("/var/tmp").unwrap();
        for name in ["mon", "osd", "run"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let mut server = Self { dir, port: free_port(), children: Vec::new() };
        let mon_port = free_port();
        server.write_config(mon_port);
        server.start_monitor(mon_port);
        server.start_store();
        let user = ["user", "create", "--uid=forebay", "--display-name=forebay"];
        let keys = [format!("--access-key={ACCESS_KEY}"), format!("--secret={SECRET_KEY}")];
        server.run("radosgw-admin", &[&user[..], &keys.each_ref().map(String::as_str)].concat());
        server.resume();
        server.curl(&["-X", "PUT"], "");
        server
    }

    /// Starts the gateway, or starts it again after a kill.
    pub fn resume(&mut self) {
        let gateway = self.command("radosgw", &["-n", "client.admin", "-f"]);
        self.children.push(spawn(gateway, &self.log("radosgw")));
        let (port, log) = (self.port, self.log("radosgw"));
        wait_until("radosgw", &log, || answers(port).is_some());
    }

    /// Kills the gateway; the monitor and the object store continue.
    pub fn kill(&mut self) {
        if let Some(mut gateway) = self.children.pop() {
            end(&mut gateway);
        }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self, prefix: &str) -> String {
        format!("s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{}", self.port)
    }

    /// Sends a signed request for a key with curl. Returns what it prints.
    pub fn curl(&self, arguments: &[&str], key: &str) -> String {
        curl(arguments, format!("http://127.0.0.1:{}/{BUCKET}/{key}", self.port).trim_end_matches('/'))
    }

    fn at(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    fn log(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.log"))
    }

    fn write_config(&self, mon_port: u16) {
        let (root, port) = (self.dir.path().display(), self.port);
        let config = format!(
            "[global]
            fsid = 11111111-2222-3333-4444-555555555555
            mon_initial_members = a
            mon_host = v2:127.0.0.1:{mon_port}
            public_addr = 127.0.0.1
            cluster_addr = 127.0.0.1
            keyring = {root}/keyring
            osd_pool_default_size = 1
            osd_pool_default_min_size = 1
            osd_pool_default_pg_num = 4
            osd_pool_default_pg_autoscale_mode = off
            mon_allow_pool_size_one = true
            mon_data_avail_warn = 1
            mon_data_avail_crit = 0
            mon_max_pg_per_osd = 1000
            osd_crush_chooseleaf_type = 0
            osd_objectstore = memstore
            memstore_device_bytes = 4294967296
            mon_data = {root}/mon
            osd_data = {root}/osd
            rgw_data = {root}/rgw
            log_file = {root}/run/$name.log
            admin_socket = {root}/run/$name.asok
            pid_file = {root}/run/$name.pid
            run_dir = {root}/run
            rgw_frontends = beast endpoint=127.0.0.1:{port}
            rgw_thread_pool_size = 32
            "
        );
        let lines: Vec<_> = config.lines().map(str::trim).collect();
        fs::write(self.at("ceph.conf"), lines.join("\n")).unwrap();
    }

    fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        // Debian 13 names the directory of the object classes without the leading slash, so the programs must run in
        // `/`.
        command.env("CEPH_CONF", self.at("ceph.conf")).current_dir("/").args(arguments);
        command
    }

    fn run(&self, program: &str, arguments: &[&str]) {
        let done = self.command("timeout", &[&["120", program], arguments].concat()).output().unwrap();
        let told = String::from_utf8_lossy(&done.stderr);
        assert!(
            done.status.success(),
            "{program} {arguments:?}: {told}; apt-get install radosgw ceph-mon ceph-osd ceph-common"
        );
    }

    fn start_monitor(&mut self, port: u16) {
        let (map, keyring, mon_keyring) = (self.at("monmap"), self.at("keyring"), self.at("mon.keyring"));
        let address = format!("[v2:127.0.0.1:{port}]");
        let fsid = "11111111-2222-3333-4444-555555555555";
        self.run("monmaptool", &["--create", "--fsid", fsid, "--addv", "a", &address, &map]);
        self.run(
            "ceph-authtool",
            &["--create-keyring", &mon_keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *"],
        );
        let all = ["--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *"];
        let admin = ["--create-keyring", &keyring, "--gen-key", "-n", "client.admin"];
        self.run("ceph-authtool", &[&admin[..], &all].concat());
        let osd = [&keyring, "--gen-key", "-n", "osd.0", "--cap", "mon", "allow profile osd"];
        self.run("ceph-authtool", &[&osd[..], &["--cap", "osd", "allow *", "--cap", "mgr", "allow *"]].concat());
        self.run("ceph-authtool", &[&mon_keyring, "--import-keyring", &keyring]);
        self.run("ceph-mon", &["-i", "a", "--mkfs", "--monmap", &map, "--keyring", &mon_keyring]);
        let log = self.log("mon");
        self.children.push(spawn(self.command("ceph-mon", &["-i", "a", "-f"]), &log));
        wait_until("ceph-mon", &log, || self.says("ceph", &["-s"]).is_some());
    }

    fn start_store(&mut self) {
        let id = "66666666-7777-8888-9999-000000000000";
        self.run("ceph", &["osd", "new", id]);
        self.run("ceph-osd", &["-i", "0", "--mkfs", "--osd-uuid", id]);
        let log = self.log("osd");
        self.children.push(spawn(self.command("ceph-osd", &["-i", "0", "-f"]), &log));
        wait_until("ceph-osd", &log, || self.says("ceph", &["osd", "stat"]).is_some_and(|told| told.contains("1 up")));
    }

    /// Returns what a command prints, if it succeeds within two seconds.
    fn says(&self, program: &str, arguments: &[&str]) -> Option<String> {
        let done = self.command("timeout", &[&["2", program], arguments].concat()).output().ok()?;
        done.status.success().then(|| String::from_utf8_lossy(&done.stdout).into_owned())
    }
}

impl Drop for Rgw {
    fn drop(&mut self) {
        self.children.iter_mut().rev().for_each(end);
    }
}
