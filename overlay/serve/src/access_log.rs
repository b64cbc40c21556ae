//! The log of requests: one line each, in the combined format of web servers or as JSON.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant, SystemTime};

use chrono::{DateTime, Local};
use serde::Serialize;

/// Lines that wait for the disk. Further ones are counted and left out: a slow log must not slow down responses.
const WAITING_MAX: usize = 65_536;
/// How long a line may wait before it is in the file.
const FLUSH_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// That of Apache and nginx.
    Combined,
    Json,
}

/// One answered request.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct LogEntry {
    #[serde(serialize_with = "as_rfc3339")]
    pub time: SystemTime,
    pub client: IpAddr,
    /// The name of the client's token.
    pub user: Option<String>,
    pub method: String,
    pub target: String,
    pub protocol: &'static str,
    pub status: u16,
    /// Bytes of the body that were handed to the connection.
    pub bytes: u64,
    #[serde(serialize_with = "as_ms")]
    pub duration: Duration,
    pub referer: Option<String>,
    pub agent: Option<String>,
    pub cache_status: Option<String>,
}

fn as_rfc3339<S: serde::Serializer>(time: &SystemTime, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&DateTime::<Local>::from(*time).to_rfc3339_opts(chrono::SecondsFormat::Millis, false))
}

fn as_ms<S: serde::Serializer>(duration: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64((duration.as_secs_f64() * 1e6).round() / 1e3)
}

/// What the thread that writes is told.
enum LogMessage {
    Line(Box<LogEntry>),
    /// Everything before this is to be in the file. The sender is dropped then.
    Flush(SyncSender<()>),
}

/// Where lines are written to. Clones write to the same file.
#[derive(Clone)]
pub struct AccessLog {
    lines: SyncSender<LogMessage>,
    left_out: Arc<AtomicU64>,
    reopen: Arc<AtomicBool>,
}

impl AccessLog {
    /// Opens the file for appending, and starts the thread that writes it. `-` is standard output.
    ///
    /// # Errors
    /// Those of the file.
    pub fn open(file: &Path, format: LogFormat) -> io::Result<Self> {
        let output = output(file)?;
        let (lines, waiting) = sync_channel(WAITING_MAX);
        let (left_out, reopen) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let mut writer = LogWriter { file: file.to_owned(), format, output, left_out: left_out.clone() };
        let again = reopen.clone();
        std::thread::Builder::new().name("forebay-log".into()).spawn(move || writer.run(&waiting, &again))?;
        Ok(Self { lines, left_out, reopen })
    }

    pub(crate) fn note(&self, entry: LogEntry) {
        if self.lines.try_send(LogMessage::Line(Box::new(entry))).is_err() {
            self.left_out.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until all lines so far are in the file, but not for longer than this.
    pub fn flush(&self, limit: Duration) {
        let (done, wait) = sync_channel(0);
        if self.lines.try_send(LogMessage::Flush(done)).is_ok() {
            let _ = wait.recv_timeout(limit);
        }
    }

    /// Opens the file again by its name: after a rotation, it is another one.
    pub fn reopen(&self) {
        self.reopen.store(true, Ordering::Release);
    }
}

fn output(file: &Path) -> io::Result<Box<dyn Write + Send>> {
    if file == Path::new("-") {
        return Ok(Box::new(io::stdout()));
    }
    let file: File = OpenOptions::new().append(true).create(true).mode(0o640).open(file)?;
    Ok(Box::new(BufWriter::new(file)))
}

struct LogWriter {
    file: PathBuf,
    format: LogFormat,
    output: Box<dyn Write + Send>,
    left_out: Arc<AtomicU64>,
}

impl LogWriter {
    fn run(&mut self, lines: &Receiver<LogMessage>, reopen: &AtomicBool) {
        let mut flushed = Instant::now();
        loop {
            let next = lines.recv_timeout(FLUSH_EVERY);
            let is_over = matches!(next, Err(RecvTimeoutError::Disconnected));
            if reopen.swap(false, Ordering::AcqRel) {
                let again = self.output.flush().and_then(|()| output(&self.file));
                match again {
                    Ok(output) => self.output = output,
                    Err(error) => tracing::error!("access log {}: {error}", self.file.display()),
                }
            }
            let (mut written, mut flushing) = (Ok(()), None);
            match next {
                Ok(LogMessage::Line(entry)) => written = self.output.write_all(line(&entry, self.format).as_bytes()),
                Ok(LogMessage::Flush(done)) => flushing = Some(done),
                Err(_) => {}
            }
            if is_over || flushing.is_some() || flushed.elapsed() >= FLUSH_EVERY {
                flushed = Instant::now();
                written = written.and_then(|()| self.output.flush());
                let left_out = self.left_out.swap(0, Ordering::Relaxed);
                if left_out > 0 {
                    tracing::warn!("the access log was too slow: {left_out} lines were left out");
                }
            }
            if let Err(error) = written {
                tracing::error!("access log {}: {error}", self.file.display());
            }
            drop(flushing);
            if is_over {
                return;
            }
        }
    }
}

/// Text of a client, without what could end a field or a line, or do something to a terminal.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            ' '..='~' => out.push(c),
            _ => c.encode_utf8(&mut [0; 4]).bytes().for_each(|byte| {
                let _ = write!(out, "\\x{byte:02X}");
            }),
        }
    }
    out
}

