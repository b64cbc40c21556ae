//! Web servers as the origins of a reverse proxy: nginx, and the server of http-cache-tests.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tempfile::TempDir;

use super::started::{answers, end, free_port, spawn, wait_until};
use crate::process;

/// An origin. It ends when this value is dropped.
pub struct Origin {
    pub port: u16,
    dir: TempDir,
    child: Option<Child>,
    command: Box<dyn Fn() -> Command + Send + Sync>,
}

impl Origin {
    /// nginx. Its files are below [`Self::files`], and `locations` are of its configuration. Its log has the method, the
    /// target, the status and `Range` of each request.
    pub fn nginx(locations: &str) -> Self {
        let (dir, port) = (TempDir::new_in("/var/tmp").unwrap(), free_port());
        let at = dir.path().display();
        let config = format!(
            "daemon off; worker_processes 2; pid {at}/pid; error_log {at}/errors; user root;\n\
             events {{ worker_connections 2048; }}\n\
             http {{ types {{ text/html html; text/plain txt; }} default_type application/octet-stream;\n\
             log_format short '$request_method $request_uri $status $http_range'; access_log {at}/log short;\n\
             client_body_temp_path {at}/t; proxy_temp_path {at}/t; fastcgi_temp_path {at}/t; uwsgi_temp_path {at}/t;\n\
             scgi_temp_path {at}/t;\n\
             server {{ listen 127.0.0.1:{port}; root {at}/files;\n{locations}\n}} }}\n"
        );
        fs::create_dir(dir.path().join("files")).unwrap();
        fs::write(dir.path().join("nginx.conf"), config).unwrap();
        let base = dir.path().to_path_buf();
        let command = move || {
            let mut command = Command::new("/usr/sbin/nginx");
            command.arg("-c").arg(base.join("nginx.conf")).arg("-p").arg(&base).arg("-e").arg(base.join("errors"));
            command
        };
        Self::started(dir, port, Box::new(command))
    }

    /// The server of http-cache-tests, which answers as its client says.
    pub fn cache_tests() -> Self {
        let (dir, port) = (TempDir::new_in("/var/tmp").unwrap(), free_port());
        let pid = dir.path().join("pid");
        let command = move || {
            let mut command = Command::new("node");
            command.arg("--require").arg(own("loopback.cjs")).arg("server/server.mjs").current_dir(suite());
            command.env("npm_config_protocol", "http").env("npm_config_port", port.to_string());
            command.env("npm_config_pidfile", &pid);
            command
        };
        Self::started(dir, port, Box::new(command))
    }

    fn started(dir: TempDir, port: u16, command: Box<dyn Fn() -> Command + Send + Sync>) -> Self {
        let mut origin = Self { port, dir, child: None, command };
        origin.start();
        origin
    }

    pub fn start(&mut self) {
        let log = self.dir.path().join("output");
        self.child = Some(spawn((self.command)(), &log));
        wait_until("the origin", &log, || answers(self.port).is_some());
    }

    /// Ends it, with its connections.
    pub fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // nginx has a process that answers: this one ends it.
            // SAFETY: a plain system call on our own child.
            unsafe { libc::kill(child.id().cast_signed(), libc::SIGTERM) };
            let _ = process::wait(&mut child, Duration::from_secs(20));
            end(&mut child);
        }
    }

    /// Ends it at once, in the middle of responses.
    pub fn kill(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        // The first process would start another one in place of each that ends.
        let workers = children(child.id());
        end(&mut child);
        for pid in workers {
            // SAFETY: a plain system call on a process that our own child had started.
            unsafe { libc::kill(pid.cast_signed(), libc::SIGKILL) };
        }
    }

    pub fn files(&self) -> PathBuf {
        self.dir.path().join("files")
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Returns the requests for a target so far, without that of [`Self::start`].
    pub fn requests(&self, target: &str) -> Vec<String> {
        let log = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        log.lines().filter(|line| line.split(' ').nth(1) == Some(target)).map(str::to_owned).collect()
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.stop();
    }
}

fn children(pid: u32) -> Vec<u32> {
    let listed = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    listed.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

fn own(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("cache_tests").join(file)
}

/// The directory of the suite.
fn suite() -> PathBuf {
    let program = process::tool("http-cache-tests").canonicalize().expect("it is a file");
    program.parent().expect("it is in a directory").to_path_buf()
}

/// An origin on a thread, which answers each request after a pause with what `answer` says to its head.
pub fn slow_origin(pause: Duration, answer: impl Fn(&str) -> String + Send + Sync + 'static) -> String {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", socket.local_addr().unwrap());
    let answer = Arc::new(answer);
    thread::spawn(move || {
        for stream in socket.incoming().map_while(Result::ok) {
            let answer = answer.clone();
            thread::spawn(move || {
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                let lines = (&mut reader).lines().map_while(Result::ok);
                let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
                let head = head.join("\n").to_ascii_lowercase();
                let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
                // A socket that is closed with content in it takes the answer back.
                let _ = io::copy(&mut reader.take(length.unwrap_or(0)), &mut io::sink());
                thread::sleep(pause);
                let _ = (&stream).write_all(answer(&head).as_bytes());
            });
        }
    });
    url
}

/// The verdict of http-cache-tests on one of its tests.
#[derive(Debug, serde::Deserialize)]
pub struct CacheTest {
    pub id: String,
    pub kind: String,
    pub verdict: String,
    pub why: String,
}

/// Runs http-cache-tests against a cache in front of [`Origin::cache_tests`].
pub fn run_cache_tests(url: &str) -> Vec<CacheTest> {
    let mut command = Command::new("node");
    command.arg("--no-warnings").arg(own("run.mjs")).arg(suite()).arg(url).current_dir(suite());
    let answer = process::run(&mut command, Duration::from_secs(300)).ok();
    let last = answer.out.lines().last().unwrap_or_default();
    serde_json::from_str(last).unwrap_or_else(|e| panic!("{e}: {answer}"))
}
