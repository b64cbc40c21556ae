//! Cache nodes of the program under test, and what curl gets from them.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use forebay_api::operator::Status;

use crate::mount::Place;
use crate::process::{self, Answer};
use crate::servers::s3;

/// How long a node may take to serve, and to end.
const LIMIT: Duration = Duration::from_secs(60);

/// A running node. It is killed when this value is dropped.
#[derive(Debug)]
pub struct Node {
    pub name: String,
    pub address: SocketAddr,
    child: Child,
}

/// What curl got.
#[derive(Debug)]
pub struct Got {
    /// The exit code of curl: 0, 18 for a body that ended early, ...
    pub code: i32,
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Got {
    /// Returns the value of a header, or an empty text.
    pub fn header(&self, name: &str) -> &str {
        let mut fields = self.head.lines().filter_map(|line| line.split_once(": "));
        fields.find(|(field, _)| field.eq_ignore_ascii_case(name)).map_or("", |(_, value)| value.trim())
    }
}

impl Node {
    /// Starts a node in front of a pool, with further words of the command line.
    pub fn start(pool: &str, fast: &Path, words: &[&str]) -> Self {
        Self::attempt(pool, fast, words).unwrap_or_else(|answer| panic!("{answer}"))
    }

    /// As [`Self::start`], for a directory as the pool.
    pub fn of(place: &Place, words: &[&str]) -> Self {
        Self::start(place.pool().to_str().unwrap(), &place.fast(), words)
    }

    /// Starts a node.
    ///
    /// # Errors
    /// How the program ended, if it did not serve.
    pub fn attempt(pool: &str, fast: &Path, words: &[&str]) -> Result<Self, Answer> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let mut command = Command::new(process::forebay());
        command
            .envs(s3::environment())
            .args(["--json", "serve", pool, "--fast"])
            .arg(fast)
            .args(["--name", &name])
            .args(words);
        if !words.contains(&"--listen") {
            command.args(["--listen", "127.0.0.1:0"]);
        }
        let text = format!("{command:?}");
        let mut child =
            process::spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped())).expect("the program runs");
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let err = child.stderr.take().unwrap();
        let (first, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            let _ = out.read_line(&mut line);
            let _ = first.send(line);
            let _ = std::io::copy(&mut out, &mut std::io::sink());
        });
        let said = std::thread::spawn(move || {
            let mut said = String::new();
            for line in BufReader::new(err).lines().map_while(Result::ok) {
                eprintln!("node: {line}");
                said += &line;
                said.push('\n');
            }
            said
        });
        let line = lines.recv_timeout(LIMIT).unwrap_or_default();
        if let Ok(ready) = serde_json::from_str::<serde_json::Value>(&line)
            && let Some(address) = ready["addresses"][0].as_str()
        {
            return Ok(Self { name, address: address.parse().unwrap(), child });
        }
        let code = process::wait(&mut child, LIMIT).and_then(|status| status.code());
        let _ = child.kill();
        let err = said.join().unwrap_or_default();
        Err(Answer { command: text, code, out: line, err, took: Duration::ZERO })
    }

    /// The path under which other commands know the node.
    pub fn path(&self) -> PathBuf {
        Path::new("/forebay").join(&self.name)
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Gets a path with curl, and further words of its command line. `--path-as-is`: curl changes nothing.
    pub fn get(&self, path: &str, words: &[&str]) -> Got {
        curl(&self.url(path), words)
    }

    pub fn status(&self) -> Status {
        let answer = process::run(
            Command::new(process::forebay()).args(["--json", "status"]).arg(self.path()),
            Duration::from_secs(30),
        );
        let value: serde_json::Value = serde_json::from_str(&answer.ok().out).expect("JSON");
        serde_json::from_value(value["status"].clone()).expect("a status")
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: a plain system call on our own child.
        assert_eq!(unsafe { libc::kill(self.child.id().cast_signed(), signal) }, 0);
    }

    /// Waits for the end of the node. Returns its exit code.
    pub fn wait(&mut self) -> Option<i32> {
        process::wait(&mut self.child, LIMIT).expect("the node ends").code()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(
            forebay_daemon::registry::Runtime::of(&Path::new("/forebay").join(&self.name)).dir(),
        );
    }
}

/// Gets a URL with curl, and further words of its command line.
pub fn curl(url: &str, words: &[&str]) -> Got {
    let dir = tempfile::tempdir().unwrap();
    let (head, body) = (dir.path().join("head"), dir.path().join("body"));
    let answer = process::run(
        Command::new("curl")
            .args(["-s", "--path-as-is", "-m", "60", "-D"])
            .arg(&head)
            .arg("-o")
            .arg(&body)
            .args(words)
            .arg(url),
        Duration::from_secs(90),
    );
    let head = String::from_utf8_lossy(&std::fs::read(head).unwrap_or_default()).into_owned();
    Got {
        code: answer.code.unwrap_or(-1),
        status: head.split(' ').nth(1).and_then(|status| status.trim().parse().ok()).unwrap_or(0),
        head,
        body: std::fs::read(body).unwrap_or_default(),
    }
}