fn line(entry: &LogEntry, format: LogFormat) -> String {
    if format == LogFormat::Json {
        return serde_json::to_string(entry).unwrap_or_default() + "\n";
    }
    let text = |text: &Option<String>| text.as_deref().map_or_else(|| "-".to_owned(), escaped);
    format!(
        "{} - {} [{}] \"{} {} {}\" {} {} \"{}\" \"{}\"\n",
        entry.client,
        text(&entry.user).replace(' ', "\\x20"),
        DateTime::<Local>::from(entry.time).format("%d/%b/%Y:%H:%M:%S %z"),
        escaped(&entry.method),
        escaped(&entry.target),
        entry.protocol,
        entry.status,
        entry.bytes,
        text(&entry.referer),
        text(&entry.agent),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> LogEntry {
        LogEntry {
            time: SystemTime::UNIX_EPOCH,
            client: "127.0.0.1".parse().unwrap(),
            user: None,
            method: "GET".into(),
            target: "/a".into(),
            protocol: "HTTP/1.1",
            status: 200,
            bytes: 7,
            duration: Duration::from_micros(1500),
            referer: None,
            agent: Some("evil\"\n\u{1b}[31m é".into()),
            cache_status: Some("forebay; hit".into()),
        }
    }

    #[test]
    fn what_a_client_says_stays_inside_its_field() {
        let line = line(&entry(), LogFormat::Combined);
        assert!(line.starts_with("127.0.0.1 - - [") && line.ends_with('\n') && line.lines().count() == 1, "{line}");
        assert!(line.contains(r#""GET /a HTTP/1.1" 200 7 "-" "evil\"\x0A\x1B[31m \xC3\xA9""#), "{line}");
    }

    #[test]
    fn a_rotated_file_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("log");
        let log = AccessLog::open(&file, LogFormat::Json).unwrap();
        let lines = |file: &Path| std::fs::read_to_string(file).unwrap_or_default().lines().count();
        let until = |what: &dyn Fn() -> bool| {
            let end = Instant::now() + Duration::from_secs(30);
            while !what() {
                assert!(Instant::now() < end, "the log was not written");
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        log.note(entry());
        until(&|| lines(&file) == 1);
        let rotated = dir.path().join("log.1");
        std::fs::rename(&file, &rotated).unwrap();
        log.reopen();
        until(&|| file.exists());
        log.note(entry());
        until(&|| lines(&file) == 1);
        assert_eq!(lines(&rotated), 1);
        let text = std::fs::read_to_string(&file).unwrap();
        let parsed: serde_json::Value = serde_json::from_str(text.trim()).unwrap();
        assert_eq!((&parsed["status"], &parsed["duration"]), (&200.into(), &1.5.into()));
    }
}
