//! Printing: lines for people, or JSON for programs.

use std::borrow::Cow;
use std::io::{ErrorKind, IsTerminal, Write};
use std::path::Path;

use forebay_daemon::Failure;
use serde::Serialize;

use crate::exit::Exit;

/// The exit code that a shell shows of a program that SIGPIPE (13) has ended.
const CLOSED_PIPE: u8 = 128 + 13;

#[derive(Debug, Clone, Copy)]
pub struct Output {
    pub json: bool,
}

impl Output {
    pub fn new(json: bool) -> Self {
        Self { json }
    }

    /// Prints a line on standard output. Ends the program if that is not possible: as SIGPIPE would if the reader has closed
    /// the pipe, else with an error. Success would say that all was done and shown.
    pub fn line(&self, text: impl AsRef<str>) {
        self.print(&harmless(text.as_ref()));
    }

    fn print(&self, text: &str) {
        let mut out = std::io::stdout().lock();
        let written = out.write_all(text.as_bytes()).and_then(|()| out.write_all(b"\n"));
        match written {
            Ok(()) => {}
            Err(e) if e.kind() == ErrorKind::BrokenPipe => forebay_daemon::end_process(CLOSED_PIPE),
            Err(e) => {
                self.note(format!("forebay: standard output: {e}"));
                forebay_daemon::end_process(Exit::Other as u8);
            }
        }
    }

    /// Prints a value as one line of JSON.
    pub fn json(&self, value: &impl Serialize) {
        match serde_json::to_string(value) {
            Ok(text) => self.print(&text),
            Err(error) => self.note(format!("cannot be shown as JSON: {error}")),
        }
    }

    /// Prints the mount that the following lines are about.
    pub fn heading(&self, mountpoint: &Path) {
        if self.json {
            self.json(&serde_json::json!({ "mountpoint": mountpoint }));
        } else {
            self.line(format!("{}:", mountpoint.display()));
        }
    }

    /// Prints a remark for people on standard error.
    pub fn note(&self, text: impl AsRef<str>) {
        // If standard error is closed, the remark is lost.
        let _ = writeln!(std::io::stderr(), "{}", harmless(text.as_ref()));
    }

    pub fn failure(&self, failure: &Failure) {
        if self.json {
            self.json(&serde_json::json!({ "error": failure, "exit": Exit::from(failure.kind) as u8 }));
        } else {
            // A line break in what failed, perhaps of a name, does not begin a line that looks like the remedy.
            let what = failure.what.replace('\n', "\n    ");
            self.note(format!("forebay: {}", Failure { what, ..failure.clone() }));
        }
    }

    /// Progress bars are for people at a terminal.
    pub fn animated(&self) -> bool {
        !self.json && std::io::stderr().is_terminal()
    }

    /// Prints rows in columns. Aligns cells that look like numbers to the right, and leaves the last column as it is.
    pub fn table(&self, rows: &[Vec<String>]) {
        let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |at: usize| rows.iter().filter_map(|r| r.get(at)).map(|c| c.chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in rows {
            let cells: Vec<String> = row.iter().enumerate().map(|(at, cell)| aligned(cell, at, &widths)).collect();
            self.line(cells.join("  ").trim_end());
        }
    }
}

/// Escapes the control characters that steer a terminal, whatever name of another user they came with.
fn harmless(text: &str) -> Cow<'_, str> {
    let steers = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(steers) {
        return Cow::Borrowed(text);
    }
    text.chars().flat_map(|c| if steers(c) { c.escape_default().collect() } else { vec![c] }).collect::<String>().into()
}

fn aligned(cell: &str, at: usize, widths: &[usize]) -> String {
    let width = widths[at];
    if at + 1 == widths.len() {
        cell.to_string()
    } else if cell.starts_with(|c: char| c.is_ascii_digit()) {
        format!("{cell:>width$}")
    } else {
        format!("{cell:<width$}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_does_not_steer_a_terminal() {
        assert_eq!(harmless("a\tb\nä"), "a\tb\nä");
        assert_eq!(harmless("a\x1b[2J\r\u{9b}1mb\x7f"), r"a\u{1b}[2J\r\u{9b}1mb\u{7f}");
    }
}
